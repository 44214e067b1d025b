"""The loop and the runtime around it: the same tokens under every policy, clean ends, clean caches, honest counters."""

from collections.abc import Sequence as Tokens

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rakvctl.core.array_logits import ArrayLogits
from rakvctl.core.backends.fake import FakeBackend
from rakvctl.core.errors import RequestError
from rakvctl.core.types import Completion, Request, SamplingParams
from tests.fakes import LETTERS, FakeRuntime

PROMPT = tuple(range(20))
POLICIES = ["ar", "kv", *(f"spec-{k}" for k in range(1, 9)), "joint-1", "joint-4", "joint-8", "rakv", "auto"]


def text_of(token_ids: Tokens[int]) -> str:
    return "".join(LETTERS[token_id] for token_id in token_ids)


def plain(fake: FakeRuntime, prompt: tuple[int, ...], num_tokens: int) -> tuple[int, ...]:
    """The greedy continuation, one forward pass over everything for each token: no loop of ours."""
    ids = list(prompt)
    for _ in range(num_tokens):
        fake.target.cache.rollback(0)
        ids.append(fake.target.forward(ids, num_logits=1).argmax()[0])
    return tuple(ids[len(prompt) :])


def assert_counters_add_up(completion: Completion) -> None:
    """Each round emits what it accepted and one token of the target's own, but the last may be cut before it."""
    num_after_first = len(completion.token_ids) - 1
    assert completion.num_accepted_tokens <= completion.num_draft_tokens
    assert num_after_first - completion.num_rounds <= completion.num_accepted_tokens <= num_after_first


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 1000),
    noise=st.sampled_from([0.0, 0.3, 1.0, 50.0]),
    prompts=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=30).map(tuple), min_size=1, max_size=4),
    policies=st.lists(st.sampled_from(POLICIES), min_size=1, max_size=4),
    num_tokens=st.integers(1, 20),
)
def test_any_policy_after_any_other_gives_plain_decodings_tokens(
    seed: int, noise: float, prompts: list[tuple[int, ...]], policies: list[str], num_tokens: int
) -> None:
    """One store under changing policies: hits without draft states, drafts that lag behind, repeats, partial hits."""
    fake = FakeRuntime(seed=seed, noise=noise)
    expected = {prompt: plain(fake, prompt, num_tokens) for prompt in prompts}
    for policy in policies:
        for prompt in (*prompts, *prompts):
            completion = fake.run(policy, prompt, SamplingParams(max_new_tokens=num_tokens))
            assert completion.token_ids == expected[prompt]
            assert completion.finish_reason == "length"
            assert_counters_add_up(completion)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_text_ends_at_an_end_token_inside_an_accepted_block(policy: str) -> None:
    tokens = plain(FakeRuntime(noise=0.0), PROMPT, 24)
    for position in range(12):
        end = tokens[position]
        first = tokens.index(end)
        completion = FakeRuntime(noise=0.0, end_token_ids=frozenset([end])).run(policy, PROMPT)
        assert completion.token_ids == tokens[: first + 1]
        assert completion.text == text_of(tokens[:first])
        assert completion.finish_reason == "stop"
        assert_counters_add_up(completion)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_text_ends_before_a_stop_string_inside_an_accepted_block(policy: str) -> None:
    tokens = plain(FakeRuntime(noise=0.0), PROMPT, 24)
    text = text_of(tokens)
    for start in range(1, 12):
        stop = text[start : start + 3]
        end = text.index(stop)
        sampling = SamplingParams(max_new_tokens=24, stop=("not in it", stop))
        completion = FakeRuntime(noise=0.0).run(policy, PROMPT, sampling)
        assert completion.text == text[:end]
        assert completion.token_ids == tokens[: end + 3]
        assert completion.finish_reason == "stop"
        assert_counters_add_up(completion)


@pytest.mark.parametrize("policy", ["kv", "joint-4"])
def test_a_stopped_run_leaves_no_trace_in_the_next_one(policy: str) -> None:
    fake = FakeRuntime(noise=0.0)
    tokens = plain(fake, PROMPT, 24)
    fake.run(policy, PROMPT, SamplingParams(max_new_tokens=24, stop=(text_of(tokens[4:7]),)))
    longer = (*PROMPT, *tokens[:3])
    completion = fake.run(policy, longer, SamplingParams(max_new_tokens=12))
    assert completion.token_ids == tokens[3:15]
    assert completion.num_reused_tokens == len(PROMPT) - 1


def test_a_perfect_draft_fills_every_round() -> None:
    completion = FakeRuntime(noise=0.0).run("spec-4", PROMPT, SamplingParams(max_new_tokens=21))
    assert completion.draft_acceptance_rate == 1.0
    assert completion.num_rounds == 4
    assert completion.mean_acceptance_length == 5.0


def test_a_useless_draft_costs_rounds_but_no_tokens() -> None:
    fake = FakeRuntime(noise=1e6)
    assert fake.run("spec-4", PROMPT).token_ids == plain(fake, PROMPT, 24)


def test_an_exact_repeat_starts_without_a_forward_pass() -> None:
    fake = FakeRuntime()
    fake.run("kv", PROMPT)
    passes = fake.target.num_passes
    completion = fake.run("kv", PROMPT, SamplingParams(max_new_tokens=1))
    assert fake.target.num_passes == passes
    assert completion.num_reused_tokens == len(PROMPT)
    assert completion.decision.action.reuse


def test_a_partial_hit_reuses_all_but_the_boundary_token() -> None:
    fake = FakeRuntime()
    fake.run("kv", PROMPT)
    completion = fake.run("kv", (*PROMPT[:18], 31, 30))
    assert completion.num_reused_tokens == 17


