"""Calibration on a virtual clock: declared costs are found again, predictions come true, changes are noticed."""

import random
import statistics
import time
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rakvctl.core.acceptance import Experience
from rakvctl.core.array_logits import ArrayLogits
from rakvctl.core.backends.fake import FakeBackend, FakeCosts, VirtualClock
from rakvctl.core.cost import DRAFT_LENS, CostModel
from rakvctl.core.drafters import Drafter
from rakvctl.core.engine import Engine
from rakvctl.core.errors import ModelError
from rakvctl.core.pair import ModelPair
from rakvctl.core.policies import Needs, RakvPolicy, fixed_speculator, make_policy
from rakvctl.core.profile import Curve, HardwareProfile
from rakvctl.core.runtime import Runtime
from rakvctl.core.speculators import Clock, Speculator
from rakvctl.core.store import PrefixStore
from rakvctl.core.text import TextCodec
from rakvctl.core.tiers import MemoryTier
from rakvctl.core.types import Action, Completion, Decision, Features, Request, SamplingParams
from rakvctl.measure.calibrate import Calibration, calibrate
from rakvctl.measure.check import check
from rakvctl.measure.grid import LONGEST_DRAFT, choose_grid
from rakvctl.measure.statistics import mape_percent, spearman
from rakvctl.measure.timing import Effort, Point, Probe, Spread, time_probes
from tests.fakes import NO_END
from tests.profiles import AnyLetterTokenizer

TARGET = FakeCosts(pass_ms=4.0, token_ms=0.5, context_ms=0.001, attention_ms=0.0001, copy_token_ms=0.002)
DRAFT = FakeCosts(pass_ms=1.0, token_ms=0.1, context_ms=0.0005, attention_ms=0.00002, copy_token_ms=0.001)
ENOUGH = Effort(budget_s=600.0)


class StrictBackend(FakeBackend):
    """Fails, as a real model does, where a pass goes beyond its last position."""

    sign = 1

    def forward(self, token_ids: Tokens[int], num_logits: int) -> ArrayLogits:
        assert token_ids, "a pass over nothing"
        assert self.max_positions is None or self.cache.length + len(token_ids) <= self.max_positions
        logits = super().forward(token_ids, num_logits)
        return ArrayLogits(self.sign * logits.scores)


class WarmingBackend(StrictBackend):
    """The first pass over so many tokens takes 7 ms more, as where kernels are made for each length."""

    def forward(self, token_ids: Tokens[int], num_logits: int) -> ArrayLogits:
        self.__dict__.setdefault("seen", set())
        if len(token_ids) not in self.__dict__["seen"]:
            self.__dict__["seen"].add(len(token_ids))
            self._clock.advance(7.0)
        return super().forward(token_ids, num_logits)


class ReplanningBackend(StrictBackend):
    """A pass takes 2 ms more where the one before was of another width, as where work is laid out anew."""

    def forward(self, token_ids: Tokens[int], num_logits: int) -> ArrayLogits:
        if len(token_ids) != self.__dict__.get("width"):
            self._clock.advance(2.0)
        self.__dict__["width"] = len(token_ids)
        return super().forward(token_ids, num_logits)


@dataclass
class Toy:
    """A toy pair with declared costs. `sign` -1: the draft's best token is the target's worst."""

    target_costs: FakeCosts = TARGET
    draft_costs: FakeCosts | None = DRAFT
    max_positions: int | None = 1024
    sign: int = 1
    backend: type[StrictBackend] = StrictBackend

    def __post_init__(self) -> None:
        self.clock = VirtualClock()
        codec = TextCodec(AnyLetterTokenizer(), NO_END)
        target = Engine(self._backend(self.target_costs))
        self.pair = ModelPair(codec, target, "toy")
        if self.draft_costs is not None:
            draft = self._backend(self.draft_costs)
            draft.sign = self.sign
            self.pair = ModelPair(codec, target, "toy", Engine(draft), "toy-draft")

    def _backend(self, costs: FakeCosts) -> StrictBackend:
        return self.backend(seed=1, clock=self.clock, costs=costs, max_positions=self.max_positions)

    def calibrated(self, effort: Effort = ENOUGH, prompts: Tokens[tuple[int, ...]] = ()) -> Calibration:
        return calibrate(self.pair, effort, self.clock, lambda *_: None, prompts)


