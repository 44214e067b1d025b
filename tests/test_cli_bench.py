"""`rakvctl bench` from the outside."""

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rakvctl.core.backends.fake import VirtualClock
from rakvctl.core.runtime import Runtime
from rakvctl.core.types import Completion, Request
from rakvctl.measure.arms import Arm
from tests.program import Call, Finished
from tests.test_bench import ScriptedArm, write_results


@pytest.fixture(scope="module")
def profile_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("profile") / "pair.yaml"


@pytest.fixture
def bench(run: Call, tiny_checkpoint: Path, profile_path: Path, tmp_path: Path) -> Call:
    """`rakvctl bench` of the small random pair, a prompt or two, into a folder."""
    models = ("-m", tiny_checkpoint / "target", "-d", tiny_checkpoint / "draft", "--threads", "1")
    if not profile_path.exists():
        assert run("calibrate", *models, "--repeats", "1", "-o", profile_path).code == 0
    prompts = tmp_path / "prompts.jsonl"
    texts = {"one": "a prompt of some length, and more of it", "two": "and another one, longer than a few words"}
    prompts.write_text("".join(json.dumps({"id": name, "prompt": text}) + "\n" for name, text in texts.items()))
    common = (*models, "--profile", profile_path, "-w", prompts, "-n", "5", "--output-dir", tmp_path / "out")

    def run_bench(*arguments: str | Path) -> Finished:
        return run("bench", *common, *arguments)

    return run_bench


