"""What is written: records and text, the totals, and the file that a second run goes on with."""

import io
import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from rakvctl.cli.options import parse_bytes
from rakvctl.cli.outputs import empty, open_output, refuse_overwriting, resume_output
from rakvctl.cli.prompt_files import file_status
from rakvctl.cli.render import JsonlWriter, TextWriter, Writer, completion_record, error_record, print_error
from rakvctl.cli.stats import Totals
from rakvctl.core.errors import RakvError, RequestError, UsageError
from rakvctl.core.types import Action, Completion, CostBreakdown, Decision, StepEvent

COMPLETION = Completion(
    token_ids=(5, 6, 7, 8, 9),
    text="five tokens",
    finish_reason="length",
    decision=Decision(Action(reuse=True, draft_len=3), "joint-3", "model"),
    num_prompt_tokens=40,
    num_reused_tokens=32,
    events=(StepEvent((5,), 0, 0), StepEvent((6, 7), 3, 1), StepEvent((8, 9), 3, 1)),
    ttft_ms=10.00049,
    total_ms=30.0004,
)
FIRST_TOKEN = COMPLETION.events[:1]
UNDRAFTED = tuple(StepEvent((token,), 0, 0) for token in COMPLETION.token_ids)
ERROR = RequestError("the prompt is empty", "give at least one token of text")

# A line of a run that was killed while it wrote.
HALF = '{"id": "b", "te'


def record(prompt_id: str | int | None, text: str | None = "done", **more: Any) -> str:
    return json.dumps({"id": prompt_id, "text": text, "finish_reason": "stop", **more}, ensure_ascii=False) + "\n"


# Records


def test_the_record_of_a_completion_has_the_names_and_order_of_the_contract() -> None:
    """Users script against these: a name that changes breaks them."""
    written = completion_record("a", COMPLETION)
    assert list(written) == [
        "id",
        "text",
        "finish_reason",
        "prompt_tokens",
        "completion_tokens",
        "reused_tokens",
        "policy",
        "action",
        "predicted_ms",
        "total_ms",
        "ttft_ms",
        "tpot_ms",
        "tokens_per_s",
        "num_draft_tokens",
        "num_accepted_tokens",
        "num_rescored_tokens",
        "draft_acceptance_rate",
        "mean_acceptance_length",
        "rounds_by_draft_len",
    ]
    assert list(written["action"]) == ["reuse", "draft_len", "drafter"]


def test_the_record_of_a_completion_says_what_happened() -> None:
    assert completion_record("a", COMPLETION) == {
        "id": "a",
        "text": "five tokens",
        "finish_reason": "length",
        "prompt_tokens": 40,
        "completion_tokens": 5,
        "reused_tokens": 32,
        "policy": "joint-3",
        "action": {"reuse": True, "draft_len": 3, "drafter": "model"},
        "predicted_ms": None,
        "total_ms": 30.0,
        "ttft_ms": 10.0,
        "tpot_ms": 5.0,
        "tokens_per_s": 166.664,
        "num_draft_tokens": 6,
        "num_accepted_tokens": 2,
        "num_rescored_tokens": 0,
        "draft_acceptance_rate": 0.333,
        "mean_acceptance_length": 2.0,
        "rounds_by_draft_len": {"3": 2},
    }


def test_what_a_completion_has_no_figure_for_is_null_and_not_zero() -> None:
    plain = Decision(Action(reuse=False, draft_len=0), "ar")
    one_token = replace(COMPLETION, token_ids=(5,), decision=plain, events=FIRST_TOKEN)
    written = completion_record(1, one_token)
    assert written["tpot_ms"] is None
    assert written["draft_acceptance_rate"] is None
    assert written["mean_acceptance_length"] is None
    assert written["action"] == {"reuse": False, "draft_len": 0, "drafter": "none"}


def test_a_prediction_is_part_of_the_record_where_there_is_one() -> None:
    action = COMPLETION.decision.action
    costs = CostBreakdown(action, 1.0, 2.0, 4.0, 8.0, 16.0, 0.5, rounds=2)
    reckoned = replace(COMPLETION, decision=Decision(action, "rakv", "model", table=(costs,)))
    assert completion_record(1, reckoned)["predicted_ms"] == 31.5


def test_an_error_record_has_the_error_and_no_text() -> None:
    assert error_record("a", ERROR) == {
        "id": "a",
        "text": None,
        "finish_reason": "error",
        "error": "the prompt is empty",
        "hint": "give at least one token of text",
    }


