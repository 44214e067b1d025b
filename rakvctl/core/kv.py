"""KV states on torch: buffers allocated once, and a length. Appending writes in place, rolling back changes a number.

The cache is handed to a transformers model as its own kind of cache, so the model's code stays as it is. Every layer
keeps every position, those of sliding-window attention too: the attention mask hides what lies outside the window, and
a rollback is exact at any length.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from rakvctl.core.errors import DamagedEntryError
from rakvctl.core.seams import KVSnapshot, state_blocks

# How many keys the fused CPU attention works through at a time.
BLOCK_TOKENS = 512
# Buffers grow by this many positions or more, so that a few more tokens do not copy everything.
_GROWTH_TOKENS = 64


@dataclass(frozen=True, slots=True)
class TorchSnapshot:
    """Copies of keys and values, one pair a layer, each [num_heads, num_tokens, head_dim].

    None stands for a layer that keeps no states of its own (it has no attention, or shares another layer's).
    """

    layers: tuple[tuple[torch.Tensor, torch.Tensor] | None, ...]
    num_tokens: int

    @property
    def num_bytes(self) -> int:
        """Memory held by the copies."""
        return sum(states.nbytes for layer in self.layers if layer is not None for states in layer)

    def arrays(self, start: int, end: int) -> list[np.ndarray]:
        """Keys and values of each layer that keeps some, [num_heads, end - start, head_dim]; bfloat16 as its bits."""
        kept = (states[:, start:end].cpu() for layer in self.layers if layer is not None for states in layer)
        return [(states.view(torch.int16) if states.dtype == torch.bfloat16 else states).numpy() for states in kept]


class _Layer(CacheLayerMixin):  # type: ignore[misc]
    """Keys and values of one layer, [1, num_heads, capacity, head_dim]; allocated at the first write."""

    is_sliding = False
    is_croppable = True

    def __init__(self, cache: "TorchKVCache") -> None:
        super().__init__()
        self._cache = cache

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        capacity = self._cache.capacity
        self.keys, self.values = _zeros_like(key_states, capacity), _zeros_like(value_states, capacity)
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write states [1, num_heads, n, head_dim] after the cached ones; return views of all of them."""
        start = self._cache.length
        end = start + key_states.shape[-2]
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.keys[:, :, start:end] = key_states
        self.values[:, :, start:end] = value_states
        visible, _ = self.get_mask_sizes(key_states.shape[-2])
        return self.keys[:, :, :visible], self.values[:, :, :visible]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        length = self._cache.length + query_length
        return self._cache.num_visible(length), 0

    def get_seq_length(self) -> int:
        return self._cache.length

    def get_max_length(self) -> int:
        return -1

    def grow(self, capacity: int, length: int) -> None:
        """Move the first `length` positions into larger buffers; without memory for them nothing changes."""
        if self.is_initialized and self.keys.shape[-2] < capacity:
            keys, values = _zeros_like(self.keys, capacity), _zeros_like(self.values, capacity)
            keys[:, :, :length] = self.keys[:, :, :length]
            values[:, :, :length] = self.values[:, :, :length]
            self.keys, self.values = keys, values

    def bytes_per_token(self) -> int:
        """Memory that keys and values of one position take; 0 before the first write."""
        return (self.keys.nbytes + self.values.nbytes) // self.keys.shape[-2] if self.is_initialized else 0


def _zeros_like(states: torch.Tensor, capacity: int) -> torch.Tensor:
    batch, num_heads, _, head_dim = states.shape
    return states.new_zeros((batch, num_heads, capacity, head_dim))


class TorchKVCache(Cache):  # type: ignore[misc]
    """The `KVCache` of one sequence on torch.

    A forward pass writes behind `length` and `commit` then moves `length`, so a pass that fails leaves no trace.
    """

    def __init__(self, num_layers: int, key_lengths: tuple[int, ...] = ()) -> None:
        """`key_lengths`: hand out keys and values up to one of these lengths behind whole blocks, the last of them a
        block; zeros or stale states come after those that count. None given: only those that count.
        """
        self._key_lengths = key_lengths
        self.length = 0
        self.capacity = self.num_visible(_GROWTH_TOKENS)
        super().__init__(layers=[_Layer(self) for _ in range(num_layers)])

    @torch.inference_mode()
    def reserve(self, num_tokens: int) -> None:
        """Make room for `num_tokens` positions, keeping what is there. Raises RuntimeError where memory lacks."""
        if num_tokens > self.capacity:
            capacity = self.num_visible(-(-num_tokens // _GROWTH_TOKENS) * _GROWTH_TOKENS)
            # Layer by layer, so that old and new buffers of one layer only exist at a time.
            for layer in self.layers:
                layer.grow(capacity, self.length)
            # Only now: had a layer found no memory, the others' larger buffers would do no harm.
            self.capacity = capacity

    def num_visible(self, length: int) -> int:
        """How many positions attention is given when `length` of them count."""
        if not self._key_lengths:
            return length
        whole = (length - 1) // BLOCK_TOKENS * BLOCK_TOKENS
        return whole + next(size for size in self._key_lengths if size >= length - whole)

    def commit(self, num_tokens: int) -> None:
        """Count `num_tokens` freshly written positions as cached."""
        self.length += num_tokens

    def rollback(self, length: int) -> None:
        """Forget all positions from `length` on."""
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot roll back to {length} of {self.length} positions")
        self.length = length

    def num_bytes(self, num_tokens: int) -> int:
        """Memory that a snapshot of `num_tokens` positions takes."""
        bytes_per_token: int = sum(layer.bytes_per_token() for layer in self.layers)
        return bytes_per_token * num_tokens

    @torch.inference_mode()
    def snapshot(self, num_tokens: int) -> TorchSnapshot:
        """Copy the first `num_tokens` positions."""
        if not 0 < num_tokens <= self.length:
            raise ValueError(f"cannot copy {num_tokens} of {self.length} positions")
        layers = tuple(
            (layer.keys[0, :, :num_tokens].clone(), layer.values[0, :, :num_tokens].clone())
            if layer.is_initialized
            else None
            for layer in self.layers
        )
        return TorchSnapshot(layers=layers, num_tokens=num_tokens)

    @torch.inference_mode()
    def restore(self, snapshot: KVSnapshot, num_tokens: int) -> None:
        """Replace the content by the first `num_tokens` positions of a snapshot of the same model."""
        if not 0 <= num_tokens <= snapshot.num_tokens:
            raise ValueError(f"cannot restore {num_tokens} of {snapshot.num_tokens} positions")
        self.rollback(0)
        self.reserve(num_tokens)
        if not isinstance(snapshot, TorchSnapshot):
            self._restore_arrays(snapshot, num_tokens)
            return
        for layer, states in zip(self.layers, snapshot.layers, strict=True):
            if states is not None:
                keys, values = states
                if not layer.is_initialized:
                    layer.lazy_initialization(keys[None], values[None])
                layer.keys[0, :, :num_tokens] = keys[:, :num_tokens]
                layer.values[0, :, :num_tokens] = values[:, :num_tokens]
        self.length = num_tokens

    def _restore_arrays(self, snapshot: KVSnapshot, num_tokens: int) -> None:
        """Copy states from elsewhere block by block, each straight into the buffers."""
        buffers = [states for layer in self.layers if layer.is_initialized for states in (layer.keys, layer.values)]
        for start, end in state_blocks(snapshot.num_tokens):
            count = min(end, num_tokens) - start
            if count <= 0:
                break
            arrays = snapshot.arrays(start, end)
            if not buffers or len(arrays) != len(buffers):
                raise DamagedEntryError(f"{len(arrays)} arrays of states for {len(buffers)}")
            for buffer, array in zip(buffers, arrays, strict=True):
                buffer[0, :, start : start + count] = _fitting(array, buffer, end - start)[:, :count]
        self.length = num_tokens


def _fitting(array: np.ndarray, buffer: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """An array of a file as states for a buffer. Raises DamagedEntryError where type or shape are others."""
    states = torch.from_numpy(np.require(array, requirements="W"))
    if buffer.dtype == torch.bfloat16 and states.dtype == torch.int16:
        states = states.view(torch.bfloat16)
    _, num_heads, _, head_dim = buffer.shape
    if states.dtype != buffer.dtype or states.shape != (num_heads, num_tokens, head_dim):
        raise DamagedEntryError(f"states {tuple(states.shape)} of {states.dtype} do not fit the model")
    return states
