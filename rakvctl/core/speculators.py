"""Who drafts in a round: always the same drafter, or whoever is expected to be fastest."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from rakvctl.core.acceptance import AcceptanceTracker, LookupAcceptance, NearTies, expected_tokens
from rakvctl.core.lookup import LookupDrafter
from rakvctl.core.rounds import LEAST_GAIN, RoundCosts, best_prefix
from rakvctl.core.seams import Clock, KVSnapshot
from rakvctl.core.types import Proposal

if TYPE_CHECKING:
    from rakvctl.core.drafters import Drafter
    from rakvctl.core.verify import Verifier

# What earlier texts say of a draft model counts as so many tokens judged in this one.
_TEXT_PRIOR_TRIALS = 12.0
_NOTHING = Proposal(())


class Speculator(Protocol):
    """What the loop asks for tokens to check, round by round, in one sequence at a time."""

    def start(self, prompt_token_ids: Sequence[int], snapshot: KVSnapshot | None, num_cloned_tokens: int) -> None:
        """Begin a new sequence, from a draft model's stored states where there are any."""
        ...

    def propose(self, token_ids: Sequence[int], room: int, verifier: "Verifier") -> Proposal:
        """At most `room` tokens to follow `token_ids`; none where a plain step is best."""
        ...

    def observe(self, emitted: Sequence[int], *, is_undecided: bool = False) -> None:
        """Learn what the round emitted, and whether it left the next token to a plain step."""
        ...

    def rollback(self, length: int) -> None:
        """Forget what was drafted after the first `length` tokens."""
        ...

    def snapshot(self, num_tokens: int) -> KVSnapshot | None:
        """A draft model's states of the first `num_tokens` tokens, if it has seen them."""
        ...


@dataclass(frozen=True, slots=True)
class FixedSpeculator:
    """The same drafter and number of tokens every round."""

    drafter: "Drafter"
    draft_len: int

    def start(self, prompt_token_ids: Sequence[int], snapshot: KVSnapshot | None, num_cloned_tokens: int) -> None:
        """As the drafter."""
        self.drafter.start(prompt_token_ids, snapshot, num_cloned_tokens)

    def propose(self, token_ids: Sequence[int], room: int, verifier: "Verifier") -> Proposal:
        """As many tokens as there is room for, in both models."""
        num_tokens = min(self.draft_len, room, _room(self.drafter, token_ids))
        return self.drafter.propose(token_ids, num_tokens, verifier) if num_tokens > 0 else _NOTHING

    def observe(self, emitted: Sequence[int], *, is_undecided: bool = False) -> None:
        """Nothing depends on it."""

    def rollback(self, length: int) -> None:
        """As the drafter."""
        self.drafter.rollback(length)

    def snapshot(self, num_tokens: int) -> KVSnapshot | None:
        """The drafter's."""
        return self.drafter.snapshot(num_tokens)


