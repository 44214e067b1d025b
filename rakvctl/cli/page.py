"""What tables have in common: a page of 80 columns, their look, and how numbers are written."""

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from io import StringIO

from rich import box
from rich.console import Console
from rich.table import Table

from rakvctl.cli.render import write_out

_WIDTH = 80


@contextmanager
def open_page() -> Iterator[Console]:
    """What is printed on it goes to stdout in one piece: in colour on a terminal, else plain and 80 columns wide."""
    text = StringIO()
    is_terminal = sys.stdout.isatty()
    yield Console(file=text, force_terminal=is_terminal, width=None if is_terminal else _WIDTH, highlight=False)
    write_out(sys.stdout, text.getvalue())


def make_table(title: str, columns: list[str]) -> Table:
    table = Table(title=title, title_justify="left", title_style="", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def number(value: float) -> str:
    """Three digits, or all of them before the point, unless they are so many that no column holds them."""
    if math.isnan(value):
        return "-"
    if value >= 1e6:
        return f"{value:.0e}"
    if isinstance(value, int) or value >= 100:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 10 or value == 0 else f"{value:.2f}"


def counted(number: int, noun: str, nouns: str | None = None) -> str:
    """So many of a thing, such as `1 thread` or `2 threads`; `nouns`: the plural where it is irregular."""
    return f"{number} {noun if number == 1 else nouns or noun + 's'}"
