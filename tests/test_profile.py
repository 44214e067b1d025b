"""The profile's file: what is written is read again, all or nothing; nonsense, and what is of elsewhere, is refused."""

import copy
import dataclasses
import errno
import os
import re
import tempfile
import types
import typing
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from rakvctl.core.errors import ProfileError, RakvError
from rakvctl.core.profile import (
    SCHEMA_VERSION,
    Curve,
    Fingerprint,
    HardwareProfile,
    field_label,
    foreign_fields,
)
from rakvctl.core.profile_file import read_profile, refuse_foreign, refuse_unwritable, write_profile
from rakvctl.core.profile_places import default_path, find_profiles, profile_directory
from tests.profiles import toy_profile

FINGERPRINT_FIELDS = [field.name for field in dataclasses.fields(Fingerprint)]


@pytest.fixture(autouse=True)
def own_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No profiles of the user's."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where a profile lies."""
    path = tmp_path / "profile.yaml"
    path.write_bytes(as_written())
    return path


@cache
def as_written() -> bytes:
    """A profile's file."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "profile.yaml"
        write_profile(any_profile(), path)
        return path.read_bytes()


@cache
def _content() -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load(as_written())
    return content


def content_of_a_profile() -> dict[str, Any]:
    """A profile's file as plain values, to be spoilt."""
    return copy.deepcopy(_content())


def rewrite(path: Path, content: Any) -> Path:
    """Write plain values as YAML, in the order given."""
    dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
    path.write_text(yaml.dump(content, Dumper=dumper, sort_keys=False), encoding="utf-8")
    return path


def small(value: Any) -> Any:
    """A profile with no more than three sizes and two contexts, whose file is soon read."""
    if isinstance(value, Curve):
        tables = (value.median_ms, value.mad_ms, value.runs)
        cut = [tuple(row[:2] for row in table[:3]) for table in tables]
        return Curve(value.sizes_tokens[:3], value.contexts_tokens[:2], *cut)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{field.name: small(getattr(value, field.name)) for field in dataclasses.fields(value)})
    return value


@cache
def any_profile() -> HardwareProfile:
    """What was measured of the toy pair, but smaller."""
    profile: HardwareProfile = small(toy_profile())
    return profile


def refused(path: Path) -> str:
    """The message with which a file is refused."""
    with pytest.raises(ProfileError) as caught:
        read_profile(path)
    assert caught.value.exit_code == 3
    assert "rakvctl calibrate" in caught.value.hint
    return caught.value.message


def six_digits(value: Any) -> Any:
    """A profile whose floats are rounded as the file rounds them."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [field.name for field in dataclasses.fields(value)]
        return replace(value, **{name: six_digits(getattr(value, name)) for name in fields})
    if isinstance(value, tuple):
        return tuple(six_digits(item) for item in value)
    return float(f"{value:.6g}") if isinstance(value, float) else value


# --- written and read again

_floats = st.floats(1e-9, 1e12)
# Without control characters: of those YAML itself may lose one (U+0085).
_texts = st.text(st.characters(exclude_categories=("Cc", "Cs")), max_size=20)
_shares = {"alpha": st.floats(0.0, 1.0), "spearman": st.floats(-1.0, 1.0), "schema_version": st.just(SCHEMA_VERSION)}


@st.composite
def _curves(draw: st.DrawFn) -> Curve:
    sizes, contexts = (
        tuple(sorted(draw(st.lists(st.integers(0, 10**6), min_size=1, max_size=3, unique=True)))) for _ in range(2)
    )

    def table(values: st.SearchStrategy[Any]) -> Any:
        return tuple(tuple(draw(values) for _ in contexts) for _ in sizes)

    return Curve(sizes, contexts, table(_floats), table(st.floats(0.0, 1e6)), table(st.integers(1, 10**6)))


def _any(kind: Any, name: str = "") -> st.SearchStrategy[Any]:
    """Values of one of the profile's types, whatever its fields."""
    if name in _shares:
        return _shares[name]
    if isinstance(kind, types.UnionType):
        return st.none() | _any(typing.get_args(kind)[0])
    if typing.get_origin(kind) is tuple:
        return st.lists(_any(typing.get_args(kind)[0]), min_size=1, max_size=3).map(tuple)
    if kind is Curve:
        return _curves()
    if dataclasses.is_dataclass(kind):
        return st.builds(kind, **{name: _any(hint, name) for name, hint in typing.get_type_hints(kind).items()})
    if typing.get_origin(kind) is typing.Literal:
        return st.sampled_from(typing.get_args(kind))
    return {str: _texts, int: st.integers(1, 2**62), float: _floats}[kind]


