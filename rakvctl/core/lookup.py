"""Drafting without a model: what followed the same tokens earlier on, in this text or in an earlier one."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from typing import TYPE_CHECKING

from rakvctl.core.seams import KVSnapshot
from rakvctl.core.types import Agreement, Evidence, Proposal

if TYPE_CHECKING:
    from rakvctl.core.verify import Verifier

# Shorter matches are looked for in the text itself only: in earlier texts they mean little, and would fill memory.
_OWN_SIZES, _HISTORY_SIZES = (1, 2, 3, 4), (4,)
# Of equal n-grams so many, the latest, are compared further back.
_MOST_CANDIDATES = 8
_MOST_COMPARED = 32
# Stands between two texts in the history, and continues nothing.
_BREAK = -1
# What one token of the history takes with its n-gram, at most.
HISTORY_BYTES_PER_TOKEN = 400


@dataclass(frozen=True, slots=True)
class Match:
    """`num_matched` last tokens of a text also end before `position` of `tokens`.

    `rivals`: where else in `tokens` the last few of them end.
    """

    num_matched: int
    tokens: list[int]
    position: int
    rivals: tuple[int, ...]

    def continuation(self, num_tokens: int) -> tuple[int, ...]:
        """What followed there, up to the end of that text; a text that goes on repeats itself from there."""
        following = self.tokens[self.position : self.position + num_tokens]
        if _BREAK in following:
            return tuple(following[: following.index(_BREAK)])
        return tuple(islice(cycle(following), num_tokens))

    def evidence(self, continuation: Sequence[int]) -> tuple[Evidence, ...]:
        """What speaks for each token of the continuation, given that those before it stand."""
        found, rivals = [], self.rivals
        for index, token in enumerate(continuation):
            said = [(rival, self._token(rival + index)) for rival in rivals]
            others = [other for _, other in said if other != _BREAK]
            agreement: Agreement = "split" if others else "alone"
            if others and all(other == token for other in others):
                agreement = "agreed"
            found.append(Evidence(self.num_matched + index, agreement))
            rivals = tuple(rival for rival, other in said if other == token)
        return tuple(found)

    def _token(self, position: int) -> int:
        return self.tokens[position] if position < len(self.tokens) else _BREAK


class NgramIndex:
    """Where each n-gram of a growing text ends, for some sizes n: a few dictionary entries a token."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.tokens: list[int] = []
        self._sizes = tuple(sizes)
        self._ends: dict[tuple[int, ...], list[int]] = {}

    def extend(self, token_ids: Iterable[int]) -> None:
        """Append tokens. An n-gram is entered once it has a token after it."""
        for token in token_ids:
            end = len(self.tokens)
            for size in self._sizes:
                if end >= size:
                    ends = self._ends.setdefault(tuple(self.tokens[end - size :]), [])
                    ends.append(end)
                    if len(ends) > _MOST_CANDIDATES:
                        del ends[0]
            self.tokens.append(token)

    def longest_match(self, text: Sequence[int]) -> Match | None:
        """The longest match of the last tokens of `text`; of equally long ones the latest."""
        for size in reversed(self._sizes):
            ends = self._ends.get(tuple(text[-size:])) if len(text) >= size else None
            if ends:
                length, best = max((self._num_matched(text, end), end) for end in ends)
                return Match(length, self.tokens, best, tuple(end for end in ends if end != best))
        return None

    def _num_matched(self, text: Sequence[int], end: int) -> int:
        """How many last tokens of `text` are those before `end`."""
        most = min(end, len(text), _MOST_COMPARED)
        for back in range(1, most + 1):
            if self.tokens[end - back] != text[-back]:
                return back - 1
        return most


class History:
    """Earlier texts of the same model, the latest `max_tokens` or so of them."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._old = NgramIndex(_HISTORY_SIZES)
        self._new = NgramIndex(_HISTORY_SIZES)

    def add(self, token_ids: Sequence[int]) -> None:
        """Remember the end of a prompt with its completion; half of the older ones are forgotten when it gets full."""
        most = self._max_tokens // 2 - 1
        kept = token_ids[max(0, len(token_ids) - most) :] if most > 0 else ()
        if len(self._new.tokens) + len(kept) > most:
            self._old, self._new = self._new, NgramIndex(_HISTORY_SIZES)
        self._new.extend((*kept, _BREAK))

    def longest_match(self, text: Sequence[int]) -> Match | None:
        """The longest match in any of them, the later one if two are equally long."""
        matches = [match for index in (self._new, self._old) if (match := index.longest_match(text)) is not None]
        return max(matches, key=lambda match: match.num_matched, default=None)


class LookupDrafter:
    """Proposes what followed the longest earlier match of the last tokens, and says how much speaks for it."""

    name = "lookup"
    max_positions = None

    def __init__(self, history: History, successors: Sequence[int] = ()) -> None:
        """`successors`: what to propose after each of the first token ids where nothing matches."""
        self._history = history
        self._successors = successors
        self._own = NgramIndex(_OWN_SIZES)

    def start(self, prompt_token_ids: Sequence[int], snapshot: KVSnapshot | None, num_cloned_tokens: int) -> None:
        """Forget the last text, and read the prompt."""
        self._own = NgramIndex(_OWN_SIZES)
        self._own.extend(prompt_token_ids)

    def propose(self, token_ids: Sequence[int], num_tokens: int, verifier: "Verifier") -> Proposal:
        """Up to `num_tokens` tokens; what mostly follows the last one where nothing matches."""
        self._own.extend(token_ids[len(self._own.tokens) :])
        matches = [self._own.longest_match(token_ids), self._history.longest_match(token_ids)]
        best = max((match for match in matches if match), key=lambda match: match.num_matched, default=None)
        if best is None:
            return self._habit(token_ids[-1], num_tokens)
        continuation = best.continuation(num_tokens)
        return Proposal(continuation, evidence=best.evidence(continuation))

    def _habit(self, token: int, num_tokens: int) -> Proposal:
        """The successor of a token, that one's, and so on, as far as they are known."""
        chain: list[int] = []
        while len(chain) < num_tokens and token < len(self._successors):
            token = self._successors[token]
            chain.append(token)
        return Proposal(tuple(chain), evidence=tuple(Evidence(1 + index, "habit") for index in range(len(chain))))

    def rollback(self, length: int) -> None:
        """Only emitted tokens are ever read."""

    def snapshot(self, num_tokens: int) -> KVSnapshot | None:
        """It has no states."""
        return None
