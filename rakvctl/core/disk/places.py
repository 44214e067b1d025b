"""A directory of the user's own: nobody else may write to it, and nothing in it leads elsewhere."""

import os
import stat
from pathlib import Path

from rakvctl.core.errors import DamagedEntryError, RakvError

_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def make_private_directory(path: Path) -> None:
    """Make a directory that only the user can enter, or check that nobody else can write to the one that is there.

    Raises RakvError where it is no directory, somebody else's, or open to others.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(mode=0o700, exist_ok=True)
        status = path.stat()
    except OSError as error:
        raise RakvError(f"cannot use {path}: {error.strerror}", "give --kv-dir a directory of your own") from error
    if hasattr(os, "geteuid") and status.st_uid != os.geteuid():
        raise RakvError(f"{path} belongs to somebody else", "give --kv-dir a directory of your own")
    if status.st_mode & _WRITABLE_BY_OTHERS:
        raise RakvError(f"others may write to {path}", f"run: chmod 700 {path}")


def refuse_what_is_no_file(path: Path, max_bytes: int) -> int:
    """The size of a regular file of the user's own; nothing is followed, and nothing larger is ever read.

    Raises DamagedEntryError for anything else.
    """
    try:
        status = path.lstat()
    except OSError as error:
        raise DamagedEntryError(f"cannot read {path.name}: {error.strerror}") from error
    if not stat.S_ISREG(status.st_mode):
        raise DamagedEntryError(f"{path.name} is no regular file")
    if hasattr(os, "geteuid") and status.st_uid != os.geteuid():
        raise DamagedEntryError(f"{path.name} belongs to somebody else")
    if status.st_size > max_bytes:
        raise DamagedEntryError(f"{path.name} is larger than all entries may be")
    return status.st_size


def is_in_page_cache(path: Path, num_samples: int = 8) -> bool:
    """Whether a file's content lies in memory already, by some samples; False where the system does not tell."""
    if not hasattr(os, "RWF_NOWAIT"):
        return False
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        try:
            size = os.fstat(descriptor).st_size
            offsets = (size * sample // num_samples for sample in range(num_samples))
            return all(os.preadv(descriptor, [bytearray(1)], offset, os.RWF_NOWAIT) for offset in offsets)
        finally:
            os.close(descriptor)
    except OSError:  # it would have to wait, which is the answer
        return False


def forget_cached(path: Path) -> None:
    """Let the system drop a file's content from memory, where it takes such advice."""
    if hasattr(os, "posix_fadvise"):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