def test_an_error_takes_two_lines_on_stderr_and_none_on_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    print_error("it broke", "mend it")
    assert capsys.readouterr() == ("", "Error: it broke\nHint: mend it\n")


def test_an_error_takes_two_lines_whatever_names_it_quotes(capsys: pytest.CaptureFixture[str]) -> None:
    print_error("cannot read two\nlines.txt: No such file or directory", "check\r\nthe path")
    first, second = capsys.readouterr().err.removesuffix("\n").split("\n")
    assert first.startswith("Error: cannot read two")
    assert second.startswith("Hint: check")


# Writers


@pytest.fixture
def file(tmp_path: Path) -> Iterator[TextIO]:
    with open_output(tmp_path / "written") as stream:
        yield stream


def written_to(stream: TextIO) -> str:
    """What has reached the disk, without closing or flushing the stream."""
    return Path(stream.name).read_bytes().decode()


def write_texts(writer: Writer, *texts: str) -> None:
    """One completion each, letter by letter."""
    for number, text in enumerate(texts, start=1):
        for letter in text:
            writer.text(letter)
        writer.done(number, replace(COMPLETION, text=text))


def test_each_record_is_a_line_and_is_on_disk_when_its_prompt_is_done(file: TextIO) -> None:
    writer = JsonlWriter(file)
    writer.text("five ")
    assert written_to(file) == ""
    writer.done("a", COMPLETION)
    assert [json.loads(line) for line in written_to(file).splitlines()] == [completion_record("a", COMPLETION)]
    writer.failed(2, ERROR)
    assert json.loads(written_to(file).split("\n")[1]) == error_record(2, ERROR)
    assert written_to(file).endswith("}\n")


def test_text_in_a_record_is_readable_and_on_one_line(file: TextIO) -> None:
    text = 'ünï "😀" \\ \n\r\x0b\u2028\x00'
    JsonlWriter(file).done(1, replace(COMPLETION, text=text))
    line = written_to(file)
    assert 'ünï \\"😀\\"' in line
    assert line.count("\n") == 1
    assert json.loads(line)["text"] == text


def test_a_record_is_unicode_whatever_its_error_quotes(file: TextIO) -> None:
    """Such as the name of a file. JSON could say half a surrogate pair, but most programs refuse to read it."""
    JsonlWriter(file).failed(1, RequestError("caf\udce9.txt: it broke", "mend it"))
    assert json.loads(written_to(file))["error"] == "caf?.txt: it broke"


def test_text_is_on_disk_piece_by_piece(file: TextIO) -> None:
    writer = TextWriter(file, several=False)
    writer.text("fi")
    assert written_to(file) == "fi"
    writer.text("ve")
    assert written_to(file) == "five"
    writer.done(1, COMPLETION)
    assert written_to(file) == "five\n"


def test_texts_are_separated_by_a_blank_line(file: TextIO) -> None:
    write_texts(TextWriter(file, several=True), "one", "two\nlines", "three")
    assert written_to(file) == "one\n\ntwo\nlines\n\nthree\n"


def test_a_text_that_ends_its_own_line_gets_no_second_line_break(file: TextIO) -> None:
    write_texts(TextWriter(file, several=True), "one\n", "two")
    assert written_to(file) == "one\n\ntwo\n"


def test_an_empty_text_keeps_its_place(file: TextIO) -> None:
    write_texts(TextWriter(file, several=True), "one", "", "three")
    assert written_to(file) == "one\n\n\n\nthree\n"


def test_an_empty_text_comes_first_like_any_other(file: TextIO) -> None:
    write_texts(TextWriter(file, several=True), "", "two")
    assert written_to(file) == "\n\ntwo\n"


def test_a_failed_prompt_leaves_no_trace_between_texts(file: TextIO, capsys: pytest.CaptureFixture[str]) -> None:
    writer = TextWriter(file, several=True)
    writer.failed("bad", ERROR)
    write_texts(writer, "one")
    writer.failed(3, ERROR)
    write_texts(writer, "two")
    assert written_to(file) == "one\n\ntwo\n"
    hint = "Hint: give at least one token of text\n"
    assert capsys.readouterr() == (
        "",
        f"Error: prompt bad: the prompt is empty\n{hint}Error: prompt 3: the prompt is empty\n{hint}",
    )


def test_the_error_of_the_only_prompt_needs_no_number(file: TextIO, capsys: pytest.CaptureFixture[str]) -> None:
    TextWriter(file, several=False).failed(1, ERROR)
    assert capsys.readouterr().err.startswith("Error: the prompt is empty\n")
    assert written_to(file) == ""


