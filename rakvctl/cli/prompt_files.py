"""Prompt files: opened, their format found out, and cut into pieces of which each knows where it stood."""

import codecs
import io
import json
import os
import stat
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import IO, Any, BinaryIO

from rakvctl.cli.options import InputFormat
from rakvctl.core.errors import RakvError, UsageError

STDIN = "-"


@dataclass(frozen=True, slots=True)
class Piece:
    """The bytes of one prompt. `place` is for errors, such as `p.jsonl, line 57`; empty for all of stdin."""

    raw: bytes
    place: str


@dataclass(frozen=True, slots=True)
class PromptFile:
    """An open file of a known format; `head` are the lines that were read to find the format out."""

    file: BinaryIO
    name: str
    kind: InputFormat
    head: list[bytes]
    option: str | None

    def pieces(self) -> Iterator[Piece]:
        """The whole as one text, or line by line without blank ones; closes the file. Raises RakvError."""
        name = "" if self.name == STDIN else self.name
        try:
            with self.file:
                if self.kind is InputFormat.TEXT:
                    yield Piece(b"".join([*self.head, self.file.read()]), name)
                    return
                for number, line in enumerate(chain(self.head, self.file), start=1):
                    if not _is_blank(line):
                        yield Piece(line, f"{name}, line {number}" if name else f"line {number}")
        except OSError as error:
            raise _cannot_read(self.name, self.option, error) from error


def open_file(name: str, input_format: InputFormat, option: str | None) -> PromptFile:
    """Open a file that `option` names. By itself it is JSON Lines if it is called so or begins with a line of it.

    Blank lines before that are none. Raises RakvError where the file cannot be read.
    """
    if name == STDIN and sys.stdin is None:
        ways = f"as an argument or with {option} FILE" if option else "as an argument"
        raise UsageError("stdin is closed", f"give the prompt {ways}")
    try:
        file = _stdin() if name == STDIN else open(name, "rb")  # noqa: SIM115 - closed by `pieces`
        head = _head(file) if input_format is InputFormat.AUTO else []
    except OSError as error:
        raise _cannot_read(name, option, error) from error
    if input_format is InputFormat.AUTO:
        is_jsonl = Path(name).suffix.lower() in {".jsonl", ".ndjson"} or _is_json_line(head[-1])
        input_format = InputFormat.JSONL if is_jsonl else InputFormat.TEXT
    return PromptFile(file, name, input_format, head, option)


def _stdin() -> BinaryIO:
    """A reader of our own on stdin: a thread that waits in it holds its lock, and Python's own must be free to exit."""
    try:
        return open(os.dup(sys.stdin.fileno()), "rb")
    except io.UnsupportedOperation:  # in memory
        return sys.stdin.buffer


def file_status(stream: IO[Any]) -> os.stat_result | None:
    """What tells the file on disk that a stream reads or writes from others; None for pipes, devices and the like."""
    try:
        status = os.fstat(stream.fileno())
    except io.UnsupportedOperation:  # in memory
        return None
    return status if stat.S_ISREG(status.st_mode) else None


def _head(file: BinaryIO) -> list[bytes]:
    """The first lines, up to the first that is not blank; the last of them is empty where there is none."""
    lines = [file.readline()]
    while lines[-1] and _is_blank(lines[-1]):
        lines.append(file.readline())
    return lines


def _is_json_line(line: bytes) -> bool:
    """Whether a line is a JSON object, or was meant as one with a prompt and is damaged."""
    line = line.removeprefix(codecs.BOM_UTF8)
    if not line.lstrip().startswith(b"{"):
        return False
    if b'"prompt"' in line or b'"messages"' in line:
        return True
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def _is_blank(line: bytes) -> bool:
    return not line.removeprefix(codecs.BOM_UTF8).strip()


def _cannot_read(name: str, option: str | None, error: OSError) -> RakvError:
    where = "stdin" if name == STDIN else name or "a file without a name"
    hint = f"check the path given with {option}" if option else "check its path"
    return RakvError(f"cannot read {where}: {error.strerror}", hint)
