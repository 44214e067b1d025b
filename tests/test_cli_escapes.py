"""What a shell cannot write easily: line breaks in --stop, and prompts that begin with a dash."""

import pytest

from rakvctl.cli.escapes import unescape
from rakvctl.core.errors import UsageError
from tests.program import Call, assert_error


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        (r"\n", "\n"),
        (r"\\n", r"\n"),
        (r"\\\n", "\\\n"),
        (r"a\tb\r\"", 'a\tb\r"'),
        (r"\x41\xe9", "A\u00e9"),
        (r"\u20ac\ud83d\ude00", "\u20ac\U0001f600"),
        (r"\end{verbatim} \x4 \u12 \q", r"\end{verbatim} \x4 \u12 \q"),
        ("\\", "\\"),
        ("\n\u20ac", "\n\u20ac"),
    ],
)
def test_escapes_are_replaced_and_other_backslashes_stay(written: str, meant: str) -> None:
    assert unescape(written, "--stop") == meant


def test_half_a_surrogate_pair_is_wrong_usage() -> None:
    with pytest.raises(UsageError, match="--stop"):
        unescape(r"\ud83d", "--stop")


@pytest.mark.parametrize("command", ["generate", "explain"])
@pytest.mark.parametrize("prompt", ["--- hello", "--help me", "-5 + 3", "---"])
def test_a_prompt_that_begins_with_a_dash_is_told_where_it_goes(command: str, prompt: str, run: Call) -> None:
    finished = run(command, prompt)
    assert_error(finished, 2, "No such option")
    assert f"rakvctl {command} [OPTIONS] -- '--text'" in finished.err


def test_a_command_without_a_prompt_says_nothing_of_prompts(run: Call) -> None:
    assert "--text" not in run("calibrate", "--nonsense").err