def test_text_that_is_no_unicode_does_not_stop_the_writer(file: TextIO) -> None:
    write_texts(TextWriter(file, several=False), "a\udce9b")
    assert written_to(file) == "a\\udce9b\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has a device that is always full")
@pytest.mark.parametrize("make_writer", [JsonlWriter, lambda stream: TextWriter(stream, several=True)])
@pytest.mark.parametrize("text", ["x", "x" * 100_000], ids=["short", "longer than the buffer"])
def test_a_full_disk_is_an_error_for_users(make_writer: Callable[[TextIO], Writer], text: str) -> None:
    """One error: closing the stream writes what is left in its buffer, and fails no second time."""
    with open_output(Path("/dev/full")) as stream, pytest.raises(RakvError) as raised:
        write_texts(make_writer(stream), text)
    assert raised.value.message == "cannot write the results: No space left on device"
    assert "space" in raised.value.hint


def test_a_reader_that_has_gone_is_no_full_disk() -> None:
    """The program ends quietly then."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    with pytest.raises(BrokenPipeError), open(write_end, "w") as stream:
        JsonlWriter(stream).failed(1, ERROR)


# The output file


def test_the_file_on_stdout_is_compared_with_those_that_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("read", "other"):
        (tmp_path / name).touch()
    os.link(tmp_path / "read", tmp_path / "the same")
    with (tmp_path / "read").open() as prompts:
        status = file_status(prompts)
    assert status is not None
    for name, is_refused in (("read", True), ("the same", True), ("other", False)):
        with (tmp_path / name).open("a") as stream, monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", stream)
            with pytest.raises(UsageError, match="read and written") if is_refused else nullcontext():
                refuse_overwriting(None, (status,))


def test_a_device_or_memory_may_be_read_and_written() -> None:
    """A terminal and the null device are on both ends all the time, and a socket may be."""
    with open(os.devnull) as device, tempfile.SpooledTemporaryFile() as file:
        assert file_status(device) is None
        assert file_status(io.StringIO()) is None
        assert file_status(file) is not None


def resumed(path: Path, then: str = "") -> tuple[str, Counter[str | int]]:
    """Go on with a file and write something; its content after that, and the ids that were complete."""
    stream, finished = resume_output(path)
    with stream:
        stream.write(then)
    return path.read_bytes().decode(), finished


def test_a_new_run_begins_with_an_empty_file_and_not_before(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text("old\n")
    with open_output(path) as stream:
        assert path.read_text() == "old\n"
        empty(stream, path)
        stream.write("new\n")
    assert path.read_text() == "new\n"


def test_only_records_are_resumed(tmp_path: Path) -> None:
    """Somebody's notes are no output of ours: they are not to be dropped as if they were damaged records."""
    path = tmp_path / "notes.txt"
    path.write_text("dear diary\n")
    with pytest.raises(UsageError, match=r"notes\.txt"):
        resume_output(path)
    assert path.read_text() == "dear diary\n"


def test_a_run_may_be_resumed_that_never_began(tmp_path: Path) -> None:
    assert resumed(tmp_path / "out.jsonl", record(1)) == (record(1), Counter())


