"""How well predictions fit what was measured."""

import statistics
from collections.abc import Sequence


def mape_percent(predicted: Sequence[float], actual: Sequence[float]) -> float:
    """Mean absolute percentage error; every actual value is positive."""
    errors = (abs(guess - value) / value for guess, value in zip(predicted, actual, strict=True))
    return 100.0 * statistics.fmean(errors)


def spearman(left: Sequence[float], right: Sequence[float]) -> float:
    """Spearman's rank correlation; where one side does not vary there is no order to predict, and it is 1."""
    try:
        return statistics.correlation(_ranks(left), _ranks(right))
    except statistics.StatisticsError:
        return 1.0


def _ranks(values: Sequence[float]) -> list[float]:
    """The rank of each value, equal ones sharing the mean of theirs."""
    ordered = sorted(values)
    return [ordered.index(value) + (ordered.count(value) - 1) / 2 for value in values]
