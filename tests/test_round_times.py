"""What rounds take in use corrects a profile, and nothing but the widths' own times does."""

import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rakvctl.core.acceptance import Experience, LookupAcceptance
from rakvctl.core.backends.fake import VirtualClock
from rakvctl.core.lookup import History, LookupDrafter
from rakvctl.core.policies import make_policy
from rakvctl.core.profile import HardwareProfile
from rakvctl.core.round_times import RoundTimes
from rakvctl.core.rounds import RoundCosts
from rakvctl.core.runtime import Runtime
from rakvctl.core.speculators import AdaptiveSpeculator
from rakvctl.core.store import PrefixStore
from rakvctl.core.tiers import MemoryTier
from rakvctl.core.types import Request, SamplingParams
from rakvctl.core.verify import GreedyVerifier
from tests.profiles import toy_pair, toy_profile
from tests.test_rounds import REPEATING, WIDTHS, profile_with


def test_a_width_that_takes_longer_than_the_profile_says_is_found_out() -> None:
    times, noise = RoundTimes(), random.Random(0)
    for _ in range(300):
        for width, factor in ((1, 1.0), (6, 1.1), (12, 0.95)):
            times.observe(width, 10.0 + width, factor * (10.0 + width) * noise.uniform(0.9, 1.1))
    assert times.factor(6) / times.factor(1) == pytest.approx(1.1, rel=0.02)
    assert times.factor(12) / times.factor(1) == pytest.approx(0.95, rel=0.02)
    assert times.factor(2) == 1.0


@given(st.lists(st.tuples(st.integers(1, 17), st.floats(0.2, 5.0)), max_size=60))
def test_what_slows_all_rounds_down_alike_changes_no_width(phases: list[tuple[int, float]]) -> None:
    """The first of each new pace may: nobody can tell yet. It never counts for much."""
    steady, times = RoundTimes(), RoundTimes()
    for width, _ in phases:
        steady.observe(width, 10.0, 30.0)
        times.observe(width, 10.0, 30.0)
    assert all(steady.factor(width) == pytest.approx(1.0) for width in range(1, 18))
    for width, slowness in phases:
        before = times.factor(width)
        times.observe(width, 10.0, 30.0 * slowness)
        assert abs(times.factor(width) / before - 1.0) <= 0.25 / 9


def test_a_new_pace_is_followed_and_leaves_the_widths_as_they_were() -> None:
    times = RoundTimes()
    for slowness in (1.0, 2.0, 0.5):
        for _ in range(200):
            for width in (1, 6):
                times.observe(width, 10.0, 10.0 * slowness)
    assert times.factor(1) / times.factor(6) == pytest.approx(1.0, abs=0.02)


def test_a_clock_that_stands_still_teaches_nothing() -> None:
    times = RoundTimes()
    times.observe(1, 10.0, 0.0)
    times.observe(2, 10.0, 10.0)
    assert [times.factor(width) for width in (1, 2)] == [1.0, 1.0]


def drafted_on_a_clock(told: HardwareProfile, actual_ms: Sequence[float]) -> list[int]:
    """How many tokens are drafted, time after time, where rounds take other times than the profile is told.

    The text repeats itself all the time, and plain steps come in between.
    """
    clock, times, acceptance = VirtualClock(), RoundTimes(), LookupAcceptance()
    drafted = []
    for _ in range(200):
        lookup = LookupDrafter(History(0))
        adaptive = AdaptiveSpeculator(lookup, acceptance, None, 0.5, RoundCosts(told, times), clock)
        adaptive.start(REPEATING, None, 0)
        for room in (100, 0):
            drafted.append(len(adaptive.propose(REPEATING, room, GreedyVerifier()).token_ids))
            clock.now_ms += actual_ms[drafted[-1]]
            adaptive.observe((REPEATING * 2)[: drafted[-1] + 1])
    assert set(drafted[1::2]) == {0}
    return drafted[::2]


def test_a_width_that_a_profile_has_too_low_by_chance_is_left() -> None:
    """At ten positions another tile of the matrix routines begins, and the profile says it costs nothing."""
    widths = range(1, 18)
    actual = [10.0 if width < 10 else 14.0 if width == 10 else 40.0 for width in widths]
    told = [10.5 if width == 10 else ms for width, ms in zip(widths, actual, strict=True)]
    right, wrong = (profile_with(times, widths=widths) for times in (actual, told))
    assert set(drafted_on_a_clock(right, actual)[-50:]) == {8}
    drafted = drafted_on_a_clock(wrong, actual)
    assert drafted[0] == 9
    assert set(drafted[-50:]) == {8}


def test_a_round_without_a_proposal_is_not_timed() -> None:
    """Where a near tie is decided by a plain step, nobody asks for tokens before it."""
    clock, times = VirtualClock(), RoundTimes()
    costs = RoundCosts(profile_with([10.0] * len(WIDTHS)), times)
    adaptive = AdaptiveSpeculator(LookupDrafter(History(0)), LookupAcceptance(), None, 0.5, costs, clock)
    adaptive.start([1, 2, 3], None, 0)
    adaptive.propose([1, 2, 3], 10, GreedyVerifier())
    clock.now_ms += 10.0
    adaptive.observe([4])
    clock.now_ms += 1e6
    adaptive.observe([5])
    assert times.factor(1) == 1.0


def test_a_seed_repeats_its_text_however_long_rounds_take() -> None:
    request = Request((1, 2, 3, 4) * 8, SamplingParams(max_new_tokens=60, temperature=1.0, seed=7))
    texts = set()
    for seed in range(4):
        clock, noise, experience = VirtualClock(), random.Random(seed), Experience()
        pair = toy_pair(clock)
        runtime = Runtime(
            codec=pair.codec,
            target=pair.target,
            drafter=pair.drafter(),
            store=PrefixStore(MemoryTier(0)),
            policy=make_policy("auto", toy_profile()),
            experience=experience,
            clock=lambda clock=clock, noise=noise: clock() + noise.uniform(0.0, 1.0),  # type: ignore[misc]
        )
        texts.add(runtime.run(request).token_ids)
        assert all(experience.round_times.factor(width) == 1.0 for width in range(1, 18))
    assert len(texts) == 1
