"""Policies: for each request, reuse or not, and how many tokens to draft. The fixed ones need no measured cost."""

import math
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, Protocol

from rakvctl.core.acceptance import Experience, initial_experience
from rakvctl.core.cost import CostModel
from rakvctl.core.errors import UsageError
from rakvctl.core.lookup import LookupDrafter
from rakvctl.core.profile import HardwareProfile
from rakvctl.core.rounds import RoundCosts
from rakvctl.core.seams import Clock
from rakvctl.core.speculators import AdaptiveSpeculator, FixedSpeculator, Speculator
from rakvctl.core.types import Action, CostBreakdown, Decision, Features

if TYPE_CHECKING:
    from rakvctl.core.drafters import Drafter

_MAX_DRAFT_LEN = 32
_FIXED = re.compile(r"(ar|kv|spec-(?P<spec>[1-9][0-9]?)|joint-(?P<joint>[1-9][0-9]?))")


@dataclass(frozen=True, slots=True)
class Needs:
    """What a policy works with. `drafter`: `required`, `welcome` where there is one, or `unused`.

    `history`: whether it looks up what earlier requests said.
    """

    profile: bool
    store: bool
    drafter: Literal["required", "welcome", "unused"]
    history: bool = False


class Policy(Protocol):
    """Decides for one request at a time; the same features give the same decision."""

    @property
    def name(self) -> str: ...

    @property
    def needs(self) -> Needs: ...

    def decide(self, features: Features) -> Decision: ...

    def speculator(
        self, decision: Decision, drafter: "Drafter | None", experience: Experience, clock: Clock | None = None
    ) -> Speculator | None:
        """Who drafts the tokens of a request that was decided so; None where nobody does.

        `clock`: gives seconds; None: what is drafted depends on this text alone, not on experience and on times.
        """
        ...


@dataclass(frozen=True, slots=True)
class FixedPolicy:
    """The same action for every request, as far as the models and the store allow it."""

    name: str
    action: Action

    @property
    def needs(self) -> Needs:
        """Of store and drafter only what its action uses."""
        drafter: Literal["required", "unused"] = "required" if self.action.draft_len else "unused"
        return Needs(profile=False, store=self.action.reuse, drafter=drafter)

    def decide(self, features: Features) -> Decision:
        """Its action; reuse without a match, or drafting without a drafter, is not in force and not reported."""
        drafts = self.action.draft_len > 0 and features.drafter != "none"
        reuses = self.action.reuse and features.num_matched_tokens > 0
        action = Action(reuse=reuses, draft_len=self.action.draft_len if drafts else 0)
        return Decision(action, self.name, features.drafter if drafts else "none")

    def speculator(
        self, decision: Decision, drafter: "Drafter | None", experience: Experience, clock: Clock | None = None
    ) -> Speculator | None:
        """The drafter, asked for as many tokens every round."""
        return fixed_speculator(decision, drafter)


_RAKV_NEEDS = Needs(profile=True, store=True, drafter="welcome")


@dataclass(frozen=True, slots=True)
class RakvPolicy:
    """The paper's controller: the feasible action of least expected cost, C(k, r).

    At k = 0 a draft model is not run, so nothing more would be learned of its acceptance. Now and then a request
    therefore drafts although that is expected to take longer: never longer than `Features.probe_ms` allows.
    """

    costs: CostModel
    name: str = "rakv"
    needs: Needs = _RAKV_NEEDS

    def decide(self, features: Features) -> Decision:
        """Take the least entry of the table, plain decoding before anything that costs the same."""
        table = self.costs.table(features)
        # The table's order breaks ties, plain decoding first; it needs nothing, so it stands where all is infeasible.
        best = min((row for row in table if row.infeasible is None), key=_total_ms, default=table[0])
        # With two tokens to come nothing is drafted: the first is the prefill's, the last the verify's own.
        can_probe = features.probe_ms > 0 and features.num_new_tokens > 2 and best.action.draft_len == 0
        probe = self._probe(table, features.probe_ms + best.total_ms) if can_probe else None
        action = (probe or best).action
        drafter = features.drafter if action.draft_len else "none"
        return Decision(action, self.name, drafter, table, features.alpha, is_probe=probe is not None)

    def speculator(
        self, decision: Decision, drafter: "Drafter | None", experience: Experience, clock: Clock | None = None
    ) -> Speculator | None:
        """The drafter, asked for as many tokens every round."""
        return fixed_speculator(decision, drafter)

    def _probe(self, table: tuple[CostBreakdown, ...], limit_ms: float) -> CostBreakdown | None:
        """The cheapest way to draft, if it stays within the limit."""
        drafting = (row for row in table if row.action.draft_len and row.infeasible is None)
        cheapest = min(drafting, key=_total_ms, default=None)
        return cheapest if cheapest is not None and cheapest.total_ms <= limit_ms else None


