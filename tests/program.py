"""The program `rakvctl` run in this process, with nobody's settings."""

import gc
import importlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from rakvctl.cli.app import main

# Imported by commands when they run. A test that patches what these take from other modules must not be the first to
# import them: they would keep the patched function for all tests after it.
for _module in ("rakvctl.cli.bench_run", "rakvctl.cli.bench_studies", "rakvctl.measure.ready"):
    importlib.import_module(_module)


class Finished(NamedTuple):
    code: Any
    out: str
    err: str


Call = Callable[..., Finished]


@pytest.fixture
def own_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """No settings and no profiles of the user's, no colours, and 80 columns."""
    for name in [name for name in os.environ if name.startswith("RAKVCTL_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("COLUMNS", "80")
    yield
    gc.enable()
    gc.unfreeze()


@pytest.fixture
def run(own_settings: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    def run(*arguments: str | Path) -> Finished:
        monkeypatch.setattr(sys, "argv", ["rakvctl", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        return Finished(ended.value.code, *capsys.readouterr())

    return run


def assert_error(finished: Finished, code: int, message: str) -> None:
    """Nothing on stdout, two lines on stderr."""
    assert finished.code == code
    assert finished.out == ""
    first, second = finished.err.removesuffix("\n").split("\n")
    assert first.startswith("Error: ")
    assert message in first
    assert second.startswith("Hint: ")
