"""The contestants of a benchmark: our policies, each on a runtime of its own, behind the Protocol that peers share."""

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from rakvctl.core.acceptance import Experience, initial_experience
from rakvctl.core.drafters import Drafter
from rakvctl.core.lookup import History, LookupDrafter
from rakvctl.core.pair import ModelPair
from rakvctl.core.policies import FixedPolicy, Policy, make_policy
from rakvctl.core.profile import HardwareProfile
from rakvctl.core.runtime import Runtime
from rakvctl.core.seams import Clock
from rakvctl.core.store import PrefixStore
from rakvctl.core.tiers import MemoryTier
from rakvctl.core.types import Action, PrefixEntry, Request, SamplingParams

STORE_BYTES = 2**31


@dataclass(frozen=True, slots=True)
class Task:
    """One prompt to be served: how many tokens are wanted, and what was served before it comes.

    That is a prompt whose states are `stored`, or the very same request, if it was `answered` already.
    """

    prompt: tuple[int, ...]
    max_new_tokens: int
    stored: tuple[int, ...] | None = None
    answered: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What an arm made of a task. Times in milliseconds; what an arm does not know is None."""

    token_ids: tuple[int, ...]
    total_ms: float
    ttft_ms: float | None
    reused_tokens: int | None = None
    num_draft_tokens: int | None = None
    num_accepted_tokens: int | None = None
    draft_len: int | None = None
    reuse: bool | None = None
    predicted_ms: float | None = None

    @property
    def tpot_ms(self) -> float | None:
        """Milliseconds a token after the first one."""
        if self.ttft_ms is None or len(self.token_ids) < 2:
            return None
        return (self.total_ms - self.ttft_ms) / (len(self.token_ids) - 1)


class Arm(Protocol):
    """Something that serves tasks. `prepare` brings it into the state that the task asks for, and is not timed."""

    @property
    def name(self) -> str: ...

    def prepare(self, task: Task) -> Callable[[], Outcome]:
        """Returns what is to be timed: it serves the task once."""
        ...


_LOOKUP = re.compile(r"lookup-(?P<draft_len>[1-9][0-9]?)")


class PolicyArm:
    """One of our policies, or `lookup-K`: policy `spec-K` with looked-up tokens.

    What it learns of the drafter it keeps from task to task; its store it does not.
    """

    def __init__(self, pair: ModelPair, name: str, profile: HardwareProfile | None, clock: Clock) -> None:
        self.name = name
        self._pair = pair
        lookup = _LOOKUP.fullmatch(name)
        self._looks_up = lookup is not None
        self._policy = make_policy(f"spec-{lookup['draft_len']}" if lookup else name, profile, pair.successors)
        self._experience = initial_experience(profile) if profile is not None else Experience()
        self._clock = clock

    def prepare(self, task: Task) -> Callable[[], Outcome]:
        """Store what the task says is stored; the caches are left from something else, and earlier texts forgotten."""
        self._experience.forget_texts()
        entries = stored_entries(self._pair, task.stored) if self._policy.needs.store else []
        drafter = LookupDrafter(History(0)) if self._looks_up else self._pair.drafter()
        runtime = make_arm_runtime(self._pair, self._policy, drafter, store_of(entries), self._experience, self._clock)
        request = Request(task.prompt, SamplingParams(max_new_tokens=task.max_new_tokens))
        needs = self._policy.needs
        if task.answered and (needs.store or needs.history):
            runtime.run(request)

        def serve() -> Outcome:
            completion = runtime.run(request)
            return Outcome(
                token_ids=completion.token_ids,
                total_ms=completion.total_ms,
                ttft_ms=completion.ttft_ms,
                reused_tokens=completion.num_reused_tokens,
                num_draft_tokens=completion.num_draft_tokens,
                num_accepted_tokens=completion.num_accepted_tokens,
                draft_len=completion.decision.action.draft_len,
                reuse=completion.decision.action.reuse,
                predicted_ms=completion.predicted_ms,
            )

        return serve


def stored_entries(pair: ModelPair, prompt: tuple[int, ...] | None) -> list[PrefixEntry]:
    """What a store holds after a prompt was served, the draft's states included."""
    if prompt is None:
        return []
    tier = MemoryTier(STORE_BYTES)
    policy = FixedPolicy("fill", Action(reuse=True, draft_len=1 if pair.draft is not None else 0))
    runtime = make_arm_runtime(pair, policy, pair.drafter(), PrefixStore(tier))
    runtime.run(Request(prompt, SamplingParams(max_new_tokens=2)))
    return list(tier)


def store_of(entries: Sequence[PrefixEntry]) -> PrefixStore:
    """A store that holds exactly these entries."""
    store = PrefixStore(MemoryTier(STORE_BYTES))
    for entry in entries:
        store.insert(entry)
    return store


def make_arm_runtime(
    pair: ModelPair,
    policy: Policy,
    drafter: Drafter | None,
    store: PrefixStore,
    experience: Experience | None = None,
    clock: Clock = time.perf_counter,
) -> Runtime:
    """A runtime on the pair."""
    return Runtime(
        codec=pair.codec,
        target=pair.target,
        drafter=drafter,
        store=store,
        policy=policy,
        experience=experience,
        near_tie=pair.near_tie or 0.0,
        logits_settings=pair.logits_settings,
        clock=clock,
    )
