"""The KV states of one sequence in a llama.cpp context: cells that belong to sequences.

Ours is sequence 0; sequence 1 is for copying a part of it. States are copied as llama.cpp itself writes them.
"""

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np
from llama_cpp import llama_cpp as api

from rakvctl.core.backends.llama_model import ContextOptions, LlamaModel
from rakvctl.core.errors import DamagedEntryError
from rakvctl.core.seams import STATE_BLOCK_TOKENS, KVSnapshot, state_blocks

# Contexts have room for a multiple of so many positions.
_GROWTH_TOKENS = 512
_OURS, _COPY = 0, 1
# llama.cpp means by it: to the end of the sequence.
_TO_THE_END = -1


@dataclass(frozen=True, slots=True)
class LlamaSnapshot:
    """States as llama.cpp writes them, one array of bytes for each block of positions."""

    blocks: tuple[np.ndarray, ...]
    num_tokens: int

    @property
    def num_bytes(self) -> int:
        """Memory held by the copies."""
        return sum(block.nbytes for block in self.blocks)

    def arrays(self, start: int, end: int) -> list[np.ndarray]:
        """The bytes of one block."""
        return [self.blocks[start // STATE_BLOCK_TOKENS]]


class LlamaCache:
    """The `KVCache` of one sequence in a context, which is made anew, larger, when there is no room left."""

    def __init__(self, model: LlamaModel, options: ContextOptions) -> None:
        self._model = model
        self._options = options
        self._capacity = 0
        self.length = 0
        self.reserve(_GROWTH_TOKENS)

    def reserve(self, num_tokens: int) -> None:
        """Make room for `num_tokens` positions, keeping what is there.

        Raises ModelError where there is none: the context in use, and what it holds, then stay.
        """
        if num_tokens <= self._capacity:
            return
        capacity, length = -(-num_tokens // _GROWTH_TOKENS) * _GROWTH_TOKENS, self.length
        if not length:
            self._move(capacity)
        elif self._model.keeps_all_positions:
            kept = self.snapshot(length)
            self._move(capacity)
            self.restore(kept, length)
        else:
            # Such states cannot be taken apart.
            states = self._states(_OURS)
            self._move(capacity)
            read = api.llama_state_seq_set_data(self.context.pointer, _bytes_of(states), states.nbytes, _OURS)
            if read != states.nbytes:
                raise RuntimeError(f"llama.cpp read {read} of {states.nbytes} bytes of states")
            self.length = length

    def _move(self, capacity: int) -> None:
        """Go on in a new context, with nothing; the old one is freed once the new one is there."""
        self.context = self._model.make_context(self._options, capacity, num_sequences=2)
        self._capacity, self.length = capacity, 0

    def commit(self, num_tokens: int) -> None:
        """Count `num_tokens` positions as cached that a pass has just written."""
        self.length += num_tokens

    def num_bytes(self, num_tokens: int) -> int:
        """Memory that a snapshot of `num_tokens` positions takes; the few bytes around each block left out."""
        if not self.length:
            return 0
        return int(api.llama_state_seq_get_size(self.context.pointer, _OURS)) // self.length * num_tokens

    def rollback(self, length: int) -> None:
        """Forget all positions from `length` on; states that cannot forget a part can still forget all."""
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot roll back to {length} of {self.length} positions")
        if length == 0:
            api.llama_memory_clear(self.context.memory, False)
        elif length < self.length and not api.llama_memory_seq_rm(self.context.memory, _OURS, length, _TO_THE_END):
            raise ValueError(f"these states cannot be rolled back to {length} positions")
        self.length = length

    def snapshot(self, num_tokens: int) -> LlamaSnapshot:
        """Copy the first `num_tokens` positions."""
        if not 0 < num_tokens <= self.length:
            raise ValueError(f"cannot copy {num_tokens} of {self.length} positions")
        blocks = tuple(self._copied(start, end) for start, end in state_blocks(num_tokens))
        return LlamaSnapshot(blocks, num_tokens)

    def _copied(self, start: int, end: int) -> np.ndarray:
        api.llama_memory_seq_cp(self.context.memory, _OURS, _COPY, start, end)
        try:
            return self._states(_COPY)
        finally:
            api.llama_memory_seq_rm(self.context.memory, _COPY, 0, _TO_THE_END)

    def _states(self, sequence: int) -> np.ndarray:
        """All of a sequence, as llama.cpp writes it."""
        states = np.empty(api.llama_state_seq_get_size(self.context.pointer, sequence), dtype=np.uint8)
        written = api.llama_state_seq_get_data(self.context.pointer, _bytes_of(states), states.nbytes, sequence)
        if written != states.nbytes:
            raise RuntimeError(f"llama.cpp wrote {written} of {states.nbytes} bytes of states")
        return states

    def restore(self, snapshot: KVSnapshot, num_tokens: int) -> None:
        """Replace the content by the first `num_tokens` positions of a snapshot of the same model."""
        if not 0 <= num_tokens <= snapshot.num_tokens:
            raise ValueError(f"cannot restore {num_tokens} of {snapshot.num_tokens} positions")
        self.rollback(0)
        self.reserve(min(snapshot.num_tokens, num_tokens + STATE_BLOCK_TOKENS))
        for start, end in state_blocks(snapshot.num_tokens):
            if start < num_tokens:
                try:
                    self._append(snapshot.arrays(start, end), start, end)
                except DamagedEntryError:
                    self.rollback(0)
                    raise
        self.rollback(num_tokens)

    def _append(self, arrays: list[np.ndarray], start: int, end: int) -> None:
        """Add a block after what is there. Raises DamagedEntryError where it is not these positions of this model."""
        if len(arrays) != 1 or arrays[0].dtype != np.uint8 or arrays[0].ndim != 1:
            raise DamagedEntryError("not states of llama.cpp")
        states = np.require(arrays[0], requirements=("C", "W"))
        read = api.llama_state_seq_set_data(self.context.pointer, _bytes_of(states), states.nbytes, _COPY)
        first, last = (
            find(self.context.memory, _COPY) for find in (api.llama_memory_seq_pos_min, api.llama_memory_seq_pos_max)
        )
        if (read, first, last) != (states.nbytes, start, end - 1):
            raise DamagedEntryError("not this model's states")
        api.llama_memory_seq_cp(self.context.memory, _COPY, _OURS, start, end)
        api.llama_memory_seq_rm(self.context.memory, _COPY, 0, _TO_THE_END)
        self.length = end


def _bytes_of(array: np.ndarray) -> Any:
    return array.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
