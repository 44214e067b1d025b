"""A home directory that cannot be read, or is none: as one in which nothing is, and nothing can be kept."""

import os
import pwd
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rakvctl.cli import calibrate as calibrate_module
from rakvctl.core import gguf_copy
from rakvctl.core.backends.fake import VirtualClock
from rakvctl.core.errors import ModelError
from rakvctl.core.files import only_process
from rakvctl.core.models import find_model
from rakvctl.core.profile_places import find_profiles
from rakvctl.core.successors import read_successors, successors_path
from rakvctl.core.user_directories import cache_directory, data_directory
from rakvctl.measure import calibrate as measure_module
from rakvctl.measure import ready
from rakvctl.measure.calibrate import Calibration
from tests.profiles import toy_pair, toy_profile
from tests.program import Call, assert_error

IS_ROOT = hasattr(os, "geteuid") and os.geteuid() == 0


def too_long(tmp_path: Path) -> Path:
    """Asking the system for it fails as it does for directories of other users: not with `there is none`."""
    return tmp_path / ("x" * 300)


def locked(tmp_path: Path) -> Path:
    if IS_ROOT:
        pytest.skip("root may read everything")
    (tmp_path / "locked").mkdir(mode=0)
    return tmp_path / "locked"


def a_file(tmp_path: Path) -> Path:
    (tmp_path / "file").touch()
    return tmp_path / "file"


def under_a_file(tmp_path: Path) -> Path:
    return a_file(tmp_path) / "nobody"


@pytest.fixture(params=[too_long, locked, a_file, under_a_file])
def home(
    request: pytest.FixtureRequest, own_settings: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Path]:
    make: Callable[[Path], Path] = request.param
    path = make(tmp_path)
    for name in ("XDG_DATA_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(path))
    monkeypatch.chdir(tmp_path)
    yield path
    if os.path.isdir(path):
        path.chmod(0o700)


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The toy pair in place of any, and measured in no time."""

    def measured(*_: Any) -> Calibration:
        return Calibration(toy_profile(), (), successors=(1, 2, 3))

    monkeypatch.setattr(ready, "load_pair", lambda *_: toy_pair(VirtualClock()))
    monkeypatch.setattr("rakvctl.core.loading.load_pair", lambda *_: toy_pair(VirtualClock()))
    monkeypatch.setattr(ready, "calibrate", measured)
    monkeypatch.setattr(measure_module, "calibrate", measured)


@pytest.mark.usefixtures("home", "toy")
def test_generate_measures_and_says_once_that_it_cannot_keep_it(run: Call) -> None:
    finished = run("generate", "abc", "-n", "4")
    assert (finished.code, len(finished.out)) == (0, 5)
    measuring, kept = finished.err.splitlines()
    assert measuring.startswith("Note: no profile for this machine and pair: measuring one")
    assert kept.startswith("Note: cannot write the profile ")
    assert kept.endswith("the next run will measure again")


@pytest.mark.usefixtures("home", "toy")
def test_generate_without_a_profile_says_nothing(run: Call) -> None:
    finished = run("generate", "abc", "-n", "4", "--policy", "kv")
    assert (finished.code, finished.err) == (0, "")


@pytest.mark.usefixtures("home", "toy")
def test_explain_of_a_prompt_measures_too(run: Call) -> None:
    assert run("explain", "abc", "-n", "4", "--json").code == 0


@pytest.mark.usefixtures("home")
def test_explain_without_a_model_has_no_profile(run: Call) -> None:
    assert_error(run("explain", "--prompt-tokens", "100"), 3, "there is no profile for tiny")


@pytest.mark.usefixtures("home", "toy")
def test_calibrate_says_before_it_measures_that_it_cannot_write(run: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate_module, "_load", lambda *_: pytest.fail("a model is loaded"))
    assert_error(run("calibrate", "--quick"), 1, "cannot write the profile")


@pytest.mark.usefixtures("home", "toy")
def test_calibrate_writes_elsewhere_and_notes_what_it_cannot_keep(run: Call, tmp_path: Path) -> None:
    finished = run("calibrate", "--quick", "-o", tmp_path / "p.yaml")
    assert finished.code == 0
    assert f"Written to {tmp_path / 'p.yaml'}" in finished.out.replace("\n", "")
    (note,) = finished.err.splitlines()
    assert note.startswith("Note: cannot write ")
    assert (tmp_path / "p.yaml").exists()


@pytest.mark.usefixtures("home", "toy")
def test_there_is_no_profile_to_check(run: Call) -> None:
    assert_error(run("calibrate", "--check"), 3, "there is no profile")


def test_a_directory_of_prefixes_there_is_none(home: Path, run: Call) -> None:
    assert_error(run("kv", "stats", "--kv-dir", home / "kv"), 2, "is no directory")


@pytest.mark.usefixtures("home")
def test_nothing_is_found_there() -> None:
    assert find_profiles("tiny", "tiny") == []
    assert read_successors(successors_path("0" * 16), 32) == ()
    with only_process(data_directory() / "profiles" / "measuring.lock"):
        pass


def test_a_copy_that_cannot_be_asked_for_is_made_anew(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes: list[str] = []
    (tmp_path / "m.gguf").touch()
    monkeypatch.setattr(gguf_copy, "convert", lambda *_: None)
    assert find_model(str(tmp_path / "m.gguf"), "target", notes.append).location.is_relative_to(home)
    assert notes == ["converting m.gguf, once"]


def test_a_hub_cache_that_cannot_be_read_is_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", refuse)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match="not in the local Hub cache"):
        find_model("gpt2", "target", print)


def test_who_has_no_home_has_no_directory_where_the_program_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python leaves `~` as it is where nobody knows the user."""

    def unknown(_uid: int) -> None:
        raise KeyError

    for name in ("HOME", "XDG_DATA_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.chdir(tmp_path)
    for directory in (data_directory(), cache_directory()):
        with pytest.raises(OSError, match="Not a directory"):
            directory.mkdir(parents=True, exist_ok=True)
        assert not os.path.exists(directory / "models")
    assert list(tmp_path.iterdir()) == []


def test_a_conversion_that_was_killed_is_cleared_away_by_a_later_one(tmp_path: Path) -> None:
    """Not that of another process which is at work now."""
    for name, age_s in (("old", 2 * 86400), ("new", 60)):
        directory = tmp_path / f".converting-{name}"
        directory.mkdir()
        (directory / "model.safetensors").touch()
        os.utime(directory, (directory.stat().st_mtime - age_s,) * 2)
    gguf_copy.clear_unfinished(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [".converting-new"]
