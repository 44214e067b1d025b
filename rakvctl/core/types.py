"""The vocabulary of the core: what is passed between its rooms. Knows no tensor library."""

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

from rakvctl.core.seams import KVSnapshot

if TYPE_CHECKING:
    import numpy as np

# Where stored states lie: in memory, or in a file that the system has in memory, or only on the disk.
Source = Literal["memory", "page cache", "disk"]
FinishReason = Literal["stop", "length"]
Agreement = Literal["alone", "agreed", "split", "habit"]
# Prompts are put into the store's buckets by this many first tokens; shorter ones are neither stored nor found.
BUCKET_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Action:
    """The method's (r, k): whether cached KV states are reused, and how many tokens are drafted a round."""

    reuse: bool
    draft_len: int


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen and when to stop. `temperature` 0 is greedy; `top_k` 0, `top_p` 1 and `min_p` 0 are off.

    `repetition_penalty` None: the model's own.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    min_p: float = 0.0
    repetition_penalty: float | None = None


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt, already tokenized. `is_chat`: its completion is an answer, and not the rest of the prompt's text."""

    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    is_chat: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class PrefixEntry:
    """The KV states of one complete prompt. `next_logits` [vocab_size] are those of the token after it."""

    model_key: str
    token_ids: "np.ndarray"
    kv: KVSnapshot
    next_logits: "np.ndarray"
    draft_kv: KVSnapshot | None = None

    @property
    def num_bytes(self) -> int:
        """Memory held, draft states included."""
        draft_bytes = self.draft_kv.num_bytes if self.draft_kv else 0
        return self.kv.num_bytes + draft_bytes + int(self.next_logits.nbytes) + int(self.token_ids.nbytes)


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """What the store has for a prompt: `num_matched_tokens` (the method's q), what to clone of them, and from where."""

    entry: PrefixEntry
    num_matched_tokens: int
    num_cloned_tokens: int
    exact: bool
    source: Source = "memory"


class Evidence(NamedTuple):
    """What speaks for a looked-up token: how many tokens before it are the same where it was found.

    `agreement`: of the places where they are, it was found in the only one, in all of several, or in some; or it was
    found nowhere, and is what the target mostly says after the token before it.
    """

    num_matched_tokens: int
    agreement: Agreement


@dataclass(frozen=True, slots=True)
class Proposal:
    """Drafted tokens. `probs` [len(token_ids), vocab_size] are the distributions they were drawn from.

    None stands for a deterministic proposal: each token had probability one. `evidence`: what speaks for each token,
    if they were looked up.
    """

    token_ids: tuple[int, ...]
    probs: "np.ndarray | None" = None
    evidence: tuple[Evidence, ...] = ()

    def first(self, num_tokens: int) -> "Proposal":
        """The same with its first tokens only."""
        probs = None if self.probs is None else self.probs[:num_tokens]
        return Proposal(self.token_ids[:num_tokens], probs, self.evidence[:num_tokens])


@dataclass(frozen=True, slots=True, kw_only=True)
class Features:
    """What is known of a request when its action is chosen.

    `max_new_tokens` is the limit, `expected_new_tokens` what experience makes of it, None if there is none. `alpha`:
    the acceptance in force. `drafter`: a drafter's name, or `none` and why. `probe_ms`: how much longer than the best
    known action a probe may take. `memory_budget_bytes`: what KV states may take, None if nobody counts.
    `looked_up_share`: how many of the new tokens looking up supplied of late. `source`: where what is cloned lies.
    """

    num_prompt_tokens: int
    max_new_tokens: int
    num_matched_tokens: int = 0
    num_cloned_tokens: int = 0
    num_draft_cloned_tokens: int = 0
    drafter: str = "none"
    no_drafter_reason: str | None = None
    alpha: float = 0.0
    probe_ms: float = 0.0
    memory_budget_bytes: int | None = None
    expected_new_tokens: int | None = None
    looked_up_share: float = 0.0
    source: Source = "memory"

    @property
    def num_new_tokens(self) -> int:
        """The method's m: how many tokens to reckon with."""
        return self.max_new_tokens if self.expected_new_tokens is None else self.expected_new_tokens


@dataclass(frozen=True, slots=True)
class CostBreakdown:
    """C(k, r) of one action and its parts, milliseconds over the whole request.

    `verify_ms` holds all of the rounds but their drafting. `infeasible`: why the action cannot be taken, or None.
    """

    action: Action
    clone_ms: float
    prefill_ms: float
    draft_prefill_ms: float
    draft_ms: float
    verify_ms: float
    memory_ms: float
    rounds: int
    infeasible: str | None = None

    @property
    def total_ms(self) -> float:
        """The sum of the parts."""
        started_ms = self.clone_ms + self.prefill_ms + self.draft_prefill_ms
        return started_ms + self.draft_ms + self.verify_ms + self.memory_ms


