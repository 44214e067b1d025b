"""How often the target accepts what the draft model proposes, on given prompts (token ids)."""

from collections.abc import Sequence

from rakvctl.core.acceptance import count_judged
from rakvctl.core.pair import ModelPair
from rakvctl.core.policies import make_policy
from rakvctl.core.profile import MeasuredAcceptance
from rakvctl.core.runtime import Runtime
from rakvctl.core.store import PrefixStore
from rakvctl.core.tiers import MemoryTier
from rakvctl.core.types import Completion, Request, SamplingParams
from rakvctl.measure.timing import Clock, Progress

_NEW_TOKENS = 32
_POLICY = "spec-4"
# Enough to begin with where the user gives no prompts: prose, code, a question, a list.
DEFAULT_PROMPTS = (
    "The lighthouse keeper climbed the stairs every evening, and every evening he",
    'def read_table(path, separator=","):\n    """Return the rows of a text file as lists of strings."""\n',
    "Explain in two sentences why the sky is blue.",
    "import os\nimport sys\n\n\nclass Logger:\n    def __init__(self, name, level=0):\n        self.name = name\n",
    "Shopping list:\n- apples\n- bread\n- cheese\n-",
)


def measure_acceptance(
    pair: ModelPair, prompts: Sequence[tuple[int, ...]], budget_s: float | None, clock: Clock, on_progress: Progress
) -> MeasuredAcceptance:
    """Draft through the prompts, at least one and until the budget is spent (None: all of them).

    Without a draft model nothing is judged: 0 of 0.
    """
    if pair.draft is None:
        return MeasuredAcceptance(alpha=0.0, num_trials=0)
    runtime = Runtime(
        codec=pair.codec,
        target=pair.target,
        drafter=pair.drafter(),
        store=PrefixStore(MemoryTier(0)),
        policy=make_policy(_POLICY),
        clock=clock,
    )
    started = clock()
    completions: list[Completion] = []
    for index, prompt in enumerate(prompts):
        on_progress("drafting", index / len(prompts))
        if not _fits(pair, prompt):
            continue
        request = Request(prompt, SamplingParams(max_new_tokens=_NEW_TOKENS))
        completions.append(runtime.run(request))
        if budget_s is not None and clock() - started >= budget_s:
            break
    accepted, judged = count_judged(completions)
    return MeasuredAcceptance(alpha=accepted / judged if judged else 0.0, num_trials=judged)


def _fits(pair: ModelPair, prompt: tuple[int, ...]) -> bool:
    """Whether both models have positions left after a prompt."""
    limits = [engine.max_positions for engine in (pair.target, pair.draft) if engine is not None]
    return all(limit is None or len(prompt) < limit for limit in limits)
