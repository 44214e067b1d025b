"""Output that goes to what the shell has opened: it is added to, and never truncated or replaced."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rakvctl.cli import generate as generate_module
from rakvctl.core.descriptors import open_descriptor
from rakvctl.core.errors import RakvError
from rakvctl.core.files import replace_file
from rakvctl.core.profile_file import read_profile, refuse_unwritable, write_profile
from tests.fakes import FakeRuntime
from tests.profiles import toy_profile
from tests.program import Call, assert_error

KEPT = "what the file held\n"

pytestmark = pytest.mark.skipif(not Path("/dev/fd").exists(), reason="descriptors have no names here")


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "log"
    path.write_text(KEPT)
    return path


@contextmanager
def shell(redirected: int, path: Path, mode: str = "a") -> Iterator[None]:
    """As `1>> path`, or `2> path` after which something is written."""
    before = os.dup(redirected)
    try:
        with path.open(mode) as file:
            if mode == "w":
                file.write(KEPT)
                file.flush()
            os.dup2(file.fileno(), redirected)
        yield
    finally:
        os.dup2(before, redirected)
        os.close(before)


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generate_module, "load_runtime", lambda *_: FakeRuntime().runtime("kv"))


@pytest.mark.usefixtures("toy")
@pytest.mark.parametrize("mode", ["a", "w"])
@pytest.mark.parametrize(
    ("descriptor", "name"),
    [
        (1, "/dev/stdout"),
        (2, "/dev/stderr"),
        (1, "/dev/fd/1"),
        (1, "/proc/self/fd/1"),
        (1, "link"),
        (1, "log"),
        (2, "log"),
    ],
)
def test_results_are_added_to_what_the_shell_has_opened(
    descriptor: int, name: str, mode: str, log: Path, run: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(log.parent)
    Path("link").symlink_to("/dev/stdout")
    inode = log.stat().st_ino
    with shell(descriptor, log, mode):
        assert run("generate", "abc", "-n", "4", "-q", "--out", name).code == 0
        os.write(descriptor, b"and more\n")  # what comes after goes on behind it
    text = FakeRuntime().run("ar", (0, 1, 2)).text[:4]
    assert log.read_text() == f"{KEPT}{text}\nand more\n"
    assert log.stat().st_ino == inode


@pytest.mark.usefixtures("toy")
def test_a_file_of_its_own_is_written_anew(log: Path, run: Call) -> None:
    assert run("generate", "abc", "-n", "4", "-q", "--out", log).code == 0
    assert KEPT not in log.read_text()


@pytest.mark.parametrize("name", ["/dev/stdout", "/dev/fd/2", "log"])
def test_what_the_shell_has_opened_is_not_resumed(
    name: str, log: Path, run: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(log.parent)
    with shell(2 if name == "/dev/fd/2" else 1, log):
        finished = run("generate", "abc", "-o", "jsonl", "--out", name, "--resume")
    assert_error(finished, 2, "--resume")
    assert log.read_text() == KEPT


def test_a_descriptor_that_cannot_be_written_is_said_before_a_model_is_loaded(
    log: Path, run: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generate_module, "load_runtime", lambda *_: pytest.fail("a model is loaded"))
    with log.open() as file:
        assert_error(run("generate", "abc", "--out", f"/dev/fd/{file.fileno()}"), 1, "Bad file descriptor")
        with pytest.raises(RakvError, match="Bad file descriptor"):
            refuse_unwritable(Path(f"/dev/fd/{file.fileno()}"))
    assert_error(run("generate", "abc", "--out", "/dev/fd/987"), 1, "Bad file descriptor")


@pytest.mark.parametrize("name", ["/dev/stdout", "/proc/self/fd/1", "log"])
def test_a_profile_is_added_to_what_the_shell_has_opened(
    name: str, log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with shell(1, log):
        refuse_unwritable(Path(name))
        write_profile(toy_profile(), Path(name))
    content = log.read_text()
    assert content.startswith(KEPT)
    (tmp_path / "profile.yaml").write_text(content.removeprefix(KEPT))
    assert read_profile(tmp_path / "profile.yaml").fingerprint == toy_profile().fingerprint
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log", "profile.yaml"]


def test_whole_files_are_added_to_a_descriptor_in_pieces(log: Path) -> None:
    with log.open("a") as file:
        replace_file(Path(f"/dev/fd/{file.fileno()}"), [b"one ", b"two\n"])
        file.write("three\n")
    assert log.read_text() == f"{KEPT}one two\nthree\n"


def test_other_paths_are_no_descriptors(log: Path, tmp_path: Path) -> None:
    for path in (log, tmp_path, tmp_path / "missing", Path("/dev/null"), Path("/dev/fd"), tmp_path / "1"):
        assert open_descriptor(path) is None
    (tmp_path / "loop").symlink_to("loop")
    assert open_descriptor(tmp_path / "loop") is None
