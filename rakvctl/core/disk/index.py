"""What is stored, in a SQLite file that processes share: found by digest, kept by recency, bounded by bytes."""

import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_WAIT_SECONDS = 60.0
_SCHEMA_VERSION = 1
_TABLES = """
CREATE TABLE entries (
    key TEXT PRIMARY KEY, bucket TEXT NOT NULL, model_key TEXT NOT NULL, token_ids BLOB NOT NULL,
    num_bytes INTEGER NOT NULL, last_used REAL NOT NULL
);
CREATE INDEX entries_by_bucket ON entries (bucket);
CREATE INDEX entries_by_use ON entries (last_used);
CREATE TABLE texts (
    key TEXT PRIMARY KEY, model_key TEXT NOT NULL, token_ids BLOB NOT NULL, last_used REAL NOT NULL
);
CREATE TABLE weights (identity TEXT PRIMARY KEY, digest TEXT NOT NULL);
"""


@dataclass(frozen=True, slots=True)
class Row:
    """An entry as the index has it. `token_ids`: int64 bytes; `last_used`: seconds since the epoch."""

    key: str
    bucket: str
    model_key: str
    token_ids: bytes
    num_bytes: int
    last_used: float


# Queries are put together of our own names only; values are always bound.
_COLUMNS = "key, bucket, model_key, token_ids, num_bytes, last_used"


class Index:
    """An open index. Everything raises sqlite3.Error where the file cannot be used."""

    def __init__(self, path: Path) -> None:
        """Open it, or make it, readable for the user only."""
        if path.is_symlink():
            path.unlink()
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600))
        self._connection = sqlite3.connect(path, timeout=_WAIT_SECONDS, isolation_level=None)
        self._connection.execute("PRAGMA journal_mode = WAL")
        self._connection.execute("PRAGMA synchronous = NORMAL")
        if self._version() == 0:
            with self.writing():
                # Another process may have made the tables while this one waited.
                for statement in _TABLES.split(";") if self._version() == 0 else ():
                    self._connection.execute(statement)
                self._connection.execute(f"PRAGMA user_version = {_SCHEMA_VERSION}")
        if self._version() != _SCHEMA_VERSION:
            raise sqlite3.DatabaseError(f"the index has version {self._version()}")

    def _version(self) -> int:
        (version,) = self._connection.execute("PRAGMA user_version").fetchone()
        return int(version)

    def close(self) -> None:
        """Let go of the file."""
        self._connection.close()

    @contextmanager
    def writing(self) -> Iterator[None]:
        """One writer at a time, over all processes; all of it is done, or nothing."""
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._connection.rollback()
            raise
        self._connection.commit()

    def in_bucket(self, bucket: str) -> list[Row]:
        """Entries whose prompts may begin alike."""
        return self._rows("WHERE bucket = ?", bucket)

    def by_recency(self) -> list[Row]:
        """All entries, the least recently used first."""
        return self._rows("ORDER BY last_used")

    def get(self, key: str) -> Row | None:
        """One entry."""
        return next(iter(self._rows("WHERE key = ?", key)), None)

    def put(self, row: Row) -> None:
        """Add an entry, in place of one of the same key."""
        values = (row.key, row.bucket, row.model_key, row.token_ids, row.num_bytes, row.last_used)
        self._connection.execute(f"INSERT OR REPLACE INTO entries ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?)", values)  # noqa: S608

    def remove(self, key: str) -> None:
        """Forget an entry."""
        self._connection.execute("DELETE FROM entries WHERE key = ?", (key,))

    def touch(self, key: str) -> None:
        """Make an entry the most recently used one."""
        self._connection.execute("UPDATE entries SET last_used = ? WHERE key = ?", (time.time(), key))

    def num_bytes(self) -> int:
        """What all entries take."""
        (total,) = self._connection.execute("SELECT COALESCE(SUM(num_bytes), 0) FROM entries").fetchone()
        return int(total)

    def add_text(self, key: str, model_key: str, token_ids: bytes, max_bytes: int) -> None:
        """Keep a prompt with its completion; the oldest texts of all models go where they take more than allowed."""
        values = (key, model_key, token_ids, time.time())
        self._connection.execute("INSERT OR REPLACE INTO texts VALUES (?, ?, ?, ?)", values)
        kept, taken = self._connection.execute("SELECT key, LENGTH(token_ids) FROM texts ORDER BY last_used DESC"), 0
        for text_key, size in kept.fetchall():
            taken += size
            if taken > max_bytes:
                self._connection.execute("DELETE FROM texts WHERE key = ?", (text_key,))

    def texts(self, model_key: str) -> list[bytes]:
        """Token ids of the texts of a model, the latest first."""
        query = "SELECT token_ids FROM texts WHERE model_key = ? ORDER BY last_used DESC"
        return [ids for (ids,) in self._connection.execute(query, (model_key,))]

    def num_texts(self) -> int:
        """Texts of all models."""
        (count,) = self._connection.execute("SELECT COUNT(*) FROM texts").fetchone()
        return int(count)

    def clear(self) -> None:
        """Forget everything."""
        for table in ("entries", "texts"):
            self._connection.execute(f"DELETE FROM {table}")  # noqa: S608

    def weights_digest(self, identity: str) -> str | None:
        """What was computed for files of this identity, if it was."""
        found = self._connection.execute("SELECT digest FROM weights WHERE identity = ?", (identity,)).fetchone()
        return str(found[0]) if found else None

    def keep_weights_digest(self, identity: str, digest: str) -> None:
        """Remember it."""
        self._connection.execute("INSERT OR REPLACE INTO weights VALUES (?, ?)", (identity, digest))

    def _rows(self, clause: str, *values: str) -> list[Row]:
        found = self._connection.execute(f"SELECT {_COLUMNS} FROM entries {clause}", values).fetchall()  # noqa: S608
        return [Row(*row) for row in found]
