"""Where logits depend on the width of a pass, as in half precision: measured, and near ties left to plain steps."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from rakvctl.core.array_logits import ArrayLogits
from rakvctl.core.backends.fake import FakeBackend
from rakvctl.core.drafters import ModelDrafter
from rakvctl.core.engine import Engine
from rakvctl.core.errors import ModelError
from rakvctl.core.exactness import logit_difference
from rakvctl.core.policies import make_policy
from rakvctl.core.runtime import Runtime
from rakvctl.core.store import PrefixStore
from rakvctl.core.text import TextCodec
from rakvctl.core.tiers import MemoryTier
from rakvctl.core.types import Completion, Proposal, Request, SamplingParams
from rakvctl.core.verify import GreedyVerifier, SamplingVerifier, make_verifier
from tests.fakes import NO_END, LetterTokenizer
from tests.program import Call, Finished

PROMPT = tuple(range(20))
SEEDS = range(40)


class WidthDependentBackend(FakeBackend):
    """Logits of passes over several tokens are off by up to `error`, each by another amount."""

    error = 0.3

    def forward(self, token_ids: Sequence[int], num_logits: int) -> ArrayLogits:
        scores = super().forward(token_ids, num_logits).scores
        if len(token_ids) > 1:
            digest = hashlib.blake2b(repr((tuple(token_ids), self.cache.length)).encode(), digest_size=8).digest()
            rng = np.random.default_rng(int.from_bytes(digest))
            scores = scores + rng.uniform(-self.error, self.error, scores.shape).astype(np.float32)
        return ArrayLogits(scores)


class WideBackend(FakeBackend):
    """Logits of a prompt's last pass are off where that is wide, as with kernels that work in tiles of 64."""

    def forward(self, token_ids: Sequence[int], num_logits: int) -> ArrayLogits:
        scores = super().forward(token_ids, num_logits).scores
        return ArrayLogits(scores + 0.3 * (len(token_ids) >= 64) * (np.arange(scores.shape[-1]) % 2))


class LimitedBackend(WidthDependentBackend):
    """Has no positions beyond its own, as a model with learned ones."""

    def forward(self, token_ids: Sequence[int], num_logits: int) -> ArrayLogits:
        assert self.max_positions is None or self.cache.length + len(token_ids) <= self.max_positions
        return super().forward(token_ids, num_logits)


def complete(policy: str, seed: int, near_tie: float) -> Completion:
    """Prompts of one token are prefilled by a step, so that all but verifies is exact."""
    target = Engine(WidthDependentBackend(seed=seed))
    runtime = Runtime(
        codec=TextCodec(LetterTokenizer(), NO_END),
        target=target,
        drafter=ModelDrafter(Engine(FakeBackend(seed=seed, noise=0.2))),
        store=PrefixStore(MemoryTier(0)),
        policy=make_policy(policy),
        near_tie=near_tie,
    )
    completion = runtime.run(Request((seed % 32,), SamplingParams(max_new_tokens=48)))
    assert target.length == len(completion.token_ids), "all but the last token are cached"
    return completion


def test_the_difference_is_measured_and_is_zero_where_passes_agree() -> None:
    assert logit_difference(Engine(FakeBackend(seed=3))) == 0.0
    noisy = Engine(WidthDependentBackend(seed=3))
    assert 0.25 < logit_difference(noisy) <= 2 * WidthDependentBackend.error
    assert noisy.length == 0


def test_passes_wider_than_any_round_are_measured_too() -> None:
    """What is found of a prompt decides how many positions are left to compute."""
    assert logit_difference(Engine(WideBackend(seed=3))) == pytest.approx(0.3, rel=1e-3)


def test_logits_that_are_no_numbers_are_an_error_and_no_difference() -> None:
    class DamagedBackend(FakeBackend):
        def forward(self, token_ids: Sequence[int], num_logits: int) -> ArrayLogits:
            return ArrayLogits(super().forward(token_ids, num_logits).scores * np.float32(np.nan))

    with pytest.raises(ModelError, match="no numbers"):
        logit_difference(Engine(DamagedBackend(seed=3)))


