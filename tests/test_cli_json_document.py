"""Prompt files that are one JSON document, and those that are no text at all."""

import codecs
import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from rakvctl.cli.inputs import BadPrompt, Prompt, open_prompts
from rakvctl.cli.options import InputFormat
from rakvctl.core.errors import RakvError
from rakvctl.core.types import SamplingParams

SAMPLING = SamplingParams()
CHAT = {"id": "c", "messages": [{"role": "user", "content": "hi"}]}


def read(file: Path | bytes, kind: InputFormat = InputFormat.AUTO) -> list[Prompt | BadPrompt]:
    """The prompts of a file, or of stdin where it is given as bytes."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        if isinstance(file, bytes):
            monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(file)))
        return list(open_prompts(None, ["-" if isinstance(file, bytes) else str(file)], kind, SAMPLING).prompts)


def contents(file: Path | bytes, kind: InputFormat = InputFormat.AUTO) -> list[Any]:
    prompts = read(file, kind)
    assert all(isinstance(prompt, Prompt) for prompt in prompts), prompts
    return [prompt.content for prompt in prompts if isinstance(prompt, Prompt)]


def write(path: Path, text: str | bytes) -> Path:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("mark", [b"", codecs.BOM_UTF8])
def test_an_array_of_prompts_is_read_as_prompts(indent: int | None, mark: bytes, tmp_path: Path) -> None:
    document = [{"prompt": "\u00e9\n", "seed": 3}, CHAT, "text"]
    raw = mark + json.dumps(document, indent=indent).encode()
    expected = ["\u00e9\n", tuple(CHAT["messages"]), "text"]
    for file in (write(tmp_path / "p.json", raw), write(tmp_path / "p.txt", raw), write(tmp_path / "p.JSON", raw), raw):
        first, second, third = read(file)
        assert [first.id, second.id, third.id] == [1, "c", 3]
        assert contents(file) == expected
        assert isinstance(first, Prompt)
        assert first.sampling.seed == 3


@pytest.mark.parametrize(
    "document", ['{\n  "prompt": "x"\n}\n', '\n{"id": 4,\n"prompt": "x"}', '{"prompt": "x",\n"id": 1}']
)
def test_one_object_over_several_lines_is_a_prompt(document: str, tmp_path: Path) -> None:
    for name in ("p.json", "p.txt", "p"):
        assert contents(write(tmp_path / name, document)) == ["x"]
    assert contents(document.encode()) == ["x"]


def test_strings_are_prompts_where_the_file_is_called_json_or_on_stdin(tmp_path: Path) -> None:
    text = '["a", "b"]'
    assert contents(write(tmp_path / "p.json", text)) == ["a", "b"]
    assert contents(text.encode()) == ["a", "b"]
    assert contents(write(tmp_path / "p.txt", text)) == [text]


def test_an_empty_array_holds_no_prompt(tmp_path: Path) -> None:
    assert read(write(tmp_path / "p.json", "[]\n")) == []


def test_json_lines_may_be_called_json(tmp_path: Path) -> None:
    assert contents(write(tmp_path / "p.json", '{"prompt": "x"}\n{"prompt": "y"}\n')) == ["x", "y"]


def test_a_bad_element_is_named_and_costs_no_other(tmp_path: Path) -> None:
    file = write(tmp_path / "p.json", '[{"prompt": "x"},\n\n{"prompt": 3}, {"prompt": "y"}]')
    _, bad, _ = read(file)
    assert isinstance(bad, BadPrompt)
    assert bad.error.message.startswith(f"{file}, prompt 2: ")


@pytest.mark.parametrize(
    "text", ["[1, 2]", '{\n"a": "b"}', '"x"', "def f(): pass", '[{"prompt": "x"},', "", "[" * 9999]
)
def test_a_json_file_without_prompts_is_refused_and_named(text: str, tmp_path: Path) -> None:
    file = write(tmp_path / "p.json", text)
    with pytest.raises(RakvError, match=r"p\.json (is not JSON|holds no prompts)") as raised:
        read(file)
    assert "--format text" in raised.value.hint


@pytest.mark.parametrize(
    "text", ['[\n{"prompt": "x"},\n', '{\n"prompt": "x"\n}\n{\n"prompt": "y"\n}\n', '[\n{"messages" : [}]']
)
def test_a_damaged_document_of_prompts_is_no_text(text: str, tmp_path: Path) -> None:
    with pytest.raises(RakvError, match=r"is not JSON: .*line"):
        read(write(tmp_path / "p.txt", text))
    with pytest.raises(RakvError, match="stdin is not JSON"):
        read(text.encode())


@pytest.mark.parametrize("text", ["[link](there)\n\ntext", "[1, 2]", "{% if prompt %}", '{\n"a": "b"\n}', "[\n", "{}}"])
def test_other_text_that_begins_like_json_is_a_text(text: str, tmp_path: Path) -> None:
    assert contents(write(tmp_path / "p.txt", f"{text}\n")) == [text]
    assert contents(f"{text}\n".encode()) == [text]


def test_the_given_format_takes_a_document_as_it_stands(tmp_path: Path) -> None:
    text = '[\n{"prompt": "x"}\n]'
    assert contents(write(tmp_path / "p.json", text), InputFormat.TEXT) == [text]
    assert contents(write(tmp_path / "p.json", text), InputFormat.LINES) == text.split("\n")


ENCODINGS = ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le"]


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("name", ["p.txt", "p.json", "p.jsonl"])
def test_utf_16_is_refused_once_with_the_name_of_the_file(name: str, encoding: str, tmp_path: Path) -> None:
    file = write(tmp_path / name, '{"prompt": "x"}\n{"prompt": "y"}\n'.encode(encoding))
    with pytest.raises(RakvError, match=rf"{name} is not UTF-8") as raised:
        read(file)
    assert "iconv" in raised.value.hint


@pytest.mark.parametrize("kind", [InputFormat.TEXT, InputFormat.LINES, InputFormat.JSONL])
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_utf_16_is_no_prompt_in_any_format(kind: InputFormat, encoding: str, tmp_path: Path) -> None:
    file = write(tmp_path / "p", '{"prompt": "x"}'.encode(encoding))
    [bad] = read(file, kind)
    assert isinstance(bad, BadPrompt)
    assert f"{file}" in bad.error.message
    assert "UTF-8" in bad.error.message
    assert "iconv" in bad.error.hint


def test_a_file_with_nul_bytes_behind_its_first_line_is_refused(tmp_path: Path) -> None:
    [bad] = read(write(tmp_path / "p.txt", b"text\n\x00"))
    assert isinstance(bad, BadPrompt)
    assert "p.txt: not UTF-8: it has NUL bytes" in bad.error.message
