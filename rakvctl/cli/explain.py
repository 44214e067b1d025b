"""The command `explain`: the table C(k, r) for a request, as `generate` would decide it."""

import gc
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rakvctl.cli import cost_table, inputs, progress, render
from rakvctl.cli.options import AsJson, Device, Draft, Dtype, DtypeOption, InputFormat, Profile, Target, Threads
from rakvctl.core.acceptance import initial_experience
from rakvctl.core.cost import CostModel
from rakvctl.core.errors import ProfileError, UsageError
from rakvctl.core.hardware import free_memory_bytes, processor_name
from rakvctl.core.models import default_draft
from rakvctl.core.policies import RakvPolicy
from rakvctl.core.profile import HardwareProfile
from rakvctl.core.profile_file import find_profile, read_profile
from rakvctl.core.types import Decision, Features, Request, SamplingParams

if TYPE_CHECKING:
    from rakvctl.core.loading import RuntimeOptions

_REQUEST = "Request"


def explain(
    prompt: Annotated[
        str | None, typer.Argument(metavar="PROMPT", help="Explain this prompt; '-' reads it from stdin.")
    ] = None,
    target: Target = "tiny",
    draft: Draft = None,
    device: Device = "auto",
    dtype: DtypeOption = Dtype.AUTO,
    threads: Threads = None,
    profile: Profile = "auto",
    prompt_tokens: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, rich_help_panel=_REQUEST, help="A prompt of N tokens instead; loads no model."
        ),
    ] = None,
    cached: Annotated[
        int,
        typer.Option(
            metavar="N", min=0, rich_help_panel=_REQUEST, help="Of them, N tokens are stored by target and draft."
        ),
    ] = 0,
    max_new_tokens: Annotated[
        int,
        typer.Option(
            "-n", "--max-new-tokens", metavar="M", min=0, rich_help_panel=_REQUEST, help="At most M new tokens."
        ),
    ] = 128,
    alpha: Annotated[
        float | None,
        typer.Option(
            metavar="A",
            min=0.0,
            max=1.0,
            rich_help_panel=_REQUEST,
            help="Probability that a drafted token is accepted.",
            show_default="as measured",
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw cost against alpha, a line for each k; .png or .svg."),
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Show what each action is expected to cost, and which one is chosen."""
    if prompt is not None and prompt_tokens is not None:
        raise UsageError("PROMPT and --prompt-tokens are two requests", "give one of them")
    if prompt_tokens is None and cached:
        raise UsageError("--cached belongs to --prompt-tokens", "of a PROMPT the store itself says what is cached")
    if alpha is not None and math.isnan(alpha):
        raise UsageError("--alpha is no number", "give a probability from 0 to 1")
    if plot is not None and plot.suffix not in (".png", ".svg"):
        raise UsageError(f"cannot draw into {plot}", "give a file that ends with .png or .svg")
    if cached > (prompt_tokens or 0):
        raise UsageError(f"{cached} of {prompt_tokens} tokens cannot be cached", "give at most --prompt-tokens")
    if prompt_tokens is not None:
        measured = _known_profile(profile, target, draft, threads)
        features = _features(measured, prompt_tokens, cached, max_new_tokens)
    else:
        sampling = SamplingParams(max_new_tokens=max(1, max_new_tokens))
        content = _content(prompt, sampling)
        gc.disable()
        from rakvctl.core.loading import RuntimeOptions

        options = RuntimeOptions(
            target=target, draft=draft, device=device, dtype=dtype.value, num_threads=threads, profile=profile
        )
        measured, features = _plan(content, options, sampling)
    if alpha is not None:
        features = replace(features, alpha=alpha)
    _show(CostModel(measured), features, plot, as_json)
    return 0


def _known_profile(name: str, target: str, draft: str | None, threads: int | None) -> HardwareProfile:
    """The profile of that name, or the user's newest for the pair on this processor. Raises ProfileError."""
    draft_name = "" if draft == "none" else draft or default_draft(target) or ""
    path = find_profile(target, draft_name, processor_name()) if name == "auto" else Path(name).expanduser()
    pair = f"{target} with draft {draft_name}" if draft_name else target
    if path is None:
        raise ProfileError(f"there is no profile for {pair} on this machine", "measure one with: rakvctl calibrate")
    profile = read_profile(path)
    measured_threads = profile.fingerprint.threads
    if threads is not None and threads != measured_threads:
        raise ProfileError(
            f"the profile {path} was measured with {measured_threads} threads, not with {threads}",
            f"measure anew with: rakvctl calibrate --threads {threads}",
        )
    return profile


def _features(profile: HardwareProfile, num_tokens: int, cached: int, max_new_tokens: int) -> Features:
    """A request that is only described."""
    return Features(
        num_prompt_tokens=num_tokens,
        max_new_tokens=max_new_tokens,
        num_matched_tokens=cached,
        num_cloned_tokens=cached,
        num_draft_cloned_tokens=cached,
        drafter="model" if profile.draft is not None else "none",
        alpha=initial_experience(profile).alpha,
        memory_budget_bytes=free_memory_bytes(),
    )


def _content(argument: str | None, sampling: SamplingParams) -> inputs.Content:
    """The one prompt to explain, from the argument or from stdin."""
    source = inputs.open_prompts(argument, [], InputFormat.TEXT, sampling)
    return inputs.readable(next(source.prompts)).content


def _plan(
    content: inputs.Content, options: "RuntimeOptions", sampling: SamplingParams
) -> tuple[HardwareProfile, Features]:
    """What `generate` would know of the prompt, from the plan that it would make."""
    from rakvctl.core.loading import load_pair, make_runtime
    from rakvctl.measure.ready import fitting_profile

    pair = load_pair(options, render.print_note)
    with progress.measuring(shown=True) as on_progress:
        profile = fitting_profile(pair, options.profile, render.print_note, on_progress)
    runtime = make_runtime(pair, options, profile)
    return profile, runtime.plan(Request(inputs.encode(content, runtime.codec, None), sampling)).features


def _show(costs: CostModel, features: Features, plot: Path | None, as_json: bool) -> None:
    decision = RakvPolicy(costs).decide(features)
    if plot is not None:
        from rakvctl.measure.plots import plot_costs

        plot_costs(costs, features, decision, plot)
    if as_json:
        render.print_json(_record(costs, features, decision))
    else:
        cost_table.show_costs(decision, features, costs)


def _record(costs: CostModel, features: Features, decision: Decision) -> dict[str, Any]:
    """The JSON object of the command line's contract."""
    return {
        "table": [
            {
                "reuse": row.action.reuse,
                "draft_len": row.action.draft_len,
                "clone_ms": row.clone_ms,
                "prefill_ms": row.prefill_ms,
                "draft_prefill_ms": row.draft_prefill_ms,
                "draft_ms": row.draft_ms,
                "verify_ms": row.verify_ms,
                "memory_ms": row.memory_ms,
                "rounds": row.rounds,
                "total_ms": row.total_ms,
                "ms_per_token": row.total_ms / features.max_new_tokens if features.max_new_tokens else None,
                "infeasible": row.infeasible,
                "chosen": row.action == decision.action,
                "crossover_alpha": costs.crossover(row.action, features),
            }
            for row in decision.table
        ],
        "features": asdict(features),
        "alpha": features.alpha,
        "profile": asdict(costs.profile),
    }
