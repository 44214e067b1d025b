"""Where prompts come from: every format, lazily, and one bad line costs no other line."""

import io
import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from rakvctl.cli.inputs import BadPrompt, Prompt, open_prompts
from rakvctl.cli.options import InputFormat
from rakvctl.core.errors import RakvError, RequestError, UsageError
from rakvctl.core.types import SamplingParams

AUTO, TEXT, LINES, JSONL = InputFormat.AUTO, InputFormat.TEXT, InputFormat.LINES, InputFormat.JSONL
# No value is the default of its field: what a line leaves out has to come from here.
SAMPLING = SamplingParams(max_new_tokens=7, temperature=0.5, top_p=0.9, top_k=5, seed=3, stop=("END",))
BOM = b"\xef\xbb\xbf"


def read(*files: str | Path, argument: str | None = None, kind: InputFormat = AUTO) -> list[Prompt | BadPrompt]:
    return list(open_prompts(argument, [str(file) for file in files], kind, SAMPLING).prompts)


def contents(*files: str | Path, argument: str | None = None, kind: InputFormat = AUTO) -> list[Any]:
    """The content of each prompt; all of them have to be good ones."""
    prompts = read(*files, argument=argument, kind=kind)
    assert all(isinstance(prompt, Prompt) for prompt in prompts), prompts
    return [prompt.content for prompt in prompts if isinstance(prompt, Prompt)]


def is_several(*files: Path, argument: str | None = None, kind: InputFormat = AUTO) -> bool:
    return open_prompts(argument, [str(file) for file in files], kind, SAMPLING).several


def write(path: Path, content: bytes | str) -> Path:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def jsonl(path: Path, *records: object) -> Path:
    return write(path, "".join(json.dumps(record) + "\n" for record in records))


def pipe_in(monkeypatch: pytest.MonkeyPatch, content: bytes) -> io.BytesIO:
    """Let stdin hold this; returns the bytes below it."""
    raw = io.BytesIO(content)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(raw))
    return raw


# Sources


def test_the_argument_is_one_prompt_as_it_stands() -> None:
    assert read(argument=" two\nlines\n") == [Prompt(1, " two\nlines\n", SAMPLING)]


def test_stdin_is_read_where_there_is_no_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe_in(monkeypatch, b"from the pipe\n")
    assert read() == [Prompt(1, "from the pipe", SAMPLING)]


