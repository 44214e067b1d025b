"""The benchmark: its statistics, its fairness, and that it fails where an output differs."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from rakvctl.core.backends.fake import FakeBackend, VirtualClock
from rakvctl.core.engine import Engine
from rakvctl.core.errors import RequestError, UsageError
from rakvctl.core.pair import ModelPair
from rakvctl.core.profile import MeasuredAcceptance
from rakvctl.core.types import Action, CostBreakdown, Decision
from rakvctl.measure import report
from rakvctl.measure.arms import Arm, Outcome, PolicyArm, Task
from rakvctl.measure.bench import Bench, BenchPrompt, Sample
from rakvctl.measure.controller import ControllerStudy
from rakvctl.measure.results import compare, sample_record
from rakvctl.measure.results import summarize as summarize_samples
from rakvctl.measure.sensitivity import SensitivityStudy, crossovers, medians
from rakvctl.measure.statistics import mape_percent, ratio_interval, spearman
from rakvctl.measure.tasks import controller_tasks, make_tasks, stored_part
from rakvctl.measure.trials import (
    ControllerRun,
    Trial,
    num_runs,
    num_unequal,
    repeat_difference,
    summarize,
    summarize_auto,
)
from rakvctl.measure.workloads import Workload, load_workload, names
from tests.profiles import TARGET_COSTS as COSTS
from tests.profiles import toy_pair, toy_profile
from tests.workloads import data_folder

PROMPT = tuple(range(20))


class ScriptedArm:
    """Takes a given time for each task, on a virtual clock, and emits given tokens."""

    def __init__(self, name: str, clock: VirtualClock, ms: float, tokens: tuple[int, ...] = (1, 2, 3)) -> None:
        self.name = name
        self.log: list[str] = []
        self._clock = clock
        self._ms = ms
        self._tokens = tokens

    def prepare(self, task: Task) -> Callable[[], Outcome]:
        def serve() -> Outcome:
            self.log.append(self.name)
            self._clock.advance(self._ms)
            return Outcome(token_ids=self._tokens, total_ms=self._ms, ttft_ms=self._ms / 2)

        return serve


def run(arms: list[Arm], clock: VirtualClock, num_prompts: int = 3, repeats: int = 1) -> tuple[Bench, list[Sample]]:
    bench = Bench(arms, Engine(FakeBackend(seed=1)), repeats=repeats, seed=0, clock=clock)
    prompts = [BenchPrompt("toy", str(number), Task(PROMPT, 3)) for number in range(num_prompts)]
    return bench, list(bench.run(prompts))


def test_pairing_removes_what_prompts_differ_by() -> None:
    theirs = [10.0, 100.0, 1000.0]
    interval = ratio_interval([2 * ms for ms in theirs], theirs, ["a", "b", "c"])
    assert (interval.estimate, interval.low, interval.high) == pytest.approx((2.0, 2.0, 2.0))


def test_twice_as_fast_and_half_as_fast_cancel_out() -> None:
    assert ratio_interval([2.0, 1.0], [1.0, 2.0], ["a", "b"]).estimate == pytest.approx(1.0)


def test_rank_correlation_shares_the_ranks_of_ties() -> None:
    assert spearman([1, 2, 3, 4], [10, 20, 30, 40]) == pytest.approx(1.0)
    assert spearman([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx(-1.0)
    # Ranks 0, 1.5, 1.5, 3 against 0, 1, 2, 3.
    assert spearman([1, 2, 2, 3], [1, 2, 3, 4]) == pytest.approx(0.9486832980505138)
    assert spearman([1, 1], [5, 5]) == 1.0
    assert spearman([1, 1], [5, 6]) == 0.0
    assert mape_percent([110.0, 90.0], [100.0, 100.0]) == pytest.approx(10.0)


@pytest.mark.slow
def test_arms_take_turns_in_an_order_that_changes_and_repeats_by_seed() -> None:
    clock, order = VirtualClock(), []
    arms = [ScriptedArm(name, clock, 1.0) for name in ("ar", "b", "c")]
    for arm in arms:
        arm.log = order
    run([*arms], clock, num_prompts=12)
    rounds = [tuple(order[start : start + 3]) for start in range(0, len(order), 3)]
    assert all(sorted(round_) == ["ar", "b", "c"] for round_ in rounds)
    assert len(set(rounds)) > 1
    first = list(order)
    order.clear()
    run([*arms], clock, num_prompts=12)
    assert order == first


def test_an_output_that_differs_is_found_with_its_position() -> None:
    clock = VirtualClock()
    arms: list[Arm] = [
        ScriptedArm("ar", clock, 1.0),
        ScriptedArm("wrong", clock, 1.0, (1, 9, 3)),
        ScriptedArm("short", clock, 1.0, (1, 2)),
        ScriptedArm("padding", clock, 1.0, (1, 32, 3)),
    ]
    bench, samples = run(arms, clock, num_prompts=1)
    assert {sample.arm: sample.equal for sample in samples} == {
        "ar": True,
        "wrong": False,
        "short": False,
        "padding": False,
    }
    padding, short, wrong = sorted(bench.mismatches, key=lambda mismatch: mismatch.arm)
    assert (wrong.arm, wrong.position, wrong.token, wrong.expected) == ("wrong", 1, 9, 2)
    assert (short.arm, short.position, short.token, short.expected) == ("short", 2, None, 3)
    target = FakeBackend(seed=1)
    logits = target.forward((*PROMPT, 1), num_logits=1).numpy()[0]
    assert (wrong.logit, wrong.expected_logit) == (logits[9], logits[2])
    assert wrong.margin == pytest.approx(logits[2] - logits[9])
    assert short.margin is None
    assert (padding.token, padding.logit, padding.margin) == (32, None, None), "a peer may emit what has no logit"


def test_a_summary_compares_prompt_by_prompt_with_plain_decoding() -> None:
    clock = VirtualClock()
    _, samples = run([ScriptedArm("ar", clock, 30.0), ScriptedArm("fast", clock, 20.0)], clock, repeats=2)
    plain, fast = summarize_samples(samples)
    assert (plain.arm, plain.speedup.estimate, plain.num_samples) == ("ar", pytest.approx(1.0), 6)
    assert (fast.arm, fast.speedup.estimate, fast.total_ms, fast.ttft_ms) == ("fast", pytest.approx(1.5), 20.0, 10.0)
    assert fast.tpot_ms == pytest.approx(5.0)
    assert fast.tokens_per_s == pytest.approx(150.0)
    assert fast.draft_acceptance_rate is None
    assert fast.num_unequal == 0


@pytest.mark.parametrize("num_samples", range(1, 12))
def test_a_run_can_be_summed_up_wherever_it_is_cut_off(num_samples: int) -> None:
    clock = VirtualClock()
    arms = [ScriptedArm(name, clock, 1.0) for name in ("ar", "b", "c")]
    _, samples = run([*arms], clock, num_prompts=4)
    summaries = summarize_samples(samples[:num_samples])
    assert all(summary.num_samples > 0 for summary in summaries)
    if num_samples >= 3:
        assert summaries[0].arm == "ar"
        assert {summary.arm for summary in summaries} == {"ar", "b", "c"}


def write_results(path: Path, ms: float, num_prompts: int = 8, tokens: tuple[int, ...] = (1, 2, 3)) -> Path:
    clock = VirtualClock()
    _, samples = run([ScriptedArm("ar", clock, ms, tokens)], clock, num_prompts=num_prompts)
    report.write_json(path, {"samples": [sample_record(sample) for sample in samples]})
    return path


def test_two_results_are_compared_beyond_noise(tmp_path: Path) -> None:
    before, after = write_results(tmp_path / "a.json", 10.0), write_results(tmp_path / "b.json", 12.0)
    (change,) = compare(before, after)
    assert change.ratio.estimate == pytest.approx(1.2)
    assert change.is_beyond_noise
    assert change.verdict == "slower"
    assert compare(before, before)[0].verdict == "noise"


def test_a_few_prompts_decide_nothing(tmp_path: Path) -> None:
    before, after = (
        write_results(tmp_path / name, ms, num_prompts=4) for name, ms in (("a.json", 9.0), ("b.json", 5.0))
    )
    (change,) = compare(before, after)
    assert change.ratio.estimate == pytest.approx(5 / 9)
    assert (change.verdict, change.is_beyond_noise) == ("too few prompts", False)


def test_answers_of_other_lengths_are_not_compared(tmp_path: Path) -> None:
    before, after = write_results(tmp_path / "a.json", 10.0), write_results(tmp_path / "b.json", 5.0, tokens=(1, 2))
    with pytest.raises(UsageError, match="same length"):
        compare(before, after)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"samples": [{"arm": "ar"}]}', '{"samples": 5}'])
def test_what_holds_no_results_cannot_be_compared(text: str, tmp_path: Path) -> None:
    good, bad = write_results(tmp_path / "a.json", 10.0), tmp_path / "b.json"
    bad.write_text(text)
    with pytest.raises(UsageError, match=r"b\.json holds no results"):
        compare(good, bad)
    with pytest.raises(UsageError, match="cannot read"):
        compare(good, tmp_path / "absent.json")
    report.write_json(bad, {"samples": []})
    with pytest.raises(UsageError, match="in common"):
        compare(good, bad)


@pytest.mark.parametrize("policy", ["ar", "kv", "spec-4", "joint-4", "rakv", "auto"])
def test_every_policy_starts_from_what_the_task_says_is_stored(policy: str) -> None:
    """Nothing of an earlier task is reused: repeats would make the benchmark about hits."""
    clock = VirtualClock()
    pair = toy_pair(clock)
    arm = PolicyArm(pair, policy, toy_profile(), clock)
    cold = [arm.prepare(Task(PROMPT, 8))() for _ in range(2)]
    assert [outcome.reused_tokens for outcome in cold] == [0, 0]
    assert cold[0].token_ids == cold[1].token_ids
    arm.prepare(Task(PROMPT, 8))
    assert arm._experience.history.longest_match(PROMPT) is None, "the old answer would be drafted"
    warm = arm.prepare(Task(PROMPT, 8, stored=PROMPT))()
    assert warm.token_ids == cold[0].token_ids
    assert warm.reused_tokens == (0 if policy in ("ar", "spec-4") else len(PROMPT))


def test_the_controller_is_judged_by_every_action_it_could_have_taken() -> None:
    """On a virtual clock and with prompts that draft nothing, the choice is the best and the prediction comes true."""
    clock = VirtualClock()
    pair = toy_pair(clock, with_draft=False)
    study = ControllerStudy(pair, toy_profile(with_draft=False), repeats=2, seed=0, clock=clock)
    tasks = [Task(PROMPT, 12), Task(PROMPT, 12, stored=PROMPT[:17]), Task(PROMPT, 12, stored=PROMPT)]
    runs = list(study.run(tasks))
    trials = [run.trial for run in runs]
    assert [len(trial.actual_ms) for trial in trials] == [1, 2, 2]
    assert [trial.decision.action for trial in trials] == [Action(False, 0), Action(True, 0), Action(True, 0)]
    summary = summarize(trials)
    assert (summary.num_cases, num_runs(runs), num_unequal(runs)) == (3, 10 + 6, 0)
    assert summary.right_k == summary.right_action == 1.0
    assert summary.mean_regret == 0.0
    assert summary.mape_percent < 1.0
    assert repeat_difference(trials) == pytest.approx(0.0), "a virtual clock has no noise"


def test_a_controller_that_is_told_the_acceptance_chooses_by_it() -> None:
    """The toy draft agrees always: told so, the controller drafts at once, where the prior of a poor draft does not."""
    clock = VirtualClock()
    profile = replace(toy_profile(), acceptance=MeasuredAcceptance(alpha=0.01, num_trials=10_000))
    (run,) = ControllerStudy(toy_pair(clock, noise=0.0), profile, repeats=1, seed=0, clock=clock).run(
        [Task(PROMPT, 40)]
    )
    assert run.trial.decision.action == Action(False, 0)
    assert run.trial.regret > 0.1
    assert run.told.decision.alpha == 1.0
    assert run.told.regret == pytest.approx(0.0)
    assert repeat_difference([run.trial]) is None


def test_the_controller_study_runs_auto_with_the_bigram_table() -> None:
    """A target whose next token is the bigram table's, 11 different ones after 26: `auto` learns to use it."""
    clock = VirtualClock()
    pair = replace(toy_pair(clock, with_draft=False), target=Engine(FakeBackend(context=1, clock=clock, costs=COSTS)))
    table = tuple(pair.target.verify(range(pair.target.vocab_size)).argmax())
    tasks = [Task((28,) * 19 + (26,), 11)] * 10

    def auto_ms(pair: ModelPair) -> float:
        study = ControllerStudy(pair, toy_profile(with_draft=False), repeats=1, seed=0, clock=clock)
        *_, last = study.run(tasks)
        assert last.num_unequal == 0
        return last.auto_ms[0]

    assert auto_ms(replace(pair, successors=table)) < 0.9 * auto_ms(pair)


