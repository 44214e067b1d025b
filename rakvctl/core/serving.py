"""Prompts served one after another: what goes in, what comes out, and that one which fails leaves the others alone."""

from collections.abc import Callable
from dataclasses import dataclass

from rakvctl.core.errors import RequestError, first_line
from rakvctl.core.runtime import Runtime
from rakvctl.core.types import Completion, Request

PromptId = str | int


@dataclass(frozen=True, slots=True)
class Job:
    """A prompt under its user's id; one that could not be read is the error which says why."""

    prompt_id: PromptId
    request: Request | RequestError


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of a prompt; `worker`: who served it, where there are several."""

    prompt_id: PromptId
    outcome: Completion | RequestError
    worker: int | None = None


def serve(
    runtime: Runtime,
    request: Request | RequestError,
    on_text: Callable[[str], None] = lambda _: None,
    *,
    debugging: bool = False,
) -> Completion | RequestError:
    """Serve one prompt. Where the engine gives up, as for want of memory, that is an error of this prompt alone.

    `debugging` raises what nobody expected instead.
    """
    if isinstance(request, RequestError):
        return request
    try:
        return runtime.run(request, on_text)
    except RequestError as error:
        return error
    except (RuntimeError, MemoryError, IndexError, ValueError) as error:
        if debugging:
            raise
        return RequestError(
            f"{type(error).__name__} while generating: {first_line(error)}",
            "RAKVCTL_DEBUG=1 stops there and shows where",
        )