@pytest.mark.parametrize("policy", ["ar", "spec-4"])
def test_policies_without_reuse_neither_store_nor_find(policy: str) -> None:
    fake = FakeRuntime()
    fake.run("kv", PROMPT)
    stored = len(fake.store)
    assert fake.run(policy, PROMPT).num_reused_tokens == 0
    fake.run(policy, (*PROMPT[::-1],))
    assert len(fake.store) == stored


def test_an_entry_without_draft_states_serves_speculation_and_gets_them() -> None:
    fake = FakeRuntime(noise=0.0)
    fake.run("kv", PROMPT)
    match = fake.store.match(fake.target.model_key, PROMPT)
    assert match is not None
    assert match.entry.draft_kv is None
    completion = fake.run("joint-4", PROMPT)
    assert completion.num_reused_tokens == len(PROMPT)
    assert completion.num_draft_tokens > 0
    match = fake.store.match(fake.target.model_key, PROMPT)
    assert match is not None
    assert match.entry.draft_kv is not None
    assert match.entry.draft_kv.num_tokens == len(PROMPT)


def test_stored_draft_states_spare_the_drafts_prefill() -> None:
    fake = FakeRuntime()
    fake.run("joint-4", PROMPT)
    fed: list[int] = []
    forward = fake.draft.forward

    def counted(token_ids: Tokens[int], num_logits: int) -> ArrayLogits:
        fed.append(len(token_ids))
        return forward(token_ids, num_logits)

    fake.draft.forward = counted  # type: ignore[method-assign]
    fake.run("joint-4", PROMPT)
    assert max(fed) <= 2


def watch_length(backend: FakeBackend) -> list[int]:
    """Lengths of a backend's cache after each of its passes from now on."""
    lengths: list[int] = []
    forward = backend.forward

    def watched(token_ids: Tokens[int], num_logits: int) -> ArrayLogits:
        logits = forward(token_ids, num_logits)
        lengths.append(backend.cache.length)
        return logits

    backend.forward = watched  # type: ignore[method-assign]
    return lengths


@pytest.mark.parametrize(("target_positions", "draft_positions"), [(30, None), (None, 30), (30, 26), (26, 30)])
def test_the_drafted_length_shrinks_to_the_room_left(target_positions: int | None, draft_positions: int | None) -> None:
    """No draft goes past the positions of either model, nor past the tokens asked for."""
    fake = FakeRuntime(noise=0.0, target_positions=target_positions, draft_positions=draft_positions)
    target_lengths, draft_lengths = watch_length(fake.target), watch_length(fake.draft)
    completion = fake.run("spec-8", PROMPT, SamplingParams(max_new_tokens=64))
    assert max(target_lengths) <= (target_positions or len(PROMPT) + 64)
    assert max(draft_lengths) <= (draft_positions or len(PROMPT) + 64)
    room = target_positions - len(PROMPT) if target_positions else 64
    assert completion.token_ids == plain(FakeRuntime(noise=0.0), PROMPT, room)


def test_a_prompt_without_room_for_a_token_is_an_error_of_its_own() -> None:
    fake = FakeRuntime(target_positions=20)
    with pytest.raises(RequestError, match="20 tokens"):
        fake.run("kv", PROMPT)
    assert len(fake.run("kv", PROMPT[:19]).token_ids) == 1


def test_a_prompt_too_long_for_the_draft_is_served_without_it() -> None:
    fake = FakeRuntime(draft_positions=20)
    completion = fake.run("spec-4", PROMPT)
    assert completion.decision.action.draft_len == 0
    assert completion.decision.drafter == "none"
    assert completion.token_ids == plain(fake, PROMPT, 24)


@pytest.mark.parametrize("policy", ["ar", "kv", "spec-3", "joint-3"])
@pytest.mark.parametrize("failing_pass", range(6))
def test_a_failed_pass_leaves_clean_caches_and_stores_nothing(policy: str, failing_pass: int) -> None:
    fake = FakeRuntime(noise=0.3)
    expected = plain(fake, PROMPT, 24)
    forward, start = fake.target.forward, fake.target.num_passes

    def broken(token_ids: Tokens[int], num_logits: int) -> ArrayLogits:
        if fake.target.num_passes - start == failing_pass:
            raise RuntimeError("out of memory")
        return forward(token_ids, num_logits)

    fake.target.forward = broken  # type: ignore[method-assign]
    with pytest.raises(RuntimeError):
        fake.run(policy, PROMPT)
    assert len(fake.store) == 0
    fake.target.forward = forward  # type: ignore[method-assign]
    assert fake.run(policy, PROMPT).token_ids == expected


def test_sampling_with_a_seed_repeats_itself_and_differs_between_seeds() -> None:
    fake = FakeRuntime()
    runs = {
        seed: fake.run("spec-3", PROMPT, SamplingParams(max_new_tokens=24, temperature=1.0, seed=seed)).token_ids
        for seed in (1, 2)
    }
    again = fake.run("spec-3", PROMPT, SamplingParams(max_new_tokens=24, temperature=1.0, seed=1)).token_ids
    assert runs[1] == again != runs[2]


def test_streamed_pieces_add_up_to_the_text() -> None:
    pieces: list[str] = []
    runtime = FakeRuntime(noise=0.0).runtime("spec-4")
    completion = runtime.run(Request(PROMPT, SamplingParams(max_new_tokens=24)), pieces.append)
    assert "".join(pieces) == completion.text
    assert len(pieces) == 24


def test_an_entry_that_cannot_fit_is_not_even_copied() -> None:
    fake = FakeRuntime(budget_bytes=100)
    copied = []
    fake.target.cache.snapshot = lambda n: copied.append(n)  # type: ignore[method-assign, assignment, return-value]
    fake.run("kv", PROMPT)
    assert copied == []
