"""Where stored prefixes live. Today: memory, least recently used out first."""

from collections import OrderedDict
from collections.abc import Iterator

from rakvctl.core.types import PrefixEntry


class MemoryTier:
    """Entries in memory, never more than `budget_bytes` of them."""

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.num_bytes = 0
        self._entries: OrderedDict[bytes, PrefixEntry] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[PrefixEntry]:
        """From the least to the most recently used."""
        return iter(self._entries.values())

    def touch(self, key: bytes) -> None:
        """Make an entry the most recently used one."""
        self._entries.move_to_end(key)

    def put(self, key: bytes, entry: PrefixEntry) -> list[PrefixEntry]:
        """Keep an entry in place of one of the same key; return what had to go (the entry itself if too large)."""
        gone = [self.remove(key)] if key in self._entries else []
        if entry.num_bytes > self.budget_bytes:
            return [*gone, entry]
        gone += self.make_room(entry.num_bytes)
        self._entries[key] = entry
        self.num_bytes += entry.num_bytes
        return gone

    def make_room(self, num_bytes: int) -> list[PrefixEntry]:
        """Drop and return the least recently used entries until `num_bytes` more fit (at most the whole budget)."""
        gone = []
        while self._entries and self.num_bytes + num_bytes > self.budget_bytes:
            gone.append(self.remove(next(iter(self._entries))))
        return gone

    def remove(self, key: bytes) -> PrefixEntry:
        """Drop an entry and return it."""
        entry = self._entries.pop(key)
        self.num_bytes -= entry.num_bytes
        return entry
