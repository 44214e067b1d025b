"""One stored prefix as a safetensors file, of which every part is checked as it is read.

Parts are the token ids, the logits after them, and blocks of positions of the target's states; each has a checksum over
its arrays, their types and shapes. So no more is read than is needed, and nothing is used that was not checked. A draft
model's states are computed anew, which is cheap: the next process may have another one.
"""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from rakvctl.core.disk.places import refuse_what_is_no_file
from rakvctl.core.errors import DamagedEntryError, first_line
from rakvctl.core.seams import STATE_BLOCK_TOKENS, KVSnapshot, state_blocks
from rakvctl.core.types import PrefixEntry

# With every change of what a file holds.
FORMAT = "rakvctl-kv-1"
_IDS, _LOGITS = "ids", "logits"
# At most so much of a file's header speaks of one array, and so much of the whole.
_ARRAY_HEADER_BYTES, _FILE_HEADER_BYTES = 256, 4096


def most_file_bytes(entry: PrefixEntry) -> int:
    """A size that the file of an entry never exceeds, known before it is written."""
    first_block = next(state_blocks(entry.kv.num_tokens))
    num_blocks = sum(1 for _ in state_blocks(entry.kv.num_tokens))
    header = _FILE_HEADER_BYTES + _ARRAY_HEADER_BYTES * num_blocks * (1 + len(entry.kv.arrays(*first_block)))
    return header + entry.kv.num_bytes + entry.token_ids.nbytes + entry.next_logits.nbytes


def write_entry(path: Path, entry: PrefixEntry) -> None:
    """Write to an existing file of the user's own, and wait until it is on the disk. Raises OSError."""
    arrays = {f"{_IDS}.0": entry.token_ids, f"{_LOGITS}.0": entry.next_logits}
    arrays |= _blocks(entry.kv)
    parts = groupby(sorted(arrays), key=_part)
    checksums = {part: _checksum([arrays[name] for name in names]) for part, names in parts}
    metadata = {"format": FORMAT, "model_key": entry.model_key, "checksums": json.dumps(checksums)}
    try:
        save_file(arrays, path, metadata)
    except SafetensorError as error:
        raise OSError(first_line(error)) from error
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _blocks(snapshot: KVSnapshot) -> dict[str, np.ndarray]:
    """The arrays of each block of positions by name; names sort as positions do."""
    named: dict[str, np.ndarray] = {}
    for start, end in state_blocks(snapshot.num_tokens):
        arrays = snapshot.arrays(start, end)
        named |= {f"{_block_part(start)}.{index:04d}": array for index, array in enumerate(arrays)}
    return {name: np.ascontiguousarray(array) for name, array in named.items()}


def _block_part(start: int) -> str:
    return f"states-{start // STATE_BLOCK_TOKENS:06d}"


def _part(name: str) -> str:
    return name.partition(".")[0]


def _checksum(arrays: Sequence[np.ndarray]) -> str:
    """BLAKE2b over types, shapes and bytes."""
    digest = hashlib.blake2b(digest_size=16)
    for array in arrays:
        digest.update(f"{array.dtype.str} {array.shape}\0".encode())
        digest.update(np.ascontiguousarray(array).data.cast("B"))
    return digest.hexdigest()


class EntryFile:
    """An open entry. Everything raises DamagedEntryError where the file is not as it was written."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        """Read the header; `max_bytes`: larger files are refused unread."""
        self.num_bytes = refuse_what_is_no_file(path, max_bytes)
        self.path = path
        try:
            self._file: Any = safe_open(path, framework="numpy")
            file: Any = self._file
            metadata: Mapping[str, str] = file.metadata() or {}
            names = sorted(file.keys())
        except (OSError, SafetensorError) as error:
            raise DamagedEntryError(f"{path.name}: {first_line(error)}") from error
        if metadata.get("format") != FORMAT:
            raise DamagedEntryError(f"{path.name} has another format")
        self.model_key = metadata.get("model_key", "")
        self._names = {part: list(group) for part, group in groupby(names, key=_part)}
        self._checksums = _parsed_checksums(metadata.get("checksums", ""), path)

    def token_ids(self) -> np.ndarray:
        """The prompt, int64."""
        (ids,) = self._read(_IDS, 1)
        if ids.dtype != np.int64 or ids.ndim != 1:
            raise DamagedEntryError(f"{self.path.name} holds no token ids")
        return ids

    def next_logits(self) -> np.ndarray:
        """Scores of the token after the prompt, [vocab_size] float32."""
        (logits,) = self._read(_LOGITS, 1)
        if logits.dtype != np.float32 or logits.ndim != 1:
            raise DamagedEntryError(f"{self.path.name} holds no logits")
        return logits

    def block(self, start: int) -> list[np.ndarray]:
        """The states of the block of positions from `start` on."""
        return self._read(_block_part(start), None)

    def verify(self) -> None:
        """Read and check every part."""
        for part in self._names.keys() | self._checksums.keys():
            self._read(part, None)

    def _read(self, part: str, num_arrays: int | None) -> list[np.ndarray]:
        names = self._names.get(part, [])
        try:
            arrays: list[np.ndarray] = [self._file.get_tensor(name) for name in names]
        except (OSError, SafetensorError, TypeError, ValueError) as error:
            raise DamagedEntryError(f"{self.path.name}: {first_line(error)}") from error
        if num_arrays not in (None, len(arrays)) or _checksum(arrays) != self._checksums.get(part):
            raise DamagedEntryError(f"{self.path.name} is damaged: {part}")
        return arrays


def _parsed_checksums(text: str, path: Path) -> dict[str, str]:
    try:
        checksums = json.loads(text)
    except ValueError as error:
        raise DamagedEntryError(f"{path.name} has no checksums") from error
    if not isinstance(checksums, dict):
        raise DamagedEntryError(f"{path.name} has no checksums")
    return checksums


@dataclass(frozen=True, slots=True)
class StoredSnapshot:
    """KV states in a file, read block by block when they are restored."""

    file: EntryFile
    num_tokens: int
    num_bytes: int = 0

    def arrays(self, start: int, end: int) -> list[np.ndarray]:
        """The states of positions `start` to `end`: one whole block, or the last one."""
        return self.file.block(start)


def read_entry(path: Path, max_bytes: int) -> PrefixEntry:
    """An entry whose ids and logits are read and checked; its states are when they are restored."""
    file = EntryFile(path, max_bytes)
    ids = file.token_ids()
    return PrefixEntry(file.model_key, ids, StoredSnapshot(file, len(ids)), file.next_logits())
