"""The seam behind which an engine stands: what the rest of the core asks of a model and of its KV states.

No tensors are seen here, so that an engine whose states are not torch's fits.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import numpy as np


# Gives seconds, as `time.perf_counter` does.
Clock = Callable[[], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """What the times of a loaded model depend on, beside the processor. `driver` and `versions` are for people to read.

    `weight_bytes` are read once a step; `digest` names the checkpoint by its content.
    """

    backend: str
    device: str
    driver: str
    num_threads: int
    dtype: str
    versions: str
    weight_bytes: int
    digest: str


class Logits(Protocol):
    """Next-token scores of one or more positions, wherever they live; [num_positions, vocab_size]."""

    def argmax(self) -> list[int]:
        """The best token of each position; of equal scores the lowest id. Raises RequestError without a best one."""
        ...

    def margins(self) -> list[float]:
        """How far the best score of each position is above the second best."""
        ...

    def numpy(self) -> "np.ndarray":
        """The scores as float32, [num_positions, vocab_size]."""
        ...


# States are written to files and read from them in blocks of so many positions.
STATE_BLOCK_TOKENS = 128


def state_blocks(num_tokens: int) -> Iterator[tuple[int, int]]:
    """Where each block of so many positions begins and ends; the last one may be shorter than the others."""
    for start in range(0, num_tokens, STATE_BLOCK_TOKENS):
        yield start, min(start + STATE_BLOCK_TOKENS, num_tokens)


class KVSnapshot(Protocol):
    """A copy of the KV states of the first `num_tokens` positions, in memory or in a file."""

    @property
    def num_tokens(self) -> int: ...

    @property
    def num_bytes(self) -> int:
        """Memory held."""
        ...

    def arrays(self, start: int, end: int) -> "list[np.ndarray]":
        """The states of one block of positions as plain arrays, in the order in which the model keeps them.

        Raises DamagedEntryError where they are in a file that is not as it was written.
        """
        ...


class KVCache(Protocol):
    """The KV states of one sequence, owned by a backend and appended to by its forward pass."""

    @property
    def length(self) -> int:
        """Positions that are filled and valid."""
        ...

    def reserve(self, num_tokens: int) -> None:
        """Make room for `num_tokens` positions in all, keeping what is there."""
        ...

    def num_bytes(self, num_tokens: int) -> int:
        """Memory that a snapshot of `num_tokens` positions takes; 0 before the first forward pass."""
        ...

    def rollback(self, length: int) -> None:
        """Forget all positions from `length` on; `length` is at most the present one."""
        ...

    def snapshot(self, num_tokens: int) -> KVSnapshot:
        """Copy the first `num_tokens` positions."""
        ...

    def restore(self, snapshot: KVSnapshot, num_tokens: int) -> None:
        """Replace the content by the first `num_tokens` positions of a snapshot.

        Raises DamagedEntryError, and holds nothing, where the snapshot does not fit this model.
        """
        ...


class Backend(Protocol):
    """One model on one engine. `forward` appends the tokens' KV states to `cache`."""

    @property
    def cache(self) -> KVCache: ...

    @property
    def model_key(self) -> str:
        """Names what the KV states depend on: weights, config, dtype, device class, tokenizer, versions."""
        ...

    @property
    def max_positions(self) -> int | None:
        """The longest sequence the model can hold, or None where it has no such limit."""
        ...

    @property
    def vocab_size(self) -> int:
        """How many scores each position has."""
        ...

    @property
    def can_rollback(self) -> bool:
        """Whether the cache can forget, copy and restore positions; recurrent states cannot."""
        ...

    @property
    def prefix_stable_positions(self) -> int | None:
        """The longest sequence in which KV entries do not depend on how long it is; None where they never do.

        They do where the rotary frequencies change with the length of the sequence (LongRoPE, dynamic NTK).
        """
        ...

    @property
    def recomputes_when_unstable(self) -> bool:
        """Whether plain decoding computes all KV entries anew in the pass that outgrows `prefix_stable_positions`."""
        ...

    @property
    def prefill_chunk_tokens(self) -> int | None:
        """How many tokens of a prompt a pass takes best, or None where a prompt must go through in one."""
        ...

    @property
    def info(self) -> EngineInfo: ...

    def free_bytes(self) -> int | None:
        """Memory of the device that is free, or None where nobody counts it."""
        ...

    def memory_reader(self, num_bytes: int) -> Callable[[], None]:
        """A function that reads so much of the device's memory once and waits until that is done."""
        ...

    def synchronize(self) -> None:
        """Wait until all work handed to the device is done."""
        ...

    def likeliest_after(self, before: int, token_ids: Sequence[int]) -> list[int]:
        """The best token after `before` and each of `token_ids` alone, in one pass; [] where a model cannot do that.

        The cache is left as it is.
        """
        ...

    def forward(self, token_ids: Sequence[int], num_logits: int) -> Logits:
        """Run the tokens after what is cached; return the logits of the last `num_logits` of them."""
        ...
