"""What tables have in common: the page that they are printed on, their look, and how numbers are written."""

import math
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from io import StringIO
from typing import Any

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Column, Table
from rich.text import Text

from rakvctl.cli.render import write_out

# Columns where neither a terminal nor the variable COLUMNS says how many.
_WIDTH = 80
# Columns that no table fills.
_UNBOUNDED = 100_000


class FittingTable(Table):
    """A table that becomes a list of `name: value` lines, a block a row, where the page is too narrow for it.

    Without a header each row is one such line, of which the first column is the name.
    Columns that wrap may do so between words: no word and no number is ever cut.
    """

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The table if the page has room for it, else the list."""
        natural = self.__rich_measure__(console, options.update_width(_UNBOUNDED)).maximum
        if natural - sum(_num_spare(column) for column in self.columns) <= options.max_width:
            yield from super().__rich_console__(console, options)
        else:
            yield from self._list()

    def _list(self) -> Iterator[Text]:
        if self.title:
            yield Text(str(self.title))
        cells = zip(*(column.cells for column in self.columns), strict=True)
        for row, values in zip(self.rows, cells, strict=True):
            if not self.show_header:
                yield Text(": ".join(str(value) for value in values if value), style=row.style or "")
                continue
            yield Text("")
            for column, value in zip(self.columns, values, strict=True):
                name = " ".join(str(column.header).split()).removesuffix(":")
                if value:
                    yield Text(f"{name}: {value}" if name else str(value), style=row.style or "")
        if self.show_header:
            yield Text("")


def _num_spare(column: Column) -> int:
    """By how much a column can be narrower than its longest line and still hold its longest word."""
    lines = [line for cell in (column.header, *column.cells) for line in str(cell).splitlines()]
    words = lines if column.no_wrap else [word for line in lines for word in line.split()]
    return max(map(cell_len, lines), default=0) - max(map(cell_len, words), default=0)


@contextmanager
def open_page() -> Iterator[Console]:
    """What is printed on it goes to stdout in one piece: in colour on a terminal, else plain.

    It is as wide as the variable COLUMNS says, or else the terminal; without either it has 80 columns.
    """
    text = StringIO()
    width = shutil.get_terminal_size((_WIDTH, 0)).columns
    yield _plain_console(file=text, force_terminal=sys.stdout.isatty(), width=width)
    write_out(sys.stdout, text.getvalue())


def error_console() -> Console:
    """What is printed on it goes to stderr."""
    return _plain_console(stderr=True)


def _plain_console(**options: Any) -> Console:
    """A console for texts that users and files bring along: what looks like markup in them is text."""
    return Console(**options, markup=False, emoji=False, highlight=False)


def make_table(title: str, columns: list[str]) -> Table:
    """A table of columns that do not wrap."""
    table = FittingTable(title=title, title_justify="left", title_style="", box=box.SIMPLE_HEAD, pad_edge=False)
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
