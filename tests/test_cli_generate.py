"""`rakvctl generate` from its arguments to its exit code.

Most tests call `main` in this process. A process of its own, which takes seconds to start, runs where streams, signals
or imports are what is tested.
"""

import gc
import io
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import torch
from transformers import AutoTokenizer

from rakvctl.cli import generate as generate_module
from rakvctl.cli.app import main
from rakvctl.cli.generate import GenerateOptions, generate
from rakvctl.cli.inputs import Prompt, PromptSource
from rakvctl.core.errors import RakvError
from rakvctl.core.loading import RuntimeOptions
from rakvctl.core.models import Notify
from rakvctl.core.runtime import Runtime
from rakvctl.core.types import Completion, Request, SamplingParams
from rakvctl.measure.ready import load_runtime
from rakvctl.measure.timing import Progress
from tests.checkpoints import build_checkpoint
from tests.program import assert_error

MAX_POSITIONS = 256
LONG_PROMPT = "The quick brown fox jumps over the lazy dog, and the dog does not mind."
DEADLINE_SECONDS = 120.0


@dataclass(frozen=True)
class Finished:
    """A call that has ended: exit code, stdout, stderr."""

    code: int | str | None
    out: str
    err: str

    @property
    def records(self) -> list[dict[str, Any]]:
        """Every line of stdout, each of which has to be a record."""
        return [json.loads(line) for line in self.out.split("\n")[:-1]]

    @property
    def ids(self) -> list[str | int]:
        return [record["id"] for record in self.records]


Call = Callable[..., Finished]


