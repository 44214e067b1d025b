"""What `bench` does once its options are read: load, run the study, write its files, show its summary."""

import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, TypeVar

from rakvctl.cli import bench_studies, progress, render
from rakvctl.cli.bench import BenchOptions
from rakvctl.cli.bench import Study as StudyName
from rakvctl.cli.bench_studies import Finding, Study
from rakvctl.core.errors import UsageError
from rakvctl.core.loading import RuntimeOptions, load_pair, with_near_tie, with_successors
from rakvctl.core.profile import HardwareProfile
from rakvctl.measure import plots, report
from rakvctl.measure.ready import fitting_profile
from rakvctl.measure.tasks import HITS
from rakvctl.measure.workloads import Workload

Run = TypeVar("Run")
_INTERRUPTED = 130
# What has been measured is written as often as this, so that a run that is killed loses little.
_SAVE_EVERY_S = 60.0
_PLOTS = {
    StudyName.BASELINES: plots.LATENCY,
    StudyName.CONTROLLER: plots.PREDICTIONS,
    StudyName.SENSITIVITY: plots.SENSITIVITY,
}


def run_bench(workloads: Sequence[Workload], runtime_options: RuntimeOptions, options: BenchOptions) -> int:
    """Run one study; the exit code is 1 where an output differed, 130 where the user interrupted it."""
    unknown = [hit for hit in options.hits if hit not in HITS]
    if unknown or not options.hits:
        raise UsageError(f"there is no hit {', '.join(unknown)}", f"choose from {', '.join(HITS)}")
    report.prepare_folder(options.output_dir, plots.plot_files(_PLOTS[options.study]) if options.plot else [])
    pair = load_pair(runtime_options, render.print_note)
    if options.study is StudyName.SENSITIVITY and pair.draft is None:
        raise UsageError("there is no draft model whose acceptance could be varied", "name one with --draft")
    with progress.measuring(shown=True) as on_progress:
        profile = fitting_profile(pair, runtime_options, render.print_note, on_progress)
    pair = with_near_tie(with_successors(pair, render.print_note), runtime_options.policy, profile)
    if options.study is StudyName.BASELINES:
        return _carry_out(bench_studies.baselines(pair, profile, workloads, runtime_options, options), profile, options)
    if options.study is StudyName.CONTROLLER:
        return _carry_out(bench_studies.controller(pair, profile, workloads, options), profile, options)
    return _carry_out(bench_studies.sensitivity(pair, profile, workloads, options), profile, options)


def _carry_out(study: Study[Run], profile: HardwareProfile, options: BenchOptions) -> int:
    """Run a study to its end or to the user's interrupt; what it found until then is written and shown."""
    runs: list[Run] = []
    interrupted, saved = False, time.monotonic()
    with progress.measuring(shown=True) as on_progress:
        try:
            on_progress("warming up", 0.0)
            for run in study.runs:
                runs.append(run)
                on_progress("running", len(runs) / study.num_runs)
                if time.monotonic() - saved > _SAVE_EVERY_S:
                    _save(study.sum_up(runs), profile, options)
                    saved = time.monotonic()
        except KeyboardInterrupt:
            interrupted = True
    if not runs:
        return _INTERRUPTED
    finding = study.sum_up(runs)
    record = _save(finding, profile, options)
    if options.plot:
        finding.plot(options.output_dir)
    if options.as_json:
        render.print_json(record)
    else:
        finding.show()
    if finding.difference:
        render.print_error(finding.difference, f"see {options.output_dir / report.RESULTS}")
    return _INTERRUPTED if interrupted else int(finding.difference is not None)


def _save(finding: Finding, profile: HardwareProfile, options: BenchOptions) -> dict[str, Any]:
    """Write the files of a study; returns what `results.json` holds."""
    record = {
        "study": options.study.value,
        "environment": asdict(profile.fingerprint),
        "profile": asdict(profile),
        "options": {name: str(value) for name, value in asdict(options).items()},
        **finding.record,
    }
    report.write_json(options.output_dir / report.RESULTS, record)
    report.write_report(options.output_dir / report.REPORT, profile, finding.title, finding.rows)
    return record
