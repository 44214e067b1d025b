"""Loading GGUF files for the llama.cpp backend."""

import hashlib
import os
from dataclasses import replace
from functools import cache

import psutil

from rakvctl.core import gguf_copy
from rakvctl.core.backends.llama_cpp import LlamaBackend
from rakvctl.core.backends.llama_model import ContextOptions, LlamaModel
from rakvctl.core.backends.llama_text import GgufTokenizer
from rakvctl.core.errors import ModelError
from rakvctl.core.hardware import num_cores, processor_name
from rakvctl.core.models import ModelFiles, Notify, Role
from rakvctl.core.text import TextCodec

_UNQUANTIZED = ("all F32", "F16", "BF16")
_TILES_VARIABLE = "GGML_CPU_TILED_MM"


class LlamaLoader:
    """Loads GGUF files, each one once for its tokenizer and its weights."""

    ways = ("auto", "no repacking")

    def __init__(self, num_threads: int | None, kv_type: str | None, max_positions: int | None, exact: bool) -> None:
        """`kv_type`: number type of keys and values, None for what makes passes agree; `max_positions`: no longer
        sequences; `exact`: switch off what makes passes of several positions differ from others, in this process.
        """
        options = ContextOptions(
            num_threads=num_threads or _num_threads(), max_positions=max_positions, tiles=not exact and _has_tiles()
        )
        if exact:
            os.environ[_TILES_VARIABLE] = "0"  # which llama.cpp reads once
        if kv_type is not None:
            options = replace(options, key_type=kv_type, value_type=kv_type, flash_attention=None)
        self._options = options
        self._is_free = kv_type is None
        self._open = cache(LlamaModel)

    def find(self, name: str, role: Role, notify: Notify) -> ModelFiles:
        """The file of that name; of `smollm2` the one inside the installed package."""
        return ModelFiles(name, gguf_copy.find(name))

    def load_codec(self, files: ModelFiles) -> TextCodec:
        """The file's own tokenizer, and the tokens that end a text or a turn."""
        tokenizer = GgufTokenizer(self._open(files.location, True))
        return TextCodec(tokenizer, tokenizer.end_token_ids())

    def load(self, files: ModelFiles, vocab_size: int, way: str = "auto", content_digest: str = "") -> LlamaBackend:
        """The model, computing in one of the `ways`; in llama.cpp's own where it cannot be run in ours."""
        options = replace(self._options, repack=way == "auto")
        if not self._is_free:
            return self._made(files, options, vocab_size, content_digest)
        if self._open(files.location, options.repack).file_type in _UNQUANTIZED:
            # Little is rounded after attention, so passes differ by less where states are in float32 too: by 1e-4, and
            # in 16 bits by 0.03.
            options = replace(options, key_type="f32", value_type="f32", flash_attention=False)
        try:
            return self._made(files, options, vocab_size, content_digest)
        except ModelError:
            own = replace(options, key_type="f16", value_type="f16", flash_attention=None)
            return self._made(files, own, vocab_size, content_digest)

    def _made(self, files: ModelFiles, options: ContextOptions, vocab_size: int, content_digest: str) -> LlamaBackend:
        model = self._open(files.location, options.repack)
        num_tokens = min(vocab_size, model.vocab_size)
        backend = LlamaBackend(model, options, vocab_size=num_tokens, digest=files.digest)
        info = backend.info
        content = content_digest or "\0".join(files.identity)
        parts = [content, info.backend, info.driver, info.versions, str(info.num_threads), processor_name()]
        backend.model_key = hashlib.blake2b("\0".join(parts).encode(), digest_size=16).hexdigest()
        return backend


def _has_tiles() -> bool:
    """Whether llama.cpp multiplies K-quants tile by tile, as it does where nobody says otherwise."""
    return os.environ.get(_TILES_VARIABLE, "1") != "0"


def _num_threads() -> int:
    """One for each core that this process may use; a second thread on the same core does not help."""
    allowed = num_cores()
    return min(allowed, psutil.cpu_count(logical=False) or allowed)
