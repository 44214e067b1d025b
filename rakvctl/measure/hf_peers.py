"""What people would use otherwise: transformers' `generate`, plain and with its two kinds of assisted decoding.

A peer runs the same checkpoint in the same dtype, with the same threads, as transformers itself loads it.
"""

import re
from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.generation.streamers import BaseStreamer

from rakvctl.core.backends.torch_load import pick_device, quiet_transformers
from rakvctl.core.errors import UsageError
from rakvctl.core.models import ModelFiles
from rakvctl.core.pair import ModelPair
from rakvctl.measure.arms import Arm, Outcome, Task
from rakvctl.measure.timing import Clock

# Looking up takes a number of tokens; without one, that which transformers' own documentation suggests.
_PEER = re.compile(r"hf-generate|hf-assisted|hf-prompt-lookup(-[1-9][0-9]?)?")
_LOOKUP_TOKENS = 10


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


def make_peers(
    names: list[str], pair: ModelPair, target: ModelFiles, draft: ModelFiles | None, device: str, clock: Clock
) -> list[Arm]:
    """Load the peers of these names; the models once for all.

    Raises UsageError for a name that is not known, and where a draft model is needed and there is none.
    """
    unknown = [name for name in names if not _PEER.fullmatch(name)]
    if unknown:
        raise UsageError(
            f"there is no peer {unknown[0]}",
            "choose from hf-generate, hf-prompt-lookup, hf-prompt-lookup-K, hf-assisted",
        )
    if "hf-assisted" in names and draft is None:
        raise UsageError("hf-assisted needs a draft model", "name one with --draft, or leave hf-assisted out")
    if not names:
        return []
    dtype = getattr(torch, pair.target.info.dtype)
    model = _load(target, dtype, device)
    options: dict[str, dict[str, Any]] = {name: _options(name) for name in names}
    if "hf-assisted" in names and draft is not None:
        options["hf-assisted"]["assistant_model"] = _load(draft, dtype, device)
    return [HfArm(name, model, pair.codec.end_token_ids, clock, **options[name]) for name in names]


def _options(name: str) -> dict[str, Any]:
    """What `generate` is told beside the prompt."""
    _, is_lookup, number = name.partition("hf-prompt-lookup")
    return {"prompt_lookup_num_tokens": int(number.lstrip("-") or _LOOKUP_TOKENS)} if is_lookup else {}


def _load(files: ModelFiles, dtype: torch.dtype, device: str) -> Any:
    with quiet_transformers():
        model = AutoModelForCausalLM.from_pretrained(
            files.location, dtype=dtype, local_files_only=True, trust_remote_code=False
        )
    return model.eval().to(pick_device(device))