def assert_curve(curve: Curve, cost: "Costs") -> None:
    for size, row in zip(curve.sizes_tokens, curve.median_ms, strict=True):
        for context, median_ms in zip(curve.contexts_tokens, row, strict=True):
            assert median_ms == pytest.approx(cost(size, context), rel=1e-9, abs=1e-9), (size, context)


class Costs:
    """What a curve should be, by declared costs."""

    def __init__(self, kind: str, costs: FakeCosts) -> None:
        self.kind, self.costs = kind, costs

    def __call__(self, size: int, context: int) -> float:
        if self.kind == "copy":
            return self.costs.copy_ms(size)
        if self.kind == "forward":
            return self.costs.forward_ms(size, context)
        # A draft one token behind: two tokens in the first pass, then one a pass.
        steps = [self.costs.forward_ms(1, context + index) for index in range(1, size)]
        return self.costs.forward_ms(2, context - 1) + sum(steps)


# --- declared costs are found again


def test_steps_of_the_targets_time_are_seen_where_there_is_time_to_look() -> None:
    """With little time, rounds are measured at the numbers of tokens that a draft model may draft, and at the most."""
    toy = Toy(target_costs=FakeCosts(30.0, 0.01, 0.02))
    plenty, little = (choose_grid(toy.pair, pass_s, toy.clock) for pass_s in (100.0, 0.1))
    assert plenty.verify_lens == tuple(range(LONGEST_DRAFT + 1))
    assert plenty.draft_lens == little.draft_lens == little.verify_lens == (*DRAFT_LENS, LONGEST_DRAFT)


@pytest.mark.parametrize("target_costs", [TARGET, FakeCosts(30.0, 0.01, 0.02, 0.0, 0.5), FakeCosts(0.01, 5.0)])
def test_the_targets_costs_are_found_again(target_costs: FakeCosts) -> None:
    profile = Toy(target_costs=replace(target_costs, copy_token_ms=0.002)).calibrated().profile
    costs = replace(target_costs, copy_token_ms=0.002)
    assert_curve(profile.verify, Costs("forward", costs))
    assert_curve(profile.target.prefill, Costs("forward", costs))
    assert_curve(profile.target.clone, Costs("copy", costs))
    assert_curve(profile.target.insert, Costs("copy", costs))
    assert profile.verify.sizes_tokens == tuple(range(1, LONGEST_DRAFT + 2))


def test_the_drafts_costs_are_found_again() -> None:
    profile = Toy().calibrated().profile
    assert profile.draft is not None
    assert_curve(profile.draft.model.prefill, Costs("forward", DRAFT))
    assert_curve(profile.draft.model.clone, Costs("copy", DRAFT))
    assert_curve(profile.draft.model.insert, Costs("copy", DRAFT))
    propose = profile.draft.propose
    assert propose.sizes_tokens == (*DRAFT_LENS[1:], LONGEST_DRAFT)
    for size, row in zip(propose.sizes_tokens, propose.median_ms, strict=True):
        for context, median_ms in zip(propose.contexts_tokens, row, strict=True):
            if context > 0:
                assert median_ms == pytest.approx(Costs("propose", DRAFT)(size, context), rel=1e-9)


