"""Fields of a JSON line: those that are honoured, those that are refused, and those that are nobody's business."""

import json
from pathlib import Path
from typing import Any

import pytest

from rakvctl.cli.inputs import BadPrompt, Prompt, open_prompts
from rakvctl.cli.options import InputFormat
from rakvctl.core.types import SamplingParams
from tests.program import Call

SAMPLING = SamplingParams(max_new_tokens=7, temperature=0.5, top_p=0.9, top_k=5, seed=3, stop=("END",), min_p=0.1)


def read(path: Path, **fields: Any) -> Prompt | BadPrompt:
    """A line of these fields, between two others that it costs nothing."""
    if "messages" not in fields:
        fields["prompt"] = "x"
    lines = [{"prompt": "before"}, {"id": "own", **fields}, {"prompt": "after"}]
    (path / "p.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    source = open_prompts(None, [str(path / "p.jsonl")], InputFormat.AUTO, SAMPLING)
    before, prompt, after = source.prompts
    assert (before, after) == (Prompt(1, "before", SAMPLING), Prompt(3, "after", SAMPLING))
    assert prompt.id == "own"
    return prompt


def error(path: Path, **fields: Any) -> tuple[str, str]:
    bad = read(path, **fields)
    assert isinstance(bad, BadPrompt), bad
    assert bad.error.hint
    return bad.error.message, bad.error.hint


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"max_tokens": 4}, {"max_new_tokens": 4}),
        ({"max_completion_tokens": 4}, {"max_new_tokens": 4}),
        ({"max_tokens": 4, "max_new_tokens": 4, "max_completion_tokens": 4}, {"max_new_tokens": 4}),
        ({"max_tokens": None, "max_new_tokens": 5}, {"max_new_tokens": 5}),
        ({"top_p": 0.25}, {"top_p": 0.25}),
        ({"top_p": 1}, {"top_p": 1.0}),
        ({"top_k": 0}, {"top_k": 0}),
        ({"min_p": 0.5}, {"min_p": 0.5}),
        ({"min_p": 0}, {"min_p": 0.0}),
        ({"repetition_penalty": 1.25}, {"repetition_penalty": 1.25}),
    ],
)
def test_sampling_fields_are_honoured(fields: dict[str, Any], expected: dict[str, Any], tmp_path: Path) -> None:
    prompt = read(tmp_path, **fields)
    assert isinstance(prompt, Prompt)
    unchanged = {name: getattr(SAMPLING, name) for name in SAMPLING.__slots__ if name not in expected}
    assert {name: getattr(prompt.sampling, name) for name in SAMPLING.__slots__} == {**unchanged, **expected}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("max_tokens", value) for value in (0, -1, 1.0, "5", True)),
        *(("max_completion_tokens", value) for value in (0, [])),
        *(("top_p", value) for value in (0, 1.5, -1, float("nan"), "all", True)),
        *(("top_k", value) for value in (-1, 1.5, "5", False)),
        *(("min_p", value) for value in (-0.1, 1.5, float("nan"), "x", True)),
        *(("repetition_penalty", value) for value in (0, -1, float("nan"), float("inf"), "x", True)),
    ],
)
def test_a_value_out_of_bounds_is_named_as_the_line_has_it(name: str, value: Any, tmp_path: Path) -> None:
    message, _ = error(tmp_path, **{name: value})
    assert f"`{name}` is not " in message


@pytest.mark.parametrize(
    ("option", "name", "value"),
    [
        ("-n", "max_new_tokens", "0"),
        ("--temperature", "temperature", "-1"),
        ("--top-p", "top_p", "1.5"),
        ("--top-k", "top_k", "-1"),
        ("--min-p", "min_p", "1.5"),
        ("--repetition-penalty", "repetition_penalty", "0"),
        ("--seed", "seed", "-1"),
    ],
)
def test_options_and_lines_have_the_same_bounds(option: str, name: str, value: str, run: Call, tmp_path: Path) -> None:
    line_message, line_hint = error(tmp_path, **{name: json.loads(value)})
    finished = run("generate", "x", option, value)
    assert (finished.code, finished.out) == (2, "")
    message, hint = finished.err.splitlines()
    assert message.removeprefix(f"Error: --{name.replace('_', '-')} {value}") == line_message.partition(f"`{name}`")[2]
    assert hint == f"Hint: {line_hint}"


