"""The cost model: C(k, r), what each action is expected to take for a request, computed from measured times alone."""

import math
from dataclasses import dataclass

from rakvctl.core.acceptance import expected_tokens
from rakvctl.core.profile import HardwareProfile, ModelCosts
from rakvctl.core.types import Action, CostBreakdown, Features

DRAFT_LENS = (0, 1, 2, 4, 6, 8)
# Memory up to this share of what is free costs nothing; what lies beyond it is charged.
_SOFT_MEMORY_SHARE = 0.8
# Sums and quotients of floats that are meant to be whole or equal may be off by about this much.
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class CostModel:
    """Predicts from one profile."""

    profile: HardwareProfile

    def table(self, features: Features, draft_lens: tuple[int, ...] = DRAFT_LENS) -> tuple[CostBreakdown, ...]:
        """C(k, r) for every action: without reuse first, then with, each in order of k."""
        actions = [Action(reuse, draft_len) for reuse in (False, True) for draft_len in draft_lens]
        return tuple(self.breakdown(action, features) for action in actions)

    def breakdown(self, action: Action, features: Features) -> CostBreakdown:
        """The parts of C(k, r) in milliseconds, added up over all rounds.

        Of an action without a match, without a drafter or with passes that were not measured, nothing is known: its
        parts are NaN.
        """
        missing = self._missing(action, features)
        if missing is not None:
            return CostBreakdown(action, rounds=0, infeasible=missing, **dict.fromkeys(_PARTS, math.nan))
        rounds = num_rounds(features, action.draft_len)
        draft_ms, verify_ms = self._rounds_ms(action.draft_len, rounds, features)
        clone_ms, prefill_ms = self._target_start_ms(action, features)
        num_bytes = self._num_bytes(action, features)
        return CostBreakdown(
            action,
            clone_ms=clone_ms,
            prefill_ms=prefill_ms,
            draft_prefill_ms=self._draft_start_ms(action, features),
            draft_ms=draft_ms,
            verify_ms=verify_ms + features.num_new_tokens * self.profile.emit_ms,
            memory_ms=self._memory_ms(num_bytes, features.memory_budget_bytes),
            rounds=rounds,
            infeasible=_too_large(num_bytes, features.memory_budget_bytes),
        )

    def crossover(self, action: Action, features: Features) -> float | None:
        """The least alpha at which drafting costs no more than not drafting, all else equal; None where none does.

        C(k, r) is a step function that falls with alpha: what its rounds may cost says how many there may be and how
        much the last one may draft, those say how many tokens a round must emit, and E_k is inverted at that.
        """
        plain, drafting = self.breakdown(Action(action.reuse, 0), features), self.breakdown(action, features)
        num_tokens = _tokens_in_rounds(features)
        if action.draft_len == 0 or math.isnan(plain.total_ms + drafting.total_ms) or num_tokens == 0:
            return None
        rounds = [sum(parts) for parts in self._rounds(action.draft_len, features)]
        rounds_ms = sum(self._rounds_ms(action.draft_len, drafting.rounds, features))
        budget_ms = plain.total_ms - (drafting.total_ms - rounds_ms) + _ROUNDING
        most_rounds = min(num_tokens, math.floor(budget_ms / rounds[-1])) if rounds[-1] > 0 else num_tokens
        least = math.inf
        for count in range(max(1, most_rounds), min(num_tokens, most_rounds + 1) + 1):
            left_ms = budget_ms - (count - 1) * rounds[-1]
            payable = [drafted for drafted, last_ms in enumerate(rounds) if last_ms <= left_ms]
            if payable:
                least = min(least, _tokens_a_round(num_tokens, count, payable[-1], action.draft_len))
        return alpha_for(least, action.draft_len) if least <= action.draft_len + 1 else None

    def _missing(self, action: Action, features: Features) -> str | None:
        if action.reuse and features.num_cloned_tokens == 0:
            return "no stored prefix"
        if action.draft_len == 0:
            return None
        if features.drafter == "none" or self.profile.draft is None:
            return features.no_drafter_reason or "no draft model"
        if action.draft_len > self.profile.longest_draft_len:
            return f"not measured: the profile goes as far as k = {self.profile.longest_draft_len}"
        return None

    def _target_start_ms(self, action: Action, features: Features) -> tuple[float, float]:
        """Clone and prefill of the target."""
        cached = features.num_cloned_tokens if action.reuse else 0
        target = self.profile.target
        sources = {"memory": target.clone, "page cache": target.load, "disk": target.load_cold or target.load}
        # Where loading was not measured it counts as a copy.
        restore = sources[features.source] or target.clone
        return restore.at(cached, 0), self._prefill_ms(target, features.num_prompt_tokens, cached)

    def _draft_start_ms(self, action: Action, features: Features) -> float:
        """Clone and prefill of the draft model, which has stored states of its own or none."""
        if action.draft_len == 0 or self.profile.draft is None:
            return 0.0
        cached = features.num_draft_cloned_tokens if action.reuse else 0
        draft = self.profile.draft.model
        return draft.clone.at(cached, 0) + self._prefill_ms(draft, features.num_prompt_tokens, cached)

    def loading_pays(self, num_tokens: int) -> bool:
        """Whether restoring a whole prompt from a file is expected to be faster than computing it."""
        target = self.profile.target
        return target.load is None or target.load.at(num_tokens, 0) < self._prefill_ms(target, num_tokens, 0)

    def _prefill_ms(self, model: ModelCosts, num_prompt_tokens: int, cached: int) -> float:
        """The rest of a prompt. Its length is mostly a new one, unless it is one of those that rounds have."""
        num_tokens = num_prompt_tokens - cached
        is_new = num_tokens > self.profile.verify.sizes_tokens[-1]
        return model.prefill_ms(num_tokens, cached) + (model.new_length_ms if is_new else 0.0)

    def _rounds_ms(self, draft_len: int, num_rounds: int, features: Features) -> tuple[float, float]:
        """Draft and verify of all rounds; the last one drafts no more tokens than can still be emitted."""
        if num_rounds == 0:
            return 0.0, 0.0
        rounds = self._rounds(draft_len, features)
        left = _tokens_in_rounds(features) - (num_rounds - 1) * expected_tokens(features.alpha, draft_len)
        full, last = rounds[-1], rounds[min(draft_len, max(0, math.ceil(left - _ROUNDING) - 1))]
        return (num_rounds - 1) * full[0] + last[0], (num_rounds - 1) * full[1] + last[1]

    def _rounds(self, draft_len: int, features: Features) -> list[tuple[float, float]]:
        """Draft and verify of a round that drafts 0, 1, ... `draft_len` tokens, in the middle of the contexts to come.

        A verify may be cheaper than a narrower one. A shorter last round is reckoned with as the dearest of those up to
        it, but never above a full one: so the cost never rises with alpha.
        """
        context = features.num_prompt_tokens + features.num_new_tokens / 2
        draft, verify = self.profile.draft, self.profile.verify
        rounds = [
            (draft.propose.at(drafted, context) if draft and drafted else 0.0, verify.at(drafted + 1, context))
            for drafted in range(draft_len + 1)
        ]
        dearest: list[tuple[float, float]] = []
        for parts in rounds:
            dearest.append(max(dearest[-1], parts, key=_sum) if dearest else parts)
        return [min(parts, rounds[-1], key=_sum) for parts in dearest]

    def _num_bytes(self, action: Action, features: Features) -> int:
        """KV states of the whole sequence, in the target and, where tokens are drafted, in the draft model."""
        draft = self.profile.draft
        a_token = self.profile.target.kv_bytes_per_token
        if action.draft_len and draft is not None:
            a_token += draft.model.kv_bytes_per_token
        return a_token * (features.num_prompt_tokens + features.max_new_tokens)

    def _memory_ms(self, num_bytes: int, budget_bytes: int | None) -> float:
        """lambda * memory(k, r): what lies beyond the soft share is charged as being read once more from memory."""
        if budget_bytes is None:
            return 0.0
        return max(0.0, num_bytes - _SOFT_MEMORY_SHARE * budget_bytes) / self.profile.memory_bytes_per_ms


