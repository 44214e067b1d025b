"""Prompt files: opened, their format found out, and cut into pieces of which each knows where it stood."""

import codecs
import io
import json
import os
import stat
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import IO, Any, BinaryIO

from rakvctl.cli.json_document import json_lines
from rakvctl.cli.options import InputFormat
from rakvctl.cli.piped import first_byte
from rakvctl.core.errors import RakvError, UsageError

STDIN = "-"
CONVERT_HINT = "convert it to UTF-8: iconv -f UTF-16 -t UTF-8 FILE"


@dataclass(frozen=True, slots=True)
class Piece:
    """The bytes of one prompt. `place` is for errors, such as `p.jsonl, line 57`; empty for all of stdin."""

    raw: bytes
    place: str


@dataclass(frozen=True, slots=True)
class PromptFile:
    """An open file of a known format; `head` are the lines that were read to find the format out.

    `unit`: what these are called in errors.
    """

    file: BinaryIO
    name: str
    kind: InputFormat
    head: list[bytes]
    option: str | None
    unit: str = "line"

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
                        yield Piece(line, f"{name}, {self.unit} {number}" if name else f"{self.unit} {number}")
        except OSError as error:
            raise _cannot_read(self.name, self.option, error) from error


def open_file(name: str, input_format: InputFormat, option: str | None) -> PromptFile:
    """Open a file that `option` names. By itself it is JSON Lines if it is called so or begins with a line of it.

    Blank lines before that are none. What begins like any other JSON is read whole, as it may be one document of
    prompts. Raises RakvError where the file cannot be read, or is no UTF-8.
    """
    if name == STDIN and sys.stdin is None:
        ways = f"as an argument or with {option} FILE" if option else "as an argument"
        raise UsageError("stdin is closed", f"give the prompt {ways}")
    try:
        file = _stdin() if name == STDIN else open(name, "rb")  # noqa: SIM115 - closed by `pieces`
        opened = PromptFile(file, name, input_format, [], option)
        return opened if input_format is not InputFormat.AUTO else _find_format(opened)
    except OSError as error:
        raise _cannot_read(name, option, error) from error


def open_piped(input_format: InputFormat, notify: Callable[[str], None]) -> PromptFile | None:
    """Text on stdin that goes with a prompt argument, None where there is none.

    Raises UsageError where it is said to be lines, or never comes, RakvError where it cannot be read.
    """
    if sys.stdin is None or sys.stdin.isatty():
        return None
    try:
        file = _stdin()
        first = first_byte(file, notify)
    except OSError as error:
        raise _cannot_read(STDIN, None, error) from error
    if not first and file is not sys.stdin.buffer:
        file.close()
    if first and input_format in (InputFormat.LINES, InputFormat.JSONL):
        raise UsageError(
            f"a prompt argument and {input_format.value} on stdin",
            "drop the argument, or name stdin too with -f - to run both, or give it </dev/null",
        )
    return PromptFile(file, STDIN, InputFormat.TEXT, [first], None) if first else None


def _find_format(opened: PromptFile) -> PromptFile:
    """The file with its format, found out from its name and its first lines, or all of them."""
    head, suffix = _head(opened.file), Path(opened.name).suffix.lower()
    line, where = head[-1].removeprefix(codecs.BOM_UTF8).lstrip(), _where(opened.name)
    problem = encoding_problem(b"".join(head))
    if problem is not None:
        raise RakvError(f"{where} is not UTF-8: {problem}", CONVERT_HINT)
    as_jsonl = replace(opened, kind=InputFormat.JSONL, head=head)
    if suffix in {".jsonl", ".ndjson"} or _is_json_object(line):
        return as_jsonl
    is_json = suffix == ".json"
    if is_json or line.startswith((b"[", b"{")):
        raw = b"".join([*head, opened.file.read()])
        # A first line that was meant as one of JSON Lines and is damaged costs no other line.
        head = list(io.BytesIO(raw))
        as_jsonl = replace(as_jsonl, head=head)
        begins_with_prompt = line.startswith(b"{") and (b'"prompt"' in line or b'"messages"' in line)
        try:
            prompts = json_lines(raw, where, is_json=is_json, may_be_strings=is_json or opened.name == STDIN)
        except RakvError:
            if not begins_with_prompt:
                raise
            prompts = None
        if prompts is not None:
            return replace(as_jsonl, head=prompts, unit="prompt")
        if begins_with_prompt:
            return as_jsonl
    return replace(opened, kind=InputFormat.TEXT, head=head)


def encoding_problem(raw: bytes) -> str | None:
    """What tells that bytes are no text in UTF-8, even where they decode; None for nothing."""
    if raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE, codecs.BOM_UTF32_BE)):
        return "it begins with the mark of UTF-16 or UTF-32"
    return "it has NUL bytes, as UTF-16 or a binary file" if b"\0" in raw else None


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


def _is_json_object(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def _is_blank(line: bytes) -> bool:
    return not line.removeprefix(codecs.BOM_UTF8).strip()


def _where(name: str) -> str:
    return "stdin" if name == STDIN else name or "a file without a name"


def _cannot_read(name: str, option: str | None, error: OSError) -> RakvError:
    hint = f"check the path given with {option}" if option else "check its path"
    return RakvError(f"cannot read {_where(name)}: {error.strerror}", hint)