def predicting(predicted_ms: tuple[float, ...], actual_ms: tuple[float, ...]) -> Trial:
    """A request whose actions, one for each k, took so long and were expected to take so long."""
    actions = [Action(False, draft_len) for draft_len in range(len(actual_ms))]
    rows = [
        CostBreakdown(action, 0.0, 0.0, 0.0, 0.0, verify_ms=ms, memory_ms=0.0, rounds=1)
        for action, ms in zip(actions, predicted_ms, strict=True)
    ]
    samples = {action: [ms] for action, ms in zip(actions, actual_ms, strict=True)}
    return Trial(Task(PROMPT, 8), Decision(actions[0], "rakv", table=tuple(rows)), samples)


def test_ranks_within_a_request_do_not_count_that_long_requests_take_long() -> None:
    """Pooled, predictions that order every request's actions the wrong way round look nearly perfect."""
    trials = [
        predicting((1.0, 1.1, 1.2), (1.2, 1.1, 1.0)),
        predicting((10.0, 11.0, 12.0), (12.0, 11.0, 10.0)),
        predicting((100.0, 110.0, 120.0), (100.0, 110.0, 120.0)),
        predicting((1000.0,), (1000.0,)),
    ]
    summary = summarize(trials)
    assert summary.spearman > 0.9
    assert summary.spearman_within_mean == pytest.approx((-1 - 1 + 1) / 3), "one action alone has no order"
    assert summary.spearman_within_median == pytest.approx(-1.0)
    assert summarize(trials[-1:]).spearman_within_mean is None


