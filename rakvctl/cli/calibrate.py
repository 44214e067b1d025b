"""The command `calibrate`: measure the costs of a pair on this machine, or check what was measured."""

import gc
import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rakvctl.cli import inputs, interrupts, outputs, progress, render
from rakvctl.cli.options import (
    AsJson,
    Backend,
    BackendName,
    ContextSize,
    Device,
    Draft,
    Dtype,
    DtypeOption,
    Exact,
    InputFormat,
    KVDir,
    KVTypeOption,
    Profile,
    Target,
    Threads,
    parse_name,
    parse_path,
)
from rakvctl.cli.page import counted
from rakvctl.cli.sources import is_typed
from rakvctl.core.errors import ProfileError, UsageError
from rakvctl.core.profile_file import read_profile, refuse_foreign, refuse_unwritable
from rakvctl.core.profile_places import default_path, profile_directory
from rakvctl.core.types import SamplingParams
from rakvctl.measure.mending import PROFILE_VARIABLE, Choice, calibrate_command, mending

if TYPE_CHECKING:
    from rakvctl.core.pair import ModelPair
    from rakvctl.measure.timing import Effort

_MEASURING = "Measuring"
_BUDGET_SECONDS, _QUICK_SECONDS, _CHECK_SECONDS = 60.0, 10.0, 3.0
_STALE = 3


def calibrate(
    context: typer.Context,
    target: Target = "tiny",
    draft: Draft = None,
    backend: Backend = BackendName.AUTO,
    device: Device = "auto",
    dtype: DtypeOption = Dtype.AUTO,
    threads: Threads = None,
    kv_type: KVTypeOption = None,
    context_size: ContextSize = None,
    profile: Profile = "auto",
    exact: Exact = False,
    kv_dir: KVDir = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--out",
            metavar="PATH",
            parser=parse_path,
            help="Where to write the profile.",
            show_default="your profile directory",
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
            parser=parse_name,
            rich_help_panel=_MEASURING,
            help="Measure the draft's acceptance on these prompts, as many as a share of the time allows.",
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
    if not check and is_typed(context, "profile"):
        raise UsageError("--profile names the profile for --check", "name the file to be written with -o")
    given = []
    if not check:
        given = _given(prompts, out) if prompts is not None else []
        refuse_unwritable(out or profile_directory() / "profile.yaml")
    choice = Choice(
        target=target,
        draft=draft,
        backend=backend.value,
        device=device,
        dtype=dtype.value,
        num_threads=threads,
        kv_type=kv_type.value if kv_type else None,
        context_size=context_size,
        profile=profile,
        exact=exact,
    )
    pair = _load(choice, kv_dir)
    if check:
        with mending(choice):
            return _check(pair, choice, budget, as_json)
    encoded = [inputs.encode_prompt(prompt, pair.codec, None) for prompt in given]
    from rakvctl.measure.timing import Effort

    seconds = _QUICK_SECONDS if quick else budget or _BUDGET_SECONDS
    path = _measure(pair, encoded, Effort(budget_s=seconds, repeats=repeats), out, as_json)
    if profile not in ("auto", str(path)):
        render.print_note(f"other commands go on reading {profile}, which {PROFILE_VARIABLE} names")
    return 0


def _given(name: str, out: Path | None) -> list[inputs.Prompt]:
    """All prompts of a file that is not to be written. Raises the error of its first bad line."""
    source = inputs.open_prompts(None, [name], InputFormat.AUTO, SamplingParams(), option="--prompts")
    if out is not None:
        outputs.refuse_overwriting(out, source.files)
    return inputs.read_all(source, name)


def _load(choice: Choice, kv_dir: Path | None) -> "ModelPair":
    """The models, and whatever came with them left out of all collections of garbage to come."""
    gc.disable()
    from rakvctl.core.loading import RuntimeOptions, load_pair, with_successors

    pair = with_successors(
        load_pair(RuntimeOptions(**asdict(choice), kv_dir=kv_dir), render.print_note), render.print_note
    )
    gc.collect()
    gc.freeze()
    return pair


def _measure(
    pair: "ModelPair", prompts: list[tuple[int, ...]], effort: "Effort", out: Path | None, as_json: bool
) -> Path:
    """Measure, write and show; returns where the profile is."""
    from rakvctl.cli import profile_tables
    from rakvctl.measure.calibrate import calibrate as measure
    from rakvctl.measure.ready import keep

    with progress.measuring(shown=True) as on_progress:
        calibration = measure(pair, effort, time.perf_counter, on_progress, prompts)
    path = out or default_path(calibration.profile.fingerprint)
    keep(calibration, path, render.print_note)
    num_successors, num_used = len(calibration.successors), calibration.profile.acceptance.num_prompts
    if as_json:
        record = {"path": str(path), "successors": num_successors, "profile": asdict(calibration.profile)}
        if prompts:
            record["prompts"] = {"given": len(prompts), "used": num_used}
        render.print_json(record)
    else:
        profile_tables.show_profile(calibration.profile)
        profile_tables.show_successors(num_successors, pair.codec.vocab_size)
        if prompts:
            render.print_line(f"Acceptance was measured on {num_used} of {counted(len(prompts), 'prompt')}.")
        render.print_line(f"\nWritten to {path}")
    if calibration.noisy:
        point = calibration.noisy[0]
        render.print_note(
            f"{counted(len(calibration.noisy), 'point')} varied by more than a tenth, such as {point.curve} of "
            f"{counted(point.size, 'token')}: close other programs, or give more time with --budget"
        )
    return path


def _check(pair: "ModelPair", choice: Choice, budget: float | None, as_json: bool) -> int:
    from rakvctl.cli import profile_tables
    from rakvctl.measure.check import check
    from rakvctl.measure.timing import Effort

    here = pair.fingerprint()
    is_own = choice.profile == "auto"
    path = default_path(here) if is_own else Path(choice.profile)
    if is_own and not os.path.exists(path):
        raise ProfileError("there is no profile for this machine and pair", "")
    profile = read_profile(path)
    refuse_foreign(profile, here, str(path))
    interrupts.raise_from_now_on()
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
            f"measure anew with: {calibrate_command(choice, None if is_own else choice.profile)}",
        )
    return _STALE if stale else 0
