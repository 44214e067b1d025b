"""The command `generate`: its options, and from them what the runtime and the command are told."""

import gc
from pathlib import Path
from typing import Annotated

import typer

from rakvctl.cli import inputs, render
from rakvctl.cli.escapes import unescape
from rakvctl.cli.options import (
    Backend,
    BackendName,
    ContextSize,
    Device,
    Draft,
    DrafterChoice,
    Dtype,
    DtypeOption,
    Exact,
    InputFormat,
    KVDir,
    KVDiskBudget,
    KVTypeOption,
    OutputFormat,
    Profile,
    Target,
    Threads,
    check_sampling,
    not_empty,
    parse_bytes,
    parse_name,
    parse_path,
)
from rakvctl.core.errors import UsageError
from rakvctl.core.policies import policy_needs
from rakvctl.core.types import SamplingParams

_PROMPTS, _SAMPLING, _METHOD, _CLUSTER, _RESULTS = "Prompts", "Sampling", "Method", "Cluster", "Results"


def generate(
    prompt: Annotated[
        str | None,
        typer.Argument(
            metavar="PROMPT", help="The prompt; text on stdin is added to it. Without one, and for '-', stdin is read."
        ),
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
    file: Annotated[
        list[str] | None,
        typer.Option(
            "-f",
            "--file",
            metavar="FILE",
            parser=parse_name,
            rich_help_panel=_PROMPTS,
            help="A prompt file, '-' is stdin; may be repeated.",
        ),
    ] = None,
    input_format: Annotated[
        InputFormat,
        typer.Option(
            "--format",
            rich_help_panel=_PROMPTS,
            help="text: a file is one prompt; lines: each line is one; jsonl: each line is an object with `prompt` or "
            "`messages`; auto: jsonl or a JSON array if it looks so, else text.",
        ),
    ] = InputFormat.AUTO,
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--raw",
            rich_help_panel=_PROMPTS,
            help="Put the prompt through the model's chat template, or not.",
            show_default="chat if the model has a template",
        ),
    ] = None,
    max_new_tokens: Annotated[
        int,
        typer.Option(
            "-n",
            "--max-new-tokens",
            metavar="N",
            rich_help_panel=_SAMPLING,
            help="At most this many new tokens.",
        ),
    ] = 128,
    temperature: Annotated[
        float, typer.Option(metavar="T", rich_help_panel=_SAMPLING, help="0 is greedy, more is more random.")
    ] = 0.0,
    top_p: Annotated[
        float,
        typer.Option(
            metavar="P",
            rich_help_panel=_SAMPLING,
            help="Draw from the likeliest tokens of this total probability, 1 from all.",
        ),
    ] = 1.0,
    top_k: Annotated[
        int,
        typer.Option(metavar="K", rich_help_panel=_SAMPLING, help="Draw from the K likeliest tokens, 0 from all."),
    ] = 0,
    min_p: Annotated[
        float,
        typer.Option(
            metavar="P",
            rich_help_panel=_SAMPLING,
            help="Draw from tokens at least P times as likely as the likeliest one, 0 from all.",
        ),
    ] = 0.0,
    repetition_penalty: Annotated[
        float | None,
        typer.Option(
            metavar="X",
            rich_help_panel=_SAMPLING,
            help="Make tokens that came before less likely, by this factor of their logits; 1 changes nothing.",
            show_default="the model's own, else 1",
        ),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            rich_help_panel=_SAMPLING,
            help="Seed of the random numbers, the same for each prompt.",
            show_default="a new one each time",
        ),
    ] = None,
    stop: Annotated[
        list[str] | None,
        typer.Option(
            metavar="STR",
            rich_help_panel=_SAMPLING,
            help=r"End before this text; \n, \t, \xNN, \uNNNN and \\ are escapes in it; may be repeated.",
            show_default="none",
        ),
    ] = None,
    policy: Annotated[
        str,
        typer.Option(
            metavar="auto|rakv|ar|kv|spec-K|joint-K",
            rich_help_panel=_METHOD,
            help="auto: what is expected to be fastest, round by round; rakv: request by request; ar: plain decoding; "
            "kv: reuse stored prefixes; spec-K: draft K tokens a round; joint-K: both.",
        ),
    ] = "auto",
    drafter: Annotated[
        DrafterChoice,
        typer.Option(
            rich_help_panel=_METHOD,
            help="Who drafts: the draft model, looking up what followed the same tokens earlier, or both (auto).",
        ),
    ] = DrafterChoice.AUTO,
    kv_budget: Annotated[
        str, typer.Option(metavar="SIZE", rich_help_panel=_METHOD, help="Memory for stored prefixes.")
    ] = "512MiB",
    kv_dir: KVDir = None,
    kv_disk_budget: KVDiskBudget = "4GiB",
    output: Annotated[
        OutputFormat | None,
        typer.Option(
            "-o",
            "--output",
            rich_help_panel=_RESULTS,
            help="Text alone, or a JSON record a prompt.",
            show_default="text for one prompt, jsonl for several",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            metavar="FILE",
            parser=parse_path,
            rich_help_panel=_RESULTS,
            help="Write results to a file. What it held is gone then, unless --resume is given.",
            show_default="stdout",
        ),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            rich_help_panel=_RESULTS,
            help="Keep what --out has, run only the prompts that have no complete record there.",
        ),
    ] = False,
    ray: Annotated[
        str | None,
        typer.Option(
            "--ray",
            metavar="HOST:PORT|auto|local",
            callback=not_empty,
            rich_help_panel=_CLUSTER,
            help="Run the prompts on a Ray cluster: its address, auto for the one that this machine belongs to, or "
            "local for one of this command's own on this machine.",
            show_default="this process runs them",
        ),
    ] = None,
    workers: Annotated[
        str | None,
        typer.Option(
            "--workers",
            metavar="N|auto",
            rich_help_panel=_CLUSTER,
            help="How many workers, each with models and stored prefixes of its own.",
            show_default="auto: as many as there is room for where --worker-cpus or --worker-gpus says what each gets, "
            "else one a GPU, and without GPUs one a node",
        ),
    ] = None,
    worker_cpus: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            rich_help_panel=_CLUSTER,
            help="CPU cores for each worker.",
            show_default="an equal part of its node's",
        ),
    ] = None,
    worker_gpus: Annotated[
        float | None,
        typer.Option(
            metavar="X",
            min=0,
            rich_help_panel=_CLUSTER,
            help="GPUs for each worker, or the part of one, such as 0.5.",
            show_default="1 where there are any, else 0",
        ),
    ] = None,
    stats: Annotated[
        bool, typer.Option("--stats", rich_help_panel=_RESULTS, help="Print totals to stderr at the end.")
    ] = False,
    quiet: Annotated[
        bool, typer.Option("-q", "--quiet", rich_help_panel=_RESULTS, help="No notes and no progress on stderr.")
    ] = False,
) -> int:
    """Generate text from one prompt or from files of prompts."""
    sampling = SamplingParams(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=seed,
        stop=tuple(unescape(text, "--stop") for text in stop or ()),
        min_p=min_p,
        repetition_penalty=repetition_penalty,
    )
    check_sampling(sampling)
    policy_needs(policy)  # an unknown one is refused before anything takes time
    _check_address(ray)
    num_workers = _num_workers(workers, ray, worker_cpus, worker_gpus)
    budget_bytes, disk_budget_bytes = parse_bytes(kv_budget), parse_bytes(kv_disk_budget)
    notify = (lambda _: None) if quiet else render.print_note
    source = inputs.open_prompts(prompt, file or [], input_format, sampling, option="-f", notify=notify)

    # The runtime brings torch along, which takes seconds to import: only where it is needed, and without searching
    # all that is imported for garbage again and again.
    gc.disable()
    from rakvctl.cli.generate import GenerateOptions
    from rakvctl.cli.generate import generate as run_generate
    from rakvctl.core.loading import RuntimeOptions
    from rakvctl.fleet.fleet import FleetOptions

    fleet = None if ray is None else FleetOptions(ray, num_workers, worker_cpus, worker_gpus)
    return run_generate(
        source,
        RuntimeOptions(
            target=target,
            draft=draft,
            backend=backend.value,
            device=device,
            dtype=dtype.value,
            num_threads=threads,
            kv_type=kv_type.value if kv_type else None,
            context_size=context_size,
            policy=policy,
            drafter=drafter.value,
            profile=profile,
            exact=exact,
            kv_budget_bytes=budget_bytes,
            kv_dir=kv_dir,
            kv_disk_budget_bytes=disk_budget_bytes,
        ),
        GenerateOptions(chat=chat, output=output, out=out, resume=resume, stats=stats, quiet=quiet),
        fleet,
    )


def _check_address(ray: str | None) -> None:
    """Raise UsageError for what is no address that a driver can join."""
    host, _, port = (ray or "").rpartition(":")
    if ray not in (None, "auto", "local") and not (host and "/" not in host and port.isascii() and port.isdigit()):
        raise UsageError(f"--ray {ray} is no address of a cluster", "give auto, local or HOST:PORT")


def _num_workers(workers: str | None, ray: str | None, *others: float | None) -> int | None:
    """The number of workers, None for auto. Raises UsageError for what is none, and where there is no cluster."""
    if ray is None and (workers is not None or any(other is not None for other in others)):
        raise UsageError("workers are a cluster's", "give --ray local or a cluster's address, or leave the options out")
    if workers in (None, "auto"):
        return None
    if not (workers.isascii() and workers.isdigit() and int(workers) > 0):
        raise UsageError(f"--workers {workers} is not a number of workers", "give 1 or more, or auto")
    return int(workers)
