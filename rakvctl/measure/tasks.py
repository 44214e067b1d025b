"""From workloads to tasks: prompts as tokens, and how much of each is stored before it comes."""

import math
import random
from collections.abc import Iterator, Sequence

from rakvctl.core.errors import RequestError, errors_at
from rakvctl.core.text import TextCodec
from rakvctl.core.types import BUCKET_TOKENS
from rakvctl.measure.arms import Task
from rakvctl.measure.bench import BenchPrompt
from rakvctl.measure.workloads import Content, Workload

# Nothing is stored; a longer or shorter part of the prompt is, as where prompts share a beginning; all of it is; all of
# it is and its answer is remembered too.
HITS = ("cold", "shared", "exact", "repeat")
_SHARED_PART = 0.75
# The controller study's requests: from and to.
_PROMPT_TOKENS, _NEW_TOKENS = (32, 1000), (16, 96)


def make_tasks(
    codec: TextCodec, workloads: Sequence[Workload], hits: Sequence[str], max_new_tokens: int, max_positions: int | None
) -> Iterator[BenchPrompt]:
    """Every prompt under every kind of hit; prompts that do not fit the model with what follows them are left out."""
    for workload in workloads:
        for prompt_id, prompt in encode_all(codec, workload):
            if max_positions is not None and len(prompt) + max_new_tokens > max_positions:
                continue
            for hit in hits:
                stored = stored_part(prompt, hit)
                if hit in ("cold", "repeat") or stored is not None:
                    task = Task(prompt, max_new_tokens, stored, answered=hit == "repeat")
                    yield BenchPrompt(f"{workload.name} {hit}", prompt_id, task)


def encode_all(codec: TextCodec, workload: Workload) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Id and tokens of each prompt. Raises RequestError that says where a prompt stands which cannot be encoded."""
    places = workload.places or ("",) * len(workload.prompts)
    for (prompt_id, content), place in zip(workload.prompts, places, strict=True):
        with errors_at(place):
            prompt = encode(codec, content)
        yield prompt_id, prompt


def encode(codec: TextCodec, content: Content) -> tuple[int, ...]:
    """Tokens of a text or a chat; a model without a chat template reads the messages one after another."""
    if isinstance(content, str):
        return codec.encode_prompt(content)
    if codec.has_chat_template:
        return codec.encode_chat(content)
    return codec.encode("\n\n".join(message["content"] for message in content))


def stored_part(prompt: tuple[int, ...], hit: str) -> tuple[int, ...] | None:
    """What is stored before the prompt comes; None where that is nothing, or too short to be stored."""
    if hit in ("cold", "repeat"):
        return None
    stored = prompt if hit == "exact" else prompt[: round(_SHARED_PART * len(prompt))]
    return stored if len(stored) >= BUCKET_TOKENS else None


def controller_tasks(
    codec: TextCodec, workloads: Sequence[Workload], num_tasks: int, seed: int, max_positions: int | None
) -> Iterator[Task]:
    """A grid of prompt lengths from 32 to 1,000 tokens, 16 to 96 new tokens, and kinds of hit.

    Prompts are cut from the workloads' texts, joined where one alone is too short, and are as short as the model needs
    them. Raises RequestError where there is no text, or no room.
    """
    longest = min(_PROMPT_TOKENS[1], (max_positions or math.inf) - _NEW_TOKENS[1])
    if longest < _PROMPT_TOKENS[0]:
        raise RequestError(f"the model has only {max_positions} positions", "the study needs some 150")
    rng = random.Random(seed)  # noqa: S311 - not for secrets
    texts = [prompt for workload in workloads for _, prompt in encode_all(codec, workload)]
    if not texts:
        raise RequestError("the workloads hold no prompt", "raise --limit, or give another workload")
    for number in range(num_tasks):
        length = round(_PROMPT_TOKENS[0] * (longest / _PROMPT_TOKENS[0]) ** rng.random())
        ids: list[int] = []
        while len(ids) < length:
            ids += rng.choice(texts)
        prompt = tuple(ids[:length])
        shared = rng.randint(BUCKET_TOKENS + 1, length)
        stored = (None, prompt[:shared], prompt)[number % 3]
        yield Task(prompt, rng.randint(*_NEW_TOKENS), stored)
