"""Random checkpoints for tests: a small model of a given architecture with a byte-level tokenizer, in a directory."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

SLIDING_WINDOW = 8
VOCAB_SIZE = 320
_TEXT = (
    "The quick brown fox jumps over the lazy dog, and the dog does not mind. "
    "A model that is small enough to be made in a test can still be wrong in every way that a large one can. "
)
# Weights as large as these make attention and argmax lively: greedy output wanders instead of repeating one token.
_SPREAD = 0.2


@cache
def byte_tokenizer(num_tokens: int = VOCAB_SIZE) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of exactly `num_tokens` tokens (some above 257), the end token included."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=num_tokens,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([_TEXT], trainer)
    assert tokenizer.get_vocab_size() == num_tokens
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>")


def _gpt2(**common: Any) -> GPT2Config:
    return GPT2Config(**common, n_embd=48, n_layer=2, n_head=4, n_positions=4096)


def _mamba(**common: Any) -> MambaConfig:
    return MambaConfig(**common, hidden_size=48, num_hidden_layers=2, state_size=8, tie_word_embeddings=False)


def _transformer(config_class: type, **special: Any) -> Callable[..., Any]:
    """The names that most configs share: two layers, and two query heads on each of two key heads."""
    shape = {
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
    }
    return lambda **common: config_class(**{**shape, **special, **common})


CONFIGS: dict[str, Callable[..., Any]] = {
    "gpt2": _gpt2,
    "llama": _transformer(LlamaConfig),
    "qwen2": _transformer(Qwen2Config),
    "qwen3": _transformer(Qwen3Config, head_dim=16),
    "gemma3": _transformer(
        Gemma3TextConfig,
        num_hidden_layers=3,
        head_dim=16,
        sliding_window=SLIDING_WINDOW,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    "mistral": _transformer(MistralConfig, sliding_window=SLIDING_WINDOW),
    "mamba": _mamba,
}


def random_model(
    architecture: str, *, seed: int = 0, noise: float = 0.0, num_rows: int = VOCAB_SIZE, **changed: Any
) -> Any:
    """A float32 model whose weights follow from the seed, `noise` times its weights' spread added to each of them.

    `num_rows` is the size of its embedding: more than `VOCAB_SIZE` is padding, beside weights that stay the same.
    `changed`: other values in its config.
    """
    end = byte_tokenizer().eos_token_id
    config = CONFIGS[architecture](
        vocab_size=VOCAB_SIZE,
        initializer_range=_SPREAD,
        bos_token_id=end,
        eos_token_id=end,
        pad_token_id=end,
        **changed,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(torch.randn_like(weight), alpha=noise * _SPREAD)
        if num_rows != VOCAB_SIZE:
            model.resize_token_embeddings(num_rows, mean_resizing=False)
    return model


def save_checkpoint(directory: Path, model: Any, tokenizer: PreTrainedTokenizerFast | None = None) -> Path:
    """Write a model and a tokenizer as a Hugging Face checkpoint."""
    model.save_pretrained(directory)
    (tokenizer or byte_tokenizer()).save_pretrained(directory)
    return directory


def build_checkpoint(
    directory: Path, architecture: str, *, seed: int = 0, noise: float = 0.0, num_rows: int = VOCAB_SIZE
) -> Path:
    """Write a random checkpoint; the arguments are those of `random_model`."""
    return save_checkpoint(directory, random_model(architecture, seed=seed, noise=noise, num_rows=num_rows))


def write_gguf(path: Path, *, without: str | None = None, num_rows: int = VOCAB_SIZE, **changed: Any) -> Any:
    """Write a random Llama and its tokenizer as an unquantized GGUF file, as llama.cpp would; return the model.

    `without`: the name of a weight to leave out, as transformers calls it. The rest: as `random_model` has it.
    """
    model = random_model("llama", num_rows=num_rows, **changed)
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    _add_tokenizer(writer, num_rows)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    weights = {name: weight for name, weight in model.state_dict().items() if name != without}
    for name, weight in weights.items():
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
        # llama.cpp rotates pairs of neighbouring rows, transformers the two halves of a head.
        rows = weight.view(heads, 2, -1, weight.shape[-1]).transpose(1, 2).reshape(weight.shape) if heads else weight
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), rows.contiguous().numpy())
    _finish(writer)
    return model


def write_recurrent_gguf(path: Path) -> None:
    """Write a random Mamba as a GGUF file."""
    width, inner, state, rank, kernel = 32, 64, 8, 4, 4
    random = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "mamba")
    writer.add_block_count(1)
    writer.add_context_length(2048)
    writer.add_embedding_length(width)
    writer.add_feed_forward_length(0)
    writer.add_head_count(0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_ssm_conv_kernel(kernel)
    writer.add_ssm_inner_size(inner)
    writer.add_ssm_state_size(state)
    writer.add_ssm_time_step_rank(rank)
    _add_tokenizer(writer)
    shapes = {
        "token_embd.weight": (VOCAB_SIZE, width),
        "output_norm.weight": (width,),
        "blk.0.attn_norm.weight": (width,),
        "blk.0.ssm_in.weight": (2 * inner, width),
        "blk.0.ssm_conv1d.weight": (inner, kernel),
        "blk.0.ssm_conv1d.bias": (inner,),
        "blk.0.ssm_x.weight": (rank + 2 * state, inner),
        "blk.0.ssm_dt.weight": (inner, rank),
        "blk.0.ssm_dt.bias": (inner,),
        "blk.0.ssm_a": (inner, state),
        "blk.0.ssm_d": (inner,),
        "blk.0.ssm_out.weight": (width, inner),
    }
    for name, shape in shapes.items():
        drawn = random.normal(scale=_SPREAD, size=shape).astype(np.float32)
        # Decays are negative, or states would grow.
        writer.add_tensor(name, -np.abs(drawn) if name.endswith("ssm_a") else drawn)
    _finish(writer)


def write_sliding_gguf(path: Path, window: int) -> None:
    """Write a random Gemma 2 as a GGUF file, of whose layers every other one sees `window` positions only."""
    width, inner, heads, kv_heads, head_dim, num_layers = 48, 64, 4, 2, 16, 2
    random = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "gemma2")
    writer.add_block_count(num_layers)
    writer.add_context_length(4096)
    writer.add_embedding_length(width)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_sliding_window(window)
    writer.add_attn_logit_softcapping(50.0)
    writer.add_final_logit_softcapping(30.0)
    _add_tokenizer(writer)
    layer = {
        **dict.fromkeys(("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"), (width,)),
        "attn_q": (heads * head_dim, width),
        **dict.fromkeys(("attn_k", "attn_v"), (kv_heads * head_dim, width)),
        "attn_output": (width, heads * head_dim),
        **dict.fromkeys(("ffn_gate", "ffn_up"), (inner, width)),
        "ffn_down": (width, inner),
    }
    shapes: dict[str, tuple[int, ...]] = {"token_embd": (VOCAB_SIZE, width), "output_norm": (width,)}
    shapes |= {f"blk.{number}.{name}": shape for number in range(num_layers) for name, shape in layer.items()}
    for name, shape in shapes.items():
        drawn = random.normal(scale=_SPREAD, size=shape)
        writer.add_tensor(f"{name}.weight", (drawn + (len(shape) == 1)).astype(np.float32))
    _finish(writer)


def _add_tokenizer(writer: gguf.GGUFWriter, num_rows: int = VOCAB_SIZE) -> None:
    """The byte-level tokenizer, as llama.cpp keeps one; rows beyond it are named as its converter names them."""
    tokenizer = byte_tokenizer()
    bpe = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    writer.add_vocab_size(num_rows)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    padding = range(VOCAB_SIZE, num_rows)
    writer.add_token_list([*sorted(bpe["vocab"], key=bpe["vocab"].get), *(f"[PAD{token}]" for token in padding)])
    end = tokenizer.eos_token_id
    kinds = [gguf.TokenType.CONTROL if token == end else gguf.TokenType.NORMAL for token in range(VOCAB_SIZE)]
    writer.add_token_types([*kinds, *(gguf.TokenType.UNUSED for _ in padding)])
    writer.add_token_merges([" ".join(pair) for pair in bpe["merges"]])
    writer.add_eos_token_id(end)


def _finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