@settings(max_examples=20, deadline=None)
@given(profile=_any(HardwareProfile))
def test_a_profile_is_read_as_it_was_written(
    profile: HardwareProfile, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """To six digits; and written once more it is the same file."""
    first, second = (tmp_path_factory.getbasetemp() / name for name in ("first.yaml", "second.yaml"))
    write_profile(profile, first)
    read = read_profile(first)
    assert read == six_digits(profile)
    write_profile(read, second)
    assert second.read_bytes() == first.read_bytes()


ODD_TEXTS = [
    *(
        "",
        " ",
        "null",
        "yes",
        "1",
        "1.5",
        "2026-01-01",
        "~",
        "a: b",
        "- a",
        "#",
        "'",
        '"',
        "\\",
        "&a *a",
        "%",
        "@",
        "`",
    ),
    *("\n", "a\nb", "\r\n", "\t", "\0", "\u2028", "\ufeff", "é", "模型", "🦙", "\udce9", "!!int 3", "---", "{}"),
]


@pytest.mark.parametrize("text", ODD_TEXTS, ids=ascii)
def test_any_text_survives(path: Path, text: str) -> None:
    profile = any_profile()
    profile = replace(profile, created=text, fingerprint=replace(profile.fingerprint, target=text, versions=text))
    write_profile(profile, path)
    assert read_profile(path) == six_digits(profile)


@pytest.mark.parametrize("value", [1e-300, 1e-7, 0.1, 1 / 3, 1e6, 123456789.0, 1e22, 1e300])
def test_any_positive_time_survives_to_six_digits(path: Path, value: float) -> None:
    write_profile(replace(any_profile(), emit_ms=value, memory_bytes_per_ms=value), path)
    assert read_profile(path).emit_ms == pytest.approx(value, rel=5e-6)


def test_a_profile_without_draft_survives(path: Path) -> None:
    profile = replace(any_profile(), draft=None)
    write_profile(profile, path)
    assert read_profile(path) == six_digits(profile)


def test_the_entries_stand_in_the_order_of_the_fields(path: Path) -> None:
    def check(content: Any, kind: Any) -> None:
        if isinstance(kind, types.UnionType):
            kind = typing.get_args(kind)[0]
        if dataclasses.is_dataclass(kind) and content is not None:
            assert list(content) == [field.name for field in dataclasses.fields(kind)]
            for name, hint in typing.get_type_hints(kind).items():
                check(content[name], hint)

    check(yaml.safe_load(path.read_text(encoding="utf-8")), HardwareProfile)


def test_the_file_is_for_people(path: Path) -> None:
    """Rows of numbers on one line, nothing wider than a screen, no tags of Python's."""
    lines = path.read_text(encoding="utf-8").splitlines()
    assert "schema_version: 1" in lines
    assert max(map(len, lines)) <= 120
    assert not any("!!" in line for line in lines)
    assert any(re.fullmatch(r" +- \[[\d., e+-]+\]", line) for line in lines)


# --- all or nothing


def test_missing_directories_are_made(tmp_path: Path) -> None:
    path = tmp_path / "new" / "and newer" / "profile.yaml"
    write_profile(any_profile(), path)
    assert read_profile(path) == six_digits(any_profile())


def test_a_profile_replaces_the_one_before_it_and_leaves_nothing_beside_it(path: Path) -> None:
    write_profile(replace(any_profile(), created="later"), path)
    assert read_profile(path).created == "later"
    assert [entry.name for entry in path.parent.iterdir() if entry.is_file()] == [path.name]


def _full_disk(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def _interrupted(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("call", ["fsync", "chmod", "replace"])
def test_a_failed_write_leaves_the_old_file_and_nothing_else(
    path: Path, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = path.read_bytes()
    monkeypatch.setattr(os, call, _full_disk)
    with pytest.raises(RakvError, match="No space left") as caught:
        write_profile(replace(any_profile(), created="later"), path)
    assert caught.value.exit_code == 1
    assert path.read_bytes() == before
    assert [entry.name for entry in path.parent.iterdir() if entry.is_file()] == [path.name]


def test_an_interrupted_write_leaves_the_old_file_and_nothing_else(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = path.read_bytes()
    monkeypatch.setattr(os, "fsync", _interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_profile(replace(any_profile(), created="later"), path)
    assert path.read_bytes() == before
    assert [entry.name for entry in path.parent.iterdir() if entry.is_file()] == [path.name]


def test_a_directory_in_the_files_place_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "profile.yaml").mkdir()
    for write in (refuse_unwritable, lambda path: write_profile(any_profile(), path)):
        with pytest.raises(RakvError, match="cannot write"):
            write(tmp_path / "profile.yaml")
    assert [entry.name for entry in tmp_path.iterdir()] == ["profile.yaml"]


def test_a_file_in_the_directorys_place_is_an_error(path: Path) -> None:
    for write in (refuse_unwritable, lambda path: write_profile(any_profile(), path)):
        with pytest.raises(RakvError, match="cannot write"):
            write(path / "profile.yaml")


def test_where_a_profile_can_be_written_nothing_is_before_it_is(path: Path, tmp_path: Path) -> None:
    before = path.read_bytes()
    refuse_unwritable(path)
    refuse_unwritable(tmp_path / "new" / "profile.yaml")
    assert path.read_bytes() == before
    assert list((tmp_path / "new").iterdir()) == []


# --- hand-edited nonsense


def edited(path: Path, place: str, change: Callable[[Any], Any]) -> Path:
    """Change the value at a place such as `target.prefill.median_ms.0`, and write the file anew."""
    content = content_of_a_profile()
    *outer, last = place.split(".")
    holder = content
    for key in outer:
        holder = holder[int(key) if isinstance(holder, list) else key]
    key = int(last) if isinstance(holder, list) else last
    holder[key] = change(holder[key])
    return rewrite(path, content)


NUMBERS = [
    "schema_version",
    "fingerprint.threads",
    "target.weight_bytes",
    "target.kv_bytes_per_token",
    "target.prefill.sizes_tokens.1",
    "target.prefill.contexts_tokens.0",
    "target.prefill.median_ms.1.0",
    "target.clone.mad_ms.0.0",
    "draft.model.insert.runs.0.0",
    "draft.propose.median_ms.0.0",
    "verify.median_ms.2.1",
    "emit_ms",
    "memory_bytes_per_ms",
    "acceptance.alpha",
    "acceptance.num_trials",
    "fit.mape_percent",
]


def named(place: str) -> str:
    """How a message names a place: the last name that is not a number, and what leads to it."""
    return re.sub(r"\.\d+.*", "", place)


NO_NUMBERS = [float("nan"), float("inf"), -float("inf"), "fast", "1e-3 ms", None, True, [], [1], {}, {"a": 1}, -1, -0.5]


@pytest.mark.parametrize("place", NUMBERS)
@pytest.mark.parametrize("value", NO_NUMBERS, ids=repr)
def test_no_number_is_anything_but_a_number_that_can_be(path: Path, place: str, value: Any) -> None:
    message = refused(edited(path, place, lambda _: value)).replace("schema version", "schema_version")
    assert named(place) in message
    assert str(path) in message


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("acceptance.alpha", 1.5),
        ("fingerprint.threads", 1.5),
        ("target.weight_bytes", 0.5),
        ("fit.spearman", 2.0),
        ("fit.spearman", -1.5),
        ("verify.median_ms.0.0", 0),
        ("verify.median_ms.0.0", 0.0),
        ("draft.model.prefill.median_ms.2.0", 0),
        ("memory_bytes_per_ms", 0),
        ("fingerprint.processor", 3),
        ("fingerprint.target_digest", None),
        ("created", 2026),
        ("verify.sizes_tokens", []),
        ("verify.sizes_tokens", 3),
        ("verify.median_ms", []),
        ("verify.median_ms.0", []),
        ("verify.median_ms.0", 3.0),
        ("verify", []),
        ("draft", []),
        ("draft", "none"),
        ("fit", None),
        ("target", None),
        ("verify.sizes_tokens", [1, 2, 10**300]),
        ("verify.contexts_tokens", [1, 2**40]),
        ("logit_difference", -1.0),
        ("logit_difference", "small"),
        ("acceptance.lookup", []),
        ("acceptance.lookup", [{"matched_tokens": 0, "agreement": "alone", "alpha": 0.5, "num_trials": 1}]),
        ("acceptance.lookup", [{"matched_tokens": 1, "agreement": "alone", "alpha": 1.5, "num_trials": 1}]),
        ("acceptance.lookup", [{"matched_tokens": 1, "agreement": "nearly", "alpha": 0.5, "num_trials": 1}]),
        ("acceptance.lookup", [{"matched_tokens": 1, "agreement": [], "alpha": 0.5, "num_trials": 1}]),
        ("acceptance.lookup", [{"matched_tokens": 1, "alpha": 0.5, "num_trials": 1}]),
        ("acceptance.lookup", [{"matched_tokens": 1, "agreement": "alone", "alpha": 0.5}]),
    ],
    ids=repr,
)
def test_a_value_that_cannot_be_is_named(path: Path, place: str, value: Any) -> None:
    assert named(place) in refused(edited(path, place, lambda _: value))


ENTRIES = [place for place in NUMBERS if not place[-1].isdigit()]


@pytest.mark.parametrize("place", [*ENTRIES, "fingerprint", "fingerprint.driver", "verify", "draft", "draft.propose"])
def test_a_missing_entry_is_named(path: Path, place: str) -> None:
    outer, _, last = place.rpartition(".")
    content = content_of_a_profile()
    holder = content
    for key in filter(None, outer.split(".")):
        holder = holder[key]
    del holder[last]
    message = refused(rewrite(path, content))
    assert last.replace("schema_version", "schema version") in message
    assert outer in message


@pytest.mark.parametrize("outer", ["", "fingerprint", "target", "target.prefill", "draft", "draft.model", "fit"])
@pytest.mark.parametrize("unknown", ["medain_ms", 3, None])
def test_an_unknown_entry_is_named(path: Path, outer: str, unknown: Any) -> None:
    """Most often it is a misspelt one."""
    content = content_of_a_profile()
    holder = content
    for key in filter(None, outer.split(".")):
        holder = holder[key]
    holder[unknown] = 1
    message = refused(rewrite(path, content))
    assert str(unknown) in message
    assert outer in message


@pytest.mark.parametrize("curve", ["verify", "target.prefill", "draft.propose", "draft.model.clone"])
@pytest.mark.parametrize("table", ["median_ms", "mad_ms", "runs"])
@pytest.mark.parametrize(
    "ragged",
    [
        lambda rows: rows[:-1],
        lambda rows: [*rows, rows[0]],
        lambda rows: [*rows[:-1], rows[-1][:-1] or [1.0, 1.0]],
        lambda rows: [*rows[:-1], [*rows[-1], 1]],
    ],
    ids=["row missing", "row too many", "value missing", "value too many"],
)
def test_a_ragged_table_is_named(path: Path, curve: str, table: str, ragged: Callable[[Any], Any]) -> None:
    assert f"{curve}.{table}" in refused(edited(path, f"{curve}.{table}", ragged))


@pytest.mark.parametrize("axis", ["sizes_tokens", "contexts_tokens"])
@pytest.mark.parametrize("change", [lambda points: points[::-1], lambda points: [points[0], *points[:-1]]])
def test_points_that_do_not_rise_are_named(path: Path, axis: str, change: Callable[[Any], Any]) -> None:
    assert f"verify.{axis}" in refused(edited(path, f"verify.{axis}", change))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"   \n\n",
        b"# only a comment\n",
        b"{}",
        b"[]",
        b"- schema_version: 1\n",
        b"null",
        b"42",
        b"just words",
        b"schema_version 1",
        b"schema_version: 1",
        b"schema_version: 1\n\tverify: 2\n",
        b"{schema_version: 1",
        b"schema_version: 1\n---\nschema_version: 1\n",
        b"? [a]\n: b\n",
        b"a: *b\n",
        b"!!python/object/apply:os.getcwd []\n",
        b"!!python/name:os.system\n",
        b"\xff\xfe\x00",
        b"schema_version: 1\ncreated: \xe9t\xe9\n",
        b"schema_version: \x00",
        b"\x80\x04\x95",
        b"%PDF-1.7",
        b"PK\x03\x04",
    ],
    ids=repr,
)
def test_a_file_that_is_no_profile_is_refused(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    assert str(path) in refused(path)


@pytest.mark.parametrize(
    "version", ["0", "2", "99", "'1'", "one", "null", "[1]", "{a: 1}", "1.5", "-1", "true", ".nan"]
)
def test_another_schema_version_is_named_with_the_one_that_is_read(path: Path, version: str) -> None:
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace("schema_version: 1", f"schema_version: {version}", 1), encoding="utf-8")
    message = refused(path)
    assert "schema" in message
    if version != "true":
        assert f"reads {SCHEMA_VERSION}" in message


@pytest.mark.parametrize(
    ("entry", "value"),
    [
        ("created", "2024-13-45"),
        ("created", "2024-10-10"),
        ("created", "!!timestamp yesterday"),
        ("emit_ms", "!!int five"),
        ("emit_ms", "!!float five"),
        ("emit_ms", "!!bool maybe"),
        ("emit_ms", "!!binary ?"),
        ("emit_ms", "9" * 400),
        ("emit_ms", "9" * 5000),
        ("emit_ms", "1e400"),
        ("emit_ms", "0.5ms"),
        ("memory_bytes_per_ms", "9" * 400),
    ],
    ids=lambda value: value[:20],
)
def test_values_that_yaml_itself_stumbles_over_are_refused(path: Path, entry: str, value: str) -> None:
    text = re.sub(rf"^{entry}: .*$", f"{entry}: {value}", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    path.write_text(text, encoding="utf-8")
    assert str(path) in refused(path)


def test_endless_nesting_is_refused(path: Path) -> None:
    path.write_text("schema_version: 1\nverify: " + "[" * 2000 + "]" * 2000, encoding="utf-8")
    assert str(path) in refused(path)


def test_aliases_that_stand_for_millions_of_values_do_not_fill_the_memory(path: Path) -> None:
    """Seven aliases within one another, nine times each: written out, the value would have five million items."""
    bomb = "&a0 [1, 1, 1, 1, 1, 1, 1, 1, 1]"
    for level in range(1, 7):
        bomb = f"&a{level} [{bomb}, {', '.join([f'*a{level - 1}'] * 8)}]"
    text = re.sub(r"^emit_ms: .*$", f"emit_ms: {bomb}", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    path.write_text(text, encoding="utf-8")
    message = refused(path)
    assert "emit_ms" in message
    assert len(message) < 1000


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    assert "absent.yaml" in refused(tmp_path / "absent.yaml")


def test_a_directory_is_no_profile(tmp_path: Path) -> None:
    assert str(tmp_path) in refused(tmp_path)


# --- of elsewhere


def _other(fingerprint: Fingerprint, name: str) -> Fingerprint:
    value = getattr(fingerprint, name)
    return replace(fingerprint, **{name: value + 1 if isinstance(value, int) else f"another {value}"})


@pytest.mark.parametrize("name", FINGERPRINT_FIELDS)
def test_a_profile_of_elsewhere_is_refused_with_what_differs(name: str) -> None:
    profile = any_profile()
    here = _other(profile.fingerprint, name)
    assert foreign_fields(profile.fingerprint, here) == [name]
    with pytest.raises(ProfileError) as caught:
        refuse_foreign(profile, here, "some.yaml")
    assert caught.value.exit_code == 3
    for part in (
        "some.yaml",
        field_label(name),
        str(getattr(profile.fingerprint, name)),
        str(getattr(here, name)),
    ):
        assert part in caught.value.message
    assert "rakvctl calibrate" in caught.value.hint


def test_two_threads_are_not_one() -> None:
    profile = any_profile()
    profile = replace(profile, fingerprint=replace(profile.fingerprint, threads=2))
    with pytest.raises(ProfileError, match=r"threads.*\b2\b.*\b1\b"):
        refuse_foreign(profile, replace(profile.fingerprint, threads=1), "some.yaml")


def test_a_profile_of_here_is_taken() -> None:
    refuse_foreign(any_profile(), any_profile().fingerprint, "some.yaml")


def test_no_draft_at_all_is_said_in_words() -> None:
    profile = any_profile()
    with pytest.raises(ProfileError, match="none"):
        refuse_foreign(profile, replace(profile.fingerprint, draft=""), "some.yaml")


# --- where profiles lie

_names = (
    st.text(max_size=30)
    | st.text("aB/. -", min_size=50, max_size=300)
    | st.sampled_from(["..", ".", "/", "../../etc/passwd", "CON", "-rf", "~", "a\0b", "\n"])
)


@given(target=_names, draft=_names, device=_names, processor=_names, threads=st.integers(1, 512))
def test_the_default_path_is_a_file_in_the_profiles_directory(
    target: str, draft: str, device: str, processor: str, threads: int
) -> None:
    """Room is left for what a name gets while the file is being written; most file systems take 255 bytes."""
    fingerprint = replace(
        any_profile().fingerprint, target=target, draft=draft, device=device, processor=processor, threads=threads
    )
    path = default_path(fingerprint)
    assert path.parent == profile_directory()
    assert re.fullmatch(r"[a-z0-9_-][a-z0-9._-]*\.yaml", path.name)
    assert len(path.name) <= 240
    assert default_path(fingerprint) == path


@pytest.mark.parametrize(
    "target", ["org/model", "../../x", "./my model", "模型", "m" * 500, "/", "a\nb"], ids=lambda name: ascii(name[:20])
)
def test_a_profile_can_be_kept_for_any_name(target: str) -> None:
    profile = any_profile()
    fingerprint = replace(
        profile.fingerprint,
        target=target,
        draft=target,
        dtype="bfloat16",
        device="NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition",
        processor="AMD Ryzen Threadripper PRO 7995WX 96-Cores, 192 cores",
        threads=192,
    )
    profile = replace(profile, fingerprint=fingerprint)
    write_profile(profile, default_path(fingerprint))
    assert read_profile(default_path(fingerprint)).fingerprint == fingerprint
    assert find_profiles(target, target) == [(default_path(fingerprint), fingerprint)]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"target": "a"}, {"target": "b"}),
        ({"draft": "a"}, {"draft": "b"}),
        ({"draft": ""}, {"draft": "b"}),
        ({"target": "a", "draft": "b"}, {"target": "b", "draft": "a"}),
        ({"target": "a_b", "draft": ""}, {"target": "a", "draft": "b"}),
        ({"target": "a", "draft": "b-c"}, {"target": "a-b", "draft": "c"}),
        ({"dtype": "float32"}, {"dtype": "bfloat16"}),
        ({"threads": 1}, {"threads": 2}),
        ({"threads": 1}, {"threads": 11}),
        ({"device": "cpu"}, {"device": "NVIDIA H200"}),
        ({"backend": "torch"}, {"backend": "gguf"}),
        ({"processor": "x, 2 cores"}, {"processor": "x, 4 cores"}),
        ({"target": "org/model"}, {"target": "org-model"}),
        ({"target": "./model"}, {"target": "model"}),
        ({"target": "Model"}, {"target": "model"}),
        ({"target": "模型"}, {"target": "модель"}),
        ({"target": "/home/one/" + "m" * 60}, {"target": "/home/other/" + "m" * 60}),
    ],
    ids=repr,
)
def test_what_is_measured_apart_is_kept_apart(one: dict[str, Any], other: dict[str, Any]) -> None:
    here = any_profile().fingerprint
    assert default_path(replace(here, **one)) != default_path(replace(here, **other))


