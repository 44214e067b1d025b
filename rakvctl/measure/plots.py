"""Pictures of what was measured and reckoned. Needs matplotlib, which only the extra `plot` installs."""

from collections.abc import Sequence
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

from rakvctl.core.cost import CostModel
from rakvctl.core.errors import RakvError
from rakvctl.core.files import replace_file
from rakvctl.core.types import Decision, Features
from rakvctl.measure.results import ArmSummary
from rakvctl.measure.sensitivity import SensitivityPoint
from rakvctl.measure.trials import ControllerRun

_NUM_ALPHAS = 201
LATENCY, PREDICTIONS, SENSITIVITY = "latency", "predictions", "sensitivity"


def plot_costs(costs: CostModel, features: Features, decision: Decision, path: Path) -> None:
    """Draw cost against alpha: a line for each k, at the chosen reuse; crossovers and the alpha in force are marked.

    Raises RakvError without matplotlib, and where the file cannot be written.
    """
    figure, axes = _figure()
    alphas = [index / (_NUM_ALPHAS - 1) for index in range(_NUM_ALPHAS)]
    for row in decision.table:
        action = row.action
        if action.reuse != decision.action.reuse or row.infeasible:
            continue
        totals = [costs.breakdown(action, replace(features, alpha=alpha)).total_ms for alpha in alphas]
        label = f"k = {action.draft_len}" if action.draft_len else "k = 0, plain"
        (line,) = axes.plot(alphas, totals, label=label, linewidth=2 if action == decision.action else 1)
        crossover = costs.crossover(action, features)
        if crossover is not None:
            at_crossover = costs.breakdown(action, replace(features, alpha=crossover)).total_ms
            axes.plot([crossover], [at_crossover], "o", color=line.get_color())
    axes.axvline(features.alpha, color="grey", linestyle=":", label=f"alpha in force: {features.alpha:.2f}")
    reuse = "with" if decision.action.reuse else "without"
    axes.set(
        xlabel="alpha: probability that a drafted token is accepted",
        ylabel="ms",
        title=f"{features.num_prompt_tokens} prompt tokens, {features.max_new_tokens} new ones, {reuse} reuse",
        xlim=(0.0, 1.0),
    )
    axes.set_ylim(bottom=0.0)
    axes.legend()
    _save(figure, path)


def plot_latency(summaries: Sequence[ArmSummary], folder: Path) -> None:
    """Draw the speed of each arm against the reference with its interval, one group a workload."""
    figure, axes = _figure()
    workloads = list(dict.fromkeys(row.workload for row in summaries))
    arms = list(dict.fromkeys(row.arm for row in summaries))
    for place, arm in enumerate(arms):
        rows = [row for row in summaries if row.arm == arm]
        at = [workloads.index(row.workload) + (place - len(arms) / 2) * 0.8 / len(arms) for row in rows]
        speeds = [row.speedup.estimate for row in rows]
        below = [row.speedup.estimate - row.speedup.low for row in rows]
        above = [row.speedup.high - row.speedup.estimate for row in rows]
        axes.errorbar(at, speeds, yerr=[below, above], fmt="o", capsize=3, label=arm)
    axes.axhline(1.0, color="grey", linewidth=1)
    axes.set_xticks(range(len(workloads)), workloads, rotation=20, ha="right")
    axes.set_ylabel("speed against plain decoding")
    axes.legend()
    _save_both(figure, folder, LATENCY)


def plot_predictions(runs: Sequence[ControllerRun], folder: Path) -> None:
    """Draw predicted against actual time of every action of every request."""
    figure, axes = _figure()
    actual = [ms for run in runs for ms in run.trial.actual_ms.values()]
    for label, trials in (("as decided", [run.trial for run in runs]), ("alpha told", [run.told for run in runs])):
        predicted = [trial.predicted_ms[action] for trial in trials for action in trial.samples_ms]
        axes.loglog(actual, predicted, ".", alpha=0.4, label=label)
    ends = [min(actual), max(actual)]
    axes.loglog(ends, ends, color="grey", linewidth=1)
    axes.set(xlabel="actual ms", ylabel="predicted ms")
    axes.legend()
    _save_both(figure, folder, PREDICTIONS)


def plot_sensitivity(points: Sequence[SensitivityPoint], folder: Path) -> None:
    """Draw measured (solid) and predicted (dotted) cost against alpha, a colour for each k."""
    figure, axes = _figure()
    for draft_len in sorted({point.draft_len for point in points}):
        line = [point for point in points if point.draft_len == draft_len]
        alphas = [point.alpha for point in line]
        (drawn,) = axes.plot(alphas, [point.actual_ms for point in line], "-o", label=f"k = {draft_len}")
        axes.plot(alphas, [point.predicted_ms for point in line], ":", color=drawn.get_color())
    axes.set(xlabel="alpha: probability that a drafted token is accepted", ylabel="ms")
    axes.legend()
    _save_both(figure, folder, SENSITIVITY)


def plot_files(name: str) -> list[str]:
    """The names of the files that a study's plot is saved to."""
    return [f"{name}.{suffix}" for suffix in ("png", "svg")]


def _save_both(figure: Any, folder: Path, name: str) -> None:
    for file_name in plot_files(name):
        _save(figure, folder / file_name)


def _figure() -> tuple[Any, Any]:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise RakvError("plots need matplotlib", "pip install 'rakvctl[plot]'") from error
    figure = Figure(figsize=(8, 5), layout="constrained")
    return figure, figure.subplots()


def _save(figure: Any, path: Path) -> None:
    drawn = BytesIO()
    figure.savefig(drawn, dpi=150, format=path.suffix.removeprefix("."))
    try:
        replace_file(path, drawn.getvalue())
    except OSError as error:
        raise RakvError(f"cannot write {path}: {error.strerror}", "give a file in a writable directory") from error
