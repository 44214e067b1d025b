"""What Ctrl-C does: while nothing is served yet it ends the program at once, later it raises KeyboardInterrupt.

An exception that is raised while modules are imported and models loaded may be swallowed in a callback, and in C++ code
it may abort the process. A SIGINT that the parent has ignored, as for a job in the background, stays ignored.
"""

import os
import signal
import sys
from contextlib import suppress

INTERRUPTED = 130
_TEXT = b"Error: interrupted\nHint: run the same command again\n"
# A progress bar may stand on the line, and has hidden the cursor.
_CLEAR_LINE_AND_SHOW_CURSOR = b"\r\x1b[K\x1b[?25h"


def end_at_once() -> None:
    """From now on, end with exit code 130 wherever the program is. Files appear whole or not at all, so none breaks."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)


def raise_from_now_on() -> None:
    """From now on, raise KeyboardInterrupt: what is done is to be written, and what was begun to be cleared up."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def ignore() -> None:
    """From now on, do nothing: all is written, and Python ends by itself in a moment.

    It resets other handlers in the midst of that, and a Ctrl-C would turn success into a death by signal.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def say_interrupted() -> None:
    """Two lines on stderr, whatever is buffered there."""
    with suppress(AttributeError, OSError, ValueError):  # a terminal that has gone hears nothing
        descriptor = sys.stderr.fileno()
        is_screen = os.isatty(descriptor) and os.environ.get("TERM") not in (None, "dumb")
        os.write(descriptor, _CLEAR_LINE_AND_SHOW_CURSOR + _TEXT if is_screen else _TEXT)


def _end(_signal: int, _frame: object) -> None:
    say_interrupted()
    os._exit(INTERRUPTED)
