"""The command `kv`: look at the prefixes that outlive the process, check them, clear them away."""

import os
import shlex
import time
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rakvctl.cli import interrupts, render
from rakvctl.cli.options import AsJson, KVDiskBudget, parse_bytes, parse_path
from rakvctl.cli.page import counted, make_table, open_page
from rakvctl.core.errors import RakvError, UsageError

if TYPE_CHECKING:
    from rakvctl.core.disk.rows import Row
    from rakvctl.core.disk.tier import DiskTier


class KVAction(StrEnum):
    """What to do with the directory."""

    LIST = "ls"
    STATS = "stats"
    VERIFY = "verify"
    CLEAR = "clear"


def kv(
    action: Annotated[
        KVAction,
        typer.Argument(
            help="ls: what is stored, the latest first; stats: how much; verify: read all of it and drop what is "
            "damaged; clear: forget all.",
        ),
    ],
    kv_dir: Annotated[
        Path | None,
        typer.Option(
            "--kv-dir",
            metavar="DIR",
            envvar="RAKVCTL_KV_DIR",
            parser=parse_path,
            help="The directory to look after.",
            show_default="none",
        ),
    ] = None,
    kv_disk_budget: KVDiskBudget = "4GiB",
    as_json: AsJson = False,
) -> int:
    """Look after the stored prefixes of --kv-dir."""
    if kv_dir is None:
        raise UsageError("there is no directory of stored prefixes", "name it with --kv-dir DIR or RAKVCTL_KV_DIR")
    if not os.path.isdir(kv_dir):
        raise UsageError(f"{kv_dir} is no directory", "generate makes it, with --kv-dir DIR or RAKVCTL_KV_DIR")
    from rakvctl.core.disk.places import inspect_directory
    from rakvctl.core.disk.tier import DiskTier

    problems: list[str] = []
    # A look makes and changes nothing, and nothing is there to check or clear in an empty directory.
    is_look = action in (KVAction.LIST, KVAction.STATS) or not inspect_directory(kv_dir)
    tier = DiskTier(kv_dir, parse_bytes(kv_disk_budget), problems.append, read_only=is_look)
    code = _act(tier, action, as_json) if tier.is_usable or not problems else 1
    if not tier.is_usable and problems:
        rebuild = f"rebuild its index with: rakvctl kv verify --kv-dir {shlex.quote(str(kv_dir))}"
        repair = "repair its permissions, or remove it: it only holds copies"
        raise RakvError(problems[0].partition(";")[0], rebuild if is_look else repair)
    for problem in problems:
        render.print_note(problem)
    return code


def _act(tier: "DiskTier", action: KVAction, as_json: bool) -> int:
    """Do it; the exit code."""
    interrupts.raise_from_now_on()
    if action is KVAction.VERIFY:
        return _verify(tier.verify(), len(tier.rows()), as_json)
    if action is KVAction.CLEAR:
        num_entries = tier.clear()
        if tier.is_usable or not num_entries:
            _say({"cleared": num_entries}, f"{counted(num_entries, 'entry', 'entries')} cleared", as_json)
        return 0
    rows = tier.rows()[::-1]
    num_bytes = sum(row.num_bytes for row in rows)
    if action is KVAction.STATS:
        num_texts, budget_bytes = tier.num_texts(), tier.budget_bytes
        record = {"entries": len(rows), "bytes": num_bytes, "budget_bytes": budget_bytes, "texts": num_texts}
        size = f"{num_bytes / 2**20:.1f} of {budget_bytes / 2**20:.0f} MiB"
        text = f"{counted(len(rows), 'entry', 'entries')}, {size}; {counted(num_texts, 'text')} to look up in"
        _say(record, text, as_json)
    elif as_json:
        render.print_json({"entries": [_record(row) for row in rows]})
    else:
        _show(rows)
    return 0


def _show(rows: "list[Row]") -> None:
    table = make_table("", ["key", "tokens", "MiB", "last used"])
    for row in rows:
        used = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row.last_used))
        table.add_row(row.key, str(len(row.token_ids) // 8), f"{row.num_bytes / 2**20:.1f}", used)
    with open_page() as page:
        page.print(table)


def _record(row: "Row") -> dict[str, Any]:
    return {
        "key": row.key,
        "tokens": len(row.token_ids) // 8,
        "bytes": row.num_bytes,
        "last_used": row.last_used,
    }


def _verify(problems: list[str], num_good: int, as_json: bool) -> int:
    """Say what was found; the exit code is 1 where something was damaged."""
    if as_json:
        render.print_json({"entries": num_good, "problems": problems})
    else:
        render.print_line(f"{counted(num_good, 'entry', 'entries')} as written")
    if problems:
        raise RakvError(
            f"{counted(len(problems), 'entry', 'entries')} dropped: {problems[0]}", "nothing else is to be done"
        )
    return 0


def _say(record: dict[str, int], text: str, as_json: bool) -> None:
    if as_json:
        render.print_json(record)
    else:
        render.print_line(text)
