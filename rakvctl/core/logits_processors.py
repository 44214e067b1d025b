"""Logits processors: rules that edit the next-token scores by the tokens before them, as transformers' `generate` does.

Each one is a function of the token ids before a row, so single-token passes, verification passes and drafts see the
same scores. A mask of another kind, as of a grammar, is one more processor.
"""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from rakvctl.core.errors import RequestError

# Edits the scores [vocab_size] float32 of the token after `token_ids` [num_tokens] int64, in place.
LogitsProcessor = Callable[[np.ndarray, np.ndarray], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitsSettings:
    """What a checkpoint's generation config asks for, under transformers' names. The defaults change nothing.

    `min_new_tokens`, where it is given, stands in place of `min_length`, which counts the prompt too.
    """

    repetition_penalty: float = 1.0
    no_repeat_ngram_size: int = 0
    sequence_bias: tuple[tuple[tuple[int, ...], float], ...] = ()
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    min_length: int = 0
    min_new_tokens: int | None = None
    forced_bos_token_id: int | None = None
    forced_eos_token_id: tuple[int, ...] = ()
    suppress_tokens: tuple[int, ...] = ()
    begin_suppress_tokens: tuple[int, ...] = ()

    @property
    def changed(self) -> dict[str, object]:
        """The settings that are not at their defaults."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {field.name: values[field.name] for field in fields(self) if values[field.name] != field.default}

    def with_penalty(self, penalty: float | None) -> "LogitsSettings":
        """The same with another repetition penalty, where one is given."""
        return self if penalty is None else replace(self, repetition_penalty=penalty)

    @property
    def sensitivity(self) -> float:
        """By how much at most a difference between raw scores grows in the processed ones, as a factor."""
        return max(self.repetition_penalty, 1.0 / self.repetition_penalty)


class LogitsProcessors:
    """The processors of one request, in order, and the tokens of its sequence as an array that grows with it."""

    def __init__(self, processors: Sequence[LogitsProcessor]) -> None:
        self._processors = tuple(processors)
        self._token_ids = np.empty(0, dtype=np.int64)
        self._num_tokens = 0

    def process(self, scores: np.ndarray, token_ids: Sequence[int], drafted: Sequence[int] = ()) -> np.ndarray:
        """The scores [vocab_size] after the sequence `token_ids` and the `drafted` tokens, in a processed copy.

        `token_ids` may only grow from call to call. Raises RequestError where the processors exclude every token.
        """
        assert token_ids, "a row stands after at least one token"
        processed = scores.astype(np.float32)
        before = self._before(token_ids, drafted)
        for processor in self._processors:
            processor(before, processed)
        if processed.max() == -np.inf and np.isfinite(scores.max()):
            raise RequestError(
                "the model's generation_config.json excludes every token here", "correct what it suppresses or forces"
            )
        return processed

    def _before(self, token_ids: Sequence[int], drafted: Sequence[int]) -> np.ndarray:
        """All tokens before the row as one array, of which only those that are new are converted."""
        length = len(token_ids)
        if length + len(drafted) > len(self._token_ids):
            self._token_ids = np.resize(self._token_ids[: self._num_tokens], 2 * (length + len(drafted)))
        self._token_ids[self._num_tokens : length] = token_ids[self._num_tokens :]
        self._num_tokens = length
        self._token_ids[length : length + len(drafted)] = drafted
        return self._token_ids[: length + len(drafted)]


@dataclass(frozen=True, slots=True)
class RepetitionPenalty:
    """Makes tokens that came before less likely: positive scores are divided by the penalty, others multiplied."""

    penalty: float

    def __call__(self, token_ids: np.ndarray, scores: np.ndarray) -> None:
        """Touches only the tokens that came before."""
        seen = token_ids[token_ids < len(scores)]
        values, penalty = scores[seen], np.float32(self.penalty)
        scores[seen] = np.where(values < 0, values * penalty, values / penalty)


@dataclass(frozen=True, slots=True)
class NoRepeatNgram:
    """Excludes every token that would complete an n-gram that came before."""

    size: int

    def __call__(self, token_ids: np.ndarray, scores: np.ndarray) -> None:
        """Compares the last n - 1 tokens with those at every earlier position."""
        num_ngrams = len(token_ids) - self.size + 1
        if num_ngrams < 1:
            return
        completing = token_ids[self.size - 1 :]
        matches = np.ones(num_ngrams, dtype=bool)
        for offset in range(self.size - 1):
            matches &= token_ids[offset : offset + num_ngrams] == token_ids[num_ngrams + offset]
        excluded = completing[matches]
        scores[excluded[excluded < len(scores)]] = -np.inf


class SequenceBias:
    """Adds a bias to the token that would complete a sequence."""

    def __init__(self, biases: Mapping[tuple[int, ...], float]) -> None:
        # Single tokens come first, and sequences of one length are compared with the last tokens all at once.
        by_length: dict[int, list[tuple[tuple[int, ...], float]]] = {0: []}
        for sequence, bias in biases.items():
            by_length.setdefault(len(sequence) - 1, []).append((sequence, bias))
        self._groups = [
            (
                np.array([sequence[:-1] for sequence, _ in group], dtype=np.int64).reshape(len(group), length),
                np.array([sequence[-1] for sequence, _ in group], dtype=np.int64),
                np.array([bias for _, bias in group], dtype=np.float32),
            )
            for length, group in by_length.items()
        ]

    def __call__(self, token_ids: np.ndarray, scores: np.ndarray) -> None:
        """Adds up the biases of a token before it adds them to its score, which rounds as transformers does."""
        total = np.zeros_like(scores)
        for prefixes, completing, biases in self._groups:
            length = prefixes.shape[1]
            if length <= len(token_ids):
                matches = (prefixes == token_ids[len(token_ids) - length :]).all(axis=1)
                np.add.at(total, completing[matches], biases[matches])
        scores += total


@dataclass(frozen=True, slots=True, eq=False)
class Suppress:
    """Excludes some tokens where the number of tokens before the row is one of `lengths`."""

    excluded: np.ndarray
    lengths: range

    def __call__(self, token_ids: np.ndarray, scores: np.ndarray) -> None:
        """Touches only those tokens."""
        if len(token_ids) in self.lengths:
            scores[self.excluded] = -np.inf


@dataclass(frozen=True, slots=True, eq=False)
class Force:
    """Leaves only some tokens where exactly `length` tokens stand before the row."""

    allowed: np.ndarray
    length: int

    def __call__(self, token_ids: np.ndarray, scores: np.ndarray) -> None:
        """Their scores become 0, all others minus infinity."""
        if len(token_ids) == self.length:
            scores[:] = -np.inf
            scores[self.allowed] = 0.0


def make_processors(
    settings: LogitsSettings,
    *,
    num_prompt_tokens: int,
    max_new_tokens: int,
    end_token_ids: frozenset[int],
    vocab_size: int,
) -> LogitsProcessors | None:
    """The processors of a request in the order of transformers' `_get_logits_processor`; None where nothing is active.

    Token ids outside the vocabulary are left out: nothing emits them.
    """
    processors = _sequence_bias(dict(settings.sequence_bias), vocab_size)
    if settings.repetition_penalty != 1.0:
        processors.append(RepetitionPenalty(settings.repetition_penalty))
    if settings.no_repeat_ngram_size > 0:
        processors.append(NoRepeatNgram(settings.no_repeat_ngram_size))
    # Without its end tokens a text would have no way to end.
    bad_words = [word for word in settings.bad_words_ids if not (len(word) == 1 and word[0] in end_token_ids)]
    processors += _sequence_bias(dict.fromkeys(bad_words, -np.inf), vocab_size)

    def known(token_ids: Iterable[int]) -> np.ndarray:
        return np.array(sorted(token for token in set(token_ids) if 0 <= token < vocab_size), dtype=np.int64)

    min_new_tokens = settings.min_new_tokens
    min_length = settings.min_length if min_new_tokens is None else num_prompt_tokens + min_new_tokens
    if end_token_ids and min_length > num_prompt_tokens:
        processors.append(Suppress(known(end_token_ids), range(min_length)))
    forced_first = settings.forced_bos_token_id if num_prompt_tokens == 1 else None
    if forced_first is not None:
        processors.append(Force(known([forced_first]), 1))
    if settings.forced_eos_token_id:
        processors.append(Force(known(settings.forced_eos_token_id), num_prompt_tokens + max_new_tokens - 1))
    if settings.suppress_tokens:
        processors.append(Suppress(known(settings.suppress_tokens), range(sys.maxsize)))
    if settings.begin_suppress_tokens:
        begin = num_prompt_tokens + (forced_first is not None)
        processors.append(Suppress(known(settings.begin_suppress_tokens), range(begin, begin + 1)))
    return LogitsProcessors(processors) if processors else None


def _sequence_bias(biases: Mapping[tuple[int, ...], float], vocab_size: int) -> list[LogitsProcessor]:
    """One processor for the sequences that can be completed, none where there are none."""
    kept = {sequence: bias for sequence, bias in biases.items() if sequence and 0 <= sequence[-1] < vocab_size}
    return [SequenceBias(kept)] if kept else []
