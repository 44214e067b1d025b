"""A toy model without tensors, for tests: its next token is a seeded function of the tokens in its cache.

Since it reads what the cache holds, a stale or missing position changes its output, as it would a real model's. Its
times are declared, and pass on a clock of their own.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from rakvctl.core.array_logits import ArrayLogits
from rakvctl.core.errors import DamagedEntryError
from rakvctl.core.seams import EngineInfo, KVSnapshot, state_blocks

_BYTES_PER_TOKEN = 64


@dataclass(frozen=True, slots=True)
class FakeSnapshot:
    """The token ids of the copied positions stand for their states."""

    token_ids: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        """Positions copied."""
        return len(self.token_ids)

    @property
    def num_bytes(self) -> int:
        """A declared size."""
        return _BYTES_PER_TOKEN * len(self.token_ids)

    def arrays(self, start: int, end: int) -> list[np.ndarray]:
        """One array of token ids, as large as is declared."""
        ids = np.asarray(self.token_ids[start:end], dtype=np.int64)
        return [np.repeat(ids[:, None], _BYTES_PER_TOKEN // ids.itemsize, axis=1)]


class VirtualClock:
    """Seconds that pass only when somebody lets them; called like `time.perf_counter`."""

    def __init__(self) -> None:
        self.now_ms = 0.0

    def __call__(self) -> float:
        """The present time in seconds."""
        return self.now_ms / 1e3

    def advance(self, ms: float) -> None:
        """Let time pass."""
        self.now_ms += ms


@dataclass(frozen=True, slots=True)
class FakeCosts:
    """Declared times: a pass takes `pass_ms`, and more by token, by cached position and by their product."""

    pass_ms: float = 0.0
    token_ms: float = 0.0
    context_ms: float = 0.0
    attention_ms: float = 0.0
    copy_token_ms: float = 0.0
    memory_bytes_per_ms: float = 1e6

    def forward_ms(self, num_tokens: int, context: int) -> float:
        """A pass of `num_tokens` over `context` cached positions."""
        one = self.pass_ms + self.context_ms * context
        return one + num_tokens * (self.token_ms + self.attention_ms * context)

    def copy_ms(self, num_tokens: int) -> float:
        """Copying the states of `num_tokens` positions."""
        return self.copy_token_ms * num_tokens


class FakeCache:
    """A cache that holds token ids instead of states."""

    def __init__(self, clock: VirtualClock, costs: FakeCosts, *, can_rollback: bool = True) -> None:
        """`can_rollback` False: only everything can be dropped, as with recurrent states."""
        self.token_ids: list[int] = []
        self._can_rollback = can_rollback
        self._clock = clock
        self._costs = costs

    @property
    def length(self) -> int:
        """Positions filled."""
        return len(self.token_ids)

    def reserve(self, num_tokens: int) -> None:
        """Lists grow by themselves."""

    def num_bytes(self, num_tokens: int) -> int:
        """A declared size."""
        return _BYTES_PER_TOKEN * num_tokens

    def rollback(self, length: int) -> None:
        """Forget all positions from `length` on."""
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot roll back to {length} of {self.length} positions")
        if not self._can_rollback and 0 < length < self.length:
            raise ValueError("these states cannot be rolled back")
        del self.token_ids[length:]

    def snapshot(self, num_tokens: int) -> FakeSnapshot:
        """Copy the first `num_tokens` positions."""
        assert self._can_rollback, "these states cannot be copied"
        self._clock.advance(self._costs.copy_ms(num_tokens))
        return FakeSnapshot(tuple(self.token_ids[:num_tokens]))

    def restore(self, snapshot: KVSnapshot, num_tokens: int) -> None:
        """Replace the content by the first positions of a snapshot."""
        self._clock.advance(self._costs.copy_ms(num_tokens))
        self.token_ids = []
        for start, end in state_blocks(snapshot.num_tokens):
            if start >= num_tokens:
                break
            (ids,) = snapshot.arrays(start, end)
            if ids.dtype != np.int64 or ids.shape[:-1] != (end - start,):
                self.token_ids = []
                raise DamagedEntryError("not this model's states")
            self.token_ids += ids[:, 0].tolist()
        del self.token_ids[num_tokens:]


class FakeBackend:
    """Scores are random numbers drawn for the last `context` tokens, so that greedy output is lively and repeatable.

    A draft of a target has its seed and some `noise` of its own: the more noise, the less they agree. In passes that
    end behind `prefix_stable_positions`, tokens leave other entries in the cache than in passes that end before.
    """

    prefill_chunk_tokens: int | None = 2048

    def __init__(
        self,
        *,
        seed: int = 0,
        vocab_size: int = 32,
        context: int = 3,
        noise: float = 0.0,
        max_positions: int | None = None,
        clock: VirtualClock | None = None,
        costs: FakeCosts | None = None,
        free_bytes: int | None = None,
        can_rollback: bool = True,
        prefix_stable_positions: int | None = None,
        recomputes_when_unstable: bool = False,
    ) -> None:
        self._free_bytes = free_bytes
        self._clock = clock or VirtualClock()
        self._costs = costs or FakeCosts()
        self.can_rollback = can_rollback
        self.prefix_stable_positions = prefix_stable_positions
        self.recomputes_when_unstable = recomputes_when_unstable
        self.cache = FakeCache(self._clock, self._costs, can_rollback=can_rollback)
        self.model_key = f"fake-{seed}-{vocab_size}-{context}-{noise}"
        self.max_positions = max_positions
        self.num_passes = 0
        self._seed = seed
        self.vocab_size = vocab_size
        self._context = context
        self._noise = noise

    @property
    def info(self) -> EngineInfo:
        """Made up; one byte a word of the vocabulary."""
        return EngineInfo(
            backend="fake",
            device="cpu",
            driver="none",
            num_threads=1,
            dtype="float32",
            versions="none",
            weight_bytes=self.vocab_size,
            digest=self.model_key,
        )

    def free_bytes(self) -> int | None:
        """As declared."""
        return self._free_bytes

    def memory_reader(self, num_bytes: int) -> Callable[[], None]:
        """Lets the declared time pass."""
        return lambda: self._clock.advance(num_bytes / self._costs.memory_bytes_per_ms)

    def synchronize(self) -> None:
        """Nothing is ever under way."""

    def forward(self, token_ids: Sequence[int], num_logits: int) -> ArrayLogits:
        """Append tokens; scores after each of the last `num_logits` of them."""
        self.num_passes += 1
        self._clock.advance(self._costs.forward_ms(len(token_ids), self.cache.length))
        length, limit = self.cache.length + len(token_ids), self.prefix_stable_positions
        changed = self.vocab_size if limit is not None and length > limit else 0
        self.cache.token_ids.extend(token + changed for token in token_ids)
        return ArrayLogits(np.stack([self._scores(end) for end in range(length - num_logits + 1, length + 1)]))

    def likeliest_after(self, before: int, token_ids: Sequence[int]) -> list[int]:
        """As if each stood in a text of two; takes as long as any pass."""
        self._clock.advance(self._costs.forward_ms(len(token_ids), 0))
        return [int(self._scores_after([before, token]).argmax()) for token in token_ids]

    def _scores(self, end: int) -> np.ndarray:
        """Scores after the first `end` cached tokens, [vocab_size] float32."""
        return self._scores_after(self.cache.token_ids[max(0, end - self._context) : end])

    def _scores_after(self, ids: list[int]) -> np.ndarray:
        scores = self._draw("target", ids) + self._noise * self._draw("draft", ids)
        return scores.astype(np.float32)

    def _draw(self, stream: str, ids: list[int]) -> np.ndarray:
        digest = hashlib.blake2b(f"{stream} {self._seed} {ids}".encode(), digest_size=8).digest()
        return np.random.default_rng(int.from_bytes(digest)).normal(size=self.vocab_size)
