"""How often the target accepts what the draft model proposes, and what is looked up, on given prompts (token ids)."""

from collections.abc import Sequence

from rakvctl.core.acceptance import Experience, count_judged, lookup_bin
from rakvctl.core.lookup import LookupDrafter
from rakvctl.core.pair import ModelPair
from rakvctl.core.policies import make_policy
from rakvctl.core.profile import LookupBin, MeasuredAcceptance
from rakvctl.core.runtime import Runtime
from rakvctl.core.seams import Clock
from rakvctl.core.store import PrefixStore
from rakvctl.core.tiers import MemoryTier
from rakvctl.core.types import Completion, Evidence, Request, SamplingParams
from rakvctl.core.verify import GreedyVerifier
from rakvctl.measure.timing import Progress

_NEW_TOKENS = 32
_POLICY = "spec-4"


def measure_acceptance(
    pair: ModelPair, prompts: Sequence[tuple[int, ...]], budget_s: float, clock: Clock, on_progress: Progress
) -> MeasuredAcceptance:
    """Complete the prompts, at least one and until the budget is spent, and see what was drafted right.

    Without a draft model nothing is judged of one: 0 of 0. What would have been looked up is judged in any case.
    """
    runtime = Runtime(
        codec=pair.codec,
        target=pair.target,
        drafter=pair.drafter(),
        store=PrefixStore(MemoryTier(0)),
        policy=make_policy(_POLICY),
        logits_settings=pair.logits_settings,
        clock=clock,
    )
    started = clock()
    fitting: list[tuple[int, ...]] = []
    completions: list[Completion] = []
    for index, prompt in enumerate(prompts):
        on_progress("drafting", index / len(prompts))
        if not _fits(pair, prompt):
            continue
        fitting.append(prompt)
        completions.append(runtime.run(Request(prompt, SamplingParams(max_new_tokens=_NEW_TOKENS))))
        if clock() - started >= budget_s:
            break
    accepted, judged = count_judged(completions)
    return MeasuredAcceptance(
        alpha=accepted / judged if judged else 0.0,
        num_trials=judged,
        num_prompts=len(fitting),
        lookup=_lookup_bins(fitting, completions, pair.successors),
    )


def _fits(pair: ModelPair, prompt: tuple[int, ...]) -> bool:
    """Whether both models have positions left after a prompt."""
    limits = [engine.max_positions for engine in (pair.target, pair.draft) if engine is not None]
    return all(limit is None or len(prompt) < limit for limit in limits)


def _lookup_bins(
    prompts: Sequence[tuple[int, ...]], completions: Sequence[Completion], successors: Sequence[int]
) -> tuple[LookupBin, ...] | None:
    """What looking up would have proposed for each token of the completions, and whether it was that one.

    As in use, earlier prompts and completions are looked up in, too. None where nothing ever matched.
    """
    experience, verifier = Experience(), GreedyVerifier()
    stood: dict[Evidence, list[bool]] = {}
    for prompt, completion in zip(prompts, completions, strict=True):
        drafter = LookupDrafter(experience.history, successors)
        drafter.start(prompt, None, 0)
        token_ids = list(prompt)
        for token in completion.token_ids:
            proposal = drafter.propose(token_ids, 1, verifier)
            if proposal.token_ids:
                found = stood.setdefault(lookup_bin(proposal.evidence[0]), [])
                found.append(proposal.token_ids[0] == token)
            token_ids.append(token)
        experience.remember(token_ids)
    bins = (
        LookupBin(
            matched_tokens=least.num_matched_tokens,
            agreement=least.agreement,
            alpha=sum(found) / len(found),
            num_trials=len(found),
        )
        for least, found in sorted(stood.items())
    )
    return tuple(bins) or None
