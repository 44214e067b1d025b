"""Profiles that measure little: one width, one context, or passes too narrow for every k of the table."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rakvctl.core.acceptance import initial_experience
from rakvctl.core.backends.fake import VirtualClock
from rakvctl.core.cost import DRAFT_LENS, CostModel
from rakvctl.core.policies import make_policy
from rakvctl.core.profile import Curve, HardwareProfile
from rakvctl.core.profile_file import write_profile
from rakvctl.core.rounds import RoundCosts, round_choices
from rakvctl.core.types import CostBreakdown, Features, Request, SamplingParams
from rakvctl.measure.arms import make_arm_runtime, store_of
from rakvctl.measure.check import check
from rakvctl.measure.sensitivity import SensitivityStudy
from rakvctl.measure.timing import Effort
from tests.profiles import toy_pair, toy_profile
from tests.program import Call

PROMPT = tuple(range(20))


def part_of(curve: Curve, sizes: list[int], contexts: list[int]) -> Curve:
    """Only some of its points, by their indexes."""

    def table(values: tuple[tuple[Any, ...], ...]) -> Any:
        return tuple(tuple(values[size][context] for context in contexts) for size in sizes)

    return Curve(
        tuple(curve.sizes_tokens[size] for size in sizes),
        tuple(curve.contexts_tokens[context] for context in contexts),
        table(curve.median_ms),
        table(curve.mad_ms),
        table(curve.runs),
    )


def with_widths(widths: tuple[int, ...], *, with_draft: bool = True) -> HardwareProfile:
    """The toy profile with only these widths of passes measured; drafts as it has them."""
    profile = toy_profile(with_draft=with_draft)
    places = [profile.verify.sizes_tokens.index(width) for width in widths]
    return replace(profile, verify=part_of(profile.verify, places, list(range(len(profile.verify.contexts_tokens)))))


@st.composite
def parts(draw: st.DrawFn, curve: Curve) -> Curve:
    """Any of its points that make a table."""
    sizes, contexts = (
        sorted(draw(st.sets(st.integers(0, len(points) - 1), min_size=1)))
        for points in (curve.sizes_tokens, curve.contexts_tokens)
    )
    return part_of(curve, sizes, contexts)


@st.composite
def profiles(draw: st.DrawFn) -> HardwareProfile:
    profile = toy_profile()
    assert profile.draft is not None
    models = [
        replace(model, prefill=draw(parts(model.prefill)), clone=draw(parts(model.clone)))
        for model in (profile.target, profile.draft.model)
    ]
    draft = replace(profile.draft, model=models[1], propose=draw(parts(profile.draft.propose)))
    has_draft = draw(st.booleans())
    return replace(profile, target=models[0], verify=draw(parts(profile.verify)), draft=draft if has_draft else None)


def parts_ms(row: CostBreakdown) -> list[float]:
    return [row.clone_ms, row.prefill_ms, row.draft_prefill_ms, row.draft_ms, row.verify_ms, row.memory_ms]


@given(
    profile=profiles(),
    prompt_tokens=st.integers(1, 10_000),
    cached=st.integers(0, 10_000),
    new_tokens=st.integers(1, 2_000),
    alpha=st.floats(0.0, 1.0),
)
def test_any_part_of_a_profile_gives_a_table_and_round_costs(
    profile: HardwareProfile, prompt_tokens: int, cached: int, new_tokens: int, alpha: float
) -> None:
    cached = min(cached, prompt_tokens)
    features = Features(
        num_prompt_tokens=prompt_tokens,
        max_new_tokens=new_tokens,
        num_matched_tokens=cached,
        num_cloned_tokens=cached,
        num_draft_cloned_tokens=cached,
        drafter="model",
        alpha=alpha,
    )
    costs = CostModel(profile)
    widest = profile.verify.sizes_tokens[-1] - 1
    most = min(widest, profile.draft.propose.sizes_tokens[-1]) if profile.draft else widest
    for row in costs.table(features):
        costs.crossover(row.action, features)
        if row.infeasible is None:
            assert row.action.draft_len <= most
            assert all(math.isfinite(ms) and ms >= 0.0 for ms in parts_ms(row))
        elif profile.draft and (cached or not row.action.reuse):
            assert row.action.draft_len > most
            assert "not measured" in row.infeasible
    for name in ("rakv", "auto"):
        assert make_policy(name, profile).decide(features).action.draft_len <= most

    verify_ms, propose_ms = RoundCosts(profile).at(prompt_tokens)
    assert len(verify_ms) == max(widest, 0) + 1
    assert all(k < len(verify_ms) for k in propose_ms)
    assert all(math.isfinite(ms) and ms >= 0.0 for ms in (*verify_ms, *propose_ms.values()))
    for choice in round_choices(profile, initial_experience(profile).lookups, prompt_tokens):
        assert 0 <= choice.draft_len <= max(widest, 0)


NARROW = [(1,), (1, 2), (1, 5), (5,), (2, 3)]


@pytest.mark.parametrize("widths", NARROW)
@pytest.mark.parametrize("policy", ["rakv", "auto"])
def test_a_narrow_profile_serves_and_drafts_no_further_than_it_was_measured(
    policy: str, widths: tuple[int, ...]
) -> None:
    """Costs nothing were it not for its drafts: a draft that always agrees, and a text that repeats itself."""
    clock = VirtualClock()
    pair, profile = toy_pair(clock, noise=0.0), with_widths(widths)
    experience = initial_experience(profile)
    chosen = make_policy(policy, profile)
    runtime = make_arm_runtime(pair, chosen, pair.drafter(), store_of([]), experience, clock)
    plain = make_arm_runtime(pair, make_policy("ar"), None, store_of([]), clock=clock)
    request = Request(PROMPT, SamplingParams(max_new_tokens=40))
    expected = plain.run(request).token_ids
    for _ in range(3):
        completion = runtime.run(request)
        assert completion.token_ids == expected
        assert max(completion.rounds_by_draft_len) <= widths[-1] - 1


@pytest.mark.parametrize("widths", NARROW)
def test_a_narrow_profile_is_explained(widths: tuple[int, ...], run: Call, tmp_path: Path) -> None:
    path = tmp_path / "narrow.yaml"
    write_profile(with_widths(widths), path)
    asked = ("explain", "--profile", path, "--prompt-tokens", "500", "-n", "64", "--alpha", "0.9")
    finished = run(*asked)
    assert (finished.code, finished.err) == (0, "")
    record = json.loads(run(*asked, "--json").out)
    reasons = {row["draft_len"]: row["infeasible"] for row in record["table"] if not row["reuse"]}
    too_wide = {k for k in DRAFT_LENS if k >= widths[-1] and k}
    assert {k for k, reason in reasons.items() if reason} == too_wide
    for k in too_wide:
        assert reasons[k] == f"not measured: the profile goes as far as k = {widths[-1] - 1}"
    shown = " ".join(finished.out.split())
    assert ("not measured" in shown) == bool(too_wide)


def test_a_sensitivity_study_varies_the_k_that_were_measured() -> None:
    clock = VirtualClock()
    study = SensitivityStudy(toy_pair(clock), with_widths((1, 2, 3)), 8, seed=0, clock=clock)
    runs = list(study.run([PROMPT]))
    assert {run.draft_len for run in runs} == {0, 1, 2}
    assert not any(math.isnan(run.predicted_ms) for run in runs)


@pytest.mark.parametrize("widths", NARROW)
def test_a_narrow_profile_can_be_checked(widths: tuple[int, ...]) -> None:
    clock = VirtualClock()
    drifts = check(toy_pair(clock), with_widths(widths), Effort(budget_s=10.0), clock)
    assert {drift.point.curve for drift in drifts} >= {"verify", "target.prefill"}
