"""A profile as people read it, and what became of it when it was measured again."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from rakvctl.cli.page import counted, make_table, number, open_page
from rakvctl.core.cost import DRAFT_LENS, alpha_for
from rakvctl.core.profile import Curve, HardwareProfile

if TYPE_CHECKING:
    from rakvctl.measure.check import Drift

_MIB = 2**20
# As a share of a step.
_WORTH_SAYING = 0.02


def show_profile(profile: HardwareProfile) -> None:
    """The curves, how exact passes are, where drafting breaks even, and whether it can pay."""
    mark = profile.fingerprint
    draft = f", draft {mark.draft}" if mark.draft else ", no draft model"
    with open_page() as page:
        threads = counted(mark.threads, "thread")
        page.print(f"{mark.target}{draft}; {mark.processor}, {mark.device}, {threads}, {mark.dtype}")
        page.print(_rounds_table(profile))
        page.print(_prefill_table(profile))
        page.print(_limits(profile))
        page.print(
            f"Between the measured points the curves are off by {profile.fit.mape_percent:.1f} % "
            f"(Spearman {profile.fit.spearman:.3f}, {profile.fit.num_probes} held-out probes)."
        )
        if profile.logit_difference is not None:
            page.print(_exactness(profile))
        if profile.width_change_ms > _WORTH_SAYING * profile.verify.median_ms[0][0]:
            page.print(
                f"A round that drafts between plain ones takes {number(profile.width_change_ms)} ms more: the width of "
                "passes changes."
            )
        if profile.target.load is not None:
            page.print(_loading(profile.target.load, profile.target.load_cold))
        page.print(Text(speculation_verdict(profile), style="bold"))


def show_successors(num_tokens: int, vocab_size: int) -> None:
    """Of how many tokens it is known what mostly follows them."""
    with open_page() as page:
        page.print(f"What mostly follows a token is known of {num_tokens:,} of {vocab_size:,}.")


def _loading(load: Curve, load_cold: Curve | None) -> str:
    """What reading a stored prefix takes."""
    size = load.sizes_tokens[-1]
    cold = f", {number(load_cold.at(size, 0))} ms where the disk has to be read" if load_cold is not None else ""
    return f"A stored prefix of {counted(size, 'token')} is read from its file in {number(load.at(size, 0))} ms{cold}."


def _exactness(profile: HardwareProfile) -> str:
    """Whether a token's logits depend on the pass that computes them."""
    if not profile.logit_difference:
        return "A token's logits are the same bits in every pass."
    return (
        f"A token's logits differ from pass to pass by up to {profile.logit_difference:.2g}: plain steps decide where "
        "the two best are that close."
    )


def _rounds_table(profile: HardwareProfile) -> Table:
    """One row for each number of drafted tokens, one column for each context."""
    contexts = profile.verify.contexts_tokens
    table = make_table("Rounds, ms: drafting + the target's pass", ["k", *(f"after {context}" for context in contexts)])
    table.add_column("pays from\nalpha", justify="right")
    for row, width in enumerate(profile.verify.sizes_tokens):
        if width not in _widths(profile):
            continue
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
    return number(verify_ms) if draft_ms is None else f"{number(draft_ms)} + {number(verify_ms)}"


def _prefill_table(profile: HardwareProfile) -> Table:
    curve = profile.target.prefill
    table = make_table("Prefill, ms", ["tokens", *(f"after {context}" for context in curve.contexts_tokens)])
    if profile.draft is not None:
        table.add_column("draft,\nafter 0", justify="right")
    table.add_column("copy from\nstore", justify="right")
    for row, size in enumerate(curve.sizes_tokens):
        draft = [number(profile.draft.model.prefill.at(size, 0))] if profile.draft else []
        table.add_row(str(size), *map(number, curve.median_ms[row]), *draft, number(profile.target.clone.at(size, 0)))
    return table


def _limits(profile: HardwareProfile) -> str:
    """How close a step is to reading all weights once."""
    weights, step_ms = profile.target.weight_bytes, profile.verify.median_ms[0][0]
    least_ms = weights / profile.memory_bytes_per_ms
    rate = profile.memory_bytes_per_ms / 1e6
    return (
        f"A step takes {number(step_ms)} ms and reads {weights / _MIB:.0f} MiB of weights, "
        f"which memory at {rate:.1f} GB/s gives in {number(least_ms)} ms."
    )


def _widths(profile: HardwareProfile) -> list[int]:
    """The widths of rounds that a draft model may ask for, and the widest."""
    sizes = profile.verify.sizes_tokens
    return [width for width in sizes if width - 1 in DRAFT_LENS or width == sizes[-1]]


def speculation_verdict(profile: HardwareProfile) -> str:
    """One sentence: whether speculation can pay on this machine, and from which acceptance."""
    draft_lens = [width - 1 for width in _widths(profile) if width > 1]
    crossovers = {k: alpha for k in draft_lens if (alpha := _break_even(profile, k)) is not None}
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
    table = make_table("Timed again, ms", ["point", "profile", "now", "change"])
    for drift in drifts:
        point = f"{drift.point.curve}, {counted(drift.point.size, 'token')} after {drift.point.context}"
        style = "bold red" if drift.is_stale else ""
        table.add_row(point, number(drift.profile_ms), number(drift.measured_ms), f"{drift.change:+.0%}", style=style)
    with open_page() as page:
        page.print(table)
