"""From timed probes to a profile: the curves, the acceptance, and how well the curves predict what lies between."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from rakvctl.core.disk.tier import DiskTier
from rakvctl.core.errors import ModelError
from rakvctl.core.exactness import logit_difference
from rakvctl.core.pair import ModelPair
from rakvctl.core.profile import (
    SCHEMA_VERSION,
    Curve,
    DraftCosts,
    Fit,
    HardwareProfile,
    MeasuredAcceptance,
    ModelCosts,
)
from rakvctl.core.seams import Clock
from rakvctl.measure.acceptance import measure_acceptance
from rakvctl.measure.grid import Grid, choose_grid
from rakvctl.measure.probes import BANDWIDTH_BYTES, ProbeBench, Role
from rakvctl.measure.statistics import mape_percent, spearman
from rakvctl.measure.successors import measure_successors
from rakvctl.measure.tasks import encode
from rakvctl.measure.timing import Effort, Point, Probe, Progress, Spread, time_probes
from rakvctl.measure.workloads import OWN, load_workload

# One pass over all prefills may take this share of the time there is, so that there can be several.
_PASS_SHARE = 0.15
# What else the time there is goes to, at most.
_SUCCESSORS_SHARE, _ACCEPTANCE_SHARE, _CURVES_SHARE, _HELD_OUT_SHARE = 0.2, 0.15, 0.55, 0.1
# What a change of width costs hardly depends on the width.
_WIDTH_CHANGE_LEN = 4


@dataclass(frozen=True, slots=True)
class Calibration:
    """A profile, and the points whose times varied so much that other programs may have been at work.

    `successors`: what mostly follows each of the target's first token ids.
    """

    profile: HardwareProfile
    noisy: tuple[Point, ...]
    successors: tuple[int, ...] = ()


def calibrate(
    pair: ModelPair, effort: Effort, clock: Clock, on_progress: Progress, prompts: Sequence[tuple[int, ...]] = ()
) -> Calibration:
    """Measure a pair; `prompts`, token ids, are what its acceptance is measured on, a few of our own if there are none.

    Of the prompts as many are used as a share of the time allows, and at least one: the profile says how many.

    Raises ModelError for a model whose states cannot be rolled back: there is nothing to choose with it.
    """
    if not pair.target.can_rollback:
        raise ModelError(f"{pair.target_name} keeps states that cannot be rolled back", "run it with --policy ar")
    on_progress("warming up", 0.0)
    grid = choose_grid(pair, _PASS_SHARE * effort.budget_s, clock)
    bench = ProbeBench(pair, grid.num_positions, clock)
    roles: list[Role] = ["target", "draft"] if pair.draft is not None else ["target"]

    successors = measure_successors(pair, _SUCCESSORS_SHARE * effort.budget_s, clock, on_progress)
    pair = replace(pair, successors=successors)
    acceptance = _acceptance(pair, prompts, _ACCEPTANCE_SHARE * effort.budget_s, clock, on_progress)
    with ExitStack() as files:
        probes = [*_probes(bench, roles, grid), *_load_probes(bench, pair.disk, grid, files)]
        spreads = time_probes(probes, effort.share(_CURVES_SHARE), clock, lambda share: on_progress("measuring", share))
    held_out = time_probes(
        list(_held_out_probes(bench, roles, grid)), effort.share(_HELD_OUT_SHARE), clock,
        lambda share: on_progress("checking", share),
    )  # fmt: skip
    curves = {name: _curve(spreads, name) for name in {point.curve for point in spreads}}
    costs = {role: _model_costs(bench, role, curves) for role in roles}
    profile = HardwareProfile(
        schema_version=SCHEMA_VERSION,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        fingerprint=pair.fingerprint(),
        target=costs["target"],
        verify=curves["verify"],
        # Models of two positions have no room for a draft.
        draft=DraftCosts(model=costs["draft"], propose=curves["propose"]) if "propose" in curves else None,
        emit_ms=curves["emit"].median_ms[0][0],
        memory_bytes_per_ms=BANDWIDTH_BYTES / curves["memory"].median_ms[0][0],
        acceptance=acceptance,
        fit=_fit(curves, held_out),
        logit_difference=logit_difference(pair.target),
        width_change_ms=max(0.0, _width_change_ms(spreads)),
    )
    noisy = sorted(point for point, spread in spreads.items() if _is_noisy(point, spread))
    return Calibration(profile, tuple(noisy), successors)


def _acceptance(
    pair: ModelPair, prompts: Sequence[tuple[int, ...]], budget_s: float, clock: Clock, on_progress: Progress
) -> MeasuredAcceptance:
    """On the user's prompts, or on our own: those say something of a draft model, but not what there is to look up."""
    if prompts:
        return measure_acceptance(pair, prompts, budget_s, clock, on_progress)
    if pair.draft is None:
        return MeasuredAcceptance(alpha=0.0, num_trials=0)
    own = [encode(pair.codec, content) for _, content in load_workload(OWN, None, None).prompts]
    return replace(measure_acceptance(pair, own, budget_s, clock, on_progress), lookup=None)


