"""The index of the persistent prefix cache: a SQLite file that processes share, found by digest, evicted by recency."""

import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from rakvctl.core.disk.rows import DamagedIndexError, Row, damage_told, is_ids, is_key, valid_row
from rakvctl.core.prefixes import prompt_digest

_WAIT_SECONDS = 60.0
_SCHEMA_VERSION = 2
# Statements are separated by blank lines. Triggers keep the sums, so that no table is scanned to know them; neither
# table is ever written by REPLACE, which would fire none.
_TABLES = """
CREATE TABLE entries (
    key TEXT PRIMARY KEY, bucket TEXT NOT NULL, model_key TEXT NOT NULL, token_ids BLOB NOT NULL,
    num_bytes INTEGER NOT NULL, last_used REAL NOT NULL
)

CREATE INDEX entries_by_bucket ON entries (bucket)

CREATE INDEX entries_by_use ON entries (last_used)

CREATE TABLE texts (
    key TEXT PRIMARY KEY, model_key TEXT NOT NULL, token_ids BLOB NOT NULL, last_used REAL NOT NULL
)

CREATE INDEX texts_by_model ON texts (model_key, last_used)

CREATE INDEX texts_by_use ON texts (last_used)

CREATE TABLE weights (identity TEXT PRIMARY KEY, digest TEXT NOT NULL)

CREATE TABLE sums (entry_bytes INTEGER NOT NULL, text_bytes INTEGER NOT NULL)

INSERT INTO sums VALUES (0, 0)

CREATE TRIGGER entry_added AFTER INSERT ON entries
    BEGIN UPDATE sums SET entry_bytes = entry_bytes + new.num_bytes; END

CREATE TRIGGER entry_removed AFTER DELETE ON entries
    BEGIN UPDATE sums SET entry_bytes = entry_bytes - old.num_bytes; END

CREATE TRIGGER text_added AFTER INSERT ON texts
    BEGIN UPDATE sums SET text_bytes = text_bytes + LENGTH(new.token_ids); END

CREATE TRIGGER text_removed AFTER DELETE ON texts
    BEGIN UPDATE sums SET text_bytes = text_bytes - LENGTH(old.token_ids); END


"""
# Queries are put together of our own names only; values are always bound.
_COLUMNS = "key, bucket, model_key, token_ids, num_bytes, last_used"


