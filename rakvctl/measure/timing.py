"""Timing several things fairly: interleaved in random order, repeated until the medians are steady or time is up.

Knows nothing of models: a probe is a function that returns milliseconds.
"""

import gc
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple

from rakvctl.core.seams import Clock

Progress = Callable[[str, float], None]

_MIN_RUNS = 5
# A median is steady when its standard error, by the median absolute deviation, is this share of it.
_STEADY_SHARE = 0.01
_NOISY_SHARE = 0.1
# For a normal distribution: standard deviation = 1.4826 MAD, and that of a median is 1.2533 times that of a mean.
_MEDIAN_ERROR_PER_MAD = 1.4826 * 1.2533


class Point(NamedTuple):
    """What is timed: a point of a curve."""

    curve: str
    size: int
    context: int


@dataclass(frozen=True, slots=True)
class Probe:
    """Something to time: `sample` runs it once or a few times; each run gives the milliseconds at each of `points`.

    No runs: there is nothing more to time.
    """

    points: tuple[Point, ...]
    sample: Callable[[], list[tuple[float, ...]]]


@dataclass(frozen=True, slots=True)
class Spread:
    """What many runs of one probe took, milliseconds. `mad_ms`: median absolute deviation."""

    median_ms: float
    mad_ms: float
    num_runs: int

    @classmethod
    def of(cls, samples: Sequence[float]) -> "Spread":
        """Sum up samples; at least one."""
        median = statistics.median(samples)
        return cls(median, statistics.median(abs(sample - median) for sample in samples), len(samples))

    @property
    def is_steady(self) -> bool:
        """Whether more runs would hardly move the median."""
        error_ms = _MEDIAN_ERROR_PER_MAD * self.mad_ms / self.num_runs**0.5
        return self.num_runs >= _MIN_RUNS and error_ms <= _STEADY_SHARE * self.median_ms

    @property
    def is_noisy(self) -> bool:
        """Whether single runs are far from the median."""
        return self.mad_ms > _NOISY_SHARE * self.median_ms


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How long to measure: until steady or `budget_s` is spent, or exactly `repeats` times where that is given."""

    budget_s: float
    repeats: int | None = None

    def share(self, share: float) -> "Effort":
        """The same with a part of the time."""
        return replace(self, budget_s=share * self.budget_s)


def time_probes(
    probes: Sequence[Probe], effort: Effort, clock: Clock, on_progress: Callable[[float], None]
) -> dict[Point, Spread]:
    """Run all probes in turn, a new random order each time; `on_progress` hears the share of the effort spent.

    Every probe runs at least once, whatever the budget.
    """
    shuffle = random.Random(0).shuffle  # noqa: S311 - not for secrets
    samples: dict[Point, list[float]] = {point: [] for probe in probes for point in probe.points}
    started, num_passes = clock(), 0
    unsettled, exhausted = list(probes), set[tuple[Point, ...]]()
    while unsettled and num_passes != effort.repeats:
        shuffle(unsettled)
        for index, probe in enumerate(unsettled):
            if num_passes and effort.repeats is None and clock() - started >= effort.budget_s:
                return _spreads(samples)
            runs = probe.sample()
            for run in runs:
                for point, ms in zip(probe.points, run, strict=True):
                    samples[point].append(ms)
            if not runs:
                exhausted.add(probe.points)
            passes = num_passes + (index + 1) / len(unsettled)
            on_progress(passes / effort.repeats if effort.repeats else (clock() - started) / max(effort.budget_s, 1e-9))
        num_passes += 1
        unsettled = [probe for probe in unsettled if probe.points not in exhausted]
        if effort.repeats is None:
            unsettled = [probe for probe in unsettled if not _is_steady(probe, samples)]
    return _spreads(samples)


def _is_steady(probe: Probe, samples: dict[Point, list[float]]) -> bool:
    return all(Spread.of(samples[point]).is_steady for point in probe.points)


def _spreads(samples: dict[Point, list[float]]) -> dict[Point, Spread]:
    return {point: Spread.of(values) for point, values in samples.items() if values}


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Collect before, not during: a collection in one arm's time would be another's garbage."""
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
