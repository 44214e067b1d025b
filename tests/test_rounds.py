"""The choice of every round: the fastest way by what was measured and seen, never ruled out, never paid for in vain."""

from collections.abc import Sequence
from dataclasses import replace
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rakvctl.core.acceptance import LookupAcceptance, NearTies, expected_tokens
from rakvctl.core.lookup import History, LookupDrafter
from rakvctl.core.policies import make_policy
from rakvctl.core.profile import Curve, HardwareProfile
from rakvctl.core.rounds import RoundCosts, best_prefix, round_choices
from rakvctl.core.seams import KVSnapshot
from rakvctl.core.speculators import AdaptiveSpeculator
from rakvctl.core.types import Agreement, Evidence, Features, Proposal
from rakvctl.core.verify import GreedyVerifier, Verifier
from tests.fakes import FakeRuntime
from tests.profiles import toy_profile

WIDTHS = (1, 2, 3, 5, 9, 17)
REPEATING = [1, 2, 3, 4, 5, 6, 7, 8] * 4


def profile_with(
    verify_ms: Sequence[float], propose_ms: float = 0.1, widths: Sequence[int] = WIDTHS
) -> HardwareProfile:
    """Rounds of these times by width, at any context; a draft model that takes so long a token."""
    profile = toy_profile()

    def curve(sizes: Sequence[int], times: Sequence[float]) -> Curve:
        zeros, ones = tuple((0.0,) for _ in times), tuple((1,) for _ in times)
        return Curve(tuple(sizes), (1,), tuple((ms,) for ms in times), zeros, ones)

    assert profile.draft is not None
    propose = curve(WIDTHS[:-1], [propose_ms * size for size in WIDTHS[:-1]])
    return replace(profile, verify=curve(widths, verify_ms), draft=replace(profile.draft, propose=propose))


class FixedModel:
    """A draft model that always guesses the same."""

    name = "model"
    max_positions = None

    def __init__(self, token: int) -> None:
        self._token = token
        self.num_asked = 0

    def start(self, prompt_token_ids: Sequence[int], snapshot: KVSnapshot | None, num_cloned_tokens: int) -> None:
        pass

    def propose(self, token_ids: Sequence[int], num_tokens: int, verifier: Verifier) -> Proposal:
        self.num_asked += 1
        return Proposal((self._token,) * num_tokens)

    def rollback(self, length: int) -> None:
        pass

    def snapshot(self, num_tokens: int) -> KVSnapshot | None:
        return None


def speculator(
    profile: HardwareProfile, seen: LookupAcceptance, model: FixedModel | None = None, alpha: float = 0.5
) -> AdaptiveSpeculator:
    return AdaptiveSpeculator(LookupDrafter(History(0)), seen, model, alpha, RoundCosts(profile))


def propose(of: AdaptiveSpeculator, text: Sequence[int], room: int = 100) -> Proposal:
    return of.propose(text, room, GreedyVerifier())


@given(
    st.lists(st.floats(1.0, 100.0), min_size=2, max_size=18),
    st.lists(st.floats(0.0, 1.0), min_size=17, max_size=17),
)
def test_the_least_time_a_token_is_found(verify_ms: list[float], alphas: list[float]) -> None:
    def rate(draft_len: int) -> float:
        expected, reached = 1.0, 1.0
        for alpha in alphas[:draft_len]:
            reached *= alpha
            expected += reached
        return verify_ms[draft_len] / expected

    found, draft_len = best_prefix(verify_ms, alphas[: len(verify_ms) - 1])
    best = min(map(rate, range(1, len(verify_ms))))
    assert found == pytest.approx(best if best < 0.95 * verify_ms[0] else verify_ms[0])
    assert rate(draft_len) == pytest.approx(found)


def test_a_gain_within_what_times_err_by_is_left() -> None:
    assert best_prefix([10.0, 18.9], [1.0])[1] == 1
    assert best_prefix([10.0, 19.1], [1.0]) == (10.0, 0)


