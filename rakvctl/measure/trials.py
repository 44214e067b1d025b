"""What the controller study finds: every action of a request, what was decided, and the figures over many requests."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rakvctl.core.types import Action, Decision
from rakvctl.measure.arms import Task
from rakvctl.measure.statistics import mape_percent, spearman


@dataclass(frozen=True, slots=True)
class Trial:
    """What was decided for one case, and what each possible action took, milliseconds, one for each repeat."""

    case: Task
    decision: Decision
    samples_ms: Mapping[Action, Sequence[float]]

    @property
    def actual_ms(self) -> dict[Action, float]:
        """The median of each action's repeats."""
        return {action: statistics.median(samples) for action, samples in self.samples_ms.items()}

    @property
    def predicted_ms(self) -> dict[Action, float]:
        """The table's totals of the actions that were run."""
        return {row.action: row.total_ms for row in self.decision.table if row.action in self.samples_ms}

    @property
    def rank_correlation(self) -> float | None:
        """Spearman's, of predicted and actual time over its actions; None of one action alone."""
        if len(self.samples_ms) < 2:
            return None
        return spearman([self.predicted_ms[action] for action in self.samples_ms], list(self.actual_ms.values()))

    @property
    def best_ms(self) -> float:
        """What the best action took."""
        return min(self.actual_ms.values())

    @property
    def regret(self) -> float:
        """How much longer the chosen action took than the best: 0.01 is one percent."""
        return self.actual_ms[self.decision.action] / self.best_ms - 1.0

    @property
    def k_regret(self) -> float:
        """The same for the choice of k alone: the best of the chosen k against the best of all."""
        chosen = self.decision.action.draft_len
        return min(ms for action, ms in self.actual_ms.items() if action.draft_len == chosen) / self.best_ms - 1.0


@dataclass(frozen=True, slots=True)
class ControllerRun:
    """One case. `told` is the same trial, decided as if the acceptance in its own drafting runs had been known before.

    So what `told` lacks is the cost model's or noise; what `trial` lacks beyond that, nobody could know. `auto_ms`:
    the policy `auto` on the same case. `num_unequal`: runs that emitted other tokens than plain decoding.
    """

    trial: Trial
    told: Trial
    auto_ms: Sequence[float]
    num_unequal: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The figures of the paper's study. Shares between 0 and 1; `right_*_within`: at most 2 % slower than the best.

    `spearman` ranks the actions of all requests together, so mostly by how long their prompts are. `spearman_within_*`
    rank the actions of each request, and sum that up over requests; None where none had two actions.
    """

    num_cases: int
    mape_percent: float
    spearman: float
    spearman_within_mean: float | None
    spearman_within_median: float | None
    right_k: float
    right_k_within: float
    right_action: float
    right_action_within: float
    mean_regret: float
    mean_gain_over_plain: float


_TIE = 0.02
_PLAIN = Action(reuse=False, draft_len=0)


def summarize(trials: Sequence[Trial]) -> Summary:
    """Sum up at least one trial."""
    predicted = [trial.predicted_ms[action] for trial in trials for action in trial.samples_ms]
    actual = [ms for trial in trials for ms in trial.actual_ms.values()]
    within = [rank for trial in trials if (rank := trial.rank_correlation) is not None]

    def share(is_right: Callable[[Trial], bool]) -> float:
        return statistics.fmean(is_right(trial) for trial in trials)

    return Summary(
        num_cases=len(trials),
        mape_percent=mape_percent(predicted, actual),
        spearman=spearman(predicted, actual),
        spearman_within_mean=statistics.fmean(within) if within else None,
        spearman_within_median=statistics.median(within) if within else None,
        right_k=share(lambda trial: trial.k_regret <= 0.0),
        right_k_within=share(lambda trial: trial.k_regret <= _TIE),
        right_action=share(lambda trial: trial.regret <= 0.0),
        right_action_within=share(lambda trial: trial.regret <= _TIE),
        mean_regret=statistics.fmean(trial.regret for trial in trials),
        mean_gain_over_plain=statistics.fmean(
            trial.actual_ms[_PLAIN] / trial.actual_ms[trial.decision.action] for trial in trials
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoSummary:
    """`auto` on the same cases: how much longer it took than the best action (below 0: less), and against plain."""

    mean_regret: float
    mean_gain_over_plain: float


def summarize_auto(runs: Sequence[ControllerRun]) -> AutoSummary:
    """Sum up at least one run."""
    times = [(statistics.median(run.auto_ms), run.trial) for run in runs]
    return AutoSummary(
        mean_regret=statistics.fmean(ms / trial.best_ms - 1.0 for ms, trial in times),
        mean_gain_over_plain=statistics.fmean(trial.actual_ms[_PLAIN] / ms for ms, trial in times),
    )


def num_runs(runs: Sequence[ControllerRun]) -> int:
    """How often a request was served and timed."""
    return sum(len(run.auto_ms) + sum(map(len, run.trial.samples_ms.values())) for run in runs)


def num_unequal(runs: Sequence[ControllerRun]) -> int:
    """How many of them emitted other tokens than plain decoding."""
    return sum(run.num_unequal for run in runs)


def repeat_difference(trials: Sequence[Trial]) -> float | None:
    """How far apart two runs of the very same are, a share of their mean: the median of all pairs of first two repeats.

    None where nothing was repeated. Differences between actions that are smaller than this are noise.
    """
    pairs = [samples[:2] for trial in trials for samples in trial.samples_ms.values() if len(samples) > 1]
    return statistics.median(abs(one - two) / ((one + two) / 2) for one, two in pairs) if pairs else None
