"""The profile as a YAML file for people: read with every value checked, written all or nothing."""

import dataclasses
import errno
import math
import os
import tempfile
import types
import typing
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from rakvctl.core.descriptors import open_descriptor
from rakvctl.core.errors import ProfileError, RakvError, first_line
from rakvctl.core.files import replace_file
from rakvctl.core.profile import SCHEMA_VERSION, Curve, Fingerprint, HardwareProfile, field_label, foreign_fields

# The least and the largest value of fields that are not just any number from 0 on.
# More than any model has positions for.
_MOST_TOKENS = 2**31
_RANGES = {
    "alpha": (0.0, 1.0),
    "spearman": (-1.0, 1.0),
    "memory_bytes_per_ms": (math.ulp(0.0), math.inf),
    "matched_tokens": (1, math.inf),
    "prefill_chunk_tokens": (1, math.inf),
    "sizes_tokens": (0, _MOST_TOKENS),
    "contexts_tokens": (0, _MOST_TOKENS),
}
# Beside its own errors, what the YAML reader stumbles over in values that claim to be dates, numbers or the like.
_YAML_ERRORS = (yaml.YAMLError, ValueError, KeyError, AttributeError, RecursionError)


class _Dumper(yaml.SafeDumper):
    """Lists of numbers on one line, everything else in blocks."""


def _represent_list(dumper: yaml.SafeDumper, values: list[Any]) -> yaml.Node:
    is_flat = not any(isinstance(value, list | dict) for value in values)
    return dumper.represent_sequence("tag:yaml.org,2002:seq", values, flow_style=is_flat)


_Dumper.add_representer(list, _represent_list)


def write_profile(profile: HardwareProfile, path: Path) -> None:
    """Write a profile in place of what was there. Raises RakvError where it cannot be written."""
    text = yaml.dump(_plain(profile), Dumper=_Dumper, sort_keys=False, width=110, allow_unicode=True)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, text.encode())
    except OSError as error:
        raise _cannot_write(path, error) from error


def refuse_unwritable(path: Path) -> None:
    """Raise RakvError where a profile could not be written, before time is spent on it. Makes missing directories."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = open_descriptor(path)
        if descriptor is not None:
            os.write(descriptor, b"")  # fails where it is open for reading only
            return
        if path.exists() and not path.is_file() and not path.is_dir():
            return  # a device or a pipe is written in place
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as error:
        raise _cannot_write(path, error) from error


def _cannot_write(path: Path, error: OSError) -> RakvError:
    return RakvError(f"cannot write the profile {path}: {error.strerror}", "give -o a file in a writable directory")


def _plain(value: Any) -> Any:
    """Dataclasses as dicts and tuples as lists, in the order of the fields; six significant digits are plenty."""
    if dataclasses.is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def read_profile(path: Path) -> HardwareProfile:
    """Read and check a profile. Raises ProfileError that says what is wrong with it."""
    profile: HardwareProfile = _checked(HardwareProfile, _load(_text(path), path), path)
    return profile


def read_fingerprint(path: Path) -> Fingerprint:
    """Read only whose measurements a file holds, which takes no time. Raises ProfileError."""
    text = _text(path)
    content = _load(text.partition("\ntarget:")[0], path)
    if "fingerprint" not in content:  # somebody has put the entries in another order
        content = _load(text, path)
    fingerprint: Fingerprint = _checked(Fingerprint, content.get("fingerprint"), path)
    return fingerprint


def _text(path: Path) -> str:
    try:
        if path.exists() and not path.is_file():
            # A device may never end.
            raise ProfileError(f"cannot read the profile {path}: it is no regular file", _MEND)
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ProfileError(f"cannot read the profile {path}: {error.strerror}", _MEND) from error
    except ValueError as error:
        raise ProfileError(f"{path} is not a YAML file: {first_line(error)}", _MEND) from error


def _parsed(text: str) -> Any:
    """What a YAML text says. The parser in C, where there is one, is far faster, but knows no lone surrogates."""
    try:
        return yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # noqa: S506 - a safe one
    except yaml.YAMLError:
        return yaml.safe_load(text)


def _load(text: str, path: Path) -> dict[str, Any]:
    """The entries of a file of our schema version, values unchecked."""
    try:
        content = _parsed(text)
    except _YAML_ERRORS as error:
        raise ProfileError(f"{path} is not a YAML file: {first_line(error)}", _MEND) from error
    version = content.get("schema_version") if isinstance(content, dict) else None
    if not isinstance(content, dict) or version != SCHEMA_VERSION:
        found = "none" if version is None else repr(version)
        raise ProfileError(f"{path} has schema version {found}, this program reads {SCHEMA_VERSION}", _MEND)
    return content


def _checked(kind: Any, content: Any, path: Path) -> Any:
    try:
        return _parse(kind, content, "")
    except (ValueError, OverflowError) as error:
        raise ProfileError(f"{path} is no valid profile: {error}", _MEND) from error


def refuse_foreign(profile: HardwareProfile, here: Fingerprint, where: str) -> None:
    """Raise ProfileError where a profile was measured with anything else than what is here."""
    differences = foreign_fields(profile.fingerprint, here)
    if differences:
        name = differences[0]
        theirs, ours = getattr(profile.fingerprint, name) or "none", getattr(here, name) or "none"
        raise ProfileError(
            f"the profile {where} was measured with another {field_label(name)}: {theirs}; here it is {ours}",
            _MEND,
        )


_MEND = "measure anew with: rakvctl calibrate"


def _parse(kind: Any, value: Any, where: str) -> Any:
    """A plain value as one of the profile's types. Raises ValueError that names the place."""
    if isinstance(kind, types.UnionType):
        return None if value is None else _parse(typing.get_args(kind)[0], value, where)
    if typing.get_origin(kind) is tuple:
        if not isinstance(value, list) or not value:
            raise ValueError(f"{where} is not a list of values")
        item = typing.get_args(kind)[0]
        return tuple(_parse(item, entry, f"{where}[{index}]") for index, entry in enumerate(value))
    if dataclasses.is_dataclass(kind):
        return _parse_fields(kind, value, where)
    if typing.get_origin(kind) is typing.Literal:
        choices = typing.get_args(kind)
        if value not in choices:
            raise ValueError(f"{where} is {_brief(value)}, not one of {', '.join(choices)}")
        return value
    return _parse_scalar(kind, value, where)


