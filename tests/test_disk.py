"""Prefixes that outlive the process: found again, bounded, private, and never trusted unread."""

import errno
import os
import random
import shutil
import signal
import sqlite3
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from rakvctl.core.acceptance import Experience
from rakvctl.core.backends.fake import FakeBackend
from rakvctl.core.cost import CostModel
from rakvctl.core.disk import entry_file, shelf
from rakvctl.core.disk.entry_file import EntryFile
from rakvctl.core.disk.tier import DiskTier
from rakvctl.core.engine import Engine
from rakvctl.core.errors import DamagedEntryError, RakvError
from rakvctl.core.policies import RakvPolicy, make_policy
from rakvctl.core.profile import Curve, HardwareProfile
from rakvctl.core.runtime import Runtime
from rakvctl.core.store import PrefixStore
from rakvctl.core.text import TextCodec
from rakvctl.core.tiers import MemoryTier
from rakvctl.core.types import Action, Completion, Features, Request, SamplingParams, Source
from tests.fakes import LetterTokenizer
from tests.profiles import toy_profile

BUDGET = 2**26
PROMPT = tuple(index * 7 % 32 for index in range(300))
NUM_KILLS = int(os.environ.get("RAKVCTL_TEST_KILLS", "6"))
NUM_MUTATIONS = int(os.environ.get("RAKVCTL_TEST_MUTATIONS", "200"))


class Process:
    """What a process is to the directory: a runtime with an empty memory, and what it was told."""

    def __init__(self, directory: Path, budget: int = BUDGET, seed: int = 0, memory: int = 2**24) -> None:
        self.notes: list[str] = []
        self.backend = FakeBackend(seed=seed)
        self.disk = DiskTier(directory, budget, self.notes.append)
        self.store = PrefixStore(MemoryTier(memory), self.disk)
        self.runtime = Runtime(
            codec=TextCodec(LetterTokenizer(), frozenset()),
            target=Engine(self.backend),
            drafter=None,
            store=self.store,
            policy=make_policy("kv"),
            experience=Experience(),
        )

    def run(self, prompt: tuple[int, ...] = PROMPT) -> Completion:
        completion = self.runtime.run(Request(prompt, SamplingParams(max_new_tokens=8)))
        self.runtime.settle()
        return completion


def expected(prompt: tuple[int, ...] = PROMPT, seed: int = 0) -> tuple[int, ...]:
    backend = FakeBackend(seed=seed)
    tokens, following = [], backend.forward(prompt, 1).argmax()[0]
    for _ in range(8):
        tokens.append(following)
        following = backend.forward((following,), 1).argmax()[0]
    return tuple(tokens)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A directory in which a process has stored `PROMPT`."""
    path = tmp_path / "kv"
    process = Process(path)
    assert process.run().source is None
    process.disk.close()
    return path


def the_entry(directory: Path) -> Path:
    (path,) = (directory / shelf.ENTRIES_NAME).iterdir()
    return path


def test_a_second_process_finds_what_the_first_one_stored(directory: Path) -> None:
    process = Process(directory)
    again = process.run()
    assert again.token_ids == expected()
    assert (again.num_reused_tokens, again.num_matched_tokens) == (300, 300)
    assert again.source in ("page cache", "disk")
    assert process.backend.num_passes == 7, "the prompt went through no pass"
    assert process.notes == []


def test_a_shorter_common_prefix_is_cloned_and_the_rest_computed(directory: Path) -> None:
    other = (*PROMPT[:200], *(31 - token for token in PROMPT[200:]))
    process = Process(directory)
    completion = process.run(other)
    assert (completion.num_matched_tokens, completion.num_reused_tokens) == (200, 199)
    assert completion.token_ids == expected(other)
    assert len(process.disk.rows()) == 2


def test_a_longer_prefix_wins_wherever_it_lies(directory: Path) -> None:
    process = Process(directory)
    process.runtime.run(Request(PROMPT[:100], SamplingParams(max_new_tokens=2)))
    longer = process.runtime.plan(Request((*PROMPT, 1), SamplingParams(max_new_tokens=2)))
    assert longer.match is not None
    assert (longer.match.num_matched_tokens, longer.match.source != "memory") == (300, True)
    shorter = process.runtime.plan(Request(PROMPT[:100], SamplingParams(max_new_tokens=2)))
    assert shorter.match is not None
    assert (shorter.match.exact, shorter.match.source) == (True, "memory")


def test_only_the_blocks_that_are_needed_are_read(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    block = EntryFile.block
    monkeypatch.setattr(EntryFile, "block", lambda self, start: read.append(start) or block(self, start))
    assert Process(directory).run((*PROMPT[:130], 5, 6, 7)).num_reused_tokens >= 129
    assert read == [0, 128]


def test_states_of_other_weights_are_never_used(directory: Path) -> None:
    process = Process(directory, seed=1)
    assert process.run().source is None
    assert process.run().token_ids == expected(seed=1)


def test_texts_outlive_the_process_too(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, BUDGET, print)
    for number in range(5):
        tier.offer_text("key", [number] * 10)
        tier.settle()
    other = DiskTier(tmp_path, BUDGET, print)
    assert other.texts("key", 25) == [[3] * 10, [4] * 10]
    assert other.texts("another", 100) == []


def test_texts_take_a_share_of_the_budget_only(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, 16 * 800, print)
    for number in range(30):
        tier.offer_text("key", [number] * 10)
        tier.settle()
    assert [text[0] for text in tier.texts("key", 10**6)] == list(range(20, 30))


def budget_for(num_entries: int, size: int) -> int:
    """Room for so many entries of `PROMPT`'s length and for their index, and not for one more."""
    index = 4096 * (13 + num_entries)
    return (num_entries - 1) * size + index + (size + 5000) + 300 * 8 + shelf._ROW_BYTES + size // 2