def test_the_report_names_both_rank_correlations() -> None:
    trial = predicting((1.0, 2.0), (2.0, 1.0))
    runs = [ControllerRun(trial, trial, [1.0])]
    figures = {row["figure"]: row["here"] for row in report.controller_rows(runs)}
    assert figures["Spearman, actions of all requests together"] == "-1.000"
    assert figures["Spearman, actions of one request: mean"] == "-1.000"
    assert figures["Spearman, actions of one request: median"] == "-1.000"
    record = report.controller_record(runs)
    assert record["summary"]["spearman_within_mean"] == record["summary_alpha_told"]["spearman_within_median"] == -1.0


def test_auto_is_set_beside_the_best_action() -> None:
    def run_of(auto_ms: float) -> ControllerRun:
        samples = {Action(False, 0): [100.0, 104.0, 90.0], Action(False, 4): [50.0]}
        trial = Trial(Task(PROMPT, 8), Decision(Action(False, 0), "rakv"), samples)
        return ControllerRun(trial, trial, [auto_ms, auto_ms + 1.0, auto_ms - 1.0])

    summary = summarize_auto([run_of(40.0), run_of(55.0)])
    assert summary.mean_regret == pytest.approx((-0.2 + 0.1) / 2)
    assert summary.mean_gain_over_plain == pytest.approx((100 / 40 + 100 / 55) / 2)
    assert run_of(1.0).trial.regret == pytest.approx(1.0)