def test_drafting_after_a_short_prompt_is_not_taken_for_cheaper_than_it_is() -> None:
    """A draft is one token behind after any prompt, however short: the measured points next to 0 must say so."""
    profile = Toy(draft_costs=FakeCosts(1.0, 1.0, copy_token_ms=0.001)).calibrated().profile
    assert profile.draft is not None
    for context in (1, 8, 32, 64, 100):
        assert profile.draft.propose.at(1, context) == pytest.approx(3.0)
        assert profile.draft.propose.at(4, context) == pytest.approx(9.0)


def test_what_a_change_of_width_costs_is_measured_and_is_no_part_of_the_curves() -> None:
    profile = Toy(backend=ReplanningBackend, draft_costs=None).calibrated().profile
    assert profile.width_change_ms == pytest.approx(4.0)  # in and out
    assert_curve(profile.verify, Costs("forward", TARGET))
    assert Toy(draft_costs=None).calibrated().profile.width_change_ms == pytest.approx(0.0, abs=1e-9)


def test_what_else_a_profile_holds_is_found_again() -> None:
    toy = Toy(target_costs=replace(TARGET, memory_bytes_per_ms=123456.0))
    profile = toy.calibrated().profile
    assert profile.memory_bytes_per_ms == pytest.approx(123456.0)
    assert profile.emit_ms == pytest.approx(0.0, abs=1e-9)
    assert (profile.target.weight_bytes, profile.target.kv_bytes_per_token) == (32, 64)
    assert profile.fingerprint == toy.pair.fingerprint()
    assert profile.acceptance.num_trials > 0
    assert profile.acceptance.alpha == 1.0


@pytest.mark.parametrize("max_positions", [128, 256, 600, 1024, 4096])
def test_linear_costs_are_predicted_without_error(max_positions: int | None) -> None:
    """Points between those measured lie on the same plane."""
    fit = Toy(max_positions=max_positions).calibrated().profile.fit
    assert fit.mape_percent == pytest.approx(0.0, abs=1e-6)
    assert fit.spearman > 0.9
    assert fit.num_probes > 10


def test_what_the_first_prefill_of_a_length_takes_more_is_measured_apart() -> None:
    toy = Toy(backend=WarmingBackend)
    profile = toy.calibrated(prompts=[(1, 2, 3)]).profile
    assert profile.target.new_length_ms == pytest.approx(7.0)
    assert profile.draft is not None
    assert profile.draft.model.new_length_ms == pytest.approx(7.0)
    assert_curve(profile.target.prefill, Costs("forward", TARGET))
    assert_curve(profile.verify, Costs("forward", TARGET))


def test_where_no_length_is_new_nothing_is_charged_for_it() -> None:
    assert Toy().calibrated().profile.target.new_length_ms == pytest.approx(0.0, abs=1e-9)


def test_a_clock_without_noise_makes_no_point_noisy() -> None:
    assert Toy().calibrated().noisy == ()


SHORT_PROMPT = ((1, 2, 3),)


@pytest.mark.parametrize("max_positions", [8, 20, 64, 100, 128, 256])
@pytest.mark.parametrize("draft_costs", [DRAFT, None], ids=["draft", "no draft"])
@pytest.mark.parametrize("prompts", [(), SHORT_PROMPT], ids=["own prompts", "short prompt"])
def test_small_models_are_measured_and_checked_within_their_positions(
    max_positions: int, draft_costs: FakeCosts | None, prompts: Tokens[tuple[int, ...]]
) -> None:
    """Prompts that are too long for a model say nothing of its acceptance, but do not stop its calibration."""
    toy = Toy(max_positions=max_positions, draft_costs=draft_costs)
    profile = toy.calibrated(prompts=prompts).profile
    assert_curve(profile.verify, Costs("forward", TARGET))
    assert_curve(profile.target.prefill, Costs("forward", TARGET))
    assert (profile.draft is None) == (draft_costs is None)
    for drift in check(toy.pair, profile, Effort(budget_s=3.0), toy.clock):
        assert drift.change == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("max_positions", [2, 3, 6])
