"""The disk tier of the prefix store: whatever is wrong with it ends in one warning and a cold answer.

What takes time and is not needed for an answer waits for `settle`.
"""

import sqlite3
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np

from rakvctl.core.disk.places import (
    MARKER_NAME,
    claim_directory,
    file_id,
    inspect_directory,
    is_in_page_cache,
    make_private_directory,
)
from rakvctl.core.disk.rows import DamagedIndexError, Row
from rakvctl.core.disk.shelf import ENTRIES_NAME, INDEX_FILES, INDEX_NAME, SCRATCH_PREFIX, Shelf, ids_of
from rakvctl.core.errors import DamagedEntryError, first_line
from rakvctl.core.files import only_process
from rakvctl.core.prefixes import bucket_digest, common_prefix_length, prompt_digest
from rakvctl.core.types import BUCKET_TOKENS, PrefixEntry

# Of the budget, so much is for texts to look up in.
_TEXTS_PART = 16

# What a directory can do to us. Anything else is a fault of this program, and no reason to remove an index.
_FAILURES = (OSError, sqlite3.OperationalError, DamagedIndexError)

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Found:
    """An entry that shares its first `num_matched` tokens with a prompt. `is_warm`: its file lies in memory."""

    entry: PrefixEntry
    num_matched: int
    is_warm: bool


