"""Options that commands share, and the parsing of their values."""

import os
import re
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from rakvctl.cli.sampling import BOUNDED, bounded
from rakvctl.core.errors import UsageError
from rakvctl.core.types import SamplingParams

_SIZE = re.compile(r"(?P<number>\d+(\.\d+)?)\s*(?P<unit>[KMGT]i?B|B)?", re.IGNORECASE | re.ASCII)
_POWERS = {"K": 1, "M": 2, "G": 3, "T": 4}


class Dtype(StrEnum):
    """The number types a model can run in."""

    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


class BackendName(StrEnum):
    """The engines that run a model."""

    AUTO = "auto"
    TORCH = "torch"
    LLAMA_CPP = "llama-cpp"


class KVType(StrEnum):
    """The number types that llama.cpp keeps states in."""

    F32 = "f32"
    F16 = "f16"
    BF16 = "bf16"
    Q8_0 = "q8_0"


class InputFormat(StrEnum):
    """How prompt files are read."""

    AUTO = "auto"
    TEXT = "text"
    LINES = "lines"
    JSONL = "jsonl"


class OutputFormat(StrEnum):
    """How results are written."""

    TEXT = "text"
    JSONL = "jsonl"


class DrafterChoice(StrEnum):
    """Who may draft tokens."""

    AUTO = "auto"
    MODEL = "model"
    LOOKUP = "lookup"
    NONE = "none"


def parse_bytes(text: str) -> int:
    """Bytes of a size such as `512MiB`, `2GB` or `1048576`. Raises UsageError for anything else."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"'{text}' is not a size", "write a number with a unit, such as 512MiB, 2GB or 0")
    unit = (match["unit"] or "B").upper()
    base = 1024 if unit.endswith("IB") else 1000
    size = float(match["number"]) * base ** _POWERS.get(unit[0], 0)
    if size > sys.maxsize:
        raise UsageError(f"{text} is more than any memory", "write a number with a unit, such as 512MiB, 2GB or 0")
    return int(size)


def check_sampling(sampling: SamplingParams) -> None:
    """Raise UsageError for an option out of its bounds."""
    for name in BOUNDED:
        value = getattr(sampling, name)
        if value is not None:
            number = f"{value:g}" if isinstance(value, float) else str(value)
            bounded(name, value, f"--{name.replace('_', '-')} {number}", UsageError)
    if "" in sampling.stop:
        raise UsageError("--stop is empty", "an empty text stops nothing: leave it out")


def not_empty(value: str | None) -> str | None:
    """What names something; where it is empty, a variable of the shell was most likely never set."""
    if value is not None and not value.strip():
        raise typer.BadParameter("it is empty; without the option its default is taken")
    return value


def parse_path(value: str | Path) -> Path:
    """The path that an option or a variable names, under the home directory where it begins with `~`.

    Raises BadParameter where it is empty: of a Path that could no longer be told from the current directory.
    """
    return Path(parse_name(value))


def parse_name(value: str | Path) -> str:
    """The same for what need not be a path, such as the name of a model, `auto` or `-`."""
    return os.path.expanduser(not_empty(str(value)) or "")


_MODELS = "Models"

Target = Annotated[
    str,
    typer.Option(
        "-m",
        "--target",
        metavar="MODEL",
        envvar="RAKVCTL_TARGET",
        parser=parse_name,
        rich_help_panel=_MODELS,
        help="The model: tiny, smollm2, a Hub id, a directory, or a .gguf file.",
    ),
]
Draft = Annotated[
    str | None,
    typer.Option(
        "-d",
        "--draft",
        metavar="MODEL|none",
        envvar="RAKVCTL_DRAFT",
        parser=parse_name,
        rich_help_panel=_MODELS,
        help="The draft model, of the same tokenizer.",
        show_default="the target's own draft if it has one, else none",
    ),
]
Device = Annotated[
    str,
    typer.Option(
        metavar="auto|cpu|cuda[:N]|mps",
        callback=not_empty,
        rich_help_panel=_MODELS,
        help="Where to compute; auto takes a GPU if there is one.",
    ),
]
DtypeOption = Annotated[
    Dtype,
    typer.Option(
        "--dtype",
        rich_help_panel=_MODELS,
        help="Number type; auto is float32 on a CPU and the checkpoint's own type on a GPU.",
    ),
]
Backend = Annotated[
    BackendName,
    typer.Option(
        "--backend",
        rich_help_panel=_MODELS,
        help="The engine; auto takes llama.cpp for a .gguf file on a CPU if it is installed, else torch.",
    ),
]
KVTypeOption = Annotated[
    KVType | None,
    typer.Option(
        "--kv-type",
        rich_help_panel=_MODELS,
        help="On llama.cpp: number type of keys and values.",
        show_default="bf16 keys and f16 values, of which passes of all widths make the same bits",
    ),
]
ContextSize = Annotated[
    int | None,
    typer.Option(
        "--context-size",
        metavar="TOKENS",
        min=2,
        rich_help_panel=_MODELS,
        help="On llama.cpp: the longest sequence, prompt and new tokens, in tokens; at most what the model knows.",
        show_default="as long as the model was trained for; memory is taken as it is needed",
    ),
]
Threads = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        min=1,
        rich_help_panel=_MODELS,
        help="CPU threads to compute with, at most one for each core that the process may use.",
        show_default="as many as there are cores, or torch's choice",
    ),
]
Profile = Annotated[
    str,
    typer.Option(
        "--profile",
        metavar="PATH|auto",
        envvar="RAKVCTL_PROFILE",
        parser=parse_name,
        rich_help_panel=_MODELS,
        help="Measured costs of this machine; auto is your own profile for it, measured if there is none.",
    ),
]
Exact = Annotated[
    bool,
    typer.Option(
        "--exact",
        rich_help_panel=_MODELS,
        help="Compute in a way that is measured to give the same bits in every pass, or fail. In float32 on x86 CPUs "
        "that is so in any case; otherwise near ties are decided by plain steps.",
    ),
]
_METHOD = "Method"

KVDir = Annotated[
    Path | None,
    typer.Option(
        "--kv-dir",
        metavar="DIR",
        envvar="RAKVCTL_KV_DIR",
        parser=parse_path,
        rich_help_panel=_METHOD,
        help="Keep stored prefixes and texts in this directory, for processes to come.",
        show_default="they end with the process",
    ),
]
KVDiskBudget = Annotated[
    str,
    typer.Option(
        "--kv-disk-budget", metavar="SIZE", rich_help_panel=_METHOD, help="What the files in --kv-dir may take."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object on stdout instead of tables.")]
