"""Loading a checkpoint for the torch backend: device, dtype, packed weights, and a first look whether it runs."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM

from rakvctl.core.backends import packed
from rakvctl.core.backends.torch_hf import TorchBackend, keeps_all_positions
from rakvctl.core.errors import ModelError, UsageError, first_line
from rakvctl.core.models import ModelFiles


def load_backend(files: ModelFiles, device: str, dtype: str, vocab_size: int) -> TorchBackend:
    """Load a checkpoint for inference. `device` and `dtype` as on the command line, `auto` included.

    Raises ModelError where it cannot be loaded or run, UsageError for a device that is not there.
    """
    torch_device = pick_device(device)
    torch_dtype: torch.dtype | str = getattr(torch, dtype) if dtype != "auto" else "auto"
    if dtype == "auto" and torch_device.type == "cpu":
        torch_dtype = torch.float32
    model = _load_model(files, torch_dtype).to(torch_device)
    weight_bytes = _bytes_read_by_a_step(model)
    # Recurrent layers read the weights of their linear layers directly.
    is_packed = packed.can_pack(model.device, model.dtype) and keeps_all_positions(model.config)
    if is_packed:
        packed.pack_linears(model)
        packed.detach_from_checkpoint(model, files.location)
    make_backend = partial(
        TorchBackend,
        model_key=_model_key(files, model),
        vocab_size=min(vocab_size, model.config.get_text_config().vocab_size),
        weight_bytes=weight_bytes,
        digest=files.digest,
    )
    backend = make_backend(model)
    failure = _first_failure(backend)
    if is_packed and isinstance(failure, AttributeError):
        # Some kinds read a layer's weights themselves, past the layer.
        backend = make_backend(_load_model(files, torch_dtype))
        failure = _first_failure(backend)
    if failure is not None:
        raise ModelError(
            f"cannot run {files.name}: {first_line(failure)}",
            "its kind may need a cache of its own, or more memory than there is: take another model",
        ) from failure
    return backend


def _bytes_read_by_a_step(model: Any) -> int:
    """All weights but those of embeddings, of which one row is read; a matrix shared with the output layer is read."""
    head = model.get_output_embeddings()
    tables = {id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)}
    tables -= {id(head.weight)} if head is not None else set()
    return sum(weight.nbytes for weight in model.parameters() if id(weight) not in tables)


def _load_model(files: ModelFiles, dtype: torch.dtype | str) -> Any:
    try:
        with quiet_transformers():
            model, info = AutoModelForCausalLM.from_pretrained(
                files.location, dtype=dtype, local_files_only=True, trust_remote_code=False, output_loading_info=True
            )
        refuse_incomplete(info)
        return model.eval()
    except Exception as error:  # whatever transformers stumbles over in a checkpoint that is not as it should be
        raise ModelError(
            f"cannot load {files.name}: {first_line(error)}", "check that it is a complete causal model"
        ) from error


def _first_failure(backend: TorchBackend) -> Exception | None:
    """What goes wrong in a model's first two passes, or None: some kinds refuse any cache but their own.

    What transformers notes once about a kind, such as kernels that are not installed, it notes here, to nobody.
    """
    try:
        with quiet_transformers():
            backend.forward((0, 0), num_logits=1)
            backend.forward((0,), num_logits=1)
    except Exception as error:  # whatever a model stumbles over
        return error
    backend.cache.rollback(0)
    return None


def refuse_incomplete(loading_info: dict[str, Any]) -> None:
    """Raise ValueError where transformers would fill weights that a checkpoint lacks with random numbers."""
    lacking = [*loading_info["missing_keys"], *loading_info["mismatched_keys"]]
    if lacking:
        raise ValueError(f"{len(lacking)} of its weights are missing or of another shape")


def pick_device(name: str) -> torch.device:
    """The device of that name; `auto` takes a GPU where there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UsageError(f"device {name} cannot be used here", "use --device cpu, or auto") from error
    return device


def set_num_threads(num_threads: int) -> None:
    """Let torch compute with that many CPU threads."""
    torch.set_num_threads(num_threads)


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Keep progress bars and warnings of transformers off the terminal while something loads."""
    log = transformers.utils.logging
    verbosity, bars = log.get_verbosity(), log.is_progress_bar_enabled()
    log.set_verbosity_error()
    log.disable_progress_bar()
    try:
        yield
    finally:
        log.set_verbosity(verbosity)
        if bars:
            log.enable_progress_bar()


def _model_key(files: ModelFiles, model: Any) -> str:
    """Digest of what KV states in this process depend on.

    Files are named by path, size and time of change, not by content: entries live no longer than the process.
    """
    parts = [
        *files.identity,
        model.config.to_json_string(),
        str(model.dtype),
        model.device.type,
        torch.__version__,
        transformers.__version__,
    ]
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=16).hexdigest()
