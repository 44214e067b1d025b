"""The prefix store: finds the stored prompt that shares the longest prefix with a new one, by exact token ids only.

A digest of the model's key and the first tokens finds candidates; comparing the ids one by one decides.
"""

import hashlib

import numpy as np

from rakvctl.core.tiers import MemoryTier
from rakvctl.core.types import BUCKET_TOKENS, PrefixEntry, PrefixMatch


class PrefixStore:
    """Stored prompts of one or more models, in one tier."""

    def __init__(self, tier: MemoryTier) -> None:
        self._tier = tier
        self._buckets: dict[bytes, dict[bytes, PrefixEntry]] = {}

    @property
    def num_bytes(self) -> int:
        """Memory held by all entries."""
        return self._tier.num_bytes

    def __len__(self) -> int:
        return len(self._tier)

    def match(self, model_key: str, prompt_token_ids: tuple[int, ...]) -> PrefixMatch | None:
        """Find the longest stored prefix of at least `BUCKET_TOKENS`; changes nothing, not even the order of use.

        A partial match clones one position less than it matched: the boundary token is computed again together with
        the rest, and gives the logits that were not stored. An exact repeat needs no pass at all.
        """
        ids = np.asarray(prompt_token_ids, dtype=np.int64)
        bucket = self._buckets.get(_bucket_digest(model_key, ids), {})
        best, best_length = None, BUCKET_TOKENS - 1
        for entry in bucket.values():
            length = common_prefix_length(entry.token_ids, ids)
            is_exact = length == len(ids) == len(entry.token_ids)
            # A bucket's key is only a digest: the entry's own model and ids decide.
            if entry.model_key == model_key and (length > best_length or is_exact):
                best, best_length = entry, length
        if best is None:
            return None
        exact = best_length == len(ids) == len(best.token_ids)
        return PrefixMatch(best, best_length, best_length if exact else best_length - 1, exact)

    def touch(self, entry: PrefixEntry) -> None:
        """Note that an entry was used."""
        key = _entry_digest(entry)
        if self._buckets.get(_bucket_digest(entry.model_key, entry.token_ids), {}).get(key) is entry:
            self._tier.touch(key)

    def insert(self, entry: PrefixEntry) -> None:
        """Store an entry in place of one of the same prompt, evicting others as the budget demands.

        Ignored: a prompt shorter than `BUCKET_TOKENS`, and one larger than the whole budget.
        """
        if len(entry.token_ids) < BUCKET_TOKENS:
            return
        bucket = self._buckets.setdefault(_bucket_digest(entry.model_key, entry.token_ids), {})
        bucket[_entry_digest(entry)] = entry
        for gone in self._tier.put(_entry_digest(entry), entry):
            self._forget(gone)

    def make_room(self, num_bytes: int) -> bool:
        """Evict what must go for an entry about to be made, so that it never adds to a full store.

        False, and nothing evicted, where the entry would not fit an empty store either.
        """
        if num_bytes > self._tier.budget_bytes:
            return False
        for gone in self._tier.make_room(num_bytes):
            self._forget(gone)
        return True

    def _forget(self, entry: PrefixEntry) -> None:
        """Take an entry that the tier gave up out of its bucket, unless a newer one has taken its place."""
        digest, key = _bucket_digest(entry.model_key, entry.token_ids), _entry_digest(entry)
        bucket = self._buckets[digest]
        if bucket.get(key) is entry:
            del bucket[key]
        if not bucket:
            del self._buckets[digest]


def common_prefix_length(left: np.ndarray, right: np.ndarray) -> int:
    """How many first ids two arrays share."""
    length = min(len(left), len(right))
    differs = left[:length] != right[:length]
    return int(differs.argmax()) if differs.any() else length


def _bucket_digest(model_key: str, ids: np.ndarray) -> bytes:
    return _digest(model_key, ids[:BUCKET_TOKENS])


def _entry_digest(entry: PrefixEntry) -> bytes:
    return _digest(entry.model_key, entry.token_ids)


def _digest(model_key: str, ids: np.ndarray) -> bytes:
    """BLAKE2b of 12 bytes over the model's key and token ids: the same in every process."""
    return hashlib.blake2b(model_key.encode() + b"\0" + ids.astype("<i8").tobytes(), digest_size=12).digest()
