"""Prompts served one after another: what goes in, what comes out, and that one which fails leaves the others alone."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from rakvctl.core.errors import RakvError, RequestError, first_line
from rakvctl.core.runtime import Runtime
from rakvctl.core.types import Completion, Request

PromptId = str | int
Result = TypeVar("Result")


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


def attempt(operation: Callable[[], Result], doing: str, *, debugging: bool = False) -> Result | RequestError:
    """The result of an operation on one prompt; an error of any class becomes the error of that prompt.

    KeyboardInterrupt and SystemExit end the run. `debugging` raises what is not a RequestError.
    """
    try:
        return operation()
    except RequestError as error:
        return error
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    # Engines and tokenizers are third-party code: a panic in the tokenizer's Rust code is not even an `Exception`.
    except BaseException as error:
        if debugging:
            raise
        if isinstance(error, RakvError):
            return RequestError(error.message, error.hint)
        return RequestError(
            f"{type(error).__name__} while {doing}: {first_line(error)}",
            "RAKVCTL_DEBUG=1 stops there and shows where",
        )


def serve(
    runtime: Runtime,
    request: Request | RequestError,
    on_text: Callable[[str], None] = lambda _: None,
    *,
    debugging: bool = False,
) -> Completion | RequestError:
    """Serve one prompt. Where the engine fails, as for want of memory, that is an error of this prompt alone.

    Raises what `on_text` raises: output that cannot be written fails for every prompt. `debugging` raises what nobody
    expected instead of returning it.
    """
    if isinstance(request, RequestError):
        return request
    output_errors: list[BaseException] = []

    def write(piece: str) -> None:
        try:
            on_text(piece)
        except BaseException as error:
            output_errors.append(error)
            raise

    outcome = attempt(lambda: runtime.run(request, write), "generating", debugging=debugging)
    if output_errors:
        raise output_errors[0]
    return _after_failure(runtime, outcome, debugging) if isinstance(outcome, RequestError) else outcome


def _after_failure(runtime: Runtime, error: RequestError, debugging: bool) -> RequestError:
    """Clear the KV caches for the next prompt; where that fails too, the error says so."""
    problem = attempt(runtime.clear, "clearing the KV caches", debugging=debugging)
    if isinstance(problem, RequestError):
        return RequestError(f"{error.message}; its KV caches could not be cleared: {problem.message}", error.hint)
    return error


def settle(runtime: Runtime, notify: Callable[[str], None], *, debugging: bool = False) -> None:
    """Write what was put off; `notify` hears of what fails, which costs no prompt its answer."""
    problem = attempt(runtime.settle, "writing to the persistent prefix cache", debugging=debugging)
    if isinstance(problem, RequestError):
        notify(f"{problem.message}; {problem.hint}")