def directory_bytes(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def test_the_least_recently_used_entry_makes_room(tmp_path: Path) -> None:
    prompts = [tuple((token + shift) % 32 for token in PROMPT) for shift in range(4)]
    first = Process(tmp_path / "kv")
    first.run(prompts[0])
    size = the_entry(tmp_path / "kv").stat().st_size
    budget = budget_for(3, size)
    process = Process(tmp_path / "kv", budget, memory=0)
    for index in (1, 2, 0, 3):
        process.run(prompts[index])
    found = [Process(tmp_path / "kv", budget).run(prompt).source is not None for prompt in prompts[:1] + prompts[2:]]
    assert found == [True, True, True]
    assert directory_bytes(tmp_path / "kv") <= budget


def test_directory_and_files_are_for_the_user_alone(directory: Path) -> None:
    for path in (directory, directory / shelf.ENTRIES_NAME):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    for path in [the_entry(directory), *directory.glob(f"{shelf.INDEX_NAME}*")]:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path


@pytest.mark.parametrize("inside", ["", shelf.ENTRIES_NAME])
def test_a_directory_that_others_may_write_to_is_refused(directory: Path, inside: str) -> None:
    (directory / inside).chmod(0o777)
    with pytest.raises(RakvError, match="others may write"):
        Process(directory)


def test_a_directory_of_somebody_else_is_refused(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: directory.stat().st_uid + 1)
    with pytest.raises(RakvError, match="somebody else"):
        Process(directory)


def _truncated(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _flipped(path: Path, where: float) -> None:
    content = bytearray(path.read_bytes())
    content[int(where * (len(content) - 1))] ^= 0x10
    path.write_bytes(content)


def _of_another_shape(path: Path) -> None:
    """As a program would write it that knows the format: every checksum is right."""
    arrays = load_file(path)
    name = next(name for name in arrays if name.startswith("states-"))
    _rewritten(path, states={name: arrays[name][:-3].copy()})


def _rewritten(path: Path, states: dict[str, np.ndarray] | None = None, **fields: np.ndarray) -> None:
    """The same entry with other states or fields, and right checksums."""
    arrays = load_file(path)
    blocks = {name: array for name, array in arrays.items() if name.startswith("states-")} | (states or {})
    entry = entry_file.read_entry(path, BUDGET)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(entry_file, "_blocks", lambda _: blocks)
        kept = {"token_ids": arrays["ids.0"], "next_logits": arrays["logits.0"]}
        entry_file.write_entry(path, replace(entry, **(kept | fields)))


def _with_fewer_scores(path: Path) -> None:
    """Of another vocabulary, all checksums right: its best token would be one of this model's all the same."""
    _rewritten(path, next_logits=load_file(path)["logits.0"][:7].copy())


def _of_another_model(path: Path) -> None:
    other = path.parent.parent.parent / "other"
    Process(other, seed=1).run()
    shutil.copy(the_entry(other), path)


def _symlinked(path: Path) -> None:
    elsewhere = path.parent.parent.parent / "elsewhere"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)


def _without_checksums(path: Path) -> None:
    save_file(load_file(path), path, {"format": entry_file.FORMAT, "model_key": "fake-0-32-3-0.0", "checksums": "[]"})


DAMAGES: dict[str, Callable[[Path], None]] = {
    "truncated": _truncated,
    "emptied": lambda path: os.truncate(path, 0),
    "flipped in the header's length": lambda path: _flipped(path, 0.0),
    "flipped in the header": lambda path: _flipped(path, 0.02),
    "flipped in the states": lambda path: _flipped(path, 0.7),
    "flipped at the end": lambda path: _flipped(path, 1.0),
    "of another shape": _of_another_shape,
    "with fewer scores": _with_fewer_scores,
    "of another model": _of_another_model,
    "a symlink": _symlinked,
    "without checksums": _without_checksums,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_entry_ends_in_a_right_answer_and_one_warning(directory: Path, damage: str) -> None:
    DAMAGES[damage](the_entry(directory))
    process = Process(directory, memory=0)
    assert [process.run().token_ids for _ in range(3)] == [expected()] * 3
    assert len(process.notes) == 1
    assert Process(directory).run().source is not None, "and it was stored anew"
    assert DiskTier(directory, BUDGET, print).verify() == []


def test_a_directory_in_the_place_of_an_entry_is_left_alone(directory: Path) -> None:
    entry = the_entry(directory)
    entry.unlink()
    entry.mkdir()
    (entry / "theirs").write_text("kept")
    process = Process(directory, memory=0)
    assert [process.run().token_ids for _ in range(2)] == [expected()] * 2
    assert len(process.notes) == 1
    DiskTier(directory, BUDGET, print).clear()
    assert (entry / "theirs").read_text() == "kept"


def _index(directory: Path) -> Path:
    return directory / shelf.INDEX_NAME


def _index_flipped(directory: Path) -> None:
    content = bytearray(_index(directory).read_bytes())
    for place in range(40, len(content), 97):
        content[place] ^= 0xFF
    _index(directory).write_bytes(content)


def _index_lies(directory: Path) -> None:
    """Rows that name other tokens, other models, and sizes that cannot be."""
    _index_changed(directory, "UPDATE entries SET token_ids = x'0102', num_bytes = -5, model_key = 'theirs'")


def _index_changed(directory: Path, statement: str) -> None:
    connection = sqlite3.connect(_index(directory))
    connection.execute(statement)
    connection.commit()
    connection.close()


INDEX_DAMAGES: dict[str, Callable[[Path], None]] = {
    "deleted": lambda directory: _index(directory).unlink(),
    "emptied": lambda directory: os.truncate(_index(directory), 0),
    "no database": lambda directory: _index(directory).write_bytes(b"nonsense" * 1000) and None,
    "flipped": _index_flipped,
    "of a version to come": lambda directory: _index_changed(directory, "PRAGMA user_version = 9"),
    "a symlink": lambda directory: (_index(directory).unlink(), _index(directory).symlink_to("/etc/passwd"))[0],
}


@pytest.mark.parametrize("damage", INDEX_DAMAGES)
def test_a_damaged_index_is_made_anew(directory: Path, damage: str) -> None:
    INDEX_DAMAGES[damage](directory)
    process = Process(directory, memory=0)
    assert process.run().token_ids == expected()
    assert process.run().token_ids == expected()
    assert len(process.notes) <= 1
    assert Process(directory).run().source is not None, "files that are there are found again"


def test_an_index_that_lies_is_not_believed(directory: Path) -> None:
    _index_lies(directory)
    process = Process(directory, memory=0)
    assert process.run().token_ids == expected()
    assert Process(directory).run().token_ids == expected()


def test_a_full_disk_costs_what_would_be_stored_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(entry_file, "save_file", full)
    process = Process(tmp_path / "kv")
    assert [process.run(PROMPT[shift:]).token_ids for shift in range(3)] == [expected(PROMPT[n:]) for n in range(3)]
    assert len(process.notes) == 1
    assert "No space left" in process.notes[0]
    assert list((tmp_path / "kv" / shelf.ENTRIES_NAME).iterdir()) == []


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may write anywhere")
def test_a_read_only_directory_is_worked_without(directory: Path) -> None:
    for path in [*directory.rglob("*"), directory]:
        path.chmod(0o500 if path.is_dir() else 0o400)
    process = Process(directory)
    assert process.run().token_ids == expected()
    assert len(process.notes) == 1


def test_a_mutated_entry_is_never_believed(directory: Path, tmp_path: Path) -> None:
    """Any bytes of a file changed, removed or added: what can be read at all is what was written."""
    path = the_entry(directory)
    intact, chance = path.read_bytes(), random.Random(0)
    good = entry_file.read_entry(path, BUDGET)
    arrays = [good.kv.arrays(start, min(start + 128, 300))[0] for start in (0, 128, 256)]
    num_refused, mutant = 0, tmp_path / "mutant.safetensors"
    for _ in range(NUM_MUTATIONS):
        content = bytearray(intact)
        for _ in range(chance.choice([1, 1, 2, 8])):
            place = chance.randrange(len(content)) if chance.random() < 0.5 else chance.randrange(2000)
            how = chance.randrange(4)
            if how == 0:
                content[place] ^= 1 << chance.randrange(8)
            elif how == 1:
                content[place] = chance.randrange(256)
            elif how == 2:
                del content[place : place + chance.randrange(1, 50)]
            else:
                content[place:place] = chance.randbytes(chance.randrange(1, 50))
        mutant.write_bytes(content)
        try:
            entry = entry_file.read_entry(mutant, BUDGET)
            assert entry.token_ids.tolist() == list(PROMPT)
            assert (entry.next_logits == good.next_logits).all()
            for number, start in enumerate((0, 128, 256)):
                assert (entry.kv.arrays(start, min(start + 128, 300))[0] == arrays[number]).all()
        except DamagedEntryError:
            num_refused += 1
    assert num_refused > 0.8 * NUM_MUTATIONS


WORKER = """
import random, sys, time
from pathlib import Path
from tests.test_disk import Process, PROMPT, expected
directory, budget, seed, count = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
chance = random.Random(seed)
prompts = [tuple((token + shift) % 32 for token in PROMPT) for shift in range(20)]
answers = [expected(prompt) for prompt in prompts]
process = Process(directory, budget, memory=0)
print("ready", flush=True)
for _ in range(count):
    which = chance.randrange(20)
    assert process.run(prompts[which]).token_ids == answers[which]
    total = sum(row.num_bytes for row in process.disk.rows())
    assert total <= budget, total
assert process.notes == [], process.notes
"""


def worker(directory: Path, budget: int, seed: int, count: int) -> "subprocess.Popen[bytes]":
    arguments = [str(directory), str(budget), str(seed), str(count)]
    return subprocess.Popen([sys.executable, "-c", WORKER, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def entry_size(tmp_path: Path) -> int:
    Process(tmp_path / "one").run()
    return the_entry(tmp_path / "one").stat().st_size


@pytest.mark.slow
def test_processes_that_share_a_directory_never_get_in_each_others_way(tmp_path: Path) -> None:
    """Eight of them, 200 requests over 20 prefixes, room for five: somebody is always evicting."""
    size, directory = entry_size(tmp_path), tmp_path / "kv"
    budget = budget_for(5, size)
    tier = DiskTier(directory, budget, print)
    assert tier._shelf is not None
    processes = [worker(directory, budget, seed, 25) for seed in range(8)]
    most = 0
    while any(process.poll() is None for process in processes):
        with tier._shelf.index.writing():  # nobody else writes now
            most = max(most, directory_bytes(directory))
    for process in processes:
        _, errors = process.communicate()
        assert process.returncode == 0, errors.decode()
    assert 4 * size < most <= budget
    num_entries = len(tier.rows())
    assert tier.verify() == []
    assert len(list((directory / shelf.ENTRIES_NAME).iterdir())) == len(tier.rows()) == num_entries == 5


def test_a_killed_process_leaves_nothing_behind_that_matters(tmp_path: Path) -> None:
    size, directory, chance = entry_size(tmp_path), tmp_path / "kv", random.Random(0)
    budget = budget_for(3, size)
    for number in range(NUM_KILLS):
        process = worker(directory, budget, number, 10**6)
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n", process.communicate()[1].decode()
        time.sleep(chance.uniform(0.0, 0.3))
        process.send_signal(signal.SIGKILL)
        process.communicate()
        after = Process(directory, budget, memory=0)
        assert after.run().token_ids == expected()
        assert after.notes == []
        assert after.disk.verify() == []
        names = {path.stem for path in (directory / shelf.ENTRIES_NAME).iterdir()}
        assert names == {row.key for row in after.disk.rows()}


def test_numbers_are_kept_bit_by_bit(tmp_path: Path) -> None:
    process = Process(tmp_path)
    process.run()
    entry = entry_file.read_entry(the_entry(tmp_path), BUDGET)
    memory = next(iter(process.store._tier))
    assert (entry.next_logits == memory.next_logits).all()
    assert entry.token_ids.dtype == np.int64


def test_nothing_is_written_before_the_answer_is_out(tmp_path: Path) -> None:
    process = Process(tmp_path / "kv")
    process.runtime.run(Request(PROMPT, SamplingParams(max_new_tokens=8)))
    assert list((tmp_path / "kv" / shelf.ENTRIES_NAME).iterdir()) == []
    process.runtime.settle()
    assert the_entry(tmp_path / "kv").exists()


def test_a_prompt_that_is_faster_computed_than_read_is_not_written(tmp_path: Path) -> None:
    disk = DiskTier(tmp_path / "kv", BUDGET, print)
    store = PrefixStore(MemoryTier(2**24), disk, loading_pays=lambda num_tokens: num_tokens > 200)
    process = Process(tmp_path / "kv")
    for prompt in (PROMPT[:150], PROMPT):
        process.run(prompt)
    for entry in list(process.store._tier):
        store.insert(entry)
    assert len(store) == 2
    assert [len(entry.token_ids) for entry in disk._offered] == [300]


def profile_that_loads(warm_ms: float, cold_ms: float) -> HardwareProfile:
    """Reading any prefix takes so long; the toy's prefill takes 0.5 ms a token."""
    profile = toy_profile()

    def curve(ms: float) -> Curve:
        return Curve((1, 1000), (0,), ((ms,), (ms,)), ((0.0,), (0.0,)), ((1,), (1,)))

    return replace(profile, target=replace(profile.target, load=curve(warm_ms), load_cold=curve(cold_ms)))


@pytest.mark.parametrize(("source", "restore_ms"), [("page cache", 20.0), ("disk", 5000.0)])
def test_reading_is_charged_and_what_is_dearer_than_computing_is_not_read(source: Source, restore_ms: float) -> None:
    costs = CostModel(profile_that_loads(20.0, 5000.0))
    features = Features(
        num_prompt_tokens=500, max_new_tokens=16, num_matched_tokens=400, num_cloned_tokens=399, source=source
    )
    (reusing,) = [row for row in costs.table(features) if row.action == Action(reuse=True, draft_len=0)]
    assert reusing.clone_ms == restore_ms
    assert RakvPolicy(costs).decide(features).action.reuse == (source == "page cache")
    assert costs.loading_pays(400)
    assert not CostModel(profile_that_loads(5000.0, 9000.0)).loading_pays(400)


def test_a_small_budget_stores_nothing_and_takes_nothing_away(directory: Path) -> None:
    process = Process(directory, budget=0, memory=0)
    assert process.run().source is not None
    assert process.run(PROMPT[::-1]).token_ids == expected(PROMPT[::-1])
    assert process.disk.verify() == []
    assert process.notes == []
    assert Process(directory).run().source is not None