@pytest.mark.parametrize("draft_costs", [DRAFT, None], ids=["draft", "no draft"])
def test_tiny_models_are_measured_and_checked_within_their_positions(
    max_positions: int, draft_costs: FakeCosts | None
) -> None:
    toy = Toy(max_positions=max_positions, draft_costs=draft_costs)
    profile = toy.calibrated().profile
    assert_curve(profile.verify, Costs("forward", TARGET))
    assert not any(drift.is_stale for drift in check(toy.pair, profile, Effort(budget_s=3.0), toy.clock))


def test_a_model_without_draft_has_a_profile_without_one() -> None:
    profile = Toy(draft_costs=None).calibrated().profile
    assert profile.draft is None
    assert (profile.acceptance.alpha, profile.acceptance.num_trials) == (0.0, 0)
    assert (profile.fingerprint.draft, profile.fingerprint.draft_digest) == ("", "")
    assert profile.verify.sizes_tokens == tuple(range(1, LONGEST_DRAFT + 2))


def test_a_recurrent_target_is_refused() -> None:
    toy = Toy(draft_costs=None)
    toy.pair.target._backend.can_rollback = False  # type: ignore[misc]
    with pytest.raises(ModelError, match="cannot be rolled back"):
        toy.calibrated()


def test_the_same_calibration_gives_the_same_profile() -> None:
    first, second = (Toy().calibrated().profile for _ in range(2))
    assert replace(first, created="") == replace(second, created="")


@pytest.mark.parametrize("budget_s", [0.001, 1.0, 10.0])
def test_a_small_budget_gives_a_whole_profile(budget_s: float) -> None:
    profile = Toy().calibrated(Effort(budget_s=budget_s)).profile
    assert_curve(profile.verify, Costs("forward", TARGET))
    assert_curve(profile.target.prefill, Costs("forward", TARGET))
    assert profile.draft is not None
    assert profile.fit.num_probes > 0


@pytest.mark.parametrize("budget_s", [5.0, 60.0])
def test_the_budget_is_kept_by_and_large(budget_s: float) -> None:
    toy = Toy()
    toy.calibrated(Effort(budget_s=budget_s))
    assert toy.clock() <= 1.5 * budget_s


def test_repeats_are_what_was_asked_for() -> None:
    """A round probe gives several runs; of everything else there are exactly so many."""
    profile = Toy().calibrated(Effort(budget_s=0.001, repeats=2)).profile
    assert {runs for row in profile.target.prefill.runs for runs in row} == {2}
    assert {runs for row in profile.target.clone.runs for runs in row} == {2}
    assert len({runs for row in profile.verify.runs for runs in row}) == 1


def test_acceptance_is_measured_on_the_given_prompts() -> None:
    """All of them, whatever the budget."""
    prompts = [tuple(range(length)) for length in (5, 6, 7, 8, 9, 10)]
    assert Toy().calibrated(prompts=prompts).profile.acceptance.num_trials == 6 * 24
    found = Toy(sign=-1).calibrated(prompts=prompts).profile.acceptance
    assert (found.alpha, found.num_trials) == (0.0, 6 * 30)


# --- predictions come true


@dataclass
class Forced:
    """A policy that takes one action and reckons as rakv does."""

    action: Action
    profile: HardwareProfile
    name: str = "forced"
    needs: Needs = Needs(profile=True, store=True, drafter="welcome")  # noqa: RUF009

    def decide(self, features: Features) -> Decision:
        table = CostModel(self.profile).table(features)
        drafter = features.drafter if self.action.draft_len else "none"
        return Decision(self.action, self.name, drafter, table, features.alpha)

    def speculator(
        self, decision: Decision, drafter: Drafter | None, experience: Experience, clock: Clock | None = None
    ) -> Speculator | None:
        return fixed_speculator(decision, drafter)


