"""Text on stdin that belongs to a prompt argument: whether there is some, without waiting for it for ever."""

import io
import os
import select
import stat
from collections.abc import Callable
from typing import BinaryIO

from rakvctl.core.errors import UsageError

_NOTE_SECONDS, _WAIT_SECONDS = 2.0, 60.0


def first_byte(file: BinaryIO, notify: Callable[[str], None]) -> bytes:
    """The first byte of stdin; empty where it holds nothing or is not ours to read.

    Pipes, sockets and files hold text. A file of which a part is read belongs to who reads it, such as the shell in
    `while read`, and devices belong to nobody. Raises UsageError where a pipe stays open and nothing comes.
    """
    try:
        mode = os.fstat(file.fileno()).st_mode
    except io.UnsupportedOperation:  # in memory
        return file.read(1)
    if stat.S_ISREG(mode):
        return file.read(1) if file.tell() == 0 else b""
    if not (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)):
        return b""
    if not _is_ready(file, _NOTE_SECONDS):
        notify("waiting for text on stdin; </dev/null says that there is none")
        if not _is_ready(file, _WAIT_SECONDS):
            raise UsageError(
                f"stdin is open, but nothing came for {_WAIT_SECONDS:.0f} s",
                "redirect it from /dev/null if no text belongs to the prompt (ssh: -n), or put slow text into a file",
            )
    return file.read(1)


def _is_ready(file: BinaryIO, seconds: float) -> bool:
    """Whether there is something to read, or an end, within so many seconds."""
    return bool(select.select([file], [], [], seconds)[0])
