"""The program `rakvctl`: its commands, their options, and the one place where errors become exit codes."""

import os
import sys
from collections.abc import Callable
from functools import wraps

import typer
from typer.exceptions import TyperException

from rakvctl.cli import render
from rakvctl.cli.bench import bench
from rakvctl.cli.calibrate import calibrate
from rakvctl.cli.explain import explain
from rakvctl.cli.generate_command import generate
from rakvctl.core.errors import RakvError, first_line


def _until_the_pipe_closes(command: Callable[..., int]) -> Callable[..., int]:
    """The command; where nobody reads its output any more, as with `| head -1`, that is a quiet end."""

    @wraps(command)
    def run(*arguments: object, **options: object) -> int:
        try:
            return command(*arguments, **options)
        except BrokenPipeError:
            # Python flushes stdout once more at exit: let it flush into nothing.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0

    return run


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich")
for command in (generate, calibrate, explain, bench):
    app.command()(_until_the_pipe_closes(command))


@app.callback()
def rakvctl() -> None:
    """Fast local text generation: exact KV reuse and speculation that never change a token."""


def main() -> None:
    """Run the program and exit: 0 done, 1 failed, 2 wrong usage, 3 no fitting profile, 130 interrupted."""
    # A stream that the caller closed is None: what would go there goes nowhere.
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(encoding="utf-8", errors="backslashreplace")  # type: ignore[union-attr]
    sys.exit(_run())


def _run() -> int:
    """The exit code of the command in `sys.argv`, errors shown."""
    try:
        code = app(standalone_mode=False)
    except RakvError as error:
        return _fail(error, error.message, error.hint, error.exit_code)
    except TyperException as error:
        return _fail(error, error.format_message(), "see rakvctl --help, or --help after a command", 2)
    except Exception as error:
        return _fail(
            error, f"{type(error).__name__}: {first_line(error)}", "RAKVCTL_DEBUG=1 shows where; please report it", 1
        )
    if code == 130:
        render.print_error("interrupted", "what was written is complete; --out FILE --resume goes on from there")
    return code or 0


def _fail(error: Exception, message: str, hint: str, code: int) -> int:
    if render.debugging():
        raise error
    render.print_error(message, hint)
    return code


if __name__ == "__main__":
    main()
