"""Attention whose result for a position does not depend on the pass that computes it, for float32 on a CPU.

Floating-point additions round, so their order shows in the last bits, and matrix routines choose the order by the
shapes they are given: a token scored alone and the same token scored among five others would differ by some 1e-5, and
where two tokens lie that close, speculation or a reused prefix would let another one win. Here every position meets
shapes that add up in the same order, whatever the width of its pass and the length of the cache: queries come in rows
of `_ROW_BLOCK`, and keys in lengths of which that was found to be true. The rest is masked.
"""

from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import causal_mask_function, sdpa_mask

from rakvctl.core.kv import BLOCK_TOKENS

INVARIANT_ATTENTION = "rakvctl_invariant"
# Fewer rows than this are multiplied by other routines.
_ROW_BLOCK = 4
_KEY_STEP = 64
# Rows of passes that a length of keys is tried with, and how often.
_TRIED_ROWS, _TRIALS = (4, 8, 64), 2


def use_invariant_attention(model: Any) -> None:
    """Switch a model to this attention where it takes one from outside.

    A kind with an attention of its own, or one that the fused kernel cannot express, keeps it.
    """
    if model.config._attn_implementation != "sdpa" or not getattr(model, "_supports_attention_backend", False):
        return
    AttentionInterface.register(INVARIANT_ATTENTION, _attend)
    AttentionMaskInterface.register(INVARIANT_ATTENTION, _mask)
    model.set_attn_implementation(INVARIANT_ATTENTION)


@torch.inference_mode()
def key_lengths(head_dim: int) -> tuple[int, ...]:
    """The lengths up to a block of keys, rising, over which attention gives the bits that it gives over a whole block.

    Behind whole blocks the same lengths serve: the fused kernel works through one block at a time.
    """
    tried = range(_KEY_STEP, BLOCK_TOKENS, _KEY_STEP)
    return (*(length for length in tried if _is_like_a_block(length, head_dim)), BLOCK_TOKENS)


def _is_like_a_block(length: int, head_dim: int) -> bool:
    generator = torch.Generator().manual_seed(length)
    for num_rows in _TRIED_ROWS * _TRIALS:
        query, key, value = (
            torch.randn(1, 2, size, head_dim, generator=generator) for size in (num_rows, BLOCK_TOKENS, BLOCK_TOKENS)
        )
        first = max(0, length - num_rows)
        whole = _causal_mask(num_rows, BLOCK_TOKENS, first)
        whole[..., length:] = -torch.inf
        short, long = (
            nn.functional.scaled_dot_product_attention(
                query, key[..., :size, :], value[..., :size, :], attn_mask=whole[..., :size]
            )
            for size in (length, BLOCK_TOKENS)
        )
        if not torch.equal(short, long):
            return False
    return True


def _causal_mask(num_queries: int, num_keys: int, offset: int) -> torch.Tensor:
    """What to add to scores [1, 1, queries, keys]: minus infinity where a key comes after its query."""
    return torch.full((1, 1, num_queries, num_keys), -torch.inf).triu_(offset + 1)


def _mask(*, dtype: torch.dtype = torch.float32, **options: Any) -> torch.Tensor:
    """What to add to the scores, [1, 1, queries, keys]: zero, or minus infinity for a hidden key."""
    if options["mask_function"] is causal_mask_function and options.get("attention_mask") is None:
        return _causal_mask(options["q_length"], options["kv_length"], int(options["q_offset"]))
    options.update(allow_is_causal_skip=False, allow_is_bidirectional_skip=False)
    visible = sdpa_mask(**options)
    return torch.zeros(visible.shape, dtype=dtype).masked_fill_(~visible, -torch.inf)


def _attend(
    _module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    scaling: float | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Attend from [1, heads, queries, head_dim] to [1, kv_heads, keys, head_dim]; [1, queries, heads, head_dim].

    Raises NotImplementedError for a kind of model that adds something of its own to the scores.
    """
    additions = {name for name in ("position_bias", "softcap", "s_aux") if options.get(name) is not None}
    if additions:
        raise NotImplementedError(f"attention with {', '.join(additions)}")
    _, num_heads, num_queries, _ = query.shape
    group = num_heads // key.shape[1]
    rows, mask = query, attention_mask
    if num_queries < _ROW_BLOCK and group > 1:
        # The heads that share keys become rows, so that the keys are read once.
        rows = query.reshape(1, key.shape[1], group * num_queries, -1)
        mask = mask.repeat(1, 1, group, 1) if num_queries > 1 else mask
    num_rows = rows.shape[-2]
    if num_rows % _ROW_BLOCK:
        rows = nn.functional.pad(rows, (0, 0, 0, -num_rows % _ROW_BLOCK))
        mask = nn.functional.pad(mask, (0, 0, 0, -num_rows % _ROW_BLOCK)) if mask.shape[-2] > 1 else mask
    output = nn.functional.scaled_dot_product_attention(
        rows, key, value, attn_mask=mask, scale=scaling, enable_gqa=rows.shape[1] != key.shape[1]
    )
    return output[:, :, :num_rows].reshape(1, num_heads, num_queries, -1).transpose(1, 2).contiguous(), None
