"""A runtime that is ready to serve: models loaded and, where the policy reckons with costs, a fitting profile."""

import time
from dataclasses import replace
from pathlib import Path

from rakvctl.core.errors import ProfileError
from rakvctl.core.loading import RuntimeOptions, load_pair, make_runtime
from rakvctl.core.models import Notify
from rakvctl.core.pair import ModelPair
from rakvctl.core.policies import policy_needs
from rakvctl.core.profile import HardwareProfile
from rakvctl.core.profile_file import (
    default_path,
    field_label,
    foreign_fields,
    read_profile,
    refuse_foreign,
    write_profile,
)
from rakvctl.core.runtime import Runtime
from rakvctl.measure.calibrate import calibrate
from rakvctl.measure.timing import Effort, Progress

QUICK_SECONDS = 10.0


def load_runtime(options: RuntimeOptions, notify: Notify, on_progress: Progress) -> Runtime:
    """Load models and profile; without a profile for them a quick calibration makes one.

    Raises what `load_pair` raises, and ProfileError for a profile that the user names and that does not fit.
    """
    pair = load_pair(options, notify)
    if not policy_needs(options.policy).profile:
        return make_runtime(pair, options, None)
    if not pair.target.can_rollback:
        return make_runtime(pair, replace(options, policy="ar"), None)
    return make_runtime(pair, options, fitting_profile(pair, options.profile, notify, on_progress))


def fitting_profile(pair: ModelPair, name: str, notify: Notify, on_progress: Progress) -> HardwareProfile:
    """The profile at a path, or for `auto` the user's own for this pair and hardware, measured now if need be."""
    here = pair.fingerprint()
    if name != "auto":
        profile = read_profile(Path(name).expanduser())
        refuse_foreign(profile, here, name)
        return profile
    path = default_path(here)
    if path.exists():
        profile = read_profile(path)
        differing = foreign_fields(profile.fingerprint, here)
        if not differing:
            return profile
        notify(f"the profile is of another {field_label(differing[0])}: measuring anew, about {QUICK_SECONDS:.0f} s")
    else:
        notify(f"no profile for this machine and pair: measuring one, about {QUICK_SECONDS:.0f} s, this once")
    profile = calibrate(pair, Effort(budget_s=QUICK_SECONDS), time.perf_counter, on_progress).profile
    try:
        write_profile(profile, path)
    except ProfileError as error:
        notify(f"{error.message}; the next run will measure again")
    return profile
