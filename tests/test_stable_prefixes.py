"""Targets whose KV entries cannot be reused or rolled back: plain decoding under every policy, by the runtime alone."""

from typing import Any

import pytest

from rakvctl.core.backends.fake import FakeBackend
from rakvctl.core.drafters import Drafter, ModelDrafter
from rakvctl.core.engine import Engine
from rakvctl.core.exactness import logit_difference
from rakvctl.core.lookup import History, LookupDrafter
from rakvctl.core.pair import ModelPair
from rakvctl.core.policies import make_policy
from rakvctl.core.runtime import Runtime
from rakvctl.core.store import PrefixStore
from rakvctl.core.text import TextCodec
from rakvctl.core.tiers import MemoryTier
from rakvctl.core.types import Action, Completion, Request, SamplingParams
from rakvctl.measure.arms import PolicyArm, Task
from tests.fakes import NO_END, LetterTokenizer
from tests.profiles import toy_profile

POLICIES = ["ar", "kv", "spec-2", "joint-4", "rakv", "auto"]
DRAFTERS = ["model", "lookup"]
# Repeats itself, so that looking up proposes something from the first round on.
PROMPT = tuple(index % 5 for index in range(30))
NUM_TOKENS = 24


def backend(**changed: Any) -> FakeBackend:
    """A target whose texts repeat themselves, wrongly predicted now and then."""
    return FakeBackend(seed=2, vocab_size=8, context=2, **changed)


def runtime(target: FakeBackend, policy: str, drafter: str = "lookup", near_tie: float = 0.0) -> Runtime:
    guesser: Drafter = LookupDrafter(History(0))
    if drafter == "model":
        guesser = ModelDrafter(Engine(backend(noise=0.5)))
    return Runtime(
        codec=TextCodec(LetterTokenizer(), NO_END),
        target=Engine(target),
        drafter=guesser,
        store=PrefixStore(MemoryTier(2**20)),
        policy=make_policy(policy, toy_profile()),
        near_tie=near_tie,
    )


def run(served: Runtime, prompt: tuple[int, ...] = PROMPT, max_new_tokens: int = NUM_TOKENS) -> Completion:
    return served.run(Request(prompt, SamplingParams(max_new_tokens=max_new_tokens)))


def assert_plain(completion: Completion) -> None:
    assert completion.decision.action == Action(reuse=False, draft_len=0)
    assert completion.decision.drafter == "none"
    assert completion.num_draft_tokens == completion.num_reused_tokens == completion.num_matched_tokens == 0


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("policy", POLICIES)
def test_a_target_that_cannot_roll_back_never_drafts_and_never_reuses(policy: str, drafter: str) -> None:
    """Nor is it asked to roll back: its cache raises an error then."""
    expected = run(runtime(backend(), "ar")).token_ids
    # A limit below which everything is a near tie: rounds would be rolled back all the time.
    served = runtime(backend(can_rollback=False), policy, drafter, near_tie=0.5)
    for _ in range(2):
        completion = run(served)
        assert completion.token_ids == expected
        assert completion.decision.policy == policy
        assert_plain(completion)


def test_the_same_target_drafts_where_it_can_roll_back() -> None:
    """What makes the test above worth its time."""
    assert run(runtime(backend(), "spec-2")).num_draft_tokens > 0


@pytest.mark.parametrize("name", ["lookup-4", "joint-4", "auto"])
def test_arms_of_a_benchmark_do_not_draft_either(name: str) -> None:
    pair = ModelPair(
        TextCodec(LetterTokenizer(), NO_END), Engine(backend(can_rollback=False)), "toy", Engine(backend(noise=0.5))
    )
    clock = iter(range(10**6))
    arm = PolicyArm(pair, name, toy_profile(), lambda: float(next(clock)))
    outcome = arm.prepare(Task(PROMPT, NUM_TOKENS, stored=PROMPT))()
    assert outcome.token_ids == run(runtime(backend(), "ar")).token_ids
    assert outcome.num_draft_tokens == outcome.reused_tokens == 0


