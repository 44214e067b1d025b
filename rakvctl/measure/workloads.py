"""What is benchmarked: prompts by name, and for each whether something of it is stored before it comes."""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import resources
from itertools import islice
from pathlib import Path
from typing import Any

from rakvctl.core.errors import UsageError
from rakvctl.core.text import Message

Content = str | tuple[Message, ...]
# The prompt set inside the package.
OWN = "mixed"


@dataclass(frozen=True, slots=True)
class Workload:
    """Named prompts: (id, text or chat) each; `places`: where each of them stands, for errors, if in a file."""

    name: str
    prompts: tuple[tuple[str, Content], ...]
    places: tuple[str, ...] = ()


def load_workload(name: str, folder: Path | None, limit: int | None) -> Workload:
    """The first `limit` prompts of a workload by name; all but `mixed` lie in a folder with their files.

    Raises UsageError for a name that is not known, or a folder without its file.
    """
    if name == OWN:
        text = resources.files("rakvctl.measure").joinpath("prompts.jsonl").read_text(encoding="utf-8")
        return Workload(name, tuple(islice(_own(_rows(text)), limit)))
    read = _READERS.get(name)
    if read is None:
        raise UsageError(f"there is no workload {name}", f"give a prompt file, or one of {', '.join(names())}")
    if folder is None:
        raise UsageError(f"workload {name} needs its files", "name their folder with --data DIR or RAKVCTL_DATA")
    try:
        return Workload(name, tuple(islice(read(folder), limit)))
    except OSError as error:
        raise UsageError(
            f"workload {name} is not in {folder}: {error.strerror}", "name the folder with its files with --data DIR"
        ) from error


def names() -> list[str]:
    """All workloads with a name."""
    return [OWN, *_READERS]


def _rows(text: str) -> Iterator[Mapping[str, Any]]:
    return (json.loads(line) for line in text.splitlines() if line.strip())


def _own(rows: Iterator[Mapping[str, Any]]) -> Iterator[tuple[str, Content]]:
    for row in rows:
        messages = row.get("messages")
        yield row["id"], tuple(messages) if messages else row["prompt"]


def _file(folder: Path, name: str) -> Iterator[Mapping[str, Any]]:
    return _rows((folder / name).read_text(encoding="utf-8"))


def _humaneval(folder: Path) -> Iterator[tuple[str, Content]]:
    return ((str(row["id"]), row["prompt"]) for row in _file(folder, "humaneval.jsonl"))


def _gsm8k(folder: Path) -> Iterator[tuple[str, Content]]:
    """Eight worked examples, the same for all, and one question."""
    prefix = (folder / "gsm8k_8shot_cot_prefix.txt").read_text(encoding="utf-8")
    rows = _file(folder, "gsm8k_8shot_prompts_100.jsonl")
    return ((f"gsm8k/{number}", prefix + row["suffix"]) for number, row in enumerate(rows))


def _edits(folder: Path) -> Iterator[tuple[str, Content]]:
    """A function and what is to be changed in it: the answer copies most of the prompt."""
    for row in _file(folder, "edit_eval_a.jsonl"):
        yield str(row["task_id"]), f"{row['instruction']}\n\n```python\n{row['input']}\n```\n"


def _mt_bench(folder: Path) -> Iterator[tuple[str, Content]]:
    return ((str(row["question_id"]), row["turns"][0]) for row in _file(folder, "mt_bench_question.jsonl"))


def _wikitext(folder: Path) -> Iterator[tuple[str, Content]]:
    """Paragraphs of some length."""
    lines = (folder / "wikitext2_valid.txt").read_text(encoding="utf-8").splitlines()
    long = (line.strip() for line in lines if len(line) >= _WIKITEXT_CHARACTERS)
    return ((f"wikitext/{number}", line[:_WIKITEXT_CHARACTERS]) for number, line in enumerate(long))


_WIKITEXT_CHARACTERS = 600


def _spec_bench(category: str) -> Callable[[Path], Iterator[tuple[str, Content]]]:
    def read(folder: Path) -> Iterator[tuple[str, Content]]:
        rows = _file(folder, "spec_bench_a.jsonl")
        return ((str(row["question_id"]), row["turns"][0]) for row in rows if row["category"] == category)

    return read


_READERS: dict[str, Callable[[Path], Iterator[tuple[str, Content]]]] = {
    "humaneval": _humaneval,
    "gsm8k": _gsm8k,
    "edits": _edits,
    "mt-bench": _mt_bench,
    "wikitext": _wikitext,
    **{f"spec-bench-{name}": _spec_bench(name) for name in ("summarization", "rag", "qa", "translation", "math")},
}