@pytest.mark.parametrize("max_positions", [1, 2, 3, 4, 6, 18, 19, 24, 300])
def test_a_model_of_few_positions_is_measured_within_them(max_positions: int) -> None:
    """From four on there is room for a prompt in two pieces and a pass over two tokens."""
    engine = Engine(LimitedBackend(seed=3, max_positions=max_positions))
    assert (logit_difference(engine) > 0.0) == (max_positions >= 4)


@pytest.mark.parametrize("policy", ["spec-1", "spec-4", "spec-8"])
def test_near_ties_are_left_to_plain_steps(policy: str) -> None:
    """Without that, some of these texts come out otherwise; with it, none."""
    plain = {seed: complete("ar", seed, 0.0).token_ids for seed in SEEDS}
    careless = [seed for seed in SEEDS if complete(policy, seed, 0.0).token_ids != plain[seed]]
    assert careless, "the errors are too small to matter"
    completions = {seed: complete(policy, seed, 2 * WidthDependentBackend.error) for seed in SEEDS}
    assert {seed: completion.token_ids for seed, completion in completions.items()} == plain
    assert all(completion.num_rescored_tokens > 0 for completion in completions.values())
    assert all(completion.num_accepted_tokens > 0 for completion in completions.values())


def test_an_undecided_token_is_chosen_by_the_next_round_alone() -> None:
    completion = complete("spec-4", 0, 2 * WidthDependentBackend.error)
    for event, following in zip(completion.events, completion.events[1:], strict=False):
        if event.is_undecided:
            assert len(event.token_ids) == event.num_accepted_tokens
            assert (following.num_draft_tokens, len(following.token_ids)) == (0, 1)
            assert event.num_judged_tokens == event.num_accepted_tokens, "nothing was refused"


def scores(*margins: float) -> ArrayLogits:
    """Token 0 is best everywhere, token 1 second by these margins."""
    return ArrayLogits(np.array([[1.0, 1.0 - margin, -5.0] for margin in margins], dtype=np.float32))


def test_only_ties_up_to_the_first_refusal_matter() -> None:
    verifier = GreedyVerifier(near_tie=0.1)
    assert verifier.accept(Proposal((0, 0)), scores(1.0, 1.0, 1.0)) == (2, 0)
    assert verifier.accept(Proposal((0, 0)), scores(1.0, 0.05, 1.0)) == (1, None)
    assert verifier.accept(Proposal((0, 0)), scores(1.0, 1.0, 0.05)) == (2, None), "nor is the token after them decided"
    assert verifier.accept(Proposal((2, 0)), scores(1.0, 0.05, 0.05)) == (0, 0)
    assert verifier.accept(Proposal((1, 0)), scores(0.05, 1.0, 1.0)) == (0, None), "a refusal may be wrong as well"
    assert verifier.accept(Proposal(()), scores(0.05)) == (0, 0), "a plain step always decides"


def test_sampling_knows_no_ties() -> None:
    assert isinstance(make_verifier(SamplingParams(temperature=1.0), near_tie=0.5), SamplingVerifier)


def test_exact_takes_float32_as_it_is(run: Call) -> None:
    common = ("generate", "def f(", "-n", "8", "--threads", "1", "--policy", "spec-4", "-o", "jsonl")
    plain, exact = run(*common), run(*common, "--exact")
    assert exact.code == plain.code == 0
    assert texts(exact) == texts(plain)
    assert json.loads(exact.out)["num_rescored_tokens"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_exact_is_exact_in_half_precision_or_fails(dtype: str, run: Call, tmp_path: Path) -> None:
    """What is possible depends on the machine; what is claimed must be true."""
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("def f(\nimport os\nclass Reader:\nfor line in lines:\n")
    common = ("-f", prompts, "--format", "lines", "-n", "32", "--threads", "1", "--dtype", dtype, "--exact")
    plain = run("generate", *common, "--policy", "ar")
    if plain.code:
        assert "differ from pass to pass" in plain.err
        return
    drafted = run("generate", *common, "--policy", "spec-4")
    assert len(texts(plain)) == 4
    assert texts(drafted) == texts(plain)


def texts(finished: Finished) -> list[str]:
    return [json.loads(line)["text"] for line in finished.out.splitlines()]
