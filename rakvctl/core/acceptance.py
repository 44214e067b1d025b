"""What served requests teach: how likely a drafted token is to be accepted (the alpha), and how long texts get."""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rakvctl.core.lookup import HISTORY_BYTES_PER_TOKEN, History
from rakvctl.core.profile import HardwareProfile, LookupBin
from rakvctl.core.round_times import RoundTimes
from rakvctl.core.types import Agreement, Completion, Evidence

# Half of what is known is forgotten after this many judged tokens, so that a change of topic is followed.
_HALF_LIFE_TRIALS = 256.0
# Of a pair that nobody measured, this much is assumed, with the weight of so many tokens.
_PRIOR_ALPHA, _PRIOR_TRIALS = 0.5, 32.0
# What a request still counts for its length after the next one.
_KEPT_LENGTH = 0.9
# Of earlier texts, so many tokens are kept to look up in.
_HISTORY_TOKENS = 100_000
# Probing takes at most this share of the time of the requests that draft nothing.
_PROBE_SHARE = 0.01


@dataclass(frozen=True, slots=True)
class AcceptanceTracker:
    """An exponentially weighted acceptance ratio, begun from a prior that counts as `prior_trials` judged tokens.

    A round judges its drafted tokens up to the first that is refused, that one included; those after it were never
    judged. So the ratio estimates the probability that one drafted token stands given that those before it did, which
    is the alpha of E_k(alpha).
    """

    num_accepted: float
    num_trials: float

    @classmethod
    def from_prior(cls, alpha: float, prior_trials: float) -> "AcceptanceTracker":
        """A tracker that has seen nothing yet."""
        return cls(alpha * prior_trials, prior_trials)

    @property
    def alpha(self) -> float:
        """The present estimate, between 0 and 1."""
        return self.num_accepted / self.num_trials

    def observe(self, num_draft_tokens: int, num_accepted_tokens: int) -> "AcceptanceTracker":
        """The tracker after one more round."""
        trials = num_judged(num_draft_tokens, num_accepted_tokens)
        kept = 0.5 ** (trials / _HALF_LIFE_TRIALS)
        return AcceptanceTracker(kept * self.num_accepted + num_accepted_tokens, kept * self.num_trials + trials)


# Looked-up tokens are put into bins by how many tokens before them matched, the largest of these numbers that they
# reach, and by what other places say. With each bin goes the acceptance assumed before anything was seen: that of
# SmolLM2-135M on prompts of many kinds, code, chat and long documents among them.
_MATCHED_TOKENS = (1, 2, 3, 4, 6, 10, 20)
_LOOKUP_PRIORS: dict[Agreement, tuple[float, ...]] = {
    "alone": (0.30, 0.60, 0.70, 0.75, 0.84, 0.90, 0.94),
    "agreed": (0.59, 0.75, 0.79, 0.93, 0.95, 0.97, 0.99),
    "split": (0.14, 0.25, 0.27, 0.30, 0.40, 0.57, 0.94),
    "habit": (0.16, 0.14, 0.09, 0.05, 0.05, 0.05, 0.05),
}
# As how many judged tokens that counts.
_LOOKUP_PRIOR_TRIALS = 8.0


class LookupAcceptance:
    """How often looked-up tokens stand, by what speaks for them."""

    def __init__(self, measured: Sequence[LookupBin] = ()) -> None:
        """Begin with what was measured beside what is assumed of anything."""
        self._trackers = {
            Evidence(least, agreement): AcceptanceTracker.from_prior(alpha, _LOOKUP_PRIOR_TRIALS)
            for agreement, alphas in _LOOKUP_PRIORS.items()
            for least, alpha in zip(_MATCHED_TOKENS, alphas, strict=True)
        }
        for found in measured:
            its_bin = lookup_bin(Evidence(found.matched_tokens, found.agreement))
            assumed, trials = self._trackers[its_bin], _LOOKUP_PRIOR_TRIALS + found.num_trials
            alpha = (assumed.num_accepted + found.num_trials * found.alpha) / trials
            self._trackers[its_bin] = AcceptanceTracker.from_prior(alpha, min(trials, _PRIOR_TRIALS))

    @property
    def bins(self) -> tuple[Evidence, ...]:
        """Each bin, by the least evidence of it."""
        return tuple(self._trackers)

    def alpha(self, evidence: Evidence) -> float:
        """The probability in force that a token stands for which so much speaks, given that those before it do."""
        return self._trackers[lookup_bin(evidence)].alpha

    def observe(self, evidence: Evidence, *, stands: bool) -> None:
        """Learn from one token."""
        its_bin = lookup_bin(evidence)
        self._trackers[its_bin] = self._trackers[its_bin].observe(1, int(stands))


def lookup_bin(evidence: Evidence) -> Evidence:
    """The bin of a token after at least one that matched, by the least evidence of it."""
    index = bisect_right(_MATCHED_TOKENS, evidence.num_matched_tokens) - 1
    return Evidence(_MATCHED_TOKENS[index], evidence.agreement)


