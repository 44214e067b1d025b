"""A request that is only described: the profile for it and its features, without a model and without torch."""

import re
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from rakvctl.core.acceptance import initial_experience
from rakvctl.core.errors import ProfileError, UsageError
from rakvctl.core.hardware import free_memory_bytes, processor_name
from rakvctl.core.loaders import LLAMA_CPP, TORCH, choose_backend
from rakvctl.core.models import Notify, default_draft
from rakvctl.core.profile import Fingerprint, HardwareProfile, field_label
from rakvctl.core.profile_file import read_profile
from rakvctl.core.profile_places import find_profiles
from rakvctl.core.types import Features
from rakvctl.measure.mending import Choice, mending

_DEVICE = re.compile(r"auto|cpu|mps|cuda(:\d+)?")
# A GPU's fingerprint holds its own name, which only torch knows; theirs is the option's.
_NAMED_DEVICES = ("cpu", "mps")
# Whose versions an engine's fingerprint holds.
_LIBRARIES = {TORCH: ("torch", "transformers"), LLAMA_CPP: ("llama-cpp-python",)}


def known_profile(choice: Choice, asked: Collection[str], notify: Notify) -> HardwareProfile:
    """The profile that is named, or the user's newest that fits the options and, as far as can be told, this machine.

    `asked`: which of `target` and `draft` a named profile must have; otherwise it brings its own. `notify` hears where
    it is of another machine, or one of several. Raises ProfileError where none fits.
    """
    if not _DEVICE.fullmatch(choice.device):
        raise UsageError(f"there is no device {choice.device}", "choose auto, cpu, cuda, cuda:N or mps")
    with mending(choice):
        return _own_profile(choice, notify) if choice.profile == "auto" else _named_profile(choice, asked, notify)


def _named_profile(choice: Choice, asked: Collection[str], notify: Notify) -> HardwareProfile:
    """What was asked for must be so; beside that, the times of another machine may be looked at."""
    profile = read_profile(Path(choice.profile))
    mark = profile.fingerprint
    pair = {name: value for name, value in _pair(choice).items() if name in asked}
    _refuse_differing(choice.profile, _differences(mark, pair | _asked_hardware(choice, mark)))
    elsewhere = _differences(mark, _here(choice, mark))
    if elsewhere:
        notify(f"the profile {choice.profile} was measured with {elsewhere[0]}; these are the times of there")
    return profile


def _own_profile(choice: Choice, notify: Notify) -> HardwareProfile:
    pair = _pair(choice)
    choice = replace(choice, backend=choose_backend(choice))
    found = {
        path: _differences(mark, _here(choice, mark) | _asked_hardware(choice, mark))
        for path, mark in find_profiles(pair["target"], pair["draft"])
    }
    if not found:
        words = " with draft ".join(filter(None, pair.values()))
        raise ProfileError(f"there is no profile for {words} on this machine", "")
    best = min(found, key=lambda path: len(found[path]))
    _refuse_differing(str(best), found[best])
    profile = read_profile(best)
    num_fitting = sum(not differences for differences in found.values())
    if num_fitting > 1:
        mark = profile.fingerprint
        notify(
            f"{num_fitting} profiles fit, the newest is taken: {mark.device}, {mark.dtype}, threads: {mark.threads}, "
            f"{mark.backend}; --device, --dtype, --threads, --kv-type or --profile FILE choose another"
        )
    return profile


def _pair(choice: Choice) -> dict[str, str]:
    draft = "" if choice.draft == "none" else choice.draft or default_draft(choice.target) or ""
    return {"target": choice.target, "draft": draft}


def _asked_hardware(choice: Choice, mark: Fingerprint) -> dict[str, str | int]:
    """The fields of a fingerprint that options ask for."""
    asked: dict[str, str | int] = {}
    if choice.backend != "auto" and _engine(mark) not in (None, choice.backend):
        asked["backend"] = choice.backend
    states = f"llama.cpp, {choice.kv_type} keys, {choice.kv_type} values"
    if choice.kv_type is not None and not mark.backend.startswith(states):
        asked["backend"] = states
    if choice.num_threads is not None:
        asked["threads"] = choice.num_threads
    if choice.dtype != "auto":
        asked["dtype"] = choice.dtype
    if choice.device in _NAMED_DEVICES or (choice.device != "auto" and mark.device in _NAMED_DEVICES):
        asked["device"] = choice.device
    return asked


def _here(choice: Choice, mark: Fingerprint) -> dict[str, str | int]:
    """The fields of a fingerprint that can be told of this machine without torch."""
    here: dict[str, str | int] = {"processor": processor_name()}
    engine = _engine(mark)
    if choice.dtype == "auto" and mark.device == "cpu" and engine != LLAMA_CPP:
        here["dtype"] = "float32"
    versions = _versions(_LIBRARIES[engine]) if engine else None
    # Beside the release, torch may name its build, which the package index does not know.
    if versions and re.sub(r"\+[^,]*", "", mark.versions) != versions:
        here["versions"] = versions
    return here


def _engine(mark: Fingerprint) -> str | None:
    """The engine that a fingerprint is of, as `--backend` names it; None for one that users do not know."""
    names = {"torch": TORCH, "llama.cpp": LLAMA_CPP}
    return names.get(mark.backend.partition(",")[0])


def _versions(libraries: tuple[str, ...]) -> str | None:
    """Releases of the libraries, as a fingerprint holds them; None where one was installed in a way of its own."""
    from importlib.metadata import PackageNotFoundError, version  # slow to import, and not always needed

    try:
        return ", ".join(f"{name} {version(name).partition('+')[0]}" for name in libraries)
    except PackageNotFoundError:
        return None


def _differences(mark: Fingerprint, wanted: dict[str, str] | dict[str, str | int]) -> list[str]:
    """Where a fingerprint is another one than wanted, in words."""
    return [
        f"another {field_label(name)}: {getattr(mark, name) or 'none'}; here it is {value or 'none'}"
        for name, value in wanted.items()
        if getattr(mark, name) != value
    ]


def _refuse_differing(where: str, differences: list[str]) -> None:
    if differences:
        raise ProfileError(f"the profile {where} was measured with {differences[0]}", "")


def described(profile: HardwareProfile, num_tokens: int, cached: int, max_new_tokens: int) -> Features:
    """The features of a request of so many tokens, `cached` of which both models have in the store.

    As many new tokens as the model has positions for. Raises UsageError where that is none.
    """
    limit, draft = profile.target.max_positions, profile.draft
    if limit is not None and num_tokens >= limit:
        raise UsageError(
            f"a prompt of {num_tokens} tokens is too long: the model has room for {limit} with at least one new token",
            f"give --prompt-tokens below {limit}, or take a model with a longer context",
        )
    draft_limit = draft.model.max_positions if draft is not None else None
    is_too_long = draft_limit is not None and num_tokens >= draft_limit
    return Features(
        num_prompt_tokens=num_tokens,
        max_new_tokens=max_new_tokens if limit is None else min(max_new_tokens, limit - num_tokens),
        num_matched_tokens=cached,
        num_cloned_tokens=cached,
        num_draft_cloned_tokens=cached,
        drafter="model" if draft is not None and not is_too_long else "none",
        no_drafter_reason=f"the draft has {draft_limit} positions" if is_too_long else None,
        alpha=initial_experience(profile).alpha,
        # What a GPU has free only torch knows.
        memory_budget_bytes=free_memory_bytes() if profile.fingerprint.device in _NAMED_DEVICES else None,
    )
