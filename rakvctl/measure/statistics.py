"""How well predictions fit what was measured, and how far apart two arms are."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_NUM_RESAMPLES = 10_000


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
    """An estimate with its 95 % confidence interval."""

    estimate: float
    low: float
    high: float


def ratio_interval(ours: Sequence[float], theirs: Sequence[float], *, seed: int = 0) -> Interval:
    """Geometric mean of the paired ratios ours/theirs, with a percentile bootstrap over the pairs.

    Efron and Tibshirani 1993, chapter 13. Ratios are averaged as logarithms, so that 2 and 1/2 cancel out.
    """
    logs = np.log(np.asarray(ours, dtype=np.float64) / np.asarray(theirs, dtype=np.float64))
    picks = np.random.default_rng(seed).integers(0, len(logs), (_NUM_RESAMPLES, len(logs)))
    low, high = np.quantile(logs[picks].mean(axis=1), (0.025, 0.975))
    return Interval(float(np.exp(logs.mean())), float(np.exp(low)), float(np.exp(high)))
