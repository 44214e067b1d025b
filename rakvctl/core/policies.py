"""Policies: for each request, reuse or not, and how many tokens to draft. The fixed ones need no measured cost."""

import re
from dataclasses import dataclass
from typing import Protocol

from rakvctl.core.errors import UsageError
from rakvctl.core.types import Action, Decision

_MAX_DRAFT_LEN = 32
_FIXED = re.compile(r"(ar|kv|spec-(?P<spec>\d+)|joint-(?P<joint>\d+))")


@dataclass(frozen=True, slots=True)
class Features:
    """What is known of a request when the decision is made. `drafter` is a drafter's name, or `none`."""

    num_prompt_tokens: int
    max_new_tokens: int
    num_matched_tokens: int
    drafter: str


class Policy(Protocol):
    """Decides for one request at a time; the same features give the same decision."""

    @property
    def name(self) -> str: ...

    @property
    def needs_drafter(self) -> bool:
        """Whether it cannot do its work without a drafter."""
        ...

    @property
    def uses_store(self) -> bool:
        """Whether prompts are to be looked up and stored."""
        ...

    def decide(self, features: Features) -> Decision: ...


@dataclass(frozen=True, slots=True)
class FixedPolicy:
    """The same action for every request, as far as the models and the store allow it."""

    name: str
    action: Action

    @property
    def needs_drafter(self) -> bool:
        """Whether tokens are to be drafted."""
        return self.action.draft_len > 0

    @property
    def uses_store(self) -> bool:
        """Whether it reuses at all."""
        return self.action.reuse

    def decide(self, features: Features) -> Decision:
        """Its action; reuse without a match, or drafting without a drafter, is not in force and not reported."""
        drafts = self.action.draft_len > 0 and features.drafter != "none"
        reuses = self.action.reuse and features.num_matched_tokens > 0
        action = Action(reuse=reuses, draft_len=self.action.draft_len if drafts else 0)
        return Decision(action, self.name, features.drafter if drafts else "none")


def make_policy(name: str) -> Policy:
    """Look a policy up by name: `ar`, `kv`, `spec-K` or `joint-K`. Raises UsageError for any other."""
    match = _FIXED.fullmatch(name)
    draft_len = int(match["spec"] or match["joint"] or 0) if match else -1
    if match is None or draft_len > _MAX_DRAFT_LEN or (draft_len == 0 and name not in ("ar", "kv")):
        raise UsageError(
            f"there is no policy {name}",
            f"choose ar, kv, spec-K or joint-K, with K from 1 to {_MAX_DRAFT_LEN} drafted tokens a round",
        )
    return FixedPolicy(name, Action(reuse=name == "kv" or bool(match["joint"]), draft_len=draft_len))