def results(tmp_path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((tmp_path / "out" / "results.json").read_text())
    return content


def test_all_arms_serve_all_prompts_and_agree(bench: Call, tmp_path: Path) -> None:
    peers = "hf-generate,hf-prompt-lookup,hf-prompt-lookup-3,hf-assisted"
    finished = bench("--peers", peers, "--policies", "kv,spec-2,lookup-3,rakv", "--repeats", "2", "--plot")
    assert (finished.code, finished.err) == (0, "")
    assert "No outputs differ" in finished.out
    content = results(tmp_path)
    assert content["arms"] == ["ar", "kv", "spec-2", "lookup-3", "rakv", *peers.split(",")]
    assert len(content["samples"]) == 2 * 3 * 2 * 9
    sample = content["samples"][0]
    names = "workload prompt_id arm repeat prompt_tokens completion_tokens total_ms ttft_ms equal"
    assert set(sample) >= set(names.split())
    assert all(sample["equal"] and sample["completion_tokens"] == 5 for sample in content["samples"])
    assert {sample["prompt_id"] for sample in content["samples"]} == {"one", "two"}
    assert {"environment", "profile", "summary"} <= set(content)
    assert "| prompts.jsonl cold | ar | 2 | 4 |" in (tmp_path / "out" / "report.md").read_text()
    assert "all, 2 prompts, 12 executions an arm" in finished.out
    assert {path.name for path in (tmp_path / "out").glob("latency.*")} == {"latency.png", "latency.svg"}


def test_the_same_directory_takes_the_results_of_the_next_run(bench: Call, tmp_path: Path) -> None:
    command = ("--policies", "ar", "--hits", "cold", "--peers", "none", "--limit", "1")
    assert bench(*command, "--plot").code == 0
    assert bench(*command, "--repeats", "2", "--plot").code == 0
    assert len(results(tmp_path)["samples"]) == 2


def test_an_output_that_differs_fails_the_bench(bench: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    wrong: list[Arm] = [ScriptedArm("wrong", VirtualClock(), 1.0)]
    monkeypatch.setattr("rakvctl.cli.bench_studies.make_peers", lambda *_: wrong)
    finished = bench("--policies", "ar", "--hits", "cold")
    assert finished.code == 1
    assert finished.err.startswith("Error: 2 outputs differ from plain decoding's: wrong on one at token 0: 1 for ")
    content = results(tmp_path)
    assert [row["num_unequal"] for row in content["summary"]] == [0, 2]
    for mismatch in content["mismatches"]:
        assert mismatch["margin"] == pytest.approx(mismatch["expected_logit"] - mismatch["logit"])
        assert mismatch["margin"] > 0.0


@pytest.mark.slow
def test_in_half_precision_differences_are_counted_and_no_failure(
    bench: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    wrong: list[Arm] = [ScriptedArm("wrong", VirtualClock(), 1.0)]
    monkeypatch.setattr("rakvctl.cli.bench_studies.make_peers", lambda *_: wrong)
    finished = bench("--policies", "ar", "--hits", "cold", "--dtype", "bfloat16", "--profile", "auto")
    assert finished.code == 0
    assert "2 outputs differ" in finished.out
    assert len(results(tmp_path)["mismatches"]) == 2


@pytest.mark.slow
@pytest.mark.parametrize("study", ["baselines", "controller", "sensitivity"])
def test_what_was_measured_before_an_interrupt_is_kept(
    study: str, bench: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    calls = 0

    def interrupt(_stage: str, _share: float) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr("rakvctl.cli.bench_run.progress.measuring", lambda **_: nullcontext(interrupt))
    assert bench("--study", study, "--peers", "none", "--limit", "3").code == 130
    assert len(results(tmp_path)["samples"]) == 2


@pytest.mark.slow
def test_the_controller_study_compares_every_action(bench: Call, tmp_path: Path) -> None:
    """The small pair has 256 positions, and the study's prompts fit."""
    finished = bench("--study", "controller", "--limit", "3", "--json")
    assert finished.code == 0
    content = json.loads(finished.out)
    assert content["summary"]["num_cases"] == 3
    assert [len(row["actions"]) for row in content["samples"]] == [6, 12, 12]


@pytest.mark.slow
def test_an_action_that_emits_other_tokens_fails_the_controller_study(
    bench: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run = Runtime.run

    def lie(self: Runtime, request: Request, *args: Any) -> Completion:
        completion = run(self, request, *args)
        is_wrong = completion.decision.action.draft_len == 4
        return replace(completion, token_ids=(-1, *completion.token_ids[1:])) if is_wrong else completion

    monkeypatch.setattr(Runtime, "run", lie)
    finished = bench("--study", "controller", "--limit", "3")
    assert finished.code == 1
    assert "outputs differ" in finished.err
    assert results(tmp_path)["num_unequal"] >= 5


def test_sensitivity_gives_a_crossover_for_each_k(bench: Call, tmp_path: Path) -> None:
    assert bench("--study", "sensitivity", "--limit", "1", "--plot").code == 0
    content = results(tmp_path)
    assert [row["draft_len"] for row in content["summary"]] == [1, 2, 4, 6, 8]
    assert len(content["samples"]) == 6 * 10
    assert (tmp_path / "out" / "sensitivity.svg").is_file()


@pytest.mark.slow
def test_results_are_compared(run: Call, tmp_path: Path) -> None:
    before, after = write_results(tmp_path / "a.json", 10.0), write_results(tmp_path / "b.json", 5.0)
    finished = run("bench", "--compare", before, after)
    assert finished.code == 0
    assert "0.500 (0.500-0.500)" in finished.out
    assert "faster" in finished.out
    (change,) = json.loads(run("bench", "--compare", before, after, "--json").out)["changes"]
    assert change["beyond_noise"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--peers", "vllm"), "no peer vllm"),
        (("--policies", "nonsense"), "no policy nonsense"),
        (("--hits", "warm"), "no hit warm"),
        (("-w", "nonsense"), "no workload nonsense"),
        (("-w", "humaneval"), "needs its files"),
        (("--study", "nonsense"), "--study"),
    ],
)
def test_bad_usage_is_one_clear_error(arguments: tuple[str, ...], message: str, bench: Call) -> None:
    finished = bench(*arguments)
    assert (finished.code, finished.out) == (2, "")
    first, second = finished.err.removesuffix("\n").split("\n")
    assert first.startswith("Error: ")
    assert message in first
    assert second.startswith("Hint: ")
