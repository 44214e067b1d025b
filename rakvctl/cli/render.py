"""Results out: the record of a completion, the writers of text and JSON Lines, the statistics, the errors."""

import json
import os
import sys
from collections.abc import Mapping
from typing import Any, Protocol, TextIO

from rakvctl.core.errors import RakvError
from rakvctl.core.files import to_json
from rakvctl.core.serving import PromptId
from rakvctl.core.types import Completion


def completion_record(prompt_id: PromptId, completion: Completion) -> dict[str, Any]:
    """The result record of the command line's contract; times in milliseconds."""
    action = completion.decision.action
    return {
        "id": prompt_id,
        "text": completion.text,
        "finish_reason": completion.finish_reason,
        "prompt_tokens": completion.num_prompt_tokens,
        "completion_tokens": len(completion.token_ids),
        "reused_tokens": completion.num_reused_tokens,
        "policy": completion.decision.policy,
        "action": {
            "reuse": action.reuse,
            "draft_len": action.draft_len,
            "drafter": completion.decision.drafter,
        },
        "predicted_ms": _rounded(completion.predicted_ms),
        "total_ms": _rounded(completion.total_ms),
        "ttft_ms": _rounded(completion.ttft_ms),
        "tpot_ms": _rounded(completion.tpot_ms),
        "tokens_per_s": _rounded(len(completion.token_ids) / completion.total_ms * 1e3),
        "num_draft_tokens": completion.num_draft_tokens,
        "num_accepted_tokens": completion.num_accepted_tokens,
        "num_rescored_tokens": completion.num_rescored_tokens,
        "draft_acceptance_rate": _rounded(completion.draft_acceptance_rate),
        "mean_acceptance_length": _rounded(completion.mean_acceptance_length),
        "rounds_by_draft_len": {str(draft_len): count for draft_len, count in completion.rounds_by_draft_len.items()},
    }


def error_record(prompt_id: PromptId, error: RakvError) -> dict[str, Any]:
    """The record of a prompt that could not be served."""
    return {
        "id": prompt_id,
        "text": None,
        "finish_reason": "error",
        "error": error.message,
        "hint": error.hint,
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


def print_error(message: str, hint: str) -> None:
    """Two lines on stderr, whatever line breaks the texts quote."""
    for label, text in (("Error", message), ("Hint", hint)):
        print(f"{label}: {' '.join(text.split())}", file=sys.stderr)  # noqa: T201


def print_note(message: str) -> None:
    """One line on stderr."""
    print(f"Note: {message}", file=sys.stderr)  # noqa: T201


def print_line(text: str) -> None:
    """One line on stdout."""
    write_out(sys.stdout, text + "\n")


def print_json(content: Mapping[str, Any]) -> None:
    """One JSON object on stdout; what is no number becomes null, as JSON knows no NaN."""
    write_out(sys.stdout, to_json(content, indent=2) + "\n")


def debugging() -> bool:
    """Whether the user asked for tracebacks with RAKVCTL_DEBUG."""
    return os.environ.get("RAKVCTL_DEBUG", "0") not in ("", "0")


class Writer(Protocol):
    """Where results go, one prompt after another."""

    def text(self, piece: str) -> None:
        """A piece of the present completion's text, as it becomes final."""
        ...

    def done(self, prompt_id: PromptId, completion: Completion) -> None: ...

    def failed(self, prompt_id: PromptId, error: RakvError) -> None: ...


def write_out(stream: TextIO, text: str) -> None:
    """Write and flush. Raises RakvError where that cannot be; a closed pipe stays what it is."""
    try:
        stream.write(text)
        stream.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        # Python tries once more when it closes the stream: let it write into nothing.
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        raise RakvError(
            f"cannot write the results: {error.strerror}", "free some space, or give --out a file elsewhere"
        ) from error


class JsonlWriter:
    """One JSON object a line, each written as its prompt finishes."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def text(self, piece: str) -> None:
        """Records are written whole."""

    def done(self, prompt_id: PromptId, completion: Completion) -> None:
        """Write the record of a completion."""
        self._write(completion_record(prompt_id, completion))

    def failed(self, prompt_id: PromptId, error: RakvError) -> None:
        """Write an error record."""
        self._write(error_record(prompt_id, error))

    def _write(self, record: dict[str, Any]) -> None:
        # What an error quotes, such as the name of a file, need not be Unicode; JSON is.
        text = json.dumps(record, ensure_ascii=False).encode("utf-8", "replace").decode()
        write_out(self._stream, text + "\n")


class TextWriter:
    """The text alone, streamed; completions of several prompts are separated by a blank line."""

    def __init__(self, stream: TextIO, several: bool) -> None:
        self._stream = stream
        self._several = several
        self._num_written = 0
        self._last_piece = ""

    def text(self, piece: str) -> None:
        """Write and flush a piece."""
        separator = "\n" if self._last_piece == "" and self._num_written else ""
        self._last_piece = piece
        write_out(self._stream, separator + piece)

    def done(self, prompt_id: PromptId, completion: Completion) -> None:
        """End the text's last line."""
        if not self._last_piece:
            self.text("\n")
        self._end_text()

    def _end_text(self) -> None:
        if not self._last_piece.endswith("\n"):
            write_out(self._stream, "\n")
        self._last_piece = ""
        self._num_written += 1

    def failed(self, prompt_id: PromptId, error: RakvError) -> None:
        """Errors are no results: they go to stderr. A text that broke off ends its line."""
        if self._last_piece:
            self._end_text()
        print_error(f"prompt {prompt_id}: {error.message}" if self._several else error.message, error.hint)
