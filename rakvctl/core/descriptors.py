"""Paths that stand for what this process has open already, as `/dev/stdout` does."""

import os
import stat
from pathlib import Path

_FOLDERS = ("/dev/fd", "/proc/self/fd", "/proc/thread-self/fd")
_STDOUT_AND_STDERR = (1, 2)
# As many symbolic links the system follows.
_MOST_LINKS = 40


def open_descriptor(path: Path) -> int | None:
    """The descriptor that a path names, or stdout's or stderr's where the path is of their file; None for others.

    The shell opened such a file, perhaps to append to it: it must be neither truncated nor replaced.
    """
    named = _named(os.fspath(path))
    if named is not None:
        return named
    return next((descriptor for descriptor in _STDOUT_AND_STDERR if _is_file_of(descriptor, path)), None)


def _named(path: str) -> int | None:
    """The number in names such as /dev/fd/1, also where links lead to one."""
    folders = {os.path.realpath(folder) for folder in _FOLDERS}
    for _ in range(_MOST_LINKS):
        folder, name = os.path.realpath(os.path.dirname(path)), os.path.basename(path)
        if folder in folders and name.isascii() and name.isdigit():
            return int(name)
        if not os.path.islink(path):
            return None
        path = os.path.join(folder, os.readlink(path))
    return None


def _is_file_of(descriptor: int, path: Path) -> bool:
    """Whether a descriptor has this file open; devices and pipes are nobody's own."""
    try:
        status, other = os.fstat(descriptor), path.stat()
    except OSError:
        return False
    return stat.S_ISREG(status.st_mode) and os.path.samestat(status, other)
