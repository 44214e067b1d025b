"""The cache on torch: what is forgotten, copied, restored or moved never shows in the logits that follow.

The reference is always the same model without a cache. The model has layers of full and of sliding-window attention.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rakvctl.core import kv
from rakvctl.core.backends.fake import FakeSnapshot
from rakvctl.core.backends.torch_hf import TorchBackend
from rakvctl.core.engine import Engine
from rakvctl.core.errors import DamagedEntryError
from rakvctl.core.kv import TorchKVCache, TorchSnapshot
from tests.checkpoints import SLIDING_WINDOW, VOCAB_SIZE, random_model

MODEL = random_model("gemma3")
# The cache grows by blocks of this many positions at least; longer sequences make it move what it holds.
LONG = 300

tokens = st.integers(0, VOCAB_SIZE - 1)
pieces = st.lists(tokens, min_size=1, max_size=2 * SLIDING_WINDOW)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Threads cost more than they bring for models this small."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make_engine(model: Any = MODEL) -> Engine:
    return Engine(TorchBackend(model, "test", VOCAB_SIZE))


def scores(engine: Engine, token_ids: Sequence[int]) -> np.ndarray:
    return engine.verify(token_ids).numpy()


@torch.inference_mode()
def uncached(token_ids: Sequence[int]) -> np.ndarray:
    """Logits after each token, from one pass without a cache."""
    logits: np.ndarray = MODEL(input_ids=torch.tensor([list(token_ids)]), use_cache=False).logits[0].numpy()
    return logits


def assert_close(left: np.ndarray, right: np.ndarray) -> None:
    np.testing.assert_allclose(left, right, atol=1e-4, rtol=0)


def random_tokens(count: int, seed: int = 0) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, VOCAB_SIZE, count)]


def tensors(snapshot: Any) -> list[torch.Tensor]:
    assert isinstance(snapshot, TorchSnapshot)
    return [states for layer in snapshot.layers if layer is not None for states in layer]


@contextmanager
def failing_in_layer(index: int) -> Iterator[None]:
    """Passes fail when they reach that layer, after the layers before it have written their states."""

    def fail(*_: Any) -> None:
        raise MemoryError("no room")

    hook = MODEL.model.layers[index].register_forward_pre_hook(fail)
    try:
        yield
    finally:
        hook.remove()


class CacheMachine(RuleBasedStateMachine):
    """Any order of operations: the next logits are those of the tokens that should be there, and of no others."""

    def __init__(self) -> None:
        super().__init__()
        self.engine = make_engine()
        self.token_ids: list[int] = []
        self.snapshots: list[tuple[Any, list[int]]] = []

    @rule(piece=pieces)
    def verify(self, piece: list[int]) -> None:
        found = scores(self.engine, piece)
        self.token_ids += piece
        assert_close(found, uncached(self.token_ids)[-len(piece) :])

    @rule(piece=pieces)
    def prefill(self, piece: list[int]) -> None:
        found = self.engine.prefill(piece).numpy()
        self.token_ids += piece
        assert_close(found, uncached(self.token_ids)[-1:])

    @rule(token=tokens)
    def step(self, token: int) -> None:
        found = self.engine.step(token).numpy()
        self.token_ids.append(token)
        assert_close(found, uncached(self.token_ids)[-1:])

    @rule(data=st.data())
    def rollback(self, data: st.DataObject) -> None:
        length = data.draw(st.integers(0, len(self.token_ids)))
        self.engine.rollback(length)
        del self.token_ids[length:]

    @precondition(lambda self: self.token_ids)
    @rule(data=st.data())
    def snapshot(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(1, len(self.token_ids)))
        self.snapshots.append((self.engine.snapshot(count), self.token_ids[:count]))

    @precondition(lambda self: self.snapshots)
    @rule(data=st.data())
    def restore(self, data: st.DataObject) -> None:
        snapshot, token_ids = data.draw(st.sampled_from(self.snapshots))
        count = data.draw(st.integers(0, len(token_ids)))
        self.engine.restore(snapshot, count)
        self.token_ids = token_ids[:count]

    @rule(room=st.integers(1, 600))
    def reserve(self, room: int) -> None:
        self.engine.reserve(room)

    @rule(piece=pieces, layer=st.integers(0, 2))
    def fail(self, piece: list[int], layer: int) -> None:
        with failing_in_layer(layer), pytest.raises(MemoryError):
            self.engine.verify(piece)

    @invariant()
    def length_is_that_of_the_tokens(self) -> None:
        assert self.engine.length == len(self.token_ids)


CacheMachine.TestCase.settings = settings(
    max_examples=40, stateful_step_count=15, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestAnyOrderOfOperations = CacheMachine.TestCase


@settings(max_examples=30, deadline=None)
@given(kept=pieces, detour=pieces, rest=pieces)
def test_appending_and_rolling_back_is_the_identity(kept: list[int], detour: list[int], rest: list[int]) -> None:
    straight, wandering = make_engine(), make_engine()
    straight.prefill(kept)
    wandering.prefill(kept)
    wandering.verify(detour)
    wandering.rollback(len(kept))
    assert wandering.length == len(kept)
    assert np.array_equal(scores(wandering, rest), scores(straight, rest))


@settings(max_examples=30, deadline=None)
@given(prompt=pieces, other=pieces, rest=pieces, data=st.data())
def test_a_restored_prefix_continues_as_the_original_did(
    prompt: list[int], other: list[int], rest: list[int], data: st.DataObject
) -> None:
    copied = data.draw(st.integers(1, len(prompt)))
    restored = data.draw(st.integers(0, copied))
    engine = make_engine()
    engine.prefill(prompt)
    snapshot = engine.snapshot(copied)
    assert snapshot.num_tokens == copied
    engine.rollback(0)
    engine.prefill(other)
    engine.restore(snapshot, restored)
    assert engine.length == restored
    assert_close(scores(engine, rest), uncached(prompt[:restored] + rest)[restored:])


def test_a_rollback_is_exact_beyond_the_sliding_window() -> None:
    """transformers' own cache of such a layer has forgotten what lies before the window by then."""
    token_ids = random_tokens(5 * SLIDING_WINDOW)
    engine = make_engine()
    engine.prefill(token_ids)
    for length in (4 * SLIDING_WINDOW, 2 * SLIDING_WINDOW, SLIDING_WINDOW, 3):
        engine.rollback(length)
        assert_close(scores(engine, [7, 8]), uncached([*token_ids[:length], 7, 8])[length:])
        engine.rollback(length)


