"""The command `bench`: our policies and what people would use otherwise, on the same prompts, token by token."""

import gc
import os
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rakvctl.cli import inputs, render
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
    KVTypeOption,
    Profile,
    Target,
    Threads,
    parse_name,
    parse_path,
)
from rakvctl.core.types import SamplingParams

if TYPE_CHECKING:
    from rakvctl.measure.workloads import Workload

_WORK, _FILES = "Workloads", "Results"


class Study(StrEnum):
    """What is asked."""

    BASELINES = "baselines"
    CONTROLLER = "controller"
    SENSITIVITY = "sensitivity"


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """What concerns the study and not the models. `peers` None: the plain one of the same engine."""

    study: Study
    policies: list[str]
    peers: list[str] | None
    hits: list[str]
    limit: int
    repeats: int
    max_new_tokens: int
    seed: int
    output_dir: Path
    plot: bool
    as_json: bool


def bench(
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
    workload: Annotated[
        list[str] | None,
        typer.Option(
            "-w",
            "--workload",
            metavar="NAME|FILE",
            parser=parse_name,
            rich_help_panel=_WORK,
            help="A workload or a prompt file; may be repeated.",
            show_default="mixed, which is inside the package",
        ),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            envvar="RAKVCTL_DATA",
            parser=parse_path,
            rich_help_panel=_WORK,
            help="The folder with the files of the other named workloads.",
            show_default="none",
        ),
    ] = None,
    limit: Annotated[
        int, typer.Option(metavar="N", min=1, rich_help_panel=_WORK, help="At most N prompts of each workload.")
    ] = 10,
    repeats: Annotated[
        int, typer.Option(metavar="N", min=1, rich_help_panel=_WORK, help="Run every prompt N times with every arm.")
    ] = 1,
    max_new_tokens: Annotated[
        int,
        typer.Option("-n", "--max-new-tokens", metavar="N", min=1, rich_help_panel=_WORK, help="At most N new tokens."),
    ] = 32,
    hits: Annotated[
        str,
        typer.Option(
            metavar="LIST",
            rich_help_panel=_WORK,
            help="What was there before a prompt comes: cold: nothing; shared: the states of three quarters of it; "
            "exact: of all of it; repeat: the very same request.",
        ),
    ] = "cold,shared,exact",
    seed: Annotated[
        int, typer.Option(metavar="N", min=0, rich_help_panel=_WORK, help="Seed of the random order of the arms.")
    ] = 0,
    study: Annotated[
        Study,
        typer.Option(
            rich_help_panel=_WORK,
            help="baselines: the arms against each other; controller: its choice and predictions against every action; "
            "sensitivity: from which acceptance drafting pays.",
        ),
    ] = Study.BASELINES,
    policies: Annotated[
        str,
        typer.Option(
            metavar="LIST",
            rich_help_panel=_WORK,
            help="Our policies, and lookup-K: spec-K that looks tokens up; ar is always among them.",
        ),
    ] = "ar,kv,spec-4,joint-4,rakv,auto",
    peers: Annotated[
        str | None,
        typer.Option(
            metavar="LIST",
            rich_help_panel=_WORK,
            help="hf-generate, hf-prompt-lookup[-K], hf-assisted: transformers itself; llama-cpp, "
            "llama-cpp-prompt-lookup[-K]: llama-cpp-python itself, with its own settings; none: no peers.",
            show_default="the plain one of the same engine",
        ),
    ] = None,
    output_dir: Annotated[
        Path,
        typer.Option(
            metavar="DIR", parser=parse_path, rich_help_panel=_FILES, help="Where results.json and report.md go."
        ),
    ] = Path("bench-results"),
    plot: Annotated[bool, typer.Option("--plot", rich_help_panel=_FILES, help="Draw the results too.")] = False,
    compare: Annotated[
        tuple[Path, Path] | None,
        typer.Option(
            metavar="A B",
            parser=parse_path,
            rich_help_panel=_FILES,
            help="Compare two results.json instead.",
            show_default="none",
        ),
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Measure all policies and peers on the same prompts; fail where an output differs from plain decoding's."""
    if compare is not None:
        return _compare(*compare, as_json)
    options = BenchOptions(
        study=study,
        policies=_names(policies),
        peers=None if peers is None else [name for name in _names(peers) if name != "none"],
        hits=_names(hits),
        limit=limit,
        repeats=repeats,
        max_new_tokens=max_new_tokens,
        seed=seed,
        output_dir=output_dir,
        plot=plot,
        as_json=as_json,
    )
    gc.disable()
    from rakvctl.cli.bench_run import run_bench
    from rakvctl.core.loading import RuntimeOptions

    return run_bench(
        _workloads(workload or ["mixed"], data, limit),
        RuntimeOptions(
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
        ),
        options,
    )


def _names(text: str) -> list[str]:
    """The names in a list such as `ar,kv`, each once."""
    return list(dict.fromkeys(name for part in text.split(",") if (name := part.strip())))


def _workloads(given: list[str], folder: Path | None, limit: int) -> "list[Workload]":
    """Workloads by name; what is a file is a prompt file."""
    from rakvctl.measure.workloads import load_workload

    return [_from_file(name, limit) if os.path.isfile(name) else load_workload(name, folder, limit) for name in given]


def _from_file(name: str, limit: int) -> "Workload":
    """A user's prompt file. Raises the error of its first bad line."""
    from rakvctl.measure.workloads import Workload

    source = inputs.open_prompts(None, [name], InputFormat.AUTO, SamplingParams(), option="-w")
    prompts = inputs.read_all(source, name, limit)
    contents = tuple((str(prompt.id), prompt.content) for prompt in prompts)
    return Workload(Path(name).name, contents, tuple(prompt.place for prompt in prompts))


def _compare(before: Path, after: Path, as_json: bool) -> int:
    from rakvctl.cli.bench_tables import show_changes
    from rakvctl.measure.results import compare

    changes = compare(before, after)
    if as_json:
        render.print_json(
            {"changes": [asdict(change) | {"beyond_noise": change.is_beyond_noise} for change in changes]}
        )
    else:
        show_changes(changes)
    return 0
