"""How tokens are chosen and how drafted ones are accepted: greedy, or by sampling without changing the distribution."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from rakvctl.core.array_logits import ArrayLogits
from rakvctl.core.errors import no_numbers
from rakvctl.core.logits_processors import LogitsProcessors
from rakvctl.core.seams import Logits
from rakvctl.core.types import Proposal, SamplingParams


class Verifier(Protocol):
    """Chooses tokens from logits, for the target and for a draft, and decides which drafted tokens are accepted.

    `token_ids` is the sequence without what is drafted, and only grows; only logits processors read it.
    """

    def choose(
        self, logits: Logits, token_ids: Sequence[int] = (), drafted: Sequence[int] = ()
    ) -> tuple[int, np.ndarray | None]:
        """Choose the token after the last position, which follows `token_ids` and `drafted`.

        Returns it with the distribution it was drawn from, or None if greedy.
        """
        ...

    def accept(self, proposal: Proposal, logits: Logits, token_ids: Sequence[int] = ()) -> tuple[int, int | None]:
        """Judge a proposal of k tokens after `token_ids` by the target's logits of k + 1 positions.

        Returns how many of its first tokens stand, and the token that follows them, or None where these logits are not
        to decide about it. Without a proposal they always are.
        """
        ...


class GreedyVerifier:
    """The target's best token, always: a drafted token stands if it is that one.

    `near_tie`: how far the width of a pass may move two logits towards each other. Where the two best lie no further
    apart, a pass over several tokens is not to choose: plain decoding might choose the other one. `processors` edit
    the logits first, and `near_tie` is then about the processed ones.
    """

    def __init__(self, near_tie: float = 0.0, processors: LogitsProcessors | None = None) -> None:
        self._near_tie = near_tie
        self._processors = processors

    def choose(self, logits: Logits, token_ids: Sequence[int] = (), drafted: Sequence[int] = ()) -> tuple[int, None]:
        """The argmax of the last position."""
        if self._processors is not None:
            logits = ArrayLogits(self._processors.process(logits.numpy()[-1], token_ids, drafted)[None])
        return logits.argmax()[-1], None

    def accept(self, proposal: Proposal, logits: Logits, token_ids: Sequence[int] = ()) -> tuple[int, int | None]:
        """Accept up to the first disagreement, the target's own token follows; or up to the first near tie."""
        if self._processors is not None:
            logits = _processed_until_rejected(self._processors, proposal.token_ids, logits, token_ids)
        best = logits.argmax()
        accepted = 0
        while accepted < len(proposal.token_ids) and proposal.token_ids[accepted] == best[accepted]:
            accepted += 1
        if self._near_tie > 0.0 and proposal.token_ids:
            margins = logits.margins()[: accepted + 1]
            tie = next((index for index, margin in enumerate(margins) if margin <= self._near_tie), None)
            if tie is not None:
                return tie, None
        return accepted, best[accepted]


class SamplingVerifier:
    """Speculative sampling: accept a drafted token x with min(1, p(x)/q(x)), else draw from max(0, p - q), normalized.

    p is the target's distribution and q the draft's, so what is emitted has distribution p (Leviathan et al. 2023,
    theorem 1; Chen et al. 2023). The random numbers come from the request's seed.
    """

    def __init__(self, params: SamplingParams, processors: LogitsProcessors | None = None) -> None:
        self._params = params
        self._processors = processors
        self._random = np.random.default_rng(params.seed)

    def choose(
        self, logits: Logits, token_ids: Sequence[int] = (), drafted: Sequence[int] = ()
    ) -> tuple[int, np.ndarray]:
        """Draw from the distribution after the last position, [vocab_size]."""
        probs = self._distribution(logits.numpy()[-1], token_ids, drafted)
        return self._draw(probs), probs

    def accept(self, proposal: Proposal, logits: Logits, token_ids: Sequence[int] = ()) -> tuple[int, int]:
        """Accept tokens one by one; where one is refused, draw from what the draft left over."""
        scores = logits.numpy()
        for index, token in enumerate(proposal.token_ids):
            target = self._distribution(scores[index], token_ids, proposal.token_ids[:index])
            draft = _one_hot(token, len(target)) if proposal.probs is None else proposal.probs[index]
            if self._random.random() * draft[token] >= target[token]:
                rest = np.maximum(target - draft, 0.0)
                return index, self._draw(rest / rest.sum() if rest.any() else target)
        return len(proposal.token_ids), self._draw(self._distribution(scores[-1], token_ids, proposal.token_ids))

    def _distribution(self, scores: np.ndarray, token_ids: Sequence[int], drafted: Sequence[int]) -> np.ndarray:
        """Probabilities [vocab_size] of the token after the sequence and what is drafted."""
        if self._processors is not None:
            scores = self._processors.process(scores, token_ids, drafted)
        return distribution(scores, self._params)

    def _draw(self, probs: np.ndarray) -> int:
        """Draw an index by inverting the cumulative distribution; an impossible token is never drawn."""
        cumulative = np.cumsum(probs)
        index = int(np.searchsorted(cumulative, self._random.random() * cumulative[-1], side="right"))
        return min(index, int(np.flatnonzero(probs)[-1]))


def make_verifier(
    params: SamplingParams, near_tie: float = 0.0, processors: LogitsProcessors | None = None
) -> Verifier:
    """Greedy at temperature 0, else sampling; `near_tie` and `processors` as `GreedyVerifier` has them."""
    return GreedyVerifier(near_tie, processors) if params.temperature == 0 else SamplingVerifier(params, processors)


def _processed_until_rejected(
    processors: LogitsProcessors, drafted: Sequence[int], logits: Logits, token_ids: Sequence[int]
) -> ArrayLogits:
    """The processed scores up to the first row whose argmax is not the drafted token.

    Later rows follow tokens that are never emitted, so a processor need not make sense of them.
    """
    rows: list[np.ndarray] = []
    for index, scores in enumerate(logits.numpy()):
        rows.append(processors.process(scores, token_ids, drafted[:index]))
        if index < len(drafted) and rows[-1].argmax() != drafted[index]:
            break
    return ArrayLogits(np.stack(rows))


def distribution(scores: np.ndarray, params: SamplingParams) -> np.ndarray:
    """Probabilities [vocab_size], float64, of logits after temperature, then top-k, then top-p, then min-p.

    Top-p keeps the fewest most likely tokens whose probabilities reach it, the best one in any case; min-p drops those
    that are less likely than this share of the best one. Raises RequestError where the scores are no numbers.
    """
    best = scores.max()
    if not np.isfinite(best):
        raise no_numbers()
    # The best score is taken off first: whatever the temperature, nothing overflows but to minus infinity.
    with np.errstate(over="ignore"):
        scaled = (scores - best).astype(np.float64) / params.temperature
    if 0 < params.top_k < len(scaled):
        kept = np.argpartition(scaled, -params.top_k)[-params.top_k :]
        scaled = np.where(np.isin(np.arange(len(scaled)), kept), scaled, -np.inf)
    probs: np.ndarray = np.exp(scaled)
    probs /= probs.sum()
    if params.top_p < 1.0:
        order = np.argsort(-probs, kind="stable")
        before = np.cumsum(probs[order]) - probs[order]
        probs[order[before >= params.top_p]] = 0.0
        probs /= probs.sum()
    if params.min_p > 0.0:
        probs[probs < params.min_p * probs.max()] = 0.0
        probs /= probs.sum()
    return probs


def _one_hot(token: int, size: int) -> np.ndarray:
    probs = np.zeros(size)
    probs[token] = 1.0
    return probs
