"""Whether a profile still tells the truth: a few of its points, timed again."""

from dataclasses import dataclass

from rakvctl.core.pair import ModelPair
from rakvctl.core.profile import HardwareProfile
from rakvctl.core.seams import Clock
from rakvctl.measure.probes import ProbeBench
from rakvctl.measure.timing import Effort, Point, time_probes

# Two measurements of one thing differ by a few percent on a quiet machine and by ten on a busy one.
TOLERANCE = 0.25
_DRAFT_LEN = 4


@dataclass(frozen=True, slots=True)
class Drift:
    """One point then and now, milliseconds."""

    point: Point
    profile_ms: float
    measured_ms: float

    @property
    def change(self) -> float:
        """How much more it takes now: 0.5 is half as much again."""
        return self.measured_ms / self.profile_ms - 1.0

    @property
    def is_stale(self) -> bool:
        """Whether the change is more than the difference between two measurements."""
        return abs(self.change) > TOLERANCE


def check(pair: ModelPair, profile: HardwareProfile, effort: Effort, clock: Clock) -> list[Drift]:
    """Time a step, a verify, a prefill and a proposal in the middle of the profile's range."""
    prefill = profile.target.prefill
    size = prefill.sizes_tokens[len(prefill.sizes_tokens) // 2]
    context = profile.verify.contexts_tokens[len(profile.verify.contexts_tokens) // 2]
    draft_len = min(_DRAFT_LEN, profile.widest_draft_len)
    bench = ProbeBench(pair, context + max(size, draft_len + 1), clock)
    probes = [bench.round(width, context) for width in {0, draft_len}]
    probes.append(bench.prefill("target", size, context))
    spreads = time_probes(probes, effort, clock, lambda _: None)
    curves = {"verify": profile.verify, "target.prefill": prefill}
    if profile.draft is not None:
        curves["propose"] = profile.draft.propose
    return [
        Drift(point, curves[point.curve].at(point.size, point.context), spread.median_ms)
        for point, spread in spreads.items()
    ]