def test_a_change_of_width_is_charged_to_the_round_that_drafts_and_teaches_plain_rounds_nothing() -> None:
    profile = replace(profile_with([10.0, 12.0, 13.0, 15.0, 18.0, 26.0]), width_change_ms=2.0)
    costs = RoundCosts(profile)
    plain, one, *_ = costs.at(100)[0]
    assert (plain, one) == (10.0, 14.0)
    for _ in range(50):
        for draft_len, actual_ms in ((0, 10.0), (0, 10.0), (1, 13.0), (0, 11.0)):
            costs.observe(draft_len, actual_ms)
    plain, one, *_ = costs.at(100)[0]
    assert (plain, one) == (pytest.approx(10.0), pytest.approx(14.0))


def test_what_a_pass_leaves_undecided_counts_as_not_emitted() -> None:
    """Of ten positions one is a near tie: two drafted tokens that always stand give 0.9 + 0.81 + 0.729 tokens."""
    rate, draft_len = best_prefix([10.0, 11.0, 12.0], [1.0, 1.0], share_decided=0.9)
    assert (rate, draft_len) == (pytest.approx(12.0 / (0.9 + 0.81 + 0.729)), 2)
    assert best_prefix([10.0, 11.0, 12.0], [1.0, 1.0], share_decided=0.5) == (10.0, 0)
    assert expected_tokens(0.5, 2, 0.9) == pytest.approx(0.9 + 0.5 * 0.81 + 0.25 * 0.729)
    assert expected_tokens(0.5, 0, 0.9) == 1.0


def test_where_near_ties_are_frequent_only_what_is_nearly_sure_is_drafted() -> None:
    ties = NearTies()
    profile, seen = profile_with([10.0, 10.5, 11.0, 12.0, 14.0, 18.0]), LookupAcceptance()
    adaptive = AdaptiveSpeculator(LookupDrafter(History(0)), seen, None, 0.5, RoundCosts(profile), ties=ties)
    text = [5, 6, 7, 5]
    adaptive.start(text, None, 0)
    assert propose(adaptive, text).token_ids
    for _ in range(60):
        ties.observe(0, is_undecided=True)
        ties.observe(1, is_undecided=False)
    assert propose(adaptive, text).token_ids == ()
    assert ties.share_decided == pytest.approx(0.5, abs=0.1)
    for _ in range(2000):
        ties.observe(1, is_undecided=False)
    assert propose(adaptive, text).token_ids


def test_where_a_wider_pass_costs_nothing_all_of_the_proposal_is_drafted() -> None:
    adaptive = speculator(profile_with([10.0] * 6), LookupAcceptance())
    adaptive.start(REPEATING, None, 0)
    assert propose(adaptive, REPEATING).token_ids == tuple(REPEATING[:16])
    assert len(propose(adaptive, REPEATING, room=3).token_ids) == 3


def test_where_every_token_of_a_pass_costs_a_step_nothing_is_drafted() -> None:
    adaptive = speculator(profile_with([10.0 * width for width in WIDTHS]), LookupAcceptance(), FixedModel(1))
    adaptive.start(REPEATING, None, 0)
    assert propose(adaptive, REPEATING).token_ids == ()


def test_what_was_not_drafted_is_judged_all_the_same() -> None:
    """trt#12905: a bad stretch never switches drafting off for good."""
    seen = LookupAcceptance()
    for matched in range(1, 40):
        for agreement in get_args(Agreement):
            for _ in range(500):
                seen.observe(Evidence(matched, agreement), stands=False)
    adaptive = speculator(profile_with([10.0, 11.0, 12.0, 13.0, 14.0, 15.0]), seen)
    adaptive.start(REPEATING, None, 0)
    text, drafted = list(REPEATING), []
    for _ in range(600):
        drafted.append(len(propose(adaptive, text).token_ids))
        emitted = [text[-8]]
        adaptive.observe(emitted)
        text += emitted
    assert drafted[0] == 0
    assert drafted[-1] > 0