@pytest.fixture(autouse=True)
def garbage_is_collected() -> Iterator[None]:
    """The program sets its garbage collector for a process of its own; this one goes on to other tests."""
    yield
    gc.enable()
    gc.unfreeze()


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Models as small as these only lose time with more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """No setting of the user's, and no network."""
    for name in [name for name in os.environ if name.startswith("RAKVCTL_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture
def target(tiny_checkpoint: Path) -> str:
    return str(tiny_checkpoint / "target")


@pytest.fixture
def draft(tiny_checkpoint: Path) -> str:
    return str(tiny_checkpoint / "draft")


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    """Run the program with these arguments in this process. `stdin` None is a terminal."""

    def run(*arguments: str | Path, stdin: bytes | None = b"") -> Finished:
        monkeypatch.setattr(sys, "argv", ["rakvctl", *map(str, arguments)])
        stream = io.TextIOWrapper(io.BytesIO(stdin or b""))
        if stdin is None:
            monkeypatch.setattr(stream, "isatty", lambda: True)
        monkeypatch.setattr(sys, "stdin", stream)
        with pytest.raises(SystemExit) as ended:
            main()
        return Finished(ended.value.code, *capsys.readouterr())

    return run


@pytest.fixture
def run_generate(run: Call, target: str) -> Call:
    """`rakvctl generate` with the small random target, and a policy that needs no profile unless another is named."""

    def run_generate(*arguments: str | Path, stdin: bytes | None = b"") -> Finished:
        return run("generate", "-m", target, "--policy", "kv", *arguments, stdin=stdin)

    return run_generate


def jsonl(path: Path, *records: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def without_times(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    names = ("total_ms", "ttft_ms", "tpot_ms", "tokens_per_s")
    return [{name: value for name, value in record.items() if name not in names} for record in records]


# One prompt


def test_one_prompt_gives_its_text_and_nothing_else(run_generate: Call) -> None:
    text = run_generate("hello", "-n", "12")
    assert (text.code, text.err) == (0, "")
    [record] = run_generate("hello", "-n", "12", "-o", "jsonl").records
    assert record["completion_tokens"] == 12
    assert text.out == record["text"] + "\n"


def test_a_prompt_gives_the_same_text_as_argument_through_a_pipe_and_in_a_file(
    run_generate: Call, tmp_path: Path
) -> None:
    expected = run_generate("hello", "-n", "8").out
    assert expected.strip()
    (tmp_path / "p.txt").write_text("hello\n")
    assert run_generate("-n", "8", stdin=b"hello\n").out == expected
    assert run_generate("-", "-n", "8", stdin=b"hello\n").out == expected
    assert run_generate("-f", tmp_path / "p.txt", "-n", "8", stdin=None).out == expected


def test_text_is_flushed_as_it_comes(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed: list[str] = []

    class Stdout(io.StringIO):
        def flush(self) -> None:
            flushed.append(self.getvalue())

    monkeypatch.setattr(sys, "stdout", Stdout())
    source = PromptSource(iter([Prompt(1, "hello", SamplingParams(max_new_tokens=12))]), several=False)
    assert generate(source, RuntimeOptions(target=target), options()) == 0
    assert len(set(flushed)) > 3
    assert all(longer.startswith(shorter) for shorter, longer in itertools.pairwise(flushed))


def test_a_failed_prompt_is_an_error_on_stderr(run_generate: Call, tmp_path: Path) -> None:
    assert_error(run_generate(""), 1, "the prompt is empty")
    assert_error(run_generate(stdin=b""), 1, "the prompt is empty")
    assert_error(run_generate("word " * 400), 1, f"the model room for {MAX_POSITIONS}")
    assert_error(run_generate(stdin=b"caf\xe9"), 1, "invalid UTF-8 at byte 3")
    (tmp_path / "latin-1.txt").write_bytes(b"caf\xe9")
    assert_error(run_generate("-f", tmp_path / "latin-1.txt"), 1, "invalid UTF-8 at byte 3")
    assert_error(run_generate("caf\udce9"), 1, "not valid UTF-8")


def test_a_prompt_may_be_as_long_as_leaves_one_position(run_generate: Call) -> None:
    def characters(count: int) -> Finished:
        return run_generate("\x01" * count, "-n", "9", "-o", "jsonl")

    [record] = characters(MAX_POSITIONS - 1).records
    assert (record["prompt_tokens"], record["completion_tokens"]) == (MAX_POSITIONS - 1, 1)
    assert record["finish_reason"] == "length"
    assert characters(MAX_POSITIONS).records[0]["finish_reason"] == "error"


def test_a_stop_string_ends_the_text_and_is_no_part_of_it(run_generate: Call) -> None:
    [whole] = run_generate("hello", "-n", "24", "-o", "jsonl").records
    stop = whole["text"][5:8]
    [stopped] = run_generate("hello", "-n", "24", "-o", "jsonl", "--stop", "not there", "--stop", stop).records
    assert stopped["text"] == whole["text"].split(stop)[0]
    assert stopped["finish_reason"] == "stop"
    assert stopped["completion_tokens"] < whole["completion_tokens"]
    assert run_generate("hello", "-n", "24", "--stop", stop).out == stopped["text"] + "\n"


def test_backslash_escapes_in_a_stop_are_those_of_the_command_line_only(run_generate: Call) -> None:
    text = run_generate("hello", "-n", "16", "-o", "jsonl").records[0]["text"]
    written = "".join(f"\\u{ord(letter):04x}" for letter in text[5:8])
    assert run_generate("hello", "-n", "16", "-o", "jsonl", "--stop", written).records[0]["text"] == text[:5]
    line = json.dumps({"prompt": "hello", "stop": written}).encode()
    assert run_generate("-n", "16", stdin=line).records[0]["text"] == text


def test_an_argument_and_piped_text_are_one_prompt(run_generate: Call) -> None:
    expected = run_generate("Explain\n\na = 1", "-n", "6").out
    assert run_generate("Explain", "-n", "6", stdin=b"a = 1\n").out == expected
    assert expected != run_generate("Explain", "-n", "6").out


def test_a_seed_repeats_the_draws_and_another_one_does_not(run_generate: Call) -> None:
    def text(*seed: str) -> str:
        return run_generate("hello", "-n", "24", "--temperature", "2", *seed).out

    assert text("--seed", "1") == text("--seed", "1")
    assert text("--seed", "1") != text("--seed", "2")
    assert text() != text()


def test_the_lowest_temperatures_are_as_good_as_greedy(run_generate: Call) -> None:
    """Scores divided by them are beyond all floats; a warning about that would be seen on stderr."""
    greedy = run_generate("hello", "-n", "12").out
    for temperature in ("1e-4", "1e-300", "1e-310"):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert run_generate("hello", "-n", "12", "--temperature", temperature) == Finished(0, greedy, "")


def test_drawing_from_one_token_alone_is_greedy(run_generate: Call) -> None:
    greedy = run_generate("hello", "-n", "12").out
    assert run_generate("hello", "-n", "12", "--temperature", "3", "--top-k", "1").out == greedy
    assert run_generate("hello", "-n", "12", "--temperature", "3", "--top-p", "0.000001").out == greedy


def test_models_may_be_named_in_the_environment(
    run: Call, target: str, draft: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAKVCTL_TARGET", target)
    monkeypatch.setenv("RAKVCTL_DRAFT", draft)
    [record] = run("generate", "hello", "-n", "4", "-o", "jsonl", "--policy", "spec-2").records
    assert record["action"] == {"reuse": False, "draft_len": 2, "drafter": "model"}


# Several prompts


def test_records_come_in_input_order_under_the_ids_of_their_lines(run_generate: Call) -> None:
    lines = b'{"id": "b", "prompt": "one"}\n{"prompt": "two"}\n{"id": 7, "prompt": "three"}\n'
    finished = run_generate("-n", "3", stdin=lines)
    assert (finished.code, finished.err) == (0, "")
    assert finished.ids == ["b", 2, 7]
    alone = [run_generate(prompt, "-n", "3", "-o", "jsonl").records[0]["text"] for prompt in ("one", "two", "three")]
    assert [record["text"] for record in finished.records] == alone


def test_each_record_is_written_before_the_next_prompt_is_asked_for(
    target: str, capsys: pytest.CaptureFixture[str]
) -> None:
    written: list[str] = []

    def prompts() -> Iterator[Prompt]:
        for number in (1, 2, 3):
            written.append(capsys.readouterr().out)
            yield Prompt(number, "hello", SamplingParams(max_new_tokens=2))

    assert generate(PromptSource(prompts(), several=True), RuntimeOptions(target=target), options()) == 0
    written.append(capsys.readouterr().out)
    assert written[0] == ""
    assert [json.loads(text)["id"] for text in written[1:]] == [1, 2, 3]


def test_a_line_puts_its_own_parameters_in_force(run_generate: Call) -> None:
    lines = [
        {"prompt": "hello"},
        {"prompt": "hello", "max_new_tokens": 2},
        {"prompt": "hello", "temperature": 2, "seed": 5},
        {"prompt": "hello", "temperature": 2, "seed": 5},
        {"prompt": "hello", "stop": []},
    ]
    plain = run_generate("hello", "-n", "16", "-o", "jsonl").records[0]["text"]
    stdin = "".join(json.dumps(line) + "\n" for line in lines).encode()
    first, short, drawn, again, unstopped = run_generate("-n", "16", "--stop", plain[5:8], stdin=stdin).records
    assert first["finish_reason"] == "stop"
    assert short["completion_tokens"] == 2
    assert drawn["text"] == again["text"]
    assert drawn["text"] != first["text"]
    assert (unstopped["text"], unstopped["finish_reason"]) == (plain, "length")


def test_texts_of_several_prompts_are_separated_and_errors_go_to_stderr(run_generate: Call) -> None:
    stdin = b"one\nbad \xff\ntwo\n"
    finished = run_generate("-n", "6", "--format", "lines", "-o", "text", stdin=stdin)
    one, two = (run_generate(prompt, "-n", "6").out for prompt in ("one", "two"))
    assert finished.out == f"{one}\n{two}"
    assert finished.err == "Error: prompt 2: line 2: invalid UTF-8 at byte 4\nHint: save the prompts as UTF-8\n"
    assert finished.code == 1


def give_up_on(content: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the engine run out of memory on the prompt with this text."""
    run = Runtime.run

    def run_or_not(runtime: Runtime, request: Request, on_text: Callable[[str], None]) -> Completion:
        if runtime.codec.decode(request.prompt_token_ids) == content:
            raise MemoryError("no room for it\nat all")
        return run(runtime, request, on_text)

    monkeypatch.setattr(Runtime, "run", run_or_not)


def test_an_engine_that_gives_up_on_one_prompt_serves_the_others(
    run_generate: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    give_up_on("b", monkeypatch)
    finished = run_generate("-n", "2", "--format", "lines", stdin=b"a\nb\nc\n")
    assert [record["finish_reason"] for record in finished.records] == ["length", "error", "length"]
    assert "no room for it" in finished.records[1]["error"]
    assert finished.code == 1


def test_an_engine_that_gives_up_shows_where_if_debugging_is_on(
    run_generate: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    give_up_on("b", monkeypatch)
    monkeypatch.setenv("RAKVCTL_DEBUG", "1")
    with pytest.raises(MemoryError, match="no room for it"):
        run_generate("-n", "2", "--format", "lines", stdin=b"a\nb\nc\n")


def test_argument_and_files_are_run_one_after_another(run_generate: Call, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("a whole\ntext\n")
    lines = jsonl(tmp_path / "lines.jsonl", {"id": "x", "prompt": "a line"}, {"id": "y", "prompt": "another"})
    finished = run_generate("first", "-f", tmp_path / "text.txt", "-f", lines, "-n", "1")
    assert finished.ids == [1, 2, "x", "y"]


def test_a_file_of_no_prompts_is_done_at_once(run_generate: Call, tmp_path: Path) -> None:
    assert run_generate("-f", jsonl(tmp_path / "none.jsonl")) == Finished(0, "", "")


@pytest.mark.parametrize("policy", ["ar", "kv", "spec-3", "joint-3"])
def test_the_record_says_what_was_reused_and_drafted(policy: str, run_generate: Call, draft: str) -> None:
    """The same prompt twice: only the second can find something stored."""
    stdin = (json.dumps({"prompt": LONG_PROMPT}) + "\n").encode() * 2
    first, second = run_generate("-n", "12", "--policy", policy, "-d", draft, stdin=stdin).records
    plain = run_generate(LONG_PROMPT, "-n", "12", "--policy", "ar", "-o", "jsonl").records[0]
    draft_len = 3 if policy.endswith("3") else 0
    for record in (first, second):
        assert (record["text"], record["completion_tokens"], record["policy"]) == (plain["text"], 12, policy)
        assert record["action"]["draft_len"] == draft_len
        assert record["action"]["drafter"] == ("model" if draft_len else "none")
        assert (record["num_draft_tokens"] > 0) == bool(draft_len)
    assert (first["action"]["reuse"], first["reused_tokens"]) == (False, 0)
    assert second["action"]["reuse"] == (policy in ("kv", "joint-3"))
    assert second["reused_tokens"] == (second["prompt_tokens"] if second["action"]["reuse"] else 0)


def test_without_memory_for_it_nothing_is_reused(run_generate: Call) -> None:
    stdin = (json.dumps({"prompt": LONG_PROMPT}) + "\n").encode() * 2
    assert [record["reused_tokens"] for record in run_generate("--kv-budget", "0", "-n", "2", stdin=stdin).records] == [
        0,
        0,
    ]


# Chats


@pytest.fixture(scope="module")
def chat_target(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The target with a chat template that allows only users to speak."""
    directory = tmp_path_factory.mktemp("chat") / "target"
    shutil.copytree(tiny_checkpoint / "target", directory)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    tokenizer.chat_template = (
        "{% for message in messages %}"
        "{% if message.role != 'user' %}{{ raise_exception('only\nusers speak') }}{% endif %}"
        "<{{ message.content }}>"
        "{% endfor %}"
        "{% if add_generation_prompt %}answer:{% endif %}"
    )
    tokenizer.save_pretrained(directory)
    return str(directory)


def test_a_model_with_a_template_is_given_chats_unless_raw_is_asked_for(
    run: Call, run_generate: Call, chat_target: str
) -> None:
    def text(*arguments: str, stdin: bytes = b"") -> str:
        [record] = run("generate", "-m", chat_target, "-n", "9", "-o", "jsonl", *arguments, stdin=stdin).records
        assert isinstance(record["text"], str)
        return record["text"]

    as_chat, raw = (
        run_generate(prompt, "-n", "9", "-o", "jsonl").records[0]["text"] for prompt in ("<hi>answer:", "hi")
    )
    assert as_chat != raw
    assert text("hi") == text("hi", "--chat") == as_chat
    assert text("hi", "--raw") == raw
    messages = b'{"messages": [{"role": "user", "content": "hi"}]}\n'
    assert text(stdin=messages) == text("--chat", stdin=messages) == as_chat


def test_an_empty_prompt_is_empty_also_as_a_chat(run: Call, chat_target: str) -> None:
    assert_error(run("generate", "-m", chat_target, ""), 1, "the prompt is empty")


def test_messages_that_a_template_refuses_are_an_error_of_that_line(run: Call, chat_target: str) -> None:
    lines = b"".join(
        b'{"messages": [{"role": "%s", "content": "hi"}]}\n' % role for role in (b"user", b"robot", b"user")
    )
    finished = run("generate", "-m", chat_target, "-n", "2", stdin=lines)
    assert [record["finish_reason"] for record in finished.records] == ["length", "error", "length"]
    assert "users speak" in finished.records[1]["error"]
    assert finished.code == 1


def test_a_template_that_breaks_on_one_prompt_costs_no_other(run: Call, chat_target: str, tmp_path: Path) -> None:
    """Templates are programs: they raise what Python raises, not only what they mean to."""
    shutil.copytree(chat_target, tmp_path / "target")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "target")
    tokenizer.chat_template = "{% if messages[0].content == 'b' %}{{ 1 + 'b' }}{% endif %}{{ messages[0].content }}"
    tokenizer.save_pretrained(tmp_path / "target")
    finished = run("generate", "-m", tmp_path / "target", "-n", "2", "--format", "lines", stdin=b"a\nb\nc\n")
    assert [record["finish_reason"] for record in finished.records] == ["length", "error", "length"]
    assert "template" in finished.records[1]["error"]
    assert finished.code == 1


def test_the_error_of_a_template_takes_two_lines_like_any_other(run: Call, chat_target: str) -> None:
    lines = b'{"messages": [{"role": "robot", "content": "hi"}]}\n'
    finished = run("generate", "-m", chat_target, "-o", "text", stdin=lines)
    assert_error(finished, 1, "users speak")


def test_messages_cannot_be_run_raw_or_without_a_template(run: Call, run_generate: Call, chat_target: str) -> None:
    lines = b'{"messages": [{"role": "user", "content": "hi"}]}\n'
    [raw] = run("generate", "-m", chat_target, "--raw", stdin=lines).records
    assert "raw" in raw["error"]
    [untrained] = run_generate(stdin=lines).records
    assert "no chat template" in untrained["error"]
    assert_error(run_generate("hi", "--chat"), 1, "no chat template")


# Files of results


def options(**changed: Any) -> GenerateOptions:
    defaults = {"chat": None, "output": None, "out": None, "resume": False, "stats": False, "quiet": False}
    return GenerateOptions(**{**defaults, **changed})


def test_results_go_to_the_file_and_stdout_stays_empty(run_generate: Call, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.write_text("what was there before\n")
    lines = jsonl(tmp_path / "p.jsonl", {"id": "a", "prompt": "hello"}, {"id": "b", "prompt": "world"})
    assert run_generate("-f", lines, "-n", "4", "--out", out) == Finished(0, "", "")
    written = Finished(0, out.read_text(), "")
    assert without_times(written.records) == without_times(run_generate("-f", lines, "-n", "4").records)
    assert run_generate("hello", "-n", "4", "--out", out) == Finished(0, "", "")
    assert out.read_bytes().decode() == run_generate("hello", "-n", "4").out


def test_a_resumed_run_serves_what_failed_or_is_not_there(run_generate: Call, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    first = jsonl(tmp_path / "1.jsonl", {"id": "a", "prompt": "hello"}, {"id": "b"}, {"id": "c", "prompt": "world"})
    assert run_generate("-f", first, "-n", "2", "--out", out).code == 1
    before = Finished(0, out.read_text(), "").records
    assert [record["finish_reason"] for record in before] == ["length", "error", "length"]

    names = ["a", "b", "c", "d"]
    second = jsonl(tmp_path / "2.jsonl", *({"id": name, "prompt": "mended"} for name in names))
    assert run_generate("-f", second, "-n", "3", "--out", out, "--resume") == Finished(0, "", "")
    after = Finished(0, out.read_text(), "")
    assert after.ids == ["a", "c", "b", "d"]
    assert [after.records[0], after.records[1]] == [before[0], before[2]]
    assert [record["completion_tokens"] for record in after.records[2:]] == [3, 3]

    content = out.read_bytes()
    nothing_left = run_generate("-f", second, "-m", "not/there", "--out", out, "--resume", "--stats")
    assert (nothing_left.code, nothing_left.out) == (0, "")
    assert "nothing is left to run" in nothing_left.err, "and no model was looked for"
    assert out.read_bytes() == content


def test_a_prompt_that_fails_again_still_fails_the_resumed_run(run_generate: Call, tmp_path: Path) -> None:
    out, lines = tmp_path / "out.jsonl", jsonl(tmp_path / "p.jsonl", {"id": "a", "prompt": "hello"}, {"id": "b"})
    for _ in range(2):
        assert run_generate("-f", lines, "-n", "2", "--out", out, "--resume").code == 1
        assert [json.loads(line)["id"] for line in out.read_text().splitlines()] == ["a", "b"]


def test_an_id_that_occurs_twice_is_served_as_often_as_it_is_not_there(run_generate: Call, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    same = {"id": "same", "prompt": "hello"}
    run_generate("-f", jsonl(tmp_path / "1.jsonl", same), "-n", "2", "--out", out)
    run_generate("-f", jsonl(tmp_path / "3.jsonl", same, same, same), "-n", "3", "--out", out, "--resume")
    assert [json.loads(line)["completion_tokens"] for line in out.read_text().splitlines()] == [2, 3, 3]


def test_one_prompt_may_be_resumed_as_a_record(run_generate: Call, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    arguments = ("hello", "-n", "2", "-o", "jsonl", "--out", out, "--resume")
    assert run_generate(*arguments).code == 0
    content = out.read_bytes()
    assert run_generate(*arguments).code == 0
    assert out.read_bytes() == content


@pytest.mark.parametrize("resume", [[], ["--resume"]])
def test_a_prompt_file_is_not_overwritten_by_its_results(
    resume: list[str], run_generate: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is read lazily would be gone before it is read; or, resumed, each record would be the next prompt."""
    monkeypatch.setattr(generate_module, "load_runtime", lambda *_: pytest.fail("a model was loaded"))
    lines = jsonl(tmp_path / "p.jsonl", {"prompt": "hello"}, {"prompt": "world"})
    content = lines.read_text()
    finished = run_generate("-f", lines, "-n", "1", "--out", lines, *resume)
    assert lines.read_text() == content
    assert_error(finished, 2, "p.jsonl")


def test_an_output_that_cannot_be_written_is_known_before_a_model_is_loaded(
    run_generate: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generate_module, "load_runtime", lambda *_: pytest.fail("a model was loaded"))
    for arguments in ([], ["-o", "jsonl", "--resume"]):
        finished = run_generate("hello", "--out", tmp_path / "missing" / "out.jsonl", *arguments)
        assert_error(finished, 1, "missing/out.jsonl: No such file or directory")
        assert_error(run_generate("hello", "--out", tmp_path, *arguments), 1, ": Is a directory")
        too_long = tmp_path / ("x" * 300)
        finished = run_generate("hello", "--out", too_long, *arguments)
        assert_error(finished, 1, "cannot write")
        assert "File name too long" in finished.err


def test_records_written_so_far_stay_where_something_breaks(target: str, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"

    def prompts() -> Iterator[Prompt]:
        yield Prompt("a", "hello", SamplingParams(max_new_tokens=2))
        raise OSError("the disk of the prompts is gone")

    with pytest.raises(OSError, match="is gone"):
        generate(PromptSource(prompts(), several=True), RuntimeOptions(target=target), options(out=out))
    assert [json.loads(line)["id"] for line in out.read_text().splitlines()] == ["a"]


# Notes and statistics


def test_statistics_go_to_stderr_and_results_alone_to_stdout(run_generate: Call) -> None:
    stdin = b'{"id": "a", "prompt": "hello"}\n{"id": "b"}\n'
    finished = run_generate("-n", "3", "--stats", stdin=stdin)
    assert finished.ids == ["a", "b"]
    assert "1 done, 1 failed" in finished.err
    assert "3, " in finished.err
    assert "tokens/s" in finished.err
    text = run_generate("hello", "-n", "3", "--stats")
    assert text.out == run_generate("hello", "-n", "3").out
    assert "1 done, 0 failed" in text.err


def test_notes_go_to_stderr_unless_they_are_unwanted(run_generate: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(runtime_options: RuntimeOptions, notify: Notify, on_progress: Progress) -> Runtime:
        notify("this takes a while")
        return load_runtime(runtime_options, notify, on_progress)

    monkeypatch.setattr(generate_module, "load_runtime", load)
    loud = run_generate("hello", "-n", "2")
    assert loud.err == "Note: this takes a while\n"
    assert run_generate("hello", "-n", "2", "-q") == Finished(0, loud.out, "")
    assert "1 done" in run_generate("hello", "-n", "2", "--quiet", "--stats").err, "statistics were asked for"


def test_where_reuse_and_drafts_may_change_a_text_it_is_said(run_generate: Call) -> None:
    drafting = ("hello", "-n", "2", "--policy", "spec-2", "--drafter", "lookup")
    assert run_generate(*drafting).err == "", "float32"
    said = run_generate(*drafting, "--dtype", "bfloat16").err
    assert "differ from pass to pass, by up to" in said
    assert said.count("\n") == 1
    assert run_generate("hello", "-n", "2", "--policy", "ar", "--dtype", "bfloat16").err == ""


def test_how_far_logits_differ_is_not_measured_again_where_the_user_s_profile_has_it(
    run_generate: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    half = ("hello", "-n", "2", "--dtype", "bfloat16", "--policy")
    assert run_generate(*half, "auto").code == 0

    def measure(_: object) -> float:
        raise AssertionError("measured again")

    monkeypatch.setattr("rakvctl.core.loading.logit_difference", measure)
    assert "differ from pass to pass" in run_generate(*half, "spec-2", "--drafter", "lookup").err
    assert "differ from pass to pass" in run_generate(*half, "kv").err, "which reuses"
    assert run_generate(*half, "ar").err == ""


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Stderr is a terminal, stdout is not."""
    monkeypatch.setenv("TERM", "xterm")

    def is_stderr(stream: object) -> bool:
        return stream is getattr(sys.stderr, "rich_proxied_file", sys.stderr)

    monkeypatch.setattr(type(sys.stderr), "isatty", is_stderr)


@pytest.mark.usefixtures("terminal")
def test_progress_is_shown_on_a_terminal_beside_the_results(run_generate: Call) -> None:
    finished = run_generate("-n", "2", stdin=b'{"prompt": "hello"}\n{"id": "bad"}\n')
    assert finished.ids == [1, "bad"]
    assert "1 prompts, 1 failed" in finished.err


@pytest.mark.usefixtures("terminal")
def test_no_progress_is_shown_for_one_prompt_or_quietly_or_among_the_results(
    run_generate: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = b'{"prompt": "hello"}\n'
    assert run_generate("hello", "-n", "2").err == ""
    assert run_generate("-n", "2", "--quiet", stdin=lines).err == ""
    monkeypatch.setattr(type(sys.stderr), "isatty", lambda stream: stream in (sys.stderr, sys.stdout))
    assert run_generate("-n", "2", stdin=lines).err == ""


# Errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "command"),
        (["invent"], "invent"),
        (["generate", "x", "y"], "y"),
        (["generate", "x", "--nothing"], "--nothing"),
        (["generate", "x", "-f"], "-f"),
        (["generate", "x", "--format", "xml"], "xml"),
        (["generate", "x", "--output", "xml"], "xml"),
        (["generate", "x", "--dtype", "float8"], "float8"),
        (["generate", "x", "--drafter", "crystal-ball"], "crystal-ball"),
        (["generate", "x", "-n", "0"], "--max-new-tokens"),
        (["generate", "x", "-n", "many"], "--max-new-tokens"),
        (["generate", "x", "--temperature", "-1"], "--temperature"),
        (["generate", "x", "--temperature", "nan"], "--temperature"),
        (["generate", "x", "--top-p", "0"], "--top-p"),
        (["generate", "x", "--top-p", "1.5"], "--top-p"),
        (["generate", "x", "--top-p", "nan"], "--top-p"),
        (["generate", "x", "--top-k", "-1"], "--top-k"),
        (["generate", "x", "--seed", "-1"], "--seed"),
        (["generate", "x", "--threads", "0"], "--threads"),
        (["generate", "x", "--threads", "-1"], "--threads"),
        (["generate", "x", "--threads", "100000"], "--threads 100000 is more than the"),
        (["generate", "x", "-m", ""], "--target"),
        (["generate", "x", "-d", " "], "--draft"),
        (["generate", "x", "--device", ""], "--device"),
        (["generate", "x", "--profile", ""], "--profile"),
        (["generate", "x", "--stop", ""], "--stop"),
        (["generate", "x", "--kv-budget", "lots"], "lots"),
        (["generate", "x", "--policy", "best"], "best"),
        (["generate", "x", "--policy", "spec-0"], "spec-0"),
        (["generate", "x", "--policy", "joint-33"], "joint-33"),
        (["generate", "x", "--policy", "spec-3"], "drafter"),
        (["generate", "x", "--policy", "spec-3", "--drafter", "none"], "drafter"),
        (["generate", "x", "--policy", "spec-3", "-d", "none"], "drafter"),
        (["generate", "x", "--device", "abacus"], "abacus"),
        (["generate", "x", "--resume"], "--resume"),
        (["generate", "x", "-o", "jsonl", "--resume"], "--resume"),
        (["generate", "x", "--out", "out", "--resume"], "--resume"),
        (["generate", "x", "-f", "-", "-o", "text", "--out", "out", "--resume"], "--resume"),
        (["generate"], "no prompt"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_wrong_usage_takes_two_lines_and_exits_2(
    arguments: list[str],
    message: str,
    run: Call,
    target: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RAKVCTL_TARGET", target)
    assert_error(run(*arguments, stdin=None), 2, message)
    assert list(tmp_path.iterdir()) == []


def test_a_prompt_file_that_cannot_be_read_exits_1(run_generate: Call, tmp_path: Path) -> None:
    assert_error(run_generate("-f", tmp_path / "missing.txt"), 1, "missing.txt: No such file or directory")
    assert_error(run_generate("-f", tmp_path), 1, ": Is a directory")


def test_a_model_that_cannot_be_had_exits_1(run: Call, run_generate: Call, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "not.gguf").write_bytes(b"GGUF no more")
    for name, message in (
        (tmp_path / "missing", "there is no model"),
        (tmp_path / "missing.gguf", "there is no file"),
        (tmp_path / "empty", "no config.json"),
        ("rakvctl-tests/no-such-model", "cannot get rakvctl-tests/no-such-model: not in the local Hub cache"),
    ):
        assert_error(run("generate", "x", "-m", name), 1, message)
        assert_error(run_generate("x", "-d", name, "--policy", "spec-2"), 1, message)


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "config.json", "generation_config.json"])
@pytest.mark.parametrize("damage", ["emptied", "cut off", "overwritten"])
def test_a_model_of_which_a_file_is_broken_exits_1_and_is_named(
    name: str, damage: str, run: Call, target: str, tmp_path: Path
) -> None:
    shutil.copytree(target, tmp_path / "broken")
    file = tmp_path / "broken" / name
    content = file.read_bytes()
    file.write_bytes({"emptied": b"", "cut off": content[: len(content) // 2], "overwritten": b"\xff" * 99}[damage])
    assert_error(run("generate", "x", "-m", tmp_path / "broken"), 1, str(tmp_path / "broken"))


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
def test_a_model_of_which_a_file_is_missing_exits_1_and_is_named(
    name: str, run: Call, target: str, tmp_path: Path
) -> None:
    shutil.copytree(target, tmp_path / "broken")
    (tmp_path / "broken" / name).unlink()
    assert_error(run("generate", "x", "-m", tmp_path / "broken"), 1, str(tmp_path / "broken"))


def test_a_draft_with_another_tokenizer_is_wrong_usage(run_generate: Call, draft: str, tmp_path: Path) -> None:
    shutil.copytree(draft, tmp_path / "other")
    tokenizer = AutoTokenizer.from_pretrained(draft)
    tokenizer.add_tokens(["<one more>"])
    tokenizer.save_pretrained(tmp_path / "other")
    finished = run_generate("x", "-d", tmp_path / "other", "--policy", "spec-2")
    assert_error(finished, 2, f"token {len(tokenizer) - 1} is missing in the target and '<one more>' in the draft")


def test_what_nobody_foresaw_takes_two_lines_too(run_generate: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: object) -> Runtime:
        raise ZeroDivisionError("a first line\nand more")

    monkeypatch.setattr(generate_module, "load_runtime", load)
    finished = run_generate("x")
    assert_error(finished, 1, "ZeroDivisionError: a first line")
    assert "RAKVCTL_DEBUG=1" in finished.err


@pytest.mark.parametrize("value", ["", "0"])
def test_debugging_is_off_where_the_variable_says_nothing(
    value: str, run_generate: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAKVCTL_DEBUG", value)
    assert_error(run_generate("-f", tmp_path / "missing.txt"), 1, "missing.txt")


def test_an_error_goes_its_way_where_debugging_is_on(
    run_generate: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAKVCTL_DEBUG", "1")
    with pytest.raises(RakvError, match=r"missing\.txt"):
        run_generate("-f", tmp_path / "missing.txt")


def test_help_names_every_option_of_the_contract_that_is_there(run: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    finished = run("generate", "--help")
    assert (finished.code, finished.err) == (0, "")
    names = "--target --draft --device --dtype --threads --file --format --max-new-tokens --temperature --top-p --top-k"
    names += " --seed --stop --chat --raw --policy --drafter --kv-budget --output --out --resume --stats --quiet"
    assert [name for name in names.split() if name not in finished.out.split()] == []


# A process of its own


def start(
    *arguments: str | Path,
    stdin: int | BinaryIO = subprocess.DEVNULL,
    stdout: int | BinaryIO = subprocess.PIPE,
    closed: int | None = None,
    env: dict[str, str] | None = None,
) -> "subprocess.Popen[bytes]":
    """Start the program, with the descriptor `closed` closed; interruptible even where the tests themselves are not."""

    def prepare() -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        if closed is not None:
            os.close(closed)

    settings = {name: value for name, value in os.environ.items() if not name.startswith("RAKVCTL_")}
    return subprocess.Popen(
        [sys.executable, "-m", "rakvctl", *map(str, arguments)],
        stdin=stdin,
        stdout=stdout,
        stderr=subprocess.PIPE,
        env={**settings, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **(env or {})},
        preexec_fn=prepare,
    )


def finish(process: "subprocess.Popen[bytes]", stdin: bytes | None = None) -> Finished:
    out, err = process.communicate(stdin, timeout=DEADLINE_SECONDS)
    return Finished(process.returncode, (out or b"").decode(), (err or b"").decode())


def wait_until(condition: Callable[[], bool], process: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        assert process.poll() is None, "it ended too early"
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_libraries_add_nothing_to_either_stream(tiny_checkpoint: Path, run_generate: Call) -> None:
    """Warnings and progress bars of torch and transformers would be seen only in a process of its own."""
    models = ("-m", tiny_checkpoint / "target", "-d", tiny_checkpoint / "draft")
    finished = finish(start("generate", "hello", *models, "-n", "8", "--policy", "joint-2"))
    assert finished == Finished(0, run_generate("hello", "-n", "8").out, "")


def test_libraries_add_nothing_about_recurrent_models_either(tmp_path: Path) -> None:
    """Of these transformers says, at their first passes, which faster kernels are not installed."""
    finished = finish(
        start("generate", "hello", "-m", build_checkpoint(tmp_path, "mamba"), "-n", "8", "--policy", "ar")
    )
    assert (finished.code, len(finished.err.splitlines())) == (0, 1)
    assert finished.err.startswith("Note: ")


def test_bad_lines_in_a_pipe_cost_no_other_line_and_exit_1(tiny_checkpoint: Path) -> None:
    lines = [
        b'{"id": "a", "prompt": "hello"}',
        b'{"id": "b", "prompt": "hel',
        b"",
        b'{"id": "c", "prompt": "\xff"}',
        b'{"id": "d", "prompt": "%s"}' % (b"word " * 400),
        b'{"id": "e", "messages": [{"role": "user", "content": "hi"}]}',
        b'{"id": "f", "prompt": "\\ud800"}',
        b'{"id": "g\\ud800", "prompt": "hello"}',
        b'{"prompt": "hello"}',
    ]
    process = start("generate", "--policy", "kv", "-m", tiny_checkpoint / "target", "-n", "4", stdin=subprocess.PIPE)
    finished = finish(process, b"\n".join(lines))
    assert (finished.code, finished.err) == (
        1,
        "Error: 6 of 8 prompts failed\nHint: see the records with an `error`\n",
    )
    assert finished.ids == ["a", 2, 3, "d", "e", "f", 7, 8]
    assert ["error" in record for record in finished.records] == [False, True, True, True, True, True, True, False]
    assert finished.records[0]["text"] == finished.records[-1]["text"]


def test_a_closed_pipe_ends_it_quietly(tiny_checkpoint: Path) -> None:
    """As with `| head -1`. Its stdin stays open, so it has to notice by itself."""
    process = start("generate", "--policy", "kv", "-m", tiny_checkpoint / "target", "-n", "2", stdin=subprocess.PIPE)
    assert process.stdin
    assert process.stdout
    assert process.stderr
    process.stdin.write(b'{"prompt": "hello"}\n')
    process.stdin.flush()
    assert json.loads(process.stdout.readline())["id"] == 1
    process.stdout.close()
    process.stdin.write(b'{"prompt": "hello"}\n')
    process.stdin.flush()
    assert process.wait(timeout=DEADLINE_SECONDS) == 0
    assert process.stderr.read() == b""
    process.stdin.close()
    process.stderr.close()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has a device that is always full")
def test_results_that_find_no_room_on_stdout_exit_1(tiny_checkpoint: Path) -> None:
    """Python would try to write them once more at the end, and exit with 120."""
    arguments = ("generate", "hello", "-m", tiny_checkpoint / "target", "-n", "2", "--policy", "ar")
    with open("/dev/full", "wb") as full:
        finished = finish(start(*arguments, stdout=full))
    assert_error(finished, 1, "cannot write the results: No space left on device")
    assert "free some space" in finished.err


def test_a_file_on_stdin_that_is_the_one_on_stdout_is_wrong_usage(tmp_path: Path) -> None:
    """As with `< p.txt >> p.txt`: each result would be the next prompt."""
    lines = tmp_path / "p.txt"
    lines.write_text("hello\n")
    with lines.open("rb") as stdin, lines.open("ab") as stdout:
        finished = finish(start("generate", "--format", "lines", stdin=stdin, stdout=stdout))
    assert_error(finished, 2, "is read and written")
    assert lines.read_text() == "hello\n"


@dataclass(frozen=True)
class Interrupted:
    """A run that was ended by Ctrl-C, its output file, and the ids of all of its prompts."""

    finished: Finished
    out: Path
    ids: list[str]


@pytest.fixture(scope="module")
def interrupted(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Interrupted:
    """Interrupted in the midst of a long completion, after two short ones."""
    directory = tmp_path_factory.mktemp("interrupted")
    out, ids = directory / "out.jsonl", [f"p{number}" for number in range(40)]
    prompts = ({"id": name, "prompt": "hello", "max_new_tokens": 2 if name in ids[:2] else 240} for name in ids)
    lines = jsonl(directory / "p.jsonl", *prompts)
    process = start("generate", "--policy", "kv", "-m", tiny_checkpoint / "target", "-f", lines, "--out", out)
    wait_until(lambda: out.exists() and out.read_bytes().count(b"\n") >= 2, process)
    process.send_signal(signal.SIGINT)
    return Interrupted(finish(process), out, ids)


def test_an_interrupt_exits_130_and_leaves_complete_records(interrupted: Interrupted) -> None:
    assert_error(interrupted.finished, 130, "interrupted")
    assert "--resume" in interrupted.finished.err
    content = interrupted.out.read_text()
    assert content.endswith("\n")
    written = Finished(130, content, "").ids
    assert 2 <= len(written) < len(interrupted.ids)
    assert written == interrupted.ids[: len(written)]


def test_an_interrupted_run_is_resumed_to_one_record_a_prompt(
    interrupted: Interrupted, run_generate: Call, tmp_path: Path
) -> None:
    """With a line cut off at the end, as a kill in the midst of a write leaves it."""
    out = tmp_path / "out.jsonl"
    before = interrupted.out.read_text()
    out.write_text(before + before.split("\n")[0].replace('"p0"', '"p39"')[:90])
    lines = jsonl(tmp_path / "p.jsonl", *({"id": name, "prompt": "hello"} for name in interrupted.ids))
    assert run_generate("-f", lines, "-n", "2", "--out", out, "--resume") == Finished(0, "", "")
    content = out.read_text()
    assert content.startswith(before)
    assert Finished(0, content, "").ids == interrupted.ids


def test_help_does_not_import_torch() -> None:
    """It would take seconds. Nor is it imported for a mistake in the options."""
    program = (
        "import sys\nfrom rakvctl.cli.app import main\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "print([name for name in ('torch', 'transformers') if name in sys.modules], file=sys.stderr)"
    )
    mistakes = (["generate", "x", "--kv-budget", "lots"], ["generate", "x", "--policy", "best"])
    for arguments in (["--help"], ["generate", "--help"], *mistakes):
        finished = subprocess.run(
            [sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=True
        )
        assert finished.stderr.splitlines()[-1] == "[]"


def test_debugging_shows_the_traceback(tmp_path: Path) -> None:
    process = start("generate", "-f", tmp_path / "missing.txt", env={"RAKVCTL_DEBUG": "1"})
    finished = finish(process)
    assert "Traceback (most recent call last)" in finished.err
    assert "missing.txt" in finished.err
    assert (finished.code, finished.out) == (1, "")


def test_a_closed_stdin_is_an_error_for_users() -> None:
    """As `<&-` closes it."""
    finished = finish(start("generate", "-", closed=0))
    assert finished.code in (1, 2)
    assert_error(finished, finished.code, "stdin")


def test_a_closed_stdout_is_no_reason_for_a_traceback(tmp_path: Path) -> None:
    """As `>&-` closes it."""
    assert_error(finish(start("generate", "-f", tmp_path / "missing.txt", closed=1)), 1, "cannot read")


def test_a_closed_stderr_is_no_reason_to_fail() -> None:
    """As `2>&-` closes it."""
    finished = finish(start("generate", "--help", closed=2))
    assert finished.code == 0
    assert "--max-new-tokens" in finished.out