class DiskTier:
    """Prefixes and texts in a directory that processes share."""

    def __init__(
        self, directory: Path, budget_bytes: int, notify: Callable[[str], None], *, read_only: bool = False
    ) -> None:
        """`notify` hears the first thing that goes wrong. `read_only`: nothing is made, written or removed.

        Raises UsageError for a directory that holds anything but a prefix cache, RakvError for one not the user's own.
        """
        if read_only:
            inspect_directory(directory)
        else:
            claim_directory(directory)
            make_private_directory(directory / ENTRIES_NAME)
        self.is_read_only = read_only
        self.budget_bytes = budget_bytes
        self._directory = directory
        self._notify = notify
        self._has_warned = self._is_swept = False
        self._offered: list[PrefixEntry] = []
        self._used: set[str] = set()
        self._given_up: set[str] = set()
        self._texts: list[tuple[str, np.ndarray]] = []
        self._index_id: tuple[int, int] | None = None
        self._shelf: Shelf | None = None
        self._shelf = self._opened()

    def find(self, model_key: str, ids: np.ndarray) -> Found | None:
        """The entry with the longest common prefix of at least `BUCKET_TOKENS`; an exact repeat goes first."""
        return self._attempt(lambda shelf: self._find(shelf, model_key, ids), None)

    def _find(self, shelf: Shelf, model_key: str, ids: np.ndarray) -> Found | None:
        rows = shelf.index.in_bucket(bucket_digest(model_key, ids).hex())
        for row in sorted(rows, key=lambda row: _rank(ids_of(row), ids), reverse=True):
            try:
                entry = shelf.read(row.key) if row.key not in self._given_up else None
                if entry is not None and entry.model_key != model_key:
                    raise DamagedEntryError("an entry is of another model than the index says")
            except DamagedEntryError as error:
                self._warn(str(error))
                if not self.is_read_only:
                    shelf.drop(row.key)
                continue
            length = common_prefix_length(entry.token_ids, ids) if entry is not None else 0
            if entry is not None and length >= BUCKET_TOKENS:
                return Found(entry, length, is_in_page_cache(shelf.path(row.key)))
        return None

    def discard(self, entry: PrefixEntry, why: str) -> None:
        """Give up an entry that turned out to be damaged, also where it cannot be removed."""
        self._warn(why)
        self._given_up.add(_key(entry))
        if not self.is_read_only:
            self._attempt(lambda shelf: shelf.drop(_key(entry)), None)

    def offer(self, entry: PrefixEntry) -> None:
        """Keep an entry, as soon as there is time."""
        self._offered.append(entry)

    def offer_text(self, model_key: str, token_ids: list[int]) -> None:
        """Keep a prompt with its completion, as soon as there is time."""
        self._texts.append((model_key, np.asarray(token_ids, dtype="<i8")))

    def touch(self, entry: PrefixEntry) -> None:
        """Note that an entry was used, as soon as there is time."""
        self._used.add(_key(entry))

    def settle(self) -> None:
        """Do what was put off: clear up after a crash, write, evict, note what was used."""
        offered, used, texts = self._offered, self._used, self._texts
        self._offered, self._used, self._texts = [], set(), []
        if self.is_read_only:
            return
        self._attempt(lambda shelf: self._settle(shelf, offered, used, texts), None)

    def _settle(
        self, shelf: Shelf, offered: list[PrefixEntry], used: set[str], texts: list[tuple[str, np.ndarray]]
    ) -> None:
        if not self._is_swept:
            shelf.sweep(self._warn)
            self._is_swept = True
        for entry in offered:
            shelf.publish(entry)
        if used or texts:
            shelf.record(used, texts, self.budget_bytes // _TEXTS_PART)

    @property
    def is_usable(self) -> bool:
        """Whether the directory can be read and written; if not, nothing is found and nothing kept."""
        return self._shelf is not None

    def close(self) -> None:
        """Let go of the directory."""
        if self._shelf is not None:
            self._shelf.index.close()
            self._shelf = None

    def texts(self, model_key: str, max_tokens: int) -> list[list[int]]:
        """The latest prompts with their completions, as many as have no more tokens than that; the oldest first."""
        return self._attempt(lambda shelf: _latest(shelf.index.texts(model_key), max_tokens), [])

    @contextmanager
    def scratch_file(self) -> Iterator[Path]:
        """An empty file on this disk to measure with, which is gone afterwards. Raises OSError."""
        with tempfile.NamedTemporaryFile(dir=self._directory, prefix=SCRATCH_PREFIX) as file:
            yield Path(file.name)

    def rows(self) -> list[Row]:
        """What is stored, the least recently used first."""
        return self._attempt(lambda shelf: shelf.index.by_recency(), [])

    def num_texts(self) -> int:
        """How many texts are kept to look up in."""
        return self._attempt(lambda shelf: shelf.index.num_texts(), 0)

    def verify(self) -> list[str]:
        """Read everything, and drop what is damaged; says what that was."""
        return self._attempt(lambda shelf: shelf.verify(), [])

    def clear(self) -> int:
        """Forget everything; returns how many entries there were."""
        return self._attempt(lambda shelf: shelf.clear(), 0)

    def weights_digest(self, identity: str, compute: Callable[[], str]) -> str:
        """A checkpoint's digest by its whole content: computed once for files of this identity."""
        known = self._attempt(lambda shelf: shelf.index.weights_digest(identity), None)
        digest = known or compute()
        if known is None and not self.is_read_only:
            self._attempt(lambda shelf: shelf.index.keep_weights_digest(identity, digest), None)
        return digest

    def _opened(self) -> Shelf | None:
        was_there = (self._directory / INDEX_NAME).exists()
        if self.is_read_only and not was_there:
            return None
        has_entries = not self.is_read_only and any((self._directory / ENTRIES_NAME).iterdir())
        try:
            shelf = self._make_shelf()
        except _FAILURES as error:
            return self._reopened(error)
        if has_entries and not was_there:
            self._warn("the index was gone and is made anew")
        return shelf

    def _attempt(self, operation: Callable[[Shelf], Result], otherwise: Result) -> Result:
        """Whatever goes wrong with the directory ends here."""
        if self._shelf is None:
            return otherwise
        try:
            return operation(self._shelf)
        except _FAILURES as error:
            self._shelf = self._reopened(error)
            return otherwise

    def _reopened(self, error: Exception) -> Shelf | None:
        """A new index in place of a damaged one, made of the entries' files; or nothing for this process."""
        self._warn(getattr(error, "strerror", None) or first_line(error))
        if self.is_read_only or not isinstance(error, DamagedIndexError):
            self.close()
            return None
        self._is_swept = False
        try:
            # Another process that saw the damage may have put a new index there, and filled it.
            with only_process(self._directory / MARKER_NAME):
                return self._with_new_index()
        except _FAILURES:
            return None

    def _with_new_index(self) -> Shelf:
        """Open the index that another process has made in place of the damaged one, or make one."""
        # While it is open, no other file can have its inode.
        is_the_same = self._shelf is not None and file_id(self._directory / INDEX_NAME) == self._index_id
        self.close()
        if not is_the_same:
            with suppress(DamagedIndexError):
                return self._make_shelf()
        for name in INDEX_FILES:
            (self._directory / name).unlink(missing_ok=True)
        return self._make_shelf()

    def _make_shelf(self) -> Shelf:
        """Open the index, and note which file it is."""
        shelf = Shelf(self._directory, self.budget_bytes, read_only=self.is_read_only)
        self._index_id = file_id(self._directory / INDEX_NAME)
        return shelf

    def _warn(self, problem: str) -> None:
        if not self._has_warned:
            self._notify(f"stored prefixes in {self._directory}: {problem}; going on without")
            self._has_warned = True


def _key(entry: PrefixEntry) -> str:
    return prompt_digest(entry.model_key, entry.token_ids).hex()


def _rank(stored: np.ndarray, ids: np.ndarray) -> tuple[bool, int]:
    """Exact repeats first, then by the length of the common prefix."""
    length = common_prefix_length(stored, ids)
    return length == len(stored) == len(ids), length


def _latest(contents: Iterable[bytes], max_tokens: int) -> list[list[int]]:
    found: list[list[int]] = []
    for content in contents:
        ids = np.frombuffer(content, dtype="<i8")
        max_tokens -= len(ids)
        if max_tokens < 0:
            break
        found.append(ids.tolist())
    return found[::-1]
