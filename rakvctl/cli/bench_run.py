"""What `bench` does once its options are read: load, run the study, write its files, show its summary."""

import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from rakvctl.cli import bench_tables, progress, render
from rakvctl.cli.bench import BenchOptions, Study
from rakvctl.core.errors import RakvError, UsageError
from rakvctl.core.loading import RuntimeOptions, load_pair
from rakvctl.core.models import find_model
from rakvctl.core.pair import ModelPair
from rakvctl.core.profile import HardwareProfile
from rakvctl.measure import plots, report, results
from rakvctl.measure.arms import Arm, PolicyArm
from rakvctl.measure.bench import REFERENCE, Bench, Sample
from rakvctl.measure.controller import ControllerStudy, Trial, summarize
from rakvctl.measure.peers import make_peers
from rakvctl.measure.ready import fitting_profile
from rakvctl.measure.sensitivity import crossovers, sensitivity
from rakvctl.measure.tasks import HITS, controller_tasks, encode, make_tasks
from rakvctl.measure.workloads import Workload

_INTERRUPTED = 130


def run_bench(workloads: Sequence[Workload], runtime_options: RuntimeOptions, options: BenchOptions) -> int:
    """Run one study; the exit code is 1 where an output differed, 130 where the user interrupted it."""
    unknown = [hit for hit in options.hits if hit not in HITS]
    if unknown or not options.hits:
        raise UsageError(f"there is no hit {', '.join(unknown)}", f"choose from {', '.join(HITS)}")
    pair = load_pair(runtime_options, render.print_note)
    with progress.measuring(shown=True) as on_progress:
        profile = fitting_profile(pair, runtime_options.profile, render.print_note, on_progress)
    try:
        options.output_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RakvError(
            f"cannot write to {options.output_dir}: {error.strerror}", "give --output-dir a writable directory"
        ) from error
    if options.study is Study.BASELINES:
        return _baselines(pair, profile, workloads, runtime_options, options)
    if options.study is Study.CONTROLLER:
        return _controller(pair, profile, workloads, options)
    return _sensitivity(pair, profile, workloads, options)


def _baselines(
    pair: ModelPair,
    profile: HardwareProfile,
    workloads: Sequence[Workload],
    runtime_options: RuntimeOptions,
    options: BenchOptions,
) -> int:
    arms = _arms(pair, profile, runtime_options, options)
    tasks = list(make_tasks(pair.codec, workloads, options.hits, options.max_new_tokens, pair.target.max_positions))
    if not tasks:
        raise UsageError("no prompt is short enough for the model", "lower -n, or give other workloads")
    bench = Bench(arms, repeats=options.repeats, seed=options.seed, clock=time.perf_counter)
    samples: list[Sample] = []
    interrupted = False
    with progress.measuring(shown=True) as on_progress:
        try:
            on_progress("warming up", 0.0)
            bench.warm_up(tasks[0].task)
            expected = len(tasks) * len(arms) * options.repeats
            for sample in bench.run(tasks):
                samples.append(sample)
                on_progress("running", len(samples) / expected)
        except KeyboardInterrupt:
            interrupted = True
    if not samples:
        return _INTERRUPTED
    summaries = results.summarize(samples)
    record = {
        "arms": [arm.name for arm in arms],
        "summary": [asdict(summary) for summary in summaries],
        "overhead_ms": bench.overhead_ms,
        "samples": [results.sample_record(sample) for sample in samples],
    }
    rows = report.summary_rows(summaries)
    _write(options, profile, record, {"Baselines": rows})
    if options.plot:
        plots.plot_latency(summaries, options.output_dir)
    if not options.as_json:
        bench_tables.show_baselines(summaries, bench.overhead_ms)
    for mismatch in bench.mismatches[:1]:
        render.print_error(
            f"{len(bench.mismatches)} outputs differ from plain decoding's: {mismatch.arm} on {mismatch.prompt.id} at "
            f"token {mismatch.position}: {mismatch.token} for {mismatch.expected}",
            f"see {options.output_dir / 'results.json'}",
        )
    return _INTERRUPTED if interrupted else 1 if bench.mismatches else 0


