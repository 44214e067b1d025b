"""How many tokens a round drafts: what takes the least expected time a token, by what was measured and seen."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from rakvctl.core.acceptance import LookupAcceptance
from rakvctl.core.cost import DRAFT_LENS
from rakvctl.core.profile import HardwareProfile

# Times change slowly with the context: they are looked up once for so many positions.
_CONTEXT_STEP = 64
# Whatever a profile holds, every width up to its widest is reckoned with in every round.
_MOST_DRAFT_TOKENS = 64


class RoundCosts:
    """What rounds take, milliseconds, from a profile; kept for the stretch of context at hand."""

    def __init__(self, profile: HardwareProfile) -> None:
        self._profile = profile
        self._stretch = -1
        self._verify_ms: list[float] = []
        self._propose_ms: dict[int, float] = {}
        self.most_draft_tokens = min(profile.verify.sizes_tokens[-1] - 1, _MOST_DRAFT_TOKENS)

    def at(self, context: int) -> tuple[list[float], dict[int, float]]:
        """`verify_ms[k]`, the round of k drafted tokens without the drafting; the draft model's time by its k."""
        stretch = context // _CONTEXT_STEP
        if stretch != self._stretch:
            middle = (stretch + 0.5) * _CONTEXT_STEP
            verify, draft = self._profile.verify, self._profile.draft
            self._verify_ms = [verify.at(width, middle) for width in range(1, self.most_draft_tokens + 2)]
            draft_lens = range(1, DRAFT_LENS[-1] + 1) if draft else ()
            self._propose_ms = {k: draft.propose.at(k, middle) for k in draft_lens} if draft else {}
            self._stretch = stretch
        return self._verify_ms, self._propose_ms


@dataclass(frozen=True, slots=True)
class RoundChoice:
    """How many looked-up tokens a round drafts after a match of so many, and what a token is then expected to take.

    `alpha`: the probability that the first of them stands. No match: nothing can be drafted.
    """

    num_matched_tokens: int
    alpha: float
    draft_len: int
    ms_per_token: float


def round_choices(profile: HardwareProfile, seen: LookupAcceptance, context: int) -> list[RoundChoice]:
    """What `auto` does at a context where nothing is looked up, and for each bin of matches."""
    costs = RoundCosts(profile)
    verify_ms, _ = costs.at(context)
    choices = [RoundChoice(0, 0.0, 0, verify_ms[0])]
    for matched in seen.bins:
        rate, draft_len = best_prefix(verify_ms, costs.most_draft_tokens, partial(alpha_after, seen, matched))
        choices.append(RoundChoice(matched, seen.alpha(matched), draft_len, rate))
    return choices


def alpha_after(seen: LookupAcceptance, num_matched_tokens: int, index: int) -> float:
    """Of token `index` of a proposal: all those before it belong to its match."""
    return seen.alpha(num_matched_tokens + index)


def best_prefix(verify_ms: Sequence[float], num_tokens: int, alpha: Callable[[int], float]) -> tuple[float, int]:
    """The least milliseconds a token, and the k that gives it, for a proposal that costs nothing.

    `alpha(i)`: the probability that token i of the proposal stands given that those before it did.
    """
    best_rate, best_len = verify_ms[0], 0
    expected = reached = 1.0
    for draft_len in range(1, num_tokens + 1):
        reached *= alpha(draft_len - 1)
        expected += reached
        rate = verify_ms[draft_len] / expected
        if rate < best_rate:
            best_rate, best_len = rate, draft_len
    return best_rate, best_len
