"""The user's own prompts, on which `calibrate` measures acceptance: as many as time allows, and how many is said."""

import json
from pathlib import Path

import pytest

from rakvctl.core.backends.fake import VirtualClock
from rakvctl.measure.calibrate import Calibration, calibrate
from rakvctl.measure.timing import Effort
from tests.profiles import toy_pair
from tests.program import Call

PROMPTS = [tuple((7 * index + shift) % 32 for index in range(30)) for shift in range(200)]


def measured(budget_s: float, num_prompts: int) -> tuple[Calibration, float]:
    """What calibrating on some prompts finds, and the seconds that it takes."""
    clock = VirtualClock()
    calibration = calibrate(toy_pair(clock), Effort(budget_s=budget_s), clock, lambda *_: None, PROMPTS[:num_prompts])
    return calibration, clock()


def test_prompts_get_a_share_of_the_budget() -> None:
    """One prompt takes about 0.3 s here: 200 of them would take a minute, of a budget of ten seconds."""
    few, few_s = measured(10.0, 5)
    many, many_s = measured(10.0, 200)
    assert few.profile.acceptance.num_prompts == 5
    assert 5 < many.profile.acceptance.num_prompts < 20
    assert many_s < few_s + 2.0


def test_one_prompt_is_measured_whatever_the_budget() -> None:
    calibration, _ = measured(0.001, 3)
    assert calibration.profile.acceptance.num_prompts == 1
    assert calibration.profile.acceptance.num_trials > 0


@pytest.mark.parametrize("as_json", [False, True])
def test_it_is_said_how_many_prompts_were_used(run: Call, tiny_checkpoint: Path, tmp_path: Path, as_json: bool) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("a word", "another", "x" * 300)))
    models = ("-m", tiny_checkpoint / "target", "-d", "none", "--threads", "1", "--repeats", "1")
    options = ("--prompts", prompts, "-o", tmp_path / "profile.yaml", *(["--json"] if as_json else []))
    finished = run("calibrate", *models, *options)
    assert finished.code == 0
    if as_json:
        assert json.loads(finished.out)["prompts"] == {"given": 3, "used": 2}
    else:
        assert "Acceptance was measured on 2 of 3 prompts." in finished.out
