"""Pictures of what was measured and reckoned. Needs matplotlib, which only the extra `plot` installs."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from rakvctl.core.cost import CostModel
from rakvctl.core.errors import RakvError
from rakvctl.core.types import Decision, Features

_NUM_ALPHAS = 201


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


def _figure() -> tuple[Any, Any]:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise RakvError("plots need matplotlib", "pip install 'rakvctl[plot]'") from error
    figure = Figure(figsize=(8, 5), layout="constrained")
    return figure, figure.subplots()


def _save(figure: Any, path: Path) -> None:
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise RakvError(f"cannot write {path}: {error.strerror}", "give a file in a writable directory") from error
