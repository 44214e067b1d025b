"""`rakvctl explain` and `rakvctl calibrate` from the outside."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from rakvctl.core.hardware import processor_name
from rakvctl.core.profile_file import default_path, read_profile, write_profile
from tests.profiles import toy_profile
from tests.program import Call, Finished

# Checked by hand: the toy pair's costs are declared, and simple.
SNAPSHOT = """\
500 prompt tokens, 300 of them stored, up to 64 new ones; alpha 0.70. Times in
ms.

                            draft                         total  ms a cross-
    reuse k clone prefill prefill rounds draft verify mem    ms token   over
 ───────────────────────────────────────────────────────────────────────────
    no    0   0.0     260     0.0     63   0.0    729 0.0   989  15.4      -
    no    1   0.0     260    52.0     38  91.2    458 0.0   861  13.5   0.37
    no    2   0.0     260    52.0     29   138    364 0.0   814  12.7   0.43
    no    4   0.0     260    52.0     23   213    310 0.0   835  13.1   0.57
    no    6   0.0     260    52.0     21   289    303 0.0   904  14.1   0.65
    no    8   0.0     260    52.0     20   367    308 0.0   987  15.4   0.70

    yes   0  3.00     111     0.0     63   0.0    729 0.0   842  13.2      -
    yes   1  3.00     111    22.8     38  91.2    458 0.0   686  10.7   0.31
 -> yes   2  3.00     111    22.8     29   138    364 0.0   638  9.97   0.41
    yes   4  3.00     111    22.8     23   213    310 0.0   660  10.3   0.54
    yes   6  3.00     111    22.8     21   289    303 0.0   728  11.4   0.63
    yes   8  3.00     111    22.8     20   367    308 0.0   811  12.7   0.69

