"""The table C(k, r) as people read it."""

import math
from collections.abc import Sequence
from itertools import chain
from typing import get_args

from rich import box
from rich.text import Text

from rakvctl.cli.page import FittingTable, counted, make_table, number, open_page
from rakvctl.core.cost import CostModel
from rakvctl.core.rounds import RoundChoice
from rakvctl.core.types import Agreement, CostBreakdown, Decision, Features


def show_costs(decision: Decision, features: Features, costs: CostModel) -> None:
    """The table C(k, r), the chosen action marked, and why others cannot be taken."""
    table = FittingTable(box=box.SIMPLE_HEAD, pad_edge=False, padding=0)
    for name in ("", "reuse", "k", "clone", "prefill", "draft\nprefill", "rounds", "draft", "verify", "mem"):
        table.add_column(name, justify="left" if name in ("", "reuse") else "right")
    for name in ("total\nms", "ms a\ntoken", "cross-\nover"):
        table.add_column(name, justify="right")
    last_without_reuse = max(
        (row.action for row in decision.table if not row.action.reuse), key=lambda action: action.draft_len
    )
    for row in decision.table:
        chosen = is_chosen(row, decision)
        style = "bold green" if chosen else "dim" if row.infeasible else ""
        table.add_row(*_cells(row, features, costs, chosen), style=style, end_section=row.action == last_without_reuse)
    with open_page() as page:
        page.print(_heading(features))
        page.print(table)
        for reason, actions in _reasons(decision.table).items():
            page.print(f"  not possible: {actions}: {reason}", style="dim")
        page.print(_verdict(decision))


def show_rounds(choices: Sequence[RoundChoice], context: int) -> None:
    """What `auto` drafts in a round without a draft model, by how many tokens matched and what speaks for the next."""
    nothing, *found = choices
    habit = next(choice for choice in found if choice.agreement == "habit")
    agreements = [name for name in get_args(Agreement) if name != "habit"]
    heads = chain.from_iterable((f"{name}:\nalpha", "k", "ms") for name in agreements)
    table = make_table("", ["matched", *heads])
    cells = {
        (choice.num_matched_tokens, choice.agreement): (
            f"{choice.alpha:.2f}", str(choice.draft_len), number(choice.ms_per_token)
        )
        for choice in found
    }  # fmt: skip
    for matched in dict.fromkeys(choice.num_matched_tokens for choice in found):
        table.add_row(str(matched), *chain.from_iterable(cells[matched, name] for name in agreements))
    with open_page() as page:
        page.print(f"\nOf tokens that it looks up, auto drafts in a round after {context} tokens:")
        page.print(table)
        page.print(
            f"Where nothing is found, a token takes {number(nothing.ms_per_token)} ms, or "
            f"{number(habit.ms_per_token)} where it is known what mostly follows (alpha {habit.alpha:.2f}, k = "
            f"{habit.draft_len})."
        )


def is_chosen(row: CostBreakdown, decision: Decision) -> bool:
    """Whether an action is the one to take; of those that cannot be taken, none is."""
    return row.action == decision.action and row.infeasible is None


def _heading(features: Features) -> str:
    reused = f", {features.num_cloned_tokens} of them stored" if features.num_cloned_tokens else ""
    prompt, new = counted(features.num_prompt_tokens, "prompt token"), counted(features.max_new_tokens, "new one")
    return f"{prompt}{reused}, up to {new}; alpha {features.alpha:.2f}. Times in ms."


def _cells(row: CostBreakdown, features: Features, costs: CostModel, chosen: bool) -> list[str]:
    crossover = costs.crossover(row.action, features)
    parts = (row.clone_ms, row.prefill_ms, row.draft_prefill_ms, row.rounds, row.draft_ms, row.verify_ms, row.memory_ms)
    known = not math.isnan(row.total_ms)
    a_token = row.total_ms / features.max_new_tokens if features.max_new_tokens else math.nan
    return [
        "->" if chosen else "",
        "yes" if row.action.reuse else "no",
        str(row.action.draft_len),
        *(number(part) if known else "-" for part in parts),
        number(row.total_ms),
        number(a_token),
        "-" if row.action.draft_len == 0 or not known else "never" if crossover is None else f"{crossover:.2f}",
    ]


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
    if not any(is_chosen(row, decision) for row in decision.table):
        return Text("None of it is possible as things are; generate would try plain decoding.", style="bold")
    reuse = "the stored prefix is reused" if action.reuse else "no reuse"
    draft = f"{action.draft_len} drafted a round" if action.draft_len else "no speculation"
    return Text(f"Chosen: {reuse}, {draft}: {decision.predicted_ms or 0.0:.0f} ms expected.", style="bold")
