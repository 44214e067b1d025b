"""`rakvctl calibrate` from the outside, and the profile that `generate` measures by itself."""

import json
import re
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from rakvctl.cli.profile_tables import show_profile
from rakvctl.core.backends.fake import VirtualClock
from rakvctl.core.loading import RuntimeOptions
from rakvctl.core.pair import ModelPair
from rakvctl.core.profile_file import read_profile, write_profile
from rakvctl.measure.calibrate import Calibration
from rakvctl.measure.ready import fitting_profile
from rakvctl.measure.timing import Point
from tests.profiles import toy_pair, toy_profile
from tests.program import Call, Finished, assert_error


@pytest.fixture
def nothing_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is wrong must be known before a model is."""

    def load(*_: object) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("rakvctl.core.loading.load_pair", load)


def calibrate(run: Call, target: Path, path: Path, *arguments: str) -> Finished:
    return run("calibrate", "-m", target, "-o", path, "--threads", "1", *arguments)


def test_calibrate_writes_a_profile_that_generate_takes(run: Call, tiny_checkpoint: Path, tmp_path: Path) -> None:
    target, path = tiny_checkpoint / "target", tmp_path / "mine.yaml"
    finished = calibrate(run, target, path, "-d", str(tiny_checkpoint / "draft"), "--repeats", "1")
    assert finished.code == 0
    assert "Rounds, ms" in finished.out
    assert re.search(r"Speculation (pays|cannot pay) here", finished.out)
    assert str(path) in finished.out.replace("\n", "")
    profile = read_profile(path)
    assert set(profile.verify.sizes_tokens) >= {1, 2, 3, 5, 7, 9, 17}
    assert profile.fingerprint.threads == 1

    arguments = ("-m", target, "-d", tiny_checkpoint / "draft", "--profile", path, "--threads", "1")
    generated = run("generate", "hello there, world", "-n", "8", "-o", "jsonl", *arguments)
    record = json.loads(generated.out)
    assert generated.err == ""
    assert record["policy"] == "auto"
    assert record["predicted_ms"] > 0
    plain = run("generate", "hello there, world", "-n", "8", "-o", "jsonl", *arguments, "--policy", "ar")
    assert json.loads(plain.out)["text"] == record["text"]

    explained = run("explain", "hello there, world", "-n", "8", "--json", *arguments)
    assert json.loads(explained.out)["features"]["num_prompt_tokens"] == record["prompt_tokens"]

    foreign = run(
        "generate", "hello", "-m", target, "-d", tiny_checkpoint / "draft", "--profile", path, "--threads", "2"
    )
    assert_error(foreign, 3, "measured with another number of threads: 1; here it is 2")
    assert_error(run("generate", "hello", "-m", target, "--profile", path, "--threads", "1"), 3, "another draft")


def test_a_profile_that_no_longer_holds_is_called_stale(run: Call, tiny_checkpoint: Path, tmp_path: Path) -> None:
    target, path = tiny_checkpoint / "target", tmp_path / "mine.yaml"
    assert calibrate(run, target, path, "--repeats", "3").code == 0
    profile = read_profile(path)
    slow = replace(profile.verify, median_ms=tuple(tuple(9 * ms for ms in row) for row in profile.verify.median_ms))
    write_profile(replace(profile, verify=slow), path)
    check = ("calibrate", "-m", target, "--threads", "1", "--check", "--budget", "1", "--profile", path)
    finished = run(*check)
    assert finished.code == 3
    assert "the profile is stale: " in finished.err
    assert f"rakvctl calibrate -m {target} --threads 1 -o {path}" in finished.err
    record = json.loads(run(*check, "--json").out)
    assert record["stale"]
    assert {point["point"][0] for point in record["points"] if point["change"] < -0.5} >= {"verify"}
    assert {point["point"][0] for point in record["points"]} == {"verify", "target.prefill"}
    absent = run(*check[:-1], tmp_path / "absent.yaml")
    assert_error(absent, 3, "absent.yaml")
    assert f"rakvctl calibrate -m {target} --threads 1 -o {tmp_path / 'absent.yaml'}" in absent.err


def test_generate_measures_once_where_there_is_no_profile(
    run: Call, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rakvctl.measure.ready.QUICK_SECONDS", 0.5)
    command = ("generate", "hello", "-n", "4", "-m", tiny_checkpoint / "target", "--threads", "1")
    first, second = run(*command), run(*command)
    assert "no profile for this machine and pair" in first.err
    assert second == Finished(0, first.out, "")


def test_processes_of_one_machine_measure_once_and_one_at_a_time(
    own_settings: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As workers of a cluster do that start together: whoever comes second waits, and takes what the first found."""
    running, runs, toy = 0, list[int](), toy_profile()

    def slow(pair: ModelPair, *_: object) -> Calibration:
        nonlocal running
        running += 1
        runs.append(running)
        time.sleep(0.3)
        running -= 1
        return Calibration(replace(toy, fingerprint=pair.fingerprint()), ())

    monkeypatch.setattr("rakvctl.measure.ready.calibrate", slow)
    options, notes = RuntimeOptions(target="toy"), list[str]()
    with ThreadPoolExecutor(3) as pool:
        waiting = [
            pool.submit(fitting_profile, toy_pair(VirtualClock()), options, notes.append, lambda *_: None)
            for _ in range(3)
        ]
        profiles = [process.result() for process in waiting]
    assert runs == [1]
    assert len(notes) == 1
    assert len({profile.fingerprint for profile in profiles}) == 1


