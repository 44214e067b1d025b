"""A benchmark's files: `results.json` with every sample, and `report.md` for people."""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rakvctl.core.errors import RakvError, UsageError
from rakvctl.core.files import replace_file, to_json
from rakvctl.core.profile import HardwareProfile
from rakvctl.measure.results import ArmSummary, holds_results
from rakvctl.measure.sensitivity import Crossover
from rakvctl.measure.statistics import Interval
from rakvctl.measure.trials import ControllerRun, num_runs, num_unequal, repeat_difference, summarize, summarize_auto

RESULTS, REPORT = "results.json", "report.md"


def prepare_folder(folder: Path, plot_files: Sequence[str]) -> None:
    """Make the folder for results, report and plots, or check that the one that is there can be used.

    Files of these names are replaced beside the results of an earlier run, as they are from that run too. Raises
    UsageError where some are there without such results, RakvError where there can be no folder.
    """
    there = [name for name in (RESULTS, REPORT, *plot_files) if os.path.lexists(folder / name)]
    if there and not holds_results(folder / RESULTS):
        raise UsageError(
            f"{folder / there[0]} is there and was not written by bench",
            "give --output-dir another directory, or move the file away",
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RakvError(
            f"cannot write to {folder}: {error.strerror}", "give --output-dir a writable directory"
        ) from error


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write an object in place of what was there, all or nothing; what is no number becomes null."""
    _write(path, to_json(content, indent=1) + "\n")


def write_report(path: Path, profile: HardwareProfile, title: str, rows: Sequence[Mapping[str, str]]) -> None:
    """Write a titled Markdown table, one dict a row, under what was measured and where."""
    mark = profile.fingerprint
    lines = [
        "# rakvctl bench",
        "",
        f"{mark.target}{f' with draft {mark.draft}' if mark.draft else ''}, {mark.dtype}; {mark.processor}, "
        f"{mark.device}, {mark.threads} threads; {mark.versions}.",
        "",
        f"## {title}",
        "",
        *markdown_table(rows),
    ]
    _write(path, "\n".join(lines) + "\n")


def markdown_table(rows: Sequence[Mapping[str, str]]) -> list[str]:
    """Lines of a Markdown table; the first row's keys are its head."""
    if not rows:
        return ["(nothing)"]
    head = list(rows[0])
    rules = ["---" if index == 0 else "---:" for index in range(len(head))]
    return [_line(head), _line(rules), *(_line([row[name] for name in head]) for row in rows)]


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def summary_rows(summaries: Sequence[ArmSummary]) -> list[dict[str, str]]:
    """The table of the baselines, one row an arm and workload."""
    return [
        {
            "workload": row.workload,
            "arm": row.arm,
            "prompts": str(row.num_prompts),
            "executions": str(row.num_samples),
            "total ms": f"{row.total_ms:.0f}",
            "first token ms": number(row.ttft_ms),
            "ms a token": number(row.tpot_ms),
            "tokens/s": f"{row.tokens_per_s:.1f}",
            "speed against ar": f"{row.speedup.estimate:.2f}{interval(row.speedup, 2, ' to ')}",
            "accepted": share(row.draft_acceptance_rate),
            "reused": share(row.reused_share),
            "unequal": str(row.num_unequal),
        }
        for row in summaries
    ]


def number(value: float | None) -> str:
    """One digit after the point."""
    return "-" if value is None else f"{value:.1f}"


def interval(ratio: Interval, digits: int, to: str = "-") -> str:
    """The ends of an interval after its estimate, such as ` (0.95-1.05)`; nothing where there is none."""
    return "" if math.isnan(ratio.low) else f" ({ratio.low:.{digits}f}{to}{ratio.high:.{digits}f})"


def share(value: float | None) -> str:
    """In percent."""
    return "-" if value is None else f"{value:.0%}"


def _write(path: Path, text: str) -> None:
    try:
        replace_file(path, text.encode())
    except OSError as error:
        raise RakvError(f"cannot write {path}: {error.strerror}", "give --output-dir a writable directory") from error


def controller_rows(runs: Sequence[ControllerRun]) -> list[dict[str, str]]:
    """The figures of the controller study: as decided, as decided with the acceptance told, and the paper's."""
    trials = [run.trial for run in runs]
    here, told, auto = summarize(trials), summarize([run.told for run in runs]), summarize_auto(runs)
    noise = repeat_difference(trials)
    within = "no more than 2 % slower than the best"
    ranks = "Spearman, actions of"
    return [
        _figure("requests", str(here.num_cases), "", "-"),
        _figure("timed runs", str(num_runs(runs)), "", "3600"),
        _figure("outputs unlike plain decoding's", str(num_unequal(runs)), "", "0"),
        _figure("prediction: MAPE", f"{here.mape_percent:.1f} %", f"{told.mape_percent:.1f} %", "32.1 %"),
        _figure(f"{ranks} all requests together", f"{here.spearman:.3f}", f"{told.spearman:.3f}", "0.780"),
        _figure(f"{ranks} one request: mean", _rank(here.spearman_within_mean), _rank(told.spearman_within_mean), "-"),
        _figure(
            f"{ranks} one request: median", _rank(here.spearman_within_median), _rank(told.spearman_within_median), "-"
        ),
        _figure("best k chosen", share(here.right_k), share(told.right_k), "100 %"),
        _figure(f"k {within}", share(here.right_k_within), share(told.right_k_within), "-"),
        _figure("best action chosen", share(here.right_action), share(told.right_action), "83.3 %"),
        _figure(f"action {within}", share(here.right_action_within), share(told.right_action_within), "-"),
        _figure("mean regret", f"{here.mean_regret:.2%}", f"{told.mean_regret:.2%}", "0.32 %"),
        _figure(
            "speed against plain decoding", f"{here.mean_gain_over_plain:.2f}", f"{told.mean_gain_over_plain:.2f}", "-"
        ),
        _figure("auto: mean regret against the best action", f"{auto.mean_regret:+.2%}", "", "-"),
        _figure("auto: speed against plain decoding", f"{auto.mean_gain_over_plain:.2f}", "", "-"),
        _figure("two runs of the same differ by", "-" if noise is None else f"{noise:.1%}", "", "-"),
    ]


def _rank(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _figure(name: str, here: str, told: str, paper: str) -> dict[str, str]:
    return {"figure": name, "here": here, "alpha told": told, "paper": paper}


def controller_record(runs: Sequence[ControllerRun]) -> dict[str, Any]:
    """The controller study for `results.json`."""
    trials = [run.trial for run in runs]
    return {
        "summary": asdict(summarize(trials)),
        "summary_alpha_told": asdict(summarize([run.told for run in runs])),
        "summary_auto": asdict(summarize_auto(runs)),
        "repeat_difference": repeat_difference(trials),
        "num_runs": num_runs(runs),
        "num_unequal": num_unequal(runs),
        "samples": [_run_record(run) for run in runs],
    }


def _run_record(run: ControllerRun) -> dict[str, Any]:
    trial, told = run.trial, run.told
    return {
        "prompt_tokens": len(trial.case.prompt),
        "max_new_tokens": trial.case.max_new_tokens,
        "stored_tokens": len(trial.case.stored or ()),
        "alpha": trial.decision.alpha,
        "alpha_told": told.decision.alpha,
        "chosen": asdict(trial.decision.action),
        "chosen_alpha_told": asdict(told.decision.action),
        "auto_ms": list(run.auto_ms),
        "num_unequal": run.num_unequal,
        "actions": [
            {**asdict(action), "samples_ms": list(samples), "predicted_ms": trial.predicted_ms[action]}
            for action, samples in trial.samples_ms.items()
        ],
    }


def crossover_rows(found: Sequence[Crossover]) -> list[dict[str, str]]:
    """Measured and predicted crossover of each k."""
    return [
        {
            "k": str(row.draft_len),
            "measured": _alpha(row.measured),
            "predicted": _alpha(row.predicted),
            "apart": "-" if row.measured is None or row.predicted is None else f"{row.predicted - row.measured:+.2f}",
        }
        for row in found
    ]


def _alpha(value: float | None) -> str:
    return "never" if value is None else f"{value:.2f}"