@dataclass
class Served:
    """Serves single requests from a store that holds `stored`, under a draft that agrees always or never."""

    alpha: int
    target_costs: FakeCosts = TARGET
    draft_costs: FakeCosts = DRAFT

    def __post_init__(self) -> None:
        self.toy = Toy(self.target_costs, self.draft_costs, sign=1 if self.alpha else -1)
        self.profile = self.toy.calibrated().profile

    def run(self, action: Action, request: Request, stored: tuple[int, ...] | None = None) -> Completion:
        store = PrefixStore(MemoryTier(2**28))
        if stored is not None:
            self.runtime(Action(False, 1), store).run(Request(stored, SamplingParams(max_new_tokens=3)))
        return self.runtime(action, store).run(request)

    def runtime(self, action: Action, store: PrefixStore) -> Runtime:
        return Runtime(
            codec=self.toy.pair.codec,
            target=self.toy.pair.target,
            drafter=self.toy.pair.drafter(),
            store=store,
            policy=Forced(action, self.profile),
            experience=Experience(float(self.alpha)),
            clock=self.toy.clock,
        )

    def overcharged_ms(self, draft_len: int, num_prompt: int, num_new: int) -> float:
        """By how much the formula may be above the truth. Where costs do not grow with the context, it is by this much.

        The last rounds draft fewer tokens than k; only after a round of which all was accepted is the draft a token
        behind; and contexts are taken at n + m / 2, which is up to (k + 2) / 2 beyond the middle of the rounds.
        """
        left, behind, over, num_rounds = num_new - 1, False, 0.0, 0
        context = num_prompt + num_new
        while left:
            drafted = min(draft_len, left - 1)
            over += self.target_costs.forward_ms(draft_len + 1, context)
            over -= self.target_costs.forward_ms(drafted + 1, context)
            if draft_len:
                over += self._draft_ms(draft_len, context, behind=True) - self._draft_ms(drafted, context, behind)
            behind = bool(self.alpha and drafted)
            left -= drafted * self.alpha + 1
            num_rounds += 1
        a_position = self._round_ms(draft_len, context + 1) - self._round_ms(draft_len, context)
        return over + num_rounds * a_position * (draft_len + 2) / 2

    def _draft_ms(self, drafted: int, context: int, behind: bool) -> float:
        if drafted == 0:
            return 0.0
        return drafted * self.draft_costs.forward_ms(1, context) + behind * self.draft_costs.token_ms

    def _round_ms(self, draft_len: int, context: int) -> float:
        return self.target_costs.forward_ms(draft_len + 1, context) + self._draft_ms(draft_len, context, behind=True)


PROMPT = tuple(random.Random(3).choices(range(32), k=300))
FLAT = {
    "target_costs": FakeCosts(pass_ms=4.0, token_ms=0.5, copy_token_ms=0.002),
    "draft_costs": FakeCosts(pass_ms=1.0, token_ms=0.1, copy_token_ms=0.001),
}


@pytest.mark.parametrize("alpha", [0, 1])
@pytest.mark.parametrize("stored", [None, 100, 300], ids=["miss", "partial hit", "exact hit"])
def test_a_prediction_comes_true_but_for_what_is_known(alpha: int, stored: int | None) -> None:
    """Costs that do not grow with the context: the last rounds' and the draft's missing tokens are the difference."""
    served = Served(alpha, **FLAT)
    for draft_len in DRAFT_LENS:
        for num_new in (1, 2, 3, 33, 64):
            request = Request(PROMPT, SamplingParams(max_new_tokens=num_new))
            action = Action(stored is not None, draft_len)
            completion = served.run(action, request, PROMPT[:stored] if stored else None)
            assert completion.predicted_ms is not None
            over_ms = served.overcharged_ms(draft_len, len(PROMPT), num_new)
            assert completion.total_ms - 1e-6 <= completion.predicted_ms <= completion.total_ms + over_ms + 1e-6
            if draft_len == 0 or num_new == 1:
                assert completion.predicted_ms == pytest.approx(completion.total_ms)


