"""llama-cpp-python itself, plain and with its own prompt lookup, computing as llama.cpp does by default."""

from collections.abc import Callable
from pathlib import Path

from llama_cpp import Llama
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

from rakvctl.core.seams import Clock
from rakvctl.measure.arms import Outcome, Task


class LlamaArm:
    """Greedy `Llama.generate` on the same file, with the same number of threads."""

    def __init__(
        self, name: str, path: Path, lookup_tokens: int, end_token_ids: frozenset[int], num_threads: int, clock: Clock
    ) -> None:
        self.name = name
        self._ends = end_token_ids
        self._clock = clock
        self._llama = Llama(
            str(path),
            n_ctx=0,  # as many positions as the model was trained for
            n_threads=num_threads,
            n_threads_batch=num_threads,
            flash_attn=True,  # llama.cpp's default on a CPU, though not the package's, and the faster one
            draft_model=LlamaPromptLookupDecoding(num_pred_tokens=lookup_tokens) if lookup_tokens else None,
            logits_all=bool(lookup_tokens),  # or it has no room for those of a long prompt
            verbose=False,
        )

    def prepare(self, task: Task) -> Callable[[], Outcome]:
        """It would go on from the prompt before; each task begins with nothing."""
        self._llama.reset()

        def serve() -> Outcome:
            tokens: list[int] = []
            ttft_ms = None
            started = self._clock()
            for token in self._llama.generate(task.prompt, temp=0.0, top_k=1):
                if ttft_ms is None:
                    ttft_ms = (self._clock() - started) * 1e3
                tokens.append(token)
                if token in self._ends or len(tokens) == task.max_new_tokens:
                    break
            return Outcome(token_ids=tuple(tokens), total_ms=(self._clock() - started) * 1e3, ttft_ms=ttft_ms)

        return serve
