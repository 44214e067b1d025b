"""Progress on stderr, where that is a terminal."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from rakvctl.cli import interrupts
from rakvctl.cli.stats import Totals


@contextmanager
def measuring(*, shown: bool) -> Iterator[Callable[[str, float], None]]:
    """A bar with the time left, which appears when something is first measured: a stage's name and its share done.

    From then on Ctrl-C raises KeyboardInterrupt: what was begun is cleared up, and what was measured may be written.
    """
    if not (shown and sys.stderr.isatty()):
        yield lambda _stage, _share: interrupts.raise_from_now_on()
        return
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=Console(stderr=True), transient=True, redirect_stdout=False)

    def update(stage: str, share: float) -> None:
        if not bar.tasks:
            interrupts.raise_from_now_on()
            bar.start()
            bar.add_task(stage, total=1.0)
        if bar.tasks[0].description != stage:
            bar.reset(bar.tasks[0].id, description=stage)
        bar.update(bar.tasks[0].id, completed=min(1.0, share))

    try:
        yield update
    finally:
        bar.stop()


@contextmanager
def serving(totals: Totals, *, shown: bool) -> Iterator[Callable[[], None]]:
    """A line about the prompts served so far; to be called after each."""
    if not (shown and sys.stderr.isatty()):
        yield lambda: None
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, redirect_stdout=False) as bar:
        task = bar.add_task("0 prompts")

        def advance() -> None:
            failed = f", {totals.num_failed} failed" if totals.num_failed else ""
            bar.update(task, description=f"{totals.num_done} prompts{failed}, {totals.tokens_per_s:.0f} tokens/s")

        yield advance
