"""What a prompt beyond the measured sizes is predicted to take: the passes that really run."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rakvctl.core.backends.fake import FakeBackend, FakeCosts, VirtualClock
from rakvctl.core.cost import CostModel
from rakvctl.core.engine import Engine
from rakvctl.core.pair import ModelPair
from rakvctl.core.profile import Curve, HardwareProfile, ModelCosts
from rakvctl.core.text import TextCodec
from rakvctl.core.types import Action, Features
from rakvctl.measure.calibrate import calibrate
from rakvctl.measure.timing import Effort
from tests.profiles import AnyLetterTokenizer, toy_profile

# A token costs ten times as much after 6,000 cached positions as after none.
COSTS = FakeCosts(pass_ms=5.0, token_ms=0.5, context_ms=0.001, attention_ms=0.00075, copy_token_ms=0.001)
MAX_POSITIONS = 16_384


def backend(clock: VirtualClock, chunk: int | None) -> FakeBackend:
    made = FakeBackend(seed=1, max_positions=MAX_POSITIONS, clock=clock, costs=COSTS)
    made.prefill_chunk_tokens = chunk
    return made


def profile_of(chunk: int | None, budget_s: float = 600.0) -> HardwareProfile:
    clock = VirtualClock()
    pair = ModelPair(TextCodec(AnyLetterTokenizer(), frozenset()), Engine(backend(clock, chunk)), "toy")
    return calibrate(pair, Effort(budget_s=budget_s), clock, lambda *_: None).profile


def actual_ms(chunk: int | None, num_tokens: int, cached: int) -> float:
    clock = VirtualClock()
    engine = Engine(backend(clock, chunk))
    ids = tuple(number % 32 for number in range(num_tokens))
    if cached:
        engine.prefill(ids[:cached])
    started = clock()
    engine.prefill(ids[cached:])
    return (clock() - started) * 1e3


def predicted_ms(profile: HardwareProfile, num_tokens: int, cached: int) -> float:
    features = Features(num_prompt_tokens=num_tokens, max_new_tokens=1, num_cloned_tokens=cached)
    return CostModel(profile).breakdown(Action(reuse=cached > 0, draft_len=0), features).prefill_ms


# Less time measures fewer sizes: as far as 512, 1,024 or 4,096 tokens.
@pytest.mark.parametrize("budget_s", [10.0, 60.0, 600.0])
@pytest.mark.parametrize("chunk", [512, 2048])
def test_a_long_prompt_is_predicted_as_the_passes_that_run(chunk: int, budget_s: float) -> None:
    profile = profile_of(chunk, budget_s)
    assert profile.target.prefill_chunk_tokens == chunk
    assert profile.target.prefill.sizes_tokens[-1] < 8000
    for num_tokens, cached in ((8000, 0), (8000, 1000), (12_001, 300)):
        actual = actual_ms(chunk, num_tokens, cached)
        assert predicted_ms(profile, num_tokens, cached) == pytest.approx(actual, rel=0.05)


def test_a_model_that_takes_a_prompt_in_one_pass_is_predicted_so() -> None:
    profile = profile_of(None)
    assert profile.target.prefill_chunk_tokens is None
    assert predicted_ms(profile, 8000, 0) == pytest.approx(actual_ms(None, 8000, 0), rel=0.05)


def test_a_draft_model_has_passes_of_its_own() -> None:
    clock = VirtualClock()
    codec = TextCodec(AnyLetterTokenizer(), frozenset())
    pair = ModelPair(codec, Engine(backend(clock, 512)), "toy", Engine(backend(clock, 64)), "toy-draft")
    profile = calibrate(pair, Effort(budget_s=600.0), clock, lambda *_: None).profile
    assert profile.draft is not None
    assert (profile.target.prefill_chunk_tokens, profile.draft.model.prefill_chunk_tokens) == (512, 64)


def costs_with(chunk: int | None, curve: Curve) -> ModelCosts:
    return replace(toy_profile().target, prefill=curve, prefill_chunk_tokens=chunk)


@given(
    chunk=st.sampled_from([1, 3, 16, 100]),
    num_tokens=st.integers(0, 400),
    cached=st.integers(0, 400),
    contexts=st.lists(st.integers(0, 300), min_size=1, max_size=3, unique=True).map(sorted),
)
def test_the_sum_over_passes_is_the_sum_over_passes(
    chunk: int, num_tokens: int, cached: int, contexts: list[int]
) -> None:
    """However it is computed, it is what adding the passes up one by one gives, as far as those were measured."""
    curve = Curve(
        sizes_tokens=(chunk,),
        contexts_tokens=tuple(contexts),
        median_ms=(tuple(1.0 + (7 * context) % 5 for context in contexts),),
        mad_ms=((0.0,) * len(contexts),),
        runs=((1,) * len(contexts),),
    )
    passes = [(min(chunk, num_tokens - start), cached + start) for start in range(0, num_tokens, chunk)]
    expected = sum(curve.at(size, context) for size, context in passes)
    assert costs_with(chunk, curve).prefill_ms(num_tokens, cached) == pytest.approx(expected)


def test_any_length_is_predicted_in_no_time() -> None:
    curve = toy_profile().target.prefill
    assert costs_with(1, curve).prefill_ms(10**9, 0) > 10**9
