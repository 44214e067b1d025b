"""Ctrl-C at any moment: exit 130 in two lines, never a traceback, an abort, or a success that is none."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rakvctl.cli import interrupts, progress

INTERRUPTED = "Error: interrupted\nHint: run the same command again\n"
# The program; it writes a byte to descriptor 3 once its handling of Ctrl-C has begun.
PROGRAM = (
    "import os; from rakvctl.cli import interrupts; interrupts.end_at_once()\n"
    "from rakvctl.cli.app import main; os.write(int(os.environ['READY']), b'.'); main()"
)
COMMAND = ("generate", "-m", "tiny", "x", "-n", "4", "--policy", "kv")

pytestmark = pytest.mark.skipif(os.name == "nt", reason="signals are sent otherwise there")


def start(*arguments: str, modules: Path | None = None, ignored: bool = False) -> "subprocess.Popen[str]":
    """Start the program and wait until it handles Ctrl-C; `modules`: a directory with modules in place of others."""
    read_end, write_end = os.pipe()
    paths = os.pathsep.join(filter(None, [str(modules or ""), os.environ.get("PYTHONPATH", "")]))

    def prepare() -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN if ignored else signal.SIG_DFL)

    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": paths, "READY": str(write_end), "OMP_NUM_THREADS": "1"},
        text=True,
        pass_fds=[write_end],
        preexec_fn=prepare,
    )
    os.close(write_end)
    assert os.read(read_end, 1) == b"."
    os.close(read_end)
    return process


def interrupting(tmp_path: Path, then: str) -> Path:
    """A stand-in for typer, at the import of which Ctrl-C comes."""
    (tmp_path / "typer.py").write_text(
        "import os, signal\n"
        "try:\n    os.kill(os.getpid(), signal.SIGINT)\n    for _ in range(1000): pass\n"
        f"except BaseException: pass\n{then}"
    )
    return tmp_path


def test_an_interrupt_that_an_import_would_swallow_ends_the_program(tmp_path: Path) -> None:
    """As libraries do that try optional imports, and Python itself in callbacks."""
    modules = interrupting(tmp_path, then="print('it went on')\n")
    out, err = (process := start("--help", modules=modules)).communicate()
    assert (process.returncode, out, err) == (130, "", INTERRUPTED)


def test_an_interrupt_that_the_parent_ignores_stays_ignored(tmp_path: Path) -> None:
    """As for a job in the background of a script."""
    modules = interrupting(tmp_path, then="print('it went on'); raise SystemExit(5)\n")
    out, err = (process := start("--help", modules=modules, ignored=True)).communicate()
    assert (process.returncode, out, err) == (5, "it went on\n", "")


def test_an_interrupt_while_all_is_done_but_the_end_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import atexit, os, signal\n"
        # Registered first, so called last.
        "atexit.register(lambda: os.kill(os.getpid(), signal.SIGINT))\n"
    )
    out, err = (process := start("--version", modules=tmp_path)).communicate()
    assert (process.returncode, err) == (0, "")
    assert out.startswith("rakvctl ")


@pytest.fixture
def own_handling() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    interrupts.end_at_once()


@pytest.mark.usefixtures("own_handling")
def test_once_something_is_measured_an_interrupt_raises() -> None:
    """What was begun is to be cleared up, and what was measured to be written."""
    with progress.measuring(shown=False) as on_progress:
        assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
        on_progress("a stage", 0.0)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.usefixtures("own_handling")
def test_other_handlers_are_left_alone() -> None:
    def other(*_: object) -> None: ...

    signal.signal(signal.SIGINT, other)
    interrupts.end_at_once()
    interrupts.raise_from_now_on()
    assert signal.getsignal(signal.SIGINT) is other


@pytest.mark.slow
def test_at_any_moment_an_interrupt_ends_the_program_with_130() -> None:
    started = time.monotonic()
    complete, _ = (process := start(*COMMAND)).communicate()
    life_s, num_moments = time.monotonic() - started, 10
    assert process.returncode == 0
    codes = []
    for number in range(num_moments):
        process = start(*COMMAND)
        time.sleep(life_s * number / num_moments)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate()
        codes.append(process.returncode)
        assert (process.returncode, err) in ((130, INTERRUPTED), (0, ""))
        assert process.returncode == 130 or out == complete
    assert 130 in codes
