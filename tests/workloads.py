"""Real prompts for tests, where the folder with them is at hand: RAKVCTL_DATA, or shared/data beside the project."""

import json
import os
from itertools import chain, zip_longest
from pathlib import Path

import pytest


def data_folder() -> Path:
    """The folder with the workloads; skips the test that asks where it is absent."""
    beside = Path(__file__).resolve().parents[2] / "shared" / "data"
    folder = Path(os.environ.get("RAKVCTL_DATA", beside))
    if not (folder / "humaneval.jsonl").is_file():
        pytest.skip("needs the workload files: set RAKVCTL_DATA")
    return folder


def real_prompts() -> list[str]:
    """HumanEval, Spec-Bench and GSM8K (8-shot, one shared prefix), in turn."""
    folder = data_folder()
    prefix = (folder / "gsm8k_8shot_cot_prefix.txt").read_text(encoding="utf-8")
    humaneval = [row["prompt"] for row in _rows(folder / "humaneval.jsonl")]
    spec_bench = [row["turns"][0] for row in _rows(folder / "spec_bench_a.jsonl")]
    gsm8k = [prefix + row["suffix"] for row in _rows(folder / "gsm8k_8shot_prompts_100.jsonl")]
    # Spec-Bench is sorted by category: take its rows from all over it.
    spread = [row for start in range(24) for row in spec_bench[start::24]]
    return [prompt for prompt in chain.from_iterable(zip_longest(humaneval, spread, gsm8k)) if prompt]


def _rows(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
