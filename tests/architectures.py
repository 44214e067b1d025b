"""Tiny configs of many model types of transformers, for tests: two layers or so, with random weights."""

from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from tests.checkpoints import VOCAB_SIZE, byte_tokenizer

SLIDING_WINDOW = 8
# Where LongRoPE changes its factors: within the texts of the tests.
SWITCH_TOKENS = 45
_SPREAD = 0.2
_HEAD_DIM = 16
# Taken where the type's config has the name.
_SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": _HEAD_DIM,
    "max_position_embeddings": 512,
    "sliding_window": SLIDING_WINDOW,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "tie_word_embeddings": False,
}
_MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 1, "mamba_chunk_size": 16}
_DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"],
}
_LATENT = {
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
_DECODER = {
    "d_model": 64,
    "decoder_layers": 2,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 64,
    "is_decoder": True,
    "is_encoder_decoder": False,
    "forced_eos_token_id": None,
}
_MASKED = {"is_decoder": True, "type_vocab_size": 1}
_LAYERS_WITH_WINDOW = {"layer_types": ["sliding_attention", "full_attention"]}
_SMALL_VISION = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * (_HEAD_DIM // 2),
    "long_factor": [2.0 + index for index in range(_HEAD_DIM // 2)],
    "original_max_position_embeddings": SWITCH_TOKENS,
}

# By model type, with a variant after a slash where there are several: what its config has beside the shape above.
CAUSAL: dict[str, dict[str, Any]] = {
    "afmoe": {**_LAYERS_WITH_WINDOW},
    "apertus": {},
    "arcee": {},
    "bamba": {**_MAMBA2, "attn_layer_indices": [1], "attn_rotary_emb": _HEAD_DIM},
    "bart": {**_DECODER},
    "bert": {**_MASKED},
    "bert-generation": {**_MASKED},
    "big_bird": {**_MASKED},
    "bigbird_pegasus": {**_DECODER},
    "biogpt": {},
    "bitnet": {},
    "bloom": {},
    "camembert": {**_MASKED},
    "codegen": {"n_embd": 64, "n_layer": 2, "n_head": 4, "rotary_dim": 8},
    "cohere": {},
    "cohere2": {**_LAYERS_WITH_WINDOW},
    "cpmant": {},
    "ctrl": {"n_embd": 64, "n_layer": 2, "n_head": 4, "dff": 64},
    "cwm": {},
    "data2vec-text": {**_MASKED},
    "dbrx": {
        "d_model": 64,
        "n_heads": 4,
        "n_layers": 2,
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 64},
    },
    "deepseek_v2": {**_LATENT},
    "deepseek_v3": {**_LATENT},
    "deepseek_v32": {**_LATENT, "index_n_heads": 2, "index_head_dim": 32, "index_topk": 16},
    "diffllama": {},
    "doge": {},
    "dots1": {"n_shared_experts": 1, "n_group": 1, "topk_group": 1, **_LAYERS_WITH_WINDOW},
    "electra": {**_MASKED, "embedding_size": 64},
    "ernie": {**_MASKED},
    "ernie4_5": {},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2},
    "exaone": {},
    "exaone4": {**_LAYERS_WITH_WINDOW},
    "falcon": {"new_decoder_architecture": True, "num_kv_heads": 2},
    "falcon/alibi": {"alibi": True, "multi_query": True},
    "falcon_h1": {**_MAMBA2, "mamba_d_ssm": 128},
    "falcon_mamba": {"state_size": 8},
    "flex_olmo": {},
    "gemma": {},
    "gemma2": {**_LAYERS_WITH_WINDOW},
    "gemma3": {"tie_word_embeddings": False, "text_config": _LAYERS_WITH_WINDOW, "vision_config": _SMALL_VISION},
    "gemma3_text": {**_LAYERS_WITH_WINDOW},
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": VOCAB_SIZE,
        "laurel_rank": 8,
        "altup_num_inputs": 2,
        "activation_sparsity_pattern": [0.0] * 4,
    },
    "gemma4_text": {
        **_LAYERS_WITH_WINDOW,
        "global_head_dim": 2 * _HEAD_DIM,
        "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": VOCAB_SIZE,
    },
    "glm": {},
    "glm4": {},
    "glm4_moe": {"n_shared_experts": 1, "n_group": 1, "topk_group": 1},
    "gpt2": {},
    "gpt_bigcode": {},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": SLIDING_WINDOW},
    "gpt_neox": {},
    "gpt_neox_japanese": {},
    "gpt_oss": {**_LAYERS_WITH_WINDOW},
    "gptj": {"rotary_dim": 8},
    "granite": {},
    "granite_swa": {**_LAYERS_WITH_WINDOW},
    "granitemoe": {},
    "granitemoehybrid": {
        **_MAMBA2,
        "layer_types": ["linear_attention", "full_attention"],
        "shared_intermediate_size": 64,
    },
    "granitemoeshared": {"shared_intermediate_size": 64},
    "helium": {},
    "hunyuan_v1_dense": {},
    "hunyuan_v1_moe": {"moe_topk": 2},
    "internlm3": {},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8, "mamba_dt_rank": 4},
    "jetmoe": {},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "llama": {},
    "llama/dynamic": {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
    "llama/llama3": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 1e4,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": SWITCH_TOKENS,
        }
    },
    "llama/longrope": {"rope_parameters": _LONGROPE},
    "llama/yarn": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "original_max_position_embeddings": SWITCH_TOKENS,
        }
    },
    "llama4_text": {"attention_chunk_size": 16, "intermediate_size_mlp": 64},
    "mamba": {"state_size": 8},
    "mamba2": {"state_size": 16, "num_heads": 8, "head_dim": 16, "n_groups": 1, "chunk_size": 16},
    "marian": {**_DECODER},
    "mbart": {**_DECODER},
    "megatron-bert": {**_MASKED},
    "mimo_v2_flash": {**_LAYERS_WITH_WINDOW},
    "minicpm3": {**_LATENT},
    "minimax": {},
    "ministral": {**_LAYERS_WITH_WINDOW},
    "ministral3": {},
    "mistral": {},
    "mixtral": {},
    "modernbert-decoder": {**_LAYERS_WITH_WINDOW, "local_attention": SLIDING_WINDOW},
    "moshi": {"sliding_window": 512},
    "mpt": {"max_seq_len": 512},
    "nanochat": {},
    "nemotron": {},
    "nemotron_h": {
        "num_hidden_layers": 3,
        "layers_block_type": ["linear_attention", "full_attention", "moe"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "ssm_state_size": 16,
        "n_groups": 1,
        "chunk_size": 16,
    },
    "olmo": {},
    "olmo2": {},
    "olmo3": {**_LAYERS_WITH_WINDOW},
    "olmo_hybrid": {**_DELTA},
    "olmoe": {},
    "openai-gpt": {},
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 64},
    "pegasus": {**_DECODER},
    "persimmon": {},
    "phi": {},
    "phi3": {},
    "phi3/longrope": {
        "rope_parameters": _LONGROPE,
        "original_max_position_embeddings": SWITCH_TOKENS,
        "sliding_window": None,
    },
    "phimoe": {},
    "phimoe/longrope": {
        "rope_parameters": {**_LONGROPE, "short_mscale": 1.0, "long_mscale": 1.3},
        "original_max_position_embeddings": SWITCH_TOKENS,
        "sliding_window": None,
    },
    "plbart": {**_DECODER},
    "qwen2": {},
    "qwen2_moe": {},
    "qwen3": {},
    "qwen3_5": {"text_config": _DELTA},
    "qwen3_5_text": {**_DELTA},
    "qwen3_moe": {},
    "qwen3_next": {**_DELTA},
    "recurrent_gemma": {"num_hidden_layers": 3, "lru_width": 64, "attention_window_size": SLIDING_WINDOW},
    "rembert": {**_MASKED, "input_embedding_size": 64, "output_embedding_size": 64},
    "roberta": {**_MASKED},
    "roberta-prelayernorm": {**_MASKED},
    "roformer": {**_MASKED, "embedding_size": 64},
    "rwkv": {},
    "seed_oss": {},
    "smollm3": {},
    "stablelm": {},
    "starcoder2": {},
    "trocr": {**_DECODER, "decoder_start_token_id": 0},
    "vaultgemma": {**_LAYERS_WITH_WINDOW},
    "whisper": {**_DECODER, "decoder_start_token_id": 0},
    "xglm": {"ffn_dim": 64, "d_model": 64},
    "xlm": {},
    "xlm-roberta": {**_MASKED},
    "xlm-roberta-xl": {**_MASKED},
    "xlnet": {"d_model": 64, "n_layer": 2, "n_head": 4, "d_inner": 64},
    "xlstm": {"num_heads": 4},
    "xmod": {**_MASKED, "languages": ["en_XX"], "default_language": "en_XX"},
    "zamba": {
        "num_hidden_layers": 3,
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention"],
        "n_mamba_heads": 2,
        "mamba_d_state": 8,
        "num_key_value_heads": 4,
    },
    "zamba2": {
        "num_hidden_layers": 3,
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention"],
        "n_mamba_heads": 8,
        "mamba_d_state": 16,
        "num_mem_blocks": 1,
        "num_key_value_heads": 4,
        "chunk_size": 16,
    },
    "zaya": {"num_experts_per_tok": 1},
}

