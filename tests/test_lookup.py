"""Looking tokens up: the longest earlier match is found, memory is bounded, and nothing is proposed across texts."""

import tracemalloc
from collections.abc import Sequence
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rakvctl.core.acceptance import LookupAcceptance, lookup_bin
from rakvctl.core.lookup import HISTORY_BYTES_PER_TOKEN, History, LookupDrafter, NgramIndex
from rakvctl.core.types import Agreement, Evidence, Proposal
from rakvctl.core.verify import GreedyVerifier

SIZES = (1, 2, 3, 4)


def propose(drafter: LookupDrafter, text: Sequence[int], num_tokens: int = 8) -> Proposal:
    return drafter.propose(text, num_tokens, GreedyVerifier())


def started(prompt: Sequence[int], history: History | None = None) -> LookupDrafter:
    drafter = LookupDrafter(history or History(0))
    drafter.start(prompt, None, 0)
    return drafter


def longest_by_hand(text: Sequence[int], most: int) -> int:
    """How many last tokens also end somewhere earlier, at most so many."""
    best = 0
    for end in range(1, len(text)):
        length = 0
        while length < min(end, most) and text[end - 1 - length] == text[-1 - length]:
            length += 1
        best = max(best, length)
    return best


@given(st.lists(st.integers(0, 2), min_size=1, max_size=40))
def test_the_longest_match_is_found_if_it_is_among_the_latest(text: list[int]) -> None:
    """Of more than eight places with the same four tokens the earliest are forgotten, so short texts lose nothing."""
    index = NgramIndex(SIZES)
    index.extend(text)
    match = index.longest_match(text)
    expected = longest_by_hand(text, 32)
    found = match.num_matched if match else 0
    assert found == expected or (found >= 4 and text.count(text[-1]) > 8)
    if match is not None:
        start = match.position
        assert text[start - found : start] == text[len(text) - found :]
        following = text[start:]
        assert match.continuation(5) == tuple((following * 5)[:5])


@given(st.lists(st.integers(0, 3), max_size=30), st.lists(st.integers(0, 3), max_size=30))
def test_a_text_read_in_pieces_is_read_as_a_whole(first: list[int], second: list[int]) -> None:
    whole, pieces = NgramIndex(SIZES), NgramIndex(SIZES)
    whole.extend(first + second)
    pieces.extend(first)
    pieces.extend(second)
    text = [*first, *second]
    assert whole.longest_match(text) == pieces.longest_match(text)


def test_what_followed_the_same_tokens_is_proposed() -> None:
    prompt = [1, 2, 3, 4, 5, 6, 7, 9, 3, 4]
    proposal = propose(started(prompt), prompt)
    assert proposal.token_ids == (5, 6, 7, 9, 3, 4, 5, 6)
    assert proposal.evidence == tuple(Evidence(2 + index, "alone") for index in range(8))


def test_a_longer_match_goes_before_a_later_one() -> None:
    prompt = [1, 2, 3, 7, 0, 9, 3, 8, 0, 1, 2, 3]
    assert propose(started(prompt), prompt).token_ids[0] == 7


def test_of_equally_long_matches_the_latest_counts() -> None:
    prompt = [1, 2, 7, 0, 1, 2, 8, 5, 1, 2]
    assert propose(started(prompt), prompt).token_ids[0] == 8


def test_places_that_agree_and_places_that_do_not_are_told_apart() -> None:
    """As long as they say the same, each speaks for the next token; one that says otherwise is out from there on."""
    prompt = [1, 2, 7, 8, 5, 0, 1, 2, 7, 8, 6, 0, 3, 2, 9, 9, 1, 2]
    proposal = propose(started(prompt), prompt, 4)
    assert proposal.token_ids == (7, 8, 6, 0)
    assert [found.agreement for found in proposal.evidence] == ["agreed", "agreed", "split", "alone"]
    assert [found.num_matched_tokens for found in proposal.evidence] == [2, 3, 4, 5]


@given(st.lists(st.integers(0, 2), min_size=1, max_size=60), st.integers(1, 16))
def test_evidence_is_what_counting_all_places_by_hand_says(text: list[int], num_tokens: int) -> None:
    index = NgramIndex(SIZES)
    index.extend(text)
    match = index.longest_match(text)
    if match is None:
        return
    continuation = match.continuation(num_tokens)
    for number, found in enumerate(match.evidence(continuation)):
        said = [
            text[rival + number]
            for rival in match.rivals
            if tuple(text[rival : rival + number]) == continuation[:number] and rival + number < len(text)
        ]
        expected = "alone" if not said else "agreed" if set(said) == {continuation[number]} else "split"
        assert found == Evidence(match.num_matched + number, expected)


