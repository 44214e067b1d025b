"""Why policies agree to the token in float32 on a CPU: a position's logits have the same bits in whatever pass."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, BertConfig

from rakvctl.core.backends import packed
from rakvctl.core.backends.invariant import INVARIANT_ATTENTION, key_lengths
from rakvctl.core.backends.torch_load import load_backend
from rakvctl.core.engine import Engine
from rakvctl.core.errors import ModelError
from rakvctl.core.kv import BLOCK_TOKENS, TorchKVCache
from rakvctl.core.models import ModelFiles, find_model
from tests.checkpoints import VOCAB_SIZE, build_checkpoint, save_checkpoint

# Short, in the stretch where a shorter multiplication would be cut otherwise, on both sides of a block's end, beyond.
CONTEXTS = [1, 30, 201, 300, BLOCK_TOKENS - 6, BLOCK_TOKENS, 777, 2 * BLOCK_TOKENS - 3]
WIDTHS = [1, 2, 3, 4, 5, 7, 8, 9, 16, 33]
MODELS = ["tiny", "tiny's draft", "gpt2", "llama", "qwen2", "qwen3", "gemma3", "mistral"]

pytestmark = pytest.mark.skipif(
    not packed.can_pack(torch.device("cpu"), torch.float32), reason="weights are packed on x86 CPUs with oneDNN only"
)


@pytest.fixture(scope="module", params=MODELS)
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    if request.param.startswith("tiny"):
        files = find_model("tiny", "draft" if "draft" in request.param else "target", print)
    else:
        files = ModelFiles("test", build_checkpoint(tmp_path_factory.mktemp(request.param), request.param))
    backend = load_backend(files, "cpu", "float32", VOCAB_SIZE)
    assert backend._model.config._attn_implementation == INVARIANT_ATTENTION
    return Engine(backend)


@pytest.fixture(scope="module")
def ids() -> tuple[int, ...]:
    drawn: list[int] = np.random.default_rng(0).integers(VOCAB_SIZE, size=max(CONTEXTS) + max(WIDTHS)).tolist()
    return tuple(drawn)


def one_by_one(engine: Engine, ids: tuple[int, ...], start: int) -> np.ndarray:
    """Logits after each of the tokens from `start` on, each in a pass of its own, [len(ids) - start, vocab_size]."""
    engine.rollback(0)
    engine.prefill(ids[:start])
    return np.concatenate([engine.step(token).numpy() for token in ids[start:]])


@pytest.mark.parametrize("context", CONTEXTS)
def test_a_token_scored_among_others_has_the_bits_of_one_scored_alone(
    engine: Engine, ids: tuple[int, ...], context: int
) -> None:
    ids = ids[: context + max(WIDTHS)]
    alone = one_by_one(engine, ids, context)
    for width in WIDTHS:
        engine.rollback(context)
        together = engine.verify(ids[context : context + width]).numpy()
        assert np.array_equal(together, alone[:width]), (width, np.abs(together - alone[:width]).max())


@pytest.mark.parametrize("context", CONTEXTS[1:])
def test_a_prompt_in_one_pass_has_the_bits_of_one_in_pieces(engine: Engine, ids: tuple[int, ...], context: int) -> None:
    """As when its first part comes out of the store."""
    ids = ids[: context + 5]
    expected = one_by_one(engine, ids, context)
    for cut in {1, context // 3, context // 2 + 1, context - 1, context}:
        engine.rollback(0)
        engine.prefill(ids[:cut])
        snapshot = engine.snapshot(cut)
        engine.rollback(0)
        engine.restore(snapshot, cut)
        assert np.array_equal(engine.prefill(ids[cut : context + 1]).numpy()[0], expected[0]), cut
        assert np.array_equal(
            np.concatenate([engine.step(token).numpy() for token in ids[context + 1 :]]), expected[1:]
        )


@pytest.mark.parametrize("in_features", [28, 224, 576, 896, 1536, 3072])
@pytest.mark.parametrize("out_features", [64, 1024])
def test_a_linear_layer_gives_a_row_the_same_bits_alone_and_among_others(in_features: int, out_features: int) -> None:
    layer = packed.PackedLinear(torch.randn(out_features, in_features), torch.randn(out_features))
    rows = torch.randn(1, 9, in_features)
    with torch.inference_mode():
        together = layer(rows)
        for width in range(1, 9):
            assert torch.equal(layer(rows[:, :width]), together[:, :width]), width
            # Experts are given the tokens that are theirs, without a batch dimension.
            assert torch.equal(layer(rows[0, :width]), together[0, :width]), width


@pytest.mark.parametrize("head_dim", [12, 28, 64])
def test_keys_come_in_lengths_that_add_up_as_whole_blocks_do(head_dim: int) -> None:
    lengths = key_lengths(head_dim)
    assert list(lengths) == sorted(set(lengths))
    assert lengths[-1] == BLOCK_TOKENS
    cache = TorchKVCache(1, lengths)
    for length in (1, 64, 65, 200, BLOCK_TOKENS - 1, BLOCK_TOKENS, BLOCK_TOKENS + 1, 3 * BLOCK_TOKENS - 70):
        visible = cache.num_visible(length)
        assert visible >= length
        assert visible % BLOCK_TOKENS in {size % BLOCK_TOKENS for size in lengths}
        assert visible <= length + BLOCK_TOKENS


def test_an_encoder_that_would_score_nonsense_with_a_cache_is_refused(tmp_path: Path) -> None:
    shape = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = BertConfig(vocab_size=VOCAB_SIZE, initializer_range=0.2, **shape)
    files = ModelFiles("test", save_checkpoint(tmp_path, AutoModelForCausalLM.from_config(config)))
    with pytest.raises(ModelError, match="computes something else"):
        load_backend(files, "cpu", "float32", VOCAB_SIZE)


class _Block(torch.nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q_proj, self.k_proj, self.v_proj = (torch.nn.Linear(96, size, bias=bias) for size in (96, 32, 32))

    def forward(self, states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.q_proj(states), self.k_proj(states), self.v_proj(states)


@pytest.mark.parametrize("bias", [True, False])
@torch.inference_mode()
def test_layers_of_one_input_are_computed_together_and_give_what_they_gave(bias: bool) -> None:
    model, reference = _Block(bias), _Block(bias)
    packed.pack_linears(model)
    assert sum(isinstance(module, packed.PackedLinear) for module in _reachable(model)) == 1
    for rows in (1, 2, 7):
        for states in torch.randn(3, 1, rows, 96):
            for ours, theirs in zip(model(states), reference(states), strict=True):
                torch.testing.assert_close(ours, theirs)
    alone = torch.randn(1, 4, 96)
    torch.testing.assert_close(model.v_proj(alone), reference.v_proj(alone))
    torch.testing.assert_close(model.v_proj(alone), reference.v_proj(alone))


def _reachable(model: torch.nn.Module) -> set[torch.nn.Module]:
    parts = [module for module in model.modules() if isinstance(module, packed._Part)]
    return {*model.modules(), *(part._together._layer for part in parts)}
