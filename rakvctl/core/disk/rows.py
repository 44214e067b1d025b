"""The rows of the index as they are validated, and what tells a damaged index from a fault of the program."""

import re
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

_KEY = re.compile(r"[0-9a-f]{24}")
_TOKEN_BYTES = 8
# A time beyond these seconds since the epoch is none.
_LAST_SECONDS = 1e11
# Codes that speak of the file's content. While the file is opened, SQLITE_ERROR does too: it says that tables lack.
_DAMAGE = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_FORMAT}


class DamagedIndexError(Exception):
    """The index is not as this version writes it."""


@dataclass(frozen=True, slots=True)
class Row:
    """An entry as the index has it. `token_ids`: int64 bytes; `last_used`: seconds since the epoch."""

    key: str
    bucket: str
    model_key: str
    token_ids: bytes
    num_bytes: int
    last_used: float


def is_key(text: object) -> bool:
    """Whether something is an entry's name: the hexadecimal digest of a prompt, and never a path."""
    return isinstance(text, str) and _KEY.fullmatch(text) is not None


@contextmanager
def damage_told(*more_codes: int) -> Iterator[None]:
    """Turn what SQLite says of a file's content into DamagedIndexError; what it says of our queries stays an error."""
    try:
        yield
    except UnicodeDecodeError as error:  # a message of SQLite's that quotes the file
        raise DamagedIndexError("the index cannot be read") from error
    except sqlite3.DatabaseError as error:
        # The lower eight bits are the primary code.
        if getattr(error, "sqlite_errorcode", 0) & 0xFF in _DAMAGE.union(more_codes):
            raise DamagedIndexError(str(error)) from error
        raise


def valid_row(values: Any) -> Row | None:
    """A row of the table, where this program can have written it."""
    key, bucket, model_key, token_ids, num_bytes, last_used = values
    is_valid = (
        is_key(key)
        and isinstance(bucket, str)
        and isinstance(model_key, str)
        and is_ids(token_ids)
        and isinstance(num_bytes, int)
        and num_bytes >= 0
        and isinstance(last_used, float)
        and 0 <= last_used <= _LAST_SECONDS
    )
    return Row(*values) if is_valid else None


def is_ids(content: object) -> bool:
    """Whether a value can be token ids, int64."""
    return isinstance(content, bytes) and len(content) % _TOKEN_BYTES == 0
