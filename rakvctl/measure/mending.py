"""What mends a profile that does not fit: the command to measure one, with the options that the user gave."""

import os
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rakvctl.core.errors import ProfileError

if TYPE_CHECKING:
    from rakvctl.core.loading import RuntimeOptions

# What the command line takes a profile's name from where no option gives it.
PROFILE_VARIABLE = "RAKVCTL_PROFILE"


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What the user says of models, hardware and profile; known before torch is. Fields as in `RuntimeOptions`."""

    target: str
    draft: str | None
    backend: str = "auto"
    device: str
    dtype: str
    num_threads: int | None
    kv_type: str | None = None
    context_size: int | None = None
    profile: str
    exact: bool = False


def calibrate_command(choice: "Choice | RuntimeOptions", out: str | None = None) -> str:
    """The command that measures a profile for these options, into a file if one is named; ready to be pasted."""
    given = {
        "-m": choice.target,
        "-d": choice.draft,
        "--backend": None if choice.backend == "auto" else choice.backend,
        "--device": None if choice.device == "auto" else choice.device,
        "--dtype": None if choice.dtype == "auto" else choice.dtype,
        "--threads": None if choice.num_threads is None else str(choice.num_threads),
        "--kv-type": choice.kv_type,
        "--context-size": None if choice.context_size is None else str(choice.context_size),
        "-o": out,
    }
    words = [word for option, value in given.items() if value is not None for word in (option, value)]
    return shlex.join(["rakvctl", "calibrate", *words, *(["--exact"] if choice.exact else [])])


def mend(choice: "Choice | RuntimeOptions") -> str:
    """What to do where there is no profile that fits."""
    if choice.profile == "auto":
        return f"measure one with: {calibrate_command(choice)}"
    if os.path.expanduser(os.environ.get(PROFILE_VARIABLE, "")) == choice.profile:
        unnamed = f"the name is from {PROFILE_VARIABLE}: unset it"
    else:
        unnamed = "leave --profile out"
    # What is there stays: it may be the profile of another machine, and good there.
    out = None if os.path.lexists(choice.profile) else choice.profile
    return f"{unnamed} to take your own, or measure one with: {calibrate_command(choice, out)}"


@contextmanager
def mending(choice: "Choice | RuntimeOptions") -> Iterator[None]:
    """Let the hints of profile errors name the command that mends them for these options."""
    try:
        yield
    except ProfileError as error:
        raise ProfileError(error.message, mend(choice)) from error
