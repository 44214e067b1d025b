"""What is printed for people: no number is cut where the page is narrow, and what users name is text, not markup."""

import re
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from rakvctl.cli import bench_tables, page, profile_tables
from rakvctl.cli.stats import Totals
from rakvctl.core.backends.fake import VirtualClock
from rakvctl.core.profile import Curve, HardwareProfile
from rakvctl.core.profile_file import write_profile
from rakvctl.core.types import SamplingParams
from rakvctl.measure.arms import Arm
from rakvctl.measure.bench import Mismatch
from rakvctl.measure.calibrate import Calibration
from rakvctl.measure.check import Drift
from rakvctl.measure.results import ArmSummary, compare, summarize
from rakvctl.measure.timing import Point
from tests.fakes import FakeRuntime
from tests.profiles import toy_pair, toy_profile
from tests.program import Call
from tests.test_bench import ScriptedArm, write_results
from tests.test_bench import run as run_arms

NARROW, WIDE = 40, 400
# Numbers as tables write them: digits with a point or commas in between, or an exponent.
_NUMBER = re.compile(r"\d+(?:[.,]\d+)*(?:e[+-]\d+)?")


def numbers(text: str) -> Counter[str]:
    return Counter(_NUMBER.findall(text))


def assert_numbers_are_whole(narrow: str, wide: str) -> None:
    """Every number of the wide page, as often at least, and no piece of one; all lines fit."""
    assert numbers(wide)
    assert numbers(narrow).keys() == numbers(wide).keys()
    assert numbers(narrow) >= numbers(wide)
    assert "…" not in narrow
    assert max(map(len, narrow.splitlines())) <= NARROW
    assert any(len(line) > NARROW for line in wide.splitlines()), "it would have fitted anyway"


def scaled(value: Any, factor: float) -> Any:
    """A profile with all its times so many times as long, and its contexts so many times as large."""
    if isinstance(value, Curve):
        return replace(
            value,
            contexts_tokens=tuple(round(context * factor) for context in value.contexts_tokens),
            median_ms=tuple(tuple(ms * factor for ms in row) for row in value.median_ms),
        )
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{field.name: scaled(getattr(value, field.name), factor) for field in fields(value)})
    return value


def large_profile() -> HardwareProfile:
    profile: HardwareProfile = scaled(toy_profile(), 10_000.0)
    assert profile.draft is not None
    return replace(
        profile,
        logit_difference=0.001234,
        width_change_ms=987_654.0,
        memory_bytes_per_ms=1e12,
        target=replace(profile.target, load=profile.target.clone, load_cold=profile.target.prefill, max_positions=None),
        draft=replace(profile.draft, model=replace(profile.draft.model, max_positions=None)),
    )


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """What a function prints on a page of some width."""

    def show(num_columns: int, function: Callable[..., object], *arguments: object) -> str:
        monkeypatch.setenv("COLUMNS", str(num_columns))
        function(*arguments)
        captured = capsys.readouterr()
        return captured.out + captured.err

    return show


@cache
def large_summaries() -> list[ArmSummary]:
    clock = VirtualClock()
    arms: list[Arm] = [
        ScriptedArm("ar", clock, 12_345_678.9),
        ScriptedArm("llama-cpp-prompt-lookup-10", clock, 1_234.5),
    ]
    _, samples = run_arms(arms, clock, num_prompts=12)
    return summarize(samples)


def show_baselines() -> None:
    mismatches = [Mismatch("toy", "1234567", "ar", 0, 123_456, 7, 8, 12.5, 34.567)]
    bench_tables.show_baselines(large_summaries(), mismatches, 1_234_567.89)


def show_rows() -> None:
    figures = {"here": "1234567.8 %", "alpha told": "1234.567", "paper": "3600"}
    bench_tables.show_rows("The controller against 123456 actions", [{"figure": "prediction: MAPE", **figures}] * 2)


def show_drifts() -> None:
    points = [Point("target.prefill", 123_456, 1_234_567), Point("verify", 17, 987_654)]
    profile_tables.show_drifts([Drift(point, 123_456.7, 7_654_321.0) for point in points])


