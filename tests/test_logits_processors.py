"""Processed scores: transformers' own processors bit for bit, and what verifiers make of them."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from transformers import GenerationConfig

from rakvctl.core.array_logits import ArrayLogits
from rakvctl.core.backends.fake import FakeBackend
from rakvctl.core.drafters import ModelDrafter
from rakvctl.core.engine import Engine
from rakvctl.core.errors import RequestError
from rakvctl.core.logits_processors import LogitsProcessors, LogitsSettings, make_processors
from rakvctl.core.policies import make_policy
from rakvctl.core.runtime import Runtime
from rakvctl.core.store import PrefixStore
from rakvctl.core.text import TextCodec
from rakvctl.core.tiers import MemoryTier
from rakvctl.core.types import Completion, Proposal, Request, SamplingParams
from rakvctl.core.verify import GreedyVerifier, SamplingVerifier, distribution
from tests.checkpoints import random_model
from tests.fakes import LetterTokenizer
from tests.test_near_ties import WidthDependentBackend

V = 12
MAX_NEW_TOKENS = 6
ENDS = frozenset([0, 3])
# Any model: what is asked of it is which processors transformers makes of a config.
MODEL = random_model("gpt2")

ids = st.integers(0, V - 1)
sequences = st.lists(ids, min_size=1, max_size=3).map(tuple)
settings = st.builds(
    LogitsSettings,
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.7]),
    no_repeat_ngram_size=st.integers(0, 3),
    sequence_bias=st.dictionaries(sequences, st.floats(-3, 3, width=32), max_size=4).map(lambda d: tuple(d.items())),
    bad_words_ids=st.lists(sequences, max_size=3).map(tuple),
    min_length=st.integers(0, 8),
    min_new_tokens=st.none() | st.integers(0, 4),
    forced_bos_token_id=st.none() | ids,
    forced_eos_token_id=st.just(()) | st.lists(ids, min_size=1, max_size=2).map(tuple),
    suppress_tokens=st.lists(st.integers(-1, V + 5), max_size=2).map(tuple),
    begin_suppress_tokens=st.lists(ids, max_size=2).map(tuple),
)


def processors_of(settings: LogitsSettings, num_prompt_tokens: int, vocab_size: int = V) -> LogitsProcessors | None:
    return make_processors(
        settings,
        num_prompt_tokens=num_prompt_tokens,
        max_new_tokens=MAX_NEW_TOKENS,
        end_token_ids=ENDS,
        vocab_size=vocab_size,
    )


def transformers_processors(settings: LogitsSettings, num_prompt_tokens: int, **sampling: Any) -> Any:
    """The list that `generate` would go through, samplers included."""
    changed = {
        name: [list(item) if isinstance(item, tuple) else item for item in value] if isinstance(value, tuple) else value
        for name, value in settings.changed.items()
    }
    if settings.sequence_bias:
        changed["sequence_bias"] = [[list(sequence), bias] for sequence, bias in settings.sequence_bias]
    config = GenerationConfig(**sampling)
    # Not through its constructor, which refuses what would leave no token.
    for name, value in changed.items():
        setattr(config, name, value)
    config.max_length = num_prompt_tokens + MAX_NEW_TOKENS
    if settings.min_new_tokens is not None:
        config.min_length = num_prompt_tokens + settings.min_new_tokens
    config._eos_token_tensor = torch.tensor(sorted(ENDS))
    return MODEL._get_logits_processor(config, input_ids_seq_length=num_prompt_tokens, device="cpu")


@given(settings, st.lists(ids, min_size=1, max_size=10), st.integers(0, 7), st.integers(0, 2**31))
def test_processed_scores_are_those_of_transformers(
    settings: LogitsSettings, token_ids: list[int], num_new: int, seed: int
) -> None:
    num_prompt_tokens = max(1, len(token_ids) - num_new)
    scores = np.random.default_rng(seed).normal(size=V).astype(np.float32)
    expected = transformers_processors(settings, num_prompt_tokens)(
        torch.tensor([token_ids]), torch.from_numpy(scores[None].copy())
    )[0].numpy()
    ours = processors_of(settings, num_prompt_tokens)
    if ours is None:
        assert np.array_equal(expected, scores)
    elif np.isneginf(expected).all():
        with pytest.raises(RequestError, match="excludes every token"):
            ours.process(scores, token_ids)
    else:
        before = scores.copy()
        split = len(token_ids) - num_new if num_new < len(token_ids) else len(token_ids)
        assert np.array_equal(ours.process(scores, token_ids[:split], token_ids[split:]), expected)
        assert np.array_equal(ours.process(scores, token_ids), expected), "drafted or emitted, it is the same row"
        assert np.array_equal(scores, before), "raw scores are kept, as they are stored"


@given(st.floats(0.2, 3.0), st.integers(0, V), st.floats(0.05, 1.0), st.floats(0.0, 1.0), st.integers(0, 2**31))
def test_sampling_parameters_are_applied_in_the_order_of_transformers(
    temperature: float, top_k: int, top_p: float, min_p: float, seed: int
) -> None:
    scores = np.random.default_rng(seed).normal(size=V).astype(np.float32) * 2
    sampling = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    settings, token_ids = LogitsSettings(repetition_penalty=1.4), [1, 5, 5]
    processors = transformers_processors(settings, 3, do_sample=True, **sampling)
    expected = processors(torch.tensor([token_ids]), torch.from_numpy(scores[None].copy())).double().softmax(-1)[0]
    ours = processors_of(settings, 3)
    assert ours is not None
    probs = distribution(ours.process(scores, token_ids), SamplingParams(**sampling))
    assert probs == pytest.approx(expected.numpy(), abs=1e-5)


def test_min_p_keeps_tokens_of_at_least_this_share_of_the_best_one() -> None:
    scores = np.log(np.array([0.5, 0.26, 0.14, 0.1])).astype(np.float32)
    kept = [
        int((distribution(scores, SamplingParams(temperature=1.0, min_p=share)) > 0).sum())
        for share in (0.0, 0.15, 0.25, 0.5, 0.6, 1.0)
    ]
    assert kept == [4, 4, 3, 2, 1, 1]


def test_without_settings_there_is_nothing_to_process() -> None:
    """So the argmax stays on the device."""
    assert processors_of(LogitsSettings(), 5) is None
    assert processors_of(LogitsSettings(min_length=3, forced_bos_token_id=1, bad_words_ids=((3,), (V,))), 5) is None

    class OnDevice:
        def argmax(self) -> list[int]:
            return [4]

        def margins(self) -> list[float]:
            return [1.0]

        def numpy(self) -> np.ndarray:
            raise AssertionError("copied to the processor for nothing")

    assert GreedyVerifier().choose(OnDevice(), [1]) == (4, None)
    assert GreedyVerifier(near_tie=0.1).accept(Proposal(()), OnDevice(), [1]) == (0, 4)


def test_rows_after_a_rejected_token_are_not_processed() -> None:
    """They follow a token that is never emitted, and may have no token left, or no meaning at all."""

    def only_after_even_tokens(token_ids: np.ndarray, scores: np.ndarray) -> None:
        assert token_ids[-1] % 2 == 0

    processors = LogitsProcessors([only_after_even_tokens])
    scores = ArrayLogits(np.eye(V, dtype=np.float32)[[2, 4, 6, 8]])
    assert GreedyVerifier(0.0, processors).accept(Proposal((2, 5, 7)), scores, [0]) == (1, 4)
    certain = ArrayLogits(scores.scores * 1e6)
    sampling = SamplingVerifier(SamplingParams(temperature=1.0, seed=1), processors)
    assert sampling.accept(Proposal((2, 5, 7)), certain, [0]) == (1, 4)


def test_near_ties_are_those_of_the_processed_scores() -> None:
    scores = np.array([[1.3, 0.95, 0.0], [3.0, 1.02, 1.0]], dtype=np.float32)
    penalty = make_processors(
        LogitsSettings(repetition_penalty=1.3, suppress_tokens=(2,)),
        num_prompt_tokens=1,
        max_new_tokens=MAX_NEW_TOKENS,
        end_token_ids=frozenset(),
        vocab_size=3,
    )
    assert GreedyVerifier(0.1).accept(Proposal((0,)), ArrayLogits(scores), [0]) == (1, 0)
    assert GreedyVerifier(0.1, penalty).accept(Proposal((0,)), ArrayLogits(scores), [0]) == (0, None)


def complete(policy: str, seed: int, penalty: float, near_tie: float) -> Completion:
    """As `test_near_ties` has it: a verification pass is off by some tenths, all else is exact."""
    runtime = Runtime(
        codec=TextCodec(LetterTokenizer(), frozenset()),
        target=Engine(WidthDependentBackend(seed=seed)),
        drafter=ModelDrafter(Engine(FakeBackend(seed=seed, noise=0.2))),
        store=PrefixStore(MemoryTier(0)),
        policy=make_policy(policy),
        near_tie=near_tie,
        logits_settings=LogitsSettings(repetition_penalty=penalty),
    )
    return runtime.run(Request((seed % 32,), SamplingParams(max_new_tokens=30)))


@pytest.mark.parametrize("penalty", [3.0, 0.3])
def test_a_penalty_makes_near_ties_wider(penalty: float) -> None:
    """It multiplies what logits are off by, so where all tokens came before, their scores are off by as much more."""
    for seed in range(30):
        plain = complete("ar", seed, penalty, 0.0).token_ids
        assert complete("spec-4", seed, penalty, 2 * WidthDependentBackend.error).token_ids == plain


def draw_rounds(settings: LogitsSettings, seed: int) -> list[list[int]]:
    """Rounds of two tokens that a draft model of other scores proposes after the same two tokens, as emitted."""
    random = np.random.default_rng(7)
    target, draft = random.normal(size=(2, V, V)).astype(np.float32)
    processors, sequence = processors_of(settings, 2), [1, 2]
    verifier = SamplingVerifier(SamplingParams(temperature=0.8, min_p=0.05, seed=seed), processors)
    rounds = []
    for _ in range(4_000):
        drafted: list[int] = []
        probs = []
        for _ in range(2):
            token, prob = verifier.choose(ArrayLogits(draft[[*sequence, *drafted][-1]][None]), sequence, drafted)
            drafted.append(token)
            probs.append(prob)
        logits = ArrayLogits(target[[sequence[-1], *drafted]])
        accepted, following = verifier.accept(Proposal(tuple(drafted), np.stack(probs)), logits, sequence)
        rounds.append([*drafted[:accepted], following])
    return rounds


def test_sampling_keeps_the_processed_distribution_of_the_target() -> None:
    settings = LogitsSettings(
        repetition_penalty=1.8, no_repeat_ngram_size=2, suppress_tokens=(5,), sequence_bias=(((2, 7), 2.0),)
    )
    rounds, target = (
        draw_rounds(settings, seed=3),
        np.random.default_rng(7).normal(size=(2, V, V)).astype(np.float32)[0],
    )
    processors = processors_of(settings, 2)
    assert processors is not None
    params = SamplingParams(temperature=0.8, min_p=0.05)

    def assert_distributed(found: Sequence[int], before: list[int]) -> None:
        probs = distribution(processors.process(target[before[-1]], [1, 2], before[2:]), params)
        counts = np.bincount(found, minlength=V)
        assert not counts[probs == 0].any()
        possible = probs > 0
        assert stats.chisquare(counts[possible], probs[possible] * counts.sum()).pvalue > 1e-4

    assert_distributed([emitted[0] for emitted in rounds], [1, 2])
    judged = 0
    for token in range(V):
        second = [emitted[1] for emitted in rounds if emitted[0] == token and len(emitted) > 1]
        if len(second) > 200:
            judged += 1
            assert_distributed(second, [1, 2, token])
    assert judged >= 2


def test_the_tokens_before_a_row_are_followed_as_the_sequence_grows() -> None:
    """Drafts that were rejected leave nothing behind."""
    seen: list[list[int]] = []
    processors = LogitsProcessors([lambda token_ids, scores: seen.append(token_ids.tolist())])
    scores, sequence = np.zeros(V, dtype=np.float32), [1, 2]
    for drafted in ([], [3, 4, 5], [6], []):
        processors.process(scores, sequence, drafted)
        assert seen[-1] == [*sequence, *drafted]
        sequence += [7] * len(drafted)
    sequence += range(8, 100)
    processors.process(scores, sequence, [9])
    assert seen[-1] == [*sequence, 9]


@pytest.mark.parametrize("policy", ["ar", "kv", "spec-3", "joint-4"])
def test_what_is_drawn_obeys_the_settings_in_every_policy(policy: str) -> None:
    """Toy models of 32 letters would repeat pairs of them, and say the ninth."""
    runtime = Runtime(
        codec=TextCodec(LetterTokenizer(), frozenset()),
        target=Engine(FakeBackend(seed=1)),
        drafter=ModelDrafter(Engine(FakeBackend(seed=1, noise=0.3))),
        store=PrefixStore(MemoryTier(2**20)),
        policy=make_policy(policy),
        logits_settings=LogitsSettings(no_repeat_ngram_size=2, suppress_tokens=(9,)),
    )
    prompt = tuple(range(20))
    for seed in range(6):
        request = Request(prompt, SamplingParams(max_new_tokens=120, temperature=1.5, seed=seed))
        tokens = runtime.run(request).token_ids
        assert 9 not in tokens
        pairs = list(zip((*prompt, *tokens), (*prompt, *tokens)[1:], strict=False))
        assert len(set(pairs)) == len(pairs)
