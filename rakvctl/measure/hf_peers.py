"""What people would use otherwise: transformers' `generate`, plain and with its two kinds of assisted decoding.

A peer runs the same checkpoint in the same dtype, with the same threads, as transformers itself loads it. Of the
checkpoint's generation config it has what our policies apply, and nothing else.
"""

import json
from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.generation.streamers import BaseStreamer

from rakvctl.core.backends.torch_load import pick_device, quiet_transformers
from rakvctl.core.models import ModelFiles
from rakvctl.core.pair import ModelPair
from rakvctl.core.seams import Clock
from rakvctl.measure.arms import Outcome, Task


class FirstToken(BaseStreamer):  # type: ignore[misc]
    """Notes when the first new token comes; the prompt is put first."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._num_puts = 0
        self.at: float | None = None

    def put(self, value: Any) -> None:
        """Called with the prompt, then with new tokens."""
        self._num_puts += 1
        if self._num_puts == 2:
            self.at = self._clock()

    def end(self) -> None:
        """Nothing more comes."""


class HfArm:
    """transformers' greedy `generate` with some options more."""

    def __init__(self, name: str, model: Any, end_token_ids: frozenset[int], clock: Clock, **options: Any) -> None:
        self.name = name
        self._model = model
        self._ends = sorted(end_token_ids)
        self._clock = clock
        self._options = options

    def prepare(self, task: Task) -> Callable[[], Outcome]:
        """It keeps nothing from task to task."""
        ids = torch.tensor([task.prompt], device=self._model.device)
        mask = torch.ones_like(ids)

        def serve() -> Outcome:
            first_token = FirstToken(self._clock)
            started = self._clock()
            with quiet_transformers():
                output = self._model.generate(
                    ids,
                    attention_mask=mask,
                    max_new_tokens=task.max_new_tokens,
                    do_sample=False,
                    eos_token_id=self._ends or None,
                    pad_token_id=0,
                    streamer=first_token,
                    use_cache=True,
                    **self._options,
                )
            tokens = tuple(output[0, len(task.prompt) :].tolist())
            ended = self._clock()
            ttft_ms = None if first_token.at is None else (first_token.at - started) * 1e3
            return Outcome(token_ids=tokens, total_ms=(ended - started) * 1e3, ttft_ms=ttft_ms)

        return serve


def load_hf_arms(
    options: dict[str, dict[str, Any]],
    pair: ModelPair,
    target: ModelFiles,
    draft: ModelFiles | None,
    device: str,
    clock: Clock,
) -> list[HfArm]:
    """An arm for each name and what `generate` is told there; the models are loaded once for all.

    The one called `hf-assisted` has the draft model too.
    """
    # Whatever dtype another engine has, transformers computes a GGUF file's weights in float32.
    dtype = getattr(torch, pair.target.info.dtype, torch.float32)
    model = _load(target, dtype, device)
    # Through JSON, where tuples become the lists that transformers wants.
    model.generation_config = GenerationConfig(**json.loads(json.dumps(pair.logits_settings.changed)))
    if "hf-assisted" in options and draft is not None:
        options = {**options, "hf-assisted": {"assistant_model": _load(draft, dtype, device)}}
    return [HfArm(name, model, pair.codec.end_token_ids, clock, **told) for name, told in options.items()]


def _load(files: ModelFiles, dtype: torch.dtype, device: str) -> Any:
    with quiet_transformers():
        model = AutoModelForCausalLM.from_pretrained(
            files.location, dtype=dtype, local_files_only=True, trust_remote_code=False
        )
    return model.eval().to(pick_device(device))
