"""The command `calibrate`: measure the costs of a pair on this machine, or check what was measured."""

import gc
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rakvctl.cli import inputs, progress, render
from rakvctl.cli.options import AsJson, Device, Draft, Dtype, DtypeOption, InputFormat, Profile, Target, Threads
from rakvctl.core.errors import UsageError
from rakvctl.core.types import SamplingParams

if TYPE_CHECKING:
    from rakvctl.core.pair import ModelPair

_MEASURING = "Measuring"
_BUDGET_SECONDS, _QUICK_SECONDS, _CHECK_SECONDS = 60.0, 10.0, 3.0
_STALE = 3


def calibrate(
    target: Target = "tiny",
    draft: Draft = None,
    device: Device = "auto",
    dtype: DtypeOption = Dtype.AUTO,
    threads: Threads = None,
    profile: Profile = "auto",
    out: Annotated[
        Path | None,
        typer.Option(
            "-o", "--out", metavar="PATH", help="Where to write the profile.", show_default="your profile directory"
        ),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", rich_help_panel=_MEASURING, help="Measure for about ten seconds.")
    ] = False,
    budget: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            min=1.0,
            rich_help_panel=_MEASURING,
            help="Measure until the medians are steady, at most about this long, in seconds.",
            show_default="60",
        ),
    ] = None,
    repeats: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            rich_help_panel=_MEASURING,
            help="Time every point this often.",
            show_default="until steady",
        ),
    ] = None,
    prompts: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            rich_help_panel=_MEASURING,
            help="Measure the draft's acceptance on these prompts.",
            show_default="a few of our own",
        ),
    ] = None,
    check: Annotated[
        bool,
        typer.Option(
            "--check", rich_help_panel=_MEASURING, help="Time a few points again: exit 0 if the profile holds, else 3."
        ),
    ] = False,
    as_json: AsJson = False,
) -> int:
    """Measure what prefill, steps, verifies and drafts cost here, and write the profile."""
    if quick and budget is not None:
        raise UsageError("--quick and --budget both say how long", "give one of them")
    if check and (out or prompts or repeats or quick):
        raise UsageError("--check measures no profile", "leave -o, --prompts, --repeats and --quick out")
    source = inputs.open_prompts(None, [prompts], InputFormat.AUTO, SamplingParams()) if prompts else None
    gc.disable()
    from rakvctl.core.loading import RuntimeOptions, load_pair

    options = RuntimeOptions(target=target, draft=draft, device=device, dtype=dtype.value, num_threads=threads)
    pair = load_pair(options, render.print_note)
    gc.collect()
    gc.freeze()
    if check:
        return _check(pair, profile, budget, as_json)
    readable = map(inputs.readable, source.prompts) if source else ()
    encoded = [inputs.encode(prompt.content, pair.codec, None) for prompt in readable]
    seconds = _QUICK_SECONDS if quick else budget or _BUDGET_SECONDS
    return _measure(pair, encoded, seconds, repeats, out, as_json)


def _measure(
    pair: "ModelPair",
    prompts: list[tuple[int, ...]],
    seconds: float,
    repeats: int | None,
    out: Path | None,
    as_json: bool,
) -> int:
    from rakvctl.cli import profile_tables
    from rakvctl.core.profile_file import default_path, write_profile
    from rakvctl.measure.calibrate import calibrate as measure
    from rakvctl.measure.timing import Effort

    with progress.measuring(shown=True) as on_progress:
        calibration = measure(pair, Effort(budget_s=seconds, repeats=repeats), time.perf_counter, on_progress, prompts)
    path = out or default_path(calibration.profile.fingerprint)
    write_profile(calibration.profile, path)
    if as_json:
        render.print_json({"path": str(path), "profile": asdict(calibration.profile)})
    else:
        profile_tables.show_profile(calibration.profile)
        render.print_line(f"\nWritten to {path}")
    if calibration.noisy:
        point = calibration.noisy[0]
        render.print_note(
            f"{len(calibration.noisy)} points varied by more than a tenth, such as {point.curve} of {point.size} "
            "tokens: close other programs, or give more time with --budget"
        )
    return 0


def _check(pair: "ModelPair", name: str, budget: float | None, as_json: bool) -> int:
    from rakvctl.cli import profile_tables
    from rakvctl.core.profile_file import default_path, read_profile, refuse_foreign
    from rakvctl.measure.check import check
    from rakvctl.measure.timing import Effort

    here = pair.fingerprint()
    path = default_path(here) if name == "auto" else Path(name).expanduser()
    profile = read_profile(path)
    refuse_foreign(profile, here, str(path))
    drifts = check(pair, profile, Effort(budget_s=budget or _CHECK_SECONDS), time.perf_counter)
    stale = [drift for drift in drifts if drift.is_stale]
    if as_json:
        render.print_json(
            {
                "path": str(path),
                "stale": bool(stale),
                "points": [asdict(drift) | {"change": drift.change} for drift in drifts],
            }
        )
    else:
        profile_tables.show_drifts(drifts)
    if stale:
        worst = max(stale, key=lambda drift: abs(drift.change))
        render.print_error(
            f"the profile is stale: {worst.point.curve} takes {worst.change:+.0%}",
            "measure anew with: rakvctl calibrate",
        )
    return _STALE if stale else 0
