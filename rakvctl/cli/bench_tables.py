"""The summary of a benchmark as a person takes it in at once."""

from collections.abc import Mapping, Sequence

from rakvctl.cli.page import counted, make_table, open_page
from rakvctl.measure.bench import REFERENCE, Mismatch
from rakvctl.measure.report import interval, number, share
from rakvctl.measure.results import ArmSummary, Change


def show_baselines(summaries: Sequence[ArmSummary], mismatches: Sequence[Mismatch], overhead_ms: float) -> None:
    """One table a workload, the fastest arm marked, and whether all outputs are equal."""
    with open_page() as page:
        for workload in dict.fromkeys(row.workload for row in summaries):
            rows = [row for row in summaries if row.workload == workload]
            fastest = max(rows, key=lambda row: row.speedup.estimate)
            columns = ["arm", "total\nms", "first\nms", "tokens\n/s", f"speed against {REFERENCE}", "acc.", "reused"]
            counts = counted(rows[0].num_prompts, "prompt"), counted(rows[0].num_samples, "execution")
            table = make_table(f"{workload}, {counts[0]}, {counts[1]} an arm", columns)
            for row in rows:
                speed = f"{row.speedup.estimate:.2f}{interval(row.speedup, 2)}"
                table.add_row(
                    row.arm, f"{row.total_ms:.0f}", number(row.ttft_ms), f"{row.tokens_per_s:.0f}", speed,
                    share(row.draft_acceptance_rate), share(row.reused_share),
                    style="bold green" if row is fastest else "",
                )  # fmt: skip
            page.print(table)
        page.print(_equality(mismatches))
        page.print(f"Own time beside the arms': {overhead_ms:.2f} ms.")


def _equality(mismatches: Sequence[Mismatch]) -> str:
    if not mismatches:
        return "No outputs differ from plain decoding's."
    margins = [abs(mismatch.margin) for mismatch in mismatches if mismatch.margin is not None]
    largest = f", where the two best logits lie up to {max(margins):.3g} apart" if margins else ""
    return f"{len(mismatches)} outputs differ from plain decoding's{largest}."


def show_rows(title: str, rows: Sequence[Mapping[str, str]]) -> None:
    """A plain table, of which an interrupted run may leave nothing."""
    table = make_table(title, list(rows[0]) if rows else ["(nothing)"])
    for row in rows:
        table.add_row(*row.values())
    with open_page() as page:
        page.print(table)


def show_changes(changes: Sequence[Change]) -> None:
    """What changed between two results, and whether that is more than noise."""
    table = make_table("Time of the second over the first", ["workload", "arm", "ratio", "verdict"])
    for change in changes:
        ratio = f"{change.ratio.estimate:.3f}{interval(change.ratio, 3)}"
        style = {"slower": "bold red", "faster": "bold green"}.get(change.verdict, "")
        table.add_row(change.workload, change.arm, ratio, change.verdict, style=style)
    with open_page() as page:
        page.print(table)