def test_an_adversary_whose_guesses_never_stand_is_hardly_ever_followed() -> None:
    """The text repeats itself and goes on otherwise: 1,000 rounds cost at most 2 % more than plain ones."""
    verify_ms = [10.0, 10.5, 10.8, 11.5, 13.0, 16.0]
    adaptive = speculator(profile_with(verify_ms), LookupAcceptance())
    adaptive.start([], None, 0)
    text, total_ms = [0, 1, 0, 2, 0], 0.0
    by_width = dict(zip(WIDTHS, verify_ms, strict=True))
    costs = RoundCosts(profile_with(verify_ms)).at(0)[0]
    assert costs[0] == by_width[1]
    for number in range(1000):
        total_ms += costs[len(propose(adaptive, text).token_ids)]
        # An old token followed by one that never followed it.
        emitted = [0] if number % 2 else [3 + number]
        adaptive.observe(emitted)
        text += emitted
    assert total_ms <= 1.02 * 1000 * costs[0]


def test_a_draft_model_takes_over_where_nothing_is_found_and_is_left_where_it_fails() -> None:
    model = FixedModel(99)
    profile = profile_with([10.0, 10.5, 11.0, 12.0, 14.0, 18.0], propose_ms=3.0)
    adaptive = speculator(profile, LookupAcceptance(), model, alpha=0.8)
    adaptive.start([1, 2, 3], None, 0)
    text = [1, 2, 3]
    for number in range(60):
        proposal = propose(adaptive, text)
        assert set(proposal.token_ids) <= {99}
        adaptive.observe([100 + number])
        text.append(100 + number)
    assert 0 < model.num_asked < 50


def test_longer_matches_draft_no_fewer_tokens() -> None:
    choices = round_choices(profile_with([10.0, 12.0, 14.0, 18.0, 26.0, 44.0]), LookupAcceptance(), 100)
    assert choices[0].draft_len == 0
    for agreement in ("alone", "agreed", "split"):
        found = [choice for choice in choices if choice.agreement == agreement]
        lengths = [choice.draft_len for choice in found]
        assert lengths == sorted(lengths)
        assert lengths[-1] > lengths[0]
        rates = [choices[0].ms_per_token, *(choice.ms_per_token for choice in found)]
        assert rates == sorted(rates, reverse=True)


def test_a_profile_of_very_wide_passes_is_read_in_no_time() -> None:
    """Measured at 17 positions and at a million, say: rounds are never that wide."""
    profile = profile_with([10.0, 11.0, 12.0, 13.0, 15.0, 20.0])
    wide = replace(profile, verify=replace(profile.verify, sizes_tokens=(*WIDTHS[:-1], 10**6)))
    assert len(RoundCosts(wide).at(100)[0]) <= 65
    assert len(RoundCosts(profile).at(100)[0]) == 17


def test_a_draft_model_has_to_earn_its_start_with_what_is_not_looked_up() -> None:
    auto = make_policy("auto", toy_profile())
    features = Features(num_prompt_tokens=200, max_new_tokens=24, drafter="model", alpha=0.8)
    rarely, mostly = (auto.decide(replace(features, looked_up_share=share)) for share in (0.0, 0.9))
    assert rarely.action.draft_len > 0
    assert mostly.action.draft_len == 0
    assert mostly.drafter == "lookup"
    assert rarely.predicted_ms is not None
    assert mostly.predicted_ms is not None
    assert mostly.predicted_ms < rarely.predicted_ms


def test_a_completion_says_how_many_rounds_drafted_how_many_tokens() -> None:
    fake = FakeRuntime()
    completion = fake.run("auto", tuple(range(8)) * 4)
    assert sum(completion.rounds_by_draft_len.values()) == completion.num_rounds
    drafted = sum(draft_len * count for draft_len, count in completion.rounds_by_draft_len.items())
    assert drafted == completion.num_draft_tokens
