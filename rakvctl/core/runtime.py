"""One request through all of it: look the prefix up, decide, decode, store."""

import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace

import numpy as np

from rakvctl.core.acceptance import Experience
from rakvctl.core.decode import Sequence, decode, prefill_rest, restore_prefix
from rakvctl.core.drafters import Drafter
from rakvctl.core.engine import Engine
from rakvctl.core.errors import DamagedEntryError, RequestError
from rakvctl.core.logits_processors import LogitsSettings, make_processors
from rakvctl.core.policies import FixedPolicy, Policy
from rakvctl.core.seams import Clock, EngineInfo
from rakvctl.core.speculators import Speculator
from rakvctl.core.store import PrefixStore
from rakvctl.core.text import TextCodec, TextStream
from rakvctl.core.types import (
    BUCKET_TOKENS,
    Action,
    Completion,
    Decision,
    Features,
    PrefixEntry,
    PrefixMatch,
    Request,
    SamplingParams,
    StepEvent,
)
from rakvctl.core.verify import Verifier, make_verifier


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be done for a request: the policy in force, the match that is reused, if any, and the decision."""

    policy: Policy
    match: PrefixMatch | None
    features: Features
    decision: Decision


class Runtime:
    """A target, perhaps a drafter, a store and a policy: everything that serves requests one after another."""

    def __init__(
        self,
        *,
        codec: TextCodec,
        target: Engine,
        drafter: Drafter | None,
        store: PrefixStore,
        policy: Policy,
        experience: Experience | None = None,
        near_tie: float = 0.0,
        logits_settings: LogitsSettings | None = None,
        clock: Clock = time.perf_counter,
    ) -> None:
        """`experience`: what earlier requests have taught; `clock` gives seconds.

        `near_tie`: where the two best logits lie no further apart, only a pass over one token chooses.
        `logits_settings`: what the target's checkpoint asks for; a request may give another repetition penalty.
        """
        self._codec = codec
        self._target = target
        self._drafter = drafter
        self._store = store
        self._policy = policy
        self._plain_policy = FixedPolicy(policy.name, Action(reuse=False, draft_len=0))
        self._experience = experience or Experience()
        self.near_tie = near_tie
        self._logits_settings = logits_settings or LogitsSettings()
        self._clock = clock

    @property
    def codec(self) -> TextCodec:
        """The tokenizer of target and draft."""
        return self._codec

    @property
    def engine(self) -> EngineInfo:
        """What the target runs on."""
        return self._target.info

    def plan(self, request: Request) -> Plan:
        """Look the prompt up in the store and ask the policy; changes nothing.

        Raises RequestError where the model has no position left for a new token.
        """
        max_new_tokens = self._max_new_tokens(request)
        policy = self._policy_in_force(len(request.prompt_token_ids) + max_new_tokens)
        features, match = self._features(request, max_new_tokens, policy)
        decision = policy.decide(features)
        return Plan(policy, match if decision.action.reuse else None, features, decision)

    def _policy_in_force(self, num_positions: int) -> Policy:
        """The policy; plain decoding under its name where KV entries can be neither reused nor rolled back.

        This alone decides so, for every policy and whoever made the runtime.
        """
        return self._policy if self._target.has_stable_prefixes(num_positions) else self._plain_policy

    def _features(self, request: Request, max_new_tokens: int, policy: Policy) -> tuple[Features, PrefixMatch | None]:
        """What is known of a request, and the match behind it."""
        prompt = request.prompt_token_ids
        match = self._store.match(self._target.model_key, prompt) if policy.needs.store else None
        num_cloned = match.num_cloned_tokens if match else 0
        drafter, reason = self._usable_drafter(len(prompt))
        if policy is self._plain_policy:
            drafter, reason = "none", "the target's KV entries cannot be rolled back"
        elif policy.needs.history and _repeats(request.sampling):
            drafter, reason = "none", "a seed repeats its text, whether a draft pays now or not"
        features = Features(
            num_prompt_tokens=len(prompt),
            max_new_tokens=max_new_tokens,
            num_matched_tokens=match.num_matched_tokens if match else 0,
            num_cloned_tokens=num_cloned,
            num_draft_cloned_tokens=num_cloned if match and match.entry.draft_kv is not None else 0,
            drafter=drafter,
            no_drafter_reason=reason,
            alpha=self._experience.alpha,
            probe_ms=self._experience.probe_ms,
            memory_budget_bytes=self._target.free_bytes(),
            expected_new_tokens=self._experience.expected_new_tokens(max_new_tokens),
            looked_up_share=self._experience.looked_up_share,
            source=match.source if match else "memory",
        )
        return features, match

    def _max_new_tokens(self, request: Request) -> int:
        """As many as asked for and as the model has positions for. Raises RequestError where that is none."""
        num_prompt_tokens, limit = len(request.prompt_token_ids), self._target.max_positions
        if limit is None:
            return request.sampling.max_new_tokens
        if num_prompt_tokens >= limit:
            raise RequestError(
                f"the prompt has {num_prompt_tokens} tokens, the model room for {limit} with at least one new token",
                "shorten the prompt, give a larger --context-size if you gave one, or take another model",
            )
        return min(request.sampling.max_new_tokens, limit - num_prompt_tokens)

    def _usable_drafter(self, num_prompt_tokens: int) -> tuple[str, str | None]:
        """The drafter's name, or `none` and why: it must follow the prompt and at least one token more."""
        if self._drafter is None:
            return "none", None
        limit = self._drafter.max_positions
        if limit is not None and num_prompt_tokens >= limit:
            return "none", f"the draft has {limit} positions"
        return self._drafter.name, None

    def run(self, request: Request, on_text: Callable[[str], None] = lambda _: None) -> Completion:
        """Serve a request; `on_text` gets the text piece by piece as it becomes final.

        Where it fails half-way nothing of it is stored, and the next request begins with clean caches.
        """
        started = self._clock()
        plan, restore_ms = self._begin(request)
        prompt = request.prompt_token_ids
        text = TextStream(self._codec, request.sampling.stop, on_text, context=() if request.is_chat else prompt)
        max_new_tokens = plan.features.max_new_tokens
        sequence = Sequence(request, max_new_tokens, text.push)
        clock = None if _repeats(request.sampling) else self._clock
        speculator = plan.policy.speculator(plan.decision, self._drafter, self._experience, clock)
        logits = prefill_rest(self._target, prompt, plan.match)
        stored_logits = logits.numpy()[-1].copy() if plan.policy.needs.store else None

        events: list[StepEvent] = []
        ttft_ms = 0.0
        verifier = self._verifier(request, max_new_tokens)
        # Closed here: a loop that is left half-way must not roll back while the next request runs.
        with closing(decode(sequence, speculator, logits, self._target, verifier)) as steps:
            for event in steps:
                if not events:
                    ttft_ms = (self._clock() - started) * 1e3
                    self._start_drafting(speculator, plan, prompt)
                events.append(event)
        total_ms = (self._clock() - started) * 1e3

        if stored_logits is not None:
            self._remember(prompt, plan.match, stored_logits, speculator)
        completion = Completion(
            token_ids=tuple(sequence.token_ids[len(prompt) :]),
            text=text.close(),
            finish_reason="stop" if text.stopped else "length",
            decision=plan.decision,
            num_prompt_tokens=len(prompt),
            num_reused_tokens=plan.match.num_cloned_tokens if plan.match else 0,
            events=tuple(events),
            ttft_ms=ttft_ms,
            total_ms=total_ms,
            num_matched_tokens=plan.features.num_matched_tokens,
            source=plan.features.source if plan.features.num_matched_tokens else None,
            restore_ms=restore_ms,
        )
        self._experience.observe(completion, max_new_tokens)
        if plan.policy.needs.history:
            self._experience.remember(sequence.token_ids)
            self._store.remember_text(self._target.model_key, sequence.token_ids)
        return completion

    def clear(self) -> None:
        """Empty the KV caches of target and draft, after a request that failed."""
        self._target.rollback(0)
        if self._drafter is not None:
            self._drafter.rollback(0)

    def _verifier(self, request: Request, max_new_tokens: int) -> Verifier:
        """Chooses tokens as the request and the target's checkpoint say, the draft model's own ones too."""
        settings = self._logits_settings.with_penalty(request.sampling.repetition_penalty)
        processors = make_processors(
            settings,
            num_prompt_tokens=len(request.prompt_token_ids),
            max_new_tokens=max_new_tokens,
            end_token_ids=self._codec.end_token_ids,
            vocab_size=self._target.vocab_size,
        )
        return make_verifier(request.sampling, self.near_tie * settings.sensitivity, processors)

    def settle(self) -> None:
        """Do what nobody waits for, between requests and at the end: what is stored on a disk is written now."""
        self._store.settle()

    def _begin(self, request: Request) -> tuple[Plan, float]:
        """Plan, and restore what is reused, which takes so many milliseconds.

        What turns out to be damaged is given up, and all is planned anew.
        """
        while True:
            plan = self.plan(request)
            self._target.reserve(len(request.prompt_token_ids) + plan.features.max_new_tokens)
            started = self._clock()
            try:
                restore_prefix(self._target, plan.match)
            except DamagedEntryError as error:
                assert plan.match is not None, "without a match nothing is read"
                self._store.discard(plan.match.entry, str(error))
            else:
                return plan, (self._clock() - started) * 1e3 if plan.match else 0.0

    def _start_drafting(self, speculator: Speculator | None, plan: Plan, prompt: tuple[int, ...]) -> None:
        """Begin the drafter's sequence, from its stored states where the reused entry has some."""
        if speculator is not None:
            snapshot = plan.match.entry.draft_kv if plan.match else None
            speculator.start(prompt, snapshot, plan.match.num_cloned_tokens if plan.match else 0)

    def _remember(
        self, prompt: tuple[int, ...], match: PrefixMatch | None, logits: np.ndarray, speculator: Speculator | None
    ) -> None:
        """Store the prompt's states (never those of what was generated), and the draft's beside them."""
        if match is not None:
            self._store.touch(match.entry)
        draft_kv = speculator.snapshot(len(prompt)) if speculator is not None else None
        is_repeat = match is not None and match.exact
        if match is not None and is_repeat and match.source == "memory":
            if match.entry.draft_kv is None and draft_kv is not None:
                self._store.insert(replace(match.entry, draft_kv=draft_kv))
            return
        num_bytes = self._target.num_bytes(len(prompt))
        if len(prompt) >= BUCKET_TOKENS and self._store.make_room(len(prompt), num_bytes, is_on_disk=is_repeat):
            entry = PrefixEntry(
                model_key=self._target.model_key,
                token_ids=np.asarray(prompt, dtype=np.int64),
                kv=self._target.snapshot(len(prompt)),
                next_logits=logits,
                draft_kv=draft_kv,
            )
            self._store.insert(entry, is_on_disk=is_repeat)


def _repeats(sampling: SamplingParams) -> bool:
    """Whether the same text is to come again, whatever was served before and however fast.

    How far a draft goes decides which random numbers go where.
    """
    return sampling.temperature > 0 and sampling.seed is not None