@pytest.mark.parametrize("policy", POLICIES)
def test_states_that_cannot_be_rolled_back_are_dropped_after_a_failed_pass(policy: str) -> None:
    target = backend(can_rollback=False)
    expected = run(runtime(backend(), "ar")).token_ids
    forward, start = target.forward, target.num_passes

    def broken(token_ids: tuple[int, ...], num_logits: int) -> Any:
        logits = forward(token_ids, num_logits)
        if target.num_passes - start == 4:
            raise RuntimeError("out of memory")
        return logits

    served = runtime(target, policy)
    target.forward = broken  # type: ignore[method-assign, assignment]
    with pytest.raises(RuntimeError, match="out of memory"):
        run(served)
    assert target.cache.length == 0
    target.forward = forward  # type: ignore[method-assign]
    assert run(served).token_ids == expected


# KV entries that depend on how long the sequence is


def plain(target: FakeBackend, prompt: tuple[int, ...], num_tokens: int) -> tuple[int, ...]:
    """As transformers decodes: the prompt in one pass, then single tokens; all anew where the kind asks for it."""
    ids, limit = list(prompt), target.prefix_stable_positions
    target.cache.rollback(0)
    logits = target.forward(ids, num_logits=1)
    while True:
        ids.append(logits.argmax()[0])
        if len(ids) == len(prompt) + num_tokens:
            target.cache.rollback(0)
            return tuple(ids[len(prompt) :])
        if target.recomputes_when_unstable and target.cache.length == limit:
            target.cache.rollback(0)
            logits = target.forward(ids, num_logits=1)
        else:
            logits = target.forward(ids[-1:], num_logits=1)


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("limit", [10, 29, 30, 31, 40, 53, 54, 60])
@pytest.mark.parametrize("policy", POLICIES)
def test_beyond_the_stable_length_every_policy_gives_plain_decodings_tokens(
    policy: str, limit: int, recomputes: bool
) -> None:
    target = backend(prefix_stable_positions=limit, recomputes_when_unstable=recomputes)
    target.prefill_chunk_tokens = 16
    served = runtime(target, policy)
    longer, shorter = (*PROMPT, 3, 4, 0, 1, 2, 3), PROMPT[:20]
    for prompt in (PROMPT, longer, shorter, PROMPT, longer, shorter):
        completion = run(served, prompt)
        assert completion.token_ids == plain(target, prompt, NUM_TOKENS)
        if len(prompt) + NUM_TOKENS > limit:
            assert_plain(completion)


def test_the_length_of_the_sequence_matters_to_the_target_of_these_tests() -> None:
    def tokens(**changed: Any) -> tuple[int, ...]:
        return plain(backend(**changed), PROMPT, NUM_TOKENS)

    assert tokens() != tokens(prefix_stable_positions=10)
    crossing = {"prefix_stable_positions": 40}
    assert tokens() != tokens(**crossing) != tokens(**crossing, recomputes_when_unstable=True)


def test_within_the_stable_length_prefixes_are_reused_and_tokens_drafted() -> None:
    served = runtime(backend(prefix_stable_positions=len(PROMPT) + NUM_TOKENS), "joint-4")
    run(served)
    completion = run(served)
    assert completion.num_reused_tokens == len(PROMPT)
    assert completion.num_draft_tokens > 0
    assert_plain(run(served, max_new_tokens=NUM_TOKENS + 1))


def test_a_request_that_decodes_plainly_says_why_no_drafter_is_used() -> None:
    served = runtime(backend(prefix_stable_positions=40), "auto", "model")
    for num_tokens, drafter in ((10, "model"), (11, "none")):
        features = served.plan(Request(PROMPT, SamplingParams(max_new_tokens=num_tokens))).features
        assert features.drafter == drafter
        assert ("cannot be rolled back" in (features.no_drafter_reason or "")) == (drafter == "none")


def test_a_draft_model_follows_no_further_than_its_stable_length() -> None:
    for limits, expected in (((None, 40), 40), ((30, 40), 30), ((50, 40), 40), ((50, None), 50), ((None, None), None)):
        drafter = ModelDrafter(Engine(backend(max_positions=limits[0], prefix_stable_positions=limits[1])))
        assert drafter.max_positions == expected


def test_how_far_logits_differ_is_measured_within_the_stable_length() -> None:
    assert logit_difference(Engine(backend(prefix_stable_positions=100))) == 0.0
