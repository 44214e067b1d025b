"""How stored prompts are named and compared: a digest finds candidates, the token ids one by one decide."""

import hashlib

import numpy as np

from rakvctl.core.types import BUCKET_TOKENS


def common_prefix_length(left: np.ndarray, right: np.ndarray) -> int:
    """How many first ids two arrays share."""
    length = min(len(left), len(right))
    differs = left[:length] != right[:length]
    return int(differs.argmax()) if differs.any() else length


def bucket_digest(model_key: str, ids: np.ndarray) -> bytes:
    """The same for all prompts of a model that begin with the same `BUCKET_TOKENS` tokens."""
    return _digest(model_key, ids[:BUCKET_TOKENS])


def prompt_digest(model_key: str, ids: np.ndarray) -> bytes:
    """Names a whole prompt of a model."""
    return _digest(model_key, ids)


def _digest(model_key: str, ids: np.ndarray) -> bytes:
    """BLAKE2b of 12 bytes over the model's key and token ids: the same in every process."""
    return hashlib.blake2b(model_key.encode() + b"\0" + ids.astype("<i8").tobytes(), digest_size=12).digest()
