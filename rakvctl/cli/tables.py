"""Profiles and cost tables as people read them, in 80 columns."""

import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import StringIO
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rakvctl.cli.render import write_out
from rakvctl.core.cost import CostModel, alpha_for
from rakvctl.core.profile import HardwareProfile
from rakvctl.core.types import CostBreakdown, Decision, Features

if TYPE_CHECKING:
    from rakvctl.measure.check import Drift

_MIB = 2**20
_WIDTH = 80


def show_costs(decision: Decision, features: Features, costs: CostModel) -> None:
    """The table C(k, r), the chosen action marked, and why others cannot be taken."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=0)
    for name in ("", "reuse", "k", "clone", "prefill", "draft\nprefill", "rounds", "draft", "verify", "mem"):
        table.add_column(name, justify="left" if name in ("", "reuse") else "right")
    for name in ("total\nms", "ms a\ntoken", "cross-\nover"):
        table.add_column(name, justify="right")
    last_without_reuse = max(
        (row.action for row in decision.table if not row.action.reuse), key=lambda action: action.draft_len
    )
    for row in decision.table:
        chosen = row.action == decision.action
        style = "bold green" if chosen else "dim" if row.infeasible else ""
        table.add_row(*_cells(row, features, costs, chosen), style=style, end_section=row.action == last_without_reuse)
    with _page() as page:
        page.print(_heading(features))
        page.print(table)
        for reason, actions in _reasons(decision.table).items():
            page.print(f"  not possible: {actions}: {reason}", style="dim")
        page.print(_verdict(decision))


def _heading(features: Features) -> str:
    reused = f", {features.num_cloned_tokens} of them stored" if features.num_cloned_tokens else ""
    return (
        f"{features.num_prompt_tokens} prompt tokens{reused}, up to {features.max_new_tokens} new ones; "
        f"alpha {features.alpha:.2f}. Times in ms."
    )


def _cells(row: CostBreakdown, features: Features, costs: CostModel, chosen: bool) -> list[str]:
    crossover = costs.crossover(row.action, features)
    parts = (row.clone_ms, row.prefill_ms, row.draft_prefill_ms, row.rounds, row.draft_ms, row.verify_ms, row.memory_ms)
    known = not math.isnan(row.total_ms)
    a_token = row.total_ms / features.max_new_tokens if features.max_new_tokens else math.nan
    return [
        "->" if chosen else "",
        "yes" if row.action.reuse else "no",
        str(row.action.draft_len),
        *(_number(part) if known else "-" for part in parts),
        _number(row.total_ms),
        _number(a_token),
        "-" if row.action.draft_len == 0 or not known else "never" if crossover is None else f"{crossover:.2f}",
    ]


def _number(value: float) -> str:
    """Three digits, or all of them before the point."""
    if math.isnan(value):
        return "-"
    if isinstance(value, int) or value >= 100:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 10 or value == 0 else f"{value:.2f}"


def _reasons(table: Sequence[CostBreakdown]) -> dict[str, str]:
    """Why actions cannot be taken, each reason once with its actions."""
    reasons: dict[str, list[str]] = {}
    for reuse in (False, True):
        rows = [row for row in table if row.action.reuse == reuse]
        for reason in dict.fromkeys(row.infeasible for row in rows if row.infeasible):
            draft_lens = [str(row.action.draft_len) for row in rows if row.infeasible == reason]
            which = "every k" if len(draft_lens) == len(rows) else f"k = {', '.join(draft_lens)}"
            reasons.setdefault(reason, []).append(f"{'with' if reuse else 'without'} reuse {which}")
    return {reason: "; ".join(actions) for reason, actions in reasons.items()}


def _verdict(decision: Decision) -> Text:
    action = decision.action
    reuse = "the stored prefix is reused" if action.reuse else "no reuse"
    draft = f"{action.draft_len} drafted a round" if action.draft_len else "no speculation"
    return Text(f"Chosen: {reuse}, {draft}: {decision.predicted_ms or 0.0:.0f} ms expected.", style="bold")


def show_profile(profile: HardwareProfile) -> None:
    """The curves, where drafting breaks even, and whether it can pay."""
    mark = profile.fingerprint
    draft = f", draft {mark.draft}" if mark.draft else ", no draft model"
    with _page() as page:
        page.print(f"{mark.target}{draft}; {mark.processor}, {mark.device}, {mark.threads} threads, {mark.dtype}")
        page.print(_rounds_table(profile))
        page.print(_prefill_table(profile))
        page.print(_limits(profile))
        page.print(
            f"Between the measured points the curves are off by {profile.fit.mape_percent:.1f} % "
            f"(Spearman {profile.fit.spearman:.3f}, {profile.fit.num_probes} held-out probes)."
        )
        page.print(Text(speculation_verdict(profile), style="bold"))


def _rounds_table(profile: HardwareProfile) -> Table:
    """One row for each number of drafted tokens, one column for each context."""
    contexts = profile.verify.contexts_tokens
    table = _table("Rounds, ms: drafting + the target's pass", ["k", *(f"after {context}" for context in contexts)])
    table.add_column("pays from\nalpha", justify="right")
    for row, width in enumerate(profile.verify.sizes_tokens):
        draft = profile.draft.propose if profile.draft and width > 1 else None
        cells = [
            _round(draft.at(width - 1, context) if draft else None, profile.verify.median_ms[row][column])
            for column, context in enumerate(contexts)
        ]
        crossover = _break_even(profile, width - 1)
        table.add_row(
            str(width - 1), *cells, "" if width == 1 else "never" if crossover is None else f"{crossover:.2f}"
        )
    return table


def _round(draft_ms: float | None, verify_ms: float) -> str:
    return _number(verify_ms) if draft_ms is None else f"{_number(draft_ms)} + {_number(verify_ms)}"


def _prefill_table(profile: HardwareProfile) -> Table:
    curve = profile.target.prefill
    table = _table("Prefill, ms", ["tokens", *(f"after {context}" for context in curve.contexts_tokens)])
    if profile.draft is not None:
        table.add_column("draft,\nafter 0", justify="right")
    table.add_column("copy from\nstore", justify="right")
    for row, size in enumerate(curve.sizes_tokens):
        draft = [_number(profile.draft.model.prefill.at(size, 0))] if profile.draft else []
        table.add_row(str(size), *map(_number, curve.median_ms[row]), *draft, _number(profile.target.clone.at(size, 0)))
    return table


def _table(title: str, columns: list[str]) -> Table:
    table = Table(title=title, title_justify="left", title_style="", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in columns:
        table.add_column(name, justify="right")
    return table


def _limits(profile: HardwareProfile) -> str:
    """How close a step is to reading all weights once."""
    weights, step_ms = profile.target.weight_bytes, profile.verify.median_ms[0][0]
    least_ms = weights / profile.memory_bytes_per_ms
    rate = profile.memory_bytes_per_ms / 1e6
    return (
        f"A step takes {_number(step_ms)} ms and reads {weights / _MIB:.0f} MiB of weights, "
        f"which memory at {rate:.1f} GB/s gives in {_number(least_ms)} ms."
    )


def speculation_verdict(profile: HardwareProfile) -> str:
    """One sentence: whether speculation can pay on this machine, and from which acceptance."""
    widths = [width - 1 for width in profile.verify.sizes_tokens if width > 1]
    crossovers = {k: alpha for k in widths if (alpha := _break_even(profile, k)) is not None}
    if not crossovers:
        return "Speculation cannot pay here: even if every drafted token were accepted, plain decoding would be faster."
    least = min(crossovers, key=lambda k: crossovers[k])
    if profile.draft is None:
        return f"No draft model; guesses that cost nothing would pay from alpha {crossovers[least]:.2f} (k = {least})."
    alpha = profile.acceptance.alpha
    pays = "so it pays" if alpha >= crossovers[least] else "so it does not pay"
    return (
        f"Speculation pays here from alpha {crossovers[least]:.2f} (k = {least}); measured alpha: {alpha:.2f}, {pays}."
    )


def _break_even(profile: HardwareProfile, draft_len: int) -> float | None:
    """The alpha at which a round of `draft_len` is as fast a token as plain steps, prompt costs apart."""
    context = profile.verify.contexts_tokens[len(profile.verify.contexts_tokens) // 2]
    draft_ms = profile.draft.propose.at(draft_len, context) if profile.draft else 0.0
    tokens = (draft_ms + profile.verify.at(draft_len + 1, context)) / profile.verify.at(1, context)
    return alpha_for(tokens, draft_len) if draft_len and tokens <= draft_len + 1 else None


def show_drifts(drifts: Sequence["Drift"]) -> None:
    """The points that were timed again."""
    table = _table("Timed again, ms", ["point", "profile", "now", "change"])
    for drift in drifts:
        point = f"{drift.point.curve}, {drift.point.size} tokens after {drift.point.context}"
        style = "bold red" if drift.is_stale else ""
        table.add_row(point, _number(drift.profile_ms), _number(drift.measured_ms), f"{drift.change:+.0%}", style=style)
    with _page() as page:
        page.print(table)


@contextmanager
def _page() -> Iterator[Console]:
    """What is printed on it goes to stdout in one piece: in colour on a terminal, else plain and 80 columns wide."""
    text = StringIO()
    is_terminal = sys.stdout.isatty()
    yield Console(file=text, force_terminal=is_terminal, width=None if is_terminal else _WIDTH, highlight=False)
    write_out(sys.stdout, text.getvalue())
