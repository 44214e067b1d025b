"""A prompt argument and text on stdin make one prompt; stdin that is not for us is neither read nor waited for."""

import io
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rakvctl.cli import piped
from rakvctl.cli.inputs import BadPrompt, Prompt, jobs, open_prompts
from rakvctl.cli.options import InputFormat
from rakvctl.core.errors import UsageError
from rakvctl.core.models import Notify
from rakvctl.core.text import TextCodec
from rakvctl.core.types import Request, SamplingParams
from tests.profiles import AnyLetterTokenizer

SAMPLING = SamplingParams()
AUTO = InputFormat.AUTO


def content(argument: str, kind: InputFormat = AUTO, notify: Notify = lambda _: None) -> object:
    [prompt] = open_prompts(argument, [], kind, SAMPLING, notify=notify).prompts
    assert isinstance(prompt, Prompt), prompt
    return prompt.content


def in_memory(monkeypatch: pytest.MonkeyPatch, raw: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(raw)))


@pytest.fixture
def pipe(monkeypatch: pytest.MonkeyPatch) -> Iterator[io.FileIO]:
    """The end of a pipe that others write; the other end is stdin."""
    read_end, write_end = os.pipe()
    with open(read_end) as reader, open(write_end, "wb", buffering=0) as writer:
        monkeypatch.setattr(sys, "stdin", reader)
        yield writer


def on_stdin(monkeypatch: pytest.MonkeyPatch, path: Path | str) -> io.TextIOWrapper:
    stream = open(path)  # noqa: SIM115 - stdin is not closed either
    monkeypatch.setattr(sys, "stdin", stream)
    return stream


@pytest.mark.parametrize("raw", [b"a = 1\nb = 2\n", b"\xef\xbb\xbfa = 1\nb = 2\r\n", b'[{"prompt": "x"}]', b'{"a": 1}'])
def test_the_argument_comes_first_and_then_stdin_behind_a_blank_line(
    raw: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever stdin holds: it is a text to ask about."""
    in_memory(monkeypatch, raw)
    text = raw.decode("utf-8-sig").removesuffix("\n").removesuffix("\r")
    assert content("Explain this") == f"Explain this\n\n{text}"


@pytest.mark.parametrize("raw", [b"", b"\n", b" \n\t\n"])
def test_nothing_on_stdin_leaves_the_argument_as_it_is(raw: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    in_memory(monkeypatch, raw)
    assert content("given") == "given"


def test_an_empty_argument_adds_nothing_to_stdin(monkeypatch: pytest.MonkeyPatch) -> None:
    in_memory(monkeypatch, b"piped")
    assert content("") == "piped"


def test_both_are_one_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    in_memory(monkeypatch, b"piped")
    assert not open_prompts("given", [], AUTO, SAMPLING).several


def test_a_closed_stdin_and_a_terminal_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    in_memory(monkeypatch, b"typed")
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    assert content("given") == "given"
    monkeypatch.setattr(sys, "stdin", None)
    assert content("given") == "given"


def test_a_pipe_is_waited_for_until_it_has_something_or_ends(pipe: io.FileIO) -> None:
    pipe.write(b"piped\n")
    pipe.close()
    assert content("given") == "given\n\npiped"


def test_a_pipe_that_ends_without_text_leaves_the_argument(pipe: io.FileIO) -> None:
    pipe.close()
    assert content("given") == "given"


def test_a_pipe_that_stays_open_is_waited_for_and_a_note_says_so(
    pipe: io.FileIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a slow program, whose text would be dropped otherwise; of ssh and services the note tells what to do."""
    monkeypatch.setattr(piped, "_NOTE_SECONDS", 0.01)
    notes: list[str] = []

    def hear(note: str) -> None:
        notes.append(note)
        pipe.write(b"late")
        pipe.close()

    assert content("given", notify=hear) == "given\n\nlate"
    assert "/dev/null" in notes[0]


def test_a_socket_is_read_like_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(b"piped")
        theirs.shutdown(socket.SHUT_WR)
        with open(os.dup(ours.fileno())) as reader:
            monkeypatch.setattr(sys, "stdin", reader)
            assert content("given") == "given\n\npiped"


@pytest.mark.parametrize("device", ["/dev/null", "/dev/zero"])
def test_a_device_is_left_alone(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with on_stdin(monkeypatch, device):
        assert content("given") == "given"


def test_a_file_is_read_and_one_that_a_shell_reads_line_by_line_is_left_to_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """`while read -r prompt; do rakvctl generate "$prompt"; done < prompts.txt`."""
    path = tmp_path / "prompts.txt"
    path.write_text("first\nsecond\n")
    with on_stdin(monkeypatch, path):
        assert content("given") == "given\n\nfirst\nsecond"
    with on_stdin(monkeypatch, path) as stream:
        os.lseek(stream.fileno(), len("first\n"), os.SEEK_SET)
        assert content("first") == "first"
        assert os.lseek(stream.fileno(), 0, os.SEEK_CUR) == len("first\n")


def test_a_file_on_stdin_is_among_those_that_results_may_not_overwrite(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "p.txt"
    path.write_text("x")
    with on_stdin(monkeypatch, path):
        [status] = open_prompts("given", [], AUTO, SAMPLING).files
    assert os.path.samestat(status, path.stat())


@pytest.mark.parametrize("kind", [InputFormat.LINES, InputFormat.JSONL])
def test_an_argument_and_lines_on_stdin_are_wrong_usage(kind: InputFormat, monkeypatch: pytest.MonkeyPatch) -> None:
    in_memory(monkeypatch, b'{"prompt": "x"}\n')
    with pytest.raises(UsageError, match=kind.value):
        open_prompts("given", [], kind, SAMPLING)
    in_memory(monkeypatch, b"")
    assert content("given", kind) == "given"


def test_text_on_stdin_that_is_not_utf8_is_an_error_of_the_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    in_memory(monkeypatch, b"caf\xe9")
    [prompt] = open_prompts("given", [], AUTO, SAMPLING).prompts
    assert isinstance(prompt, BadPrompt)
    assert "UTF-8" in prompt.error.message


def test_a_request_says_whether_an_answer_is_asked_for() -> None:
    class ChatTokenizer(AnyLetterTokenizer):
        chat_template = "any"  # type: ignore[assignment]

        def apply_chat_template(self, messages: list[dict[str, str]], **_: object) -> str:
            return messages[-1]["content"]

    def is_chat(tokenizer: AnyLetterTokenizer, chat: bool | None, content: object) -> bool:
        prompts = iter([Prompt(1, content, SAMPLING)])  # type: ignore[arg-type]
        [job] = jobs(prompts, TextCodec(tokenizer, frozenset()), chat)
        assert isinstance(job.request, Request)
        return job.request.is_chat

    assert not is_chat(AnyLetterTokenizer(), None, "hi")
    assert is_chat(ChatTokenizer(), None, "hi")
    assert not is_chat(ChatTokenizer(), False, "hi")
    assert is_chat(ChatTokenizer(), None, ({"role": "user", "content": "hi"},))
