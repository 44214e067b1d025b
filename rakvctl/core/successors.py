"""What mostly follows each token, whatever came before it: the last resort of looking up, asked of the target itself.

Where the end of a text occurs nowhere else there is nothing to look up. What the target would say after the last token
alone is then right often enough to pay for a slightly wider pass (Stewart et al. 2024, "The N-Grammys", call it the
model's bigram). It takes the target one pass over many tokens to find out, and is kept in a file.
"""

import os
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path

import numpy as np

from rakvctl.core.errors import RakvError, first_line
from rakvctl.core.files import replace_file
from rakvctl.core.user_directories import data_directory


def successors_path(digest: str) -> Path:
    """Where those of a checkpoint are kept, named by its content."""
    return data_directory() / "successors" / f"{digest}.npy"


def read_successors(path: Path, vocab_size: int) -> tuple[int, ...]:
    """The successor of each of the first token ids; of none where there is no file.

    Raises RakvError where the file is damaged or of another vocabulary.
    """
    if not os.path.exists(path):
        return ()
    try:
        table = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise RakvError(f"cannot read {path}: {first_line(error)}", _MEND) from error
    fits = isinstance(table, np.ndarray) and table.ndim == 1 and table.dtype == np.int32 and len(table) <= vocab_size
    if not fits or (table.size and not 0 <= table.min() <= table.max() < vocab_size):
        raise RakvError(f"{path} is of another vocabulary", _MEND)
    return tuple(table.tolist())


def write_successors(path: Path, successors: Sequence[int]) -> None:
    """Keep them, in place of what was there. Raises RakvError."""
    content = BytesIO()
    np.save(content, np.asarray(successors, dtype=np.int32), allow_pickle=False)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, content.getvalue())
    except OSError as error:
        raise RakvError(f"cannot write {path}: {error.strerror}", "make its directory writable") from error


_MEND = "calibrate writes it anew"
