"""The cost model: C(k, r) and its parts, the crossover, interpolation, and the choices that follow from them."""

import math
from collections.abc import Callable
from dataclasses import fields, replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from rakvctl.core.acceptance import expected_tokens
from rakvctl.core.cost import DRAFT_LENS, CostModel, num_rounds
from rakvctl.core.policies import RakvPolicy
from rakvctl.core.profile import (
    SCHEMA_VERSION,
    Curve,
    DraftCosts,
    Fingerprint,
    Fit,
    HardwareProfile,
    MeasuredAcceptance,
    ModelCosts,
)
from rakvctl.core.types import Action, CostBreakdown, Features

SIZES, CONTEXTS = (1, 16, 256), (0, 256)
VERIFY_SIZES = tuple(draft_len + 1 for draft_len in DRAFT_LENS)
PLAIN, REUSE = Action(False, 0), Action(True, 0)
Cost = Callable[[int, int], float]
FINGERPRINT = Fingerprint(
    processor="a processor",
    device="cpu",
    driver="none",
    threads=2,
    dtype="float32",
    backend="fake",
    versions="none",
    target="target",
    target_digest="1",
    draft="draft",
    draft_digest="2",
)


def curve(cost: Cost, sizes: tuple[int, ...] = SIZES, contexts: tuple[int, ...] = CONTEXTS) -> Curve:
    table = tuple(tuple(float(cost(size, context)) for context in contexts) for size in sizes)
    zeros = tuple(tuple(0.0 for _ in contexts) for _ in sizes)
    return Curve(sizes, contexts, table, zeros, tuple(tuple(5 for _ in contexts) for _ in sizes))


def model(prefill: Cost, clone: Cost, kv_bytes: int, new_length_ms: float) -> ModelCosts:
    clones = curve(clone, contexts=(0,))
    return ModelCosts(
        weight_bytes=1,
        kv_bytes_per_token=kv_bytes,
        new_length_ms=new_length_ms,
        prefill=curve(prefill),
        clone=clones,
        insert=clones,
    )


def make_profile(
    *,
    prefill: Cost = lambda size, _: 2.0 + size,
    clone: Cost = lambda size, _: 0.125 * size,
    verify: Cost = lambda size, _: 9.0 + size,
    draft_prefill: Cost = lambda size, _: 1.0 + 0.25 * size,
    draft_clone: Cost = lambda size, _: 0.0625 * size,
    propose: Cost = lambda size, _: 2.0 * size,
    has_draft: bool = True,
    new_length_ms: float = 0.0,
    emit_ms: float = 0.0,
    memory_bytes_per_ms: float = 1000.0,
) -> HardwareProfile:
    draft = DraftCosts(
        model=model(draft_prefill, draft_clone, 10, new_length_ms), propose=curve(propose, DRAFT_LENS[1:])
    )
    return HardwareProfile(
        schema_version=SCHEMA_VERSION,
        created="today",
        fingerprint=FINGERPRINT,
        target=model(prefill, clone, 100, new_length_ms),
        verify=curve(verify, VERIFY_SIZES),
        draft=draft if has_draft else None,
        emit_ms=emit_ms,
        memory_bytes_per_ms=memory_bytes_per_ms,
        acceptance=MeasuredAcceptance(alpha=0.5, num_trials=10),
        fit=Fit(mape_percent=0.0, spearman=1.0, num_probes=1),
    )


def hit(*, alpha: float = 0.5, num_cloned: int = 99, draft_cloned: int | None = None, **others: int) -> Features:
    """A prompt of 100 tokens and 64 new ones, of which target and draft have `num_cloned` stored."""
    known = {"num_prompt_tokens": 100, "max_new_tokens": 64} | others
    return Features(
        num_matched_tokens=num_cloned,
        num_cloned_tokens=num_cloned,
        num_draft_cloned_tokens=num_cloned if draft_cloned is None else draft_cloned,
        drafter="model",
        alpha=alpha,
        **known,
    )


def choose(profile: HardwareProfile, features: Features) -> Action:
    return RakvPolicy(CostModel(profile)).decide(features).action


def row_of(profile: HardwareProfile, features: Features, action: Action) -> CostBreakdown:
    return next(row for row in CostModel(profile).table(features) if row.action == action)


