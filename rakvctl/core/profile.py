"""The hardware profile: what a model pair costs on one machine, as measured, and whose measurements they are.

Frozen dataclasses whose field names are the keys of the YAML file, units included. Knows no engine and measures
nothing.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, fields

from rakvctl.core.types import Agreement

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class Curve:
    """Times over two axes: how much is done at once (sizes), and how much lies in the cache before (contexts).

    What a size counts is said where the curve is used: prompt tokens, positions of a verify, drafted or copied tokens.
    The tables are [len(sizes_tokens)][len(contexts)]; `mad_ms` is the median absolute deviation of `runs` measurements.
    """

    sizes_tokens: tuple[int, ...]
    contexts_tokens: tuple[int, ...]
    median_ms: tuple[tuple[float, ...], ...]
    mad_ms: tuple[tuple[float, ...], ...]
    runs: tuple[tuple[int, ...], ...]

    def at(self, size: int, context: float) -> float:
        """Milliseconds, linear between the measured points and beyond the last ones; nothing done costs nothing.

        Beyond the last points nothing gets cheaper, neither with size nor with context, whatever noise has measured.
        """
        if size <= 0:
            return 0.0
        rows = [_interpolate(self.contexts_tokens, row, context) for row in self.median_ms]
        last = self.sizes_tokens[-1]
        if size <= last:
            return _interpolate(self.sizes_tokens, rows, size)
        inside = min(context, self.contexts_tokens[-1])
        rows_inside = [_interpolate(self.contexts_tokens, row, inside) for row in self.median_ms]
        slope = max(_last_slope(self.sizes_tokens, rows), _last_slope(self.sizes_tokens, rows_inside))
        return rows[-1] + slope * (size - last)

    def covers(self, size: int, context: float) -> bool:
        """Whether a point lies between measured ones."""
        return size <= self.sizes_tokens[-1] and context <= self.contexts_tokens[-1]


def _interpolate(points: Sequence[int], values: Sequence[float], at: float) -> float:
    """Piecewise linear through (points, values); level before the first, the last piece goes on if it does not fall."""
    if at <= points[0]:
        return values[0]
    right = bisect_left(points, at)
    if right == len(points):
        return values[-1] + _last_slope(points, values) * (at - points[-1])
    share = (at - points[right - 1]) / (points[right] - points[right - 1])
    return values[right - 1] + share * (values[right] - values[right - 1])


def _last_slope(points: Sequence[int], values: Sequence[float]) -> float:
    """How fast the last piece rises; 0 if it falls, or there is none."""
    if len(points) < 2:
        return 0.0
    return max(0.0, (values[-1] - values[-2]) / (points[-1] - points[-2]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprint:
    """What measured times depend on. A profile is good for exactly this."""

    processor: str
    device: str
    driver: str
    threads: int
    dtype: str
    backend: str
    versions: str
    target: str
    target_digest: str
    draft: str
    draft_digest: str


def field_label(name: str) -> str:
    """A field of the fingerprint in words."""
    labels = {"threads": "number of threads", "versions": "version of the libraries"}
    return labels.get(name) or name.replace("_digest", " checkpoint")


def foreign_fields(theirs: Fingerprint, ours: Fingerprint) -> list[str]:
    """The names of the fields in which two fingerprints differ."""
    names = [field.name for field in fields(Fingerprint)]
    return [name for name in names if getattr(theirs, name) != getattr(ours, name)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCosts:
    """One model. Sizes are prompt tokens for `prefill`, positions for `clone` and `insert` (which know no context).

    `new_length_ms`: what the first prefill of a length takes more than the next one, as kernels are made for it.
    `max_positions`: the longest sequence the model can hold; None where that is not known. `load` and `load_cold`:
    restoring states from a file that the system has in memory, and from one that it has not; None if not measured.
    `prefill_chunk_tokens`: prompt tokens a pass, at most; None: all in one pass, or a profile that does not say.
    """

    weight_bytes: int
    kv_bytes_per_token: int
    max_positions: int | None = None
    prefill_chunk_tokens: int | None = None
    new_length_ms: float
    prefill: Curve
    clone: Curve
    insert: Curve
    load: Curve | None = None
    load_cold: Curve | None = None

    def prefill_ms(self, num_tokens: int, cached: int) -> float:
        """Milliseconds of a prompt's `num_tokens` tokens after `cached` positions.

        Beyond the measured sizes: the largest measured number of whole passes, then pass after pass, each at the
        context that it finds.
        """
        curve, chunk = self.prefill, self.prefill_chunk_tokens
        if chunk is None or num_tokens <= max(chunk, curve.sizes_tokens[-1]):
            return curve.at(num_tokens, cached)
        measured = curve.sizes_tokens[-1] // chunk * chunk
        num_passes, rest = divmod(num_tokens - measured, chunk)
        passes_ms = _passes_ms(curve, chunk, cached + measured, num_passes)
        return curve.at(measured, cached) + passes_ms + curve.at(rest, cached + num_tokens - rest)


def _passes_ms(curve: Curve, size: int, context: int, num_passes: int) -> float:
    """Passes over `size` tokens one after another, the first at `context`.

    Between two measured contexts times are linear, so the first and the last pass there tell the sum.
    """
    total_ms, first = 0.0, 0
    for measured in (*curve.contexts_tokens, math.inf):
        up_to_it = num_passes if measured == math.inf else int((measured - context) // size + 1)
        end = max(first, min(num_passes, up_to_it))
        if end > first:
            ends_ms = curve.at(size, context + first * size) + curve.at(size, context + (end - 1) * size)
            total_ms += (end - first) * ends_ms / 2
        first = end
    return total_ms


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftCosts:
    """A draft model. `propose`: sizes are the tokens drafted a round, catching up with the last round included."""

    model: ModelCosts
    propose: Curve


@dataclass(frozen=True, slots=True, kw_only=True)
class LookupBin:
    """How often a looked-up token stood, after a match of `matched_tokens` tokens or more, up to the next bin.

    `agreement`: as `Evidence` has it.
    """

    matched_tokens: int
    agreement: Agreement
    alpha: float
    num_trials: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredAcceptance:
    """How often a drafted token was accepted when measured: `alpha`, out of `num_trials` tokens judged.

    `num_prompts`: on how many prompts; 0 in a profile that does not say.
    `lookup`: the same of looked-up tokens; None where nobody gave prompts to measure it on.
    """

    alpha: float
    num_trials: int
    num_prompts: int = 0
    lookup: tuple[LookupBin, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """How well the curves predict probes that lie between their points. `mape_percent`: mean absolute error."""

    mape_percent: float
    spearman: float
    num_probes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HardwareProfile:
    """Everything the cost of an action is computed from.

    `verify`: one round of the loop without the drafting; sizes are the positions of the target's pass, drafted tokens
    plus one. `emit_ms`: turning one emitted token into text. `memory_bytes_per_ms`: how fast memory is read.
    `logit_difference`: how far logits depend on the pass that computes them, 0 if not at all, None if not measured.
    `width_change_ms`: what a drafting round between plain ones takes more than its own time, as passes change width.
    """

    schema_version: int
    created: str
    fingerprint: Fingerprint
    target: ModelCosts
    verify: Curve
    draft: DraftCosts | None
    emit_ms: float
    memory_bytes_per_ms: float
    acceptance: MeasuredAcceptance
    fit: Fit
    logit_difference: float | None = None
    width_change_ms: float = 0.0

    @property
    def widest_draft_len(self) -> int:
        """Drafted tokens of the widest measured verification pass."""
        return max(0, self.verify.sizes_tokens[-1] - 1)

    @property
    def longest_draft_len(self) -> int:
        """The most tokens that the draft model may draft a round: pass and drafting are measured as far as that."""
        return min(self.widest_draft_len, self.draft.propose.sizes_tokens[-1]) if self.draft else 0
