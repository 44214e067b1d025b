"""The three studies of `bench`: what each runs, and what it makes of its runs."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from rakvctl.cli import bench_tables, render
from rakvctl.cli.bench import BenchOptions
from rakvctl.core.errors import UsageError
from rakvctl.core.loading import RuntimeOptions
from rakvctl.core.pair import ModelPair
from rakvctl.core.profile import HardwareProfile
from rakvctl.measure import plots, report, results
from rakvctl.measure.arms import Arm, PolicyArm
from rakvctl.measure.bench import REFERENCE, Bench, Mismatch, Sample
from rakvctl.measure.controller import ControllerStudy
from rakvctl.measure.peers import default_peers, make_peers
from rakvctl.measure.sensitivity import SensitivityRun, SensitivityStudy, crossovers, medians
from rakvctl.measure.tasks import controller_tasks, encode_all, make_tasks
from rakvctl.measure.trials import ControllerRun, num_unequal
from rakvctl.measure.workloads import Workload

Run = TypeVar("Run")


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What some runs say: for `results.json`, as a table, on the terminal and as plots in a folder.

    `difference`: what to say where an output differs that may not.
    """

    title: str
    record: dict[str, Any]
    rows: Sequence[Mapping[str, str]]
    show: Callable[[], None]
    plot: Callable[[Path], None]
    difference: str | None = None


@dataclass(frozen=True, slots=True)
class Study(Generic[Run]):
    """Runs, made as they are asked for; how many there will be; and what to make of any number of them."""

    runs: Iterator[Run]
    num_runs: int
    sum_up: Callable[[list[Run]], Finding]


def baselines(
    pair: ModelPair,
    profile: HardwareProfile,
    workloads: Sequence[Workload],
    runtime_options: RuntimeOptions,
    options: BenchOptions,
) -> Study[Sample]:
    """All arms on all prompts. Raises UsageError where no prompt is short enough for the model."""
    arms = _arms(pair, profile, runtime_options, options)
    tasks = list(make_tasks(pair.codec, workloads, options.hits, options.max_new_tokens, pair.target.max_positions))
    if not tasks:
        raise UsageError("no prompt is short enough for the model", "lower -n, or give other workloads")
    bench = Bench(arms, pair.target, repeats=options.repeats, seed=options.seed, clock=time.perf_counter)

    def runs() -> Iterator[Sample]:
        bench.warm_up(tasks[0].task)
        yield from bench.run(tasks)

    def sum_up(samples: list[Sample]) -> Finding:
        summaries = results.summarize(samples)
        return Finding(
            title="Baselines",
            record={
                "arms": [arm.name for arm in arms],
                "summary": [asdict(summary) for summary in summaries],
                "overhead_ms": bench.overhead_ms,
                "mismatches": [{**asdict(mismatch), "margin": mismatch.margin} for mismatch in bench.mismatches],
                "samples": [results.sample_record(sample) for sample in samples],
            },
            rows=report.summary_rows(summaries),
            show=lambda: bench_tables.show_baselines(summaries, bench.mismatches, bench.overhead_ms),
            plot=lambda folder: plots.plot_latency(summaries, folder),
            difference=_difference(_failures(bench.mismatches, pair, profile)),
        )

    return Study(runs(), len(tasks) * len(arms) * options.repeats, sum_up)


def _must_be_equal(pair: ModelPair, profile: HardwareProfile) -> bool:
    """Whether no output may differ; where passes of other widths round otherwise, differences are counted only."""
    return pair.target.info.dtype == "float32" or profile.logit_difference == 0.0


def _failures(mismatches: Sequence[Mismatch], pair: ModelPair, profile: HardwareProfile) -> list[Mismatch]:
    """The mismatches that may not be; a peer on llama.cpp computes in its own way, whatever ours is."""
    if not _must_be_equal(pair, profile):
        return []
    return [mismatch for mismatch in mismatches if not mismatch.arm.startswith("llama-cpp")]


