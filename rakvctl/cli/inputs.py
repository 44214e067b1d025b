"""Prompts in: from the argument, from files, from stdin; lazily, and a bad line is no reason to lose the others."""

import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from typing import Any

from rakvctl.cli import render
from rakvctl.cli.options import InputFormat
from rakvctl.cli.prompt_fields import Content, content_of, sampling_of
from rakvctl.cli.prompt_files import (
    CONVERT_HINT,
    STDIN,
    Piece,
    PromptFile,
    encoding_problem,
    file_status,
    open_file,
    open_piped,
)
from rakvctl.core.errors import RequestError, UsageError, errors_at
from rakvctl.core.serving import Job, PromptId, attempt
from rakvctl.core.text import TextCodec
from rakvctl.core.types import Request, SamplingParams


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as text or as a chat, with the sampling parameters in force for it; `place`: see `Piece`."""

    id: PromptId
    content: Content
    sampling: SamplingParams
    place: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class BadPrompt:
    """A line that holds no prompt, and why."""

    id: PromptId
    error: RequestError


@dataclass(frozen=True, slots=True)
class PromptSource:
    """All prompts of one call. `several`: from what can hold more than one. `files`: those on disk that are read."""

    prompts: Iterator[Prompt | BadPrompt]
    several: bool
    files: tuple[os.stat_result, ...] = ()


def open_prompts(
    argument: str | None,
    files: list[str],
    input_format: InputFormat,
    sampling: SamplingParams,
    *,
    option: str | None = None,
    notify: Callable[[str], None] = render.print_note,
) -> PromptSource:
    """Find out where prompts come from; files are opened now, so that a missing one is known before anything runs.

    An argument without files takes in what is on stdin, if there is something. `option` is the one that names the
    files, for hints. Raises UsageError where there is no prompt at all, RakvError
    for a file that cannot be read.
    """
    if argument is None and not files:
        if sys.stdin is None or sys.stdin.isatty():
            raise UsageError("there is no prompt", "give one as an argument, with -f FILE, or through a pipe")
        argument = STDIN
    if argument == STDIN:
        argument, files = None, [STDIN, *files]
    if files.count(STDIN) > 1:
        raise UsageError("stdin is named twice", "it can be read once: name it once")
    piped = open_piped(input_format, notify) if argument is not None and not files else None
    streams = [open_file(name, input_format, option) for name in files]
    several = len(files) + (argument is not None) > 1 or any(stream.kind is not InputFormat.TEXT for stream in streams)

    def prompts() -> Iterator[Prompt | BadPrompt]:
        if argument is not None:
            yield Prompt(1, argument, sampling) if piped is None else _join(argument, piped, sampling)
        number = 1 if argument is not None else 0
        for stream in streams:
            for piece in stream.pieces():
                number += 1
                yield _read(piece, stream.kind, number, sampling)

    opened = [*streams, piped] if piped else streams
    statuses = [file_status(stream.file) for stream in opened]
    return PromptSource(prompts(), several, tuple(status for status in statuses if status is not None))


def _join(argument: str, piped: PromptFile, sampling: SamplingParams) -> Prompt | BadPrompt:
    """One prompt of the argument and the text on stdin, with a blank line between them."""
    [piece] = piped.pieces()
    text = _read(piece, InputFormat.TEXT, 1, sampling)
    if isinstance(text, BadPrompt):
        return text
    if not str(text.content).strip():
        return Prompt(1, argument, sampling)
    return replace(text, content=f"{argument}\n\n{text.content}") if argument else text


def readable(prompt: Prompt | BadPrompt) -> Prompt:
    """The prompt, where all of them are needed. Raises a bad line's error."""
    if isinstance(prompt, BadPrompt):
        raise prompt.error
    return prompt


def read_all(source: PromptSource, name: str, limit: int | None = None) -> list[Prompt]:
    """All prompts of the file of that name, or the first `limit`.

    Raises the error of the first bad line, RequestError where there is no prompt.
    """
    prompts = [readable(prompt) for prompt in islice(source.prompts, limit)]
    if not prompts:
        raise RequestError(f"{'stdin' if name == STDIN else name} holds no prompt", "give at least one")
    return prompts


