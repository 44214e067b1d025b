"""The only token loop: prefill, then rounds of propose, verify, accept, roll back.

Plain decoding is the same loop with nothing proposed. The loop knows no text: what ends a sequence is asked of `ends`.
"""

from collections.abc import Callable, Generator

from rakvctl.core.array_logits import ArrayLogits
from rakvctl.core.engine import Engine
from rakvctl.core.errors import DamagedEntryError
from rakvctl.core.seams import Logits
from rakvctl.core.speculators import Speculator
from rakvctl.core.types import PrefixMatch, Proposal, Request, StepEvent
from rakvctl.core.verify import Verifier


class Sequence:
    """The tokens of one request as they grow, and how many more may come."""

    def __init__(self, request: Request, max_new_tokens: int, ends: Callable[[int], bool]) -> None:
        """`ends` is told each emitted token in order, and says whether the sequence ends with it."""
        self.token_ids = list(request.prompt_token_ids)
        self.num_remaining = max_new_tokens
        self.finished = False
        self._ends = ends

    def emit(self, token_ids: list[int]) -> tuple[int, ...]:
        """Append tokens up to the one that ends the sequence; return those appended."""
        for count, token in enumerate(token_ids, start=1):
            self.token_ids.append(token)
            self.num_remaining -= 1
            self.finished = self._ends(token) or self.num_remaining == 0
            if self.finished:
                return tuple(token_ids[:count])
        return tuple(token_ids)


def restore_prefix(engine: Engine, match: PrefixMatch | None) -> None:
    """Leave in the cache what is stored of a prompt, or nothing.

    Raises DamagedEntryError where that turns out to be unusable; nothing is in the cache then.
    """
    engine.rollback(0)
    if match is None:
        return
    if match.exact and match.entry.next_logits.shape != (engine.vocab_size,):
        raise DamagedEntryError(f"{match.entry.next_logits.size} stored scores for {engine.vocab_size} tokens")
    engine.restore(match.entry.kv, match.num_cloned_tokens)


def prefill_rest(engine: Engine, prompt_token_ids: tuple[int, ...], match: PrefixMatch | None) -> Logits:
    """Let what is not stored of a prompt go through the model; the logits of the next token.

    Where all of it is stored nothing does, and the logits are the stored ones.
    """
    if match is not None and match.exact:
        return ArrayLogits(match.entry.next_logits[None])
    return engine.prefill(prompt_token_ids[engine.length :])


def decode(
    sequence: Sequence, speculator: Speculator | None, first_logits: Logits, engine: Engine, verifier: Verifier
) -> Generator[StepEvent, None, None]:
    """Emit tokens after a prefilled prompt until the sequence is finished.

    Before and after every round the cache holds all tokens but the last one emitted, and what was drafted in vain is
    rolled back, also when the caller stops early or a pass fails. A token that the verifier leaves undecided is chosen
    by the next round, which then drafts nothing.
    """
    committed = len(sequence.token_ids)
    drafts = True
    try:
        first, _ = verifier.choose(first_logits, sequence.token_ids)
        yield StepEvent(sequence.emit([first]), num_draft_tokens=0, num_accepted_tokens=0)
        while not sequence.finished:
            length = len(sequence.token_ids)
            proposal = _propose(sequence, speculator, engine, verifier) if drafts else Proposal(())
            logits = _verify(sequence, proposal, engine)
            num_accepted, following = verifier.accept(proposal, logits, sequence.token_ids)
            drafts = following is not None
            own = [] if following is None else [following]
            emitted = sequence.emit([*proposal.token_ids[:num_accepted], *own])
            num_accepted = min(num_accepted, len(emitted))
            committed = length + num_accepted - (not drafts)
            _rollback(engine, speculator, committed)
            if speculator is not None:
                speculator.observe(emitted, is_undecided=not drafts)
            is_looked_up = bool(proposal.evidence)
            yield StepEvent(emitted, len(proposal.token_ids), num_accepted, is_looked_up, is_undecided=not drafts)
    finally:
        # A pass that failed, or whose tokens nobody took, may have left behind what only dropping everything removes.
        _rollback(engine, speculator, committed if engine.can_rollback else 0)


def _verify(sequence: Sequence, proposal: Proposal, engine: Engine) -> Logits:
    """The logits after the last token and each drafted one."""
    if engine.must_recompute:
        assert not proposal.token_ids, "nothing is drafted where KV entries are about to change"
        engine.rollback(0)
        return engine.prefill(sequence.token_ids)
    return engine.verify((sequence.token_ids[-1], *proposal.token_ids))


def _propose(sequence: Sequence, speculator: Speculator | None, engine: Engine, verifier: Verifier) -> Proposal:
    """Draft no more tokens than can still be emitted and held by the target."""
    room = sequence.num_remaining - 1
    if engine.max_positions is not None:
        room = min(room, engine.max_positions - len(sequence.token_ids))
    if speculator is None or room <= 0:
        return Proposal(())
    return speculator.propose(sequence.token_ids, room, verifier)


def _rollback(engine: Engine, speculator: Speculator | None, length: int) -> None:
    """Both caches to at most `length` positions."""
    if engine.length > length:
        engine.rollback(length)
    if speculator is not None:
        speculator.rollback(length)