def _probes(bench: ProbeBench, roles: Sequence[Role], grid: Grid) -> Iterator[Probe]:
    """Every point of every curve."""
    yield from (bench.round(draft_len, context) for draft_len in grid.draft_lens for context in grid.contexts)
    others = [draft_len for draft_len in grid.verify_lens if draft_len not in grid.draft_lens]
    yield from (bench.verify(draft_len, context) for draft_len in others for context in grid.contexts)
    yield from (bench.emit(), bench.read_memory())
    widest = max(draft_len for draft_len in grid.draft_lens if draft_len <= _WIDTH_CHANGE_LEN)
    if widest:
        yield bench.width_change(widest, grid.contexts[len(grid.contexts) // 2])
    for role in roles:
        yield bench.new_length(role)
        for size in grid.prefill_tokens:
            yield from (bench.clone(role, size), bench.insert(role, size))
            yield from (bench.prefill(role, size, context) for context in grid.prefill_contexts)


def _load_probes(bench: ProbeBench, disk: DiskTier | None, grid: Grid, files: ExitStack) -> Iterator[Probe]:
    """Reading an entry from the persistent prefix cache, if files may be made there, out of the page cache and not."""
    if disk is None or disk.is_read_only:
        return
    path = files.enter_context(disk.scratch_file())
    bench.write_states(path, grid.prefill_tokens[-1])
    for size in grid.prefill_tokens:
        yield from (bench.load(path, size, is_cold=is_cold) for is_cold in (False, True))


def _held_out_probes(bench: ProbeBench, roles: Sequence[Role], grid: Grid) -> Iterator[Probe]:
    """Points between those of the curves."""
    contexts = grid.held_out_contexts
    yield from (bench.round(draft_len, context) for draft_len in grid.draft_lens for context in contexts[-1:])
    for index, size in enumerate(grid.held_out_sizes):
        context = contexts[index % len(contexts)] if contexts else 0
        yield from (bench.prefill(role, size, context) for role in roles)


def _is_noisy(point: Point, spread: Spread) -> bool:
    """What is a difference of two times varies more than both."""
    return spread.is_noisy and not point.curve.endswith(("new_length", "width_change"))


def _width_change_ms(spreads: Mapping[Point, Spread]) -> float:
    """What was measured of it; 0 where nothing was."""
    return next((spread.median_ms for point, spread in spreads.items() if point.curve == "width_change"), 0.0)


def _curve(spreads: Mapping[Point, Spread], name: str) -> Curve:
    """The measured points of one curve as tables."""
    sizes = sorted({point.size for point in spreads if point.curve == name})
    contexts = sorted({point.context for point in spreads if point.curve == name})
    table = [[spreads[Point(name, size, context)] for context in contexts] for size in sizes]
    return Curve(
        sizes_tokens=tuple(sizes),
        contexts_tokens=tuple(contexts),
        median_ms=tuple(tuple(spread.median_ms for spread in row) for row in table),
        mad_ms=tuple(tuple(spread.mad_ms for spread in row) for row in table),
        runs=tuple(tuple(spread.num_runs for spread in row) for row in table),
    )


def _model_costs(bench: ProbeBench, role: Role, curves: Mapping[str, Curve]) -> ModelCosts:
    engine = bench.engine(role)
    return ModelCosts(
        weight_bytes=engine.info.weight_bytes,
        kv_bytes_per_token=engine.num_bytes(1),
        max_positions=engine.max_positions,
        prefill_chunk_tokens=engine.prefill_chunk_tokens,
        new_length_ms=curves[f"{role}.new_length"].median_ms[0][0] if f"{role}.new_length" in curves else 0.0,
        prefill=curves[f"{role}.prefill"],
        clone=curves[f"{role}.clone"],
        insert=curves[f"{role}.insert"],
        load=curves.get(f"{role}.load"),
        load_cold=curves.get(f"{role}.load_cold"),
    )


def _fit(curves: Mapping[str, Curve], held_out: Mapping[Point, Spread]) -> Fit:
    """Predictions against measurements, at points that the curves were not made from, if there are any."""
    if not held_out:
        return Fit(mape_percent=0.0, spearman=1.0, num_probes=0)
    predicted = [curves[point.curve].at(point.size, point.context) for point in held_out]
    actual = [spread.median_ms for spread in held_out.values()]
    return Fit(
        mape_percent=mape_percent(predicted, actual), spearman=spearman(predicted, actual), num_probes=len(actual)
    )
