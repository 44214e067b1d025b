"""The prefix store: exact matching, its budget, its order of eviction."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from rakvctl.core.backends.fake import FakeSnapshot
from rakvctl.core.store import PrefixStore, common_prefix_length
from rakvctl.core.tiers import MemoryTier
from rakvctl.core.types import BUCKET_TOKENS, PrefixEntry

KEY = "model"
# Few different tokens after a common beginning, so that prefixes really are shared.
tails = st.lists(st.integers(0, 2), min_size=0, max_size=6)
prompts = st.builds(lambda head, tail: (*[head] * BUCKET_TOKENS, *tail), st.integers(0, 1), tails)


def entry(token_ids: tuple[int, ...], model_key: str = KEY, draft: bool = False) -> PrefixEntry:
    return PrefixEntry(
        model_key=model_key,
        token_ids=np.asarray(token_ids, dtype=np.int64),
        kv=FakeSnapshot(token_ids),
        next_logits=np.zeros(4, dtype=np.float32),
        draft_kv=FakeSnapshot(token_ids) if draft else None,
    )


def store_of(budget_bytes: int = 10**9) -> PrefixStore:
    return PrefixStore(MemoryTier(budget_bytes))


def brute_force(left: tuple[int, ...], right: tuple[int, ...]) -> int:
    length = 0
    while length < min(len(left), len(right)) and left[length] == right[length]:
        length += 1
    return length


@given(st.lists(st.integers(0, 2)), st.lists(st.integers(0, 2)))
def test_common_prefix_equals_brute_force(left: list[int], right: list[int]) -> None:
    found = common_prefix_length(np.asarray(left, dtype=np.int64), np.asarray(right, dtype=np.int64))
    assert found == brute_force(tuple(left), tuple(right))


@given(st.lists(prompts, max_size=8), prompts)
def test_the_longest_stored_prefix_is_found(stored: list[tuple[int, ...]], prompt: tuple[int, ...]) -> None:
    store = store_of()
    for token_ids in stored:
        store.insert(entry(token_ids))
    match = store.match(KEY, prompt)
    longest = max((brute_force(token_ids, prompt) for token_ids in stored), default=0)
    if longest < BUCKET_TOKENS:
        assert match is None
        return
    assert match is not None
    assert match.num_matched_tokens == longest
    assert match.exact == (prompt in stored)
    assert match.num_cloned_tokens == (longest if match.exact else longest - 1)


@settings(max_examples=200)
@given(st.lists(st.tuples(st.sampled_from(["insert", "draft", "touch"]), prompts), max_size=30), st.integers(0, 6))
def test_the_store_equals_a_plain_dict_with_lru_order(
    operations: list[tuple[str, tuple[int, ...]]], budget_entries: int
) -> None:
    """The model: a dict from prompt to entry in order of use, the oldest dropped while the sum is over the budget."""
    budget = budget_entries * entry((0,) * 20).num_bytes
    store, model = store_of(budget), dict[tuple[int, ...], PrefixEntry]()
    for operation, token_ids in operations:
        if operation == "touch":
            if token_ids in model:
                model[token_ids] = model.pop(token_ids)
                store.touch(model[token_ids])
        else:
            new = entry(token_ids, draft=operation == "draft")
            store.insert(new)
            model.pop(token_ids, None)
            if new.num_bytes <= budget:
                model[token_ids] = new
            while sum(kept.num_bytes for kept in model.values()) > budget:
                model.pop(next(iter(model)))
        assert store.num_bytes == sum(kept.num_bytes for kept in model.values()) <= budget
        assert len(store) == len(model)
        for kept in model.values():
            match = store.match(KEY, tuple(kept.token_ids.tolist()))
            assert match is not None
            assert match.entry is kept


def test_prompts_shorter_than_a_bucket_are_never_stored() -> None:
    store = store_of()
    store.insert(entry((1,) * (BUCKET_TOKENS - 1)))
    assert len(store) == 0
    assert store.match(KEY, (1,) * (BUCKET_TOKENS - 1)) is None


def test_a_shorter_common_prefix_than_a_bucket_is_no_match() -> None:
    store = store_of()
    store.insert(entry((1,) * 20))
    assert store.match(KEY, (*(1,) * (BUCKET_TOKENS - 1), 2, 2, 2)) is None


def test_a_prompt_that_is_a_prefix_of_a_stored_one_leaves_one_token_to_compute() -> None:
    store = store_of()
    store.insert(entry((1,) * 40))
    match = store.match(KEY, (1,) * 30)
    assert match is not None
    assert (match.num_matched_tokens, match.num_cloned_tokens, match.exact) == (30, 29, False)


def test_another_models_entry_is_never_served() -> None:
    store = store_of()
    store.insert(entry((1,) * 20, model_key="other weights"))
    assert store.match(KEY, (1,) * 20) is None


def test_an_entry_of_another_model_in_the_same_bucket_is_not_served() -> None:
    """Even where the digests of two models collide, the entry's own key decides."""
    store = store_of()
    mine, theirs = entry((1,) * 20), entry((1,) * 21, model_key="other weights")
    store.insert(mine)
    next(iter(store._buckets.values()))[b"collision"] = theirs
    match = store.match(KEY, (1,) * 21)
    assert match is not None
    assert match.entry is mine


def test_ids_decide_and_not_the_digest() -> None:
    """An entry that lies in the bucket of other tokens shares no prefix with them and is not served."""
    store = store_of()
    store.insert(entry((1,) * 20))
    next(iter(store._buckets.values())).clear()
    next(iter(store._buckets.values()))[b"collision"] = entry((2,) * 20)
    assert store.match(KEY, (1,) * 20) is None


def test_looking_up_does_not_change_the_order_of_eviction() -> None:
    first, second, third = (1,) * 20, (2,) * 20, (3,) * 20
    store = store_of(2 * entry(first).num_bytes)
    store.insert(entry(first))
    store.insert(entry(second))
    assert store.match(KEY, first) is not None
    store.insert(entry(third))
    assert store.match(KEY, first) is None
    assert store.match(KEY, second) is not None


def test_an_entry_larger_than_the_budget_evicts_nothing_else() -> None:
    small, large = (1,) * 20, (2,) * 200
    store = store_of(2 * entry(small).num_bytes)
    store.insert(entry(small))
    store.insert(entry(large))
    assert store.match(KEY, large) is None
    assert store.match(KEY, small) is not None


def test_draft_states_count_toward_the_budget() -> None:
    assert entry((1,) * 20, draft=True).num_bytes == entry((1,) * 20).num_bytes + 20 * 64
