"""The controller against what it chose from: every action of a request is run, and the prediction of each compared.

The caches begin each run in the same state: what the case says is stored, stored; everything else, not.
"""

import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from rakvctl.core.acceptance import Experience, initial_experience
from rakvctl.core.cost import CostModel
from rakvctl.core.pair import ModelPair
from rakvctl.core.policies import FixedPolicy, Policy, RakvPolicy
from rakvctl.core.profile import HardwareProfile
from rakvctl.core.runtime import Runtime
from rakvctl.core.types import Action, Decision, PrefixEntry, Request, SamplingParams
from rakvctl.measure.arms import Task, make_arm_runtime, store_of, stored_entries
from rakvctl.measure.statistics import mape_percent, spearman
from rakvctl.measure.timing import Clock, no_garbage_collection


@dataclass(frozen=True, slots=True)
class Trial:
    """What was decided for one case, and what each possible action took, milliseconds (median of its repeats)."""

    case: Task
    decision: Decision
    actual_ms: dict[Action, float]

    @property
    def predicted_ms(self) -> dict[Action, float]:
        """The table's totals of the actions that were run."""
        return {row.action: row.total_ms for row in self.decision.table if row.action in self.actual_ms}

    @property
    def best(self) -> Action:
        """The action that took least."""
        return min(self.actual_ms, key=self.actual_ms.__getitem__)

    @property
    def regret(self) -> float:
        """How much longer the chosen action took than the best: 0.01 is one percent."""
        return self.actual_ms[self.decision.action] / self.actual_ms[self.best] - 1.0

    @property
    def k_regret(self) -> float:
        """The same for the choice of k alone: the best of the chosen k against the best of all."""
        same_k = [ms for action, ms in self.actual_ms.items() if action.draft_len == self.decision.action.draft_len]
        return min(same_k) / self.actual_ms[self.best] - 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The figures of the paper's study. Shares between 0 and 1; `within`: no more than 2 % slower than the best."""

    num_cases: int
    num_runs: int
    mape_percent: float
    spearman: float
    right_k: float
    right_k_within: float
    right_action: float
    right_action_within: float
    mean_regret: float
    mean_gain_over_plain: float


_TIE = 0.02


def summarize(trials: Sequence[Trial]) -> Summary:
    """Sum up at least one trial."""
    predicted = [trial.predicted_ms[action] for trial in trials for action in trial.actual_ms]
    actual = [ms for trial in trials for ms in trial.actual_ms.values()]
    plain = Action(reuse=False, draft_len=0)

    def share(is_right: Callable[[Trial], bool]) -> float:
        return statistics.fmean(is_right(trial) for trial in trials)

    return Summary(
        num_cases=len(trials),
        num_runs=len(actual),
        mape_percent=mape_percent(predicted, actual),
        spearman=spearman(predicted, actual),
        right_k=share(lambda trial: trial.k_regret <= 0.0),
        right_k_within=share(lambda trial: trial.k_regret <= _TIE),
        right_action=share(lambda trial: trial.regret <= 0.0),
        right_action_within=share(lambda trial: trial.regret <= _TIE),
        mean_regret=statistics.fmean(trial.regret for trial in trials),
        mean_gain_over_plain=statistics.fmean(
            trial.actual_ms[plain] / trial.actual_ms[trial.decision.action] for trial in trials
        ),
    )


class ControllerStudy:
    """Runs cases with every action on one pair. The acceptance is learned from the chosen actions alone, as in use."""

    def __init__(self, pair: ModelPair, profile: HardwareProfile, *, repeats: int, seed: int, clock: Clock) -> None:
        self._pair = pair
        self._policy = RakvPolicy(CostModel(profile))
        self._experience = initial_experience(profile)
        self._repeats = repeats
        self._random = random.Random(seed)  # noqa: S311 - not for secrets
        self._clock = clock

    def run(self, cases: Sequence[Task]) -> Iterator[Trial]:
        """One trial after another."""
        for case in cases:
            yield self._trial(case)

    def _trial(self, case: Task) -> Trial:
        entries = stored_entries(self._pair, case.stored)
        request = Request(case.prompt, SamplingParams(max_new_tokens=case.max_new_tokens))
        decision = self._runtime(self._policy, entries, self._experience).plan(request).decision
        actions = [row.action for row in decision.table if row.infeasible is None]
        taken: dict[Action, list[float]] = {action: [] for action in actions}
        for _ in range(self._repeats):
            self._random.shuffle(actions)
            with no_garbage_collection():
                for action in actions:
                    runtime = self._runtime(FixedPolicy("fixed", action), entries, Experience())
                    taken[action].append(runtime.run(request).total_ms)
        # The chosen action once more, not timed: what it teaches is what would have been known in use.
        self._runtime(FixedPolicy("fixed", decision.action), entries, self._experience).run(request)
        return Trial(case, decision, {action: statistics.median(times) for action, times in taken.items()})

    def _runtime(self, policy: Policy, entries: list[PrefixEntry], experience: Experience) -> Runtime:
        return make_arm_runtime(self._pair, policy, self._pair.drafter(), store_of(entries), experience, self._clock)
