"""Intervals of ratios: prompts are what varies, and one prompt under several conditions is no more than one."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from rakvctl.core.backends.fake import FakeBackend, VirtualClock
from rakvctl.core.engine import Engine
from rakvctl.measure.arms import Outcome, Task
from rakvctl.measure.bench import Bench, BenchPrompt, Sample
from rakvctl.measure.report import summary_rows, write_json
from rakvctl.measure.results import ArmSummary, compare, summarize
from rakvctl.measure.statistics import ratio_interval


@pytest.mark.parametrize(("num_prompts", "num_conditions"), [(8, 3), (8, 1), (30, 2)])
def test_an_interval_covers_the_true_ratio_as_often_as_it_says(num_prompts: int, num_conditions: int) -> None:
    """Of 400 intervals of 95 %, prompts under several conditions with mostly the same ratio, 368 to 392 cover 1.2."""
    rng = np.random.default_rng(7)
    prompts = np.repeat(np.arange(num_prompts), num_conditions)
    covered = 0
    for _ in range(400):
        of_prompt = rng.normal(np.log(1.2), 0.2, num_prompts)[prompts]
        theirs = rng.lognormal(4.0, 0.5, len(prompts))
        ours = theirs * np.exp(of_prompt + rng.normal(0.0, 0.05, len(prompts)))
        interval = ratio_interval(list(ours), list(theirs), list(prompts))
        covered += interval.low <= 1.2 <= interval.high
    assert 0.92 <= covered / 400 <= 0.98


def test_a_prompt_weighs_the_same_however_often_it_was_paired() -> None:
    once = ratio_interval([2.0, 8.0], [1.0, 1.0], ["a", "b"])
    often = ratio_interval([2.0, 2.0, 2.0, 8.0], [1.0] * 4, ["a", "a", "a", "b"])
    assert often == once
    assert once.estimate == pytest.approx(4.0)


def test_one_prompt_has_a_ratio_and_no_interval() -> None:
    interval = ratio_interval([2.0, 2.2], [1.0, 1.0], ["a", "a"])
    assert interval.estimate == pytest.approx((2.0 * 2.2) ** 0.5)
    assert np.isnan([interval.low, interval.high]).all()


class _Arm:
    """Takes some time for each prompt, on a virtual clock."""

    def __init__(self, name: str, clock: VirtualClock, ms: Callable[[int], float]) -> None:
        self.name = name
        self._clock = clock
        self._ms = ms

    def prepare(self, task: Task) -> Callable[[], Outcome]:
        def serve() -> Outcome:
            ms = self._ms(task.prompt[0])
            self._clock.advance(ms)
            return Outcome(token_ids=(1, 2), total_ms=ms, ttft_ms=ms / 2)

        return serve


def _samples(num_prompts: int = 4, hits: tuple[str, ...] = ("cold", "exact"), repeats: int = 1) -> list[Sample]:
    clock = VirtualClock()
    arms = [_Arm("ar", clock, lambda _: 10.0), _Arm("fast", clock, lambda first: 4.0 + first)]
    bench = Bench([*arms], Engine(FakeBackend()), repeats=repeats, seed=0, clock=clock)
    tasks = [(str(number), Task((number, 1, 2), 2)) for number in range(num_prompts)]
    return list(bench.run([BenchPrompt(f"own {hit}", prompt_id, task) for hit in hits for prompt_id, task in tasks]))


def _row(summaries: list[ArmSummary], workload: str) -> ArmSummary:
    return next(row for row in summaries if (row.workload, row.arm) == (workload, "fast"))


def test_a_prompt_under_several_hits_says_no_more_than_under_one() -> None:
    summaries = summarize(_samples())
    one, both = _row(summaries, "own cold").speedup, _row(summaries, "all").speedup
    assert one.low < one.estimate < one.high
    assert (both.estimate, both.low, both.high) == pytest.approx((one.estimate, one.low, one.high))


def test_prompts_and_executions_are_counted_apart() -> None:
    row = _row(summarize(_samples(repeats=3)), "all")
    assert (row.num_prompts, row.num_samples) == (4, 4 * 2 * 3)
    cells = summary_rows([row])[0]
    assert (cells["prompts"], cells["executions"]) == ("4", "24")


def test_prompts_of_two_workloads_with_the_same_id_are_two() -> None:
    clock = VirtualClock()
    bench = Bench([_Arm("ar", clock, lambda _: 1.0)], Engine(FakeBackend()), repeats=1, seed=0, clock=clock)
    prompts = [BenchPrompt(name, "1", Task((token, 2), 2)) for name, token in (("a cold", 1), ("b cold", 2))]
    assert summarize(list(bench.run(prompts)))[-1].num_prompts == 2


def test_statistics_load_no_scipy_until_an_interval_is_asked_for() -> None:
    """`generate` may calibrate, which uses the rest of the module."""
    code = "import sys, rakvctl.measure.ready, rakvctl.measure.results; assert 'scipy' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_two_results_are_compared_prompt_by_prompt(tmp_path: Path) -> None:
    """A prompt whose answers had two lengths makes two pairs and is one prompt."""
    sample = {"workload": "own", "arm": "ar", "total_ms": 2.0}
    rows = [sample | {"prompt_id": str(n % 4), "completion_tokens": n // 4} for n in range(8)]
    for name in ("a.json", "b.json"):
        write_json(tmp_path / name, {"samples": rows})
    (change,) = compare(tmp_path / "a.json", tmp_path / "b.json")
    assert (change.num_prompts, change.verdict) == (4, "too few prompts")
