"""The files of a prefix cache directory and their index: every change keeps both together, whoever else is at work."""

import os
import re
import tempfile
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np

from rakvctl.core.disk.entry_file import EntryFile, most_file_bytes, read_entry, write_entry
from rakvctl.core.disk.index import Index
from rakvctl.core.disk.rows import Row, is_key
from rakvctl.core.errors import DamagedEntryError
from rakvctl.core.prefixes import bucket_digest, prompt_digest
from rakvctl.core.types import PrefixEntry

INDEX_NAME, ENTRIES_NAME = "index.sqlite", "entries"
# All the files that SQLite makes for an index.
INDEX_FILES = (INDEX_NAME, f"{INDEX_NAME}-journal", f"{INDEX_NAME}-wal", f"{INDEX_NAME}-shm")
SCRATCH_PREFIX = ".measuring-"
# No prompt of any model takes more; what does is refused unread.
_MOST_BYTES = 2**40
_SUFFIX, _UNFINISHED_PREFIX = ".safetensors", ".unfinished-"
# What `tempfile` makes of a prefix. Nothing of any other name is ever removed.
_UNFINISHED, _SCRATCH = (re.compile(rf"{re.escape(start)}\w{{8}}") for start in (_UNFINISHED_PREFIX, SCRATCH_PREFIX))
# What one more entry adds to the index, beside its token ids, and to the index's journal while that is written.
_ROW_BYTES = 2**14
# A scratch file of a process that was killed; one in use is younger, however large the --budget.
_SCRATCH_SECONDS = 86_400.0


class Shelf:
    """Entries, texts and index, which together take `budget_bytes` at most.

    Everything raises OSError and sqlite3.Error where the directory cannot be used, DamagedIndexError where the index is
    damaged.
    """

    def __init__(self, directory: Path, budget_bytes: int, *, read_only: bool = False) -> None:
        """Open the index, or make it; both directories are there. `read_only`: nothing is made or written."""
        self.index = Index(directory / INDEX_NAME, read_only=read_only)
        self.budget_bytes = budget_bytes
        self._directory = directory
        self._entries = directory / ENTRIES_NAME

    def path(self, key: str) -> Path:
        """The file of an entry."""
        assert is_key(key), "a key is a digest"
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
        """Make room for a file, write it aside and move it into place, one process at a time.

        Does nothing where it would not fit, or where a directory of somebody else's making is in its place.
        """
        key = _key(entry)
        with self.index.writing():
            if self.index.get(key) is not None:
                self.index.touch(key)
                return
            needed = most_file_bytes(entry) + entry.token_ids.nbytes + _ROW_BYTES
            if self.path(key).is_dir() or not self._make_room(needed):
                return
            descriptor, name = tempfile.mkstemp(dir=self._entries, prefix=_UNFINISHED_PREFIX)
            os.close(descriptor)
            unfinished = Path(name)
            try:
                write_entry(unfinished, entry)
                row = _row(entry, unfinished.stat().st_size)
                os.replace(unfinished, self.path(key))
                _synchronize(self._entries)
                self.index.put(row)
            finally:
                unfinished.unlink(missing_ok=True)

    def record(self, used: Iterable[str], texts: Collection[tuple[str, np.ndarray]], max_bytes: int) -> None:
        """Note which entries were used, by key, and keep prompts with their completions, each with its model's key.

        Texts take `max_bytes` of the budget at most.
        """
        with self.index.writing():
            for key in used:
                self.index.touch(key)
            for model_key, ids in texts:
                self.index.add_text(prompt_digest(model_key, ids).hex(), model_key, ids.tobytes(), max_bytes)
            if texts:
                self._make_room(0)

    def drop(self, key: str) -> None:
        """Remove an entry."""
        with self.index.writing():
            self.index.remove(key)
            _remove_file(self.path(key))

    def sweep(self, on_damage: Callable[[str], None]) -> None:
        """Bring files and index together again, as after a crash.

        While this holds the lock nobody else writes, so whatever is unfinished will stay so.
        """
        with self.index.writing():
            self.index.drop_invalid()
            lacking = {row.key: row for row in self.index.by_recency()}
            for path in sorted(self._entries.iterdir()):
                if _UNFINISHED.fullmatch(path.name):
                    _remove_file(path)
                elif _is_entry(path) and path.stem in lacking:
                    self._correct_size(lacking.pop(path.stem), path)
                elif _is_entry(path):
                    self._adopt(path, on_damage)
            for key in lacking:
                self.index.remove(key)
        self._remove_scratch_files()

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
        """Remove all entries and texts; returns how many entries there were."""
        with self.index.writing():
            num_entries = len(self.index.keys())
            self.index.clear()
            for path in self._entries.iterdir():
                if _is_entry(path) or _UNFINISHED.fullmatch(path.name):
                    _remove_file(path)
        return num_entries

    def _adopt(self, path: Path, on_damage: Callable[[str], None]) -> None:
        """Take a file into the index that is in none: its process, or the index, came to its end too early."""
        try:
            entry = self.read(path.stem)
        except DamagedEntryError as error:
            on_damage(str(error))
            _remove_file(path)
        else:
            if entry is not None:
                self.index.put(_row(entry, path.stat().st_size))

    def _correct_size(self, row: Row, path: Path) -> None:
        """Let the index have the size that the file has: the budget is kept by it."""
        num_bytes = path.lstat().st_size
        if row.num_bytes != num_bytes:
            self.index.put(replace(row, num_bytes=num_bytes))

    def _make_room(self, num_bytes: int) -> bool:
        """Evict the least recently used entries until so much more fits; False, and none evicted, if it never will.

        While this process writes, what is unfinished is of processes that were killed.
        """
        for path in self._entries.iterdir():
            if _UNFINISHED.fullmatch(path.name):
                _remove_file(path)
        room = self.budget_bytes - self.index.own_bytes() - num_bytes
        if num_bytes and room < 0:
            return False
        while self.index.num_bytes() > max(room, 0):
            oldest = self.index.oldest()
            if oldest is None:
                break
            self.index.remove(oldest[0])
            _remove_file(self.path(oldest[0]))
        return True

    def _remove_scratch_files(self) -> None:
        """Those of processes that were killed while they measured."""
        for path in self._directory.iterdir():
            if _SCRATCH.fullmatch(path.name) and time.time() - path.lstat().st_mtime > _SCRATCH_SECONDS:
                _remove_file(path)


def ids_of(row: Row) -> np.ndarray:
    """Token ids as the index has them."""
    return np.frombuffer(row.token_ids, dtype="<i8")


def _key(entry: PrefixEntry) -> str:
    return prompt_digest(entry.model_key, entry.token_ids).hex()


def _row(entry: PrefixEntry, num_bytes: int) -> Row:
    ids = entry.token_ids.astype("<i8").tobytes()
    bucket = bucket_digest(entry.model_key, entry.token_ids).hex()
    return Row(_key(entry), bucket, entry.model_key, ids, num_bytes, time.time())


def _is_entry(path: Path) -> bool:
    """Whether a name is one that `publish` gives."""
    return path.suffix == _SUFFIX and is_key(path.stem)


def _remove_file(path: Path) -> None:
    """Remove a file or a link of one of our own names, and never a directory, nor what a link leads to."""
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)


def _synchronize(directory: Path) -> None:
    """Wait until the names in a directory are on the disk."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