def _arms(
    pair: ModelPair, profile: HardwareProfile, runtime_options: RuntimeOptions, options: BenchOptions
) -> list[Arm]:
    names = list(dict.fromkeys([REFERENCE, *options.policies]))
    draft_name = pair.draft_name or None
    target = find_model(runtime_options.target, "target", render.print_note)
    draft = find_model(draft_name, "draft", render.print_note) if draft_name else None
    drafting = [name for name in names if name.startswith(("spec", "joint"))]
    if drafting and draft is None:
        render.print_note(f"no draft model: {', '.join(drafting)} are left out")
        names = [name for name in names if name not in drafting]
    policies: list[Arm] = [PolicyArm(pair, name, profile, time.perf_counter) for name in names]
    peers = make_peers(options.peers, pair, target, draft, runtime_options.device, time.perf_counter)
    return [*policies, *peers]


def _controller(pair: ModelPair, profile: HardwareProfile, workloads: Sequence[Workload], options: BenchOptions) -> int:
    tasks = list(controller_tasks(pair.codec, workloads, options.limit, options.seed))
    study = ControllerStudy(
        _endless(pair), profile, repeats=options.repeats, seed=options.seed, clock=time.perf_counter
    )
    trials: list[Trial] = []
    interrupted = False
    with progress.measuring(shown=True) as on_progress:
        try:
            for trial in study.run(tasks):
                trials.append(trial)
                on_progress("running", len(trials) / len(tasks))
        except KeyboardInterrupt:
            interrupted = True
    if not trials:
        return _INTERRUPTED
    summary = summarize(trials)
    rows = report.controller_rows(summary)
    record = {"summary": asdict(summary), "samples": [report.trial_record(trial) for trial in trials]}
    _write(options, profile, record, {"Controller": rows})
    if options.plot:
        plots.plot_predictions(trials, options.output_dir)
    if not options.as_json:
        bench_tables.show_rows("The controller against every action", rows)
    return _INTERRUPTED if interrupted else 0


def _sensitivity(
    pair: ModelPair, profile: HardwareProfile, workloads: Sequence[Workload], options: BenchOptions
) -> int:
    if pair.draft is None:
        raise UsageError("there is no draft model whose acceptance could be varied", "name one with --draft")
    prompts = [encode(pair.codec, content) for workload in workloads for _, content in workload.prompts]
    with progress.measuring(shown=True) as on_progress:
        points = sensitivity(
            _endless(pair), profile, prompts[: options.limit], options.max_new_tokens,
            seed=options.seed, clock=time.perf_counter, on_progress=lambda share: on_progress("running", share),
        )  # fmt: skip
    found = crossovers(points)
    rows = report.crossover_rows(found)
    record = {"summary": [asdict(row) for row in found], "samples": [asdict(point) for point in points]}
    _write(options, profile, record, {"Sensitivity": rows})
    if options.plot:
        plots.plot_sensitivity(points, options.output_dir)
    if not options.as_json:
        bench_tables.show_rows("The least alpha from which drafting pays", rows)
    return 0


def _endless(pair: ModelPair) -> ModelPair:
    """The same pair without end tokens: every request makes all its tokens, so that actions can be compared."""
    return replace(pair, codec=replace(pair.codec, end_token_ids=frozenset()))


def _write(
    options: BenchOptions, profile: HardwareProfile, record: dict[str, Any], sections: dict[str, list[dict[str, str]]]
) -> None:
    """The files of a study; with --json the record is printed too."""
    whole = {
        "study": options.study.value,
        "environment": asdict(profile.fingerprint),
        "profile": asdict(profile),
        "options": {name: str(value) for name, value in asdict(options).items()},
        **record,
    }
    report.write_json(options.output_dir / "results.json", whole)
    report.write_report(options.output_dir / "report.md", profile, sections)
    if options.as_json:
        render.print_json(whole)
