"""Paths on the command line: none may be empty, and `~` is the home directory in all of them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from rakvctl.cli.commands import app
from rakvctl.core.profile_file import write_profile
from tests.profiles import toy_profile
from tests.program import Call, assert_error

_PATH_METAVARS = ("DIR", "FILE", "PATH", "MODEL", "A B")
# What a command line must have beside an option for the command to be parsed at all.
_ARGUMENTS = {"kv": ["ls"]}


GROUP: Any = typer.main.get_command(app)


def path_options() -> Iterator[Any]:
    """Command, option and what click knows of it, for every option that names a file, a directory or a model."""
    for name, command in GROUP.commands.items():
        for option in command.params:
            if any(word in (option.metavar or "") for word in _PATH_METAVARS):
                yield pytest.param(name, command, option, id=f"{name} {option.opts[-1]}")


OPTIONS = list(path_options())


def flat(value: Any) -> list[str]:
    return [str(item) for item in (value if isinstance(value, list | tuple) else [value])]


def parsed(name: str, command: Any, option: Any, arguments: list[str]) -> list[str]:
    """The values of an option."""
    return flat(command.make_context(name, [*_ARGUMENTS.get(name, []), *arguments]).params[option.name])


def test_every_command_has_options_that_are_paths() -> None:
    """The tests below would say nothing if they found none."""
    named = {parameter.id for parameter in OPTIONS}
    assert named >= {
        "generate --file", "generate --out", "generate --kv-dir", "generate --profile", "generate --target",
        "calibrate --out", "calibrate --prompts", "calibrate --kv-dir", "calibrate --draft",
        "explain --plot", "explain --kv-dir",
        "bench --output-dir", "bench --compare", "bench --data", "bench --workload",
        "kv --kv-dir",
    }  # fmt: skip


@pytest.mark.parametrize("value", ["", "  "], ids=["empty", "blank"])
@pytest.mark.parametrize(("name", "command", "option"), OPTIONS)
def test_an_empty_path_is_wrong_usage_that_names_the_option(
    name: str, command: Any, option: Any, value: str, run: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a variable of the shell was never set: it is not the directory where the user happens to be."""
    monkeypatch.chdir(tmp_path)
    # Where it is not refused, nothing runs.
    monkeypatch.setattr(command, "callback", lambda **_: 0)
    monkeypatch.setattr("typer.main.get_command", lambda _: GROUP)
    for spelling in option.opts:
        values = ["x"] * (option.nargs - 1)
        finished = run(name, *_ARGUMENTS.get(name, []), spelling, *values, value)
        assert_error(finished, 2, f"'{spelling}'")
        assert "it is empty" in finished.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("name", "command", "option"), OPTIONS)
def test_the_home_directory_is_found_in_every_path(
    name: str, command: Any, option: Any, own_settings: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the shell leaves it alone: in quotes, after `--out=`, and in variables that no shell has set."""
    monkeypatch.setenv("HOME", "/home/of-a-test")
    for spelling in option.opts:
        values = parsed(name, command, option, [spelling, *["~/a file"] * option.nargs])
        assert values == ["/home/of-a-test/a file"] * option.nargs
    if option.nargs == 1:
        assert parsed(name, command, option, [f"{option.opts[-1]}=~/x"]) == ["/home/of-a-test/x"]
    if option.envvar:
        monkeypatch.setenv(option.envvar, "~/kept")
        assert parsed(name, command, option, []) == ["/home/of-a-test/kept"]


@pytest.mark.parametrize(("name", "command", "option"), OPTIONS)
def test_an_empty_variable_is_one_that_is_not_set(
    name: str, command: Any, option: Any, own_settings: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if option.envvar:
        without = parsed(name, command, option, [])
        monkeypatch.setenv(option.envvar, "")
        assert parsed(name, command, option, []) == without


@pytest.mark.parametrize("spelling", ["~", "~nobody-of-that-name/x", "./~/x", "-", "auto", "none", "gpt2"])
def test_what_is_no_home_directory_stays_as_it_is(
    spelling: str, own_settings: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "~")  # so that it stands for itself
    for parameter in OPTIONS:
        name, command, option = parameter.values
        values = parsed(name, command, option, [option.opts[-1], *[spelling] * option.nargs])
        assert values == [str(Path(spelling)) if option.name in _AS_PATHS else spelling] * option.nargs


_AS_PATHS = {"kv_dir", "out", "plot", "data", "output_dir", "compare"}


def test_prompts_and_results_are_found_in_the_home_directory(
    run: Call, tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("RAKVCTL_KV_DIR", "~/kv")
    monkeypatch.chdir(tiny_checkpoint)
    (tmp_path / "prompt.txt").write_text("hello there, " * 6)
    (tmp_path / "model").symlink_to(tiny_checkpoint / "target")
    finished = run("generate", "-m", "~/model", "-f", "~/prompt.txt", "--out=~/out.txt", "-n", "2", "--policy", "kv")
    assert (finished.code, finished.err) == (0, "")
    assert (tmp_path / "out.txt").read_text()
    assert (tmp_path / "kv").is_dir()
    assert not (tiny_checkpoint / "~").exists()
    assert run("kv", "stats").out.startswith("1 entry, ")


def test_a_profile_in_the_home_directory_is_read(run: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    write_profile(toy_profile(), tmp_path / "toy.yaml")
    assert run("explain", "--prompt-tokens", "50", "--profile", "~/toy.yaml").code == 0
    monkeypatch.setenv("RAKVCTL_PROFILE", "~/toy.yaml")
    assert run("explain", "--prompt-tokens", "50").code == 0
    monkeypatch.setenv("RAKVCTL_PROFILE", "~/absent.yaml")
    assert_error(run("explain", "--prompt-tokens", "50"), 3, str(tmp_path / "absent.yaml"))
    assert "the name is from RAKVCTL_PROFILE" in run("explain", "--prompt-tokens", "50").err
