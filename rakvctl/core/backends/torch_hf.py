"""The backend on torch and transformers: a causal model, its cache, and what differs between versions."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
import transformers
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from rakvctl.core.backends import position_limits
from rakvctl.core.backends.invariant import INVARIANT_ATTENTION, key_lengths
from rakvctl.core.errors import ModelError, no_numbers
from rakvctl.core.hardware import free_memory_bytes
from rakvctl.core.kv import BLOCK_TOKENS, TorchKVCache
from rakvctl.core.seams import EngineInfo, KVCache, KVSnapshot

_DEVICE_PREFILL_TOKENS = 2048


@dataclass(frozen=True, slots=True)
class TorchLogits:
    """Logits on their device, [num_positions, vocab_size]."""

    tensor: torch.Tensor

    def argmax(self) -> list[int]:
        """The best token of each position; of equal scores the lowest id. Raises RequestError without a best one."""
        best = self.tensor.argmax(dim=-1)
        # What is no number counts as the best of all.
        if not self.tensor.gather(-1, best[:, None]).isfinite().all():
            raise no_numbers()
        tokens: list[int] = best.tolist()
        return tokens

    def margins(self) -> list[float]:
        """The best score of each position less the second best."""
        best = self.tensor.float().topk(2, dim=-1).values
        margins: list[float] = (best[:, 0] - best[:, 1]).tolist()
        return margins

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

    def __init__(self, model: Any, model_key: str, vocab_size: int, weight_bytes: int = 0, digest: str = "") -> None:
        """`vocab_size`: ids from here on are padding and never chosen. The rest: see `EngineInfo`."""
        self._model = model
        self._weight_bytes = weight_bytes
        self._digest = digest
        self.vocab_size = vocab_size
        self._cache_argument = _cache_argument(model)
        self._takes_positions = "position_ids" in inspect.signature(model.forward).parameters
        self.model_key = model_key
        self.can_rollback = keeps_all_positions(model.config)
        num_layers = model.config.get_text_config(decoder=True).num_hidden_layers
        self._cache = TorchKVCache(num_layers, _key_lengths(model)) if self.can_rollback else ForwardOnlyCache(model)

    @property
    def cache(self) -> KVCache:
        """The states of the one sequence."""
        return self._cache

    @property
    def max_positions(self) -> int | None:
        """The number of positions the model was made for, where its config says so."""
        return position_limits.max_positions(self._model.config)

    @cached_property
    def prefix_stable_positions(self) -> int | None:
        """Measured on the model's rotary embeddings, where they are of a kind that looks at the length."""
        return position_limits.prefix_stable_positions(self._model, self.max_positions)

    @cached_property
    def recomputes_when_unstable(self) -> bool:
        """What transformers' `generate` does with this model."""
        length = self.prefix_stable_positions
        return length is not None and position_limits.recomputes_beyond(self._model, self._cache_argument, length)

    @property
    def prefill_chunk_tokens(self) -> int | None:
        """Whole blocks of keys on a CPU, which then skips those that a causal mask hides; more where passes are cheap.

        Recurrent models take a prompt in one pass: their passes over several tokens begin from an empty state.
        """
        if not self.can_rollback:
            return None
        return BLOCK_TOKENS if self._model.device.type == "cpu" else _DEVICE_PREFILL_TOKENS

    @property
    def info(self) -> EngineInfo:
        """Device, threads, dtype and versions as they are now."""
        device = self._model.device
        is_cuda = device.type == "cuda"
        attention = self._model.config._attn_implementation
        return EngineInfo(
            backend="torch, eager attention" if attention == "eager" else "torch",
            device=torch.cuda.get_device_name(device) if is_cuda else device.type,
            driver=f"CUDA {torch.version.cuda}" if is_cuda else torch.backends.cpu.get_cpu_capability(),
            num_threads=torch.get_num_threads(),
            dtype=str(self._model.dtype).removeprefix("torch."),
            versions=f"torch {torch.__version__}, transformers {transformers.__version__}",
            weight_bytes=self._weight_bytes,
            digest=self._digest,
        )

    def free_bytes(self) -> int | None:
        """What the device, or the machine around it, has left."""
        if self._model.device.type == "cuda":
            device = self._model.device
            # What torch keeps of freed blocks it gives again.
            kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
            return torch.cuda.mem_get_info(device)[0] + kept
        return free_memory_bytes()

    def memory_reader(self, num_bytes: int) -> Callable[[], None]:
        """Sums a buffer of that size, on all threads or cores."""
        buffer = torch.ones(num_bytes // 4, dtype=torch.float32, device=self._model.device)

        def read() -> None:
            # Turning the sum into a number waits for it.
            buffer.sum().item()

        return read

    def synchronize(self) -> None:
        """Wait for the device; a CPU is always done."""
        if self._model.device.type in ("cuda", "mps"):
            getattr(torch, self._model.device.type).synchronize()

    @torch.inference_mode()
    def forward(self, token_ids: Sequence[int], num_logits: int) -> TorchLogits:
        """Append tokens to the cache; logits of the last `num_logits`, [num_logits, vocab_size]."""
        self._cache.reserve(self._cache.length + len(token_ids))
        ids = torch.tensor([list(token_ids)], dtype=torch.int64, device=self._model.device)
        states = self._cache if isinstance(self._cache, TorchKVCache) else self._cache.states
        output = self._model(
            input_ids=ids,
            use_cache=True,
            logits_to_keep=num_logits,
            **self.position_arguments(self._cache.length, len(token_ids)),
            **{self._cache_argument: states},
        )
        self._cache.commit(len(token_ids))
        return TorchLogits(output.logits[0, -num_logits:, : self.vocab_size])

    def position_arguments(self, start: int, num_tokens: int) -> dict[str, torch.Tensor]:
        """Where the tokens of a pass stand, as transformers' `generate` tells a model that wants to be told.

        Left to themselves some kinds (RoBERTa) count padding tokens in one way behind a cache and otherwise without.
        """
        if not self._takes_positions:
            return {}
        return {"position_ids": torch.arange(start, start + num_tokens, device=self._model.device)[None]}

    @torch.inference_mode()
    def likeliest_after(self, before: int, token_ids: Sequence[int]) -> list[int]:
        """One pass over all of them, in which each is the second position and sees the first and itself only."""
        # A pass may be told which positions see which, and where each one stands.
        takes_any_mask = self._model.config._attn_implementation in (INVARIANT_ATTENTION, "sdpa", "eager")
        if not (self.can_rollback and takes_any_mask and self._takes_positions):
            return []
        device, num_tokens = self._model.device, len(token_ids) + 1
        positions = torch.ones(1, num_tokens, dtype=torch.int64, device=device)
        positions[0, 0] = 0
        hidden = torch.full((num_tokens, num_tokens), torch.finfo(self._model.dtype).min, dtype=self._model.dtype)
        mask = hidden.fill_diagonal_(0.0).index_fill_(1, torch.tensor(0), 0.0).to(device)
        ids = torch.tensor([[before, *token_ids]], dtype=torch.int64, device=device)
        output = self._model(
            input_ids=ids, position_ids=positions, attention_mask=mask[None, None], use_cache=False, logits_to_keep=0
        )
        return TorchLogits(output.logits[0, 1:, : self.vocab_size]).argmax()


def _cache_argument(model: Any) -> str:
    """The name by which this model's forward takes its cache: it changed over the versions of transformers."""
    parameters = inspect.signature(type(model).forward).parameters
    for name in ("cache", "past_key_values", "cache_params"):
        if name in parameters:
            return name
    raise ModelError(f"{type(model).__name__} takes no cache", "use a causal model that generates with a KV cache")


def _key_lengths(model: Any) -> tuple[int, ...]:
    """The lengths of keys that the model's attention wants to be given, if it cares."""
    if model.config._attn_implementation != INVARIANT_ATTENTION:
        return ()
    config = model.config.get_text_config(decoder=True)
    # Of some kinds (Gemma 4) layers differ, and each has a config of its own.
    layers = config.per_layer_config if getattr(config, "is_heterogeneous", False) else [config]
    head_dims = {getattr(layer, "head_dim", None) or layer.hidden_size // layer.num_attention_heads for layer in layers}
    return tuple(sorted(set.intersection(*(set(key_lengths(head_dim)) for head_dim in head_dims))))


def keeps_all_positions(config: Any) -> bool:
    """Whether every layer's states are plain keys and values by position (or the layer keeps none)."""
    plain = (DynamicLayer, DynamicSlidingWindowLayer)
    layers = DynamicCache(config=config).layers
    return all(type(layer) in plain or type(layer).__name__ == "DummyLayer" for layer in layers)
