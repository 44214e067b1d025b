"""The persistent prefix cache leaves what is not its own alone, holds its budget, and hides no fault of the program."""

import multiprocessing
import os
import sqlite3
import stat
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rakvctl.core.disk import entry_file, shelf
from rakvctl.core.disk.index import Index
from rakvctl.core.disk.tier import DiskTier
from rakvctl.core.errors import RakvError
from rakvctl.core.files import replace_file
from tests.program import Call, assert_error
from tests.test_calibrate import Toy
from tests.test_disk import BUDGET, PROMPT, Process, directory, expected, the_entry

__all__ = ["directory"]

KEY = "0123456789abcdef01234567"
# Names of ours and of others, as a user's own directory may have them.
NAMES = st.sampled_from(
    [
        *(shelf.INDEX_NAME, f"{shelf.INDEX_NAME}-journal", f"{shelf.INDEX_NAME}-wal"),
        *("CACHEDIR.TAG", ".measuring-abcdefgh"),
        *("entries/x.txt", f"entries/{KEY}.safetensors", "entries/.unfinished-abcdefgh", "entries/deep/er/x"),
        *(".hidden", "notes.txt", "src/main.py"),
    ]
)  # fmt: skip
FOREIGN_TAG = b"Signature: 8a477f597d28d172789f06886806bc55\n# made by cargo\n"


def tree(directory: Path) -> dict[str, object]:
    """All there is in a directory: kinds, contents, modes, times."""
    found: dict[str, object] = {}
    for path in [directory, *sorted(directory.rglob("*"))]:
        status = path.lstat()
        content = os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else None
        found[str(path)] = (status.st_mode, status.st_mtime_ns, content)
    return found


def write(path: Path, content: bytes = b"mine") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def changed(directory: Path, *statements: str) -> None:
    with closing(sqlite3.connect(directory / shelf.INDEX_NAME)) as connection:
        for statement in statements:
            connection.execute(statement)
        connection.commit()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(names=st.sets(NAMES, min_size=1), read_only=st.booleans())
def test_a_directory_of_other_files_is_refused_untouched(
    tmp_path_factory: pytest.TempPathFactory, names: set[str], read_only: bool
) -> None:
    theirs = tmp_path_factory.mktemp("theirs")
    for name in names:
        write(theirs / name, FOREIGN_TAG if name == "CACHEDIR.TAG" else b"mine")
    before = tree(theirs)
    with pytest.raises(RakvError) as refused:
        DiskTier(theirs, BUDGET, print, read_only=read_only)
    assert refused.value.exit_code == 2
    assert tree(theirs) == before


