"""The directory of the persistent prefix cache: marked as ours, private to the user, and no link in it is followed."""

import os
import re
import stat
import tempfile
from pathlib import Path

from rakvctl.core.errors import DamagedEntryError, RakvError, UsageError

# The Cache Directory Tagging convention: backup programs leave such a directory out. The second line says whose it is.
MARKER_NAME = "CACHEDIR.TAG"
_MARKER = (
    b"Signature: 8a477f597d28d172789f06886806bc55\n# rakvctl prefix cache 1\n# It holds copies: remove it at will.\n"
)
_UNFINISHED_MARKER = re.compile(r"\.marker-\w{8}")
_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def claim_directory(path: Path) -> None:
    """Make a prefix cache directory, mark an empty one as ours, or check that the one that is there is ours.

    Raises UsageError, and leaves everything untouched, where it holds other files; RakvError where it is no directory,
    somebody else's, or others may write to it.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(mode=0o700, exist_ok=True)
        is_ours = is_claimed(path)
    except OSError as error:
        raise RakvError(f"cannot use {path}: {error.strerror}", "give --kv-dir a directory of your own") from error
    refuse_shared_directory(path)
    if not is_ours:
        _mark(path)


def inspect_directory(path: Path) -> bool:
    """Whether an existing directory is a prefix cache of ours; False where it is empty. Nothing is made.

    Raises as `claim_directory` does.
    """
    try:
        is_ours = is_claimed(path)
        refuse_shared_directory(path)
    except OSError as error:
        raise RakvError(f"cannot use {path}: {error.strerror}", "give --kv-dir a directory of your own") from error
    return is_ours


def is_claimed(path: Path) -> bool:
    """Whether a directory is marked as a prefix cache of ours; False where it is empty or not there.

    Raises UsageError where it holds files and no marker of ours, OSError where it cannot be read.
    """
    try:
        # Listed before the marker is looked for, which another process may be about to put into an empty directory.
        names = [name for name in os.listdir(path) if not _UNFINISHED_MARKER.fullmatch(name)]
    except FileNotFoundError:
        return False
    if not names or _holds_marker(path):
        return bool(names)
    raise UsageError(
        f"{path} is not empty and no prefix cache of this version",
        "give --kv-dir a directory of its own; one that an earlier version made can be removed",
    )


def _holds_marker(path: Path) -> bool:
    try:
        descriptor = os.open(path / MARKER_NAME, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    with open(descriptor, "rb") as file:
        return file.read(len(_MARKER)) == _MARKER


def _mark(path: Path) -> None:
    """Put the marker into an empty directory, whole at once."""
    try:
        descriptor, unfinished = tempfile.mkstemp(dir=path, prefix=".marker-")
        with open(descriptor, "wb") as file:
            file.write(_MARKER)
        os.replace(unfinished, path / MARKER_NAME)
    except OSError as error:
        raise RakvError(f"cannot use {path}: {error.strerror}", "give --kv-dir a directory of your own") from error


def make_private_directory(path: Path) -> None:
    """Make a directory inside one of ours that only the user can enter, or check the one that is there.

    Raises RakvError where it is no directory, a link, somebody else's, or others may write to it.
    """
    try:
        path.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise RakvError(f"cannot use {path}: {error.strerror}", "give --kv-dir a directory of your own") from error
    if path.is_symlink():
        raise RakvError(f"{path} is a link", "remove it")
    refuse_shared_directory(path)


def refuse_shared_directory(path: Path) -> None:
    """Raise RakvError for a directory of somebody else's, or one that others may write to."""
    status = path.stat()
    if hasattr(os, "geteuid") and status.st_uid != os.geteuid():
        raise RakvError(f"{path} belongs to somebody else", "give --kv-dir a directory of your own")
    if status.st_mode & _WRITABLE_BY_OTHERS:
        raise RakvError(f"others may write to {path}", f"run: chmod go-w {path}; or give --kv-dir another directory")


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


def file_id(path: Path) -> tuple[int, int] | None:
    """What tells a file from any other while it exists; None where there is none."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino


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