def test_a_dash_as_the_prompt_or_as_a_file_is_stdin(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe_in(monkeypatch, b"piped")
    assert contents(argument="-") == ["piped"]
    pipe_in(monkeypatch, b"piped")
    assert contents("-") == ["piped"]


def test_stdin_is_left_alone_where_a_file_is_given(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    raw = pipe_in(monkeypatch, b"not for us")
    assert contents(write(tmp_path / "p.txt", "in a file"), argument="given") == ["given", "in a file"]
    assert contents(write(tmp_path / "p.txt", "in a file")) == ["in a file"]
    assert raw.read() == b"not for us"


def test_a_terminal_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe_in(monkeypatch, b"typed")
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    with pytest.raises(UsageError, match="no prompt"):
        open_prompts(None, [], AUTO, SAMPLING)


def test_a_terminal_is_read_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe_in(monkeypatch, b"typed\n")
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    assert contents("-") == ["typed"]


def test_no_prompt_and_a_closed_stdin_is_wrong_usage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(UsageError, match="no prompt"):
        open_prompts(None, [], AUTO, SAMPLING)


@pytest.mark.parametrize(("argument", "files"), [("-", []), (None, ["-"])])
def test_a_dash_with_a_closed_stdin_is_an_error_for_users(
    argument: str | None, files: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(RakvError):
        open_prompts(argument, files, AUTO, SAMPLING)


@pytest.mark.parametrize(("argument", "files"), [("-", ["-"]), (None, ["-", "-"])])
def test_stdin_named_twice_is_wrong_usage_before_anything_is_read(
    argument: str | None, files: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = pipe_in(monkeypatch, b"once\nonly\n")
    with pytest.raises(UsageError):
        open_prompts(argument, files, LINES, SAMPLING)
    assert raw.tell() == 0


def test_argument_and_files_follow_each_other_and_are_numbered_throughout(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pipe_in(monkeypatch, b'{"prompt": "c"}\n\n{"prompt": "d"}\n')
    prompts = read(write(tmp_path / "b.txt", "b"), "-", write(tmp_path / "e.txt", "e"), argument="a")
    assert [(prompt.id, prompt.content) for prompt in prompts if isinstance(prompt, Prompt)] == [
        (1, "a"),
        (2, "b"),
        (3, "c"),
        (4, "d"),
        (5, "e"),
    ]


def test_stdin_as_the_argument_comes_before_the_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pipe_in(monkeypatch, b"first")
    assert contents(write(tmp_path / "p.txt", "second"), argument="-") == ["first", "second"]


def test_a_missing_file_is_known_before_any_prompt_is_read(tmp_path: Path) -> None:
    good = write(tmp_path / "good.txt", "fine")
    for kind in InputFormat:
        with pytest.raises(RakvError, match=r"cannot read .*missing\.txt: No such file") as raised:
            open_prompts("also fine", [str(good), str(tmp_path / "missing.txt")], kind, SAMPLING)
        assert not isinstance(raised.value, RequestError), "an error of one prompt would be run over"


def test_a_directory_is_no_file(tmp_path: Path) -> None:
    for kind in InputFormat:
        with pytest.raises(RakvError, match=r"cannot read .*: Is a directory"):
            open_prompts(None, [str(tmp_path)], kind, SAMPLING)


def test_several_is_said_of_what_can_hold_more_than_one_prompt(tmp_path: Path) -> None:
    text, one_record = write(tmp_path / "p.txt", "x"), jsonl(tmp_path / "p.jsonl", {"prompt": "x"})
    assert not is_several(argument="x")
    assert not is_several(text)
    assert not is_several(text, kind=TEXT)
    assert is_several(text, kind=LINES)
    assert is_several(one_record)
    assert is_several(text, text)
    assert is_several(text, argument="x")


# Formats


def test_a_text_file_is_one_prompt_without_its_last_line_break(tmp_path: Path) -> None:
    assert contents(write(tmp_path / "p.txt", "one\n\n two\n\n"), kind=TEXT) == ["one\n\n two\n"]
    assert contents(write(tmp_path / "p.txt", "one\r\ntwo\r\n"), kind=TEXT) == ["one\r\ntwo"]
    assert contents(write(tmp_path / "p.txt", "no end"), kind=TEXT) == ["no end"]


def test_an_empty_text_file_is_an_empty_prompt_and_not_nothing(tmp_path: Path) -> None:
    assert contents(write(tmp_path / "p.txt", "")) == [""]


def test_each_line_is_a_prompt_and_blank_ones_are_none(tmp_path: Path) -> None:
    prompts = read(write(tmp_path / "p.txt", "one\n\n  \t\n  two \r\n\r\nthree"), kind=LINES)
    assert prompts == [Prompt(1, "one", SAMPLING), Prompt(2, "  two ", SAMPLING), Prompt(3, "three", SAMPLING)]


def test_a_line_ends_at_a_line_feed_only(tmp_path: Path) -> None:
    odd = "a\x0bb\x0cc\x1cd\x85e\u2028f\rg"
    assert contents(write(tmp_path / "p.txt", f"{odd}\nh"), kind=LINES) == [odd, "h"]


def test_blank_lines_between_json_lines_are_none(tmp_path: Path) -> None:
    file = write(tmp_path / "p", '\n{"prompt": "a"}\n \t\n\n{"prompt": "b"}\r\n\r\n')
    assert read(file, kind=JSONL) == [Prompt(1, "a", SAMPLING), Prompt(2, "b", SAMPLING)]


def test_a_file_of_lines_may_be_empty(tmp_path: Path) -> None:
    empty = write(tmp_path / "p", "")
    assert read(empty, kind=LINES) == []
    assert read(empty, kind=JSONL) == []


@pytest.mark.parametrize("name", ["p.jsonl", "p.ndjson", "P.JSONL"])
def test_a_file_called_json_lines_is_read_as_such_whatever_is_in_it(name: str, tmp_path: Path) -> None:
    [bad, good] = read(write(tmp_path / name, 'plain\n{"prompt": "x"}\n'))
    assert isinstance(bad, BadPrompt)
    assert good == Prompt(2, "x", SAMPLING)


@pytest.mark.parametrize("first", ['{"promt": "x"}', "{}", '{"prompt": "x'])
def test_a_first_line_that_is_an_object_without_a_prompt_costs_no_other_line(first: str, tmp_path: Path) -> None:
    """The file is no text then: one prompt made of all its lines would be taken for a success."""
    bad, good = read(write(tmp_path / "p.txt", f'{first}\n{{"prompt": "x"}}\n'))
    assert isinstance(bad, BadPrompt)
    assert good == Prompt(2, "x", SAMPLING)


@pytest.mark.parametrize("first", ['{"prompt": "x"}', ' {"id": 4, "messages": [{"role": "user", "content": "x"}]}'])
def test_a_first_line_that_holds_a_prompt_makes_it_json_lines(first: str, tmp_path: Path) -> None:
    source = open_prompts(None, [str(write(tmp_path / "p.txt", f"{first}\n{first}\n"))], AUTO, SAMPLING)
    assert source.several
    assert len(list(source.prompts)) == 2


def test_json_lines_on_stdin_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe_in(monkeypatch, b'{"prompt": "a"}\n{"prompt": "b"}\n')
    assert contents() == ["a", "b"]


@pytest.mark.parametrize("blank", ["\n", " \t\r\n\n", "\ufeff\n", "\n" * 20_000], ids=["one", "two", "mark", "many"])
def test_json_lines_are_found_out_behind_blank_lines(blank: str, tmp_path: Path) -> None:
    source = open_prompts(None, [str(write(tmp_path / "p.txt", f'{blank}{{"prompt": "x"}}\n'))], AUTO, SAMPLING)
    assert source.several
    assert list(source.prompts) == [Prompt(1, "x", SAMPLING)]


@pytest.mark.parametrize("text", ["\n \n", "\n\ntext\n\n", '\na\n{"prompt": "x"}'])
def test_blank_lines_before_a_text_are_part_of_it(text: str, tmp_path: Path) -> None:
    assert contents(write(tmp_path / "p.txt", f"{text}\n")) == [text]


@pytest.mark.parametrize(
    "text", ['{\n  "prompts": "x"\n}', "def f():\n    pass", '["prompt"]', "{% if prompt %}", "a\nb"]
)
def test_anything_else_is_one_text(text: str, tmp_path: Path) -> None:
    assert contents(write(tmp_path / "p.txt", text)) == [text]


def test_the_given_format_beats_name_and_content(tmp_path: Path) -> None:
    file = jsonl(tmp_path / "p.jsonl", {"prompt": "x"}, {"prompt": "y"})
    assert contents(file, kind=TEXT) == ['{"prompt": "x"}\n{"prompt": "y"}']
    assert contents(file, kind=LINES) == ['{"prompt": "x"}', '{"prompt": "y"}']


def test_a_byte_order_mark_is_no_part_of_the_prompt(tmp_path: Path) -> None:
    assert contents(write(tmp_path / "p.txt", BOM + b"x\n")) == ["x"]
    assert contents(write(tmp_path / "p.txt", BOM + b"x\ny\n"), kind=LINES) == ["x", "y"]
    assert contents(write(tmp_path / "p.jsonl", BOM + b'{"prompt": "x"}\n')) == ["x"]


def test_json_lines_are_found_out_behind_a_byte_order_mark(tmp_path: Path) -> None:
    assert contents(write(tmp_path / "p.txt", BOM + b'{"prompt": "x"}\n{"prompt": "y"}\n')) == ["x", "y"]


def test_invalid_utf8_spoils_its_own_line_only(tmp_path: Path) -> None:
    file = write(tmp_path / "p.txt", b"caf\xe9\nfine\n")
    [bad, good] = read(file, kind=LINES)
    assert isinstance(bad, BadPrompt)
    assert (bad.id, bad.error.message) == (1, f"{file}, line 1: invalid UTF-8 at byte 3")
    assert good == Prompt(2, "fine", SAMPLING)

    [bad, good] = read(write(tmp_path / "p.jsonl", b'{"id": "a", "prompt": "\xff"}\n{"id": "b", "prompt": "x"}\n'))
    assert isinstance(bad, BadPrompt)
    assert bad.id == 1
    assert good.id == "b"


def test_invalid_utf8_in_a_text_file_is_an_error_of_that_prompt(tmp_path: Path) -> None:
    [bad] = read(write(tmp_path / "p.txt", b"\x80"))
    assert isinstance(bad, BadPrompt)
    assert "UTF-8" in bad.error.message


# Lazy reading


def test_no_more_is_read_than_prompts_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [b'{"prompt": "%d"}\n' % number for number in range(1000)]
    raw = pipe_in(monkeypatch, b"".join(lines))
    source = open_prompts(None, [], AUTO, SAMPLING)
    assert raw.tell() <= len(lines[0])
    next(source.prompts)
    assert raw.tell() <= len(lines[0] + lines[1])


def test_the_first_line_of_a_pipe_is_served_before_the_second_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    read_end, write_end = os.pipe()
    with open(read_end) as reader, open(write_end, "wb", buffering=0) as writer:
        monkeypatch.setattr(sys, "stdin", reader)
        writer.write(b'{"prompt": "one"}\n')
        # Reading on would block for ever: the end of the pipe frees it, and the test fails.
        too_late = threading.Timer(20.0, writer.close)
        too_late.start()
        prompts = open_prompts(None, [], AUTO, SAMPLING).prompts
        assert next(prompts) == Prompt(1, "one", SAMPLING)
        assert not writer.closed
        too_late.cancel()
        writer.write(b'{"prompt": "two"}\n')
        writer.close()
        assert list(prompts) == [Prompt(2, "two", SAMPLING)]


# Fields of a JSON line


def test_a_line_without_parameters_takes_those_of_the_command_line(tmp_path: Path) -> None:
    assert read(jsonl(tmp_path / "p.jsonl", {"prompt": "x"})) == [Prompt(1, "x", SAMPLING)]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"max_new_tokens": 1}, {"max_new_tokens": 1}),
        ({"temperature": 0}, {"temperature": 0.0}),
        ({"temperature": 1.25}, {"temperature": 1.25}),
        ({"seed": 0}, {"seed": 0}),
        ({"stop": "###"}, {"stop": ("###",)}),
        ({"stop": ["a", "b"]}, {"stop": ("a", "b")}),
        ({"stop": []}, {"stop": ()}),
        ({"max_new_tokens": 9, "temperature": 2, "seed": 1}, {"max_new_tokens": 9, "temperature": 2.0, "seed": 1}),
    ],
)
def test_a_line_puts_its_parameters_over_those_of_the_command_line(
    fields: dict[str, Any], expected: dict[str, Any], tmp_path: Path
) -> None:
    [prompt] = read(jsonl(tmp_path / "p.jsonl", {"prompt": "x", **fields}))
    assert isinstance(prompt, Prompt)
    unchanged = {name: getattr(SAMPLING, name) for name in SAMPLING.__slots__ if name not in expected}
    assert {name: getattr(prompt.sampling, name) for name in SAMPLING.__slots__} == {**unchanged, **expected}
    assert type(prompt.sampling.temperature) is float


def test_null_stands_for_a_field_that_is_not_there(tmp_path: Path) -> None:
    names = ("id", "messages", "max_new_tokens", "temperature", "seed", "stop")
    line = {"prompt": "x", **dict.fromkeys(names)}
    assert read(jsonl(tmp_path / "p.jsonl", line)) == [Prompt(1, "x", SAMPLING)]


def test_fields_that_mean_nothing_to_us_are_no_mistake(tmp_path: Path) -> None:
    line = {"prompt": "x", "category": ["anything"], "reference": {"a": 1}}
    assert read(jsonl(tmp_path / "p.jsonl", line)) == [Prompt(1, "x", SAMPLING)]


def test_messages_are_handed_on_as_they_are(tmp_path: Path) -> None:
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "", "name": "anna"},
        {"role": "assistant", "content": "ünïcode 😀"},
    ]
    assert contents(jsonl(tmp_path / "p.jsonl", {"messages": messages})) == [tuple(messages)]