def test_acceptance_is_measured_on_the_user_s_prompts(run: Call, tiny_checkpoint: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "one"}\n{"prompt": "two"}\n')
    arguments = ("-d", str(tiny_checkpoint / "draft"), "--repeats", "1", "--json", "--prompts", str(prompts))
    finished = calibrate(run, tiny_checkpoint / "target", tmp_path / "mine.yaml", *arguments)
    acceptance = json.loads(finished.out)["profile"]["acceptance"]
    assert 0 < acceptance["num_trials"] <= 2 * 31
    prompts.write_text('{"prompt": "one"}\nnonsense\n')
    broken = calibrate(run, tiny_checkpoint / "target", tmp_path / "mine.yaml", *arguments)
    assert broken.code == 1
    assert broken.out == ""


def test_calibrate_refuses_options_that_contradict_each_other(run: Call, tiny_checkpoint: Path) -> None:
    assert_error(run("calibrate", "--quick", "--budget", "5"), 2, "--quick and --budget")
    assert_error(run("calibrate", "--check", "--repeats", "2"), 2, "--check measures no profile")
    assert_error(run("calibrate", "--budget", "0"), 2, "--budget")
    assert_error(run("calibrate", "--profile", "mine.yaml"), 2, "--profile names the profile for --check")


@pytest.mark.parametrize("place", ["a-directory", "a-file/profile.yaml"])
def test_where_the_profile_cannot_be_written_nothing_is_measured(
    place: str, run: Call, tmp_path: Path, nothing_is_loaded: None
) -> None:
    (tmp_path / "a-directory").mkdir()
    (tmp_path / "a-file").touch()
    assert_error(run("calibrate", "-o", tmp_path / place), 1, f"cannot write the profile {tmp_path / place}")


def test_bad_prompts_are_named_before_anything_is_loaded(run: Call, tmp_path: Path, nothing_is_loaded: None) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "one"}\n\nnonsense\n')
    assert_error(run("calibrate", "--prompts", prompts), 1, f"{prompts}, line 3")
    absent = run("calibrate", "--prompts", tmp_path / "absent")
    assert_error(absent, 1, "absent")
    assert "--prompts" in absent.err
    assert_error(run("calibrate", "--prompts", prompts, "-o", prompts), 2, "is read and written")


def test_without_a_profile_there_is_nothing_to_check(run: Call, tiny_checkpoint: Path) -> None:
    finished = run("calibrate", "--check", "-m", tiny_checkpoint / "target", "--threads", "1")
    assert_error(finished, 3, "there is no profile for this machine and pair")
    assert finished.err.endswith(f"rakvctl calibrate -m {tiny_checkpoint / 'target'} --threads 1\n")


def test_a_noisy_quick_profile_is_owned_up_to(
    run: Call, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calibration = Calibration(toy_profile(with_draft=False), (Point("verify", 1, 64),))
    monkeypatch.setattr("rakvctl.measure.ready.calibrate", lambda *_: calibration)
    finished = run("generate", "hello", "-n", "2", "-m", tiny_checkpoint / "target", "--threads", "1")
    assert finished.code == 0
    (note,) = [line for line in finished.err.splitlines() if "varied" in line]
    assert f"rakvctl calibrate -m {tiny_checkpoint / 'target'} --threads 1" in note


def test_other_commands_go_on_reading_what_the_environment_names(
    run: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_checkpoint: Path
) -> None:
    monkeypatch.setenv("RAKVCTL_PROFILE", "theirs.yaml")
    monkeypatch.setattr("rakvctl.measure.calibrate.calibrate", lambda *_: Calibration(toy_profile(), ()))
    finished = run("calibrate", "-m", tiny_checkpoint / "target", "-o", tmp_path / "mine.yaml")
    assert finished.code == 0
    assert "theirs.yaml, which RAKVCTL_PROFILE names" in finished.err


def test_one_thread_is_one_thread(capsys: pytest.CaptureFixture[str]) -> None:
    profile = toy_profile()
    show_profile(profile)
    show_profile(replace(profile, fingerprint=replace(profile.fingerprint, threads=2)))
    assert re.findall(r"\d+ threads?", capsys.readouterr().out) == ["1 thread", "2 threads"]
