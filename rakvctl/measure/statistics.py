"""How well predictions fit what was measured, and how far apart two arms are."""

import math
import statistics
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

# Of Student's t, for an interval of 95 %.
_UPPER_QUANTILE = 0.975


def mape_percent(predicted: Sequence[float], actual: Sequence[float]) -> float:
    """Mean absolute percentage error; every actual value is positive."""
    errors = (abs(guess - value) / value for guess, value in zip(predicted, actual, strict=True))
    return 100.0 * statistics.fmean(errors)


def spearman(left: Sequence[float], right: Sequence[float]) -> float:
    """Spearman's rank correlation; where neither side varies there is no order to miss, and it is 1."""
    try:
        return statistics.correlation(_ranks(left), _ranks(right))
    except statistics.StatisticsError:
        # One side at least is constant.
        return float(len(set(left)) == len(set(right)))


def _ranks(values: Sequence[float]) -> list[float]:
    """The rank of each value, equal ones sharing the mean of theirs."""
    ordered = sorted(values)
    return [ordered.index(value) + (ordered.count(value) - 1) / 2 for value in values]


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate with its 95 % confidence interval; `low` and `high` are NaN where too little was measured for one."""

    estimate: float
    low: float
    high: float


def ratio_interval(ours: Sequence[float], theirs: Sequence[float], prompts: Sequence[Hashable]) -> Interval:
    """Geometric mean of the paired ratios ours/theirs, with Student's t interval over prompts.

    `prompts` names the prompt of each pair. Pairs of one prompt, under several conditions, are not independent: their
    log ratios are averaged first, and every prompt weighs the same. One prompt alone has no interval.
    """
    logs: dict[Hashable, list[float]] = {}
    for our, their, prompt in zip(ours, theirs, prompts, strict=True):
        logs.setdefault(prompt, []).append(math.log(our / their))
    means = [statistics.fmean(values) for values in logs.values()]
    mean = statistics.fmean(means)
    if len(means) < 2:
        return Interval(math.exp(mean), math.nan, math.nan)
    # Here and not above: calibration, which `generate` may have to do first, needs no scipy.
    from scipy.special import stdtrit

    reach = float(stdtrit(len(means) - 1, _UPPER_QUANTILE)) * statistics.stdev(means) / math.sqrt(len(means))
    return Interval(math.exp(mean), math.exp(mean - reach), math.exp(mean + reach))