def show_totals() -> None:
    completion = FakeRuntime().run("joint-4", tuple(range(16)), SamplingParams(max_new_tokens=24))
    large = replace(
        completion,
        num_prompt_tokens=123_456_789_012,
        num_reused_tokens=12_345_678_901,
        num_matched_tokens=12_345_678_901,
        source="memory",
        restore_ms=1_234_567.8,
        ttft_ms=123_456_789.0,
        total_ms=1_234_567_890.0,
    )
    totals = Totals()
    totals.add(large)
    totals.show(
        page.error_console(), {None: "llama.cpp 0.3.16; float32 on cuda:0, 128 threads; transformers 5.17.1234567"}
    )


@pytest.mark.parametrize(
    "function",
    [
        show_baselines,
        show_rows,
        show_drifts,
        show_totals,
        pytest.param(lambda: profile_tables.show_profile(large_profile()), id="show_profile"),
        pytest.param(lambda: profile_tables.show_successors(123_456_789, 987_654_321), id="show_successors"),
    ],
)
def test_no_number_is_cut_on_a_narrow_page(function: Callable[[], None], shown: Callable[..., str]) -> None:
    assert_numbers_are_whole(shown(NARROW, function), shown(WIDE, function))


def test_no_number_of_a_comparison_is_cut(shown: Callable[..., str], tmp_path: Path) -> None:
    changes = compare(write_results(tmp_path / "a.json", 1.0), write_results(tmp_path / "b.json", 123_456.0))
    assert_numbers_are_whole(*(shown(width, bench_tables.show_changes, changes) for width in (NARROW, WIDE)))