@dataclass(frozen=True, slots=True)
class Decision:
    """What a policy chose for a request; `drafter` is the name of the drafter, or `none`.

    `table` and `alpha` are what a policy that reckons has reckoned with; a fixed one leaves them empty. `is_probe`: not
    the least cost, but what it takes to keep alpha current.
    """

    action: Action
    policy: str
    drafter: str = "none"
    table: tuple[CostBreakdown, ...] = ()
    alpha: float | None = None
    is_probe: bool = False

    @property
    def predicted_ms(self) -> float | None:
        """The total of the chosen action, where it is known."""
        return next((row.total_ms for row in self.table if row.action == self.action), None)

    @property
    def extra_ms(self) -> float:
        """How much more the chosen action is expected to take than the least."""
        least = min((row.total_ms for row in self.table if row.infeasible is None), default=0.0)
        return (self.predicted_ms or 0.0) - least if self.table else 0.0


@dataclass(frozen=True, slots=True)
class StepEvent:
    """Tokens emitted by one round of the loop (or by the prefill: one token, nothing drafted).

    `is_undecided`: after the accepted tokens two were too close to choose from, and none of the round's own follows.
    """

    token_ids: tuple[int, ...]
    num_draft_tokens: int
    num_accepted_tokens: int
    was_looked_up: bool = False
    is_undecided: bool = False

    @property
    def num_judged_tokens(self) -> int:
        """Drafted tokens that were judged: the accepted ones, and the one refused if there was one."""
        return min(self.num_draft_tokens, self.num_accepted_tokens + (not self.is_undecided))


@dataclass(frozen=True, slots=True)
class Completion:
    """One request, served: `events` are the prefill's token and the rounds after it.

    Times are wall-clock milliseconds from the start of the request. `num_matched_tokens`: of the prompt, what was found
    in the store, reused or not; `source`: where that lay, None if nothing was found; `restore_ms`: what reusing took.
    """

    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    decision: Decision
    num_prompt_tokens: int
    num_reused_tokens: int
    events: tuple[StepEvent, ...]
    ttft_ms: float
    total_ms: float
    num_matched_tokens: int = 0
    source: Source | None = None
    restore_ms: float = 0.0

    @property
    def num_rounds(self) -> int:
        """Target passes after the prefill."""
        return len(self.events) - 1

    @property
    def judged_events(self) -> tuple[StepEvent, ...]:
        """Rounds that say something of a draft model's acceptance.

        Where the text ended within one, nobody judged what came after.
        """
        events = self.events[:-1] if self.finish_reason == "stop" else self.events
        return tuple(event for event in events if not event.was_looked_up)

    @property
    def num_draft_tokens(self) -> int:
        """Proposed tokens."""
        return sum(event.num_draft_tokens for event in self.events)

    @property
    def num_accepted_tokens(self) -> int:
        """Proposed tokens that were emitted."""
        return sum(event.num_accepted_tokens for event in self.events)

    @property
    def num_rescored_tokens(self) -> int:
        """Tokens chosen by a pass of their own, as the two best were too close in the pass that came by them."""
        return sum(event.is_undecided for event in self.events)

    @property
    def num_looked_up_tokens(self) -> int:
        """Looked-up tokens that were emitted."""
        return sum(event.num_accepted_tokens for event in self.events if event.was_looked_up)

    @property
    def rounds_by_draft_len(self) -> dict[int, int]:
        """How many rounds drafted how many tokens."""
        return dict(sorted(Counter(event.num_draft_tokens for event in self.events[1:]).items()))

    @property
    def predicted_ms(self) -> float | None:
        """What the policy expected of the whole request; None where it reckoned with nothing."""
        return self.decision.predicted_ms

    @property
    def tpot_ms(self) -> float | None:
        """Milliseconds a token after the first one; None where there is only one."""
        if len(self.token_ids) < 2:
            return None
        return (self.total_ms - self.ttft_ms) / (len(self.token_ids) - 1)

    @property
    def draft_acceptance_rate(self) -> float | None:
        """Accepted over drafted tokens; None where nothing was drafted."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else None

    @property
    def mean_acceptance_length(self) -> float | None:
        """Tokens emitted a round, the target's own included; None where there was no round."""
        return (len(self.token_ids) - 1) / self.num_rounds if self.num_rounds else None
