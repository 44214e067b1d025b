"""The benchmark: every arm serves every prompt, in turn; all tokens are compared with those of plain decoding."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rakvctl.core.engine import Engine
from rakvctl.core.seams import Clock
from rakvctl.measure.arms import Arm, Outcome, Task
from rakvctl.measure.timing import no_garbage_collection

# Plain decoding: what all others have to equal, and are compared with.
REFERENCE = "ar"


@dataclass(frozen=True, slots=True)
class BenchPrompt:
    """A task with where it comes from."""

    workload: str
    id: str
    task: Task


@dataclass(frozen=True, slots=True)
class Sample:
    """One execution. `equal`: whether its tokens are the reference's for the same prompt."""

    workload: str
    prompt_id: str
    arm: str
    repeat: int
    prompt: tuple[int, ...]
    outcome: Outcome
    equal: bool

    @property
    def prompt_tokens(self) -> int:
        """How many tokens the prompt has."""
        return len(self.prompt)


@dataclass(frozen=True, slots=True)
class Mismatch:
    """The first position at which an arm's tokens differ from the reference's; None: one of them is shorter.

    The logits are those of the target after the tokens that both have in common; an id of the padding behind the
    vocabulary, which peers may emit, has none.
    """

    workload: str
    prompt_id: str
    arm: str
    repeat: int
    position: int
    token: int | None
    expected: int | None
    logit: float | None
    expected_logit: float | None

    @property
    def margin(self) -> float | None:
        """By how much the target prefers the reference's token."""
        if self.logit is None or self.expected_logit is None:
            return None
        return self.expected_logit - self.logit


class Bench:
    """Runs the executions, in random order within each prompt so that drift hits every arm alike."""

    def __init__(self, arms: Sequence[Arm], target: Engine, *, repeats: int, seed: int, clock: Clock) -> None:
        """One arm must be the reference; `target` scores the tokens that differ."""
        self._target = target
        self._arms = list(arms)
        self._repeats = repeats
        self._random = random.Random(seed)  # noqa: S311 - not for secrets
        self._clock = clock
        self.mismatches: list[Mismatch] = []
        self.overhead_ms = 0.0

    def warm_up(self, task: Task) -> None:
        """Serve one task with every arm, uncounted."""
        for arm in self._arms:
            arm.prepare(task)()

    def run(self, prompts: Sequence[BenchPrompt]) -> Iterator[Sample]:
        """One sample after another, the reference's of a prompt first known, then compared with."""
        for prompt in prompts:
            for repeat in range(self._repeats):
                yield from self._round(prompt, repeat)

    def _round(self, prompt: BenchPrompt, repeat: int) -> Iterator[Sample]:
        order = list(self._arms)
        self._random.shuffle(order)
        with no_garbage_collection():
            outcomes = {arm.name: self._execute(arm, prompt.task) for arm in order}
        expected = outcomes[REFERENCE].token_ids
        for name, outcome in outcomes.items():
            equal = outcome.token_ids == expected
            if not equal:
                self.mismatches.append(self._mismatch(prompt, name, repeat, outcome.token_ids, expected))
            yield Sample(prompt.workload, prompt.id, name, repeat, prompt.task.prompt, outcome, equal)

    def _execute(self, arm: Arm, task: Task) -> Outcome:
        serve = arm.prepare(task)
        started = self._clock()
        outcome = serve()
        # What of the execution the arm's own time does not cover.
        self.overhead_ms = max(self.overhead_ms, (self._clock() - started) * 1e3 - outcome.total_ms)
        return outcome

    def _mismatch(
        self, prompt: BenchPrompt, arm: str, repeat: int, found: tuple[int, ...], expected: tuple[int, ...]
    ) -> Mismatch:
        shared = min(len(found), len(expected))
        position = next((index for index in range(shared) if found[index] != expected[index]), shared)
        token, wanted = (ids[position] if position < len(ids) else None for ids in (found, expected))
        self._target.rollback(0)
        logits = self._target.prefill((*prompt.task.prompt, *expected[:position])).numpy()[-1]
        scores = [None if id_ is None or id_ >= len(logits) else float(logits[id_]) for id_ in (token, wanted)]
        return Mismatch(prompt.workload, prompt.id, arm, repeat, position, token, wanted, *scores)
