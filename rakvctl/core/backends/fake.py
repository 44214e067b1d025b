"""A toy model without tensors, for tests: its next token is a seeded function of the tokens in its cache.

Since it reads what the cache holds, a stale or missing position changes its output, as it would a real model's.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rakvctl.core.types import KVSnapshot

_BYTES_PER_TOKEN = 64


@dataclass(frozen=True, slots=True)
class FakeLogits:
    """Scores, [num_positions, vocab_size]."""

    scores: np.ndarray

    def argmax(self) -> list[int]:
        """The best token of each position."""
        return [int(best) for best in self.scores.argmax(axis=-1)]

    def numpy(self) -> np.ndarray:
        """The scores."""
        return self.scores


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


class FakeCache:
    """A cache that holds token ids instead of states."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []

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
        del self.token_ids[length:]

    def snapshot(self, num_tokens: int) -> FakeSnapshot:
        """Copy the first `num_tokens` positions."""
        return FakeSnapshot(tuple(self.token_ids[:num_tokens]))

    def restore(self, snapshot: KVSnapshot, num_tokens: int) -> None:
        """Replace the content by the first positions of a snapshot."""
        assert isinstance(snapshot, FakeSnapshot)
        self.token_ids = list(snapshot.token_ids[:num_tokens])


class FakeBackend:
    """Scores are random numbers drawn for the last `context` tokens, so that greedy output is lively and repeatable.

    A draft of a target has its seed and some `noise` of its own: the more noise, the less they agree.
    """

    can_rollback = True

    def __init__(
        self,
        *,
        seed: int = 0,
        vocab_size: int = 32,
        context: int = 3,
        noise: float = 0.0,
        max_positions: int | None = None,
    ) -> None:
        self.cache = FakeCache()
        self.model_key = f"fake-{seed}-{vocab_size}-{context}-{noise}"
        self.max_positions = max_positions
        self.num_passes = 0
        self._seed = seed
        self._vocab_size = vocab_size
        self._context = context
        self._noise = noise

    def forward(self, token_ids: Sequence[int], num_logits: int) -> FakeLogits:
        """Append tokens; scores after each of the last `num_logits` of them."""
        self.num_passes += 1
        self.cache.token_ids.extend(token_ids)
        length = self.cache.length
        return FakeLogits(np.stack([self._scores(end) for end in range(length - num_logits + 1, length + 1)]))

    def _scores(self, end: int) -> np.ndarray:
        """Scores after the first `end` cached tokens, [vocab_size] float32."""
        ids = self.cache.token_ids[max(0, end - self._context) : end]
        scores = self._draw("target", ids) + self._noise * self._draw("draft", ids)
        return scores.astype(np.float32)

    def _draw(self, stream: str, ids: list[int]) -> np.ndarray:
        digest = hashlib.blake2b(f"{stream} {self._seed} {ids}".encode(), digest_size=8).digest()
        return np.random.default_rng(int.from_bytes(digest)).normal(size=self._vocab_size)
