"""Asking the target what mostly follows each token of its vocabulary, for as long as there is time."""

from rakvctl.core.pair import ModelPair
from rakvctl.core.seams import Clock
from rakvctl.measure.timing import Progress

# Passes grow up to so many tokens: the first ones show how long a token takes.
_FIRST_TOKENS, _MOST_TOKENS = 16, 512


def measure_successors(pair: ModelPair, budget_s: float, clock: Clock, on_progress: Progress) -> tuple[int, ...]:
    """The successors of the first token ids, in most vocabularies the most frequent ones; begins where `pair` ends.

    No more where the model cannot be asked, or the tokenizer knows no new line, after which a token is to stand.
    """
    vocab_size = pair.codec.vocab_size
    line_end = pair.codec.encode("\n")[-1:]
    started, size, found = clock(), _FIRST_TOKENS, list(pair.successors)
    while line_end and len(found) < vocab_size:
        on_progress("asking for successors", min(1.0, (clock() - started) / budget_s))
        batch = range(len(found), min(len(found) + size, vocab_size))
        began = clock()
        successors = pair.target.likeliest_after(line_end[0], batch)
        if not successors:
            break
        found += successors
        size = min(2 * size, _MOST_TOKENS)
        next_s = (clock() - began) / len(batch) * size
        if clock() - started + next_s > budget_s:
            break
    return tuple(found)
