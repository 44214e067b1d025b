"""Text on stdin that belongs to a prompt argument: whether there is some."""

import io
import os
import select
import stat
from collections.abc import Callable
from typing import BinaryIO

_NOTE_SECONDS = 2.0


def first_byte(file: BinaryIO, notify: Callable[[str], None]) -> bytes:
    """The first byte of stdin; empty where it holds nothing or is not ours to read.

    Pipes, sockets and files hold text. A file of which a part is read belongs to who reads it, such as the shell in
    `while read`, and devices belong to nobody. An open pipe is waited for, as every filter does: to go on without it
    would drop the text of a slow program. `notify` hears of it.
    """
    try:
        mode = os.fstat(file.fileno()).st_mode
    except io.UnsupportedOperation:  # in memory
        return file.read(1)
    if stat.S_ISREG(mode):
        return file.read(1) if file.tell() == 0 else b""
    if not (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)):
        return b""
    if not select.select([file], [], [], _NOTE_SECONDS)[0]:
        notify("waiting for text on stdin; </dev/null (ssh: -n) says that there is none")
    return file.read(1)
