"""The program as a whole: version and help, and how it ends where a stream or the user ends it."""

import io
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from rakvctl.cli import generate as generate_module
from tests.program import Call

FULL = pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has a device that is always full")
COMMANDS = ["generate", "calibrate", "explain", "bench"]


def start(*arguments: str, stdout: int, pythonpath: str = "") -> "subprocess.CompletedProcess[str]":
    paths = os.pathsep.join(filter(None, [pythonpath, os.environ.get("PYTHONPATH", "")]))
    return subprocess.run(
        [sys.executable, "-m", "rakvctl", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": paths},
        text=True,
        check=False,
    )


def test_the_version_is_that_of_the_package(run: Call) -> None:
    assert run("--version") == (0, f"rakvctl {metadata.version('rakvctl')}\n", "")


@pytest.mark.parametrize("command", [[], *([name] for name in COMMANDS)], ids=" ".join)
def test_help_has_a_short_name(command: list[str], run: Call) -> None:
    short, long = run(*command, "-h"), run(*command, "--help")
    assert short == long
    assert (short.code, short.err) == (0, "")
    assert "Usage: rakvctl" in short.out


def test_the_hint_on_wrong_usage_names_the_help_of_that_command(run: Call) -> None:
    assert run("generate", "--nothing").err.splitlines()[1].startswith("Hint: see rakvctl generate --help; ")
    assert run("--nothing").err.splitlines()[1] == "Hint: see rakvctl --help"


@FULL
@pytest.mark.parametrize("option", ["--help", "--version"])
def test_what_finds_no_room_on_stdout_exits_1_in_two_lines(option: str) -> None:
    with open("/dev/full", "wb") as full:
        finished = start(option, stdout=full.fileno())
    first, second = finished.stderr.splitlines()
    assert first.startswith("Error: cannot write")
    assert first.endswith("No space left on device")
    assert second.startswith("Hint: ")
    assert finished.returncode == 1


@pytest.mark.parametrize("option", ["--help", "--version"])
def test_help_that_nobody_reads_is_a_quiet_end(option: str) -> None:
    """As with `--help | head -1`."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    finished = start(option, stdout=write_end)
    os.close(write_end)
    assert (finished.returncode, finished.stderr) == (0, "")


def test_an_interrupt_while_modules_are_imported_exits_130_in_two_lines(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text("raise KeyboardInterrupt")
    finished = start("--help", stdout=subprocess.DEVNULL, pythonpath=str(tmp_path))
    assert (finished.returncode, finished.stderr) == (130, "Error: interrupted\nHint: run the same command again\n")


@pytest.mark.parametrize(
    ("arguments", "can_resume"),
    [([], False), (["--out", "out.jsonl"], True), (["--out", "out.txt", "-o", "text"], False)],
    ids=["stdout", "records", "text"],
)
def test_only_a_run_that_can_be_resumed_says_so_when_interrupted(
    arguments: list[str], can_resume: bool, run: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Runtime:
        @property
        def codec(self) -> None:
            raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(generate_module, "load_runtime", lambda *_: Runtime())
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b'{"prompt": "x"}\n')))
    finished = run("generate", *arguments)
    assert (finished.code, finished.out) == (130, "")
    assert finished.err.startswith("Error: interrupted\nHint: ")
    assert ("--resume" in finished.err) == can_resume


def test_what_a_file_held_before_is_not_resumed_after_an_interrupt_while_loading(
    run: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It is still there, and may be what the run was to replace."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(generate_module, "load_runtime", interrupt)
    finished = run("generate", "x", "-o", "jsonl", "--out", str(tmp_path / "out.jsonl"))
    assert finished == (130, "", "Error: interrupted\nHint: run the same command again\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--top-p", "0"], "--top-p 0 is not above 0 and at most 1"),
        (["--top-p", "nan"], "--top-p nan is not above 0 and at most 1"),
        (["--temperature", "nan"], "--temperature nan is not a number from 0 on"),
        (["--temperature", "-1"], "--temperature -1 is not a number from 0 on"),
        (["--temperature", "inf"], "--temperature inf is not a number from 0 on"),
        (["--stop", ""], "--stop is empty"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_a_value_that_makes_no_sense_is_said_in_one_sentence(arguments: list[str], message: str, run: Call) -> None:
    finished = run("generate", "x", *arguments)
    assert (finished.code, finished.out) == (2, "")
    assert finished.err.splitlines()[0] == f"Error: {message}"


def test_the_hint_on_too_many_threads_says_how_many_there_are(run: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(6)))
    finished = run("generate", "x", "--threads", "7")
    assert finished.code == 2
    assert "give 1 to 6" in finished.err
