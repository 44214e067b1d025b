"""`rakvctl explain` from the outside."""

import json
import subprocess
import sys
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from rakvctl.core.hardware import processor_name
from rakvctl.core.profile_file import write_profile
from tests.profiles import keep_profile, toy_profile
from tests.program import Call, Finished, assert_error

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

Chosen: the stored prefix is reused, 2 drafted a round: 638 ms expected.

Of tokens that it looks up, auto drafts in a round after 532 tokens:

           alone:               agreed:               split:
 matched    alpha    k     ms     alpha    k     ms    alpha    k     ms
 ───────────────────────────────────────────────────────────────────────
       1     0.30    5   7.95      0.59   16   3.50     0.14    1   10.6
       2     0.60    9   4.88      0.75   16   2.41     0.25    2   9.55
       3     0.70   11   4.01      0.79   16   1.97     0.27    2   9.32
       4     0.75   12   3.53      0.93   16   1.66     0.30    2   9.06
       6     0.84   13   2.83      0.95   16   1.55     0.40    3   8.06
      10     0.90   16   2.29      0.97   16   1.42     0.57    4   6.22
      20     0.94   16   1.81      0.99   16   1.25     0.94   16   1.81

Where nothing is found, a token takes 11.6 ms, or 10.4 where it is known what
mostly follows (alpha 0.16, k = 1).
"""


@pytest.fixture
def profile_path(tmp_path: Path) -> Path:
    """A profile file of the toy pair."""
    path = tmp_path / "toy.yaml"
    write_profile(toy_profile(), path)
    return path


def explain_toy(run: Call, path: Path, *arguments: str) -> Finished:
    return run("explain", "--profile", path, "--prompt-tokens", "500", "-n", "64", "--alpha", "0.7", *arguments)


def test_the_table_reads_like_this(run: Call, profile_path: Path) -> None:
    finished = explain_toy(run, profile_path, "--cached", "300")
    assert finished.code == 0
    assert finished.err == ""
    assert [line.rstrip() for line in finished.out.splitlines()] == SNAPSHOT.splitlines()
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
    assert list(record) == ["table", "features", "alpha", "profile", "rounds"]
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


def explained(run: Call, *arguments: str) -> dict[str, Any]:
    """The fingerprint that a described request was reckoned with."""
    finished = run("explain", "--prompt-tokens", "9", "--json", *arguments)
    assert finished.code == 0, finished.err
    fingerprint: dict[str, Any] = json.loads(finished.out)["profile"]["fingerprint"]
    return fingerprint


def test_the_user_s_own_profile_is_found_without_a_model(run: Call) -> None:
    assert_error(run("explain", "--prompt-tokens", "9"), 3, "no profile for tiny with draft tiny")
    keep_profile()
    keep_profile(processor="another one")
    assert explained(run)["processor"] == processor_name()
    assert_error(run("explain", "--prompt-tokens", "9", "--draft", "none"), 3, "no profile for tiny on this machine")


def test_the_profile_that_fits_the_options_is_taken_and_not_the_newest(run: Call) -> None:
    keep_profile(threads=7)
    keep_profile(threads=1, days_ago=1)
    keep_profile(dtype="bfloat16", days_ago=2)
    keep_profile(device="NVIDIA H200", days_ago=3)
    assert explained(run, "--threads", "1")["threads"] == 1
    assert explained(run, "--dtype", "bfloat16")["dtype"] == "bfloat16"
    assert explained(run, "--device", "cuda:1")["device"] == "NVIDIA H200"
    assert explained(run, "--device", "cpu")["dtype"] == "float32"
    assert "3 profiles fit, the newest is taken: cpu" in run("explain", "--prompt-tokens", "9").err


@pytest.mark.parametrize(
    ("changes", "arguments", "message"),
    [
        ({}, ("--dtype", "float16"), "another dtype: float32; here it is float16"),
        ({}, ("--device", "cuda"), "another device: cpu; here it is cuda"),
        ({"threads": 7}, ("--threads", "1"), "another number of threads: 7; here it is 1"),
        ({"dtype": "bfloat16"}, (), "another dtype: bfloat16; here it is float32"),
        ({"processor": "Z80"}, (), "another processor: Z80"),
        ({"backend": "torch", "versions": "torch 1.0.0"}, (), "another version of the libraries: torch 1.0.0"),
    ],
)
def test_where_no_profile_fits_the_command_that_measures_one_is_named(
    changes: dict[str, Any], arguments: tuple[str, ...], message: str, run: Call
) -> None:
    keep_profile(**changes)
    finished = run("explain", "--prompt-tokens", "9", *arguments)
    assert_error(finished, 3, message)
    assert finished.err.endswith(f"{' '.join(('rakvctl calibrate -m tiny', *arguments))}\n")


def test_the_build_of_a_library_does_not_make_a_profile_another_s(run: Call) -> None:
    versions = f"torch {version('torch').partition('+')[0]}+cu130, transformers {version('transformers')}"
    keep_profile(backend="torch", versions=versions)
    assert explained(run)["versions"] == versions


def test_a_named_profile_of_another_machine_is_explained_with_a_note(run: Call, tmp_path: Path) -> None:
    path = tmp_path / "old.yaml"
    write_profile(replace(toy_profile(), fingerprint=replace(toy_profile().fingerprint, processor="Z80")), path)
    finished = explain_toy(run, path)
    assert finished.code == 0
    assert "another processor: Z80" in finished.err


@pytest.mark.parametrize("arguments", [("-m", "gpt2"), ("-d", "gpt2"), ("--dtype", "float16"), ("--device", "cuda")])
def test_a_named_profile_of_something_else_than_asked_for_is_refused(
    arguments: tuple[str, ...], run: Call, profile_path: Path
) -> None:
    assert_error(explain_toy(run, profile_path, *arguments), 3, f"here it is {arguments[1]}")


def test_a_profile_that_the_environment_names_is_said_to_be_from_there(
    run: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAKVCTL_PROFILE", "nonsense")
    finished = run("explain", "--prompt-tokens", "9", "-d", "my draft", "--threads", "1")
    assert_error(finished, 3, "nonsense")
    assert "RAKVCTL_PROFILE" in finished.err
    assert "rakvctl calibrate -m tiny -d 'my draft' --threads 1 -o nonsense" in finished.err


def test_beyond_the_model_s_positions_nothing_is_promised(run: Call, profile_path: Path) -> None:
    finished = run("explain", "--profile", profile_path, "--prompt-tokens", "2000", "-n", "100", "--json")
    assert json.loads(finished.out)["features"]["max_new_tokens"] == 48
    assert "positions for 48 new tokens" in finished.err
    assert_error(run("explain", "--profile", profile_path, "--prompt-tokens", "2048"), 2, "has room for 2048")


def test_a_draft_of_fewer_positions_than_the_prompt_drafts_nothing(run: Call, tmp_path: Path) -> None:
    draft = toy_profile().draft
    assert draft is not None
    short = replace(draft, model=replace(draft.model, max_positions=500))
    write_profile(replace(toy_profile(), draft=short), tmp_path / "short.yaml")
    rows = json.loads(explain_toy(run, tmp_path / "short.yaml", "--json").out)["table"]
    assert rows[1]["infeasible"] == "the draft has 500 positions"


def test_where_nothing_fits_into_memory_nothing_is_chosen(run: Call, tmp_path: Path) -> None:
    target = replace(toy_profile().target, max_positions=None, kv_bytes_per_token=2**40)
    write_profile(replace(toy_profile(), target=target), tmp_path / "large.yaml")
    finished = explain_toy(run, tmp_path / "large.yaml")
    assert "->" not in finished.out
    assert "None of it is possible" in finished.out
    rows = json.loads(explain_toy(run, tmp_path / "large.yaml", "--json").out)["table"]
    assert not any(row["chosen"] for row in rows)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("--prompt-tokens", "9", "hello"), 2, "two requests"),
        (("--prompt-tokens", "9", "--cached", "10"), 2, "10 of 9 tokens"),
        (("--prompt-tokens", "90", "--cached", "15"), 2, "15 tokens are never stored"),
        (("--prompt-tokens", "9", "-n", str(10**11)), 2, "no model has room"),
        (("hello", "-n", str(10**11)), 2, "no model has room"),
        (("--prompt-tokens", "9", "--device", "abacus"), 2, "no device abacus"),
        (("hello", "--cached", "10"), 2, "--cached belongs to --prompt-tokens"),
        (("--prompt-tokens", "0"), 2, "--prompt-tokens"),
        (("--prompt-tokens", "9", "--alpha", "1.5"), 2, "--alpha"),
        (("--prompt-tokens", "9", "--alpha", "nan"), 2, "--alpha"),
        (("--prompt-tokens", "9", "-n", "-1"), 2, "--max-new-tokens"),
        (("--prompt-tokens", "9", "--plot", "x.pdf"), 2, "x.pdf"),
        (("--prompt-tokens", "9", "--kv-dir", "stored"), 2, "--kv-dir is searched for a PROMPT"),
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
