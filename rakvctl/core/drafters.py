"""Who guesses: a drafter proposes tokens for the target to check. One class a kind of guess."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from rakvctl.core.engine import Engine
from rakvctl.core.seams import KVSnapshot
from rakvctl.core.types import Proposal
from rakvctl.core.verify import Verifier


class Drafter(Protocol):
    """Proposes continuations of one sequence at a time."""

    @property
    def name(self) -> str:
        """Its name on the command line and in results."""
        ...

    @property
    def max_positions(self) -> int | None:
        """The longest sequence it can follow, or None."""
        ...

    def start(self, prompt_token_ids: Sequence[int], snapshot: KVSnapshot | None, num_cloned_tokens: int) -> None:
        """Begin a new sequence, from its own stored states of the first `num_cloned_tokens` where there are any."""
        ...

    def propose(self, token_ids: Sequence[int], num_tokens: int, verifier: Verifier) -> Proposal:
        """Guess up to `num_tokens` tokens that follow the sequence `token_ids`, prompt included."""
        ...

    def rollback(self, length: int) -> None:
        """Forget what was guessed after the first `length` tokens of the sequence."""
        ...

    def snapshot(self, num_tokens: int) -> KVSnapshot | None:
        """Its states of the first `num_tokens` tokens, to be stored with the target's; None if it has none."""
        ...


class ModelDrafter:
    """A smaller model of the same vocabulary.

    It may lag behind the sequence, by the whole prompt or by the token it did not see after its last guess was
    accepted: whatever is missing goes through it in the pass that makes its next guess.
    """

    name = "model"

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @property
    def max_positions(self) -> int | None:
        """The draft model's limit, and no more than it can be rolled back in."""
        limits = (self._engine.max_positions, self._engine.prefix_stable_positions)
        return min((limit for limit in limits if limit is not None), default=None)

    def start(self, prompt_token_ids: Sequence[int], snapshot: KVSnapshot | None, num_cloned_tokens: int) -> None:
        """Restore what is stored and prefill the rest of the prompt."""
        self._engine.rollback(0)
        if snapshot is not None and num_cloned_tokens > 0:
            self._engine.restore(snapshot, num_cloned_tokens)
        missing = prompt_token_ids[self._engine.length :]
        if missing:
            self._engine.prefill(missing)

    def propose(self, token_ids: Sequence[int], num_tokens: int, verifier: Verifier) -> Proposal:
        """Catch up with the sequence, then guess one token a pass."""
        logits = self._engine.prefill(token_ids[self._engine.length :])
        tokens: list[int] = []
        probs: list[np.ndarray] = []
        while True:
            token, distribution = verifier.choose(logits, token_ids, tokens)
            tokens.append(token)
            if distribution is not None:
                probs.append(distribution)
            if len(tokens) == num_tokens:
                return Proposal(tuple(tokens), np.stack(probs) if probs else None)
            logits = self._engine.step(token)

    def rollback(self, length: int) -> None:
        """Keep at most the first `length` positions."""
        self._engine.rollback(min(length, self._engine.length))

    def snapshot(self, num_tokens: int) -> KVSnapshot | None:
        """Copy the prompt's states, if the draft model saw all of it."""
        return self._engine.snapshot(num_tokens) if self._engine.length >= num_tokens else None