def test_text_of_a_json_line_keeps_its_line_breaks_and_spaces(tmp_path: Path) -> None:
    assert contents(jsonl(tmp_path / "p.jsonl", {"prompt": "\n a\r\nb \n"}, {"prompt": ""})) == ["\n a\r\nb \n", ""]


def test_ids_are_strings_or_integers_and_otherwise_the_count_of_prompts(tmp_path: Path) -> None:
    given = ["a", "7", 7, 0, -3, "", "ü\U0001f600"]
    lines = [{"prompt": "x", "id": prompt_id} for prompt_id in given]
    file = jsonl(tmp_path / "p.jsonl", *lines, {"prompt": "x"})
    ids = [prompt.id for prompt in read(file)]
    assert ids == [*given, len(given) + 1]
    assert [type(prompt_id) for prompt_id in ids] == [*map(type, given), int]


BAD_LINES = [
    ("", "{", "not JSON"),
    ("", "plain text", "not JSON"),
    ("", '{"prompt": "x"} {"prompt": "y"}', "not JSON"),
    ("", '{"prompt": "x",}', "not JSON"),
    ("", '{"prompt": "a\tb"}', "not JSON"),
    ("", "[" * 100_000, "not JSON"),
    ("", "null", "not a JSON object"),
    ("", '["prompt"]', "not a JSON object"),
    ("", '"prompt"', "not a JSON object"),
    ("", "NaN", "not a JSON object"),
    ("", '{"id": 1.5, "prompt": "x"}', "`id`"),
    ("", '{"id": true, "prompt": "x"}', "`id`"),
    ("", '{"id": ["x"], "prompt": "x"}', "`id`"),
    ("", '{"id": NaN, "prompt": "x"}', "`id`"),
    ("", '{"id": "a\\ud800", "prompt": "x"}', "`id`"),
    ("own", '{"id": "own"}', "either `prompt` or `messages`"),
    ("own", '{"id": "own", "prompt": null, "messages": null}', "either `prompt` or `messages`"),
    (
        "own",
        '{"id": "own", "prompt": "x", "messages": [{"role": "user", "content": "x"}]}',
        "either `prompt` or `messages`",
    ),
    ("own", '{"id": "own", "prompt": "", "messages": []}', "either `prompt` or `messages`"),
    *(("own", f'{{"id": "own", "prompt": {value}}}', "`prompt`") for value in ("3", "true", '["x"]', "{}")),
    *(
        ("own", f'{{"id": "own", "messages": {value}}}', "`messages`")
        for value in (
            "[]",
            '"x"',
            "{}",
            '["x"]',
            "[null]",
            '[{"role": "user"}]',
            '[{"content": "x"}]',
            '[{"role": "user", "content": null}]',
            '[{"role": "user", "content": ["x"]}]',
            '[{"role": 1, "content": "x"}]',
            '[{"role": "user", "content": "x"}, "x"]',
        )
    ),
    *(
        ("own", f'{{"id": "own", "prompt": "x", "{name}": {value}}}', f"`{name}`")
        for name, values in {
            "max_new_tokens": ("0", "-1", "1.0", '"5"', "true", "[]"),
            "seed": ("-1", "1.5", '"x"', "false"),
            "temperature": ("-0.1", '"hot"', "true", "NaN", "Infinity", "-Infinity", "1e999", "[0]"),
            "stop": ('""', '[""]', '["a", ""]', '["a", 1]', "1", '{"a": 1}', "true"),
        }.items()
        for value in values
    ),
]


