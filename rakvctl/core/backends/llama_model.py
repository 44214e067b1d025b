"""A GGUF file as llama.cpp loads it: what it says of itself, and contexts to run it in."""

import ctypes
import os
import weakref
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from gguf import GGMLQuantizationType
from llama_cpp import llama_cpp as api

from rakvctl.core.errors import ModelError
from rakvctl.core.seams import STATE_BLOCK_TOKENS

# As many tokens go through a model at once.
BATCH_TOKENS = 512
# llama.cpp's names for whether attention is fused.
_FLASH = {None: -1, False: 0, True: 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextOptions:
    """How a context computes. Types: of keys and of values, as GGUF names them.

    Keys and values of different types by default: of one type, llama.cpp's fused attention adds up a single new
    position in another order than several, and what is quantized after it makes 1e-7 a difference of up to 4 in a logit
    (measured on SmolLM2 in 4 bits). `flash_attention` None: as llama.cpp sees fit. `repack`: whether weights may lie
    in memory in another order, where llama.cpp thinks that faster. `tiles`: whether several positions may be multiplied
    with weights in another order than one. `max_positions`: no more of them, where the user says so.
    """

    num_threads: int
    key_type: str = "bf16"
    value_type: str = "f16"
    flash_attention: bool | None = True
    repack: bool = True
    tiles: bool = True
    max_positions: int | None = None

    @property
    def label(self) -> str:
        """What the bits of states and logits depend on, for people."""
        parts = [f"{self.key_type} keys, {self.value_type} values"]
        parts += [] if self.flash_attention is None else [f"{'' if self.flash_attention else 'no '}flash attention"]
        parts += [] if self.repack else ["no repacking"]
        parts += [] if self.tiles else ["no tiles"]
        return ", ".join(parts)


class LlamaContext:
    """A context with its memory of states; keeps the model alive."""

    def __init__(self, model: "LlamaModel", pointer: Any) -> None:
        self._model = model
        self.pointer = pointer
        self.memory = api.llama_get_memory(pointer)
        weakref.finalize(self, api.llama_free, pointer)


class LlamaModel:
    """A loaded file. Its methods raise ModelError where llama.cpp refuses."""

    def __init__(self, path: Path, repack: bool) -> None:
        """`repack`: let llama.cpp keep weights in another order in memory, where it thinks that faster."""
        _keep_quiet()
        api.llama_backend_init()
        params = api.llama_model_default_params()
        params.n_gpu_layers = 0
        params.use_extra_bufts = repack
        self._name = path.name
        self._pointer = api.llama_model_load_from_file(os.fsencode(path), params)
        if not self._pointer:
            raise ModelError(
                f"llama.cpp cannot load {path.name}", "check that the file is complete and of a known kind"
            )
        weakref.finalize(self, api.llama_model_free, self._pointer)
        if not api.llama_model_has_decoder(self._pointer) or api.llama_model_has_encoder(self._pointer):
            raise ModelError(f"{path.name} is no causal model", "take a model that generates text")
        self.vocab = api.llama_model_get_vocab(self._pointer)

    def make_context(self, options: ContextOptions, num_positions: int, num_sequences: int) -> "LlamaContext":
        """A context with room for so many positions."""
        params = api.llama_context_default_params()
        params.n_ctx = num_positions
        params.n_batch = params.n_ubatch = BATCH_TOKENS
        params.n_seq_max = num_sequences
        params.kv_unified = True  # one pool of cells, which sequences can share
        params.swa_full = True  # keep what slides out of a window, to roll back to it
        params.n_threads = params.n_threads_batch = options.num_threads
        params.flash_attn_type = _FLASH[options.flash_attention]
        params.type_k, params.type_v = _type(options.key_type), _type(options.value_type)
        params.no_perf = True
        pointer = api.llama_init_from_model(self._pointer, params)
        if not pointer:
            raise ModelError(
                f"llama.cpp gives {self._name} no context of {num_positions} positions with {options.label}",
                "it may need other --kv-type, or more memory than there is",
            )
        return LlamaContext(self, pointer)

    @cached_property
    def keeps_all_positions(self) -> bool:
        """Whether states are plain keys and values by position, all of which can be kept.

        A window narrower than a stored block would lack positions when only a part of the block is taken up again.
        """
        window: int = api.llama_model_n_swa(self._pointer)
        recurrent = api.llama_model_is_recurrent(self._pointer) or api.llama_model_is_hybrid(self._pointer)
        return not recurrent and not 0 < window < STATE_BLOCK_TOKENS

    @property
    def vocab_size(self) -> int:
        """How many tokens there are, and scores for each position."""
        return int(api.llama_vocab_n_tokens(self.vocab))

    @property
    def num_trained_positions(self) -> int:
        """The longest sequence it was trained on; 0 where the file does not say."""
        return max(0, int(api.llama_model_n_ctx_train(self._pointer)))

    @property
    def num_bytes(self) -> int:
        """Size of all weights."""
        return int(api.llama_model_size(self._pointer))

    @property
    def file_type(self) -> str:
        """The number type of most weights, such as `Q4_1`."""
        name = api.llama_ftype_name(api.llama_model_ftype(self._pointer))
        return name.decode().removeprefix("(guessed) ") if name else "unknown"

    @property
    def chat_template(self) -> str | None:
        """The template that the file brings along."""
        template = api.llama_model_chat_template(self._pointer, None)
        return template.decode("utf-8", "replace") if template else None

    @property
    def processor_features(self) -> str:
        """What this build of llama.cpp uses of the processor."""
        words = api.llama_print_system_info().decode()
        return " ".join(words.replace(" = 1", "").replace("|", " ").split())


def _keep_quiet() -> None:
    """Let nothing that llama.cpp has to say reach the terminal, nor, where it aborts, a debugger's output stdout.

    The binding's own logger is a function in Python: a Ctrl-C while llama.cpp calls it would be lost. One in C that
    takes no arguments and does nothing stands in for it.
    """
    os.environ.setdefault("GGML_NO_BACKTRACE", "1")
    nothing = ctypes.cast(api.llama_supports_mmap, api.llama_log_callback)
    api.llama_log_set(nothing, None)


def _type(name: str) -> int:
    """llama.cpp's number of a type."""
    return int(GGMLQuantizationType[name.upper()])
