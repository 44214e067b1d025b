"""How far a token's logits depend on the pass that computes them, which is what speculation and reuse rest on."""

import numpy as np

from rakvctl.core.engine import Engine
from rakvctl.core.errors import ModelError

# Within a block of keys, and beyond; each with every width that a round may have.
_CONTEXTS = (24, 600)
_WIDTHS = (2, 3, 5, 7, 9, 17)
# As many tokens of a prompt are left to compute behind what is found of it, beside one half of them.
_RESTS = (5, 40)
# What a prompt in two pieces has at least.
_SHORTEST = 2


def logit_difference(engine: Engine) -> float:
    """The largest difference between logits of the same position in a pass of its own and in any other; 0: same bits.

    Others are passes over several tokens, as a verify's, and passes behind states that were copied and begun in the
    middle, as after a partial hit. Leaves the engine's cache empty. A model without room for any other pass has none.
    Raises ModelError where logits are no numbers.
    """
    limits = (engine.max_positions, engine.prefix_stable_positions)
    num_positions = min([_CONTEXTS[-1] + _WIDTHS[-1], *(limit for limit in limits if limit is not None)])
    widths = [width for width in _WIDTHS if _SHORTEST + width <= num_positions]
    if not widths:
        return 0.0
    engine.rollback(0)
    vocab_size = engine.step(0).numpy().shape[-1]
    drawn = np.random.default_rng(0).integers(vocab_size, size=num_positions)
    ids = tuple(int(token) for token in drawn)
    contexts = {min(context, num_positions - widths[-1]) for context in _CONTEXTS}
    largest = float(
        np.max([_difference_after(engine, ids[: context + widths[-1]], context, widths) for context in contexts])
    )
    engine.rollback(0)
    if not np.isfinite(largest):
        raise ModelError("the model's logits are no numbers", "its weights may be damaged, or too large for its dtype")
    return largest


def _difference_after(engine: Engine, ids: tuple[int, ...], context: int, widths: list[int]) -> float:
    """The same for the tokens after the first `context` ones."""
    engine.rollback(0)
    first = engine.prefill(ids[:context]).numpy()
    snapshot = engine.snapshot(context)
    alone = np.concatenate([first, *(engine.step(token).numpy() for token in ids[context:])])
    differences = []
    for width in widths:
        engine.rollback(context)
        together = engine.verify(ids[context : context + width]).numpy()
        differences.append(np.abs(together - alone[1 : width + 1]).max())
    for found in {context // 2, *(context - rest for rest in _RESTS if rest < context)}:
        engine.rollback(0)
        engine.restore(snapshot, found)
        warm = np.concatenate([engine.prefill(ids[found:context]).numpy(), engine.step(ids[context]).numpy()])
        differences.append(np.abs(warm - alone[:2]).max())
    return float(np.max(differences))
