"""From which acceptance drafting pays: measured with a drafter whose acceptance is set, and as the model predicts."""

import random
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from rakvctl.core.cost import DRAFT_LENS, CostModel
from rakvctl.core.drafters import Drafter
from rakvctl.core.pair import ModelPair
from rakvctl.core.policies import FixedPolicy
from rakvctl.core.profile import HardwareProfile
from rakvctl.core.runtime import Runtime
from rakvctl.core.seams import Clock, KVSnapshot
from rakvctl.core.types import Action, Completion, Features, Proposal, Request, SamplingParams
from rakvctl.core.verify import Verifier
from rakvctl.measure.arms import make_arm_runtime, store_of
from rakvctl.measure.timing import no_garbage_collection

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
class SensitivityRun:
    """One execution with `draft_len` drafted tokens at acceptance `alpha`, milliseconds.

    `equal`: whether its tokens are plain decoding's.
    """

    draft_len: int
    alpha: float
    prompt: int
    actual_ms: float
    predicted_ms: float
    equal: bool


@dataclass(frozen=True, slots=True)
class SensitivityPoint:
    """The medians over prompts at one k and alpha, milliseconds."""

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


class SensitivityStudy:
    """Runs every k at every alpha for every prompt, in random order; k = 0 is measured as often as the others."""

    def __init__(
        self, pair: ModelPair, profile: HardwareProfile, max_new_tokens: int, *, seed: int, clock: Clock
    ) -> None:
        """The pair must have a draft model: acceptance can only be varied where something is drafted."""
        self._pair = pair
        self._costs = CostModel(profile)
        self._max_new_tokens = max_new_tokens
        self._random = random.Random(seed)  # noqa: S311 - not for secrets
        self._clock = clock
        measured = [draft_len for draft_len in DRAFT_LENS if draft_len <= profile.longest_draft_len]
        self.cells = [(draft_len, alpha) for draft_len in measured for alpha in ALPHAS]

    def run(self, prompts: Sequence[tuple[int, ...]]) -> Iterator[SensitivityRun]:
        """One execution after another, as many as there are cells for each prompt."""
        for number, prompt in enumerate(prompts):
            request = Request(prompt, SamplingParams(max_new_tokens=self._max_new_tokens))
            plain = self._runtime(0, None).run(request)
            self._random.shuffle(self.cells)
            with no_garbage_collection():
                for draft_len, alpha in self.cells:
                    yield self._run(number, request, plain, draft_len, alpha)

    def _run(self, number: int, request: Request, plain: Completion, draft_len: int, alpha: float) -> SensitivityRun:
        drafter = self._pair.drafter()
        assert drafter is not None
        continuation = (*request.prompt_token_ids, *plain.token_ids)
        replay = ReplayDrafter(drafter, continuation, alpha, self._random.randrange(2**32))
        completion = self._runtime(draft_len, replay).run(request)
        features = Features(
            num_prompt_tokens=len(request.prompt_token_ids),
            max_new_tokens=len(plain.token_ids),
            drafter="model",
            alpha=alpha,
        )
        predicted_ms = self._costs.breakdown(Action(reuse=False, draft_len=draft_len), features).total_ms
        equal = completion.token_ids == plain.token_ids
        return SensitivityRun(draft_len, alpha, number, completion.total_ms, predicted_ms, equal)

    def _runtime(self, draft_len: int, drafter: Drafter | None) -> Runtime:
        policy = FixedPolicy("fixed", Action(reuse=False, draft_len=draft_len))
        return make_arm_runtime(self._pair, policy, drafter, store_of([]), clock=self._clock)


def medians(runs: Sequence[SensitivityRun]) -> list[SensitivityPoint]:
    """Over the prompts, for each k and alpha that was run."""
    cells: dict[tuple[int, float], list[SensitivityRun]] = {}
    for run in runs:
        cells.setdefault((run.draft_len, run.alpha), []).append(run)
    return [
        SensitivityPoint(
            *cell,
            statistics.median(run.actual_ms for run in cells[cell]),
            statistics.median(run.predicted_ms for run in cells[cell]),
        )
        for cell in sorted(cells)
    ]


def crossovers(points: Sequence[SensitivityPoint]) -> list[Crossover]:
    """Where each k's line crosses that of k = 0, measured and predicted, linear between the alphas."""
    plain = [point for point in points if point.draft_len == 0]
    if not plain:
        return []
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
