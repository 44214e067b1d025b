"""The vocabulary of the core: what is passed between its rooms, and the seams behind which backends and drafters stand.

Knows no tensor library: logits and KV states are seen only through Protocols, so that an engine without torch fits.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    import numpy as np

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Action:
    """The method's (r, k): whether cached KV states are reused, and how many tokens are drafted a round."""

    reuse: bool
    draft_len: int


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen and when to stop. `temperature` 0 is greedy; `top_k` 0 and `top_p` 1 are off."""

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt, already tokenized."""

    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)


class Logits(Protocol):
    """Next-token scores of one or more positions, wherever they live; [num_positions, vocab_size]."""

    def argmax(self) -> list[int]:
        """The best token of each position; of equal scores the lowest id."""
        ...

    def numpy(self) -> "np.ndarray":
        """The scores as float32, [num_positions, vocab_size]."""
        ...


class KVSnapshot(Protocol):
    """A copy of the KV states of the first `num_tokens` positions; only its own backend can read it."""

    @property
    def num_tokens(self) -> int: ...

    @property
    def num_bytes(self) -> int: ...


class KVCache(Protocol):
    """The KV states of one sequence, owned by a backend and appended to by its forward pass."""

    @property
    def length(self) -> int:
        """Positions that are filled and valid."""
        ...

    def reserve(self, num_tokens: int) -> None:
        """Make room for `num_tokens` positions in all, keeping what is there."""
        ...

    def num_bytes(self, num_tokens: int) -> int:
        """Memory that a snapshot of `num_tokens` positions takes; 0 before the first forward pass."""
        ...

    def rollback(self, length: int) -> None:
        """Forget all positions from `length` on; `length` is at most the present one."""
        ...

    def snapshot(self, num_tokens: int) -> KVSnapshot:
        """Copy the first `num_tokens` positions."""
        ...

    def restore(self, snapshot: KVSnapshot, num_tokens: int) -> None:
        """Replace the content by the first `num_tokens` positions of a snapshot."""
        ...


class Backend(Protocol):
    """One model on one engine. `forward` appends the tokens' KV states to `cache`."""

    @property
    def cache(self) -> KVCache: ...

    @property
    def model_key(self) -> str:
        """Names what the KV states depend on: weights, config, dtype, device class, tokenizer, versions."""
        ...

    @property
    def max_positions(self) -> int | None:
        """The longest sequence the model can hold, or None where it has no such limit."""
        ...

    @property
    def can_rollback(self) -> bool:
        """Whether the cache can forget, copy and restore positions; recurrent states cannot."""
        ...

    def forward(self, token_ids: Sequence[int], num_logits: int) -> Logits:
        """Run the tokens after what is cached; return the logits of the last `num_logits` of them."""
        ...


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
    """What the store has for a prompt: `num_matched_tokens` (the method's q) and how many positions to clone."""

    entry: PrefixEntry
    num_matched_tokens: int
    num_cloned_tokens: int
    exact: bool


@dataclass(frozen=True, slots=True)
class Proposal:
    """Drafted tokens. `probs` [len(token_ids), vocab_size] are the distributions they were drawn from.

    None stands for a deterministic proposal: each token had probability one.
    """

    token_ids: tuple[int, ...]
    probs: "np.ndarray | None" = None


@dataclass(frozen=True, slots=True)
class Decision:
    """What a policy chose for a request; `drafter` is the name of the drafter, or `none`."""

    action: Action
    policy: str
    drafter: str = "none"


@dataclass(frozen=True, slots=True)
class StepEvent:
    """Tokens emitted by one round of the loop (or by the prefill: one token, nothing drafted)."""

    token_ids: tuple[int, ...]
    num_draft_tokens: int
    num_accepted_tokens: int


@dataclass(frozen=True, slots=True)
class Completion:
    """One request, served. Times are wall-clock milliseconds from the start of the request.

    `num_draft_tokens` counts proposed tokens, `num_accepted_tokens` those of them that were emitted; `num_rounds`
    counts target passes after the prefill.
    """

    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    decision: Decision
    num_prompt_tokens: int
    num_reused_tokens: int
    num_rounds: int
    num_draft_tokens: int
    num_accepted_tokens: int
    ttft_ms: float
    total_ms: float
    predicted_ms: float | None = None

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