# Whole numbers, so that sums and products are exact and ties are real ones.
_times = st.integers(1, 200).map(float)
_lively_times = st.floats(0.01, 1000.0)
_alphas = st.floats(0.0, 1.0)


@st.composite
def _curves(
    draw: st.DrawFn, times: st.SearchStrategy[float], sizes: tuple[int, ...], contexts: tuple[int, ...]
) -> Curve:
    values = {(size, context): draw(times) for size in sizes for context in contexts}
    return curve(lambda size, context: values[size, context], sizes, contexts)


@st.composite
def _model_costs(draw: st.DrawFn, times: st.SearchStrategy[float], contexts: tuple[int, ...]) -> ModelCosts:
    clone = draw(_curves(times, SIZES, (0,)))
    return ModelCosts(
        weight_bytes=1,
        kv_bytes_per_token=draw(st.integers(0, 1000)),
        new_length_ms=draw(times),
        prefill=draw(_curves(times, SIZES, contexts)),
        clone=clone,
        insert=clone,
    )


@st.composite
def _profiles(
    draw: st.DrawFn, times: st.SearchStrategy[float] = _lively_times, contexts: tuple[int, ...] = CONTEXTS
) -> HardwareProfile:
    return replace(
        make_profile(),
        target=draw(_model_costs(times, contexts)),
        verify=draw(_curves(times, VERIFY_SIZES, contexts)),
        draft=DraftCosts(
            model=draw(_model_costs(times, contexts)), propose=draw(_curves(times, DRAFT_LENS[1:], contexts))
        ),
        emit_ms=draw(times),
        memory_bytes_per_ms=draw(st.sampled_from([1.0, 1000.0, 1e6])),
    )


@st.composite
def _features(draw: st.DrawFn, alphas: st.SearchStrategy[float] = _alphas) -> Features:
    num_prompt_tokens = draw(st.integers(1, 600))
    num_cloned = draw(st.sampled_from([0, num_prompt_tokens - 1, num_prompt_tokens]))
    return Features(
        num_prompt_tokens=num_prompt_tokens,
        max_new_tokens=draw(st.integers(0, 300)),
        num_matched_tokens=num_cloned,
        num_cloned_tokens=num_cloned,
        num_draft_cloned_tokens=draw(st.sampled_from([0, num_cloned])),
        drafter=draw(st.sampled_from(["model", "none"])),
        alpha=draw(alphas),
        memory_budget_bytes=draw(st.none() | st.integers(0, 10**6)),
    )


# --- the table


def test_a_worked_example_has_the_methods_formula() -> None:
    """C(4, 1) of 100 prompt tokens, 80 of them cloned, 21 new ones at alpha 1/2: E_4 = 31/16, ceil(20 / E_4) = 11.

    Ten full rounds leave 20 - 10 E_4 < 1 token: the last round is a plain step.
    """
    profile = make_profile(emit_ms=0.5)
    features = hit(num_cloned=80, max_new_tokens=21)
    row = row_of(profile, features, Action(True, 4))
    assert row == CostBreakdown(
        Action(True, 4),
        clone_ms=10.0,
        prefill_ms=22.0,
        draft_prefill_ms=5.0 + 6.0,
        draft_ms=10 * 8.0,
        verify_ms=10 * 14.0 + 10.0 + 21 * 0.5,
        memory_ms=0.0,
        rounds=11,
    )
    assert row.total_ms == 10.0 + 22.0 + 11.0 + 80.0 + 160.5


@given(_profiles(), _features())
def test_every_action_has_a_row_whose_parts_add_up(profile: HardwareProfile, features: Features) -> None:
    table = CostModel(profile).table(features)
    assert [row.action for row in table] == [Action(reuse, k) for reuse in (False, True) for k in DRAFT_LENS]
    for row in table:
        parts = [getattr(row, field.name) for field in fields(row) if field.name.endswith("_ms")]
        assert len(parts) == 6
        if any(math.isnan(part) for part in parts):
            assert row.infeasible
        else:
            assert row.total_ms == pytest.approx(math.fsum(parts), rel=1e-12)
            assert min(parts) >= 0.0