def test_a_snapshot_restores_into_a_cache_that_was_never_used() -> None:
    token_ids = random_tokens(20)
    source, fresh = make_engine(), make_engine()
    source.prefill(token_ids)
    fresh.restore(source.snapshot(20), 20)
    assert np.array_equal(scores(fresh, [5, 6, 7]), scores(source, [5, 6, 7]))


def test_a_snapshot_longer_than_the_buffers_restores() -> None:
    token_ids = random_tokens(LONG)
    source, fresh = make_engine(), make_engine()
    source.prefill(token_ids)
    fresh.prefill(token_ids[:3])
    fresh.restore(source.snapshot(LONG), LONG)
    assert_close(scores(fresh, [5, 6]), uncached([*token_ids, 5, 6])[-2:])


@pytest.mark.parametrize("room", [None, LONG, 2 * LONG])
def test_growing_keeps_the_content(room: int | None) -> None:
    """The buffers grow during the passes, or before them, or are large enough from the start."""
    token_ids = random_tokens(LONG)
    engine = make_engine()
    if room:
        engine.reserve(room)
    found = [engine.prefill(token_ids[:250]).numpy()]
    found += [scores(engine, token_ids[start : start + 5]) for start in range(250, LONG, 5)]
    assert_close(np.concatenate(found), uncached(token_ids)[249:])


def test_growing_keeps_the_content_bit_by_bit() -> None:
    engine = make_engine()
    engine.prefill(random_tokens(100))
    before = tensors(engine.snapshot(100))
    engine.reserve(10_000)
    assert engine.length == 100
    for left, right in zip(before, tensors(engine.snapshot(100)), strict=True):
        assert torch.equal(left, right)


