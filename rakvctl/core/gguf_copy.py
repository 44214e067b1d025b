"""GGUF files as checkpoints: reading one takes half a minute, so the dequantized copy is kept in the cache."""

import hashlib
import shutil
import tempfile
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path

import platformdirs

from rakvctl.core.errors import ModelError, first_line


def file_identity(path: Path) -> str:
    """Path, size and time of change: what tells a file from its next version without reading it."""
    status = path.stat()
    return f"{path.resolve()}:{status.st_size}:{status.st_mtime_ns}"


def place(path: Path) -> Path:
    """The directory for the converted copy of a GGUF file: a name for its path, size and time of change."""
    digest = hashlib.blake2b(file_identity(path).encode(), digest_size=8).hexdigest()
    return platformdirs.user_cache_path("rakvctl") / "models" / f"{path.stem}-{digest}"


def convert(path: Path, destination: Path) -> None:
    """Write a float32 safetensors checkpoint with its tokenizer; it appears in one piece or not at all.

    Raises ModelError where the file cannot be read or the copy cannot be written.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    from rakvctl.core.backends.torch_load import quiet_transformers, refuse_incomplete

    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(prefix=".converting-", dir=destination.parent))
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
            model.save_pretrained(unfinished)
            tokenizer.save_pretrained(unfinished)
        unfinished.rename(destination)
    except Exception as error:  # whatever transformers stumbles over in a file that is not as it should be
        if destination.is_dir():
            return  # another process was faster
        raise ModelError(
            f"cannot convert {path.name}: {first_line(error)}", "check that the file is complete and of a known kind"
        ) from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
