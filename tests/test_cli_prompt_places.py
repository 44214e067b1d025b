"""A prompt that is no good is named by the file and the line where it stands, whoever reads it."""

import json
from pathlib import Path

import pytest

from rakvctl.core.backends.fake import VirtualClock
from tests.profiles import toy_pair, toy_profile
from tests.program import Call, assert_error

GOOD = '{"prompt": "abcdefgh"}\n'


@pytest.fixture(autouse=True)
def toy_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pair whose tokenizer knows letters only; its profile is there."""
    for module in ("rakvctl.core.loading", "rakvctl.cli.bench_run"):
        monkeypatch.setattr(f"{module}.load_pair", lambda *_: toy_pair(VirtualClock()))
    monkeypatch.setattr("rakvctl.cli.bench_run.fitting_profile", lambda *_: toy_profile())


@pytest.fixture(params=["baselines", "controller", "sensitivity", "calibrate"])
def read(request: pytest.FixtureRequest, run: Call, tmp_path: Path) -> Call:
    """What reads all prompts of a file: a study of `bench`, or `calibrate`."""
    if request.param == "calibrate":
        return lambda path: run("calibrate", "-o", tmp_path / "profile.yaml", "--prompts", path)
    study = ("--study", request.param, "--peers", "none", "--output-dir", tmp_path / "out")
    return lambda path: run("bench", *study, "-w", path)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": ""}', "the prompt is empty"),
        ("nonsense", "not JSON"),
        ('{"text": "abc"}', "`prompt`"),
        ('{"prompt": "\\ud800"}', "not valid UTF-8"),
    ],
)
def test_a_bad_line_is_named_with_its_file(line: str, message: str, read: Call, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(f"{GOOD}\n{line}\n{GOOD}")
    finished = read(path)
    assert_error(finished, 1, f"{path}, line 3: ")
    assert message in finished.err


def test_an_empty_text_is_named_with_its_file(read: Call, tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.touch()
    assert_error(read(path), 1, f"{path}: the prompt is empty")


@pytest.mark.parametrize("content", ["", "\n\n"])
def test_a_file_without_prompts_is_named(content: str, read: Call, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(content)
    assert_error(read(path), 1, f"{path} holds no prompt")


def test_the_record_of_an_empty_prompt_says_where_it_stood(run: Call, tiny_checkpoint: Path, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(f'{GOOD}{{"id": "none", "prompt": ""}}\n')
    finished = run("generate", "-m", tiny_checkpoint / "target", "-n", "1", "--policy", "ar", "-f", path)
    assert finished.code == 1
    good, bad = map(json.loads, finished.out.splitlines())
    assert "error" not in good
    assert (bad["id"], bad["error"]) == ("none", f"{path}, line 2: the prompt is empty")
