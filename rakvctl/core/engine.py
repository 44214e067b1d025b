"""One model with one sequence in its cache, as the verbs of the decode loop: prefill, step, verify, rollback."""

from collections.abc import Callable, Sequence

from rakvctl.core.seams import Backend, EngineInfo, KVSnapshot, Logits


class Engine:
    """The target or the draft model. `length` positions are cached; every verb appends to them or removes some."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    @property
    def length(self) -> int:
        """Positions in the cache."""
        return self._backend.cache.length

    @property
    def model_key(self) -> str:
        """Names what the KV states depend on."""
        return self._backend.model_key

    @property
    def max_positions(self) -> int | None:
        """The longest sequence the model can hold, or None."""
        return self._backend.max_positions

    @property
    def prefill_chunk_tokens(self) -> int | None:
        """How many tokens of a prompt a pass takes at most, or None where all go through in one."""
        return self._backend.prefill_chunk_tokens

    @property
    def vocab_size(self) -> int:
        """How many scores each position has."""
        return self._backend.vocab_size

    @property
    def info(self) -> EngineInfo:
        """What its times depend on."""
        return self._backend.info

    def synchronize(self) -> None:
        """Wait until the device has done all it was given."""
        self._backend.synchronize()

    def free_bytes(self) -> int | None:
        """Memory that is free for KV states, or None where nobody counts it."""
        return self._backend.free_bytes()

    def memory_reader(self, num_bytes: int) -> Callable[[], None]:
        """A function that reads so much of the device's memory once, to see how fast that is."""
        return self._backend.memory_reader(num_bytes)

    @property
    def can_rollback(self) -> bool:
        """Whether positions can be forgotten, copied and restored."""
        return self._backend.can_rollback

    @property
    def prefix_stable_positions(self) -> int | None:
        """The longest sequence in which KV entries do not depend on how long it is; None where they never do."""
        return self._backend.prefix_stable_positions

    def has_stable_prefixes(self, num_positions: int) -> bool:
        """Whether KV entries of a sequence of so many positions serve any other that begins alike.

        Only then may they be reused or rolled back to, or be computed in several passes.
        """
        limit = self._backend.prefix_stable_positions
        return self.can_rollback and (limit is None or num_positions <= limit)

    @property
    def must_recompute(self) -> bool:
        """Whether plain decoding computes all cached positions anew together with the next one."""
        return self._backend.recomputes_when_unstable and self.length == self._backend.prefix_stable_positions

    def reserve(self, num_tokens: int) -> None:
        """Make room for a sequence of `num_tokens` positions."""
        self._backend.cache.reserve(num_tokens)

    def prefill(self, token_ids: Sequence[int]) -> Logits:
        """Append prompt tokens (at least one); return the logits of the next token, [1, vocab_size]."""
        # In chunks, so that the memory of a pass does not grow with the prompt.
        limit, chunk = self.prefix_stable_positions, self.prefill_chunk_tokens
        if chunk is None or (limit is not None and self.length + len(token_ids) > limit):
            chunk = len(token_ids)
        last_chunk = (len(token_ids) - 1) // chunk * chunk
        for start in range(0, last_chunk, chunk):
            self._backend.forward(token_ids[start : start + chunk], num_logits=1)
        return self._backend.forward(token_ids[last_chunk:], num_logits=1)

    def step(self, token_id: int) -> Logits:
        """Append one token; return the logits of the next one, [1, vocab_size]."""
        return self._backend.forward((token_id,), num_logits=1)

    def verify(self, token_ids: Sequence[int]) -> Logits:
        """Append tokens in one pass; return the logits after each of them, [len(token_ids), vocab_size]."""
        return self._backend.forward(token_ids, num_logits=len(token_ids))

    def likeliest_after(self, before: int, token_ids: Sequence[int]) -> list[int]:
        """The best token after `before` and each of `token_ids` alone; [] where the model cannot be asked that way."""
        return self._backend.likeliest_after(before, token_ids)

    def rollback(self, length: int) -> None:
        """Forget all positions from `length` on."""
        self._backend.cache.rollback(length)

    def num_bytes(self, num_tokens: int) -> int:
        """Memory that a snapshot of `num_tokens` positions takes."""
        return self._backend.cache.num_bytes(num_tokens)

    def snapshot(self, num_tokens: int) -> KVSnapshot:
        """Copy the states of the first `num_tokens` positions."""
        return self._backend.cache.snapshot(num_tokens)

    def restore(self, snapshot: KVSnapshot, num_tokens: int) -> None:
        """Start from the first `num_tokens` positions of a snapshot."""
        self._backend.cache.restore(snapshot, num_tokens)
