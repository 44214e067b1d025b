"""Where the user's profiles lie, each under a name of its own, and which of them are of one pair."""

import hashlib
import os
import re
from pathlib import Path

from rakvctl.core.errors import ProfileError
from rakvctl.core.profile import Fingerprint
from rakvctl.core.profile_file import read_fingerprint
from rakvctl.core.user_directories import data_directory


def profile_directory() -> Path:
    """Where the user's profiles are kept."""
    return data_directory() / "profiles"


def default_path(fingerprint: Fingerprint) -> Path:
    """The place of the profile for one hardware, pair and dtype: a name for people, a digest that tells all apart."""
    pair = [fingerprint.target, fingerprint.draft] if fingerprint.draft else [fingerprint.target]
    names = [*pair, fingerprint.dtype, fingerprint.backend, fingerprint.device, f"{fingerprint.threads}-threads"]
    names.append(fingerprint.processor)
    digest = hashlib.blake2b("\0".join([*names, str(len(pair))]).encode("utf-8", "replace"), digest_size=4).hexdigest()
    return profile_directory() / f"{'_'.join(filter(None, map(_slug, names)))}_{digest}.yaml"


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", name.lower())[-24:].strip("-.")


def find_profiles(target: str, draft: str) -> list[tuple[Path, Fingerprint]]:
    """The user's profiles for a pair, the newest first, found without loading a model."""
    found = []
    for path in sorted(_files(), key=_changed, reverse=True):
        try:
            fingerprint = read_fingerprint(path)
        except ProfileError:
            continue  # whatever is wrong with another pair's is not in this one's way
        if (fingerprint.target, fingerprint.draft) == (target, draft):
            found.append((path, fingerprint))
    return found


def _files() -> list[Path]:
    """The user's profiles; none where there is no such directory, or nobody may read it."""
    directory = profile_directory()
    try:
        return [directory / name for name in os.listdir(directory) if name.endswith(".yaml")]
    except OSError:
        return []


def _changed(path: Path) -> float:
    """When a file was last changed; long ago if it has gone meanwhile."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