_PARTS = ("clone_ms", "prefill_ms", "draft_prefill_ms", "draft_ms", "verify_ms", "memory_ms")


def num_rounds(features: Features, draft_len: int) -> int:
    """ceil(m / E_k(alpha)), where m counts the tokens after the first one: that one comes with the prefill."""
    return math.ceil(_tokens_in_rounds(features) / expected_tokens(features.alpha, draft_len) - _ROUNDING)


def _tokens_a_round(num_tokens: int, num_rounds: int, drafted: int, draft_len: int) -> float:
    """The least E_k with which so many rounds are enough, the last of which drafts at most `drafted` tokens."""
    if drafted >= min(draft_len, num_tokens - 1):
        return num_tokens / num_rounds
    if num_rounds == 1:
        return math.inf
    return max(num_tokens / num_rounds, (num_tokens - drafted - 1) / (num_rounds - 1))


def alpha_for(tokens_a_round: float, draft_len: int) -> float:
    """The alpha between 0 and 1 at which E_k(alpha) = `tokens_a_round` (at most k + 1): Newton's method.

    E_k is convex and rises, so from alpha = 1 the iterates fall monotonically towards the root.
    """
    alpha = 1.0
    for _ in range(100):
        slope = sum(power * alpha ** (power - 1) for power in range(1, draft_len + 1))
        step = (expected_tokens(alpha, draft_len) - tokens_a_round) / slope
        if step <= 0.0:
            break
        alpha -= step
    return max(0.0, alpha)


def _sum(parts: tuple[float, float]) -> float:
    return parts[0] + parts[1]


def _tokens_in_rounds(features: Features) -> int:
    return max(0, features.num_new_tokens - 1)


def _too_large(num_bytes: int, budget_bytes: int | None) -> str | None:
    if budget_bytes is None or num_bytes <= budget_bytes:
        return None
    return f"needs {num_bytes / 2**20:.0f} MiB of KV states, {budget_bytes / 2**20:.0f} MiB are free"