@pytest.mark.parametrize("alpha", [0, 1])
@pytest.mark.parametrize("stored", [None, 100, 300], ids=["miss", "partial hit", "exact hit"])
def test_a_prediction_comes_true_where_costs_grow_with_the_context(alpha: int, stored: int | None) -> None:
    served = Served(alpha)
    for draft_len in DRAFT_LENS:
        for num_new in (1, 2, 33, 64):
            request = Request(PROMPT, SamplingParams(max_new_tokens=num_new))
            action = Action(stored is not None, draft_len)
            completion = served.run(action, request, PROMPT[:stored] if stored else None)
            assert completion.predicted_ms is not None
            over_ms = served.overcharged_ms(draft_len, len(PROMPT), num_new)
            assert completion.total_ms - 1e-6 <= completion.predicted_ms <= 1.001 * completion.total_ms + over_ms
            if draft_len == 0:
                assert completion.predicted_ms == pytest.approx(completion.total_ms, rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("alpha", [0, 1])
def test_the_choice_is_the_best_action_or_close_to_it(alpha: int) -> None:
    """Every action is run on the same requests; what the choice takes more than the best of them is its regret."""
    served, chance = Served(alpha), random.Random(alpha)
    regrets = []
    for index in range(24):
        length, num_new = chance.randrange(32, 300), chance.randrange(3, 64)
        stored = [None, length // 2, length][index % 3]
        prompt = PROMPT[:length]
        request = Request(prompt, SamplingParams(max_new_tokens=num_new))
        rows = {}
        for action in [Action(reuse, draft_len) for reuse in (False, True) for draft_len in DRAFT_LENS]:
            if not action.reuse or (stored or 0) >= 16:
                rows[action] = served.run(action, request, prompt[:stored] if stored else None)
        table = next(iter(rows.values())).decision.table
        chosen = min((row for row in table if row.infeasible is None), key=lambda row: row.total_ms).action
        best_ms = min(completion.total_ms for completion in rows.values())
        regrets.append(rows[chosen].total_ms / best_ms - 1.0)
    print(f"alpha {alpha}: mean regret {statistics.fmean(regrets):.3%}, largest {max(regrets):.3%}")
    assert statistics.fmean(regrets) <= 0.01


# --- timing


class Timer:
    """Probes with given times on a virtual clock; the order in which they ran is kept."""

    def __init__(self, **times_ms: list[float]) -> None:
        self.clock = VirtualClock()
        self.order: list[str] = []
        self.probes = [self._probe(name, iter(times * 1000)) for name, times in times_ms.items()]

    def _probe(self, name: str, times: "object") -> Probe:
        def sample() -> list[tuple[float, ...]]:
            self.order.append(name)
            time_ms = next(times)  # type: ignore[call-overload]
            self.clock.advance(time_ms)
            return [(time_ms,)]

        return Probe((Point(name, 1, 0),), sample)

    def run(self, budget_s: float, repeats: int | None = None) -> dict[str, Spread]:
        spreads = time_probes(self.probes, Effort(budget_s=budget_s, repeats=repeats), self.clock, lambda _: None)
        return {point.curve: spread for point, spread in spreads.items()}


NOISY = [1.0, 2.0, 9.0, 4.0, 0.5]


@pytest.mark.parametrize("repeats", [1, 2, 7, 30])
@pytest.mark.parametrize("budget_s", [1e-6, 1e6])
def test_repeats_are_honoured_exactly(repeats: int, budget_s: float) -> None:
    """Whatever the budget, and steady or not."""
    timer = Timer(steady=[3.0], noisy=NOISY, still=[1.0])
    spreads = timer.run(budget_s, repeats)
    assert {spread.num_runs for spread in spreads.values()} == {repeats}
    assert sorted(timer.order) == sorted(["steady", "noisy", "still"] * repeats)


@pytest.mark.parametrize("budget_s", [1e-6, 0.001, 0.0])
def test_every_probe_runs_at_least_once_whatever_the_budget(budget_s: float) -> None:
    spreads = Timer(a=[30.0], b=NOISY, c=[50.0]).run(budget_s)
    assert {name: spread.num_runs for name, spread in spreads.items()} == {"a": 1, "b": 1, "c": 1}


def test_the_budget_ends_the_measuring() -> None:
    timer = Timer(a=NOISY, b=NOISY[::-1])
    timer.run(0.5)
    assert 0.5 <= timer.clock() <= 0.51


def test_steady_probes_are_not_run_again() -> None:
    timer = Timer(steady=[3.0], noisy=NOISY, nearly=[100.0, 100.1, 99.9])
    spreads = timer.run(1.0)
    assert spreads["steady"].num_runs == 5
    assert spreads["nearly"].num_runs <= 10
    assert spreads["noisy"].num_runs > 100
    assert "steady" not in timer.order[-100:]


def test_all_steady_is_the_end_before_the_budget_is_spent() -> None:
    timer = Timer(a=[3.0], b=[4.0])
    timer.run(1e9)
    assert len(timer.order) == 10


def test_the_order_is_a_new_one_each_time_but_the_same_in_every_process() -> None:
    names = {name: [1.0] for name in "abcdefgh"}
    orders = []
    for _ in range(2):
        timer = Timer(**names)
        timer.run(1e-6, repeats=6)
        orders.append(timer.order)
    assert orders[0] == orders[1]
    passes = [tuple(orders[0][start : start + 8]) for start in range(0, 48, 8)]
    assert all(sorted(one) == sorted(names) for one in passes)
    assert len(set(passes)) == 6
    assert tuple(names) not in passes[:1]


def test_medians_and_deviations_are_those_of_the_runs() -> None:
    spread = Timer(noisy=NOISY).run(1e6, repeats=5)["noisy"]
    assert spread == Spread(median_ms=2.0, mad_ms=1.5, num_runs=5)
    assert spread.is_noisy
    assert not spread.is_steady


def test_progress_rises_to_the_end() -> None:
    timer, shares = Timer(a=NOISY, b=[1.0]), list[float]()
    time_probes(timer.probes, Effort(budget_s=0.5), timer.clock, shares.append)
    assert all(before <= after for before, after in pairwise(shares))
    assert shares[-1] == pytest.approx(1.0, abs=0.05)
    timer, shares = Timer(a=NOISY, b=[1.0]), []
    time_probes(timer.probes, Effort(budget_s=0.5, repeats=3), timer.clock, shares.append)
    assert shares == pytest.approx([index / 6 for index in range(1, 7)])


def test_a_probe_that_has_no_more_runs_is_left_out() -> None:
    left = [5.0, 6.0]

    def sample() -> list[tuple[float, ...]]:
        return [(left.pop(),)] if left else []

    timer = Timer(steady=[1.0])
    probes = [*timer.probes, Probe((Point("short", 1, 0),), sample), Probe((Point("none", 1, 0),), list)]
    spreads = time_probes(probes, Effort(budget_s=1e6), timer.clock, lambda _: None)
    assert {point.curve: spread.num_runs for point, spread in spreads.items()} == {"steady": 5, "short": 2}


# --- is the profile still true?


def drifts(toy: Toy, profile: HardwareProfile) -> dict[str, bool]:
    """The checked curves, and whether any point of them is stale."""
    found = check(toy.pair, profile, Effort(budget_s=3.0), toy.clock)
    return {
        name: any(drift.is_stale for drift in found if drift.point.curve == name)
        for name in {drift.point.curve for drift in found}
    }


def times(costs: FakeCosts, factor: float) -> FakeCosts:
    return FakeCosts(
        pass_ms=factor * costs.pass_ms,
        token_ms=factor * costs.token_ms,
        context_ms=factor * costs.context_ms,
        attention_ms=factor * costs.attention_ms,
        copy_token_ms=factor * costs.copy_token_ms,
    )


def test_a_profile_that_still_holds_passes() -> None:
    toy = Toy()
    profile = toy.calibrated().profile
    assert drifts(toy, profile) == {"verify": False, "target.prefill": False, "propose": False}
    assert drifts(Toy(times(TARGET, 1.1), times(DRAFT, 0.9)), profile) == {
        "verify": False,
        "target.prefill": False,
        "propose": False,
    }


@pytest.mark.parametrize("factor", [2.0, 0.5, 1.4])
def test_a_target_that_takes_longer_or_shorter_is_noticed(factor: float) -> None:
    profile = Toy().calibrated().profile
    found = drifts(Toy(target_costs=times(TARGET, factor)), profile)
    assert found == {"verify": True, "target.prefill": True, "propose": False}


@pytest.mark.parametrize("factor", [2.0, 0.5])
def test_a_draft_that_takes_longer_or_shorter_is_noticed(factor: float) -> None:
    profile = Toy().calibrated().profile
    found = drifts(Toy(draft_costs=times(DRAFT, factor)), profile)
    assert found == {"verify": False, "target.prefill": False, "propose": True}


def test_a_verify_that_grows_with_its_width_is_noticed() -> None:
    """A step costs what it did; what a drafted token costs has changed, and with it whether drafting pays."""
    flat, steep = FakeCosts(pass_ms=10.0, copy_token_ms=0.1), FakeCosts(pass_ms=5.0, token_ms=5.0, copy_token_ms=0.1)
    profile = Toy(target_costs=flat).calibrated().profile
    found = check(Toy(target_costs=steep).pair, profile, Effort(budget_s=3.0), VirtualClock())
    assert found
    assert drifts(Toy(target_costs=steep), profile)["verify"]


def test_how_much_a_point_changed_is_said() -> None:
    profile = Toy().calibrated().profile
    slow = Toy(times(TARGET, 2.0), times(DRAFT, 2.0))
    for drift in check(slow.pair, profile, Effort(budget_s=3.0), slow.clock):
        assert drift.change == pytest.approx(1.0)
        assert drift.measured_ms == pytest.approx(2 * drift.profile_ms)


# --- statistics, and the time that a decision takes


def test_errors_are_relative_and_absolute() -> None:
    assert mape_percent([1.1, 1.8], [1.0, 2.0]) == pytest.approx(10.0)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=2, max_size=12))
