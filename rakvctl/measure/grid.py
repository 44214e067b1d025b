"""Which sizes and contexts are measured: as many as the models have positions for and the time allows."""

from dataclasses import dataclass
from itertools import pairwise

from rakvctl.core.cost import DRAFT_LENS
from rakvctl.core.engine import Engine
from rakvctl.core.pair import ModelPair
from rakvctl.core.seams import Clock

_PREFILL_TOKENS = (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096)
# A round always has something before it.
_CONTEXTS = (1, 64, 256, 1024, 4096)
# A draft that costs nothing may be longer than those of a model.
LONGEST_DRAFT = 16
_MIN_SIZES = 4
_SAMPLE_TOKENS = 16
# One pass over every length of a draft may take this share of one over all prefills.
_EVERY_LEN_SHARE = 0.8


@dataclass(frozen=True, slots=True)
class Grid:
    """Sizes and contexts of all curves, in tokens; `contexts` are those of rounds.

    `draft_lens`: tokens drafted in a round, by the draft model if there is one; `verify_lens`: those and more, of which
    only the target's pass is timed.
    """

    prefill_tokens: tuple[int, ...]
    contexts: tuple[int, ...]
    draft_lens: tuple[int, ...]
    verify_lens: tuple[int, ...]

    @property
    def prefill_contexts(self) -> tuple[int, ...]:
        """Attention over what is cached grows linearly with it, so nothing and the longest context are enough."""
        return tuple(sorted({0, self.contexts[-1]}))

    @property
    def num_positions(self) -> int:
        """The longest sequence that a probe makes."""
        return self.contexts[-1] + max(self.prefill_tokens[-1], self.draft_lens[-1] + 1)

    @property
    def held_out_sizes(self) -> list[int]:
        """A size between each two neighbours."""
        return [round((small * large) ** 0.5) for small, large in pairwise(self.prefill_tokens) if large > small + 1]

    @property
    def held_out_contexts(self) -> list[int]:
        """A context in the middle of each two neighbours."""
        return [(small + large) // 2 for small, large in pairwise(self.contexts)]


def choose_grid(pair: ModelPair, pass_s: float, clock: Clock) -> Grid:
    """The largest grid whose prefills go once through in about `pass_s` seconds."""
    limits = [engine.max_positions for engine in (pair.target, pair.draft) if engine is not None]
    room = min((limit for limit in limits if limit is not None), default=2 * _PREFILL_TOKENS[-1])
    sizes = [size for size in _PREFILL_TOKENS if size <= max(1, room // 2)]
    token_s = _prefill_seconds(pair, min(_SAMPLE_TOKENS, sizes[-1]), clock)
    while len(sizes) > _MIN_SIZES and 2 * token_s * sum(sizes) > pass_s:
        sizes.pop()
    longest = max(sizes[-1], pass_s / token_s) if token_s > 0 else room
    fitting = [context for context in _CONTEXTS if context <= min(longest, room - sizes[-1], room - DRAFT_LENS[-1] - 1)]
    contexts = tuple(fitting) or _CONTEXTS[:1]
    draft_lens = [draft_len for draft_len in (*DRAFT_LENS, LONGEST_DRAFT) if contexts[-1] + draft_len + 1 <= room]
    draft_lens = draft_lens or [0]
    # Matrix routines work in blocks of rows, so the target's time goes in steps, wherever those are on this machine.
    every_len = range(draft_lens[-1] + 1)
    fits = _SAMPLE_TOKENS * token_s * len(every_len) * len(contexts) <= _EVERY_LEN_SHARE * pass_s
    return Grid(tuple(sizes), contexts, tuple(draft_lens), tuple(every_len if fits else draft_lens))


def _prefill_seconds(pair: ModelPair, num_tokens: int, clock: Clock) -> float:
    """Prefill time a token of both models together, seconds."""
    engines = [engine for engine in (pair.target, pair.draft) if engine is not None]
    # The first pass only wakes everything up.
    return min(sum(_seconds(engine, num_tokens, clock) for engine in engines) for _ in range(2)) / num_tokens


def _seconds(engine: Engine, num_tokens: int, clock: Clock) -> float:
    engine.rollback(0)
    started = clock()
    engine.prefill((0,) * num_tokens).argmax()
    return clock() - started
