"""Loading a checkpoint for the torch backend: device, dtype, packed weights, and a first look whether it runs."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import cycle, islice
from typing import Any

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM

from rakvctl.core.backends import packed
from rakvctl.core.backends.invariant import use_invariant_attention
from rakvctl.core.backends.torch_hf import TorchBackend, keeps_all_positions
from rakvctl.core.errors import ModelError, UsageError, first_line
from rakvctl.core.hardware import num_cores, processor_name
from rakvctl.core.models import ModelFiles

# With a cache and without, logits differ by rounding alone: by this share of the largest, by bytes of the dtype.
_PROBE_TOLERANCE = {8: 1e-3, 4: 1e-3, 2: 0.1}
_PROBE_TOKENS = 7


def load_backend(
    files: ModelFiles, device: str, dtype: str, vocab_size: int, attention: str = "auto", content_digest: str = ""
) -> TorchBackend:
    """Load a checkpoint for inference. `device` and `dtype` as on the command line, `auto` included.

    `attention`: one of transformers' implementations; `auto` is the fastest that is known to work. `content_digest`:
    names the checkpoint by every byte, where its states are to outlive the process.

    Raises ModelError where it cannot be loaded or run, UsageError for a device that is not there.
    """
    torch_device = pick_device(device)
    torch_dtype: torch.dtype | str = getattr(torch, dtype) if dtype != "auto" else "auto"
    if dtype == "auto" and torch_device.type == "cpu":
        torch_dtype = torch.float32
    model = _load_model(files, torch_dtype, attention).to(torch_device)
    weight_bytes = _bytes_read_by_a_step(model)
    # Recurrent layers read the weights of their linear layers directly.
    is_packed = packed.can_pack(model.device, model.dtype) and keeps_all_positions(model.config)
    if is_packed:
        packed.pack_linears(model)
        if attention == "auto":
            use_invariant_attention(model)
        packed.detach_from_checkpoint(model, files.location)
    content = content_digest or "\0".join(files.identity)
    make_backend = partial(
        TorchBackend,
        vocab_size=min(vocab_size, model.config.get_text_config().vocab_size),
        weight_bytes=weight_bytes,
        digest=files.digest,
    )
    backend = make_backend(model, _model_key(content, model))
    failure = _first_failure(backend, model)
    if is_packed and failure is not None:
        # Some kinds read a layer's weights themselves, past the layer, or mean more by attention than ours does.
        model = _load_model(files, torch_dtype, attention)
        backend = make_backend(model, _model_key(content, model))
        failure = _first_failure(backend, model)
    if failure is not None:
        raise ModelError(
            f"cannot run {files.name}: {first_line(failure)}",
            "its kind may need a cache of its own, or more memory than there is: take another model",
        ) from failure
    if backend.prefix_stable_positions is not None:
        # Entries on a disk may be of a version that stored longer sequences, too.
        backend.model_key += f"-{backend.prefix_stable_positions}"
    return backend


def _bytes_read_by_a_step(model: Any) -> int:
    """All weights but those of embeddings, of which one row is read; a matrix shared with the output layer is read."""
    head = model.get_output_embeddings()
    tables = {id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)}
    tables -= {id(head.weight)} if head is not None else set()
    return sum(weight.nbytes for weight in model.parameters() if id(weight) not in tables)


def _load_model(files: ModelFiles, dtype: torch.dtype | str, attention: str) -> Any:
    try:
        with quiet_transformers():
            model, info = AutoModelForCausalLM.from_pretrained(
                files.location,
                dtype=dtype,
                attn_implementation=None if attention == "auto" else attention,
                local_files_only=True,
                trust_remote_code=False,
                output_loading_info=True,
            )
        refuse_incomplete(info)
        return model.eval()
    except Exception as error:  # whatever transformers stumbles over in a checkpoint that is not as it should be
        raise ModelError(
            f"cannot load {files.name}: {first_line(error)}", "check that it is a complete causal model"
        ) from error


def _first_failure(backend: TorchBackend, model: Any) -> Exception | None:
    """What goes wrong in a model's first passes, or None.

    Some kinds refuse any cache but their own; others (encoders above all) take it and compute something else. What
    transformers notes once about a kind, such as kernels that are not installed, it notes here, to nobody.
    """
    ids = _probe_ids(model, backend.vocab_size)
    pieces = (ids[:4], ids[4:5], ids[5:]) if backend.can_rollback else (ids[:-1], ids[-1:])
    try:
        with quiet_transformers(), torch.inference_mode():
            tokens = torch.tensor([ids], device=model.device)
            positions = backend.position_arguments(0, len(ids))
            whole = model(input_ids=tokens, use_cache=False, **positions).logits[0, -1].float()
            for piece in pieces:
                logits = backend.forward(piece, num_logits=1)
            # Measured now, so that an error in it is caught here too.
            _ = backend.recomputes_when_unstable
    except Exception as error:  # whatever a model stumbles over
        return error
    backend.cache.rollback(0)
    difference = (logits.tensor[0].float() - whole[: logits.tensor.shape[1]]).abs().max() / whole.abs().max()
    if not difference <= _PROBE_TOLERANCE[model.dtype.itemsize]:
        return ValueError("with its KV cache it computes something else than without")
    return None


def _probe_ids(model: Any, vocab_size: int) -> tuple[int, ...]:
    """Tokens of plain text: of some kinds, special ones change which positions the others have, or are masked."""
    named = model.config.get_text_config(decoder=True).to_dict().items()
    special = {token for name, value in named if name.endswith("_token_id") for token in np.atleast_1d(value).tolist()}
    plain = [token for token in range(vocab_size) if token not in special][:_PROBE_TOKENS]
    return tuple(islice(cycle(plain or range(vocab_size)), _PROBE_TOKENS))


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


def set_num_threads(num_threads: int | None) -> None:
    """Let torch compute with that many CPU threads; None: as it does, but on no more than this process has cores."""
    if num_threads is None and torch.get_num_threads() > (most := num_cores()):
        num_threads = most  # torch knows nothing of quotas
    if num_threads is not None:
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


def _model_key(content: str, model: Any) -> str:
    """Digest of whatever the bits of KV states depend on.

    `content` names the files: by path, size and time of change where states live no longer than the process.
    """
    parts = [
        content,
        model.config.to_json_string(),
        model.config._attn_implementation,
        str([type(module).__name__ for module in model.modules()]),
        str(model.dtype),
        model.device.type,
        torch.__version__,
        transformers.__version__,
        processor_name(),
        torch.backends.cpu.get_cpu_capability(),
        str(torch.get_num_threads()),
    ]
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=16).hexdigest()