def test_every_command_refuses_a_directory_of_other_files(run: Call, tiny_checkpoint: Path, tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    write(theirs / "entries" / f"{KEY}.safetensors")
    write(theirs / "entries" / "deep" / "x")
    with closing(sqlite3.connect(theirs / shelf.INDEX_NAME)) as other:
        other.execute("CREATE TABLE theirs (value)")
    (theirs / "link").symlink_to(tmp_path)
    before = tree(theirs)
    models = ("-m", tiny_checkpoint / "target", "-d", "none")
    commands = [("generate", "Hello", *models), ("calibrate", "--quick", *models), ("explain", "Hello", *models)]
    for command in [*commands, *(("kv", action) for action in ("ls", "stats", "verify", "clear"))]:
        assert_error(run(*command, "--kv-dir", theirs), 2, str(theirs))
        assert tree(theirs) == before, command


def test_a_users_files_in_a_cache_survive_whatever_is_done_with_it(directory: Path) -> None:
    (elsewhere := directory.parent / "elsewhere").mkdir()
    mine = [
        write(directory / "notes.txt"),
        write(directory / f"{shelf.INDEX_NAME}.backup"),
        write(directory / ".measuring-mine"),
        write(directory / "entries" / "mine.safetensors"),
        write(directory / "entries" / f"{KEY}.safetensors.bak"),
        write(directory / "entries" / ".unfinished-mine.txt"),
        write(directory / "entries" / f"{KEY[::-1]}.safetensors" / "mine"),
        write(elsewhere / "mine"),
    ]
    (directory / "entries" / "link").symlink_to(elsewhere)
    # A link of a name of ours is removed, what it leads to is not.
    (directory / "entries" / f"{KEY}.safetensors").symlink_to(elsewhere / "mine")
    process = Process(directory, memory=0)
    assert process.run(PROMPT[::-1]).token_ids == expected(PROMPT[::-1])
    process.disk.verify()
    process.disk.clear()
    assert [path.read_bytes() for path in mine] == [b"mine"] * len(mine)
    assert (directory / "entries" / "link").is_symlink()


def test_a_row_whose_key_is_a_path_is_dropped_and_its_path_never_used(directory: Path) -> None:
    outside = write(directory.parent / "outside.safetensors")
    changed(directory, "UPDATE entries SET key = '../../outside'")
    process = Process(directory, memory=0)
    assert process.disk.rows() == []
    assert process.run().token_ids == expected()
    process.disk.verify()
    assert [row.key for row in process.disk.rows()] == [the_entry(directory).stem]
    process.disk.clear()
    assert outside.read_bytes() == b"mine"


@pytest.mark.parametrize("value", ["9e999", "-1.0", "NULL", "'never'"])
def test_a_row_with_a_time_that_is_none_is_no_row(run: Call, directory: Path, value: str) -> None:
    changed(
        directory,
        "ALTER TABLE entries RENAME TO before",
        "CREATE TABLE entries (key, bucket, model_key, token_ids, num_bytes, last_used)",
        "INSERT INTO entries SELECT * FROM before",
        f"UPDATE entries SET last_used = {value}",
    )
    finished = run("kv", "ls", "--kv-dir", directory)
    assert finished.code == 0, finished.err
    assert the_entry(directory).stem not in finished.out


def test_looking_changes_nothing(run: Call, directory: Path) -> None:
    before = tree(directory)
    for action in ("ls", "stats"):
        assert run("kv", action, "--kv-dir", directory).code == 0
    tier = DiskTier(directory, BUDGET, print, read_only=True)
    assert tier.find("fake-0-32-3-0.0", np.asarray(PROMPT)) is not None
    assert tier.weights_digest("files", lambda: "digest") == "digest"
    tier.offer_text("key", [1, 2, 3])
    tier.settle()
    tier.close()
    assert tree(directory) == before


def test_a_damaged_index_is_no_reason_to_write_while_looking(run: Call, directory: Path) -> None:
    (directory / shelf.INDEX_NAME).write_bytes(b"nonsense" * 1000)
    before = tree(directory)
    finished = run("kv", "ls", "--kv-dir", directory)
    assert_error(finished, 1, "stored prefixes in")
    assert "kv verify" in finished.err
    assert tree(directory) == before
    assert run("kv", "verify", "--kv-dir", directory).out == "1 entry as written\n"


def test_an_exact_hit_from_the_disk_is_in_memory_for_the_next_one(directory: Path) -> None:
    process = Process(directory)
    entry = the_entry(directory)
    written = entry.stat().st_ino, entry.stat().st_mtime_ns
    assert process.run().source in ("page cache", "disk")
    again = process.run()
    assert (again.source, again.num_reused_tokens, again.token_ids) == ("memory", 300, expected())
    assert (entry.stat().st_ino, entry.stat().st_mtime_ns) == written, "it is not written again"


def total_bytes(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def test_all_bytes_count_towards_the_budget(tmp_path: Path) -> None:
    """Entries, texts, the index, and what processes that were killed have left unfinished."""
    budget, most = 400_000, 0
    process = Process(tmp_path / "kv", budget, memory=0)
    for number in range(40):
        write(tmp_path / "kv" / "entries" / f".unfinished-killed{number:02}", bytes(30_000))
        process.disk.offer_text("key", [number] * 1000)
        process.run(tuple((token + number) % 32 for token in PROMPT))
        most = max(most, total_bytes(tmp_path / "kv"))
    assert budget // 2 < most <= budget
    assert process.notes == []


def test_sizes_that_the_index_has_wrong_are_not_believed(directory: Path) -> None:
    changed(directory, "UPDATE entries SET num_bytes = 1")
    process = Process(directory)
    process.disk.settle()
    assert [row.num_bytes for row in process.disk.rows()] == [the_entry(directory).stat().st_size]


def test_only_the_texts_that_are_asked_for_are_read(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path / "kv", BUDGET, print)
    for number in range(50):
        tier.offer_text("key", [number] * 1000)
    tier.settle()
    assert tier._shelf is not None
    steps = 0

    def count() -> int:
        nonlocal steps
        steps += 1
        return 0

    connection = tier._shelf.index._connection
    connection.set_progress_handler(count, 1)
    assert [text[0] for text in tier.texts("key", 2000)] == [48, 49]
    few, steps = steps, 0
    assert len(tier.texts("key", 10**6)) == 50
    connection.set_progress_handler(None, 0)
    assert few < steps / 5


def test_a_damaged_text_is_no_text(tmp_path: Path) -> None:
    """Its ids may be of no token, and it has no checksum but its key."""
    tier = DiskTier(tmp_path / "kv", BUDGET, print)
    tier.offer_text("key", [1] * 10)
    tier.offer_text("key", [2] * 10)
    tier.settle()
    for damage in ("x'ffffffffffffff7f'", "x'01'", "'text'", "zeroblob(80)"):
        changed(tmp_path / "kv", f"UPDATE texts SET token_ids = {damage} WHERE rowid = 1")
        assert DiskTier(tmp_path / "kv", BUDGET, print).texts("key", 100) == [[2] * 10]


def test_a_fault_of_the_program_is_raised_and_removes_no_index(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = Process(directory)
    before = (directory / shelf.INDEX_NAME).read_bytes()
    for fault in (TypeError("ours"), ValueError("ours"), sqlite3.ProgrammingError("ours")):

        def fail(*_: object, fault: Exception = fault) -> None:
            raise fault

        monkeypatch.setattr(Index, "in_bucket", fail)
        with pytest.raises(type(fault), match="ours"):
            process.disk.find("key", np.asarray(PROMPT))
    assert (directory / shelf.INDEX_NAME).read_bytes() == before
    assert process.notes == []


def test_a_locked_index_is_not_replaced(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    process = Process(directory)
    before = (directory / shelf.INDEX_NAME).read_bytes()

    def fail(*_: object) -> None:
        raise sqlite3.OperationalError("database is locked")

    monkeypatch.setattr(Index, "in_bucket", fail)
    assert process.disk.find("key", np.asarray(PROMPT)) is None
    assert (directory / shelf.INDEX_NAME).read_bytes() == before
    assert len(process.notes) == 1


def test_an_index_that_another_process_has_replaced_is_kept(directory: Path) -> None:
    first, second = Process(directory, memory=0), Process(directory, memory=0)
    with (directory / shelf.INDEX_NAME).open("r+b") as file:
        file.write(b"nonsense" * 1000)
    first.disk.offer_text("key", [1, 2, 3])
    first.disk.settle()
    first.disk.offer_text("key", [1, 2, 3])
    first.disk.settle()
    assert first.disk.texts("key", 10) == [[1, 2, 3]]
    assert second.run().token_ids == expected()
    assert second.run().token_ids == expected()
    assert second.disk.texts("key", 10) == [[1, 2, 3]]


def test_any_damage_of_the_index_ends_in_a_right_answer(tmp_path: Path) -> None:
    """No value that a damaged file gives is a fault of the program."""
    first = Process(tmp_path / "kv")
    for shift in range(3):
        first.disk.offer_text("key", [shift] * 50)
        first.run(PROMPT[shift:])
    first.disk.close()
    index = tmp_path / "kv" / shelf.INDEX_NAME
    intact, chance = index.read_bytes(), np.random.default_rng(0)
    for _ in range(int(os.environ.get("RAKVCTL_TEST_INDEX_MUTATIONS", "60"))):
        content = bytearray(intact)
        for place in chance.integers(0, len(content), 2 ** int(chance.integers(0, 8))):
            content[place] = int(chance.integers(256))
        index.write_bytes(content[: len(content) // 2] if chance.random() < 0.1 else content)
        process = Process(tmp_path / "kv", memory=0)
        assert process.run().token_ids == expected()
        process.disk.offer_text("key", [9] * 50)
        process.disk.settle()
        process.disk.texts("key", 1000)
        process.disk.verify()
        process.disk.close()


def test_a_profile_measured_while_looking_makes_no_file(tmp_path: Path) -> None:
    toy = Toy()
    claimed = DiskTier(tmp_path / "kv", BUDGET, print)
    claimed.close()
    before = tree(tmp_path / "kv")
    toy.pair = replace(toy.pair, disk=DiskTier(tmp_path / "kv", BUDGET, print, read_only=True))
    assert toy.calibrated().profile.target.load is None
    assert tree(tmp_path / "kv") == before


DAMAGED_SUMS = ["DELETE FROM sums", "UPDATE sums SET entry_bytes = 'x', text_bytes = x'00'"]


@pytest.mark.parametrize("statement", DAMAGED_SUMS)
def test_sums_that_are_none_are_made_anew(directory: Path, statement: str) -> None:
    process = Process(directory, memory=0)
    process.run()
    changed(directory, statement)
    process.disk.offer_text("key", [1, 2, 3])
    assert process.run(PROMPT[5:]).token_ids == expected(PROMPT[5:])
    process.disk.offer_text("key", [1, 2, 3])
    process.run(PROMPT[5:])
    assert process.disk.texts("key", 10) == [[1, 2, 3]]


def _claim(directory: Path, start: "multiprocessing.synchronize.Barrier") -> None:
    start.wait()
    tier = DiskTier(directory, BUDGET, print)
    tier.offer_text("key", [os.getpid()])
    tier.settle()


def test_processes_that_make_a_cache_at_once_share_it(tmp_path: Path) -> None:
    forks = multiprocessing.get_context("fork")
    for number in range(5):
        start = forks.Barrier(4)
        children = [forks.Process(target=_claim, args=(tmp_path / str(number), start)) for _ in range(4)]
        for child in children:
            child.start()
        for child in children:
            child.join()
        assert [child.exitcode for child in children] == [0] * 4
        assert len(DiskTier(tmp_path / str(number), BUDGET, print).texts("key", 10)) == 4


def test_a_process_that_was_killed_before_its_first_file_is_no_obstacle(tmp_path: Path) -> None:
    write(tmp_path / "kv" / ".marker-abcdefgh", b"Sign")
    assert Process(tmp_path / "kv").run().token_ids == expected()


def test_there_is_no_write_ahead_log(directory: Path) -> None:
    """It works on no network file system."""
    with closing(sqlite3.connect(directory / shelf.INDEX_NAME)) as connection:
        assert connection.execute("PRAGMA journal_mode").fetchone() != ("wal",)
    assert not list(directory.glob("*-wal"))


@pytest.fixture
def umask() -> Iterator[Callable[[int], int]]:
    before = os.umask(0o022)
    yield os.umask
    os.umask(before)


@pytest.mark.parametrize(("mask", "mode"), [(0o077, 0o600), (0o022, 0o644), (0o002, 0o664)])
def test_new_files_follow_the_users_umask(tmp_path: Path, umask: Callable[[int], int], mask: int, mode: int) -> None:
    umask(mask)
    replace_file(tmp_path / "new", b"content")
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == mode


def test_a_private_file_is_private_while_it_is_replaced(tmp_path: Path, umask: Callable[[int], int]) -> None:
    umask(0o022)
    private = write(tmp_path / "private")
    private.chmod(0o600)
    modes: list[int] = []

    def pieces() -> Iterator[bytes]:
        yield b"first"
        modes.extend(stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir())

    replace_file(private, pieces())
    assert modes == [0o600, 0o600]
    assert stat.S_IMODE(private.stat().st_mode) == 0o600


def test_a_write_that_fails_leaves_no_file(tmp_path: Path) -> None:
    def pieces() -> Iterator[bytes]:
        yield b"first"
        raise OSError("full")

    with pytest.raises(OSError, match="full"):
        replace_file(tmp_path / "new", pieces())
    assert list(tmp_path.iterdir()) == []


def test_the_size_of_a_file_is_known_before_it_is_written(tmp_path: Path) -> None:
    process = Process(tmp_path / "kv")
    process.run()
    (entry,) = process.store._tier
    size = the_entry(tmp_path / "kv").stat().st_size
    assert size <= entry_file.most_file_bytes(entry) <= size + 8192
