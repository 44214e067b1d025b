"""What `--stats` and the progress line show: totals over the prompts of one call."""

import statistics
from collections import Counter
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from rakvctl.cli.page import counted
from rakvctl.core.seams import EngineInfo
from rakvctl.core.types import Completion


class _Hit(NamedTuple):
    num_matched: int
    num_reused: int
    restore_ms: float


class Totals:
    """Running totals; times in milliseconds."""

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
        self._ttft_ms: list[float] = []
        self._tpot_ms: list[float] = []
        self._actions: dict[str, int] = {}
        self._rounds = Counter[int]()
        self._hits: dict[str, list[_Hit]] = {}

    def add(self, completion: Completion) -> None:
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
            hit = _Hit(completion.num_matched_tokens, completion.num_reused_tokens, completion.restore_ms)
            self._hits.setdefault(completion.source, []).append(hit)
        self._ttft_ms.append(completion.ttft_ms)
        if completion.tpot_ms is not None:
            self._tpot_ms.append(completion.tpot_ms)
        self._rounds.update(completion.rounds_by_draft_len)
        action = completion.decision.action
        label = f"r={int(action.reuse)} k={action.draft_len}"
        self._actions[label] = self._actions.get(label, 0) + 1

    @property
    def tokens_per_s(self) -> float:
        """New tokens a second of serving, prefill included; 0 where nothing was served."""
        return self.num_tokens / self._total_ms * 1e3 if self._total_ms else 0.0

    def show(self, console: Console, engine: EngineInfo) -> None:
        """Print them as a table, with the engine that served."""
        table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
        threads = counted(engine.num_threads, "thread")
        served = ("engine", f"{engine.backend}; {engine.dtype} on {engine.device}, {threads}; {engine.versions}")
        for name, value in [served, *self._rows()]:
            table.add_row(name, value)
        console.print(table)

    def _reuse_rows(self) -> list[tuple[str, str]]:
        """Where stored prefixes were found, and what it took to restore them."""
        rows = []
        for source, hits in sorted(self._hits.items()):
            text = f"{counted(len(hits), 'hit')}, {sum(hit.num_matched for hit in hits)} tokens matched"
            times = [hit.restore_ms for hit in hits if hit.num_reused]
            if times:
                num_reused = sum(hit.num_reused for hit in hits)
                text += f", {num_reused} cloned, {statistics.median(times):.1f} ms each (median)"
            rows.append((f"found in {source}", text))
        return rows

    def _rows(self) -> list[tuple[str, str]]:
        rows = [("prompts", f"{self.num_done} done, {self.num_failed} failed")]
        if not self.num_done:
            return rows
        actions = ", ".join(f"{label} ({count})" for label, count in sorted(self._actions.items()))
        rows += [
            ("actions", actions),
            ("prompt tokens", f"{self._num_prompt_tokens}, {self._num_reused_tokens} reused"),
            *self._reuse_rows(),
            ("new tokens", f"{self.num_tokens}, {self.tokens_per_s:.1f} tokens/s"),
            ("time to first token", f"{statistics.median(self._ttft_ms):.1f} ms (median)"),
        ]
        if self._tpot_ms:
            rows.append(("time per token after it", f"{statistics.median(self._tpot_ms):.2f} ms (median)"))
        if self._num_draft_tokens:
            share = self._num_accepted_tokens / self._num_draft_tokens
            length = (self.num_tokens - self.num_done) / self._num_rounds
            rows.append(
                ("drafted tokens", f"{self._num_draft_tokens}, {share:.1%} accepted, {length:.2f} tokens a round")
            )
            counts = ", ".join(f"{draft_len} ({count})" for draft_len, count in sorted(self._rounds.items()))
            rows.append(("rounds by drafted tokens", counts))
        if self._num_rescored_tokens:
            rows.append(("near ties", f"{self._num_rescored_tokens} tokens chosen by a step of their own"))
        return rows