Chosen: the stored prefix is reused, 2 drafted a round: 638 ms expected."""


@pytest.fixture
def profile_path(tmp_path: Path) -> Path:
    """A profile file of the toy pair."""
    path = tmp_path / "toy.yaml"
    write_profile(toy_profile(), path)
    return path


def explain_toy(run: Call, path: Path, *arguments: str) -> Finished:
    return run("explain", "--profile", path, "--prompt-tokens", "500", "-n", "64", "--alpha", "0.7", *arguments)


def assert_error(finished: Finished, code: int, message: str) -> None:
    assert finished.code == code
    assert finished.out == ""
    first, second = finished.err.removesuffix("\n").split("\n")
    assert first.startswith("Error: ")
    assert message in first
    assert second.startswith("Hint: ")


def test_the_table_reads_like_this(run: Call, profile_path: Path) -> None:
    finished = explain_toy(run, profile_path, "--cached", "300")
    assert finished.code == 0
    assert finished.err == ""
    assert "\n".join(line.rstrip() for line in finished.out.splitlines()) == SNAPSHOT
    assert all(len(line) <= 80 for line in finished.out.splitlines())


def test_what_cannot_be_done_is_in_the_table_with_the_reason(run: Call, tmp_path: Path) -> None:
    path = tmp_path / "alone.yaml"
    write_profile(toy_profile(with_draft=False), path)
    finished = explain_toy(run, path)
    assert "not possible: with reuse every k: no stored prefix" in finished.out
    assert "without reuse k = 1, 2, 4, 6, 8: no draft model" in finished.out
    record = json.loads(explain_toy(run, path, "--json").out)
    assert [row["infeasible"] for row in record["table"]] == [None, *["no draft model"] * 5, *["no stored prefix"] * 6]
    assert record["table"][1]["total_ms"] is None


def test_the_json_object_is_the_contract_s(run: Call, profile_path: Path) -> None:
    record = json.loads(explain_toy(run, profile_path, "--cached", "300", "--json").out)
    assert list(record) == ["table", "features", "alpha", "profile"]
    assert record["alpha"] == record["features"]["alpha"] == 0.7
    assert (record["features"]["num_prompt_tokens"], record["features"]["num_cloned_tokens"]) == (500, 300)
    assert len(record["table"]) == 12
    for row in record["table"]:
        assert list(row) == [
            "reuse", "draft_len", "clone_ms", "prefill_ms", "draft_prefill_ms", "draft_ms", "verify_ms", "memory_ms",
            "rounds", "total_ms", "ms_per_token", "infeasible", "chosen", "crossover_alpha",
        ]  # fmt: skip
        parts = ("clone_ms", "prefill_ms", "draft_prefill_ms", "draft_ms", "verify_ms", "memory_ms")
        assert sum(row[part] for part in parts) == pytest.approx(row["total_ms"])
        assert row["ms_per_token"] == pytest.approx(row["total_ms"] / 64)
    chosen = [row for row in record["table"] if row["chosen"]]
    assert [row["total_ms"] for row in chosen] == [min(row["total_ms"] for row in record["table"])]
    assert record["profile"]["fingerprint"]["target"] == "toy"


def test_acceptance_decides_and_comes_from_the_profile(run: Call, profile_path: Path) -> None:
    def chosen(*arguments: str) -> tuple[int, float]:
        finished = run("explain", "--profile", profile_path, "--prompt-tokens", "50", "--json", *arguments)
        record = json.loads(finished.out)
        return next(row["draft_len"] for row in record["table"] if row["chosen"]), record["alpha"]

    assert chosen("--alpha", "0") == (0, 0.0)
    assert chosen("--alpha", "1") == (8, 1.0)
    assert chosen()[1] == pytest.approx(toy_profile().acceptance.alpha, abs=1e-5)


def test_no_new_tokens_and_one_prompt_token_can_be_explained(run: Call, profile_path: Path) -> None:
    finished = run("explain", "--profile", profile_path, "--prompt-tokens", "1", "-n", "0", "--json")
    rows = json.loads(finished.out)["table"]
    assert {row["rounds"] for row in rows} == {0}
    assert rows[0]["ms_per_token"] is None


def test_without_a_model_torch_is_not_imported(profile_path: Path) -> None:
    code = (
        "import sys\nfrom rakvctl.cli.app import main\n"
        f"sys.argv = ['rakvctl', 'explain', '--profile', {str(profile_path)!r}, '--prompt-tokens', '9']\n"
        "try:\n    main()\nexcept SystemExit as ended:\n    assert not ended.code, ended.code\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_the_user_s_own_profile_is_found_without_a_model(run: Call) -> None:
    missing = run("explain", "--prompt-tokens", "9")
    assert_error(missing, 3, "no profile for tiny with draft tiny")
    mark = replace(toy_profile().fingerprint, target="tiny", draft="tiny", processor=processor_name())
    mine = replace(toy_profile(), fingerprint=mark)
    write_profile(mine, default_path(mark))
    assert run("explain", "--prompt-tokens", "9").code == 0
    assert_error(run("explain", "--prompt-tokens", "9", "--draft", "none"), 3, "no profile for tiny on this machine")
    elsewhere = replace(mark, processor="another one")
    write_profile(replace(mine, fingerprint=elsewhere), default_path(elsewhere))
    assert run("explain", "--prompt-tokens", "9").code == 0


def test_other_threads_than_measured_are_refused_with_a_sentence(run: Call, profile_path: Path) -> None:
    finished = explain_toy(run, profile_path, "--threads", "2")
    assert_error(finished, 3, "was measured with 1 threads, not with 2")
    assert "rakvctl calibrate --threads 2" in finished.err


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("--prompt-tokens", "9", "hello"), 2, "two requests"),
        (("--prompt-tokens", "9", "--cached", "10"), 2, "10 of 9 tokens"),
        (("hello", "--cached", "10"), 2, "--cached belongs to --prompt-tokens"),
        (("--prompt-tokens", "0"), 2, "--prompt-tokens"),
        (("--prompt-tokens", "9", "--alpha", "1.5"), 2, "--alpha"),
        (("--prompt-tokens", "9", "--alpha", "nan"), 2, "--alpha"),
        (("--prompt-tokens", "9", "-n", "-1"), 2, "--max-new-tokens"),
        (("--prompt-tokens", "9", "--plot", "x.pdf"), 2, "x.pdf"),
        (("--prompt-tokens", "9", "--profile", "absent.yaml"), 3, "absent.yaml"),
    ],
)
def test_bad_usage_is_one_clear_error(arguments: tuple[str, ...], code: int, message: str, run: Call) -> None:
    assert_error(run("explain", *arguments), code, message)


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_cost_against_alpha_is_drawn(suffix: str, run: Call, profile_path: Path, tmp_path: Path) -> None:
    path = tmp_path / f"costs.{suffix}"
    assert explain_toy(run, profile_path, "--plot", str(path)).code == 0
    assert path.read_bytes()[:5] == {"png": b"\x89PNG\r", "svg": b"<?xml"}[suffix]
    unwritable = explain_toy(run, profile_path, "--plot", str(tmp_path / "absent" / path.name))
    assert unwritable.code == 1
    assert "cannot write" in unwritable.err


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
    assert profile.verify.sizes_tokens == (1, 2, 3, 5, 7, 9)
    assert profile.fingerprint.threads == 1

    arguments = ("-m", target, "-d", tiny_checkpoint / "draft", "--profile", path, "--threads", "1")
    generated = run("generate", "hello there, world", "-n", "8", "-o", "jsonl", *arguments)
    record = json.loads(generated.out)
    assert generated.err == ""
    assert record["policy"] == "rakv"
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
    assert "rakvctl calibrate" in finished.err
    record = json.loads(run(*check, "--json").out)
    assert record["stale"]
    assert {point["point"][0] for point in record["points"] if point["change"] < -0.5} >= {"verify"}
    assert {point["point"][0] for point in record["points"]} == {"verify", "target.prefill"}
    assert_error(run(*check[:-1], tmp_path / "absent.yaml"), 3, "absent.yaml")


def test_generate_measures_once_where_there_is_no_profile(
    run: Call, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rakvctl.measure.ready.QUICK_SECONDS", 0.5)
    command = ("generate", "hello", "-n", "4", "-m", tiny_checkpoint / "target", "--threads", "1")
    first, second = run(*command), run(*command)
    assert "no profile for this machine and pair" in first.err
    assert second == Finished(0, first.out, "")


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
