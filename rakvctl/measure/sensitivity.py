"""From which acceptance drafting pays: measured with a drafter whose acceptance is set, and as the model predicts."""

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from rakvctl.core.acceptance import Experience
from rakvctl.core.cost import DRAFT_LENS, CostModel
from rakvctl.core.drafters import Drafter
from rakvctl.core.pair import ModelPair
from rakvctl.core.policies import FixedPolicy
from rakvctl.core.profile import HardwareProfile
from rakvctl.core.runtime import Runtime
from rakvctl.core.seams import KVSnapshot
from rakvctl.core.store import PrefixStore
from rakvctl.core.tiers import MemoryTier
from rakvctl.core.types import Action, Features, Proposal, Request, SamplingParams
from rakvctl.core.verify import Verifier
from rakvctl.measure.timing import Clock

ALPHAS = tuple(step / 10 for step in range(1, 11))


class ReplayDrafter:
    """Pays for the real drafter's proposals, and hands out the right token with probability alpha instead.

    `continuation`: prompt and completion, as plain decoding gives them.
    """

    name = "replay"

    def __init__(self, drafter: Drafter, continuation: Sequence[int], alpha: float, seed: int) -> None:
        self._drafter = drafter
        self._continuation = continuation
        self._alpha = alpha
        self._random = random.Random(seed)  # noqa: S311 - not for secrets

    @property
    def max_positions(self) -> int | None:
        """The real drafter's."""
        return self._drafter.max_positions

    def start(self, prompt_token_ids: Sequence[int], snapshot: KVSnapshot | None, num_cloned_tokens: int) -> None:
        """As the real drafter."""
        self._drafter.start(prompt_token_ids, snapshot, num_cloned_tokens)

    def propose(self, token_ids: Sequence[int], num_tokens: int, verifier: Verifier) -> Proposal:
        """As many tokens as the real drafter proposes, each right with probability alpha, else certainly wrong."""
        proposal = self._drafter.propose(token_ids, num_tokens, verifier)
        start = len(token_ids)
        right = self._continuation[start : start + len(proposal.token_ids)]
        return Proposal(tuple(token if self._random.random() < self._alpha else _another(token) for token in right))

    def rollback(self, length: int) -> None:
        """As the real drafter."""
        self._drafter.rollback(length)

    def snapshot(self, num_tokens: int) -> KVSnapshot | None:
        """Nothing of this is worth keeping."""
        return None


def _another(token: int) -> int:
    return token - 1 if token else 1


@dataclass(frozen=True, slots=True)
class SensitivityPoint:
    """A prompt's time with `draft_len` drafted tokens at acceptance `alpha`, milliseconds (median over prompts)."""

    draft_len: int
    alpha: float
    actual_ms: float
    predicted_ms: float


@dataclass(frozen=True, slots=True)
class Crossover:
    """The least alpha from which `draft_len` is no slower than plain decoding, or None where none is."""

    draft_len: int
    measured: float | None
    predicted: float | None


def sensitivity(
    pair: ModelPair,
    profile: HardwareProfile,
    prompts: Sequence[tuple[int, ...]],
    max_new_tokens: int,
    *,
    seed: int,
    clock: Clock,
    on_progress: Callable[[float], None],
) -> list[SensitivityPoint]:
    """Every k at every alpha for every prompt, in random order; k = 0 is measured as often as the others."""
    costs, rng = CostModel(profile), random.Random(seed)  # noqa: S311 - not for secrets
    cells = [(draft_len, alpha) for draft_len in DRAFT_LENS for alpha in ALPHAS]
    actual: dict[tuple[int, float], list[float]] = {cell: [] for cell in cells}
    predicted: dict[tuple[int, float], list[float]] = {cell: [] for cell in cells}
    for number, prompt in enumerate(prompts):
        request = Request(prompt, SamplingParams(max_new_tokens=max_new_tokens))
        plain = _runtime(pair, 0, None, clock).run(request)
        continuation = (*prompt, *plain.token_ids)
        features = Features(
            num_prompt_tokens=len(prompt), max_new_tokens=len(plain.token_ids), drafter="model", alpha=0.0
        )
        rng.shuffle(cells)
        for done, (draft_len, alpha) in enumerate(cells):
            drafter = pair.drafter()
            assert drafter is not None, "acceptance can only be varied where something is drafted"
            replay = ReplayDrafter(drafter, continuation, alpha, rng.randrange(2**32))
            completion = _runtime(pair, draft_len, replay, clock).run(request)
            assert completion.token_ids == plain.token_ids, "speculation changed a token"
            actual[draft_len, alpha].append(completion.total_ms)
            action = Action(reuse=False, draft_len=draft_len)
            predicted[draft_len, alpha].append(costs.breakdown(action, replace(features, alpha=alpha)).total_ms)
            on_progress((number + (done + 1) / len(cells)) / len(prompts))
    return [
        SensitivityPoint(*cell, statistics.median(actual[cell]), statistics.median(predicted[cell]))
        for cell in sorted(cells)
    ]


def crossovers(points: Sequence[SensitivityPoint]) -> list[Crossover]:
    """Where each k's line crosses that of k = 0, measured and predicted, linear between the alphas."""
    plain = [point for point in points if point.draft_len == 0]
    plain_actual = statistics.median(point.actual_ms for point in plain)
    plain_predicted = statistics.median(point.predicted_ms for point in plain)
    found = []
    for draft_len in sorted({point.draft_len for point in points} - {0}):
        line = [point for point in points if point.draft_len == draft_len]
        measured = _crossing([(point.alpha, point.actual_ms - plain_actual) for point in line])
        predicted = _crossing([(point.alpha, point.predicted_ms - plain_predicted) for point in line])
        found.append(Crossover(draft_len, measured, predicted))
    return found


def _crossing(line: Sequence[tuple[float, float]]) -> float | None:
    """The last alpha at which a line comes down to zero; its first alpha if it is below from there on."""
    if line[-1][1] > 0.0:
        return None
    for (left, above), (right, below) in reversed(list(pairwise(line))):
        if above > 0.0 >= below:
            return left + (right - left) * above / (above - below)
    return line[0][0]


def _runtime(pair: ModelPair, draft_len: int, drafter: Drafter | None, clock: Clock) -> Runtime:
    return Runtime(
        codec=pair.codec,
        target=pair.target,
        drafter=drafter,
        store=PrefixStore(MemoryTier(0)),
        policy=FixedPolicy("fixed", Action(reuse=False, draft_len=draft_len)),
        experience=Experience(),
        clock=clock,
    )