def test_the_end_of_an_earlier_text_speaks_neither_for_nor_against() -> None:
    history = History(1000)
    history.add([1, 2, 3, 4])
    history.add([1, 2, 3, 4, 5])
    text = [1, 2, 3, 4]
    proposal = propose(started([9, *text], history), [9, *text])
    assert (proposal.token_ids, proposal.evidence) == ((5,), (Evidence(4, "alone"),))


def test_emitted_tokens_are_looked_up_too() -> None:
    drafter = started([1, 2, 3])
    assert propose(drafter, [1, 2, 3, 4, 5]).token_ids == ()
    assert propose(drafter, [1, 2, 3, 4, 5, 6, 4, 5]).token_ids[:2] == (6, 4)


def test_a_new_request_forgets_the_last_one() -> None:
    drafter = started([1, 2, 3, 4, 1, 2])
    drafter.start([7, 1, 2], None, 0)
    assert propose(drafter, [7, 1, 2]).token_ids == ()


def test_a_repeated_prompt_drafts_its_old_answer() -> None:
    history = History(1000)
    prompt, answer = list(range(10, 30)), list(range(40, 60))
    history.add([*prompt, *answer])
    proposal = propose(started(prompt, history), [*prompt, answer[0]], 16)
    assert proposal.token_ids == tuple(answer[1:17])
    assert proposal.evidence[0] == Evidence(21, "alone")


def test_nothing_is_proposed_across_the_end_of_an_earlier_text() -> None:
    history = History(1000)
    history.add([1, 2, 3, 4, 5])
    history.add([6, 7, 8, 9])
    assert propose(started([0, 1, 2, 3, 4], history), [0, 1, 2, 3, 4]).token_ids == (5,)
    assert propose(started([0, 2, 3, 4, 5], history), [0, 2, 3, 4, 5]).token_ids == ()


def test_the_history_holds_no_more_than_it_may() -> None:
    history = History(1000)
    for number in range(300):
        history.add(range(10 * number, 10 * number + 40))
    assert sum(len(index.tokens) for index in (history._old, history._new)) <= 1000
    last = list(range(2990, 2995))
    assert propose(started(last, history), last).token_ids[0] == 2995
    assert propose(started([5, 6, 7, 8], history), [5, 6, 7, 8]).token_ids == ()
    history.add(range(10_000, 15_000))
    assert sum(len(index.tokens) for index in (history._old, history._new)) <= 1000
    end = list(range(14_900, 14_910))
    assert propose(started(end, history), end).token_ids[0] == 14_910, "of a long text the end is kept"


@pytest.mark.parametrize("max_tokens", [0, 1, 2])
def test_a_history_without_room_holds_nothing(max_tokens: int) -> None:
    history = History(max_tokens)
    history.add(range(100))
    history.add(range(100))
    assert history.longest_match(list(range(50))) is None


def test_the_history_takes_no_more_memory_than_is_counted_for_it() -> None:
    """Of tokens that never repeat, as every one of them brings a new entry."""
    num_tokens = 40_000
    texts = [[(7919 * index + shift) % 49_152 for index in range(1000)] for shift in range(num_tokens // 1000)]
    tracemalloc.start()
    history = History(num_tokens)
    for text in texts:
        history.add(text)
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert taken <= num_tokens * HISTORY_BYTES_PER_TOKEN


@pytest.mark.parametrize("agreement", get_args(Agreement))
@pytest.mark.parametrize("matched", [1, 2, 3, 4, 5, 9, 31])
def test_acceptance_is_learned_by_what_speaks_for_a_token(matched: int, agreement: Agreement) -> None:
    seen = LookupAcceptance()

    def alphas() -> dict[Evidence, float]:
        kinds = [Evidence(number, kind) for kind in get_args(Agreement) for number in range(1, 32)]
        return {kind: seen.alpha(kind) for kind in kinds}

    before, one = alphas(), Evidence(matched, agreement)
    for kind in get_args(Agreement):
        by_length = [alpha for found, alpha in before.items() if found.agreement == kind]
        # A longer match speaks for a token; a longer guess after nothing does not.
        assert by_length == sorted(by_length, reverse=kind == "habit")
    for _ in range(100):
        seen.observe(one, stands=False)
    assert seen.alpha(one) < 0.1
    changed = {found for found, alpha in alphas().items() if alpha != before[found]}
    assert changed == {found for found in before if lookup_bin(found) == lookup_bin(one)}
    for _ in range(1000):
        seen.observe(one, stands=True)
    assert seen.alpha(one) > 0.9
