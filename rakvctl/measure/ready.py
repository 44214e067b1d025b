"""A runtime that is ready to serve: models loaded and, where the policy reckons with costs, a fitting profile."""

import os
import time
from dataclasses import replace
from pathlib import Path

from rakvctl.core.errors import ProfileError, RakvError
from rakvctl.core.files import only_process
from rakvctl.core.loading import RuntimeOptions, load_pair, make_runtime, with_near_tie, with_successors
from rakvctl.core.models import Notify
from rakvctl.core.pair import ModelPair
from rakvctl.core.policies import policy_needs
from rakvctl.core.profile import Fingerprint, HardwareProfile, field_label, foreign_fields
from rakvctl.core.profile_file import read_profile, refuse_foreign, write_profile
from rakvctl.core.profile_places import default_path
from rakvctl.core.runtime import Runtime
from rakvctl.core.successors import successors_path, write_successors
from rakvctl.measure.calibrate import Calibration, calibrate
from rakvctl.measure.mending import calibrate_command, mending
from rakvctl.measure.timing import Effort, Progress

QUICK_SECONDS = 10.0
# In float32 logits differ by less if they differ at all, and two tokens are that close but once in many texts.
_NOTEWORTHY_DIFFERENCE = 1e-3


def load_runtime(options: RuntimeOptions, notify: Notify, on_progress: Progress) -> Runtime:
    """Load models and profile; without a profile for them a quick calibration makes one.

    Raises what `load_pair` raises, and ProfileError for a profile that the user names and that does not fit.
    """
    pair, needs = load_pair(options, notify), policy_needs(options.policy)
    if not needs.store and needs.drafter == "unused":
        # Plain decoding makes passes of no other kind, that logits could differ in.
        return make_runtime(pair, options, None)
    if not needs.profile:
        runtime = make_runtime(_with_known_difference(pair, options.policy), options, None)
    elif not pair.target.can_rollback:
        runtime = make_runtime(pair, replace(options, policy="ar"), None)
    else:
        profile = fitting_profile(pair, options, notify, on_progress)
        runtime = make_runtime(with_successors(pair, notify), options, profile)
    _tell_inexact(runtime, pair.target_name, notify)
    return runtime


def _with_known_difference(pair: ModelPair, policy: str) -> ModelPair:
    """Spare a policy that needs no profile to measure how far logits differ, where the user's own profile has it."""
    here = pair.fingerprint()
    try:
        profile, _ = _kept(default_path(here), here)
    except ProfileError:
        return pair  # those who need it will hear of it
    return with_near_tie(pair, policy, profile) if profile is not None else pair


def _tell_inexact(runtime: Runtime, target_name: str, notify: Notify) -> None:
    """Say where the text may depend on what is reused and drafted, and by how much logits do."""
    difference = runtime.near_tie / 2
    if difference > _NOTEWORTHY_DIFFERENCE:
        notify(
            f"here the logits of {target_name} differ from pass to pass, by up to {difference:.2g}: reuse and drafts "
            "may change a text where two tokens are nearly as good; --exact prevents that, or says that it cannot"
        )


def fitting_profile(pair: ModelPair, options: RuntimeOptions, notify: Notify, on_progress: Progress) -> HardwareProfile:
    """The profile at a path, or for `auto` the user's own for this pair and hardware, measured now if need be.

    Raises ProfileError where a file does not fit or cannot be read.
    """
    name, here = options.profile, pair.fingerprint()
    path = default_path(here) if name == "auto" else Path(name)
    if options.drafter in ("none", "lookup"):
        options = replace(options, draft="none")
    with mending(options):
        if name != "auto":
            profile = read_profile(path)
            refuse_foreign(profile, here, name)
            return profile
        kept, _ = _kept(path, here)
    if kept is not None:
        return kept
    # Whoever measures is to be alone, and the others of this machine wait for what it finds.
    with only_process(path.with_name("measuring.lock")):
        with mending(options):
            kept, why = _kept(path, here)
        if kept is not None:
            return kept
        notify(f"{why}, about {QUICK_SECONDS:.0f} s, this once")
        return _measured_now(pair, options, path, notify, on_progress)


def _kept(path: Path, here: Fingerprint) -> tuple[HardwareProfile | None, str]:
    """The profile at a path, or None and why it cannot be used. Raises ProfileError where it is damaged."""
    if not os.path.exists(path):
        return None, "no profile for this machine and pair: measuring one"
    profile = read_profile(path)
    differing = foreign_fields(profile.fingerprint, here)
    if differing:
        return None, f"the profile is of another {field_label(differing[0])}: measuring anew"
    return profile, ""


def _measured_now(
    pair: ModelPair, options: RuntimeOptions, path: Path, notify: Notify, on_progress: Progress
) -> HardwareProfile:
    """A quick profile, and what mostly follows frequent tokens, kept where they can be."""
    pair = with_successors(pair, notify)
    calibration = calibrate(pair, Effort(budget_s=QUICK_SECONDS), time.perf_counter, on_progress)
    if calibration.noisy:
        notify(
            "some of its times varied by more than a tenth, so choices may not be the best: close other programs, "
            f"then run: {calibrate_command(options)}"
        )
    try:
        keep(calibration, path, notify)
    except RakvError as error:
        notify(f"{error.message}; the next run will measure again")
    return calibration.profile


def keep(calibration: Calibration, path: Path, notify: Notify) -> None:
    """Write the profile to `path`, and the target's bigram table to the place for its checkpoint.

    Raises RakvError where the profile cannot be written; `notify` hears where the table cannot: it only speeds up.
    """
    write_profile(calibration.profile, path)
    if calibration.successors:
        table = successors_path(calibration.profile.fingerprint.target_digest)
        try:
            write_successors(table, calibration.successors)
        except RakvError as error:
            notify(f"{error.message}; {error.hint}")
