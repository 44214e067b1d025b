"""How likely a drafted token is to be accepted: the method's alpha, tracked as requests are served."""

from collections.abc import Sequence
from dataclasses import dataclass

from rakvctl.core.profile import HardwareProfile
from rakvctl.core.types import Decision, StepEvent

# Half of what is known is forgotten after this many judged tokens, so that a change of topic is followed.
_HALF_LIFE_TRIALS = 256.0
# Of a pair that nobody measured, this much is assumed, with the weight of so many tokens.
_PRIOR_ALPHA, _PRIOR_TRIALS = 0.5, 32.0
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


class Acceptance:
    """What the requests so far have taught of a drafter, and how long learning more may take.

    A request that drafts nothing teaches nothing. So a small share of the time of such requests is saved up, and when
    it covers what drafting is expected to cost more, one request drafts: `probe_ms` never lets that share be exceeded.
    """

    def __init__(self, prior_alpha: float = _PRIOR_ALPHA) -> None:
        self._tracker = AcceptanceTracker.from_prior(prior_alpha, _PRIOR_TRIALS)
        self.probe_ms = 0.0

    @property
    def alpha(self) -> float:
        """The probability in force that a drafted token is accepted."""
        return self._tracker.alpha

    def observe(self, decision: Decision, events: Sequence[StepEvent], total_ms: float) -> None:
        """Learn from one request that has been served."""
        for event in events:
            self._tracker = self._tracker.observe(event.num_draft_tokens, event.num_accepted_tokens)
        if decision.is_probe:
            self.probe_ms -= decision.extra_ms
        elif decision.action.draft_len == 0:
            self.probe_ms += _PROBE_SHARE * total_ms


def initial_acceptance(profile: HardwareProfile) -> Acceptance:
    """Begin with what was measured of the drafter, if it was."""
    measured = profile.acceptance
    return Acceptance(measured.alpha) if measured.num_trials else Acceptance()


def num_judged(num_draft_tokens: int, num_accepted_tokens: int) -> int:
    """How many drafted tokens of a round were judged: the accepted ones, and the one refused if there was one."""
    return min(num_draft_tokens, num_accepted_tokens + 1)


def expected_tokens(alpha: float, draft_len: int) -> float:
    """E_k(alpha) = 1 + alpha + ... + alpha^k, the tokens a round emits, the target's own included.

    Leviathan et al. 2023, equation 1.
    """
    return sum(alpha**power for power in range(draft_len + 1))
