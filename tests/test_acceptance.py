"""The acceptance in force: how it is learned, forgotten and measured, and the probes that keep it current."""

import random
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rakvctl.core.acceptance import AcceptanceTracker, Experience, initial_experience, num_judged
from rakvctl.core.backends.fake import FakeBackend, FakeCosts, VirtualClock
from rakvctl.core.engine import Engine
from rakvctl.core.pair import ModelPair
from rakvctl.core.policies import Policy, make_policy
from rakvctl.core.profile import HardwareProfile, LookupBin, MeasuredAcceptance
from rakvctl.core.runtime import Runtime
from rakvctl.core.store import PrefixStore
from rakvctl.core.text import TextCodec
from rakvctl.core.tiers import MemoryTier
from rakvctl.core.types import Action, Completion, Decision, Evidence, Request, SamplingParams, StepEvent
from rakvctl.measure.acceptance import measure_acceptance
from rakvctl.measure.calibrate import calibrate
from rakvctl.measure.timing import Effort
from tests.fakes import NO_END
from tests.profiles import AnyLetterTokenizer, toy_profile

# As the module has it: half of what is known is forgotten after so many judged tokens.
HALF_LIFE = 256
PROMPT = tuple(range(32)) * 2

_rounds = st.integers(0, 12).flatmap(lambda drafted: st.tuples(st.just(drafted), st.integers(0, drafted)))
_priors = st.tuples(st.floats(0.0, 1.0), st.floats(0.5, 100.0))


def tracked(rounds: Iterable[tuple[int, int]], alpha: float = 0.5, trials: float = 32.0) -> AcceptanceTracker:
    tracker = AcceptanceTracker.from_prior(alpha, trials)
    for drafted, accepted in rounds:
        tracker = tracker.observe(drafted, accepted)
    return tracker


# --- the tracker


@pytest.mark.parametrize(
    ("drafted", "accepted", "judged"), [(0, 0, 0), (1, 0, 1), (1, 1, 1), (4, 0, 1), (4, 2, 3), (4, 3, 4), (4, 4, 4)]
)
def test_tokens_after_the_first_refused_one_are_not_judged(drafted: int, accepted: int, judged: int) -> None:
    assert num_judged(drafted, accepted) == judged


@given(st.lists(_rounds, max_size=40), _priors)
def test_alpha_is_the_exponentially_weighted_ratio(rounds: list[tuple[int, int]], prior: tuple[float, float]) -> None:
    """The sums over all rounds, each weighted by what was judged after it."""
    judged = [min(drafted, accepted + 1) for drafted, accepted in rounds]

    def weight(index: int) -> float:
        return float(0.5 ** (sum(judged[index + 1 :]) / HALF_LIFE))

    accepted = prior[0] * prior[1] * weight(-1) if rounds else prior[0] * prior[1]
    trials = prior[1] * weight(-1) if rounds else prior[1]
    accepted += sum(weight(index) * one for index, (_, one) in enumerate(rounds))
    trials += sum(weight(index) * one for index, one in enumerate(judged))
    assert tracked(rounds, *prior).alpha == pytest.approx(accepted / trials)


@given(st.lists(_rounds, max_size=200), _priors)
def test_alpha_is_a_probability(rounds: list[tuple[int, int]], prior: tuple[float, float]) -> None:
    assert 0.0 <= tracked(rounds, *prior).alpha <= 1.0


@given(st.lists(_rounds, max_size=20), _rounds)
def test_a_round_moves_alpha_towards_its_own_ratio(rounds: list[tuple[int, int]], last: tuple[int, int]) -> None:
    before, after = tracked(rounds).alpha, tracked([*rounds, last]).alpha
    if last[0] == 0:
        assert after == before
        return
    ratio = last[1] / num_judged(*last)
    assert min(before, ratio) - 1e-12 <= after <= max(before, ratio) + 1e-12


