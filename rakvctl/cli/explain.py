"""The command `explain`: the table C(k, r) for a request, as `generate` would decide it."""

import gc
import math
import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from rakvctl.cli import cost_table, inputs, progress, render
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
    parse_path,
)
from rakvctl.cli.prompt_fields import Content
from rakvctl.cli.sources import is_default, is_typed
from rakvctl.core.acceptance import initial_experience
from rakvctl.core.cost import CostModel
from rakvctl.core.errors import UsageError
from rakvctl.core.policies import RakvPolicy
from rakvctl.core.profile import HardwareProfile
from rakvctl.core.rounds import round_choices
from rakvctl.core.types import BUCKET_TOKENS, Decision, Features, Request, SamplingParams
from rakvctl.measure.described import described, known_profile
from rakvctl.measure.mending import Choice

_REQUEST = "Request"
_MOST_TOKENS = 10**9


def explain(
    context: typer.Context,
    prompt: Annotated[
        str | None, typer.Argument(metavar="PROMPT", help="Explain this prompt; '-' reads it from stdin.")
    ] = None,
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
        typer.Option(
            metavar="FILE", parser=parse_path, help="Draw cost against alpha, a line for each k; .png or .svg."
        ),
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Show what each action is expected to cost, and which one is chosen."""
    _refuse_nonsense(prompt, prompt_tokens, cached, max_new_tokens, alpha, plot)
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
    if prompt_tokens is not None:
        if is_typed(context, "kv_dir"):
            raise UsageError("--kv-dir is searched for a PROMPT", "give one, or say with --cached what is stored")
        measured = known_profile(choice, _asked_pair(context), render.print_note)
        features = described(measured, prompt_tokens, cached, max_new_tokens)
    else:
        max_new_tokens = max(1, max_new_tokens)
        measured, features = _plan(prompt, choice, kv_dir, SamplingParams(max_new_tokens=max_new_tokens))
    if features.max_new_tokens < max_new_tokens:
        render.print_note(f"after this prompt the model has positions for {features.max_new_tokens} new tokens")
    if alpha is not None:
        features = replace(features, alpha=alpha)
    _show(CostModel(measured), features, plot, as_json)
    return 0


def _refuse_nonsense(
    prompt: str | None,
    prompt_tokens: int | None,
    cached: int,
    max_new_tokens: int,
    alpha: float | None,
    plot: Path | None,
) -> None:
    """Raise UsageError for what no request can be."""
    if prompt is not None and prompt_tokens is not None:
        raise UsageError("PROMPT and --prompt-tokens are two requests", "give one of them")
    if prompt_tokens is None and cached:
        raise UsageError("--cached belongs to --prompt-tokens", "of a PROMPT the store itself says what is cached")
    if cached > (prompt_tokens or 0):
        raise UsageError(f"{cached} of {prompt_tokens} tokens cannot be cached", "give at most --prompt-tokens")
    if 0 < cached < BUCKET_TOKENS:
        raise UsageError(
            f"{cached} tokens are never stored", f"give --cached at least {BUCKET_TOKENS}, or leave it out"
        )
    if (prompt_tokens or 0) + max_new_tokens > _MOST_TOKENS:
        raise UsageError(f"no model has room for more than {_MOST_TOKENS} tokens", "give --prompt-tokens and -n less")
    if alpha is not None and math.isnan(alpha):
        raise UsageError("--alpha is no number", "give a probability from 0 to 1")
    if plot is not None and plot.suffix not in (".png", ".svg"):
        raise UsageError(f"cannot draw into {plot}", "give a file that ends with .png or .svg")


def _asked_pair(context: typer.Context) -> list[str]:
    """Of target and draft, what the user has said; whoever names a target means its draft too."""
    if not is_default(context, "target"):
        return ["target", "draft"]
    return [] if is_default(context, "draft") else ["draft"]


def _content(argument: str | None, sampling: SamplingParams) -> Content:
    """The one prompt to explain, from the argument or from stdin."""
    source = inputs.open_prompts(argument, [], InputFormat.TEXT, sampling)
    return inputs.readable(next(source.prompts)).content


def _plan(
    argument: str | None, choice: Choice, kv_dir: Path | None, sampling: SamplingParams
) -> tuple[HardwareProfile, Features]:
    """What `generate` would know of the prompt, from the plan that it would make."""
    content = _content(argument, sampling)
    gc.disable()
    from rakvctl.core.loading import RuntimeOptions, load_pair, make_runtime
    from rakvctl.measure.ready import fitting_profile

    # A question makes no directory.
    there = kv_dir if kv_dir is not None and os.path.isdir(kv_dir) else None
    options = RuntimeOptions(**asdict(choice), kv_dir=there, kv_read_only=True)
    pair = load_pair(options, render.print_note)
    with progress.measuring(shown=True) as on_progress:
        profile = fitting_profile(pair, options, render.print_note, on_progress)
    runtime = make_runtime(pair, options, profile)
    return profile, runtime.plan(Request(inputs.encode(content, runtime.codec, None), sampling)).features


def _show(costs: CostModel, features: Features, plot: Path | None, as_json: bool) -> None:
    decision = RakvPolicy(costs).decide(features)
    context = features.num_prompt_tokens + features.num_new_tokens // 2
    choices = round_choices(costs.profile, initial_experience(costs.profile).lookups, context)
    if plot is not None:
        from rakvctl.measure.plots import plot_costs

        plot_costs(costs, features, decision, plot)
    if as_json:
        render.print_json({**_record(costs, features, decision), "rounds": [asdict(choice) for choice in choices]})
    else:
        cost_table.show_costs(decision, features, costs)
        cost_table.show_rounds(choices, context)


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
                "chosen": cost_table.is_chosen(row, decision),
                "crossover_alpha": costs.crossover(row.action, features),
            }
            for row in decision.table
        ],
        "features": asdict(features),
        "alpha": features.alpha,
        "profile": asdict(costs.profile),
    }