class AdaptiveSpeculator:
    """Looks tokens up, asks a draft model too if one was started, and takes what is expected to be fastest each round.

    That is min_k (D_k + V_{k+1}) / E_k, where looking up takes no time: D_k = 0. Looked-up tokens stand with the
    probabilities a_1, a_2, ... that were seen where as much spoke for a token: the next one always has one more before
    it that matches. So E_k = 1 + a_1 + a_1 a_2 + ..., and less where a wide pass leaves near ties to plain steps. A
    looked-up proposal is judged by what its round emitted even where nothing was drafted: nothing is ever ruled out for
    good. The draft model's acceptance is learned within the text, and what a round takes corrects the profile.
    """

    def __init__(
        self,
        lookup: LookupDrafter,
        seen: LookupAcceptance,
        model: "Drafter | None",
        alpha: float,
        costs: RoundCosts,
        clock: Clock | None = None,
        ties: NearTies | None = None,
    ) -> None:
        """`alpha`: the draft model's acceptance as far as earlier texts tell. `clock`: rounds are timed, in seconds."""
        self._lookup = lookup
        self._seen = seen
        self._model = model
        self._model_seen = AcceptanceTracker.from_prior(alpha, _TEXT_PRIOR_TRIALS)
        self._costs = costs
        self._clock = clock
        self._ties = ties or NearTies()
        self._started: float | None = None
        self._looked_up = self._modelled = self._drafted = _NOTHING

    def start(self, prompt_token_ids: Sequence[int], snapshot: KVSnapshot | None, num_cloned_tokens: int) -> None:
        """Read the prompt."""
        self._lookup.start(prompt_token_ids, None, 0)
        if self._model is not None:
            self._model.start(prompt_token_ids, snapshot, num_cloned_tokens)

    def propose(self, token_ids: Sequence[int], room: int, verifier: "Verifier") -> Proposal:
        """The looked-up tokens or the first of them, the draft model's, or none."""
        self._drafted = self._propose(token_ids, room, verifier)
        self._started = self._clock() if self._clock is not None else None
        return self._drafted

    def _propose(self, token_ids: Sequence[int], room: int, verifier: "Verifier") -> Proposal:
        verify_ms, propose_ms = self._costs.at(len(token_ids))
        self._looked_up = self._lookup.propose(token_ids, min(room, self._costs.most_draft_tokens), verifier)
        decided = self._ties.share_decided
        alphas = [self._seen.alpha(found) for found in self._looked_up.evidence]
        rate, draft_len = best_prefix(verify_ms, alphas, decided)
        self._modelled = _NOTHING
        if self._model is not None:
            most, alpha = min(room, _room(self._model, token_ids)), self._model_seen.alpha
            rates = {
                (ms + verify_ms[k]) / expected_tokens(alpha, k, decided): k for k, ms in propose_ms.items() if k <= most
            }
            if rates and min(rates) < min(rate, (1.0 - LEAST_GAIN) * verify_ms[0]):
                self._modelled = self._model.propose(token_ids, rates[min(rates)], verifier)
                return self._modelled
        return self._looked_up.first(draft_len)

    def observe(self, emitted: Sequence[int], *, is_undecided: bool = False) -> None:
        """Compare what was drafted, and what was looked up, with what came, up to the first difference."""
        if self._clock is not None and self._started is not None:
            self._costs.observe(len(self._drafted.token_ids), (self._clock() - self._started) * 1e3)
        if self._drafted.token_ids:
            self._ties.observe(len(emitted), is_undecided=is_undecided)
        num_drafted = min(len(self._modelled.token_ids), len(emitted))
        num_right = _num_equal(self._modelled.token_ids, emitted)
        self._model_seen = self._model_seen.observe(num_drafted, num_right)
        num_right = _num_equal(self._looked_up.token_ids, emitted)
        judged = self._looked_up.evidence[: min(num_right + 1, len(emitted))]
        for index, evidence in enumerate(judged):
            self._seen.observe(evidence, stands=index < num_right)
        # Where a round does not ask for tokens, there is nothing to compare.
        self._looked_up = self._modelled = self._drafted = _NOTHING
        self._started = None

    def rollback(self, length: int) -> None:
        """The draft model's states."""
        if self._model is not None:
            self._model.rollback(length)

    def snapshot(self, num_tokens: int) -> KVSnapshot | None:
        """The draft model's."""
        return self._model.snapshot(num_tokens) if self._model is not None else None


def _num_equal(guessed: Sequence[int], emitted: Sequence[int]) -> int:
    """How many first tokens are the same."""
    pairs = enumerate(zip(guessed, emitted, strict=False))
    return next((index for index, (guess, token) in pairs if guess != token), min(len(guessed), len(emitted)))


def _room(drafter: "Drafter", token_ids: Sequence[int]) -> int:
    """How many more positions a drafter has."""
    limit = drafter.max_positions
    return sys.maxsize if limit is None else limit - len(token_ids)
