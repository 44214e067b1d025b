"""Policies by name, and what they decide."""

import pytest

from rakvctl.core.errors import UsageError
from rakvctl.core.policies import make_policy
from rakvctl.core.types import Action, Features

HIT = Features(num_prompt_tokens=100, max_new_tokens=10, num_matched_tokens=50, drafter="model")
MISS = Features(num_prompt_tokens=100, max_new_tokens=10, num_matched_tokens=0, drafter="model")
NO_DRAFTER = Features(num_prompt_tokens=100, max_new_tokens=10, num_matched_tokens=50, drafter="none")


@pytest.mark.parametrize(
    ("name", "hit", "miss"),
    [
        ("ar", Action(False, 0), Action(False, 0)),
        ("kv", Action(True, 0), Action(False, 0)),
        ("spec-4", Action(False, 4), Action(False, 4)),
        ("joint-6", Action(True, 6), Action(False, 6)),
    ],
)
def test_a_fixed_policy_takes_its_action_wherever_it_can(name: str, hit: Action, miss: Action) -> None:
    policy = make_policy(name)
    assert policy.decide(HIT).action == hit
    assert policy.decide(MISS).action == miss
    assert policy.decide(HIT).policy == name


def test_the_draft_length_in_force_is_reported_and_not_the_one_asked_for() -> None:
    decision = make_policy("joint-4").decide(NO_DRAFTER)
    assert decision.action == Action(True, 0)
    assert decision.drafter == "none"


@pytest.mark.parametrize(
    "name",
    [
        "",
        "spec",
        "spec-",
        "spec-0",
        "joint-0",
        "spec-33",
        "spec--1",
        "spec-04",
        "spec-\N{FULLWIDTH DIGIT FOUR}",
        "spec-4\n",
        "KV",
        "kv-2",
        "auto2",
    ],
)
def test_an_unknown_policy_is_a_usage_error(name: str) -> None:
    with pytest.raises(UsageError):
        make_policy(name)