# The rest can be rolled back and, all others but these at any length, reused.
WITHOUT_ROLLBACK = (
    "bamba",
    "deepseek_v32",
    "falcon_h1",
    "falcon_mamba",
    "granitemoehybrid",
    "jamba",
    "lfm2",
    "lfm2_moe",
    "mamba",
    "mamba2",
    "nemotron_h",
    "olmo_hybrid",
    "qwen3_5",
    "qwen3_5_text",
    "qwen3_next",
    "recurrent_gemma",
    "zamba",
    "zamba2",
    "zaya",
)
UNSTABLE = ("llama/longrope", "phi3/longrope", "phimoe/longrope")
# Where the first seed gives a near tie, or the same token over and over.
_SEEDS = {"roformer": 1, "xglm": 1}
# What the loader says of types that it refuses.
REFUSED = {
    "cpmant": "computes something else",
    "minimax": "cache of its own",
    "openai-gpt": "takes no cache",
    "rwkv": "takes no cache",
    "xlm": "cannot run",
    "xlnet": "takes no cache",
    "xlstm": "cannot run",
}


def tiny_model(name: str, *, seed: int | None = None, **changed: Any) -> Any:
    """A float32 model of the type, its weights drawn from the seed. `changed`: other values in its config."""
    model_type, end = name.partition("/")[0], byte_tokenizer().eos_token_id
    config_class = CONFIG_MAPPING[model_type]
    common = {"vocab_size": VOCAB_SIZE, "bos_token_id": end, "eos_token_id": end, "pad_token_id": end}
    special = {**common, **CAUSAL[name], **changed}
    if "text_config" in special:
        text = {**_SHAPE, **common, **special.pop("text_config")}
        config = config_class(**special, text_config=text)
    else:
        names, mapped = vars(config_class()) | dict.fromkeys(config_class.attribute_map), config_class.attribute_map
        shape = {key: value for key, value in _SHAPE.items() if key in names and mapped.get(key) not in special}
        config = config_class(**{**shape, **special})
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(_SEEDS.get(name, 0) if seed is None else seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        for weight in model.parameters():
            # Attention and argmax become lively: greedy texts wander instead of repeating one token.
            if weight.dim() > 1:
                weight.add_(torch.randn_like(weight), alpha=_SPREAD)
    return model