def fixed_speculator(decision: Decision, drafter: "Drafter | None") -> Speculator | None:
    """The drafter, asked for as many tokens every round as was decided; None where nothing is drafted."""
    draft_len = decision.action.draft_len
    return FixedSpeculator(drafter, draft_len) if drafter is not None and draft_len else None


_AUTO_NEEDS = replace(_RAKV_NEEDS, history=True)


@dataclass(frozen=True, slots=True)
class AutoPolicy:
    """Reuse and draft model as `rakv` decides them for the request; who drafts how much is decided anew every round.

    A looked-up token that is accepted spares a round. So what is reckoned with are the tokens that are left: a draft
    model has to earn its start with those.
    """

    costs: CostModel
    successors: tuple[int, ...] = ()
    name: str = "auto"
    needs: Needs = _AUTO_NEEDS

    def decide(self, features: Features) -> Decision:
        """The action says whether a draft model is started; looking up is always possible."""
        left = max(1, round((1.0 - features.looked_up_share) * features.num_new_tokens))
        decision = RakvPolicy(self.costs).decide(replace(features, expected_new_tokens=left))
        drafter = f"lookup+{decision.drafter}" if decision.action.draft_len else "lookup"
        return replace(decision, policy=self.name, drafter=drafter)

    def speculator(
        self, decision: Decision, drafter: "Drafter | None", experience: Experience, clock: Clock | None = None
    ) -> Speculator | None:
        """Looks up, beside the draft model if it is worth its start."""
        profile = self.costs.profile
        if clock is None:
            experience = initial_experience(profile, history_bytes=0)
        lookup = LookupDrafter(experience.history, self.successors)
        model = drafter if decision.action.draft_len else None
        costs = RoundCosts(profile, experience.round_times)
        return AdaptiveSpeculator(
            lookup, experience.lookups, model, experience.alpha, costs, clock, experience.near_ties
        )


def _total_ms(row: CostBreakdown) -> float:
    return math.inf if math.isnan(row.total_ms) else row.total_ms


def policy_needs(name: str) -> Needs:
    """What the policy of that name works with. Raises UsageError where there is none."""
    reckoning = {"rakv": _RAKV_NEEDS, "auto": _AUTO_NEEDS}
    return reckoning.get(name) or _fixed_policy(name).needs


def make_policy(name: str, profile: HardwareProfile | None = None, successors: tuple[int, ...] = ()) -> Policy:
    """Look a policy up by name: `ar`, `kv`, `spec-K`, `joint-K`, or `auto` and `rakv`, which need a profile.

    `successors`: what mostly follows each of the first token ids, for `auto`. Raises UsageError for any other name.
    """
    if name in ("rakv", "auto"):
        assert profile is not None, "a policy that reckons is made with a profile"
        return RakvPolicy(CostModel(profile)) if name == "rakv" else AutoPolicy(CostModel(profile), successors)
    return _fixed_policy(name)


def _fixed_policy(name: str) -> FixedPolicy:
    match = _FIXED.fullmatch(name)
    draft_len = int(match["spec"] or match["joint"] or 0) if match else -1
    if match is None or draft_len > _MAX_DRAFT_LEN:
        raise UsageError(
            f"there is no policy {name}",
            f"choose auto, rakv, ar, kv, spec-K or joint-K, with K from 1 to {_MAX_DRAFT_LEN} drafted tokens a round",
        )
    return FixedPolicy(name, Action(reuse=name == "kv" or bool(match["joint"]), draft_len=draft_len))