def _keep(name: str, seconds: float, **changes: Any) -> Path:
    """Write a profile into the user's directory, last changed at the given time."""
    profile = any_profile()
    path = profile_directory() / f"{name}.yaml"
    write_profile(replace(profile, fingerprint=replace(profile.fingerprint, **changes)), path)
    os.utime(path, (seconds, seconds))
    return path


def test_the_profiles_of_a_pair_are_found_the_newest_first() -> None:
    here = any_profile().fingerprint
    assert find_profiles(here.target, here.draft) == []
    old, newest = _keep("a", 100, threads=1), _keep("b", 200, threads=2)
    _keep("another target", 300, target="another")
    _keep("without draft", 400, draft="")
    assert [path for path, _ in find_profiles(here.target, here.draft)] == [newest, old]
    assert find_profiles("unknown", "") == []


def test_a_profile_whose_entries_stand_in_another_order_is_found() -> None:
    here = any_profile().fingerprint
    content = content_of_a_profile()
    content["fingerprint"] = content.pop("fingerprint")
    assert find_profiles(here.target, here.draft) == []
    path = rewrite(_keep("mine", 100), content)
    assert find_profiles(here.target, here.draft) == [(path, here)]


def test_a_profile_that_was_written_before_positions_were_is_read(path: Path) -> None:
    content = content_of_a_profile()
    assert content["target"].pop("max_positions") == 2048
    assert read_profile(rewrite(path, content)).target.max_positions is None


@pytest.mark.parametrize("damaged", [b"", b"schema_version: 99\n", b"\xff", b"[", None])
def test_a_damaged_profile_of_another_pair_is_not_in_the_way(damaged: bytes | None) -> None:
    here = any_profile().fingerprint
    good = _keep("good", 100)
    bad = profile_directory() / "newer.yaml"
    bad.mkdir() if damaged is None else bad.write_bytes(damaged)
    assert [path for path, _ in find_profiles(here.target, here.draft)] == [good]


@pytest.mark.parametrize("name", ["tiny", "smollm2"])
def test_the_profiles_in_the_repository_are_good_examples(name: str) -> None:
    (path,) = (Path(__file__).parents[1] / "profiles").glob(f"{name}_*.yaml")
    profile = read_profile(path)
    assert profile.fingerprint.target == name
    assert profile.fit.num_probes > 0