def _doubled(profile: HardwareProfile) -> HardwareProfile:
    def twice(one: Curve) -> Curve:
        return replace(one, median_ms=tuple(tuple(2 * value for value in row) for row in one.median_ms))

    def slower(costs: ModelCosts) -> ModelCosts:
        return replace(
            costs,
            new_length_ms=2 * costs.new_length_ms,
            prefill=twice(costs.prefill),
            clone=twice(costs.clone),
            insert=twice(costs.insert),
        )

    assert profile.draft is not None
    return replace(
        profile,
        target=slower(profile.target),
        verify=twice(profile.verify),
        draft=DraftCosts(model=slower(profile.draft.model), propose=twice(profile.draft.propose)),
        emit_ms=2 * profile.emit_ms,
        memory_bytes_per_ms=profile.memory_bytes_per_ms / 2,
    )


@given(_profiles(), _features())
def test_scaling_all_costs_leaves_the_choice_and_the_crossovers(profile: HardwareProfile, features: Features) -> None:
    slow = _doubled(profile)
    assert choose(slow, features) == choose(profile, features)
    for row, slow_row in zip(CostModel(profile).table(features), CostModel(slow).table(features), strict=True):
        assert slow_row.total_ms == pytest.approx(2 * row.total_ms, rel=1e-12, nan_ok=True)
        crossovers = [CostModel(one).crossover(row.action, features) for one in (profile, slow)]
        assert crossovers[0] == pytest.approx(crossovers[1])


@given(_profiles(), _features(), _alphas, _alphas)
def test_a_higher_alpha_never_lowers_the_advantage_of_drafting(
    profile: HardwareProfile, features: Features, one: float, other: float
) -> None:
    low, high = (CostModel(profile).table(replace(features, alpha=alpha)) for alpha in sorted((one, other)))
    for index, (row, better) in enumerate(zip(low, high, strict=True)):
        plain_index = index - index % len(DRAFT_LENS)
        if not math.isnan(row.total_ms + low[plain_index].total_ms):
            advantage = low[plain_index].total_ms - row.total_ms
            assert high[plain_index].total_ms - better.total_ms >= advantage - 1e-9 * row.total_ms


@given(_profiles(), _features(), _alphas)
def test_a_higher_alpha_never_ends_drafting(profile: HardwareProfile, features: Features, other: float) -> None:
    if choose(profile, features).draft_len:
        assert choose(profile, replace(features, alpha=max(features.alpha, other))).draft_len


@pytest.mark.parametrize("num_new", [0, 1])
def test_without_a_token_after_the_first_there_are_no_rounds(num_new: int) -> None:
    """The first token comes with the prefill; what a draft model would do before the rounds is still charged."""
    profile, features = make_profile(), hit(alpha=1.0, max_new_tokens=num_new)
    for row in CostModel(profile).table(features):
        assert (row.rounds, row.draft_ms, row.verify_ms) == (0, 0.0, 0.0)
        assert (row.draft_prefill_ms > 0) == (row.action.draft_len > 0)
        assert CostModel(profile).crossover(row.action, features) is None
    assert choose(profile, features) == REUSE


def test_a_prompt_of_one_token() -> None:
    profile = make_profile()
    features = hit(num_cloned=0, num_prompt_tokens=1, max_new_tokens=2)
    row = row_of(profile, features, PLAIN)
    assert (row.prefill_ms, row.rounds, row.verify_ms) == (3.0, 1, 10.0)
    assert choose(profile, features) == PLAIN


@pytest.mark.parametrize("draft_len", [*DRAFT_LENS, 32])
def test_expected_tokens_are_exact_at_the_ends(draft_len: int) -> None:
    assert expected_tokens(0.0, draft_len) == 1.0
    assert expected_tokens(1.0, draft_len) == draft_len + 1.0


@given(_alphas, st.sampled_from(DRAFT_LENS))
def test_expected_tokens_equal_the_closed_form(alpha: float, draft_len: int) -> None:
    assume(alpha < 0.999)
    assert expected_tokens(alpha, draft_len) == pytest.approx((1 - alpha ** (draft_len + 1)) / (1 - alpha))