@pytest.mark.slow
def test_the_measured_crossover_is_the_predicted_one_on_a_virtual_clock() -> None:
    clock = VirtualClock()
    prompts = [tuple((7 * index + shift) % 32 for index in range(40)) for shift in range(12)]
    study = SensitivityStudy(toy_pair(clock), toy_profile(), 48, seed=0, clock=clock)
    runs = list(study.run(prompts))
    assert len(runs) == len(prompts) * len(study.cells)
    assert all(run.equal for run in runs)
    points = medians(runs)
    assert {point.alpha for point in points} == {step / 10 for step in range(1, 11)}
    for found in crossovers(points):
        assert found.measured is not None
        assert found.predicted is not None
        assert abs(found.measured - found.predicted) < 0.1


def test_the_shared_part_of_a_prompt_is_stored_if_it_is_long_enough() -> None:
    prompt = tuple(range(100))
    assert stored_part(prompt, "cold") is None
    assert stored_part(prompt, "shared") == prompt[:75]
    assert stored_part(prompt, "exact") == prompt
    assert stored_part(prompt[:15], "exact") is None
    assert stored_part(prompt[:20], "shared") is None


def test_prompts_that_do_not_fit_are_left_out() -> None:
    codec = toy_pair(VirtualClock()).codec
    workload = Workload("toy", (("short", "x" * 30), ("long", "x" * 100)))
    prompts = list(make_tasks(codec, [workload], ["cold", "exact"], 10, 64))
    assert [(prompt.workload, prompt.id) for prompt in prompts] == [("toy cold", "short"), ("toy exact", "short")]