def test_complete_records_stay_and_are_counted_by_id(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    before = record("a") + record(1) + record("1", text="") + record("ü", text="x\n")
    path.write_bytes(before.encode())
    inode = path.stat().st_ino
    assert resumed(path, record(2)) == (before + record(2), Counter(["a", 1, "1", "ü"]))
    assert path.stat().st_ino == inode, "nothing had to be rewritten"


def test_an_id_that_occurs_twice_is_counted_twice(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text(record("a") + record("b") + record("a"))
    assert resumed(path)[1] == Counter({"a": 2, "b": 1})


def test_error_records_are_dropped_so_that_their_prompts_run_again(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    failed = record("bad", text=None, error="the prompt is empty", hint="…")
    path.write_text(record("a") + failed + record("b"))
    assert resumed(path, record("bad")) == (record("a") + record("b") + record("bad"), Counter(["a", "b"]))


def test_records_without_a_usable_id_or_text_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text(record("a") + record(None) + '{"id": 1}\n' + record("b", text=None) + record("c"))
    assert resumed(path) == (record("a") + record("c"), Counter(["a", "c"]))


def test_a_line_that_was_cut_off_anywhere_is_dropped(tmp_path: Path) -> None:
    """Within a character too: the cut then leaves bytes that are no UTF-8."""
    path = tmp_path / "out.jsonl"
    last = record("last", text="ü😀").encode()
    for length in range(1, len(last) - 1):
        path.write_bytes(record("a").encode() + last[:length])
        assert resumed(path, record("last")) == (record("a") + record("last"), Counter(["a"])), length


def test_a_record_that_lacks_only_its_line_break_is_not_run_into_by_the_next(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text(record("a") + record("b").removesuffix("\n"))
    content, finished = resumed(path, record("c"))
    assert [json.loads(line)["id"] for line in content.splitlines()] == ["a", "b", "c"]
    assert finished == Counter(["a", "b"]), "it is complete: nothing has to run again"


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", refuse)


@pytest.mark.usefixtures("full_disk")
def test_a_rewrite_that_fails_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text(record("a") + HALF)
    with pytest.raises(RakvError, match=r"cannot write .*out\.jsonl: No space left on device"):
        resume_output(path)
    assert path.read_text() == record("a") + HALF


@pytest.mark.usefixtures("full_disk")
def test_a_rewrite_that_fails_leaves_nothing_else_behind(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text(record("a") + HALF)
    with pytest.raises(RakvError):
        resume_output(path)
    assert list(tmp_path.iterdir()) == [path]


def test_a_rewrite_leaves_nothing_else_behind(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text(record("a") + HALF)
    resumed(path)
    assert list(tmp_path.iterdir()) == [path]


def test_a_rewrite_keeps_who_may_read_the_file(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text(record("a") + HALF)
    path.chmod(0o644)
    resumed(path)
    assert path.stat().st_mode & 0o777 == 0o644


def test_a_rewrite_goes_through_a_link_and_does_not_replace_it(tmp_path: Path) -> None:
    path, link = tmp_path / "out.jsonl", tmp_path / "link.jsonl"
    path.write_text(record("a") + HALF)
    link.symlink_to(path)
    resumed(link)
    assert link.is_symlink()
    assert path.read_text() == record("a")


@pytest.mark.parametrize("opened", [open_output, resume_output])
def test_a_file_that_cannot_be_written_is_an_error_for_users(opened: Any, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path, reason in (
        (tmp_path / "missing" / "out.jsonl", "No such file or directory"),
        (tmp_path / "file" / "out.jsonl", "Not a directory"),
        (tmp_path, "Is a directory"),
    ):
        with pytest.raises(RakvError, match=f"cannot write .*{path.name}: {reason}"):
            opened(path)


@pytest.fixture
def read_only_directory() -> Iterator[Path]:
    """A directory in which this process may create nothing: it gives up root's rights where it has them."""
    with tempfile.TemporaryDirectory() as name:
        path = Path(name)
        half_way = path / "half-way.jsonl"
        half_way.write_text(record("a") + HALF)
        half_way.chmod(0o666)
        path.chmod(0o555)
        is_root = os.geteuid() == 0
        if is_root:
            os.seteuid(65534)
        try:
            yield path
        finally:
            if is_root:
                os.seteuid(0)
            path.chmod(0o755)


@pytest.mark.parametrize("opened", [open_output, resume_output])
def test_a_read_only_directory_is_an_error_for_users(opened: Any, read_only_directory: Path) -> None:
    with pytest.raises(RakvError, match=r"cannot write .*new\.jsonl: Permission denied"):
        opened(read_only_directory / "new.jsonl")


def test_a_file_that_cannot_be_rewritten_is_left_as_it_was(read_only_directory: Path) -> None:
    path = read_only_directory / "half-way.jsonl"
    with pytest.raises(RakvError, match=r"cannot write .*half-way\.jsonl: Permission denied"):
        resume_output(path)
    assert path.read_text() == record("a") + HALF


# Totals


def shown(totals: Totals) -> dict[str, str]:
    """The table's rows by name."""
    console = Console(file=io.StringIO(), width=200)
    totals.show(console, {None: "engine of this process"})
    assert isinstance(console.file, io.StringIO)
    cells = [line.split("  ", 1) for line in console.file.getvalue().splitlines()]
    rows = {name.strip(): value.strip() for name, value in cells}
    assert rows.pop("engine") == "engine of this process"
    return rows


def test_totals_of_nothing_divide_by_nothing() -> None:
    totals = Totals()
    totals.num_failed = 2
    assert shown(totals) == {"prompts": "0 done, 2 failed"}
    assert totals.tokens_per_s == 0.0


def test_totals_add_tokens_and_take_medians_of_times() -> None:
    """The third completion, of one token, has no time per token after the first one."""
    plain = Decision(Action(reuse=False, draft_len=0), "joint-3")
    undrafted = replace(COMPLETION, decision=plain, num_reused_tokens=0, events=UNDRAFTED)
    totals = Totals()
    totals.add(replace(COMPLETION, ttft_ms=10.0, total_ms=30.0))
    totals.add(replace(undrafted, ttft_ms=20.0, total_ms=60.0))
    totals.add(replace(undrafted, ttft_ms=60.0, total_ms=60.0, token_ids=(5,), events=FIRST_TOKEN))
    totals.num_failed = 1
    assert (totals.num_done, totals.num_tokens) == (3, 11)
    assert totals.tokens_per_s == pytest.approx(11 / 0.15)
    assert shown(totals) == {
        "prompts": "3 done, 1 failed",
        "actions": "r=0 k=0 (2), r=1 k=3 (1)",
        "prompt tokens": "120, 32 reused",
        "new tokens": "11, 73.3 tokens/s",
        "time to first token": "20.0 ms (median)",
        "time per token after it": "7.50 ms (median)",
        "drafted tokens": "6, 33.3% accepted, 1.33 tokens a round",
        "rounds by drafted tokens": "0 (4), 3 (2)",
    }


def test_totals_leave_out_what_there_is_no_figure_for() -> None:
    plain = Decision(Action(reuse=False, draft_len=0), "ar")
    totals = Totals()
    totals.add(replace(COMPLETION, decision=plain, token_ids=(5,), events=FIRST_TOKEN))
    assert set(shown(totals)) == {"prompts", "actions", "prompt tokens", "new tokens", "time to first token"}


def test_totals_of_workers_say_which_actions_were_taken_where() -> None:
    """Workers on the same are told together; one that served nothing is there too."""
    plain = Decision(Action(reuse=False, draft_len=0), "ar")
    totals = Totals()
    totals.add(COMPLETION, worker=0)
    totals.add(COMPLETION, worker=1)
    totals.add(replace(COMPLETION, decision=plain), worker=1)
    console = Console(file=io.StringIO(), width=200)
    totals.show(console, {0: "old: CPU", 1: "old: CPU", 2: "new: GPU"})
    assert isinstance(console.file, io.StringIO)
    lines = [line.split() for line in console.file.getvalue().splitlines()]
    assert lines[:4] == [
        ["2", "workers", "old:", "CPU"],
        ["r=0", "k=0", "(1),", "r=1", "k=3", "(2)"],
        ["1", "worker", "new:", "GPU"],
        ["nothing", "yet"],
    ]
    assert any("tokens/s each worker" in " ".join(line) for line in lines)


def test_a_median_of_very_many_is_that_of_a_fair_sample() -> None:
    """Memory stays what it is, and values that come late count as much as those that came first."""
    totals = Totals()
    for number in range(40_000):
        totals.add(replace(COMPLETION, ttft_ms=float(number)))
    median = float(shown(totals)["time to first token"].removesuffix(" ms (median)"))
    assert median == pytest.approx(20_000, rel=0.03)


# Sizes


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("0", 0),
        ("1048576", 1048576),
        ("7B", 7),
        ("512MiB", 512 * 2**20),
        ("512mib", 512 * 2**20),
        (" 512 MiB ", 512 * 2**20),
        ("1KiB", 1024),
        ("4GiB", 4 * 2**30),
        ("1TiB", 2**40),
        ("1kB", 1000),
        ("3MB", 3 * 10**6),
        ("2GB", 2 * 10**9),
        ("1TB", 10**12),
        ("1.5GiB", 3 * 2**29),
        ("0.5MB", 500_000),
        ("0.3B", 0),
    ],
)
def test_a_size_is_binary_with_an_i_and_decimal_without(text: str, num_bytes: int) -> None:
    assert parse_bytes(text) == num_bytes


@given(st.integers(0, 2**20), st.sampled_from(["", "B", "KiB", "MB", "GiB"]))
def test_a_whole_number_of_any_unit_loses_nothing(number: int, unit: str) -> None:
    factor = {"": 1, "B": 1, "KiB": 2**10, "MB": 10**6, "GiB": 2**30}[unit]
    assert parse_bytes(f"{number}{unit}") == number * factor


@pytest.mark.parametrize(
    "text",
    ["", " ", "MiB", "-1", "-1MiB", "+1", "1e3", "nan", "inf", "1.MB", ".5MB", "1,5GB", "12XB", "1 2MB", "1MiBs"],
)
def test_anything_else_is_no_size(text: str) -> None:
    with pytest.raises(UsageError, match="is not a size"):
        parse_bytes(text)


def test_a_size_beyond_all_numbers_is_wrong_usage() -> None:
    """As a float it is infinite, and infinity has no integer."""
    with pytest.raises(UsageError):
        parse_bytes("9" * 400 + "GiB")