def _difference(mismatches: Sequence[Mismatch]) -> str | None:
    """The first mismatch, in words."""
    if not mismatches:
        return None
    first = mismatches[0]
    margin = "" if first.margin is None else f", whose logits are {first.logit:.6g} and {first.expected_logit:.6g}"
    return (
        f"{len(mismatches)} outputs differ from plain decoding's: {first.arm} on {first.prompt_id} at "
        f"token {first.position}: {first.token} for {first.expected}{margin}"
    )


def _unequal(count: int) -> str | None:
    return f"{count} outputs differ from plain decoding's" if count else None


def _arms(
    pair: ModelPair, profile: HardwareProfile, runtime_options: RuntimeOptions, options: BenchOptions
) -> list[Arm]:
    names = list(dict.fromkeys([REFERENCE, *options.policies]))
    drafting = [name for name in names if name.startswith(("spec-", "joint-"))]
    if drafting and not pair.draft_name:
        render.print_note(f"no draft model: {', '.join(drafting)} are left out")
        names = [name for name in names if name not in drafting]
    policies: list[Arm] = [PolicyArm(pair, name, profile, time.perf_counter) for name in names]
    return [
        *policies,
        *make_peers(_peers(runtime_options, options), pair, runtime_options, time.perf_counter, render.print_note),
    ]


def _peers(runtime_options: RuntimeOptions, options: BenchOptions) -> list[str]:
    return default_peers(runtime_options) if options.peers is None else options.peers


def controller(
    pair: ModelPair, profile: HardwareProfile, workloads: Sequence[Workload], options: BenchOptions
) -> Study[ControllerRun]:
    """Every action on `options.limit` requests."""
    tasks = list(controller_tasks(pair.codec, workloads, options.limit, options.seed, pair.target.max_positions))
    study = ControllerStudy(
        _endless(pair), profile, repeats=options.repeats, seed=options.seed, clock=time.perf_counter
    )

    def sum_up(runs: list[ControllerRun]) -> Finding:
        rows = report.controller_rows(runs)
        unequal = num_unequal(runs)
        return Finding(
            title="Controller",
            record=report.controller_record(runs),
            rows=rows,
            show=lambda: bench_tables.show_rows("The controller against every action", rows),
            plot=lambda folder: plots.plot_predictions(runs, folder),
            difference=_unequal(unequal) if _must_be_equal(pair, profile) else None,
        )

    return Study(study.run(tasks), len(tasks), sum_up)


def sensitivity(
    pair: ModelPair, profile: HardwareProfile, workloads: Sequence[Workload], options: BenchOptions
) -> Study[SensitivityRun]:
    """Every k at every acceptance, on a pair with a draft model."""
    prompts = [prompt for workload in workloads for _, prompt in encode_all(pair.codec, workload)]
    prompts = prompts[: options.limit]
    study = SensitivityStudy(
        _endless(pair), profile, options.max_new_tokens, seed=options.seed, clock=time.perf_counter
    )

    def sum_up(runs: list[SensitivityRun]) -> Finding:
        points = medians(runs)
        found = crossovers(points)
        rows = report.crossover_rows(found)
        unequal = sum(not run.equal for run in runs)
        return Finding(
            title="Sensitivity",
            record={"summary": [asdict(row) for row in found], "samples": [asdict(run) for run in runs]},
            rows=rows,
            show=lambda: bench_tables.show_rows("The least alpha from which drafting pays", rows),
            plot=lambda folder: plots.plot_sensitivity(points, folder),
            difference=_unequal(unequal) if _must_be_equal(pair, profile) else None,
        )

    return Study(study.run(prompts), len(prompts) * len(study.cells), sum_up)


def _endless(pair: ModelPair) -> ModelPair:
    """The same pair without end tokens: every request makes all its tokens, so that actions can be compared."""
    return replace(pair, codec=replace(pair.codec, end_token_ids=frozenset()))