@pytest.mark.parametrize(("prompt_id", "line", "problem"), BAD_LINES, ids=lambda value: value[:50])
def test_a_bad_line_is_named_and_does_not_cost_the_others(
    prompt_id: str, line: str, problem: str, tmp_path: Path
) -> None:
    file = write(tmp_path / "p.jsonl", f'{{"prompt": "before"}}\n{line}\n{{"prompt": "after"}}\n')
    before, bad, after = read(file)
    assert isinstance(bad, BadPrompt)
    assert bad.id == (prompt_id or 2)
    assert problem in bad.error.message
    assert bad.error.hint
    assert (before, after) == (Prompt(1, "before", SAMPLING), Prompt(3, "after", SAMPLING))


def test_a_bad_line_is_found_under_its_number_in_its_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Blank lines count, and what json says of lines does not."""
    lines = '\n\n{"prompt": "x"}\n\n{"prompt": \n'
    file = write(tmp_path / "p.txt", lines)
    pipe_in(monkeypatch, lines.encode())
    _, in_file, _, piped = read(file, "-")
    assert isinstance(in_file, BadPrompt)
    assert isinstance(piped, BadPrompt)
    message = "line 5: not JSON: Expecting value, column 12"
    assert (in_file.id, in_file.error.message) == (2, f"{file}, {message}")
    assert (piped.id, piped.error.message) == (4, message)


@pytest.mark.parametrize("option", ["--prompts", "-f"])
def test_the_hint_about_a_file_names_the_option_it_came_from(option: str, tmp_path: Path) -> None:
    with pytest.raises(RakvError) as raised:
        open_prompts(None, [str(tmp_path / "missing")], AUTO, SAMPLING, option=option)
    assert raised.value.hint == f"check the path given with {option}"


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="only Linux has a file that opens and cannot be read")
def test_a_file_that_cannot_be_read_to_its_end_is_an_error_for_users() -> None:
    with pytest.raises(RakvError, match="cannot read /proc/self/mem: "):
        read("/proc/self/mem", kind=TEXT)


@pytest.mark.parametrize("field", ["id", "seed", "temperature", "other"])
def test_a_number_of_more_digits_than_python_reads_does_not_cost_the_others(field: str, tmp_path: Path) -> None:
    """`json.loads` raises a plain ValueError for it."""
    line = f'{{"prompt": "x", "{field}": {"9" * 5000}}}'
    bad, after = read(write(tmp_path / "p.jsonl", f'{line}\n{{"prompt": "after"}}\n'))
    assert isinstance(bad, BadPrompt)
    assert after == Prompt(2, "after", SAMPLING)


def test_a_temperature_too_large_for_a_float_does_not_cost_the_others(tmp_path: Path) -> None:
    """An integer that is below infinity and still has no float."""
    line = f'{{"prompt": "x", "temperature": 1{"0" * 400}}}'
    bad, after = read(write(tmp_path / "p.jsonl", f'{line}\n{{"prompt": "after"}}\n'))
    assert isinstance(bad, BadPrompt)
    assert "`temperature`" in bad.error.message
    assert after == Prompt(2, "after", SAMPLING)
