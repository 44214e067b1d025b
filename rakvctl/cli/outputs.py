"""The file that `--out` names, and what `--resume` finds in it."""

import json
import os
import shutil
import tempfile
from collections import Counter
from pathlib import Path
from typing import TextIO

from rakvctl.cli.inputs import PromptId
from rakvctl.core.errors import RakvError, UsageError


def refuse_overwriting(path: Path, prompt_files: tuple[Path, ...]) -> None:
    """Raise UsageError where the results would go into one of the files that prompts are read from."""
    try:
        is_read = path.exists() and any(path.samefile(file) for file in prompt_files)
    except OSError as error:
        raise _cannot_write(path, error) from error
    if is_read:
        raise UsageError(f"{path} is read and written", "give --out another file than the prompts'")


def open_output(path: Path) -> TextIO:
    """Open a file for new results, what it holds still in it. Raises RakvError where it cannot be written.

    `empty` it once nothing stands in the way of results any more: a model that is not there costs no results.
    """
    try:
        return path.open("a", encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise _cannot_write(path, error) from error


def empty(stream: TextIO, path: Path) -> None:
    """Drop what a file holds; a device or a pipe holds nothing."""
    if path.is_file():
        stream.truncate(0)


def resume_output(path: Path) -> tuple[TextIO, Counter[PromptId]]:
    """Open a file to continue it; with it, how often each id already has a complete record there.

    Error records and a line that was cut off half-way are dropped first: their prompts run again. Raises RakvError
    where the file cannot be written, and UsageError where it holds something else than records.
    """
    try:
        content = path.read_bytes() if path.exists() else b""
        lines = content.splitlines()
        complete = [(prompt_id, line) for line in lines if (prompt_id := _complete_id(line)) is not None]
        if any(not _is_record(line) for line in content.split(b"\n")[:-1] if line.strip()):
            raise UsageError(f"{path} holds other lines than records", "give --out a file that rakvctl has written")
        if len(complete) < len(lines) or (content and not content.endswith(b"\n")):
            _replace(path.resolve(), [line for _, line in complete])
        stream = path.open("a", encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise _cannot_write(path, error) from error
    return stream, Counter(prompt_id for prompt_id, _ in complete)


def _is_record(line: bytes) -> bool:
    """Whether a line is a JSON object with an id: a completion's record or an error's."""
    try:
        record = json.loads(line)
    except ValueError:
        return False
    return isinstance(record, dict) and "id" in record


def _complete_id(line: bytes) -> PromptId | None:
    """The id of a line that holds the record of a finished completion."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    is_complete = isinstance(record, dict) and isinstance(record.get("text"), str) and "error" not in record
    prompt_id = record.get("id") if is_complete else None
    return prompt_id if isinstance(prompt_id, str | int) else None


def _replace(path: Path, lines: list[bytes]) -> None:
    """Write the lines in place of the file's content, all or nothing; who may read it stays as it was."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with open(descriptor, "wb") as unfinished:
            unfinished.writelines(line + b"\n" for line in lines)
        shutil.copymode(path, name)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def _cannot_write(path: Path, error: OSError) -> RakvError:
    return RakvError(f"cannot write {path}: {error.strerror}", "give --out a file in an existing, writable directory")