@given(st.lists(_rounds, max_size=20))
def test_rounds_without_drafts_teach_nothing(rounds: list[tuple[int, int]]) -> None:
    interspersed = [one for both in rounds for one in ((0, 0), both, (0, 0))]
    assert tracked(interspersed) == tracked(rounds)


@pytest.mark.parametrize("alpha", [0.1, 0.5, 0.9])
def test_alpha_estimates_the_probability_that_one_drafted_token_stands(alpha: float) -> None:
    """Drawn with that probability, token by token; the ratio to all drafted tokens would be far too low."""
    chance = random.Random(1)
    rounds = []
    for _ in range(5000):
        accepted = next((index for index in range(8) if chance.random() >= alpha), 8)
        rounds.append((8, accepted))
    estimates = [tracked(rounds[start : start + 500]).alpha for start in range(0, 5000, 500)]
    assert sum(estimates) / len(estimates) == pytest.approx(alpha, abs=0.02)


@pytest.mark.parametrize("num_bad", [10, 1000, 100_000])
def test_a_bad_stretch_is_forgotten_however_long_it_was(num_bad: int) -> None:
    """trt#12905: after a half-life of accepted tokens the estimate is half-way back."""
    bad = tracked([(1, 0)] * num_bad)
    assert bad.alpha < 0.5
    good = bad
    for _ in range(HALF_LIFE // 4):
        good = good.observe(4, 4)
    assert good.alpha >= 0.5 * (1.0 + bad.alpha) - 1e-9
    for _ in range(4 * HALF_LIFE // 4):
        good = good.observe(4, 4)
    assert good.alpha > 0.95


def test_the_prior_is_what_was_measured_if_anything_was() -> None:
    profile = toy_profile()
    assert initial_experience(profile).alpha == pytest.approx(profile.acceptance.alpha)
    assert initial_experience(toy_profile(with_draft=False)).alpha == 0.5


# --- what probing may take


def _decision(draft_len: int, *, is_probe: bool = False) -> Decision:
    return Decision(Action(False, draft_len), "rakv", "model", is_probe=is_probe)


def _served(decision: Decision, *rounds: StepEvent) -> Completion:
    """A request that took a second."""
    events = (StepEvent((0,), 0, 0), *rounds)
    tokens = tuple(token for event in events for token in event.token_ids)
    return Completion(tokens, "", "length", decision, 20, 0, events, ttft_ms=10.0, total_ms=1000.0)


@pytest.mark.parametrize(("length", "expected"), [(64, 64), (16, 16), (1, 1)])
def test_the_length_of_texts_is_learned(length: int, expected: int) -> None:
    """Where texts end long before the limit, drafting has less time to pay back what it costs to begin with."""
    experience = Experience()
    assert experience.expected_new_tokens(64) == 64
    for _ in range(40):
        rounds = (StepEvent((1,), 0, 0) for _ in range(length - 1))
        experience.observe(_served(_decision(0), *rounds), 64)
    assert experience.expected_new_tokens(64) == expected
    assert experience.expected_new_tokens(128) == 2 * expected
    assert experience.expected_new_tokens(0) == 0


def test_how_much_looking_up_supplies_is_learned() -> None:
    experience = Experience()
    assert experience.looked_up_share == 0.0
    looked_up = StepEvent((1, 2, 3, 4), 6, 3, was_looked_up=True)
    modelled = StepEvent((1, 2, 3, 4), 3, 3)
    for _ in range(40):
        experience.observe(_served(_decision(0), looked_up, modelled, StepEvent((1,), 0, 0)), 64)
    assert experience.looked_up_share == pytest.approx(3 / 10)


def test_only_requests_that_draft_nothing_save_up_for_a_probe() -> None:
    acceptance = Experience()
    acceptance.observe(_served(_decision(4), StepEvent((1,), 4, 0)), 64)
    assert acceptance.probe_ms == 0.0
    acceptance.observe(_served(_decision(0), StepEvent((1,), 0, 0)), 64)
    assert 0.0 < acceptance.probe_ms <= 10.0 + 1e-9


def test_a_probe_is_paid_for_and_teaches() -> None:
    acceptance = Experience()
    before = acceptance.alpha
    acceptance.observe(_served(_decision(0)), 64)
    acceptance.observe(_served(_decision(4, is_probe=True), StepEvent((1, 2, 3, 4, 5), 4, 4)), 64)
    assert acceptance.probe_ms <= 10.0 + 1e-9
    assert acceptance.alpha > before


# --- a whole runtime on a virtual clock


class ContraryBackend(FakeBackend):
    """A draft whose best token is the target's worst: it never agrees, until told to."""

    agrees = False

    def _scores(self, end: int) -> np.ndarray:
        return super()._scores(end) * (1 if self.agrees else -1)


@dataclass
class Serving:
    """The toy pair with declared times, its profile, and a clock that all policies share."""

    agrees: bool
    draft_pass_ms: float = 1.0
    end_token_ids: frozenset[int] = NO_END
    clock: VirtualClock = field(default_factory=VirtualClock)
    draft: ContraryBackend = field(init=False)
    pair: ModelPair = field(init=False)
    profile: HardwareProfile = field(init=False)

    def __post_init__(self) -> None:
        costs = FakeCosts(pass_ms=4.0, token_ms=0.5, context_ms=0.001, copy_token_ms=0.002)
        target = FakeBackend(seed=1, max_positions=1024, clock=self.clock, costs=costs)
        costs = FakeCosts(pass_ms=self.draft_pass_ms, token_ms=0.1, context_ms=0.0005, copy_token_ms=0.001)
        self.draft = ContraryBackend(seed=1, max_positions=1024, clock=self.clock, costs=costs)
        self.draft.agrees = self.agrees
        codec = TextCodec(AnyLetterTokenizer(), self.end_token_ids)
        self.pair = ModelPair(codec, Engine(target), "toy", Engine(self.draft), "toy-draft")
        self.profile = calibrate(self.pair, Effort(budget_s=60.0), self.clock, lambda *_: None).profile

    def runtime(self, policy: Policy, experience: Experience | None = None) -> Runtime:
        return Runtime(
            codec=self.pair.codec,
            target=self.pair.target,
            drafter=self.pair.drafter(),
            store=PrefixStore(MemoryTier(2**28)),
            policy=policy,
            experience=experience,
            clock=self.clock,
        )

    def rakv(self, prior_alpha: float) -> Runtime:
        return self.runtime(make_policy("rakv", self.profile), Experience(prior_alpha))


def some_requests(count: int, new_tokens: tuple[int, int] = (16, 96)) -> list[Request]:
    """Prompts of 16 to 440 tokens that share beginnings: misses, partial hits and repeats."""
    chance = random.Random(0)
    beginnings = [tuple(chance.randrange(32) for _ in range(400)) for _ in range(5)]
    requests = []
    for _ in range(count):
        shared = chance.choice(beginnings)[: chance.randrange(16, 400)]
        prompt = (*shared, *(chance.randrange(32) for _ in range(chance.choice([0, 10, 40]))))
        requests.append(Request(prompt, SamplingParams(max_new_tokens=chance.randrange(*new_tokens))))
    return requests


def first_choice(completions: Iterable[Completion]) -> int | None:
    """The number of the first request for which drafting was the best known action."""
    drafting = (index for index, one in enumerate(completions) if _drafts(one) and not one.decision.is_probe)
    return next(drafting, None)


def _drafts(completion: Completion) -> bool:
    return completion.decision.action.draft_len > 0


@pytest.mark.slow
def test_a_seed_repeats_its_text_whatever_was_served_before() -> None:
    """Experience, stored prefixes, earlier texts and times change what other requests draft."""
    sampled = [
        replace(request, sampling=SamplingParams(max_new_tokens=60, temperature=1.0, seed=number))
        for number, request in enumerate(some_requests(12))
    ]
    expected = []
    for request in sampled:
        serving = Serving(agrees=True)
        expected.append(serving.runtime(make_policy("auto", serving.profile)).run(request))
    serving = Serving(agrees=True)
    runtime = serving.runtime(make_policy("auto", serving.profile), initial_experience(serving.profile))
    for greedy in some_requests(30):
        runtime.run(greedy)
    assert any(completion.num_draft_tokens for completion in expected)
    assert [runtime.run(request).token_ids for request in sampled] == [one.token_ids for one in expected]


def test_without_a_seed_drawn_texts_draft_as_greedy_ones_do() -> None:
    """Nothing has to be repeated, so all that is known may be used."""
    serving = Serving(agrees=True)
    runtime = serving.runtime(make_policy("auto", serving.profile), initial_experience(serving.profile))
    for greedy in some_requests(30):
        runtime.run(greedy)
    request = Request(some_requests(1)[0].prompt_token_ids, SamplingParams(max_new_tokens=60, temperature=1.0))
    assert runtime.run(request).decision.action.draft_len > 0
    assert runtime.run(replace(request, sampling=replace(request.sampling, seed=1))).decision.action.draft_len == 0


@pytest.mark.parametrize("prior_alpha", [0.0, 0.05, 0.2])
def test_a_draft_that_is_better_than_thought_is_found_out(prior_alpha: float) -> None:
    """The prior says k = 0; a probe after a while, some more, and then every request drafts."""
    serving = Serving(agrees=True)
    runtime = serving.rakv(prior_alpha)
    completions = [runtime.run(request) for request in some_requests(120)]
    assert not _drafts(completions[0])
    assert any(completion.decision.is_probe for completion in completions)
    found = first_choice(completions)
    assert found is not None
    assert found < 60
    assert all(_drafts(completion) for completion in completions[-20:])


@pytest.mark.slow
@pytest.mark.parametrize(("draft_pass_ms", "prior_alpha"), [(0.1, 0.5), (1.0, 0.0), (1.0, 0.5), (3.0, 0.1)])
def test_a_draft_that_never_agrees_costs_next_to_nothing(draft_pass_ms: float, prior_alpha: float) -> None:
    """Within 1.5 percent of the policy kv, all told: 300 requests, decisions that a wrong prior spoils included."""
    serving = Serving(agrees=False, draft_pass_ms=draft_pass_ms)
    requests = some_requests(300)
    plain, chosen = serving.runtime(make_policy("kv")), serving.rakv(prior_alpha)
    started_ms = serving.clock.now_ms
    expected = [plain.run(request).token_ids for request in requests]
    plain_ms = serving.clock.now_ms - started_ms
    completions = [chosen.run(request) for request in requests]
    chosen_ms = serving.clock.now_ms - started_ms - plain_ms
    assert [completion.token_ids for completion in completions] == expected
    assert sum(completion.num_accepted_tokens for completion in completions) == 0
    assert any(completion.decision.is_probe for completion in completions)
    print(f"draft pass {draft_pass_ms} ms, prior {prior_alpha}: {chosen_ms / plain_ms - 1:+.3%}")
    assert chosen_ms <= 1.015 * plain_ms


@pytest.mark.slow
@pytest.mark.parametrize(("draft_pass_ms", "prior_alpha"), [(0.1, 0.5), (1.0, 0.0), (3.0, 0.1)])
def test_nonsense_from_draft_and_lookup_costs_auto_next_to_nothing(draft_pass_ms: float, prior_alpha: float) -> None:
    """The toy's texts have no structure: what follows a match is right by chance only."""
    serving = Serving(agrees=False, draft_pass_ms=draft_pass_ms)
    requests = some_requests(300)
    plain = serving.runtime(make_policy("kv"))
    auto = serving.runtime(make_policy("auto", serving.profile), Experience(prior_alpha))
    started_ms = serving.clock.now_ms
    expected = [plain.run(request).token_ids for request in requests]
    plain_ms = serving.clock.now_ms - started_ms
    assert [auto.run(request).token_ids for request in requests] == expected
    auto_ms = serving.clock.now_ms - started_ms - plain_ms
    print(f"draft pass {draft_pass_ms} ms, prior {prior_alpha}: {auto_ms / plain_ms - 1:+.3%}")
    assert auto_ms <= 1.02 * plain_ms


@pytest.mark.slow
def test_the_savings_for_probes_are_never_overdrawn() -> None:
    serving = Serving(agrees=False)
    acceptance = Experience(0.1)
    runtime = serving.runtime(make_policy("rakv", serving.profile), acceptance)
    for request in some_requests(150):
        saved_ms = acceptance.probe_ms
        decision = runtime.run(request).decision
        assert acceptance.probe_ms >= -1e-9
        assert not decision.is_probe or decision.extra_ms <= saved_ms + 1e-9


@pytest.mark.slow
def test_a_draft_that_gets_better_is_taken_up_again() -> None:
    """trt#12905: a bad stretch does not end speculation for good."""
    serving = Serving(agrees=False)
    runtime = serving.rakv(0.9)
    requests = some_requests(220)
    bad = [runtime.run(request) for request in requests[:70]]
    assert _drafts(bad[0])
    assert not any(_drafts(completion) and not completion.decision.is_probe for completion in bad[-40:])
    serving.draft.agrees = True
    good = [runtime.run(request) for request in requests[70:]]
    assert all(_drafts(completion) for completion in good[-20:])


def test_a_draft_that_gets_worse_is_dropped_soon() -> None:
    serving = Serving(agrees=True)
    runtime = serving.rakv(0.9)
    requests = some_requests(80)
    assert all(_drafts(runtime.run(request)) for request in requests[:30])
    serving.draft.agrees = False
    bad = [runtime.run(request) for request in requests[30:]]
    assert not any(_drafts(completion) and not completion.decision.is_probe for completion in bad[20:])


def test_requests_too_short_to_draft_do_not_use_up_the_probes() -> None:
    """Of two new tokens none is ever drafted: a probe on such a request would cost, and teach nothing."""
    serving = Serving(agrees=True)
    runtime = serving.rakv(0.05)
    completions = []
    for request in some_requests(60, (48, 64)):
        short = Request(request.prompt_token_ids[:20], SamplingParams(max_new_tokens=2))
        completions += [runtime.run(short), runtime.run(request)]
    probes = [completion for completion in completions if completion.decision.is_probe]
    assert probes
    assert all(completion.num_draft_tokens for completion in probes)


def test_the_same_requests_get_the_same_decisions() -> None:
    """Probes included: nothing is drawn at random."""
    runs = []
    for _ in range(2):
        runtime = Serving(agrees=True).rakv(0.1)
        runs.append([runtime.run(request).decision.action for request in some_requests(60)])
    assert runs[0] == runs[1]


def test_planning_does_not_probe_nor_learn() -> None:
    serving = Serving(agrees=True)
    acceptance = Experience(0.1)
    runtime = serving.runtime(make_policy("rakv", serving.profile), acceptance)
    for request in some_requests(10):
        before = (acceptance.alpha, acceptance.probe_ms)
        plan = runtime.plan(request)
        assert runtime.plan(request) == plan
        assert (acceptance.alpha, acceptance.probe_ms) == before
        assert runtime.run(request).decision == plan.decision


@pytest.mark.slow
def test_tokens_after_the_end_of_the_text_are_not_held_against_the_draft() -> None:
    """A draft that always agrees keeps its alpha of 1 where the text ends within an accepted block."""
    serving = Serving(agrees=True)
    text = serving.runtime(make_policy("kv")).run(Request(PROMPT, SamplingParams(max_new_tokens=24))).token_ids
    for end in set(text[1:]):
        ending = Serving(agrees=True, end_token_ids=frozenset([end]))
        acceptance = Experience(1.0)
        completion = ending.runtime(make_policy("spec-4"), acceptance).run(Request(PROMPT))
        assert completion.finish_reason == "stop"
        assert acceptance.alpha == 1.0


# --- measured beforehand


def measured(serving: Serving, prompts: list[tuple[int, ...]], budget_s: float = 600.0) -> MeasuredAcceptance:
    return measure_acceptance(serving.pair, prompts, budget_s, serving.clock, lambda *_: None)


@pytest.mark.parametrize("agrees", [True, False])
def test_acceptance_is_measured_on_the_prompts(agrees: bool) -> None:
    found = measured(Serving(agrees=agrees), [PROMPT, PROMPT[5:]])
    assert found.alpha == float(agrees)
    # 31 tokens after the first: 6 rounds of 4 drafted and 1 own, and a last one of what is left; or 31 refusals
    # but for the last token, of which none is drafted.
    assert found.num_trials == 2 * (6 * 4 if agrees else 30)


@pytest.mark.slow
def test_the_end_of_a_text_is_not_measured_as_a_refusal() -> None:
    text = Serving(agrees=True).runtime(make_policy("kv")).run(Request(PROMPT, SamplingParams(max_new_tokens=24)))
    for end in set(text.token_ids[1:]):
        serving = Serving(agrees=True, end_token_ids=frozenset([end]))
        found = measured(serving, [PROMPT])
        assert found.num_trials == 0 or found.alpha == 1.0


def test_measuring_stops_with_the_budget_but_not_before_one_prompt() -> None:
    serving = Serving(agrees=False)
    one = measured(serving, [PROMPT]).num_trials
    assert measured(serving, [PROMPT] * 50, budget_s=0.0).num_trials == one
    started = serving.clock()
    trials = measured(serving, [PROMPT] * 50, budget_s=2.0).num_trials
    assert one < trials < 50 * one
    assert 2.0 <= serving.clock() - started < 3.0


def test_without_a_draft_only_what_is_looked_up_is_measured() -> None:
    serving = Serving(agrees=True)
    pair = ModelPair(serving.pair.codec, serving.pair.target, "toy")
    found = measure_acceptance(pair, [PROMPT], 600.0, serving.clock, lambda *_: None)
    assert (found.alpha, found.num_trials) == (0.0, 0)
    assert found.lookup is not None


def test_looked_up_tokens_are_judged_by_what_came_in_earlier_answers_too() -> None:
    """The second time the answer is looked up, and stands but where the prompt, repeating itself, says otherwise."""
    serving = Serving(agrees=True)
    (once,), (twice,) = ([measured(serving, [PROMPT] * count).lookup] for count in (1, 2))
    assert twice is not None
    long_matches = [found for found in twice if found.matched_tokens >= 20]
    assert {found.matched_tokens for found in long_matches} == {20}
    num_trials = sum(found.num_trials for found in long_matches)
    assert sum(found.num_trials * found.alpha for found in long_matches) > 0.9 * num_trials
    assert num_trials >= 31
    assert sum(found.num_trials for found in twice) > sum(found.num_trials for found in once or ())


def test_what_was_measured_of_looking_up_is_where_learning_begins() -> None:
    profile = toy_profile()
    assert profile.acceptance.lookup is None, "nobody gave prompts"
    poor = LookupBin(matched_tokens=4, agreement="agreed", alpha=0.0, num_trials=10_000)
    four, five, ten, alone = (
        Evidence(4, "agreed"),
        Evidence(5, "agreed"),
        Evidence(10, "agreed"),
        Evidence(4, "alone"),
    )
    measured_profile = replace(profile, acceptance=replace(profile.acceptance, lookup=(poor,)))
    before, after = initial_experience(profile).lookups, initial_experience(measured_profile).lookups
    assert after.alpha(four) < 0.01 < before.alpha(four)
    assert (after.alpha(ten), after.alpha(alone)) == (before.alpha(ten), before.alpha(alone))
    for _ in range(60):
        after.observe(five, stands=True)
    assert after.alpha(four) > 0.5, "what is measured may be of other prompts, and is left behind"


def test_a_prompt_too_long_for_the_models_does_not_end_the_measuring() -> None:
    serving = Serving(agrees=True)
    assert measured(serving, [PROMPT * 20, PROMPT]).num_trials == measured(serving, [PROMPT]).num_trials
