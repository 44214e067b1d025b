"""The prefix store: finds the stored prompt that shares the longest prefix with a new one, by exact token ids only.

A digest of the model's key and the first tokens finds candidates; comparing the ids one by one decides.
"""

from collections.abc import Callable

import numpy as np

from rakvctl.core.disk.tier import DiskTier
from rakvctl.core.prefixes import bucket_digest, common_prefix_length, prompt_digest
from rakvctl.core.tiers import MemoryTier
from rakvctl.core.types import BUCKET_TOKENS, PrefixEntry, PrefixMatch, Source


class PrefixStore:
    """Stored prompts of one or more models, in memory and, if there is one, in a directory."""

    def __init__(
        self, tier: MemoryTier, disk: DiskTier | None = None, loading_pays: Callable[[int], bool] | None = None
    ) -> None:
        """`loading_pays`: whether a prompt of so many tokens is faster read from the directory than computed."""
        self._tier = tier
        self._disk = disk
        self._loading_pays = loading_pays
        self._buckets: dict[bytes, dict[bytes, PrefixEntry]] = {}

    @property
    def num_bytes(self) -> int:
        """Memory held by all entries."""
        return self._tier.num_bytes

    def __len__(self) -> int:
        """How many entries are in memory."""
        return len(self._tier)

    def match(self, model_key: str, prompt_token_ids: tuple[int, ...]) -> PrefixMatch | None:
        """Find the longest stored prefix of at least `BUCKET_TOKENS`; changes nothing, not even the order of use.

        Of equally long ones the one in memory.

        A partial match clones one position less than it matched: the boundary token is computed again together with
        the rest, and gives the logits that were not stored. An exact repeat needs no pass at all.
        """
        ids = np.asarray(prompt_token_ids, dtype=np.int64)
        bucket = self._buckets.get(bucket_digest(model_key, ids), {})
        best, best_length = None, BUCKET_TOKENS - 1
        for entry in bucket.values():
            length = common_prefix_length(entry.token_ids, ids)
            is_exact = length == len(ids) == len(entry.token_ids)
            # A bucket's key is only a digest: the entry's own model and ids decide.
            if entry.model_key == model_key and (length > best_length or is_exact):
                best, best_length = entry, length
        exact = best is not None and best_length == len(ids) == len(best.token_ids)
        found = self._disk.find(model_key, ids) if self._disk is not None and not exact else None
        if found is not None:
            is_exact = found.num_matched == len(ids) == len(found.entry.token_ids)
            if is_exact or found.num_matched > best_length:
                return _match(found.entry, found.num_matched, is_exact, "page cache" if found.is_warm else "disk")
        return None if best is None else _match(best, best_length, exact, "memory")

    def discard(self, entry: PrefixEntry, why: str) -> None:
        """Give up an entry whose states cannot be used."""
        if self._disk is not None:
            self._disk.discard(entry, why)

    def settle(self) -> None:
        """Write to the directory what was put off."""
        if self._disk is not None:
            self._disk.settle()

    def remember_text(self, model_key: str, token_ids: list[int]) -> None:
        """Keep a prompt with its completion for processes to come, to look tokens up in."""
        if self._disk is not None:
            self._disk.offer_text(model_key, token_ids)

    def touch(self, entry: PrefixEntry) -> None:
        """Note that an entry was used."""
        if self._disk is not None:
            self._disk.touch(entry)
        key = prompt_digest(entry.model_key, entry.token_ids)
        if self._buckets.get(bucket_digest(entry.model_key, entry.token_ids), {}).get(key) is entry:
            self._tier.touch(key)

    def insert(self, entry: PrefixEntry, *, is_on_disk: bool = False) -> None:
        """Store an entry in place of one of the same prompt, evicting others as the budget demands.

        `is_on_disk`: it was read from the directory, and only memory lacks it. Ignored: a prompt shorter than
        `BUCKET_TOKENS`, and one larger than the whole budget.
        """
        if len(entry.token_ids) < BUCKET_TOKENS:
            return
        if self._disk is not None and not is_on_disk and self._outlives(len(entry.token_ids), entry.num_bytes):
            self._disk.offer(entry)
        bucket = self._buckets.setdefault(bucket_digest(entry.model_key, entry.token_ids), {})
        bucket[prompt_digest(entry.model_key, entry.token_ids)] = entry
        for gone in self._tier.put(prompt_digest(entry.model_key, entry.token_ids), entry):
            self._forget(gone)

    def make_room(self, num_tokens: int, num_bytes: int, *, is_on_disk: bool = False) -> bool:
        """Evict what must go for an entry about to be made, so that it never adds to a full store.

        False, and nothing evicted, where nobody would keep the entry. `is_on_disk`: the directory has it already.
        """
        if num_bytes > self._tier.budget_bytes:
            return not is_on_disk and self._outlives(num_tokens, num_bytes)
        for gone in self._tier.make_room(num_bytes):
            self._forget(gone)
        return True

    def _outlives(self, num_tokens: int, num_bytes: int) -> bool:
        """Whether a prompt is worth writing to the directory, and fits it."""
        pays = self._loading_pays is None or self._loading_pays(num_tokens)
        return self._disk is not None and num_bytes <= self._disk.budget_bytes and pays

    def _forget(self, entry: PrefixEntry) -> None:
        """Take an entry that the tier gave up out of its bucket, unless a newer one has taken its place."""
        digest, key = bucket_digest(entry.model_key, entry.token_ids), prompt_digest(entry.model_key, entry.token_ids)
        bucket = self._buckets[digest]
        if bucket.get(key) is entry:
            del bucket[key]
        if not bucket:
            del self._buckets[digest]


def _match(entry: PrefixEntry, length: int, exact: bool, source: Source) -> PrefixMatch:
    return PrefixMatch(entry, length, length if exact else length - 1, exact, source)