@pytest.mark.parametrize("layer", [0, 1, 2])
@pytest.mark.parametrize("cached", [0, 1, 20, 250])
def test_a_pass_that_fails_half_way_leaves_no_trace(layer: int, cached: int) -> None:
    """Also where it was the first one, and where the buffers had to grow for it."""
    token_ids, lost = random_tokens(cached), random_tokens(20, seed=1)
    engine = make_engine()
    if token_ids:
        engine.prefill(token_ids)
    with failing_in_layer(layer), pytest.raises(MemoryError):
        engine.verify(lost)
    assert engine.length == cached
    assert_close(scores(engine, [5, 6, 7]), uncached([*token_ids, 5, 6, 7])[cached:])


@contextmanager
def failing_allocation(number: int) -> Iterator[None]:
    """The `number`-th buffer from now on finds no memory, counted from 0: keys and values of each layer in turn."""
    allocate, left = kv._zeros_like, [number]

    def fail_once(states: torch.Tensor, capacity: int) -> torch.Tensor:
        left[0] -= 1
        if left[0] == -1:
            raise RuntimeError("not enough memory")
        return allocate(states, capacity)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(kv, "_zeros_like", fail_once)
        yield
    assert left[0] < 0


NUM_BUFFERS = 2 * MODEL.config.num_hidden_layers


@pytest.mark.parametrize("number", range(NUM_BUFFERS))
@pytest.mark.parametrize("cached", [0, 1, 60])
def test_buffers_that_find_no_memory_leave_the_cache_as_it_was(cached: int, number: int) -> None:
    """Whichever buffer it is: the content stands, and passes that fit or find memory later are right."""
    token_ids, many = random_tokens(cached), random_tokens(LONG, seed=1)
    engine = make_engine()
    if token_ids:
        engine.prefill(token_ids)
    with failing_allocation(number), pytest.raises(RuntimeError, match="not enough memory"):
        engine.verify(many)
    assert engine.length == cached
    assert_close(scores(engine, [5, 6, 7]), uncached([*token_ids, 5, 6, 7])[cached:])
    assert_close(scores(engine, many), uncached([*token_ids, 5, 6, 7, *many])[cached + 3 :])


@pytest.mark.parametrize("number", range(NUM_BUFFERS))
def test_the_announced_size_stays_right_where_only_some_buffers_have_grown(number: int) -> None:
    engine = make_engine()
    engine.prefill(random_tokens(60))
    with failing_allocation(number), pytest.raises(RuntimeError, match="not enough memory"):
        engine.reserve(LONG)
    assert engine.num_bytes(60) == engine.snapshot(60).num_bytes


@pytest.mark.parametrize("is_used", [False, True])
@pytest.mark.parametrize("number", range(NUM_BUFFERS))
def test_a_restore_that_finds_no_memory_leaves_nothing_and_can_be_repeated(number: int, is_used: bool) -> None:
    token_ids = random_tokens(LONG)
    first, second = make_engine(), make_engine()
    first.prefill(token_ids)
    snapshot = first.snapshot(LONG)
    if is_used:
        second.prefill(random_tokens(10, seed=1))
    with failing_allocation(number), pytest.raises(RuntimeError, match="not enough memory"):
        second.restore(snapshot, LONG)
    assert second.length == 0
    second.restore(snapshot, LONG)
    assert_close(scores(second, [5, 6, 7]), uncached([*token_ids, 5, 6, 7])[LONG:])


@pytest.mark.parametrize("length", [-1, 11, 1000])
def test_rolling_back_out_of_range_is_refused_and_changes_nothing(length: int) -> None:
    engine = make_engine()
    token_ids = random_tokens(10)
    engine.prefill(token_ids)
    with pytest.raises(ValueError, match=f"cannot roll back to {length} of 10"):
        engine.rollback(length)
    assert engine.length == 10
    assert_close(scores(engine, [5]), uncached([*token_ids, 5])[-1:])


