"""The commands of `rakvctl`, and the one place where errors become exit codes."""

import errno
import os
import sys
from collections.abc import Callable
from functools import wraps
from typing import Annotated

import typer
from typer.exceptions import TyperException

from rakvctl.cli import render
from rakvctl.cli.bench import bench
from rakvctl.cli.calibrate import calibrate
from rakvctl.cli.explain import explain
from rakvctl.cli.generate_command import generate
from rakvctl.cli.kv import kv
from rakvctl.core.errors import RakvError, first_line

_INTERRUPTED = 130


def _until_the_pipe_closes(command: Callable[..., int]) -> Callable[..., int]:
    """The command; where nobody reads its output any more, as with `| head -1`, that is a quiet end."""

    @wraps(command)
    def run(*arguments: object, **options: object) -> int:
        try:
            return command(*arguments, **options)
        except BrokenPipeError:
            _write_no_more()
            return 0

    return run


app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (generate, calibrate, explain, bench, kv):
    app.command()(_until_the_pipe_closes(command))


def _show_version(asked: bool) -> None:
    if asked:
        from importlib import metadata

        render.print_line(f"rakvctl {metadata.version('rakvctl')}")
        raise typer.Exit


@app.callback()
def rakvctl(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Fast local text generation: exact KV reuse and speculation that never change a token."""


def run() -> int:
    """The exit code of the command in `sys.argv`, errors shown."""
    try:
        code = app(prog_name="rakvctl", standalone_mode=False)
    except RakvError as error:
        return _fail(error, error.message, error.hint, error.exit_code)
    except TyperException as error:
        return _fail(error, error.format_message(), _hint(error), 2)
    except SystemExit as error:
        if error.code != 1:
            raise
        # How rich ends a program whose help nobody reads any more, as with `--help | head -1`.
        _write_no_more()
        return 0
    except Exception as error:
        return _fail(error, *_unforeseen(error), 1)
    if code == _INTERRUPTED:
        render.print_error("interrupted", "run the same command again")
    return code or 0


def _unforeseen(error: Exception) -> tuple[str, str]:
    """Message and hint for an error that nobody made for users."""
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        _write_no_more()
        return f"cannot write: {error.strerror}", "free some space, or write elsewhere"
    return f"{type(error).__name__}: {first_line(error)}", "RAKVCTL_DEBUG=1 shows where; please report it"


def _hint(error: TyperException) -> str:
    """Where to look it up; what is no option may be a prompt."""
    path, context = _command_path(error), getattr(error, "ctx", None)
    if getattr(error, "option_name", None) and context and any(p.name == "prompt" for p in context.command.params):
        return f"see {path} --help; a prompt that begins with a dash goes behind --: {path} [OPTIONS] -- '--text'"
    return f"see {path} --help"


def _command_path(error: TyperException) -> str:
    """The command that was used wrongly, such as `rakvctl generate`."""
    context = getattr(error, "ctx", None)
    return context.command_path if context else "rakvctl"


def _write_no_more() -> None:
    """Python flushes stdout once more at exit: let it flush into nothing."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail(error: Exception, message: str, hint: str, code: int) -> int:
    if render.debugging():
        raise error
    render.print_error(message, hint)
    return code
