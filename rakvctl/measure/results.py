"""The results of a benchmark: summed up by arm and workload, written as JSON, and two of them compared."""

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rakvctl.core.errors import UsageError
from rakvctl.measure.bench import REFERENCE, Sample
from rakvctl.measure.statistics import Interval, ratio_interval

ALL = "all"
# Of fewer prompts an interval is too wide to say anything, or rests on how ratios are distributed.
_FEWEST_PROMPTS = 5
# The entries that the results of every study have.
_ENTRIES = {"study", "environment", "profile", "samples"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmSummary:
    """One arm on one workload (or on `all`). Medians over executions; `speedup`: the reference's time over its own.

    `num_samples` counts executions. A prompt under several kinds of hit, or repeated, is one of `num_prompts`.
    """

    workload: str
    arm: str
    num_prompts: int
    num_samples: int
    total_ms: float
    ttft_ms: float | None
    tpot_ms: float | None
    tokens_per_s: float
    speedup: Interval
    draft_acceptance_rate: float | None
    reused_share: float | None
    num_unequal: int


def summarize(samples: Sequence[Sample]) -> list[ArmSummary]:
    """Every arm on every workload, the reference first, and on all of them together if there are several.

    Only prompts that the reference was run on count: of those cut off by an interrupt nothing can be compared.
    """
    known = {(sample.workload, sample.prompt_id) for sample in samples if sample.arm == REFERENCE}
    samples = [sample for sample in samples if (sample.workload, sample.prompt_id) in known]
    workloads = list(dict.fromkeys(sample.workload for sample in samples))
    arms = sorted(dict.fromkeys(sample.arm for sample in samples), key=lambda arm: arm != REFERENCE)
    names = [*workloads, ALL] if len(workloads) > 1 else workloads
    ran = {(workload, sample.arm) for sample in samples for workload in (sample.workload, ALL)}
    return [_summary(samples, workload, arm) for workload in names for arm in arms if (workload, arm) in ran]


def _summary(samples: Sequence[Sample], workload: str, arm: str) -> ArmSummary:
    mine = [sample for sample in samples if sample.arm == arm and workload in (ALL, sample.workload)]
    outcomes = [sample.outcome for sample in mine]
    drafted = sum(outcome.num_draft_tokens or 0 for outcome in outcomes)
    accepted = sum(outcome.num_accepted_tokens or 0 for outcome in outcomes)
    knows_reuse = all(outcome.reused_tokens is not None for outcome in outcomes)
    reused = sum(outcome.reused_tokens or 0 for outcome in outcomes)
    times, reference = paired_ms(samples, workload, arm), paired_ms(samples, workload, REFERENCE)
    prompts = {(sample.workload, sample.prompt_id): sample.prompt for sample in mine}
    return ArmSummary(
        workload=workload,
        arm=arm,
        num_prompts=len({sample.prompt for sample in mine}),
        num_samples=len(mine),
        total_ms=statistics.median(outcome.total_ms for outcome in outcomes),
        ttft_ms=_median([outcome.ttft_ms for outcome in outcomes]),
        tpot_ms=_median([outcome.tpot_ms for outcome in outcomes]),
        tokens_per_s=statistics.median(1e3 * len(outcome.token_ids) / outcome.total_ms for outcome in outcomes),
        speedup=ratio_interval(
            [reference[key] for key in times], list(times.values()), [prompts[key] for key in times]
        ),
        draft_acceptance_rate=accepted / drafted if drafted else None,
        reused_share=reused / sum(sample.prompt_tokens for sample in mine) if knows_reuse else None,
        num_unequal=sum(not sample.equal for sample in mine),
    )


def paired_ms(samples: Sequence[Sample], workload: str, arm: str) -> dict[tuple[str, str], float]:
    """An arm's median time over the repeats of each prompt, by (workload, prompt id)."""
    times: dict[tuple[str, str], list[float]] = {}
    for sample in samples:
        if sample.arm == arm and workload in (ALL, sample.workload):
            times.setdefault((sample.workload, sample.prompt_id), []).append(sample.outcome.total_ms)
    return {key: statistics.median(values) for key, values in times.items()}


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def sample_record(sample: Sample) -> dict[str, Any]:
    """A sample as the command line's contract has it, and what the arm knows beside."""
    outcome = sample.outcome
    return {
        "workload": sample.workload,
        "prompt_id": sample.prompt_id,
        "arm": sample.arm,
        "repeat": sample.repeat,
        "prompt_tokens": sample.prompt_tokens,
        "completion_tokens": len(outcome.token_ids),
        "total_ms": outcome.total_ms,
        "ttft_ms": outcome.ttft_ms,
        "equal": sample.equal,
        "reuse": outcome.reuse,
        "draft_len": outcome.draft_len,
        "reused_tokens": outcome.reused_tokens,
        "num_draft_tokens": outcome.num_draft_tokens,
        "num_accepted_tokens": outcome.num_accepted_tokens,
        "predicted_ms": outcome.predicted_ms,
    }


@dataclass(frozen=True, slots=True)
class Change:
    """One arm on one workload in two results: `ratio` is the second's time over the first's, prompts paired."""

    workload: str
    arm: str
    ratio: Interval
    num_prompts: int

    @property
    def is_beyond_noise(self) -> bool:
        """Whether the interval leaves 1 out, and there are enough prompts for it to mean something."""
        return self.num_prompts >= _FEWEST_PROMPTS and (self.ratio.low > 1.0 or self.ratio.high < 1.0)

    @property
    def verdict(self) -> str:
        """What the second is, in a word or two."""
        if self.num_prompts < _FEWEST_PROMPTS:
            return "too few prompts"
        return "noise" if not self.is_beyond_noise else "slower" if self.ratio.low > 1.0 else "faster"


def compare(before: Path, after: Path) -> list[Change]:
    """What changed between two `results.json`, for the arms and prompts that both have, with answers of equal length.

    Raises UsageError where a file holds no results, or they have nothing in common.
    """
    first, second = _times(before), _times(after)
    groups: dict[tuple[str, str], list[tuple[float, float, str]]] = {}
    for key in sorted(first.keys() & second.keys()):
        workload, arm, prompt_id, _ = key
        pair = statistics.median(second[key]), statistics.median(first[key])
        groups.setdefault((workload, arm), []).append((*pair, prompt_id))
    if not groups:
        raise UsageError(
            f"{before} and {after} have no arm and prompt with answers of the same length in common",
            "compare runs of the same workloads and -n",
        )
    return [
        Change(workload, arm, ratio_interval(*zip(*pairs, strict=True)), len({prompt_id for *_, prompt_id in pairs}))
        for (workload, arm), pairs in sorted(groups.items())
    ]


def holds_results(path: Path) -> bool:
    """Whether a file holds the results of some study."""
    try:
        content = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(content, dict) and content.keys() >= _ENTRIES


def _times(path: Path) -> dict[tuple[str, str, str, int], list[float]]:
    """Times by workload, arm, prompt and length of the answer."""
    try:
        content: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        times: dict[tuple[str, str, str, int], list[float]] = {}
        for sample in content["samples"]:
            names = (str(sample["workload"]), str(sample["arm"]), str(sample["prompt_id"]))
            key = (*names, int(sample["completion_tokens"]))
            times.setdefault(key, []).append(float(sample["total_ms"]))
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}", "give the results.json of two runs") from error
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path} holds no results", "give the results.json of two runs") from error
    return times