class Index:
    """An open index. Everything raises sqlite3.Error where the file cannot be used, DamagedIndexError for its content.

    A rollback journal, not a write-ahead log: that one needs memory which processes share, and a network file system
    has none. Reading goes on while another process writes, but for the moment of its commit.
    """

    def __init__(self, path: Path, *, read_only: bool = False) -> None:
        """Open it, or make it, readable for the user only; `read_only`: it must be there, and nothing is written."""
        if not read_only:
            if path.is_symlink():
                path.unlink()
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600))
        mode = "ro" if read_only else "rw"
        address = f"file:{quote(str(path.absolute()))}?mode={mode}"
        self._connection = sqlite3.connect(address, timeout=_WAIT_SECONDS, isolation_level=None, uri=True)
        # Out of a damaged file comes text of any kind; rows are validated.
        self._connection.text_factory = lambda content: content.decode("utf-8", "replace")
        try:
            with damage_told(sqlite3.SQLITE_ERROR):
                self._prepare(read_only)
        except BaseException:
            self._connection.close()
            raise

    def _prepare(self, read_only: bool) -> None:
        """Make the tables in an empty file, and look at all of them."""
        # A commit does not wait for the disk: what a loss of power damages is seen as damage, and made anew of the
        # entries' files, which do.
        self._connection.execute("PRAGMA synchronous = OFF")
        if self._version() == 0 and not read_only:
            self._connection.execute("PRAGMA auto_vacuum = FULL")
            with self.writing():
                # Another process may have made the tables while this one waited.
                for statement in _TABLES.strip().split("\n\n") if self._version() == 0 else ():
                    self._connection.execute(statement)
                self._connection.execute(f"PRAGMA user_version = {_SCHEMA_VERSION}")
        if self._version() != _SCHEMA_VERSION:
            raise DamagedIndexError(f"the index has version {self._version()}")
        for table in ("entries", "texts", "weights", "sums"):
            self._connection.execute(f"SELECT * FROM {table} LIMIT 1").fetchall()  # noqa: S608

    def _version(self) -> int:
        (version,) = self._connection.execute("PRAGMA user_version").fetchone()
        return int(version)

    def close(self) -> None:
        """Let go of the file."""
        self._connection.close()

    @contextmanager
    def writing(self) -> Iterator[None]:
        """One writer at a time, over all processes; all of it is done, or nothing."""
        self._execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._connection.rollback()
            raise
        with damage_told():
            self._connection.commit()

    def in_bucket(self, bucket: str) -> list[Row]:
        """Entries whose prompts may begin alike."""
        return self._rows("WHERE bucket = ?", bucket)

    def by_recency(self) -> list[Row]:
        """All entries, the least recently used first."""
        return self._rows("ORDER BY last_used")

    def keys(self) -> list[str]:
        """The keys of all entries."""
        return [row.key for row in self._rows("")]

    def oldest(self) -> tuple[str, int] | None:
        """Key and size of the least recently used entry."""
        found = self._execute("SELECT key, num_bytes FROM entries ORDER BY last_used LIMIT 1")
        if not found:
            return None
        key, num_bytes = found[0]
        if not is_key(key) or not isinstance(num_bytes, int):
            raise DamagedIndexError("a row of the index is damaged")
        return key, num_bytes

    def get(self, key: str) -> Row | None:
        """One entry."""
        return next(iter(self._rows("WHERE key = ?", key)), None)

    def put(self, row: Row) -> None:
        """Add an entry, in place of one of the same key."""
        self.remove(row.key)
        values = (row.key, row.bucket, row.model_key, row.token_ids, row.num_bytes, row.last_used)
        self._execute(f"INSERT INTO entries ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?)", *values)  # noqa: S608

    def remove(self, key: str) -> None:
        """Remove an entry."""
        self._execute("DELETE FROM entries WHERE key = ?", key)

    def touch(self, key: str) -> None:
        """Make an entry the most recently used one."""
        self._execute("UPDATE entries SET last_used = ? WHERE key = ?", time.time(), key)

    def drop_invalid(self) -> None:
        """Remove rows that this program cannot have written, and add the sums up anew; within `writing`."""
        for rowid, *values in self._execute(f"SELECT rowid, {_COLUMNS} FROM entries"):  # noqa: S608
            if valid_row(values) is None:
                self._execute("DELETE FROM entries WHERE rowid = ?", rowid)
        self._execute(
            "UPDATE sums SET entry_bytes = (SELECT COALESCE(SUM(num_bytes), 0) FROM entries),"
            " text_bytes = (SELECT COALESCE(SUM(LENGTH(token_ids)), 0) FROM texts)"
        )

    def num_bytes(self) -> int:
        """What the files of all entries take."""
        return self._sum("entry_bytes")

    def _sum(self, name: str) -> int:
        found = self._execute(f"SELECT {name} FROM sums")  # noqa: S608
        if len(found) != 1 or not isinstance(found[0][0], int):
            raise DamagedIndexError("the sums of the index are damaged")
        return int(found[0][0])

    def own_bytes(self) -> int:
        """What the index itself takes, texts included; it shrinks as they are removed."""
        (pages,), (size,) = (self._execute(f"PRAGMA {name}")[0] for name in ("page_count", "page_size"))
        return int(pages) * int(size)

    def add_text(self, key: str, model_key: str, token_ids: bytes, max_bytes: int) -> None:
        """Keep a prompt with its completion; the oldest texts of all models go where they take more than allowed."""
        if len(token_ids) > max_bytes:
            return
        self._execute(
            "INSERT INTO texts VALUES (?, ?, ?, ?) ON CONFLICT (key) DO UPDATE SET last_used = excluded.last_used",
            key, model_key, token_ids, time.time(),
        )  # fmt: skip
        while self._sum("text_bytes") > max_bytes:
            oldest = self._execute("SELECT rowid FROM texts ORDER BY last_used LIMIT 1")
            if not oldest:
                break
            self._execute("DELETE FROM texts WHERE rowid = ?", *oldest[0])

    def texts(self, model_key: str) -> Iterator[bytes]:
        """Token ids of the texts of a model, the latest first; read one by one. Damaged texts are skipped."""
        query = "SELECT key, token_ids FROM texts WHERE model_key = ? ORDER BY last_used DESC"
        with damage_told(), closing(self._connection.execute(query, (model_key,))) as found:
            for key, content in found:
                # The key is the only checksum of a text.
                if is_ids(content) and prompt_digest(model_key, np.frombuffer(content, dtype="<i8")).hex() == key:
                    yield content

    def num_texts(self) -> int:
        """Texts of all models."""
        return int(self._execute("SELECT COUNT(*) FROM texts")[0][0])

    def clear(self) -> None:
        """Remove all entries and texts."""
        for table in ("entries", "texts"):
            self._execute(f"DELETE FROM {table}")  # noqa: S608

    def weights_digest(self, identity: str) -> str | None:
        """What was computed for files of this identity, if it was."""
        found = self._execute("SELECT digest FROM weights WHERE identity = ?", identity)
        return str(found[0][0]) if found else None

    def keep_weights_digest(self, identity: str, digest: str) -> None:
        """Remember it."""
        self._execute("INSERT OR REPLACE INTO weights VALUES (?, ?)", identity, digest)

    def _rows(self, clause: str, *values: str) -> list[Row]:
        found = self._execute(f"SELECT {_COLUMNS} FROM entries {clause}", *values)  # noqa: S608
        return [row for row in map(valid_row, found) if row is not None]

    def _execute(self, statement: str, *values: object) -> list[Any]:
        with damage_told():
            return self._connection.execute(statement, values).fetchall()
