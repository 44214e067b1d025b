"""The controller against what it chose from: every action of a request is run, and the prediction of each compared.

The caches begin each run in the same state: what the case says is stored, stored; everything else, not.
"""

import copy
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

from rakvctl.core.acceptance import Experience, count_judged, initial_experience
from rakvctl.core.pair import ModelPair
from rakvctl.core.policies import FixedPolicy, Policy, make_policy
from rakvctl.core.profile import HardwareProfile
from rakvctl.core.runtime import Runtime
from rakvctl.core.seams import Clock
from rakvctl.core.types import Completion, PrefixEntry, Request, SamplingParams
from rakvctl.measure.arms import Task, make_arm_runtime, store_of, stored_entries
from rakvctl.measure.timing import no_garbage_collection
from rakvctl.measure.trials import ControllerRun, Trial


class ControllerStudy:
    """Runs cases with every action on one pair. The acceptance is learned from the chosen actions alone, as in use."""

    def __init__(self, pair: ModelPair, profile: HardwareProfile, *, repeats: int, seed: int, clock: Clock) -> None:
        self._pair = pair
        self._policy = make_policy("rakv", profile)
        self._auto = make_policy("auto", profile, pair.successors)
        self._experience, self._auto_experience = initial_experience(profile), initial_experience(profile)
        self._repeats = repeats
        self._random = random.Random(seed)  # noqa: S311 - not for secrets
        self._clock = clock

    def run(self, cases: Sequence[Task]) -> Iterator[ControllerRun]:
        """One case after another."""
        for case in cases:
            yield self._run(case)

    def _run(self, case: Task) -> ControllerRun:
        entries = stored_entries(self._pair, case.stored)
        request = Request(case.prompt, SamplingParams(max_new_tokens=case.max_new_tokens))
        plan = self._runtime(self._policy, entries, self._experience).plan(request)
        policies: list[Policy] = [
            FixedPolicy("fixed", row.action) for row in plan.decision.table if row.infeasible is None
        ]
        completions = self._completions([*policies, self._auto], entries, request)
        # The table begins with plain decoding, which is always possible.
        plain_ids = completions[0][0].token_ids
        num_unequal = sum(run.token_ids != plain_ids for taken in completions for run in taken)
        auto = completions.pop()
        # The chosen action and `auto` once more, not timed: what they teach is what would have been known in use.
        for policy, experience in (
            (FixedPolicy("fixed", plan.decision.action), self._experience),
            (self._auto, self._auto_experience),
        ):
            self._runtime(policy, entries, experience).run(request)
        self._auto_experience.forget_texts()

        samples_ms = {taken[0].decision.action: [run.total_ms for run in taken] for taken in completions}
        accepted, judged = count_judged(taken[0] for taken in completions)
        alpha = accepted / judged if judged else plan.features.alpha
        told = self._policy.decide(replace(plan.features, alpha=alpha, probe_ms=0.0))
        return ControllerRun(
            Trial(case, plan.decision, samples_ms),
            Trial(case, told, samples_ms),
            [run.total_ms for run in auto],
            num_unequal,
        )

    def _completions(
        self, policies: Sequence[Policy], entries: list[PrefixEntry], request: Request
    ) -> list[list[Completion]]:
        """Every policy as often as there are repeats, in a new random order each time."""
        taken: list[list[Completion]] = [[] for _ in policies]
        order = list(range(len(policies)))
        for _ in range(self._repeats):
            self._random.shuffle(order)
            with no_garbage_collection():
                for index in order:
                    # A fixed action needs no experience; `auto` has its own, which a repeat is not to add to.
                    experience = copy.deepcopy(self._auto_experience)
                    taken[index].append(self._runtime(policies[index], entries, experience).run(request))
        return taken

    def _runtime(self, policy: Policy, entries: list[PrefixEntry], experience: Experience) -> Runtime:
        return make_arm_runtime(self._pair, policy, self._pair.drafter(), store_of(entries), experience, self._clock)
