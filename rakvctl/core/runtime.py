"""One request through all of it: look the prefix up, decide, decode, store."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from rakvctl.core.decode import Sequence, decode, prefill
from rakvctl.core.drafters import Drafter
from rakvctl.core.engine import Engine
from rakvctl.core.errors import RequestError
from rakvctl.core.policies import Features, Policy
from rakvctl.core.store import BUCKET_TOKENS, PrefixStore
from rakvctl.core.text import TextCodec, TextStream
from rakvctl.core.types import Completion, Decision, PrefixEntry, PrefixMatch, Request, StepEvent
from rakvctl.core.verify import make_verifier


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be done for a request: the match that is reused, if any, and the policy's decision."""

    match: PrefixMatch | None
    decision: Decision
    max_new_tokens: int


class Runtime:
    """A target, perhaps a drafter, a store and a policy: everything that serves requests one after another."""

    def __init__(
        self, *, codec: TextCodec, target: Engine, drafter: Drafter | None, store: PrefixStore, policy: Policy
    ) -> None:
        self._codec = codec
        self._target = target
        self._drafter = drafter
        self._store = store
        self._policy = policy

    @property
    def codec(self) -> TextCodec:
        """The tokenizer of target and draft."""
        return self._codec

    def plan(self, request: Request) -> Plan:
        """Look the prompt up in the store and ask the policy; changes nothing.

        Raises RequestError where the model has no position left for a new token.
        """
        num_prompt_tokens = len(request.prompt_token_ids)
        max_new_tokens = request.sampling.max_new_tokens
        limit = self._target.max_positions
        if limit is not None and num_prompt_tokens >= limit:
            raise RequestError(
                f"the prompt has {num_prompt_tokens} tokens, the model room for {limit} with at least one new token",
                "shorten the prompt, or take a model with a longer context",
            )
        if limit is not None:
            max_new_tokens = min(max_new_tokens, limit - num_prompt_tokens)
        match = self._store.match(self._target.model_key, request.prompt_token_ids) if self._uses_store else None
        features = Features(
            num_prompt_tokens=num_prompt_tokens,
            max_new_tokens=max_new_tokens,
            num_matched_tokens=match.num_matched_tokens if match else 0,
            drafter=self._drafter.name if self._drafter and self._has_room(self._drafter, request) else "none",
        )
        decision = self._policy.decide(features)
        return Plan(match if decision.action.reuse else None, decision, max_new_tokens)

    def run(self, request: Request, on_text: Callable[[str], None] = lambda _: None) -> Completion:
        """Serve a request; `on_text` gets the text piece by piece as it becomes final.

        Where it fails half-way nothing of it is stored, and the next request begins with clean caches.
        """
        started = time.perf_counter()
        plan = self.plan(request)
        prompt = request.prompt_token_ids
        text = TextStream(self._codec, request.sampling.stop, on_text)
        sequence = Sequence(request, plan.max_new_tokens, text.push)
        drafter = self._drafter if plan.decision.action.draft_len else None
        self._target.reserve(len(prompt) + plan.max_new_tokens)
        logits = prefill(self._target, prompt, plan.match)
        stored_logits = logits.numpy()[-1].copy() if self._uses_store else None

        events: list[StepEvent] = []
        ttft_ms = 0.0
        verifier = make_verifier(request.sampling)
        for event in decode(sequence, plan.decision.action, logits, self._target, drafter, verifier):
            if not events:
                ttft_ms = (time.perf_counter() - started) * 1e3
                self._start_drafting(drafter, plan, prompt)
            events.append(event)
        total_ms = (time.perf_counter() - started) * 1e3

        if stored_logits is not None:
            self._remember(prompt, plan.match, stored_logits, drafter)
        return Completion(
            token_ids=tuple(sequence.token_ids[len(prompt) :]),
            text=text.close(),
            finish_reason="stop" if text.stopped else "length",
            decision=plan.decision,
            num_prompt_tokens=len(prompt),
            num_reused_tokens=plan.match.num_cloned_tokens if plan.match else 0,
            num_rounds=len(events) - 1,
            num_draft_tokens=sum(event.num_draft_tokens for event in events),
            num_accepted_tokens=sum(event.num_accepted_tokens for event in events),
            ttft_ms=ttft_ms,
            total_ms=total_ms,
        )

    @property
    def _uses_store(self) -> bool:
        return self._policy.uses_store and self._target.can_rollback

    def _has_room(self, drafter: Drafter, request: Request) -> bool:
        """Whether the drafter can follow the prompt and at least one token more."""
        return drafter.max_positions is None or len(request.prompt_token_ids) < drafter.max_positions

    def _start_drafting(self, drafter: Drafter | None, plan: Plan, prompt: tuple[int, ...]) -> None:
        """Begin the drafter's sequence, from its stored states where the reused entry has some."""
        if drafter is not None:
            snapshot = plan.match.entry.draft_kv if plan.match else None
            drafter.start(prompt, snapshot, plan.match.num_cloned_tokens if plan.match else 0)

    def _remember(
        self, prompt: tuple[int, ...], match: PrefixMatch | None, logits: np.ndarray, drafter: Drafter | None
    ) -> None:
        """Store the prompt's states (never those of what was generated), and the draft's beside them."""
        if match is not None:
            self._store.touch(match.entry)
        if match is not None and match.exact:
            if match.entry.draft_kv is None and drafter is not None:
                self._store.insert(replace(match.entry, draft_kv=drafter.snapshot(len(prompt))))
        elif len(prompt) >= BUCKET_TOKENS and self._store.make_room(self._target.num_bytes(len(prompt))):
            self._store.insert(
                PrefixEntry(
                    model_key=self._target.model_key,
                    token_ids=np.asarray(prompt, dtype=np.int64),
                    kv=self._target.snapshot(len(prompt)),
                    next_logits=logits,
                    draft_kv=drafter.snapshot(len(prompt)) if drafter is not None else None,
                )
            )
