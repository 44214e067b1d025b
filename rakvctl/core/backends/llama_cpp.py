"""llama.cpp as a backend, through the C functions that llama-cpp-python binds: a GGUF file on a CPU, batch size one."""

import ctypes
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from importlib.metadata import version

import numpy as np
from llama_cpp import llama_cpp as api

from rakvctl.core.array_logits import ArrayLogits
from rakvctl.core.backends.llama_cache import LlamaCache
from rakvctl.core.backends.llama_model import BATCH_TOKENS, ContextOptions, LlamaContext, LlamaModel
from rakvctl.core.hardware import free_memory_bytes
from rakvctl.core.seams import EngineInfo

# As many sequences one context can hold; each of them asks for what follows one token.
_ASKING_SEQUENCES = 256


class _Batch:
    """llama.cpp's input of a pass, filled through arrays that lie over it."""

    def __init__(self, num_sequences: int) -> None:
        self.raw = api.llama_batch_init(BATCH_TOKENS, 0, num_sequences)
        weakref.finalize(self, api.llama_batch_free, self.raw)
        shape = (BATCH_TOKENS,)
        self.tokens, self.positions, self.num_sequences, self.wants_logits = (
            np.ctypeslib.as_array(field, shape)
            for field in (self.raw.token, self.raw.pos, self.raw.n_seq_id, self.raw.logits)
        )
        self.num_sequences[:] = 1
        for index in range(BATCH_TOKENS):
            self.raw.seq_id[index][0] = 0

    def run(self, context: LlamaContext, num_tokens: int, num_logits: int, vocab_size: int) -> np.ndarray:
        """One pass; the logits asked for, [num_logits, vocab_size], copied. Raises RuntimeError where it fails."""
        self.raw.n_tokens = num_tokens
        failure = api.llama_decode(context.pointer, self.raw)
        if failure:
            raise RuntimeError(f"llama.cpp cannot run these tokens (llama_decode gave {failure})")
        scores = np.empty((num_logits, vocab_size), dtype=np.float32)
        ctypes.memmove(scores.ctypes.data, api.llama_get_logits(context.pointer), scores.nbytes)
        return scores


class LlamaBackend:
    """One GGUF model on llama.cpp."""

    prefill_chunk_tokens = BATCH_TOKENS
    # The size of the context, not the length of the sequence, decides about rotary frequencies.
    prefix_stable_positions = None
    recomputes_when_unstable = False

    def __init__(self, model: LlamaModel, options: ContextOptions, *, vocab_size: int, digest: str) -> None:
        """`vocab_size`: ids from here on are padding and never chosen. `digest`: see `EngineInfo`.

        `model_key` is for the loader to say.
        """
        self._model = model
        self._options = options
        self._digest = digest
        self.model_key = digest
        self.vocab_size = vocab_size
        self.can_rollback = model.keeps_all_positions
        self._cache = LlamaCache(model, options)
        self._batch = _Batch(1)

    @property
    def cache(self) -> LlamaCache:
        """The states of the one sequence."""
        return self._cache

    @property
    def max_positions(self) -> int | None:
        """The number of positions the model was made for, or what the user allows it."""
        limits = [limit for limit in (self._model.num_trained_positions, self._options.max_positions) if limit]
        return min(limits) if limits else None

    @property
    def info(self) -> EngineInfo:
        """Threads, number types and versions."""
        return EngineInfo(
            backend=f"llama.cpp, {self._options.label}",
            device="cpu",
            driver=self._model.processor_features,
            num_threads=self._options.num_threads,
            dtype=self._model.file_type,
            versions=f"llama-cpp-python {version('llama-cpp-python')}",
            weight_bytes=self._model.num_bytes,
            digest=self._digest,
        )

    def free_bytes(self) -> int | None:
        """What the machine has left."""
        return free_memory_bytes()

    def memory_reader(self, num_bytes: int) -> Callable[[], None]:
        """Sums a buffer of that size, on all threads."""
        parts = np.array_split(np.ones(num_bytes // 4, dtype=np.float32), self._options.num_threads)
        pool = ThreadPoolExecutor(len(parts))

        def read() -> None:
            # numpy lets go of the interpreter while it adds up.
            list(pool.map(np.sum, parts))

        return read

    def synchronize(self) -> None:
        """A pass is over when it returns."""

    def forward(self, token_ids: Sequence[int], num_logits: int) -> ArrayLogits:
        """Append tokens to the cache; logits of the last `num_logits`, [num_logits, vocab_size]."""
        length, num_tokens = self._cache.length, len(token_ids)
        self._cache.reserve(length + num_tokens)
        parts = []
        for start in range(0, num_tokens, BATCH_TOKENS):
            part = token_ids[start : start + BATCH_TOKENS]
            num_wanted = max(0, num_logits - (num_tokens - start - len(part)))
            parts.append(self._pass(part, length + start, min(num_wanted, len(part))))
        self._cache.commit(num_tokens)
        wanted = [part for part in parts if len(part)]
        return ArrayLogits(wanted[0] if len(wanted) == 1 else np.concatenate(wanted))

    def _pass(self, token_ids: Sequence[int], position: int, num_logits: int) -> np.ndarray:
        batch, count = self._batch, len(token_ids)
        batch.tokens[:count] = token_ids
        batch.positions[:count] = np.arange(position, position + count)
        batch.wants_logits[:count] = 0
        batch.wants_logits[count - num_logits : count] = 1
        return batch.run(self._cache.context, count, num_logits, self._model.vocab_size)[:, : self.vocab_size]

    def likeliest_after(self, before: int, token_ids: Sequence[int]) -> list[int]:
        """Passes in which `before` is the first position of many sequences, and each has one token of its own."""
        if not self.can_rollback:
            return []
        best: list[int] = []
        for start in range(0, len(token_ids), _ASKING_SEQUENCES):
            scores = self._asking.ask(before, token_ids[start : start + _ASKING_SEQUENCES])
            best += ArrayLogits(scores[:, : self.vocab_size]).argmax()
        return best

    @cached_property
    def _asking(self) -> "_Asking":
        return _Asking(self._model, self._options)


class _Asking:
    """A context of its own for what follows pairs of tokens."""

    def __init__(self, model: LlamaModel, options: ContextOptions) -> None:
        self._context = model.make_context(options, BATCH_TOKENS, _ASKING_SEQUENCES)
        self._batch = _Batch(_ASKING_SEQUENCES)
        self._vocab_size = model.vocab_size

    def ask(self, before: int, token_ids: Sequence[int]) -> np.ndarray:
        """Scores after `before` and each of the tokens, [len(token_ids), all there are]."""
        batch, count = self._batch, len(token_ids)
        batch.tokens[: count + 1] = [before, *token_ids]
        batch.positions[0], batch.positions[1 : count + 1] = 0, 1
        batch.wants_logits[0], batch.wants_logits[1 : count + 1] = 0, 1
        batch.num_sequences[0] = count
        for sequence in range(count):
            batch.raw.seq_id[0][sequence] = sequence
            batch.raw.seq_id[sequence + 1][0] = sequence
        api.llama_memory_clear(self._context.memory, False)
        return batch.run(self._context, count + 1, count, self._vocab_size)
