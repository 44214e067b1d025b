"""A benchmark's files: `results.json` with every sample, and `report.md` for people."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rakvctl.core.errors import RakvError
from rakvctl.core.files import replace_file, to_json
from rakvctl.core.profile import HardwareProfile
from rakvctl.measure.results import ArmSummary


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write an object in place of what was there, all or nothing; what is no number becomes null."""
    _write(path, to_json(content, indent=1) + "\n")


def write_report(path: Path, profile: HardwareProfile, sections: Mapping[str, Sequence[Mapping[str, str]]]) -> None:
    """Write titled Markdown tables, one dict a row, under what was measured and where."""
    mark = profile.fingerprint
    lines = [
        "# rakvctl bench",
        "",
        f"{mark.target}{f' with draft {mark.draft}' if mark.draft else ''}, {mark.dtype}; {mark.processor}, "
        f"{mark.device}, {mark.threads} threads; {mark.versions}.",
    ]
    for title, rows in sections.items():
        lines += ["", f"## {title}", "", *markdown_table(rows)]
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
            "total ms": f"{row.total_ms:.0f}",
            "first token ms": number(row.ttft_ms),
            "ms a token": number(row.tpot_ms),
            "tokens/s": f"{row.tokens_per_s:.1f}",
            "speed against ar": f"{row.speedup.estimate:.2f} ({row.speedup.low:.2f} to {row.speedup.high:.2f})",
            "accepted": share(row.draft_acceptance_rate),
            "reused": share(row.reused_share),
            "unequal": str(row.num_unequal),
        }
        for row in summaries
    ]


def number(value: float | None) -> str:
    """One digit after the point."""
    return "-" if value is None else f"{value:.1f}"


def share(value: float | None) -> str:
    """In percent."""
    return "-" if value is None else f"{value:.0%}"


def _write(path: Path, text: str) -> None:
    try:
        replace_file(path, text.encode())
    except OSError as error:
        raise RakvError(f"cannot write {path}: {error.strerror}", "give --output-dir a writable directory") from error


def environment(profile: HardwareProfile) -> dict[str, Any]:
    """The machine and the libraries, for `results.json`."""
    return asdict(profile.fingerprint)
