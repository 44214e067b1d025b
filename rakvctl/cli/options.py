"""Options that commands share, and the parsing of their values."""

import re
import sys
from enum import StrEnum
from typing import Annotated

import typer

from rakvctl.core.errors import UsageError

_SIZE = re.compile(r"(?P<number>\d+(\.\d+)?)\s*(?P<unit>[KMGT]i?B|B)?", re.IGNORECASE)
_POWERS = {"K": 1, "M": 2, "G": 3, "T": 4}


class Dtype(StrEnum):
    """The number types a model can run in."""

    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


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
    NONE = "none"


def parse_bytes(text: str) -> int:
    """Bytes of a size such as `512MiB`, `2GB` or `1048576`. Raises UsageError for anything else."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"{text} is not a size", "write a number with a unit, such as 512MiB, 2GB or 0")
    unit = (match["unit"] or "B").upper()
    base = 1024 if unit.endswith("IB") else 1000
    size = float(match["number"]) * base ** _POWERS.get(unit[0], 0)
    if size > sys.maxsize:
        raise UsageError(f"{text} is more than any memory", "write a number with a unit, such as 512MiB, 2GB or 0")
    return int(size)


_MODELS = "Models"

Target = Annotated[
    str,
    typer.Option(
        "-m",
        "--target",
        metavar="MODEL",
        envvar="RAKVCTL_TARGET",
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
        rich_help_panel=_MODELS,
        help="The draft model, of the same tokenizer.",
        show_default="the target's own draft if it has one, else none",
    ),
]
Device = Annotated[
    str,
    typer.Option(
        metavar="auto|cpu|cuda[:N]|mps",
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
Threads = Annotated[
    int | None,
    typer.Option(
        metavar="N", min=1, rich_help_panel=_MODELS, help="CPU threads to compute with.", show_default="torch's choice"
    ),
]
Profile = Annotated[
    str,
    typer.Option(
        "--profile",
        metavar="PATH|auto",
        envvar="RAKVCTL_PROFILE",
        rich_help_panel=_MODELS,
        help="Measured costs of this machine; auto is your own profile for it, measured if there is none.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object on stdout instead of tables.")]