def _parse_fields(kind: Any, value: Any, where: str) -> Any:
    if not isinstance(value, dict):
        raise ValueError(f"{where} is not a mapping")
    hints = typing.get_type_hints(kind)
    needed = {field.name for field in dataclasses.fields(kind) if field.default is dataclasses.MISSING}
    unknown, lacking = sorted(map(str, value.keys() - hints.keys())), sorted(needed - value.keys())
    if unknown or lacking:
        problem = f"has an unknown entry {unknown[0]}" if unknown else f"lacks {lacking[0]}"
        raise ValueError(f"{where or 'it'} {problem}")
    prefix = f"{where}." if where else ""
    parsed = kind(**{name: _parse(hint, value[name], prefix + name) for name, hint in hints.items() if name in value})
    if isinstance(parsed, Curve):
        _check_curve(parsed, where)
    return parsed


def _parse_scalar(kind: Any, value: Any, where: str) -> Any:
    name = where.rpartition(".")[2].partition("[")[0]
    if kind is str and isinstance(value, str):
        return value
    if kind is str or isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{where} is {_brief(value)}, not {'text' if kind is str else 'a number'}")
    least, largest = _RANGES.get(name, (0.0, math.inf))
    if not math.isfinite(value) or not least <= value <= largest:
        raise ValueError(f"{where} is {value}, which cannot be")
    if kind is int and value != int(value):
        raise ValueError(f"{where} is {value}, not a whole number")
    return kind(value)


def _brief(value: Any) -> str:
    """A wrong value as an error quotes it; of a list or mapping, which may be endless, only the kind."""
    return repr(value)[:60] if isinstance(value, str | int | float | None) else f"a {type(value).__name__}"


def _check_curve(curve: Curve, where: str) -> None:
    for name in ("sizes_tokens", "contexts_tokens"):
        points = getattr(curve, name)
        if any(right <= left for left, right in pairwise(points)):
            raise ValueError(f"{where}.{name} do not rise")
    for name in ("median_ms", "mad_ms", "runs"):
        table = getattr(curve, name)
        if len(table) != len(curve.sizes_tokens) or any(len(row) != len(curve.contexts_tokens) for row in table):
            raise ValueError(f"{where}.{name} does not have one value for each size and context")
    if any(value <= 0 for row in curve.median_ms for value in row):
        raise ValueError(f"{where}.median_ms holds a time of 0")