def test_spearman_is_scipys(pairs: list[tuple[int, int]]) -> None:
    from scipy.stats import spearmanr

    left, right = zip(*pairs, strict=True)
    if len(set(left)) > 1 and len(set(right)) > 1:
        assert spearman(left, right) == pytest.approx(spearmanr(left, right).statistic)


def test_a_prediction_that_never_varies_has_no_perfect_order() -> None:
    """Where the truth varies and the prediction does not, nothing was predicted."""
    assert spearman([1.0, 1.0, 1.0], [1.0, 2.0, 3.0]) < 1.0


def test_a_decision_takes_little_time() -> None:
    """Generously: a thousandth of a second is expected, and a request takes hundreds of them."""
    toy = Toy()
    profile = toy.calibrated().profile
    policy = make_policy("rakv", profile)
    assert isinstance(policy, RakvPolicy)
    features = Features(
        num_prompt_tokens=500,
        max_new_tokens=128,
        num_matched_tokens=300,
        num_cloned_tokens=299,
        drafter="model",
        alpha=0.7,
        memory_budget_bytes=2**30,
    )
    elapsed = []
    for _ in range(100):
        started = time.perf_counter()
        policy.decide(features)
        elapsed.append(time.perf_counter() - started)
    print(f"a decision takes {statistics.median(elapsed) * 1e3:.3f} ms")
    assert statistics.median(elapsed) < 0.005
