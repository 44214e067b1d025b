"""The training text of the pair `tiny`: the running Python's own standard library sources.

Knows nothing of models. Files are split into training and held-out by a hash of their path, so the split is the same
on every machine that has the same Python.
"""

import hashlib
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

END_OF_TEXT = "<|endoftext|>"
_END_OF_TEXT_ID = 0

# Character tables and help topics are data rather than code.
_SKIPPED_DIRS = {"site-packages", "dist-packages", "encodings", "pydoc_data", "__pycache__"}
_HELD_OUT_ONE_IN = 20


@dataclass(frozen=True, slots=True)
class SourceFiles:
    """Files of the standard library and, where they are installed, its tests; each list sorted by path."""

    training: list[Path]
    held_out: list[Path]


def source_files() -> SourceFiles:
    """Find the standard library's own sources and split them."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = SourceFiles([], [])
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if _SKIPPED_DIRS.intersection(relative.parts):
            continue
        digest = hashlib.blake2b(relative.as_posix().encode(), digest_size=4).digest()
        if int.from_bytes(digest) % _HELD_OUT_ONE_IN == 0:
            files.held_out.append(path)
        else:
            files.training.append(path)
    return files


def read_all(paths: list[Path]) -> Iterator[str]:
    """Yield the text of each file; the few that are not UTF-8 are decoded with replacement characters."""
    for path in paths:
        yield path.read_text(encoding="utf-8", errors="replace")


def train_tokenizer(paths: list[Path], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE of exactly `vocab_size` tokens; `END_OF_TEXT` is token 0."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(read_all(paths), trainer)
    return tokenizer


def encode(paths: list[Path], tokenizer: Tokenizer) -> torch.Tensor:
    """Encode all files into one stream of token ids, shape [num_tokens], int64, each file ended by `END_OF_TEXT`."""
    ids = [_END_OF_TEXT_ID]
    for encoding in tokenizer.encode_batch(list(read_all(paths))):
        ids.extend(encoding.ids)
        ids.append(_END_OF_TEXT_ID)
    return torch.tensor(ids, dtype=torch.int64)