def encode_prompt(prompt: Prompt, codec: TextCodec, chat: bool | None) -> tuple[int, ...]:
    """Token ids of a prompt. Raises RequestError that says where it stands."""
    with errors_at(prompt.place):
        return encode(prompt.content, codec, chat)


def encode(content: Content, codec: TextCodec, chat: bool | None) -> tuple[int, ...]:
    """Token ids of a prompt, through the chat template if it is a chat or is to be one.

    Raises RequestError where that cannot be.
    """
    if not isinstance(content, tuple):
        return codec.encode_prompt(content, chat)
    if chat is False:
        raise RequestError("`messages` cannot be run raw", "drop --raw, or give a plain `prompt`")
    return codec.encode_chat(content)


def unfinished(
    prompts: Iterator[Prompt | BadPrompt], finished: Counter[PromptId]
) -> Iterator[Prompt | BadPrompt] | None:
    """Prompts without as many of each id as are `finished`, and None where that leaves none.

    To know that, it reads up to the first one that is left, but only where something is finished.
    """

    def left() -> Iterator[Prompt | BadPrompt]:
        for prompt in prompts:
            if finished[prompt.id] > 0:
                finished[prompt.id] -= 1
            else:
                yield prompt

    if not finished:
        return prompts
    rest = left()
    first = next(rest, None)
    return None if first is None else chain([first], rest)


def jobs(prompts: Iterator[Prompt | BadPrompt], codec: TextCodec, chat: bool | None) -> Iterator[Job]:
    """Prompts as they are served."""
    for prompt in prompts:
        yield Job(prompt.id, _request(prompt, codec, chat))


def _request(prompt: Prompt | BadPrompt, codec: TextCodec, chat: bool | None) -> Request | RequestError:
    if isinstance(prompt, BadPrompt):
        return prompt.error
    is_chat = isinstance(prompt.content, tuple) or codec.is_chat(chat)
    return attempt(
        lambda: Request(encode_prompt(prompt, codec, chat), prompt.sampling, is_chat),
        "encoding the prompt",
        debugging=render.debugging(),
    )


def _read(piece: Piece, kind: InputFormat, number: int, sampling: SamplingParams) -> Prompt | BadPrompt:
    """The prompt in a piece of a file, under its own id or else the count of prompts."""
    prompt_id: PromptId = number
    try:
        with errors_at(piece.place):
            text = _decode(piece.raw)
            if kind is not InputFormat.JSONL:
                return Prompt(number, text, sampling, piece.place)
            fields = _parse(text)
            prompt_id = _id(fields, number)
            return Prompt(prompt_id, content_of(fields), sampling_of(fields, sampling), piece.place)
    except RequestError as error:
        return BadPrompt(prompt_id, error)


def _decode(raw: bytes) -> str:
    """UTF-8 without a byte order mark and without the line break at the end."""
    problem = encoding_problem(raw)
    if problem is not None:
        raise RequestError(f"not UTF-8: {problem}", CONVERT_HINT)
    try:
        return raw.decode("utf-8-sig").removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError as error:
        raise RequestError(f"invalid UTF-8 at byte {error.start}", "save the prompts as UTF-8") from error


def _parse(text: str) -> dict[str, Any]:
    try:
        fields = json.loads(text)
    except json.JSONDecodeError as error:
        # Its own line number counts within this line, and would be taken for one of the file.
        raise RequestError(
            f"not JSON: {error.msg}, column {error.colno}", "each line must be one JSON object"
        ) from error
    except (ValueError, RecursionError) as error:
        raise RequestError(f"not JSON: {error}", "each line must be one JSON object") from error
    if not isinstance(fields, dict):
        raise RequestError("not a JSON object", 'each line must look like {"prompt": "..."}')
    return {name: value for name, value in fields.items() if value is not None}


def _id(fields: dict[str, Any], number: int) -> PromptId:
    prompt_id = fields.get("id", number)
    if isinstance(prompt_id, bool) or not isinstance(prompt_id, str | int):
        raise RequestError("`id` is neither a string nor an integer", "give each line an id of its own, or none")
    if isinstance(prompt_id, str) and any("\ud800" <= letter <= "\udfff" for letter in prompt_id):
        raise RequestError("`id` holds half a surrogate pair", "no record could be written with it: mend it")
    return prompt_id
