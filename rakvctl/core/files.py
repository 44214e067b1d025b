"""Files that appear whole or not at all, a lock among processes, and objects as JSON."""

import json
import math
import os
import secrets
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from rakvctl.core.descriptors import open_descriptor

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]


def replace_file(path: Path, content: bytes | Iterable[bytes]) -> None:
    """Write a file, in one piece or several, in place of what was there: whole, or not at all.

    What this process has open already, as /dev/stdout, is added to. Who may read it stays as it was. Raises OSError.
    """
    pieces = [content] if isinstance(content, bytes) else content
    already_open = open_descriptor(path)
    if already_open is not None:
        with open(already_open, "wb", closefd=False) as stream:
            stream.writelines(pieces)
        return
    if path.exists() and not path.is_file():
        path.write_bytes(b"".join(pieces))  # a device or a pipe: there is nothing to replace
        return
    unfinished = path.parent / f".{path.name[:80]}-{secrets.token_hex(4)}"
    mode = path.stat().st_mode & 0o777 if path.exists() else None
    # The system applies the user's umask to new files. A private file stays private while it is written.
    descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666 if mode is None else mode)
    try:
        with open(descriptor, "wb") as stream:
            stream.writelines(pieces)
            stream.flush()
            os.fsync(stream.fileno())
        if mode is not None:
            os.chmod(unfinished, mode)
        os.replace(unfinished, path)
    except BaseException:
        os.unlink(unfinished)
        raise


@contextmanager
def only_process(path: Path) -> Iterator[None]:
    """Wait until no other process is here under the same path, an empty file; the system ends it with the process.

    Where there can be no such file, as on a disk that cannot be written to, nobody waits.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("ab")
    except OSError:
        yield
        return
    with file:
        if fcntl is not None:
            with suppress(OSError):  # some network disks have no locks
                fcntl.flock(file, fcntl.LOCK_EX)
        yield


def to_json(content: Mapping[str, Any], indent: int | None = None) -> str:
    """An object as JSON, which knows no NaN: what is no number becomes null."""
    return json.dumps(_without_nan(content), ensure_ascii=False, indent=indent)


def _without_nan(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(item) for item in value]
    return None if isinstance(value, float) and math.isnan(value) else value