def test_aliases_that_differ_are_an_error(tmp_path: Path) -> None:
    message, _ = error(tmp_path, max_tokens=4, max_new_tokens=5)
    assert "`max_new_tokens` and `max_tokens` differ" in message


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("max_new_token", "max_new_tokens"),
        ("max-new-tokens", "max_new_tokens"),
        ("maxNewTokens", "max_new_tokens"),
        ("maxTokens", "max_tokens"),
        ("temprature", "temperature"),
        ("Temperature", "temperature"),
        ("topP", "top_p"),
        ("top-k", "top_k"),
        ("repetition_penality", "repetition_penalty"),
        ("repeat_penalty", "repetition_penalty"),
        ("Seed", "seed"),
        ("stop_sequences", "stop"),
        ("frequency_penality", "frequency_penalty"),
    ],
)
def test_a_near_miss_is_an_error_that_names_what_was_meant(name: str, meant: str, tmp_path: Path) -> None:
    message, hint = error(tmp_path, **{name: 1})
    assert f"`{name}`" in message
    assert f"`{meant}`" in message + hint


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 2),
        ("best_of", 3),
        ("logprobs", True),
        ("logprobs", 0),
        ("top_logprobs", 5),
        ("frequency_penalty", 0.5),
        ("presence_penalty", -1),
        ("logit_bias", {"50256": -100}),
        ("response_format", {"type": "json_object"}),
        ("tools", [{"type": "function"}]),
        ("guided_json", {"type": "object"}),
        ("structured_outputs", {"regex": "a*"}),
        ("stop_token_ids", [1]),
        ("ignore_eos", True),
        ("min_tokens", 5),
        ("echo", True),
        ("num_beams", 4),
        ("do_sample", True),
    ],
)
def test_what_is_not_supported_is_an_error_that_names_it(name: str, value: Any, tmp_path: Path) -> None:
    message, hint = error(tmp_path, **{name: value})
    assert f"`{name}` is not supported" in message
    assert "remove" in hint


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 1),
        ("best_of", 1),
        ("logprobs", False),
        ("frequency_penalty", 0),
        ("presence_penalty", 0.0),
        ("logit_bias", {}),
        ("response_format", {"type": "text"}),
        ("tools", []),
        ("ignore_eos", False),
        ("n", None),
    ],
)
def test_a_value_that_asks_for_nothing_is_no_mistake(name: str, value: Any, tmp_path: Path) -> None:
    """Clients write defaults out."""
    assert read(tmp_path, **{name: value}) == Prompt("own", "x", SAMPLING)


@pytest.mark.parametrize(
    "name",
    [
        "category",
        "prompt_id",
        "reference",
        "answer",
        "step",
        "speed",
        "top",
        "text",
        "index",
        "label",
        "user",
        "model",
        "metadata",
        "stream",
        "store",
        "title",
        "completion_tokens",
        "prompt_tokens",
        "tokens_per_s",
        "finish_reason",
        "template",
        "tempo",
        "stopped",
        "seeded",
        "maximum",
        "temporary",
    ],
)
def test_data_of_the_users_own_is_no_mistake(name: str, tmp_path: Path) -> None:
    assert read(tmp_path, **{name: 3}) == Prompt("own", "x", SAMPLING)


# Messages


def test_text_parts_of_a_message_are_joined(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two\n"}]
    messages = [{"role": "system", "content": "brief"}, {"role": "user", "content": parts, "name": "anna"}]
    prompt = read(tmp_path, messages=messages)
    assert isinstance(prompt, Prompt)
    joined = {"role": "user", "content": "one\ntwo\n", "name": "anna"}
    assert prompt.content == ({"role": "system", "content": "brief"}, joined)


def test_parts_of_other_types_are_an_error_that_names_them(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "what is this?"}, {"type": "image_url", "image_url": {"url": "x"}}]
    message, _ = error(tmp_path, messages=[{"role": "user", "content": parts}])
    assert "`messages`" in message
    assert "image_url" in message


@pytest.mark.parametrize(
    "content", [[], ["x"], [{}], [{"type": "text"}], [{"text": "x"}], [{"type": "text", "text": 3}], [{"type": 3}], {}]
)
def test_malformed_parts_are_an_error(content: Any, tmp_path: Path) -> None:
    assert "`messages`" in error(tmp_path, messages=[{"role": "user", "content": content}])[0]
