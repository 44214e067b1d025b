"""What `calibrate` times: the verbs of engine and loop that `generate` runs, at chosen sizes and contexts.

No second path: rounds go through `decode`, prompts through `Engine.prefill`, copies through snapshot and restore.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from rakvctl.core.array_logits import ArrayLogits
from rakvctl.core.decode import Sequence as TokenSequence
from rakvctl.core.decode import decode
from rakvctl.core.disk.entry_file import read_entry, write_entry
from rakvctl.core.disk.places import forget_cached
from rakvctl.core.drafters import Drafter
from rakvctl.core.engine import Engine
from rakvctl.core.pair import ModelPair
from rakvctl.core.seams import Clock, KVSnapshot
from rakvctl.core.speculators import FixedSpeculator
from rakvctl.core.text import TextStream
from rakvctl.core.types import PrefixEntry, Proposal, Request
from rakvctl.core.verify import GreedyVerifier, Verifier
from rakvctl.measure.timing import Point, Probe

Role = Literal["target", "draft"]
_ROUNDS = 3
# Lengths that no other probe has.
_NEW_LENGTHS = range(18, 66, 3)
BANDWIDTH_BYTES = 2**28
# As a difference of times, it is never steady by their measure.
_WIDTH_CHANGES = 40
_TEXT = "for path in sorted(paths):\n    if path.name != name and not path.is_dir():\n        return path\n" * 2


class TimedDrafter:
    """A drafter whose proposals are timed; without one, tokens drawn at random that cost nothing."""

    name = "timed"

    def __init__(self, drafter: Drafter | None, clock: Clock, tokens: tuple[int, ...]) -> None:
        self._drafter = drafter
        self._clock = clock
        self._tokens = tokens
        self.elapsed_ms = 0.0
        self.max_positions = drafter.max_positions if drafter else None

    def start(self, prompt_token_ids: Sequence[int], snapshot: KVSnapshot | None, num_cloned_tokens: int) -> None:
        if self._drafter is not None:
            self._drafter.start(prompt_token_ids, snapshot, num_cloned_tokens)

    def propose(self, token_ids: Sequence[int], num_tokens: int, verifier: Verifier) -> Proposal:
        """The drafter's proposal; `elapsed_ms` is what it took."""
        if self._drafter is None:
            return Proposal(self._tokens[:num_tokens])
        started = self._clock()
        proposal = self._drafter.propose(token_ids, num_tokens, verifier)
        self.elapsed_ms = (self._clock() - started) * 1e3
        return proposal

    def rollback(self, length: int) -> None:
        if self._drafter is not None:
            self._drafter.rollback(length)

    def snapshot(self, num_tokens: int) -> KVSnapshot | None:
        return None


