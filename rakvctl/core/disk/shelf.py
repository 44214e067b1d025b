"""The files of a directory and the index of them: every change keeps both together, whoever else is at work."""

import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from rakvctl.core.disk.entry_file import EntryFile, read_entry, write_entry
from rakvctl.core.disk.index import Index, Row
from rakvctl.core.errors import DamagedEntryError
from rakvctl.core.prefixes import bucket_digest, prompt_digest
from rakvctl.core.types import PrefixEntry

INDEX_NAME, ENTRIES_NAME = "index.sqlite", "entries"
# No prompt of any model takes more; what does is refused unread.
_MOST_BYTES = 2**40
_SUFFIX, _UNFINISHED = ".safetensors", ".unfinished-"


class Shelf:
    """Entries that take `budget_bytes` at most, and while one is written, that one more.

    Everything raises OSError and sqlite3.Error where the directory cannot be used.
    """

    def __init__(self, directory: Path, budget_bytes: int) -> None:
        """Open the index, or make it; both directories are there."""
        self.index = Index(directory / INDEX_NAME)
        self.budget_bytes = budget_bytes
        self._entries = directory / ENTRIES_NAME

    def path(self, key: str) -> Path:
        """The file of an entry."""
        return self._entries / f"{key}{_SUFFIX}"

    def read(self, key: str) -> PrefixEntry | None:
        """An entry, ids and logits checked; None where another process has just evicted it.

        Raises DamagedEntryError where the file is not what its name says.
        """
        path = self.path(key)
        try:
            entry = read_entry(path, _MOST_BYTES)
        except DamagedEntryError:
            if os.path.lexists(path):
                raise
            return None
        if _key(entry) != key:
            raise DamagedEntryError(f"{path.name} is another entry")
        return entry

    def publish(self, entry: PrefixEntry) -> None:
        """Write a file aside, make room for it and move it into place, one process at a time."""
        key = _key(entry)
        with self.index.writing():
            if self.index.get(key) is not None:
                self.index.touch(key)
                return
            descriptor, name = tempfile.mkstemp(dir=self._entries, prefix=_UNFINISHED)
            os.close(descriptor)
            unfinished = Path(name)
            try:
                write_entry(unfinished, entry)
                size = unfinished.stat().st_size
                if size <= self.budget_bytes:
                    self._make_room(size)
                    os.replace(unfinished, self.path(key))
                    _synchronize(self._entries)
                    self.index.put(_row(entry, size))
            finally:
                unfinished.unlink(missing_ok=True)

    def drop(self, key: str) -> None:
        """Remove an entry."""
        with self.index.writing():
            self.index.remove(key)
            _remove(self.path(key))

    def sweep(self, on_damage: Callable[[str], None]) -> None:
        """Bring files and index together again, as after a crash.

        While this holds the lock nobody else writes, so whatever is unfinished will stay so.
        """
        with self.index.writing():
            rows = {row.key: row for row in self.index.by_recency()}
            for path in sorted(self._entries.iterdir()):
                if path.suffix != _SUFFIX:
                    _remove(path)
                elif rows.pop(path.stem, None) is None:
                    self._adopt(path, on_damage)
            for key in rows:
                self.index.remove(key)

    def verify(self) -> list[str]:
        """Read all there is, and drop what is damaged; says what that was."""
        problems: list[str] = []
        self.sweep(problems.append)
        for row in self.index.by_recency():
            try:
                if self.read(row.key) is not None:
                    EntryFile(self.path(row.key), _MOST_BYTES).verify()
            except DamagedEntryError as error:
                problems.append(str(error))
                self.drop(row.key)
        return problems

    def clear(self) -> int:
        """Forget everything; returns how many entries there were."""
        with self.index.writing():
            num_entries = len(self.index.by_recency())
            self.index.clear()
            for path in self._entries.iterdir():
                _remove(path)
        return num_entries

    def _adopt(self, path: Path, on_damage: Callable[[str], None]) -> None:
        """Take a file into the index that is in none: its process, or the index, came to its end too early."""
        try:
            entry = self.read(path.stem)
        except DamagedEntryError as error:
            on_damage(str(error))
            _remove(path)
        else:
            if entry is not None:
                self.index.put(_row(entry, path.stat().st_size))

    def _make_room(self, num_bytes: int) -> None:
        """Evict the least recently used entries until so much more fits."""
        total = self.index.num_bytes()
        for row in self.index.by_recency():
            if total + num_bytes <= self.budget_bytes:
                return
            _remove(self.path(row.key))
            self.index.remove(row.key)
            total -= row.num_bytes


def ids_of(row: Row) -> np.ndarray:
    """Token ids as the index has them; of a damaged row, none."""
    content = row.token_ids
    whole = isinstance(content, bytes) and len(content) % 8 == 0
    return np.frombuffer(content if whole else b"", dtype="<i8")


def _key(entry: PrefixEntry) -> str:
    return prompt_digest(entry.model_key, entry.token_ids).hex()


def _row(entry: PrefixEntry, num_bytes: int) -> Row:
    ids = entry.token_ids.astype("<i8").tobytes()
    bucket = bucket_digest(entry.model_key, entry.token_ids).hex()
    return Row(_key(entry), bucket, entry.model_key, ids, num_bytes, time.time())


def _remove(path: Path) -> None:
    """Remove what lies at a place where only files of ours belong, and never what it leads to."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _synchronize(directory: Path) -> None:
    """Wait until the names in a directory are on the disk."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
