"""The file that `--out` names, and what `--resume` finds in it."""

import json
import os
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from rakvctl.cli.prompt_files import file_status
from rakvctl.core.descriptors import open_descriptor
from rakvctl.core.errors import RakvError, UsageError
from rakvctl.core.files import replace_file
from rakvctl.core.serving import PromptId


def refuse_overwriting(path: Path | None, prompt_files: tuple[os.stat_result, ...]) -> None:
    """Raise UsageError where the results would go into one of the files that prompts are read from.

    `path` None is stdout, and with it whatever file the shell has put there.
    """
    written = file_status(sys.stdout) if path is None else _status(path)
    if written is not None and any(os.path.samestat(written, file) for file in prompt_files):
        raise UsageError(
            f"{path or 'the file on stdout'} is read and written", "give --out another file than the prompts'"
        )


def _status(path: Path) -> os.stat_result | None:
    try:
        return path.stat() if path.exists() else None
    except OSError as error:
        raise _cannot_write(path, error) from error


def open_output(path: Path) -> TextIO:
    """Open a file for new results, what it holds still in it. Raises RakvError where it cannot be written.

    `empty` it once nothing stands in the way of results any more: a model that is not there costs no results. What the
    shell has opened, as behind /dev/stdout, is written to from where it is.
    """
    try:
        descriptor = open_descriptor(path)
        if descriptor is None:
            return path.open("a", encoding="utf-8", errors="backslashreplace")
        os.write(descriptor, b"")  # fails where it is open for reading only
        return open(os.dup(descriptor), "w", encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise _cannot_write(path, error) from error


def empty(stream: TextIO, path: Path) -> None:
    """Drop what a file holds; a device or a pipe holds nothing, and what the shell has opened is added to."""
    if path.is_file() and open_descriptor(path) is None:
        stream.truncate(0)


def resume_output(path: Path) -> tuple[TextIO, Counter[PromptId]]:
    """Open a file to continue it; with it, how often each id already has a complete record there.

    Error records and a line that was cut off half-way are dropped first: their prompts run again. Raises RakvError
    where the file cannot be written, and UsageError where it holds something else than records or the shell has it
    open: it may not be replaced then.
    """
    if open_descriptor(path) is not None:
        raise UsageError(f"--resume cannot go on with {path}, which is already open", "give --out a file of its own")
    finished, is_whole = Counter[PromptId](), True
    try:
        for line, prompt_id in _lines(path):
            is_whole = is_whole and prompt_id is not None and line.endswith(b"\n")
            if prompt_id is not None:
                finished[prompt_id] += 1
        if not is_whole:
            kept = (line.removesuffix(b"\n") + b"\n" for line, prompt_id in _lines(path) if prompt_id is not None)
            replace_file(path.resolve(), kept)
        stream = path.open("a", encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise _cannot_write(path, error) from error
    return stream, finished


def _lines(path: Path) -> Iterator[tuple[bytes, PromptId | None]]:
    """Each line of a file, with the id if it is a complete record. Raises UsageError where it is no record at all."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for line in file:
            record = _record(line)
            # Only what no line break follows may be cut off.
            if record is None and line.strip() and line.endswith(b"\n"):
                raise UsageError(f"{path} holds other lines than records", "give --out a file that rakvctl has written")
            yield line, record["id"] if record and _is_complete(record) else None


def _record(line: bytes) -> dict[str, Any] | None:
    """The record of a completion or an error: a JSON object with an id. None for any other line."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and "id" in record else None


def _is_complete(record: dict[str, Any]) -> bool:
    """Whether a record is that of a finished completion."""
    return isinstance(record["id"], str | int) and isinstance(record.get("text"), str) and "error" not in record


def _cannot_write(path: Path, error: OSError) -> RakvError:
    return RakvError(f"cannot write {path}: {error.strerror}", "give --out a file in an existing, writable directory")
