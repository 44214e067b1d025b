"""Where the program `rakvctl` starts and ends. What takes time to import comes after the first lines of `main`."""

import atexit
import os
import sys

from rakvctl.cli import interrupts


def main() -> None:
    """Run the program and exit: 0 done, 1 failed, 2 wrong usage, 3 no fitting profile, 130 interrupted."""
    interrupts.end_at_once()
    # A stream that the caller closed is None: what would go there goes nowhere.
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(encoding="utf-8", errors="backslashreplace")  # type: ignore[union-attr]
    try:
        from rakvctl.cli.commands import run

        code = run()
        interrupts.end_at_once()
    except KeyboardInterrupt:  # between the command's own end and here
        interrupts.say_interrupted()
        code = interrupts.INTERRUPTED
    atexit.register(interrupts.ignore)
    sys.exit(code)


if __name__ == "__main__":
    main()