class NearTies:
    """How often a pass over several tokens decides about a position, and does not leave it to a plain step.

    Always, where logits do not depend on the pass.
    """

    def __init__(self) -> None:
        self._decided = AcceptanceTracker.from_prior(1.0, _PRIOR_TRIALS)

    @property
    def share_decided(self) -> float:
        """The probability in force, between 0 and 1."""
        return self._decided.alpha

    def observe(self, num_decided: int, *, is_undecided: bool) -> None:
        """Learn from a round that drafted: how many positions it decided about, and whether it left the next one."""
        self._decided = self._decided.observe(num_decided + is_undecided, num_decided)


class Experience:
    """What the requests so far have taught: acceptance, times of rounds, how long texts get, what probing may take.

    A request that drafts nothing teaches nothing of the acceptance. So a small share of the time of such requests is
    saved up, and when it covers what drafting is expected to cost more, one request drafts: `probe_ms` never lets that
    share be exceeded.
    """

    def __init__(
        self,
        prior_alpha: float = _PRIOR_ALPHA,
        lookups: LookupAcceptance | None = None,
        history_tokens: int = _HISTORY_TOKENS,
    ) -> None:
        """`history_tokens`: how many tokens of earlier texts are kept to look up in."""
        self.lookups = lookups or LookupAcceptance()
        self.round_times = RoundTimes()
        self.near_ties = NearTies()
        self._history_tokens = history_tokens
        self.forget_texts()
        self._tracker = AcceptanceTracker.from_prior(prior_alpha, _PRIOR_TRIALS)
        # Emitted and looked-up tokens and limits of past requests, older ones counting less; at first, limits are
        # reached, and nothing is looked up.
        self._num_emitted = self._num_looked_up = self._num_allowed = 0.0
        self.probe_ms = 0.0

    @property
    def alpha(self) -> float:
        """The probability in force that a drafted token is accepted."""
        return self._tracker.alpha

    def expected_new_tokens(self, max_new_tokens: int) -> int:
        """How many tokens a request with this limit is expected to make: texts may end long before it."""
        share = self._num_emitted / self._num_allowed if self._num_allowed else 1.0
        return max(min(1, max_new_tokens), round(share * max_new_tokens))

    @property
    def looked_up_share(self) -> float:
        """How many of the new tokens looking up supplied of late, between 0 and 1."""
        return self._num_looked_up / self._num_emitted if self._num_emitted else 0.0

    def forget_texts(self) -> None:
        """Look nothing up in earlier texts any more; what was learned from them stays."""
        self.history = History(self._history_tokens)

    def remember(self, token_ids: Sequence[int]) -> None:
        """Keep a prompt with its completion, to look tokens up in."""
        self.history.add(token_ids)

    def observe(self, completion: Completion, max_new_tokens: int) -> None:
        """Learn from one request that has been served, and had this limit."""
        for event in completion.judged_events:
            self._tracker = self._tracker.observe(event.num_judged_tokens, event.num_accepted_tokens)
        self._num_emitted = _KEPT_LENGTH * self._num_emitted + len(completion.token_ids)
        self._num_looked_up = _KEPT_LENGTH * self._num_looked_up + completion.num_looked_up_tokens
        self._num_allowed = _KEPT_LENGTH * self._num_allowed + max_new_tokens
        decision = completion.decision
        if decision.is_probe:
            self.probe_ms -= decision.extra_ms
        elif decision.action.draft_len == 0:
            self.probe_ms += _PROBE_SHARE * completion.total_ms


def initial_experience(profile: HardwareProfile, history_bytes: int | None = None) -> Experience:
    """Begin with what was measured of draft model and lookup, if it was, and keep texts in `history_bytes` at most."""
    measured = profile.acceptance
    tokens = _HISTORY_TOKENS if history_bytes is None else history_bytes // HISTORY_BYTES_PER_TOKEN
    alpha = measured.alpha if measured.num_trials else _PRIOR_ALPHA
    return Experience(alpha, LookupAcceptance(measured.lookup or ()), min(tokens, _HISTORY_TOKENS))


def num_judged(num_draft_tokens: int, num_accepted_tokens: int) -> int:
    """How many drafted tokens of a round were judged: the accepted ones, and the one refused if there was one."""
    return min(num_draft_tokens, num_accepted_tokens + 1)


def count_judged(completions: Iterable[Completion]) -> tuple[int, int]:
    """Of all tokens that a draft model drafted: how many were accepted, and how many judged."""
    events = [event for completion in completions for event in completion.judged_events]
    return sum(event.num_accepted_tokens for event in events), sum(event.num_judged_tokens for event in events)


def expected_tokens(alpha: float, draft_len: int, share_decided: float = 1.0) -> float:
    """E_k(alpha) = 1 + alpha + ... + alpha^k, the tokens a round emits, the target's own included.

    Leviathan et al. 2023, equation 1. `share_decided`: a round ends before a position that it does not decide about.
    """
    if draft_len == 0:
        return 1.0
    return sum(alpha**power * share_decided ** (power + 1) for power in range(draft_len + 1))
