"""The files of `rakvctl bench`: those that it reads prompts from, and those that it writes."""

from pathlib import Path
from typing import Any

import pytest

from rakvctl.core.files import to_json
from tests.program import Call, assert_error


class Loaded(BaseException):
    """It has come as far as loading models."""


@pytest.fixture(autouse=True)
def nothing_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is wrong must be known before a model is."""

    def load(*_: object) -> None:
        raise Loaded

    monkeypatch.setattr("rakvctl.cli.bench_run.load_pair", load)


def write_own_results(folder: Path, study: str = "baselines") -> None:
    """As an earlier run leaves them, as far as that matters."""
    record: dict[str, Any] = {"study": study, "environment": {}, "profile": {}, "options": {}, "samples": []}
    (folder / "results.json").write_text(to_json(record))


@pytest.mark.parametrize("name", ["results.json", "report.md"])
@pytest.mark.parametrize("content", ["", "# My report\n", '{"samples": []}\n', "[" * 100_000, "{", "\x80"])
def test_a_file_that_bench_did_not_write_is_not_overwritten(name: str, content: str, run: Call, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content, encoding="latin-1")
    finished = run("bench", "--output-dir", tmp_path)
    assert_error(finished, 2, f"{tmp_path / name} is there and was not written by bench")
    assert "--output-dir" in finished.err
    assert (tmp_path / name).read_text(encoding="latin-1") == content


def test_what_is_no_file_is_not_overwritten_either(run: Call, tmp_path: Path) -> None:
    (tmp_path / "results.json").mkdir()
    assert_error(run("bench", "--output-dir", tmp_path), 2, "results.json is there")
    (tmp_path / "results.json").rmdir()
    (tmp_path / "report.md").symlink_to(tmp_path / "elsewhere.md")
    assert_error(run("bench", "--output-dir", tmp_path), 2, "report.md is there")


@pytest.mark.parametrize(
    ("study", "plot"), [("baselines", "latency"), ("controller", "predictions"), ("sensitivity", "sensitivity")]
)
def test_pictures_are_kept_from_a_run_that_would_draw_over_them(
    study: str, plot: str, run: Call, tmp_path: Path
) -> None:
    (tmp_path / f"{plot}.svg").write_text("<svg/>")
    with pytest.raises(Loaded):
        run("bench", "--study", study, "--output-dir", tmp_path)
    assert_error(run("bench", "--study", study, "--plot", "--output-dir", tmp_path), 2, f"{plot}.svg is there")
    other = "controller" if study == "baselines" else "baselines"
    with pytest.raises(Loaded):
        run("bench", "--study", other, "--plot", "--output-dir", tmp_path)


@pytest.mark.parametrize("study", ["baselines", "controller", "sensitivity"])
def test_a_directory_with_results_of_an_earlier_run_is_used_again(study: str, run: Call, tmp_path: Path) -> None:
    write_own_results(tmp_path, study)
    for name in ("report.md", "latency.png", "latency.svg", "notes.txt"):
        (tmp_path / name).touch()
    with pytest.raises(Loaded):
        run("bench", "--plot", "--output-dir", tmp_path)


def test_a_directory_that_cannot_be_written_is_known_before_anything_is_loaded(run: Call, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert_error(run("bench", "--output-dir", tmp_path / "file"), 1, f"cannot write to {tmp_path / 'file'}")
