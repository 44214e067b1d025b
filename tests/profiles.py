"""A profile of the toy pair with declared costs: what calibration finds on a virtual clock."""

import os
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rakvctl.core.backends.fake import FakeBackend, FakeCosts, VirtualClock
from rakvctl.core.engine import Engine
from rakvctl.core.hardware import processor_name
from rakvctl.core.pair import ModelPair
from rakvctl.core.profile import HardwareProfile
from rakvctl.core.profile_file import write_profile
from rakvctl.core.profile_places import default_path
from rakvctl.core.text import TextCodec
from rakvctl.measure.calibrate import calibrate
from rakvctl.measure.timing import Effort
from tests.fakes import LETTERS, LetterTokenizer

TARGET_COSTS = FakeCosts(pass_ms=10.0, token_ms=0.5, context_ms=0.002, copy_token_ms=0.01)
DRAFT_COSTS = FakeCosts(pass_ms=2.0, token_ms=0.1, context_ms=0.0005, copy_token_ms=0.002)


class AnyLetterTokenizer(LetterTokenizer):
    """Every character is some letter."""

    def __call__(self, text: str, **_: object) -> SimpleNamespace:
        return SimpleNamespace(input_ids=[ord(character) % len(LETTERS) for character in text])


def toy_pair(clock: VirtualClock, *, with_draft: bool = True, noise: float = 0.3) -> ModelPair:
    """Target and draft of 2,048 positions whose times pass on the clock."""
    codec = TextCodec(AnyLetterTokenizer(), frozenset())
    target = Engine(FakeBackend(seed=1, max_positions=2048, clock=clock, costs=TARGET_COSTS))
    if not with_draft:
        return ModelPair(codec, target, "toy")
    draft = FakeBackend(seed=1, noise=noise, max_positions=2048, clock=clock, costs=DRAFT_COSTS)
    return ModelPair(codec, target, "toy", Engine(draft), "toy-draft")


@cache
def toy_profile(*, with_draft: bool = True) -> HardwareProfile:
    """What calibrating the toy pair gives."""
    clock = VirtualClock()
    return calibrate(toy_pair(clock, with_draft=with_draft), Effort(budget_s=600.0), clock, lambda *_: None).profile


def keep_profile(*, days_ago: int = 0, **changes: Any) -> Path:
    """One of the user's own profiles: of `tiny` on this machine, but for the changes of its fingerprint."""
    mark = replace(toy_profile().fingerprint, target="tiny", draft="tiny", processor=processor_name())
    mark = replace(mark, **changes)
    path = default_path(mark)
    write_profile(replace(toy_profile(), fingerprint=mark), path)
    os.utime(path, (1e9 - days_ago * 86400,) * 2)
    return path