class ProbeBench:
    """A pair with its caches under control: every probe begins at exactly the context it asks for."""

    def __init__(self, pair: ModelPair, num_positions: int, clock: Clock) -> None:
        """Fill a prompt of `num_positions` random tokens into each model once, and keep its states."""
        self._pair = pair
        self._clock = clock
        ids = np.random.default_rng(0).integers(0, pair.codec.vocab_size, num_positions + 1)
        self._ids = tuple(int(token) for token in ids)
        self._engines: dict[str, Engine] = {"target": pair.target}
        if pair.draft is not None:
            self._engines["draft"] = pair.draft
        self._drafter = TimedDrafter(pair.drafter(), clock, self._ids)
        self._snapshots = {role: self._fill(engine, num_positions) for role, engine in self._engines.items()}

    def _fill(self, engine: Engine, num_positions: int) -> KVSnapshot:
        engine.rollback(0)
        engine.reserve(num_positions)
        engine.prefill(self._ids[:num_positions])
        return engine.snapshot(num_positions)

    def engine(self, role: Role) -> Engine:
        """The model in that role."""
        return self._engines[role]

    def prefill(self, role: Role, size: int, context: int) -> Probe:
        """A prompt's `size` tokens after `context` cached ones, up to the choice of the next token."""
        engine = self._engines[role]

        def sample() -> list[tuple[float, ...]]:
            self._rewind(role, context)
            started = self._clock()
            GreedyVerifier().choose(engine.prefill(self._ids[context : context + size]))
            return [(self._since(started),)]

        return Probe((Point(f"{role}.prefill", size, context),), sample)

    def new_length(self, role: Role) -> Probe:
        """How much longer a prefill takes the first time that its length is seen: each run takes a new one."""
        engine, lengths = self._engines[role], iter(_NEW_LENGTHS)

        def prefill_ms(size: int) -> float:
            engine.rollback(0)
            started = self._clock()
            GreedyVerifier().choose(engine.prefill(self._ids[:size]))
            return self._since(started)

        def sample() -> list[tuple[float, ...]]:
            size = next(lengths, None)
            if size is None or size > len(self._ids):
                return []
            first_ms, second_ms = prefill_ms(size), prefill_ms(size)
            return [(max(0.0, first_ms - second_ms),)]

        return Probe((Point(f"{role}.new_length", 1, 0),), sample)

    def clone(self, role: Role, size: int) -> Probe:
        """The states of `size` positions, copied out of the store."""
        engine = self._engines[role]

        def sample() -> list[tuple[float, ...]]:
            engine.rollback(0)
            engine.synchronize()
            started = self._clock()
            engine.restore(self._snapshots[role], size)
            engine.synchronize()
            return [(self._since(started),)]

        return Probe((Point(f"{role}.clone", size, 0),), sample)

    def write_states(self, path: Path, size: int) -> None:
        """The target's states of `size` positions as a stored prefix, for `load`. Raises OSError."""
        ids = np.asarray(self._ids[:size], dtype=np.int64)
        self._rewind("target", size)
        states = self._engines["target"].snapshot(size)
        write_entry(path, PrefixEntry("measuring", ids, states, np.zeros(self._pair.codec.vocab_size, np.float32)))

    def load(self, path: Path, size: int, *, is_cold: bool) -> Probe:
        """The states of `size` positions from the file of a stored prefix; a cold one is read from the disk."""
        engine = self._engines["target"]

        def sample() -> list[tuple[float, ...]]:
            engine.rollback(0)
            if is_cold:
                forget_cached(path)
            started = self._clock()
            engine.restore(read_entry(path, sys.maxsize).kv, size)
            engine.synchronize()
            return [(self._since(started),)]

        return Probe((Point("target.load_cold" if is_cold else "target.load", size, 0),), sample)

    def insert(self, role: Role, size: int) -> Probe:
        """The states of `size` positions, copied for the store."""
        engine = self._engines[role]

        def sample() -> list[tuple[float, ...]]:
            self._rewind(role, size)
            engine.synchronize()
            started = self._clock()
            engine.snapshot(size)
            engine.synchronize()
            return [(self._since(started),)]

        return Probe((Point(f"{role}.insert", size, 0),), sample)

    def round(self, draft_len: int, context: int) -> Probe:
        """One round of the loop: all but the drafting, and the drafting where there is a draft model.

        The draft model is one token behind, as after a round whose tokens were all accepted: the dearer case.
        """
        if self._pair.draft is None or draft_len == 0:
            return self.verify(draft_len, context)
        points = Point("verify", draft_len + 1, context), Point("propose", draft_len, context)
        return Probe(points, lambda: self._rounds(self._drafter, draft_len, context))

    def verify(self, draft_len: int, context: int) -> Probe:
        """One round without its drafting: the tokens come from nowhere and cost nothing."""
        drafter = TimedDrafter(None, self._clock, self._ids)
        point = Point("verify", draft_len + 1, context)
        return Probe((point,), lambda: [times[:1] for times in self._rounds(drafter, draft_len, context)])

    def width_change(self, draft_len: int, context: int) -> Probe:
        """How much longer a round that drafts and the plain one after it take than others of their widths.

        An engine may lay out its work anew whenever the width of its passes changes, and `verify` times rounds of one
        width in a row.
        """
        drafter = TimedDrafter(None, self._clock, self._ids)
        runs = iter(range(_WIDTH_CHANGES))

        def sample() -> list[tuple[float, ...]]:
            if next(runs, None) is None:
                return []
            lens = (0, draft_len, draft_len, 0, 0)
            _, into, wide, back, plain = (self._one_round(drafter, length, context)[0] for length in lens)
            return [(into - wide + back - plain,)]

        return Probe((Point("width_change", draft_len + 1, context),), sample)

    def _rounds(self, drafter: TimedDrafter, draft_len: int, context: int) -> list[tuple[float, ...]]:
        """A few rounds; the first, not counted, brings weights and states into the processor's caches, as the loop has
        them.
        """
        return [self._one_round(drafter, draft_len, context) for _ in range(_ROUNDS + 1)][1:]

    def emit(self) -> Probe:
        """Emitted tokens as text, milliseconds a token."""
        ids = self._pair.codec.encode(_TEXT)

        def sample() -> list[tuple[float, ...]]:
            stream = TextStream(self._pair.codec, (), lambda _: None)
            started = self._clock()
            for token in ids:
                stream.push(token)
            return [(self._since(started) / len(ids),)]

        return Probe((Point("emit", 1, 0),), sample)

    def read_memory(self) -> Probe:
        """The device's memory, read once; milliseconds for all of it."""
        read = self._pair.target.memory_reader(BANDWIDTH_BYTES)

        def sample() -> list[tuple[float, ...]]:
            started = self._clock()
            read()
            return [(self._since(started),)]

        return Probe((Point("memory", BANDWIDTH_BYTES, 0),), sample)

    def _one_round(self, drafter: TimedDrafter, draft_len: int, context: int) -> tuple[float, ...]:
        """Milliseconds of the round without the drafting, and of the drafting."""
        self._rewind("target", context)
        if "draft" in self._engines:
            self._rewind("draft", max(0, context - 1))
        drafter.elapsed_ms = 0.0
        request = Request(self._ids[:context])
        sequence = TokenSequence(request, draft_len + 3, ends=lambda _: False)
        first = ArrayLogits(np.zeros((1, 1), dtype=np.float32))
        speculator = FixedSpeculator(drafter, draft_len)
        loop = decode(sequence, speculator, first, self._pair.target, GreedyVerifier())
        next(loop)
        started = self._clock()
        next(loop)
        total_ms = self._since(started)
        loop.close()
        return total_ms - drafter.elapsed_ms, drafter.elapsed_ms

    def _rewind(self, role: str, context: int) -> None:
        """Leave exactly the first `context` positions in a model's cache."""
        engine = self._engines[role]
        if engine.length < context:
            engine.restore(self._snapshots[role], context)
        engine.rollback(context)

    def _since(self, started: float) -> float:
        return (self._clock() - started) * 1e3