def test_the_own_workload_needs_no_files_and_reads_on_any_model() -> None:
    own = load_workload("mixed", None, None)
    assert len(own.prompts) == 10
    assert {prompt_id.split("/")[0] for prompt_id, _ in own.prompts} == {"prose", "code", "edit", "chat"}
    codec = toy_pair(VirtualClock()).codec
    assert len(list(make_tasks(codec, [own], ["cold"], 8, None))) == 10
    assert len(load_workload("mixed", None, 3).prompts) == 3


def test_workloads_with_names_come_from_the_folder() -> None:
    folder = data_folder()
    for name in names()[1:]:
        workload = load_workload(name, folder, 4)
        assert len(workload.prompts) == 4
        assert all(content and isinstance(content, str) for _, content in workload.prompts)


def test_a_workload_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no workload nonsense"):
        load_workload("nonsense", tmp_path, None)
    with pytest.raises(UsageError, match="needs its files"):
        load_workload("humaneval", None, None)
    with pytest.raises(UsageError, match="is not in"):
        load_workload("humaneval", tmp_path, None)


def test_the_controllers_tasks_have_the_lengths_of_the_study() -> None:
    codec = toy_pair(VirtualClock()).codec
    tasks = list(controller_tasks(codec, [load_workload("mixed", None, None)], 60, seed=3, max_positions=None))
    assert all(32 <= len(task.prompt) <= 1000 and 16 <= task.max_new_tokens <= 96 for task in tasks)
    assert [task.stored is None for task in tasks[:3]] == [True, False, False]
    assert tasks[2].stored == tasks[2].prompt
    with pytest.raises(RequestError, match="no prompt"):
        list(controller_tasks(codec, [], 3, seed=0, max_positions=None))
    short = list(controller_tasks(codec, [load_workload("mixed", None, None)], 20, seed=3, max_positions=256))
    assert all(len(task.prompt) + task.max_new_tokens <= 256 for task in short)


def test_json_has_no_nan(tmp_path: Path) -> None:
    report.write_json(tmp_path / "x.json", {"value": float("nan"), "list": [(1.0, float("nan"))]})
    assert json.loads((tmp_path / "x.json").read_text()) == {"value": None, "list": [[1.0, None]]}
