"""Which engine runs a model, and how its models are found and loaded. No engine is imported before it is chosen."""

import importlib.util
import platform
from pathlib import Path
from typing import Protocol

from rakvctl.core.errors import ModelError, UsageError, first_line
from rakvctl.core.gguf_copy import is_gguf
from rakvctl.core.models import ModelFiles, Notify, Role
from rakvctl.core.seams import Backend
from rakvctl.core.text import TextCodec

TORCH, LLAMA_CPP = "torch", "llama-cpp"
INSTALL_LLAMA_CPP = "pip install 'rakvctl[llama-cpp]'"


class EngineChoice(Protocol):
    """What the command line says of engines; a value is None, and a name `auto`, where it says nothing."""

    @property
    def target(self) -> str: ...
    @property
    def backend(self) -> str: ...
    @property
    def device(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def num_threads(self) -> int | None: ...
    @property
    def kv_type(self) -> str | None: ...
    @property
    def context_size(self) -> int | None: ...
    @property
    def exact(self) -> bool: ...


class Loader(Protocol):
    """One engine's way from names to loaded models. Everything raises ModelError where that does not go."""

    @property
    def ways(self) -> tuple[str, ...]:
        """In which ways it can compute, the usual one first; --exact takes the first with the same bits always."""
        ...

    def find(self, name: str, role: Role, notify: Notify) -> ModelFiles:
        """The files of that name; `notify` hears what takes long."""
        ...

    def load_codec(self, files: ModelFiles) -> TextCodec:
        """The model's tokenizer, and the tokens that end a sequence."""
        ...

    def load(self, files: ModelFiles, vocab_size: int, way: str = "auto", content_digest: str = "") -> Backend:
        """The model, computing in one of the `ways`; ids from `vocab_size` on are padding.

        `content_digest`: names the checkpoint by every byte, where its states are to outlive the process.
        """
        ...


def choose_backend(choice: EngineChoice) -> str:
    """The name of the engine: `auto` is llama.cpp for a GGUF file on a CPU where it is installed, else torch.

    Raises UsageError where options contradict each other or the engine is not installed.
    """
    if choice.backend == "auto":
        fits = is_gguf(choice.target) and choice.device in ("auto", "cpu") and choice.dtype == "auto"
        backend = LLAMA_CPP if fits and _has_llama_cpp() and (choice.device == "cpu" or not _has_gpu()) else TORCH
    else:
        backend = choice.backend
    if backend == TORCH:
        _refuse_options_of_llama_cpp(choice)
    else:
        _refuse_options_of_torch(choice)
    return backend


def make_loader(choice: EngineChoice) -> Loader:
    """The loader of the chosen engine. Raises UsageError as `choose_backend` does, ModelError for a broken engine."""
    if choose_backend(choice) == LLAMA_CPP:
        try:
            from rakvctl.core.backends.llama_load import LlamaLoader
        except (ImportError, OSError, RuntimeError) as error:
            raise ModelError(
                f"llama.cpp cannot be loaded: {first_line(error)}", f"run: {INSTALL_LLAMA_CPP}; or take --backend torch"
            ) from error
        return LlamaLoader(choice.num_threads, choice.kv_type, choice.context_size, choice.exact)
    from rakvctl.core.backends.torch_loader import TorchLoader

    return TorchLoader(choice.device, choice.dtype, choice.num_threads)


def _refuse_options_of_llama_cpp(choice: EngineChoice) -> None:
    if choice.kv_type is not None or choice.context_size is not None:
        raise UsageError(
            "--kv-type and --context-size are for llama.cpp, and torch runs this model",
            f"give --backend llama-cpp and a .gguf file, or leave them out; llama.cpp comes with {INSTALL_LLAMA_CPP}",
        )


def _refuse_options_of_torch(choice: EngineChoice) -> None:
    if not _has_llama_cpp():
        raise UsageError("llama.cpp is not installed", f"run: {INSTALL_LLAMA_CPP}")
    if choice.dtype != "auto":
        raise UsageError(
            f"llama.cpp computes in the file's own number types, not in {choice.dtype}",
            "leave --dtype out, or take --backend torch",
        )
    if choice.device not in ("auto", "cpu"):
        raise UsageError(f"--backend llama-cpp runs on the CPU, not on {choice.device}", "take --backend torch there")


def _has_llama_cpp() -> bool:
    return importlib.util.find_spec("llama_cpp") is not None


def _has_gpu() -> bool:
    """Whether torch would find one. It is asked, which takes seconds, only where there are signs of one."""
    is_apple = platform.system() == "Darwin" and platform.machine() == "arm64"
    if not is_apple and not any(Path(sign).exists() for sign in ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")):
        return False
    import torch

    return torch.cuda.is_available() or torch.backends.mps.is_available()