@pytest.mark.parametrize("count", [-1, 0, 11])
def test_copying_positions_that_are_not_there_is_refused(count: int) -> None:
    engine = make_engine()
    engine.prefill(random_tokens(12))
    engine.rollback(10)
    with pytest.raises(ValueError, match=f"cannot copy {count} of 10"):
        engine.snapshot(count)


@pytest.mark.parametrize("count", [-1, 11])
def test_restoring_more_than_was_copied_is_refused_and_changes_nothing(count: int) -> None:
    engine = make_engine()
    token_ids = random_tokens(12)
    engine.prefill(token_ids)
    with pytest.raises(ValueError, match=f"cannot restore {count} of 10"):
        engine.restore(engine.snapshot(10), count)
    assert engine.length == 12
    assert_close(scores(engine, [5]), uncached([*token_ids, 5])[-1:])


def test_a_snapshot_of_another_engine_is_refused_and_leaves_nothing_of_it() -> None:
    engine = make_engine()
    token_ids = random_tokens(12)
    engine.prefill(token_ids)
    with pytest.raises(DamagedEntryError):
        engine.restore(FakeSnapshot((1, 2, 3)), 3)
    assert engine.length == 0
    engine.prefill(token_ids)
    assert_close(scores(engine, [5]), uncached([*token_ids, 5])[-1:])


def test_later_writes_do_not_change_a_snapshot() -> None:
    engine = make_engine()
    engine.prefill(random_tokens(30))
    snapshot = engine.snapshot(30)
    before = [states.clone() for states in tensors(snapshot)]
    engine.rollback(0)
    engine.prefill(random_tokens(30, seed=1))
    engine.restore(snapshot, 10)
    engine.prefill(random_tokens(30, seed=2))
    for left, right in zip(before, tensors(snapshot), strict=True):
        assert torch.equal(left, right)


def test_two_engines_continue_one_snapshot_without_touching_each_other() -> None:
    token_ids = random_tokens(20)
    source, first, second = make_engine(), make_engine(), make_engine()
    source.prefill(token_ids)
    snapshot = source.snapshot(20)
    first.restore(snapshot, 20)
    second.restore(snapshot, 20)
    first.verify([1, 2, 3])
    assert_close(scores(second, [4, 5]), uncached([*token_ids, 4, 5])[-2:])
    assert_close(scores(first, [6]), uncached([*token_ids, 1, 2, 3, 6])[-1:])


@pytest.mark.parametrize("architecture", ["gemma3", "gpt2", "llama"])
@pytest.mark.parametrize("count", [1, 17, LONG])
def test_the_announced_size_is_that_of_a_real_snapshot(architecture: str, count: int) -> None:
    """Checked against the memory that the copies really hold, the buffer behind them included."""
    model = random_model(architecture)
    engine = make_engine(model)
    engine.prefill(random_tokens(LONG))
    snapshot = engine.snapshot(count)
    heads = model.config.num_attention_heads if architecture == "gpt2" else model.config.num_key_value_heads
    head_dim = getattr(model.config, "head_dim", None) or model.config.hidden_size // model.config.num_attention_heads
    assert engine.num_bytes(count) == snapshot.num_bytes
    assert snapshot.num_bytes == model.config.num_hidden_layers * 2 * heads * head_dim * 4 * count
    assert snapshot.num_bytes == sum(states.untyped_storage().nbytes() for states in tensors(snapshot))


def test_nothing_is_announced_before_the_first_pass() -> None:
    assert make_engine().num_bytes(100) == 0


def test_a_rollback_moves_no_memory() -> None:
    """What it forgets stays allocated, and the next pass writes into the same buffers."""
    backend = TorchBackend(MODEL, "test", VOCAB_SIZE)
    engine = Engine(backend)
    engine.reserve(200)
    engine.prefill(random_tokens(50))
    assert isinstance(backend.cache, TorchKVCache)
    before = [layer.keys.data_ptr() for layer in backend.cache.layers]
    engine.rollback(0)
    engine.prefill(random_tokens(200))
    assert [layer.keys.data_ptr() for layer in backend.cache.layers] == before
