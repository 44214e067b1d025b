"""The user's own directories. What cannot be read there is as if it were not there: ask with `os.path`, not `Path`.

`os.path.exists` and its like say no where `Path.exists` raises PermissionError.
"""

import os
from collections.abc import Callable
from pathlib import Path

_PROGRAM = "rakvctl"


def data_directory() -> Path:
    """Where all that was found out about the user's machine and models is kept."""
    import platformdirs

    return _usable(platformdirs.user_data_path)


def cache_directory() -> Path:
    """Where copies are kept that can be made again."""
    import platformdirs

    return _usable(platformdirs.user_cache_path)


def _usable(find: Callable[[str], Path]) -> Path:
    """The directory; for a user without a home directory one in which nothing is, and nothing can be made."""
    try:
        path = find(_PROGRAM)
    except RuntimeError:
        path = Path("~")
    # Older versions of platformdirs leave `~` in it, which would be made wherever the program runs.
    return Path(os.devnull) / _PROGRAM if path.parts[0] == "~" else path
