"""How many positions a transformers model has, and up to which length of a sequence its KV entries stay valid."""

from bisect import bisect_left
from collections.abc import Iterator
from typing import Any

import torch

from rakvctl.core.kv import TorchKVCache

# The names that configs have for it, as far as transformers does not map them to the first.
_LIMIT_NAMES = ("max_position_embeddings", "max_seq_len", "max_sequence_length", "max_target_positions", "n_positions")
# Where a config names no limit, no sequence is expected to be longer.
_FARTHEST = 2**20


def max_positions(config: Any) -> int | None:
    """The longest sequence that a config allows; None where nothing limits it, as with ALiBi."""
    text = config.get_text_config(decoder=True)
    if getattr(text, "alibi", False):
        return None
    limits = (getattr(text, name, None) for name in _LIMIT_NAMES)
    return next((limit for limit in limits if isinstance(limit, int) and limit > 0), None)


@torch.inference_mode()
def prefix_stable_positions(model: Any, limit: int | None) -> int | None:
    """The longest sequence in which the rotary embedding of a position is that of a shorter sequence.

    None where that is so for every length up to `limit`. With LongRoPE and dynamic NTK it is not: one token more, and
    all keys are rotated otherwise.
    """
    longest = _FARTHEST if limit is None else limit
    stable = [_last_stable(model, *rotary, longest) for rotary in _length_dependent_rotaries(model)]
    return min((length for length in stable if length < longest), default=None)


def _length_dependent_rotaries(model: Any) -> Iterator[tuple[Any, str | None]]:
    """Rotary modules that look at the length of the sequence, each with a type of layer if it has several."""
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        by_layer = kinds if isinstance(kinds, dict) else {None: kinds}
        for layer_type, kind in by_layer.items():
            # As transformers' own decorator of rotary modules tells them from the others.
            if isinstance(kind, str) and ("dynamic" in kind or kind == "longrope"):
                yield module, layer_type


def _last_stable(model: Any, rotary: Any, layer_type: str | None, longest: int) -> int:
    """The longest sequence, up to `longest`, in which position 1 is rotated as in a sequence of two."""
    options = {} if layer_type is None else {"layer_type": layer_type}

    def rotation(length: int) -> torch.Tensor:
        ids = torch.tensor([[1, length - 1]], device=model.device)
        return torch.cat(rotary(torch.zeros(1, device=model.device), ids, **options), dim=-1)[0, 0]

    def differs(length: int) -> bool:
        # Dynamic NTK remembers the longest sequence until a short one comes.
        short = rotation(2)
        return not torch.equal(short, rotation(length))

    last = bisect_left(range(2, longest + 1), True, key=differs) + 1
    rotation(2)
    return last


def recomputes_beyond(model: Any, cache_argument: str, length: int) -> bool:
    """Whether transformers' `generate` drops a cache of `length` positions for the next pass.

    Some kinds do where LongRoPE changes its factors (Phi-3), and others go on with keys of both.
    """
    cache = TorchKVCache(num_layers=1)
    cache.commit(length)
    ids = torch.zeros(1, length + 1, dtype=torch.int64, device=model.device)
    inputs = model.prepare_inputs_for_generation(
        ids, next_sequence_length=1, is_first_iteration=False, use_cache=True, **{cache_argument: cache}
    )
    return bool(inputs["input_ids"].shape[1] > 1)
