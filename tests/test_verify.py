"""Acceptance: greedy agreement, and sampling that leaves the target's distribution as it is."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from rakvctl.core.array_logits import ArrayLogits
from rakvctl.core.backends.torch_hf import TorchLogits
from rakvctl.core.errors import RequestError
from rakvctl.core.types import Proposal, SamplingParams
from rakvctl.core.verify import GreedyVerifier, SamplingVerifier, distribution, make_verifier

V = 5
NUM_DRAWS = 8_000


def logits_of(*best: int) -> ArrayLogits:
    scores = np.zeros((len(best), V), dtype=np.float32)
    scores[np.arange(len(best)), list(best)] = 1.0
    return ArrayLogits(scores)


@given(st.lists(st.integers(0, V - 1), max_size=6), st.lists(st.integers(0, V - 1), min_size=7, max_size=7))
def test_greedy_emits_exactly_what_stepwise_argmax_would(drafted: list[int], best: list[int]) -> None:
    accepted, following = GreedyVerifier().accept(Proposal(tuple(drafted)), logits_of(*best[: len(drafted) + 1]))
    emitted = [*drafted[:accepted], following]
    assert emitted == best[: len(emitted)]
    assert accepted == len(drafted) or drafted[accepted] != best[accepted]


def test_greedy_takes_the_lowest_id_of_a_tie() -> None:
    assert GreedyVerifier().choose(ArrayLogits(np.ones((1, V), dtype=np.float32)))[0] == 0


@pytest.mark.parametrize("scores", [[[0.0, 1.0], [0.0, np.nan]], [[np.inf, 0.0]], [[-np.inf, -np.inf]]])
def test_what_is_no_number_is_never_chosen(scores: list[list[float]]) -> None:
    array = np.array(scores, dtype=np.float32)
    for logits in (ArrayLogits(array), TorchLogits(torch.from_numpy(array))):
        for temperature in (0.0, 1.0):
            with pytest.raises(RequestError, match="no numbers"):
                make_verifier(SamplingParams(temperature=temperature)).choose(logits)


def test_a_token_may_be_ruled_out_by_a_score_of_minus_infinity() -> None:
    scores = np.array([[-np.inf, 1.0, 0.5]], dtype=np.float32)
    assert ArrayLogits(scores).argmax() == TorchLogits(torch.from_numpy(scores)).argmax() == [1]


def test_temperature_zero_is_greedy() -> None:
    assert isinstance(make_verifier(SamplingParams(temperature=0.0)), GreedyVerifier)
    assert isinstance(make_verifier(SamplingParams(temperature=0.1)), SamplingVerifier)


def chain_tokens(draft: np.ndarray | None, target: np.ndarray, seed: int) -> np.ndarray:
    """First and second token of many rounds of two drafted tokens, [NUM_DRAWS, 2], -1 where a round was shorter.

    `draft` and `target` are scores [V, V] by previous token, row 0 for the first; a draft of None proposes token 1.
    """
    verifier = SamplingVerifier(SamplingParams(temperature=1.0, seed=seed))
    rounds = np.full((NUM_DRAWS, 2), -1)
    for row in rounds:
        tokens: list[int] = []
        probs = []
        for _ in range(2):
            if draft is None:
                tokens.append(1)
            else:
                token, prob = verifier.choose(ArrayLogits(draft[tokens[-1] if tokens else 0][None]))
                tokens.append(token)
                probs.append(prob)
        proposal = Proposal(tuple(tokens), np.stack(probs) if probs else None)
        scores = ArrayLogits(target[[0, *tokens]])
        accepted, following = verifier.accept(proposal, scores)
        emitted = [*tokens[:accepted], following][:2]
        row[: len(emitted)] = emitted
    return rounds


def assert_distributed(counts: np.ndarray, probs: np.ndarray) -> None:
    """Chi-square at one in ten thousand: with fixed seeds the outcome is fixed, and a wrong rule fails by far."""
    assert stats.chisquare(counts, probs * counts.sum()).pvalue > 1e-4


@pytest.mark.parametrize("kind", ["random draft", "draft equal to the target", "opposed draft", "one-hot draft"])
def test_sampling_keeps_the_targets_distribution(kind: str) -> None:
    random = np.random.default_rng(7)
    target = random.normal(size=(V, V)).astype(np.float32)
    draft = {
        "random draft": random.normal(size=(V, V)).astype(np.float32),
        "draft equal to the target": target,
        "opposed draft": -2 * target,
        "one-hot draft": None,
    }[kind]
    rounds = chain_tokens(draft, target, seed=3)
    params = SamplingParams(temperature=1.0)
    first = np.bincount(rounds[:, 0], minlength=V)
    assert_distributed(first, distribution(target[0], params))
    for token in range(V):
        followed = rounds[(rounds[:, 0] == token) & (rounds[:, 1] >= 0), 1]
        if len(followed) > 500:
            assert_distributed(np.bincount(followed, minlength=V), distribution(target[token], params))


def test_a_draft_equal_to_the_target_is_always_accepted() -> None:
    verifier = SamplingVerifier(SamplingParams(temperature=1.0, seed=1))
    scores = np.random.default_rng(2).normal(size=(4, V)).astype(np.float32)
    for _ in range(200):
        draws = [verifier.choose(ArrayLogits(row[None])) for row in scores[:3]]
        proposal = Proposal(tuple(token for token, _ in draws), np.stack([probs for _, probs in draws]))
        assert verifier.accept(proposal, ArrayLogits(scores))[0] == 3


def test_a_token_the_target_excludes_is_never_emitted() -> None:
    params = SamplingParams(temperature=1.0, top_k=2, seed=5)
    verifier = SamplingVerifier(params)
    scores = np.array([[5.0, 4.0, 1.0, 0.0, -1.0]] * 2, dtype=np.float32)
    for _ in range(300):
        accepted, following = verifier.accept(Proposal((3,)), ArrayLogits(scores))
        assert accepted == 0
        assert following in (0, 1)


@given(st.integers(0, 2**31), st.floats(0.1, 3.0), st.integers(0, V + 2), st.floats(0.01, 1.0))
def test_distribution_is_one_over_kept_tokens(seed: int, temperature: float, top_k: int, top_p: float) -> None:
    scores = np.random.default_rng(seed).normal(size=V).astype(np.float32)
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p)
    probs = distribution(scores, params)
    assert probs.sum() == pytest.approx(1.0)
    assert probs[scores.argmax()] == probs.max() > 0
    if 0 < top_k < V:
        assert (probs > 0).sum() <= top_k


def test_top_p_keeps_the_fewest_tokens_that_reach_it() -> None:
    scores = np.log(np.array([0.5, 0.3, 0.15, 0.05])).astype(np.float32)
    kept = [
        int((distribution(scores, SamplingParams(temperature=1.0, top_p=p)) > 0).sum()) for p in (0.4, 0.6, 0.9, 1.0)
    ]
    assert kept == [1, 2, 3, 4]


def test_the_same_seed_gives_the_same_tokens() -> None:
    scores = ArrayLogits(np.random.default_rng(0).normal(size=(1, V)).astype(np.float32))
    runs = []
    for _ in range(2):
        verifier = SamplingVerifier(SamplingParams(temperature=1.0, seed=11))
        runs.append([verifier.choose(scores)[0] for _ in range(50)])
    assert runs[0] == runs[1]
    assert len(set(runs[0])) > 1
