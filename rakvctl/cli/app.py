"""Where the program `rakvctl` starts and ends. What takes time to import comes after the first line of `main`."""

import atexit
import os
import signal
import sys


def main() -> None:
    """Run the program and exit: 0 done, 1 failed, 2 wrong usage, 3 no fitting profile, 130 interrupted."""
    # A stream that the caller closed is None: what would go there goes nowhere.
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(encoding="utf-8", errors="backslashreplace")  # type: ignore[union-attr]
    try:
        from rakvctl.cli.commands import run

        code = run()
    except KeyboardInterrupt:  # nothing has begun yet of which there would be something to say
        code = 130
    atexit.register(_let_interrupts_end_it)
    sys.exit(code)


def _let_interrupts_end_it() -> None:
    """Only cleaning up is left to do: a Ctrl-C ends that at once and is not an error in some part of it."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


if __name__ == "__main__":
    main()
