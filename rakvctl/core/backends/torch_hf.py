"""The backend on torch and transformers: a causal model, its cache, and what differs between versions."""

import hashlib
import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from rakvctl.core.backends import packed
from rakvctl.core.errors import ModelError, UsageError, first_line
from rakvctl.core.kv import TorchKVCache
from rakvctl.core.models import ModelFiles
from rakvctl.core.types import KVCache, KVSnapshot


@dataclass(frozen=True, slots=True)
class TorchLogits:
    """Logits on their device, [num_positions, vocab_size]."""

    tensor: torch.Tensor

    def argmax(self) -> list[int]:
        """The best token of each position; of equal scores the lowest id."""
        best: list[int] = self.tensor.argmax(dim=-1).tolist()
        return best

    def numpy(self) -> np.ndarray:
        """The scores as float32 on the CPU."""
        array: np.ndarray = self.tensor.float().cpu().numpy()
        return array


class ForwardOnlyCache:
    """The model's own cache, where it cannot be rolled back: recurrent states hold no positions to forget."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.length = 0
        self.states = DynamicCache(config=model.config)

    def reserve(self, num_tokens: int) -> None:
        """Nothing to do: these states do not grow by position, or grow by themselves."""

    def commit(self, num_tokens: int) -> None:
        """Count `num_tokens` more positions."""
        self.length += num_tokens

    def rollback(self, length: int) -> None:
        """Only all or nothing can be forgotten; all, also where a failed pass left states behind it."""
        if length == 0:
            self.length = 0
            self.states = DynamicCache(config=self._model.config)
        elif length != self.length:
            raise ValueError("recurrent states cannot be rolled back")

    def num_bytes(self, num_tokens: int) -> int:
        raise NotImplementedError("recurrent states are not stored")

    def snapshot(self, num_tokens: int) -> KVSnapshot:
        raise NotImplementedError("recurrent states are not stored")

    def restore(self, snapshot: KVSnapshot, num_tokens: int) -> None:
        raise NotImplementedError("recurrent states are not restored")


class TorchBackend:
    """A transformers causal model in evaluation mode, batch size one."""

    def __init__(self, model: Any, model_key: str, vocab_size: int) -> None:
        """`vocab_size`: ids from here on are padding and never chosen."""
        self._model = model
        self._vocab_size = vocab_size
        self._cache_argument = _cache_argument(model)
        self.model_key = model_key
        self.can_rollback = keeps_all_positions(model.config)
        num_layers = model.config.get_text_config(decoder=True).num_hidden_layers
        self._cache = TorchKVCache(num_layers) if self.can_rollback else ForwardOnlyCache(model)

    @property
    def cache(self) -> KVCache:
        """The states of the one sequence."""
        return self._cache

    @property
    def max_positions(self) -> int | None:
        """The number of positions the model was made for, where its config says so."""
        limit = getattr(self._model.config.get_text_config(decoder=True), "max_position_embeddings", None)
        return limit if isinstance(limit, int) and limit > 0 else None

    @torch.inference_mode()
    def forward(self, token_ids: Sequence[int], num_logits: int) -> TorchLogits:
        """Append tokens to the cache; logits of the last `num_logits`, [num_logits, vocab_size]."""
        self._cache.reserve(self._cache.length + len(token_ids))
        ids = torch.tensor([list(token_ids)], dtype=torch.int64, device=self._model.device)
        states = self._cache if isinstance(self._cache, TorchKVCache) else self._cache.states
        output = self._model(input_ids=ids, use_cache=True, logits_to_keep=num_logits, **{self._cache_argument: states})
        self._cache.commit(len(token_ids))
        return TorchLogits(output.logits[0, -num_logits:, : self._vocab_size])


def load_backend(files: ModelFiles, device: str, dtype: str, vocab_size: int) -> TorchBackend:
    """Load a checkpoint for inference. `device` and `dtype` as on the command line, `auto` included.

    Raises ModelError where it cannot be loaded, UsageError for a device that is not there.
    """
    torch_device = pick_device(device)
    torch_dtype: torch.dtype | str = getattr(torch, dtype) if dtype != "auto" else "auto"
    if dtype == "auto" and torch_device.type == "cpu":
        torch_dtype = torch.float32
    model = _load_model(files, torch_dtype).to(torch_device)
    # Recurrent layers read the weights of their linear layers directly.
    if packed.can_pack(model.device, model.dtype) and keeps_all_positions(model.config):
        packed.pack_linears(model)
        packed.detach_from_checkpoint(model, files.location)
        if not _runs(model):
            model = _load_model(files, torch_dtype)
    return TorchBackend(model, _model_key(files, model), min(vocab_size, model.config.get_text_config().vocab_size))


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


@torch.inference_mode()
def _runs(model: Any) -> bool:
    """Whether a packed model still computes: some kinds read a layer's weights themselves, past the layer."""
    try:
        model(input_ids=torch.zeros((1, 1), dtype=torch.int64), use_cache=False)
    except AttributeError:
        return False
    return True


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


def _cache_argument(model: Any) -> str:
    """The name by which this model's forward takes its cache: it changed over the versions of transformers."""
    parameters = inspect.signature(type(model).forward).parameters
    for name in ("cache", "past_key_values", "cache_params"):
        if name in parameters:
            return name
    raise ModelError(f"{type(model).__name__} takes no cache", "use a causal model that generates with a KV cache")


def keeps_all_positions(config: Any) -> bool:
    """Whether every layer's states are plain keys and values by position (or the layer keeps none)."""
    plain = (DynamicLayer, DynamicSlidingWindowLayer)
    layers = DynamicCache(config=config).layers
    return all(type(layer) in plain or type(layer).__name__ == "DummyLayer" for layer in layers)


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