@given(st.integers(1, 500), st.sampled_from(DRAFT_LENS))
def test_rounds_are_exact_at_the_ends(num_new: int, draft_len: int) -> None:
    features = hit(max_new_tokens=num_new)
    assert num_rounds(replace(features, alpha=0.0), draft_len) == num_new - 1
    assert num_rounds(replace(features, alpha=1.0), draft_len) == -((num_new - 1) // -(draft_len + 1))


# --- the crossover


def _bisected(costs: CostModel, action: Action, features: Features) -> float | None:
    """The least alpha at which C(k, r) <= C(0, r), by halving."""

    def pays(alpha: float) -> bool:
        at = replace(features, alpha=alpha)
        return costs.breakdown(action, at).total_ms <= costs.breakdown(Action(action.reuse, 0), at).total_ms

    if not pays(1.0):
        return None
    if pays(0.0):
        return 0.0
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if pays(middle) else (middle, high)
    return high


@settings(max_examples=150)
@given(st.data())
def test_the_crossover_is_the_least_alpha_that_pays(data: st.DataObject) -> None:
    """Exactly, steps and ties included: whole milliseconds that do not depend on the context are not rounded."""
    costs = CostModel(data.draw(_profiles(_times, (0,))))
    features = replace(data.draw(_features()), memory_budget_bytes=None, drafter="model")
    assume(features.max_new_tokens > 1)
    for row in costs.table(features):
        if row.action.draft_len and row.infeasible is None:
            expected = _bisected(costs, row.action, features)
            assert costs.crossover(row.action, features) == (expected if expected is None else pytest.approx(expected))


@settings(max_examples=100)
@given(_profiles(), _features())
def test_the_crossover_is_the_least_alpha_that_pays_for_any_times(profile: HardwareProfile, features: Features) -> None:
    costs, features = CostModel(profile), replace(features, drafter="model")
    assume(features.max_new_tokens > 1)
    for row in costs.table(features):
        if row.action.draft_len and not math.isnan(row.total_ms):
            crossover = costs.crossover(row.action, features)
            plain_ms = costs.breakdown(Action(row.action.reuse, 0), features).total_ms

            def advantage(alpha: float, action: Action = row.action, plain_ms: float = plain_ms) -> float:
                return plain_ms - costs.breakdown(action, replace(features, alpha=alpha)).total_ms

            if crossover is None:
                assert advantage(1.0) < 1e-9 * plain_ms
            else:
                assert 0.0 <= crossover <= 1.0
                assert advantage(min(1.0, crossover + 1e-9)) >= -1e-9 * plain_ms
                assert crossover < 1e-6 or advantage(crossover - 1e-6) <= 1e-9 * plain_ms


def test_the_crossover_does_not_depend_on_the_alpha_in_force() -> None:
    costs = CostModel(make_profile())
    found = {costs.crossover(Action(True, 4), hit(alpha=alpha)) for alpha in (0.0, 0.3, 0.9, 1.0)}
    assert len({round(crossover, 9) for crossover in found if crossover is not None}) == 1
    assert None not in found


def test_there_is_no_crossover_where_even_perfect_drafts_do_not_pay() -> None:
    costs = CostModel(make_profile(propose=lambda size, _: 100.0 * size))
    assert [costs.crossover(row.action, hit()) for row in costs.table(hit())] == [None] * 12


def test_there_is_no_crossover_without_a_draft_or_a_stored_prefix() -> None:
    costs = CostModel(make_profile(has_draft=False))
    assert [costs.crossover(row.action, hit()) for row in costs.table(hit())] == [None] * 12
    cold = hit(num_cloned=0)
    costs = CostModel(make_profile())
    assert all(costs.crossover(Action(True, k), cold) is None for k in DRAFT_LENS)
    assert costs.crossover(Action(False, 4), cold) is not None


# --- what cannot be done


def test_without_a_stored_prefix_reuse_is_shown_with_the_reason() -> None:
    rows = CostModel(make_profile()).table(hit(num_cloned=0))
    assert {row.infeasible for row in rows if row.action.reuse} == {"no stored prefix"}
    assert {row.infeasible for row in rows if not row.action.reuse} == {None}


@pytest.mark.parametrize("reason", [None, "the draft has 20 positions"])
def test_without_a_draft_drafting_is_shown_with_the_reason(reason: str | None) -> None:
    features = replace(hit(alpha=1.0), drafter="none", no_drafter_reason=reason)
    rows = CostModel(make_profile()).table(features)
    assert {row.infeasible for row in rows if row.action.draft_len} == {reason or "no draft model"}
    assert {row.infeasible for row in rows if not row.action.draft_len} == {None}
    assert choose(make_profile(), features) == REUSE


def test_a_profile_without_draft_drafts_nothing() -> None:
    rows = CostModel(make_profile(has_draft=False)).table(hit(alpha=1.0))
    assert {row.infeasible for row in rows if row.action.draft_len} == {"no draft model"}


def test_what_does_not_fit_into_memory_is_shown_with_the_reason_and_its_cost() -> None:
    """164 tokens of 100 bytes fit, 164 tokens of 110 bytes do not; the draft would have paid."""
    features = hit(alpha=1.0)
    assert choose(make_profile(), features).draft_len > 0
    tight = replace(features, memory_budget_bytes=164 * 110 - 1)
    rows = CostModel(make_profile()).table(tight)
    for row in rows:
        assert math.isfinite(row.total_ms)
        assert (row.infeasible is None) == (row.action.draft_len == 0)
        assert row.infeasible is None or "MiB" in row.infeasible
    assert choose(make_profile(), tight) == REUSE
    assert choose(make_profile(), replace(tight, memory_budget_bytes=164 * 110)).draft_len > 0


def test_memory_is_free_up_to_a_soft_share_and_then_dearer_by_the_byte() -> None:
    profile = make_profile(memory_bytes_per_ms=100.0)
    num_bytes = 164 * 100
    costs = [
        row_of(profile, replace(hit(), memory_budget_bytes=int(num_bytes / share)), PLAIN).memory_ms
        for share in (0.5, 0.79, 0.85, 0.9, 1.0)
    ]
    assert costs[:2] == [0.0, 0.0]
    assert costs == sorted(costs)
    assert costs[-1] == pytest.approx(0.2 * num_bytes / 100.0, rel=0.01)
    assert row_of(profile, hit(), PLAIN).memory_ms == 0.0


@given(_profiles(), _features())
def test_an_infeasible_action_is_never_chosen(profile: HardwareProfile, features: Features) -> None:
    decision = RakvPolicy(CostModel(profile)).decide(features)
    row = next(row for row in decision.table if row.action == decision.action)
    if row.infeasible is not None:
        assert all(other.infeasible is not None for other in decision.table)
        assert decision.action == PLAIN


@given(_profiles(), _features(), st.floats(0.0, 1e6))
def test_a_probe_is_feasible_and_within_what_it_may_take(
    profile: HardwareProfile, features: Features, probe_ms: float
) -> None:
    decision = RakvPolicy(CostModel(profile)).decide(replace(features, probe_ms=probe_ms))
    row = next(row for row in decision.table if row.action == decision.action)
    if decision.is_probe:
        assert decision.action.draft_len > 0
        assert row.infeasible is None
        assert decision.extra_ms <= probe_ms * (1 + 1e-9) + 1e-9 * row.total_ms
    elif any(other.infeasible is None for other in decision.table):
        assert decision.extra_ms == 0.0


def test_where_nothing_fits_plain_decoding_is_tried_all_the_same() -> None:
    assert choose(make_profile(), replace(hit(), memory_budget_bytes=0)) == PLAIN


# --- the choice


def test_drafting_is_chosen_where_it_pays() -> None:
    profile = make_profile()
    assert choose(profile, hit(alpha=1.0)) == Action(True, 8)
    assert choose(profile, hit(alpha=0.0)) == REUSE


def test_83_percent_acceptance_does_not_pay_where_a_verify_grows_with_its_width() -> None:
    """antirez/ds4#695: milliseconds decide, never acceptance alone."""
    profile = make_profile(verify=lambda size, _: 10.0 * size)
    assert choose(profile, hit(alpha=0.83)).draft_len == 0
    assert choose(make_profile(), hit(alpha=0.83)).draft_len > 0


def test_a_prefix_is_computed_again_where_copying_it_takes_longer() -> None:
    """vllm#3154: a slow copy is worse than no reuse."""
    slow = make_profile(clone=lambda size, _: 2.0 * size)
    assert choose(slow, hit(alpha=0.0)) == PLAIN
    assert choose(make_profile(), hit(alpha=0.0)) == REUSE


def test_reuse_and_drafting_are_decided_together() -> None:
    """Cloning the target's states does not pay here, but with the draft's beside them it does: sgl#32459."""
    profile = make_profile(
        prefill=lambda size, _: 0.125 * size,
        clone=lambda size, _: 0.25 * size,
        draft_prefill=lambda size, _: 1.0 * size,
        draft_clone=lambda size, _: 0.001 * size,
    )
    assert choose(profile, hit(alpha=0.0)) == PLAIN
    assert choose(profile, hit(alpha=1.0)) == Action(True, 8)


def test_an_entry_without_draft_states_charges_the_whole_draft_prefill() -> None:
    """mlx-examples#1155: a prompt that was stored without a draft serves one, at a price."""
    action = Action(True, 4)
    profile = make_profile()
    without, with_states = (row_of(profile, hit(draft_cloned=cloned), action) for cloned in (0, 99))
    assert without.draft_prefill_ms == 1.0 + 0.25 * 100
    assert with_states.draft_prefill_ms == 0.0625 * 99 + 1.0 + 0.25 * 1
    assert without.draft_prefill_ms == row_of(profile, hit(), Action(False, 4)).draft_prefill_ms
    assert (without.clone_ms, without.prefill_ms) == (with_states.clone_ms, with_states.prefill_ms)


def test_a_missing_draft_prefill_can_turn_the_choice() -> None:
    profile = make_profile(draft_prefill=lambda size, _: 4.0 * size)
    assert choose(profile, hit(alpha=1.0)).draft_len > 0
    assert choose(profile, hit(alpha=1.0, draft_cloned=0)).draft_len == 0


def test_an_exact_hit_needs_no_prefill_at_all() -> None:
    row = row_of(make_profile(), hit(num_cloned=100), Action(True, 4))
    assert (row.clone_ms, row.prefill_ms, row.draft_prefill_ms) == (12.5, 0.0, 6.25)


@pytest.mark.parametrize(("num_tokens", "is_new"), [(1, False), (9, False), (10, True), (100, True)])
def test_a_prefill_is_charged_as_a_new_length_unless_rounds_have_it(num_tokens: int, is_new: bool) -> None:
    """Rounds are of 1 to 9 positions here; the draft's prefill is charged as the target's is."""
    cold = hit(num_cloned=0, num_prompt_tokens=num_tokens)
    surcharges = [
        getattr(row_of(make_profile(new_length_ms=7.0), cold, Action(False, 4)), part)
        - getattr(row_of(make_profile(), cold, Action(False, 4)), part)
        for part in ("prefill_ms", "draft_prefill_ms", "draft_ms", "verify_ms")
    ]
    assert surcharges == pytest.approx([7.0 * is_new, 7.0 * is_new, 0.0, 0.0])


def test_an_exact_hit_has_no_new_length() -> None:
    row = row_of(make_profile(new_length_ms=7.0), hit(num_cloned=100), Action(True, 4))
    assert (row.prefill_ms, row.draft_prefill_ms) == (0.0, 6.25)


def test_reuse_that_gains_nothing_is_left_out() -> None:
    """A tie between cloning and computing: plain decoding stands first."""
    profile = make_profile(prefill=lambda size, _: 1.0 * size, clone=lambda size, _: 1.0 * size)
    assert row_of(profile, hit(), REUSE).total_ms == row_of(profile, hit(), PLAIN).total_ms
    assert choose(profile, hit(alpha=0.0)) == PLAIN


def test_drafting_that_gains_nothing_is_left_out() -> None:
    """A tie at every k. Nothing was saved up for a probe, so there is none either."""
    free: Cost = lambda _size, _context: 0.0  # noqa: E731
    profile = make_profile(verify=lambda *_: 8.0, draft_prefill=free, draft_clone=free, propose=free)
    features = hit(alpha=0.0, num_cloned=0)
    assert len({row.total_ms for row in CostModel(profile).table(features) if not row.infeasible}) == 1
    decision = RakvPolicy(CostModel(profile)).decide(features)
    assert (decision.action, decision.is_probe) == (PLAIN, False)


def test_the_same_features_give_the_same_decision() -> None:
    policy = RakvPolicy(CostModel(make_profile()))
    assert policy.decide(hit()) == policy.decide(hit())


def test_a_decision_says_what_it_reckoned_with() -> None:
    features = hit(alpha=0.9)
    decision = RakvPolicy(CostModel(make_profile())).decide(features)
    assert decision.alpha == 0.9
    assert decision.table == CostModel(make_profile()).table(features)
    assert decision.predicted_ms == min(row.total_ms for row in decision.table)
    assert (decision.policy, decision.drafter, decision.extra_ms) == ("rakv", "model", 0.0)


# --- interpolation

_points = st.lists(st.integers(0, 5000), min_size=1, max_size=5, unique=True).map(lambda points: tuple(sorted(points)))


@st.composite
def _any_curves(draw: st.DrawFn) -> Curve:
    sizes = tuple(size + 1 for size in draw(_points))
    return draw(_curves(_lively_times, sizes, draw(_points)))


@given(_any_curves())
def test_measured_points_are_exact(one: Curve) -> None:
    for size, row in zip(one.sizes_tokens, one.median_ms, strict=True):
        for context, value in zip(one.contexts_tokens, row, strict=True):
            assert one.at(size, context) == pytest.approx(value, rel=1e-9, abs=1e-9)


@given(st.data())
def test_between_neighbours_a_value_lies_between_theirs(data: st.DataObject) -> None:
    one = data.draw(_any_curves())
    size = data.draw(st.integers(one.sizes_tokens[0], one.sizes_tokens[-1]))
    context = data.draw(st.floats(one.contexts_tokens[0], one.contexts_tokens[-1]))
    assert one.covers(size, context)
    rows = [index for index, at in enumerate(one.sizes_tokens) if _is_neighbour(one.sizes_tokens, at, size)]
    columns = [index for index, at in enumerate(one.contexts_tokens) if _is_neighbour(one.contexts_tokens, at, context)]
    corners = [one.median_ms[row][column] for row in rows for column in columns]
    assert min(corners) - 1e-9 <= one.at(size, context) <= max(corners) + 1e-9


def _is_neighbour(points: tuple[int, ...], point: int, at: float) -> bool:
    """Whether no other point lies between `point` and `at`, or on `at`."""
    return point == at or not any(min(point, at) < other < max(point, at) or other == at for other in points)


def test_halfway_between_four_points_is_their_mean() -> None:
    values = {(1, 0): 1.0, (3, 0): 2.0, (1, 10): 3.0, (3, 10): 8.0}
    one = curve(lambda size, context: values[size, context], (1, 3), (0, 10))
    assert one.at(2, 5) == 3.5


@given(_any_curves(), st.integers(0, 5000), st.integers(0, 5000), st.floats(0, 6000))
def test_beyond_the_last_size_nothing_gets_cheaper(one: Curve, more: int, yet_more: int, context: float) -> None:
    last = one.sizes_tokens[-1]
    assert one.at(last + more + yet_more, context) >= one.at(last + more, context) - 1e-9


@given(_any_curves(), st.floats(0, 5000), st.floats(0, 5000), st.integers(0, 5001))
def test_beyond_the_last_context_nothing_gets_cheaper(one: Curve, more: float, yet_more: float, size: int) -> None:
    """At any size that was measured or lies between measured ones."""
    size, last = min(size, one.sizes_tokens[-1]), one.contexts_tokens[-1]
    assert one.at(size, last + more + yet_more) >= one.at(size, last + more) - 1e-6


def test_beyond_both_ends_nothing_gets_cheaper() -> None:
    """A longer context never makes a pass cheaper, not even one over more tokens than were ever measured."""
    values = {(1, 0): 1.0, (1, 10): 11.0, (2, 0): 20.0, (2, 10): 20.0}
    one = curve(lambda size, context: values[size, context], (1, 2), (0, 10))
    assert one.at(12, 30) >= one.at(12, 10)


def test_beyond_the_last_point_the_last_piece_goes_on() -> None:
    one = curve(lambda size, context: 10.0 + 2.0 * size + 0.5 * context, (1, 3, 9), (0, 8))
    assert one.at(100, 8) == pytest.approx(214.0)
    assert one.at(9, 1000) == pytest.approx(528.0)
    assert one.at(100, 1000) == pytest.approx(710.0)


def test_nothing_done_costs_nothing_and_less_than_the_first_point_as_much_as_it() -> None:
    one = curve(lambda size, _: float(size), (4, 8), (16, 32))
    assert one.at(0, 1000) == 0.0
    assert one.at(1, 0) == one.at(4, 16) == 4.0


@given(_any_curves(), st.integers(1, 10**6), st.floats(0, 1e6))
def test_every_time_is_positive_and_finite(one: Curve, size: int, context: float) -> None:
    assert 0.0 < one.at(size, context) < math.inf
