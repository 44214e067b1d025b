"""How many tokens a round drafts: what takes the least expected time a token, by what was measured and seen."""

from collections.abc import Sequence
from dataclasses import dataclass

from rakvctl.core.acceptance import LookupAcceptance
from rakvctl.core.cost import DRAFT_LENS
from rakvctl.core.profile import HardwareProfile
from rakvctl.core.round_times import RoundTimes
from rakvctl.core.types import Agreement, Evidence

# Times change slowly with the context: they are looked up once for so many positions.
_CONTEXT_STEP = 64
# Whatever a profile holds, every width up to its widest is reckoned with in every round.
_MOST_DRAFT_TOKENS = 64


# Measured times err by a few percent, and of many widths that one looks best whose time is too low by chance. So
# drafting has to look better than a plain step by more than this share.
LEAST_GAIN = 0.05


class RoundCosts:
    """What rounds take, milliseconds, from a profile and what was seen since; kept for one stretch of context."""

    def __init__(self, profile: HardwareProfile, seen: RoundTimes | None = None) -> None:
        """`seen`: what earlier rounds took, for this one to learn from and to add to."""
        self._profile = profile
        self._seen = seen or RoundTimes()
        self._stretch = -1
        self._last_draft_len = 0
        self._verify_ms: list[float] = []
        self._propose_ms: dict[int, float] = {}
        self.most_draft_tokens = min(profile.widest_draft_len, _MOST_DRAFT_TOKENS)

    def at(self, context: int) -> tuple[list[float], dict[int, float]]:
        """`verify_ms[k]`, the round of k drafted tokens without the drafting; the draft model's time by its k.

        Rounds that draft are reckoned as standing between plain ones.
        """
        stretch = context // _CONTEXT_STEP
        if stretch != self._stretch:
            middle = (stretch + 0.5) * _CONTEXT_STEP
            verify, draft = self._profile.verify, self._profile.draft
            self._verify_ms = [verify.at(width, middle) for width in range(1, self.most_draft_tokens + 2)]
            draft_lens = range(1, min(DRAFT_LENS[-1], self._profile.longest_draft_len) + 1) if draft else ()
            self._propose_ms = {k: draft.propose.at(k, middle) for k in draft_lens} if draft else {}
            self._stretch = stretch
        verify_ms = [ms * self._seen.factor(width) for width, ms in enumerate(self._verify_ms, start=1)]
        change_ms = self._profile.width_change_ms
        return [verify_ms[0], *(ms + change_ms for ms in verify_ms[1:])], self._propose_ms

    def observe(self, draft_len: int, actual_ms: float) -> None:
        """What the round took for which the costs were asked last, without its drafting."""
        is_changed, self._last_draft_len = draft_len != self._last_draft_len, draft_len
        # Half of what a change costs is paid on the way in, half on the way out.
        expected_ms = self._verify_ms[draft_len] + is_changed * self._profile.width_change_ms / 2
        self._seen.observe(draft_len + 1, expected_ms, actual_ms)


@dataclass(frozen=True, slots=True)
class RoundChoice:
    """How many looked-up tokens a round drafts where so much speaks for them; what a token is then expected to take.

    `alpha`: the probability that the first of them stands. No match: nothing was found, so nothing is drafted.
    """

    num_matched_tokens: int
    agreement: Agreement | None
    alpha: float
    draft_len: int
    ms_per_token: float


def round_choices(profile: HardwareProfile, seen: LookupAcceptance, context: int) -> list[RoundChoice]:
    """What `auto` does at a context where nothing is found, and for each bin of what is."""
    costs = RoundCosts(profile)
    verify_ms, _ = costs.at(context)
    choices = [RoundChoice(0, None, 0.0, 0, verify_ms[0])]
    for least in seen.bins:
        # A proposal goes on: all its tokens before one belong to that one's match.
        matched = range(least.num_matched_tokens, least.num_matched_tokens + costs.most_draft_tokens)
        rate, draft_len = best_prefix(verify_ms, [seen.alpha(Evidence(number, least.agreement)) for number in matched])
        choices.append(RoundChoice(least.num_matched_tokens, least.agreement, seen.alpha(least), draft_len, rate))
    return choices


def best_prefix(verify_ms: Sequence[float], alphas: Sequence[float], share_decided: float = 1.0) -> tuple[float, int]:
    """The least milliseconds a token, and the k that gives it, for a proposal that costs nothing.

    `alphas`: for each token of the proposal the probability that it stands given that those before it do.
    `share_decided`: that a pass over several tokens decides about a position; a plain one always does. Drafting that is
    not better by `LEAST_GAIN` is left.
    """
    best_rate, best_len = (1.0 - LEAST_GAIN) * verify_ms[0], 0
    expected = reached = share_decided
    for draft_len, alpha in enumerate(alphas, start=1):
        reached *= alpha * share_decided
        expected += reached
        rate = verify_ms[draft_len] / expected
        if rate < best_rate:
            best_rate, best_len = rate, draft_len
    return best_rate if best_len else verify_ms[0], best_len
