"""What `--stats` and the progress line show: totals over the prompts of one call."""

import random
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Console
from rich.table import Column

from rakvctl.cli.page import FittingTable, counted
from rakvctl.core.types import Completion


class _Sample:
    """At most so many of the values that came, each as likely as any other: a median in constant memory."""

    _SIZE = 10_000

    def __init__(self) -> None:
        self._values: list[float] = []
        self._num_seen = 0
        self._random = random.Random(0)  # noqa: S311 - not for secrets

    def add(self, value: float) -> None:
        self._num_seen += 1
        if len(self._values) < self._SIZE:
            self._values.append(value)
        elif (place := self._random.randrange(self._num_seen)) < self._SIZE:
            self._values[place] = value

    @property
    def median(self) -> float | None:
        return statistics.median(self._values) if self._values else None


class _Hits:
    """Stored prefixes that were found in one place."""

    def __init__(self) -> None:
        self.num = 0
        self.num_matched = 0
        self.num_reused = 0
        self.restore_ms = _Sample()

    def add(self, completion: Completion) -> None:
        self.num += 1
        self.num_matched += completion.num_matched_tokens
        self.num_reused += completion.num_reused_tokens
        if completion.num_reused_tokens:
            self.restore_ms.add(completion.restore_ms)


class Totals:
    """Running totals, in memory that does not grow with them; times in milliseconds."""

    def __init__(self) -> None:
        self.num_done = 0
        self.num_failed = 0
        self.num_tokens = 0
        self._total_ms = 0.0
        self._num_prompt_tokens = 0
        self._num_reused_tokens = 0
        self._num_rounds = 0
        self._num_draft_tokens = 0
        self._num_accepted_tokens = 0
        self._num_rescored_tokens = 0
        self._ttft_ms = _Sample()
        self._tpot_ms = _Sample()
        self._rounds = Counter[int]()
        # By who served, None for this process.
        self._actions: dict[int | None, Counter[str]] = {}
        self._hits: dict[str, _Hits] = {}

    def add(self, completion: Completion, worker: int | None = None) -> None:
        """Count a completion."""
        self.num_done += 1
        self.num_tokens += len(completion.token_ids)
        self._total_ms += completion.total_ms
        self._num_prompt_tokens += completion.num_prompt_tokens
        self._num_reused_tokens += completion.num_reused_tokens
        self._num_rounds += completion.num_rounds
        self._num_draft_tokens += completion.num_draft_tokens
        self._num_accepted_tokens += completion.num_accepted_tokens
        self._num_rescored_tokens += completion.num_rescored_tokens
        if completion.source is not None:
            self._hits.setdefault(completion.source, _Hits()).add(completion)
        self._ttft_ms.add(completion.ttft_ms)
        if completion.tpot_ms is not None:
            self._tpot_ms.add(completion.tpot_ms)
        self._rounds.update(completion.rounds_by_draft_len)
        action = completion.decision.action
        self._actions.setdefault(worker, Counter())[f"r={int(action.reuse)} k={action.draft_len}"] += 1

    @property
    def tokens_per_s(self) -> float:
        """New tokens a second of serving, prefill included; 0 where nothing was served."""
        return self.num_tokens / self._total_ms * 1e3 if self._total_ms else 0.0

    def show(self, console: Console, places: Mapping[int | None, str]) -> None:
        """Print them as a table; `places`: what each worker runs on, this process under None."""
        table = FittingTable(Column(no_wrap=True), Column(), show_header=False, box=None, padding=(0, 2, 0, 0))
        for name, value in [*self._place_rows(places), *self._rows()]:
            table.add_row(name, value)
        console.print(table)

    def _place_rows(self, places: Mapping[int | None, str]) -> list[tuple[str, str]]:
        """The engine; of several workers those together that run on the same, and which actions were taken there."""
        if None in places:
            return [("engine", places[None])]
        rows = []
        for place in dict.fromkeys(places.values()):
            workers = [worker for worker, its_place in places.items() if its_place == place]
            rows += [(counted(len(workers), "worker"), place), ("", _counts(self._actions_of(workers)))]
        return rows

    def _actions_of(self, workers: Iterable[int | None]) -> Counter[str]:
        return sum((self._actions.get(worker, Counter()) for worker in workers), Counter[str]())

    def _reuse_rows(self) -> list[tuple[str, str]]:
        """Where stored prefixes were found, and what it took to restore them."""
        rows = []
        for source, hits in sorted(self._hits.items()):
            text = f"{counted(hits.num, 'hit')}, {hits.num_matched} tokens matched"
            if hits.restore_ms.median is not None:
                text += f", {hits.num_reused} cloned, {hits.restore_ms.median:.1f} ms each (median)"
            rows.append((f"found in {source}", text))
        return rows

    def _rows(self) -> list[tuple[str, str]]:
        rows = [("prompts", f"{self.num_done} done, {self.num_failed} failed")]
        if not self.num_done:
            return rows
        each = " each worker" if None not in self._actions else ""
        rows += [
            ("actions", _counts(self._actions_of(self._actions))),
            ("prompt tokens", f"{self._num_prompt_tokens}, {self._num_reused_tokens} reused"),
            *self._reuse_rows(),
            ("new tokens", f"{self.num_tokens}, {self.tokens_per_s:.1f} tokens/s{each}"),
            ("time to first token", f"{self._ttft_ms.median:.1f} ms (median)"),
        ]
        if self._tpot_ms.median is not None:
            rows.append(("time per token after it", f"{self._tpot_ms.median:.2f} ms (median)"))
        if self._num_draft_tokens:
            share = self._num_accepted_tokens / self._num_draft_tokens
            length = (self.num_tokens - self.num_done) / self._num_rounds
            rows.append(
                ("drafted tokens", f"{self._num_draft_tokens}, {share:.1%} accepted, {length:.2f} tokens a round")
            )
            rows.append(("rounds by drafted tokens", _counts(self._rounds)))
        if self._num_rescored_tokens:
            rows.append(("near ties", f"{self._num_rescored_tokens} tokens chosen by a step of their own"))
        return rows


def _counts(counts: Counter[Any]) -> str:
    """What was how often, such as `r=0 k=0 (3), r=1 k=0 (9)`."""
    return ", ".join(f"{what} ({count})" for what, count in sorted(counts.items())) or "nothing yet"