def test_no_number_of_an_explanation_is_cut(run: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_profile(large_profile(), tmp_path / "large.yaml")
    command = ("--prompt-tokens", "500000", "--cached", "300000", "-n", "64000", "--alpha", "0.7")
    pages = []
    for width in (NARROW, WIDE):
        monkeypatch.setenv("COLUMNS", str(width))
        finished = run("explain", "--profile", tmp_path / "large.yaml", *command)
        assert finished.code == 0
        pages.append(finished.out)
    assert_numbers_are_whole(*pages)
    assert re.search(r"^->$", pages[0], re.MULTILINE), "the chosen action is marked"


def test_no_number_of_a_list_of_entries_is_cut(
    run: Call, tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt, kept = "The quick brown fox jumps over the lazy dog, and the dog does not mind.", tmp_path / "kv"
    target = tiny_checkpoint / "target"
    run("generate", prompt, "-m", target, "-n", "1", "--policy", "kv", "--kv-dir", kept)
    pages = []
    for width in (NARROW, WIDE):
        monkeypatch.setenv("COLUMNS", str(width))
        pages.append(run("kv", "ls", "--kv-dir", kept).out)
    assert_numbers_are_whole(*pages)


@pytest.mark.parametrize("columns", ["", "0", "-5", "wide"])
def test_a_width_that_is_none_is_80(columns: str, shown: Callable[..., str]) -> None:
    assert shown(columns, show_drifts) == shown(80, show_drifts)  # type: ignore[arg-type]


# Markup

ODD_DIRECTORY, ODD_NAME, ODD_FILE = "[/x]", "[bold]m", "[red]w.jsonl"


@pytest.fixture
def odd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory `[/x]`, which is where the command runs."""
    directory = tmp_path / ODD_DIRECTORY
    directory.mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "300")
    return directory


@pytest.mark.parametrize(
    "arguments",
    [
        ("generate", "x", "-m", f"{ODD_DIRECTORY}/{ODD_NAME}"),
        ("generate", "x", "-m", ODD_NAME),
        ("generate", "x", "-d", ODD_NAME, "--policy", "spec-2"),
        ("generate", "-f", f"{ODD_DIRECTORY}/{ODD_FILE}"),
        ("generate", "x", "--out", f"{ODD_DIRECTORY}/none/{ODD_FILE}"),
        ("generate", "x", "--profile", f"{ODD_DIRECTORY}/{ODD_FILE}"),
        ("generate", "x", "--nothing[red]"),
        ("generate", "x", "--format", "[/x]"),
        ("generate", "x", "--policy", "[/x]"),
        ("calibrate", "-m", ODD_NAME),
        ("calibrate", "--prompts", f"{ODD_DIRECTORY}/{ODD_FILE}"),
        ("calibrate", "-o", ODD_DIRECTORY),
        ("explain", "x", "-m", ODD_NAME),
        ("explain", "--prompt-tokens", "20", "-m", ODD_NAME),
        ("explain", "--prompt-tokens", "20", "--profile", f"{ODD_DIRECTORY}/{ODD_FILE}"),
        ("explain", "--prompt-tokens", "20", "--plot", f"{ODD_DIRECTORY}/{ODD_FILE}"),
        ("bench", "-w", f"{ODD_DIRECTORY}/{ODD_FILE}"),
        ("bench", "--compare", "[/x]/a", "[/x]/a"),
        ("bench", "-m", ODD_NAME),
        ("kv", "ls", "--kv-dir", f"{ODD_DIRECTORY}/{ODD_NAME}"),
        ("kv", "[/x]"),
        ("[/x]",),
    ],
    ids=" ".join,
)
def test_an_error_quotes_what_looks_like_markup(arguments: tuple[str, ...], odd: Path, run: Call) -> None:
    finished = run(*arguments)
    assert finished.code in (1, 2, 3)
    assert finished.out == ""
    named = next(part for part in reversed(arguments) if "[" in part)
    assert named in finished.err.splitlines()[0]


def test_statistics_and_notes_quote_what_looks_like_markup(
    odd: Path, run: Call, tiny_checkpoint: Path, shown: Callable[..., str]
) -> None:
    shutil.copytree(tiny_checkpoint / "target", odd / ODD_NAME)
    (odd / ODD_FILE).write_text('{"prompt": "hello there"}\n')
    files = ("-f", odd / ODD_FILE, "--out", odd / "[b].jsonl", "--kv-dir", odd / "kv")
    finished = run("generate", "-m", odd / ODD_NAME, "-n", "2", "--policy", "kv", "--stats", *files)
    assert finished.code == 0
    assert (odd / "[b].jsonl").read_text()
    totals = Totals()
    assert "[/x] node" in shown(80, totals.show, page.error_console(), {None: "[/x] node"})
    again = run("generate", "-m", odd / ODD_NAME, "-n", "2", "--policy", "kv", "--resume", *files)
    assert f"{odd / '[b].jsonl'} has a record" in again.err
    assert run("kv", "ls", "--kv-dir", odd / "kv").code == 0
    assert run("kv", "verify", "--kv-dir", odd / "kv").code == 0


def odd_profile() -> HardwareProfile:
    mark = replace(toy_profile().fingerprint, target=ODD_NAME, draft="[/x]", processor="[red]CPU :smile:")
    return replace(toy_profile(), fingerprint=mark)


def test_tables_quote_what_looks_like_markup(odd: Path, run: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rakvctl.core.loading.load_pair", lambda *_: toy_pair(VirtualClock()))
    monkeypatch.setattr("rakvctl.measure.calibrate.calibrate", lambda *_: Calibration(odd_profile(), ()))
    finished = run("calibrate", "-o", odd / ODD_NAME)
    assert finished.code == 0
    assert f"{ODD_NAME}, draft [/x]; [red]CPU :smile:" in finished.out
    assert str(odd / ODD_NAME) in finished.out
    explained = run("explain", "--prompt-tokens", "50", "--profile", odd / ODD_NAME)
    assert explained.code == 0
    assert f"the profile {odd / ODD_NAME} was measured with" in explained.err


@pytest.mark.parametrize("width", [NARROW, 300])
def test_the_tables_of_a_benchmark_quote_what_looks_like_markup(width: int, shown: Callable[..., str]) -> None:
    clock = VirtualClock()
    _, samples = run_arms([ScriptedArm("ar", clock, 1.0)], clock)
    summaries = summarize([replace(sample, workload="[/x][red]") for sample in samples])
    assert "[/x][red]" in shown(width, bench_tables.show_baselines, summaries, [], 0.0)
    rows = [{"[/x]": "[bold]a", "b": "[/]"}]
    text = shown(width, bench_tables.show_rows, "[/title]", rows)
    assert all(word in text for word in ("[/title]", "[/x]", "[bold]a", "[/]"))
