"""Reads what a checkpoint's generation_config.json asks for: settings that edit scores, and what is not applied."""

import json
import math
from collections.abc import Callable
from typing import Any, NamedTuple

from rakvctl.core.errors import ModelError
from rakvctl.core.logits_processors import LogitsSettings
from rakvctl.core.models import ModelFiles

# Like transformers, take the second file for a checkpoint that lacks the first.
_FILE_NAMES = ("generation_config.json", "config.json")
# What would change a text and is not applied, with the values that would not change it. Left out: what the command line
# decides (lengths, sampling), what only beam search reads, and what concerns caches, outputs and drafts.
_NOT_APPLIED: dict[str, tuple[Any, ...]] = {
    "num_beams": (1,),
    "penalty_alpha": (0,),
    "dola_layers": (),
    "constraints": ([],),
    "force_words_ids": ([],),
    "guidance_scale": (1,),
    "encoder_repetition_penalty": (1,),
    "encoder_no_repeat_ngram_size": (0,),
    "exponential_decay_length_penalty": (),
    "remove_invalid_values": (False,),
    "watermarking_config": (),
    "top_h": (),
    "typical_p": (1,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "stop_strings": ("", []),
    "max_time": (),
    "token_healing": (False,),
    "num_return_sequences": (1,),
}


class GenerationConfig(NamedTuple):
    """`settings` are applied; the fields in `not_applied` ask for something else."""

    settings: LogitsSettings
    not_applied: tuple[str, ...] = ()


def read_generation_config(files: ModelFiles) -> GenerationConfig:
    """What a checkpoint asks for; nothing where it is a single file. Raises ModelError for a malformed value."""
    path = next((path for name in _FILE_NAMES if (path := files.location / name).is_file()), None)
    if path is None:
        return GenerationConfig(LogitsSettings())
    found = {name: value for name, value in json.loads(path.read_text(encoding="utf-8")).items() if value is not None}
    settings = {}
    for name, (parse, wanted) in _PARSERS.items():
        if name in found:
            settings[name] = parse(found[name])
            if settings[name] is None:
                raise ModelError(
                    f"`{name}` in {path.name} of {files.name} is not {wanted}", "correct it there, or remove it"
                )
    return GenerationConfig(
        LogitsSettings(**settings),
        tuple(name for name, neutral in _NOT_APPLIED.items() if name in found and found[name] not in neutral),
    )


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _penalty(value: Any) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and 0 < value < math.inf else None


def _ids(value: Any) -> tuple[int, ...] | None:
    # Ids that no token has are harmless, and some checkpoints hold -1.
    is_list = isinstance(value, list) and all(isinstance(token, int) for token in value)
    return tuple(value) if is_list else None


def _id_or_ids(value: Any) -> tuple[int, ...] | None:
    return _ids(value if isinstance(value, list) else [value])


def _sequences(value: Any) -> tuple[tuple[int, ...], ...] | None:
    found = [_ids(ids) for ids in value] if isinstance(value, list) else [None]
    sequences = tuple(ids for ids in found if ids is not None)
    return sequences if len(sequences) == len(found) else None


def _biases(value: Any) -> tuple[tuple[tuple[int, ...], float], ...] | None:
    if not (isinstance(value, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in value)):
        return None
    sequences, biases = _sequences([ids for ids, _ in value]), [bias for _, bias in value]
    if sequences is None or not all(isinstance(bias, int | float) and not math.isnan(bias) for bias in biases):
        return None
    return tuple(zip(sequences, map(float, biases), strict=True))


_PARSERS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "repetition_penalty": (_penalty, "a number above 0"),
    "no_repeat_ngram_size": (_count, "an integer from 0 on"),
    "sequence_bias": (_biases, "a list of pairs of a list of token ids and a number"),
    "bad_words_ids": (_sequences, "a list of lists of token ids"),
    "min_length": (_count, "an integer from 0 on"),
    "min_new_tokens": (_count, "an integer from 0 on"),
    "forced_bos_token_id": (_count, "a token id"),
    "forced_eos_token_id": (_id_or_ids, "a token id or a list of them"),
    "suppress_tokens": (_ids, "a list of token ids"),
    "begin_suppress_tokens": (_ids, "a list of token ids"),
}
