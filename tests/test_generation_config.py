"""What a checkpoint's generation_config.json asks for: every policy gives what transformers' own `generate` gives."""

import json
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from rakvctl.core.backends.torch_loader import load_codec
from rakvctl.core.drafters import Drafter
from rakvctl.core.errors import ModelError
from rakvctl.core.generation_config import read_generation_config
from rakvctl.core.loading import RuntimeOptions, load_pair
from rakvctl.core.lookup import History, LookupDrafter
from rakvctl.core.models import ModelFiles
from rakvctl.core.pair import ModelPair
from rakvctl.core.policies import make_policy
from rakvctl.core.store import PrefixStore
from rakvctl.core.tiers import MemoryTier
from rakvctl.core.types import Request, SamplingParams
from rakvctl.measure.arms import Task, make_arm_runtime
from rakvctl.measure.hf_peers import load_hf_arms
from tests.checkpoints import build_checkpoint, byte_tokenizer, random_model, save_checkpoint
from tests.profiles import toy_profile
from tests.program import Call

pytestmark = pytest.mark.usefixtures("one_thread")

NUM_NEW = 24
TEXT = "The dog does not mind the dog, and the fox does not mind the fox, and the dog does not mind."
PROMPT = tuple(byte_tokenizer()(TEXT).input_ids)
# A prompt of one token, which is what a forced first token is about.
SHORT = (7,)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target, and a draft whose weights are nearly the target's; neither says anything of generation."""
    folder = tmp_path_factory.mktemp("models")
    paths = []
    for name, noise in (("target", 0.0), ("draft", 0.02)):
        path = save_checkpoint(folder / name, random_model("llama", seed=34, noise=noise))
        (path / "generation_config.json").unlink()
        paths.append(path)
    return paths[0], paths[1]


def with_config(checkpoint: Path, folder: Path, **config: Any) -> Path:
    """The same checkpoint with a generation config."""
    copy = shutil.copytree(checkpoint, folder / "configured")
    (copy / "generation_config.json").write_text(json.dumps(config), encoding="ascii")
    return copy


def generate(checkpoint: Path, prompt: tuple[int, ...], **options: Any) -> tuple[int, ...]:
    """What transformers adds to the prompt, by its own reading of the checkpoint."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    ids = torch.tensor([prompt])
    output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_NEW, pad_token_id=0, **options)
    return tuple(output[0, len(prompt) :].tolist())


@cache
def plain(checkpoint: Path, prompt: tuple[int, ...]) -> tuple[int, ...]:
    """Without any config, and without an end."""
    return generate(checkpoint, prompt, eos_token_id=None)


def load(target: Path, draft: Path) -> tuple[ModelPair, list[str]]:
    notes: list[str] = []
    options = RuntimeOptions(str(target), str(draft), device="cpu", policy="spec-2")
    return load_pair(options, notes.append), notes


@pytest.fixture(scope="module")
def pair(checkpoints: tuple[Path, Path]) -> ModelPair:
    """The models of both, loaded once."""
    return load(*checkpoints)[0]


def configured(pair: ModelPair, target: Path) -> ModelPair:
    """The pair as `load_pair` has it of this target, which differs in its generation config only."""
    files = ModelFiles("it", target)
    return replace(pair, codec=load_codec(files), logits_settings=read_generation_config(files).settings)


def complete_twice(
    pair: ModelPair, policy: str, drafter: Drafter | None, prompt: tuple[int, ...], sampling: SamplingParams
) -> list[tuple[int, ...]]:
    """The same request cold and warm."""
    profile = toy_profile() if policy in ("auto", "rakv") else None
    store = PrefixStore(MemoryTier(2**28))
    runtime = make_arm_runtime(pair, make_policy(policy, profile), drafter, store)
    return [runtime.run(Request(prompt, sampling)).token_ids for _ in range(2)]


# Each is given what the model says without it, of which it takes some away or asks for more.
Tokens = tuple[int, ...]
CONFIGS: dict[str, Callable[[Tokens], dict[str, Any]]] = {
    "repetition_penalty": lambda said: {"repetition_penalty": 1.3},
    "reward for repeating": lambda said: {"repetition_penalty": 0.8},
    "no_repeat_ngram_size": lambda said: {"no_repeat_ngram_size": 2},
    "no token twice": lambda said: {"no_repeat_ngram_size": 1},
    "suppress_tokens": lambda said: {"suppress_tokens": [said[1], said[3], 100_000]},
    "begin_suppress_tokens": lambda said: {"begin_suppress_tokens": [said[0]]},
    "bad_words_ids": lambda said: {"bad_words_ids": [[said[0], said[1]], [said[3]]]},
    "sequence_bias": lambda said: {"sequence_bias": [[[said[0]], -9.0], [[said[1], said[2]], -9.0], [[5, 6, 7], 3.0]]},
    "min_new_tokens": lambda said: {"eos_token_id": said[2], "min_new_tokens": 9},
    "min_length": lambda said: {"eos_token_id": [said[2], said[4]], "min_length": len(PROMPT) + 9},
    "a bad word that ends": lambda said: {"eos_token_id": said[5], "bad_words_ids": [[said[5]], [said[3]]]},
    "forced_eos_token_id": lambda said: {"eos_token_id": 0, "forced_eos_token_id": 0},
    "several": lambda said: {
        "repetition_penalty": 1.2,
        "no_repeat_ngram_size": 3,
        "bad_words_ids": [[said[0]], [said[1], said[2]]],
        "sequence_bias": [[[said[4]], -2.0], [[said[4], said[5]], 1.5]],
        "suppress_tokens": [said[3]],
        "begin_suppress_tokens": [said[1]],
        "eos_token_id": 0,
        "forced_eos_token_id": [0, 9],
        "min_new_tokens": 3,
    },
}


@pytest.mark.parametrize("name", CONFIGS)
def test_every_policy_gives_what_generate_gives(
    name: str, checkpoints: tuple[Path, Path], pair: ModelPair, tmp_path: Path
) -> None:
    said = plain(checkpoints[0], PROMPT)
    target = with_config(checkpoints[0], tmp_path, **CONFIGS[name](said))
    expected = generate(target, PROMPT)
    assert expected != said, "the config changes the text, or nothing is tested"
    pair = configured(pair, target)
    sampling = SamplingParams(max_new_tokens=NUM_NEW)
    for policy in ("ar", "kv", "spec-2", "joint-4", "auto"):
        assert complete_twice(pair, policy, pair.drafter(), PROMPT, sampling) == [expected] * 2, policy
    for policy in ("spec-2", "joint-4"):
        lookup = LookupDrafter(History(0))
        assert complete_twice(pair, policy, lookup, PROMPT, sampling) == [expected] * 2, f"{policy}, looked up"


def test_a_first_token_is_forced_after_a_prompt_of_one(
    checkpoints: tuple[Path, Path], pair: ModelPair, tmp_path: Path
) -> None:
    """What must not begin a text is then the second token."""
    said = plain(checkpoints[0], SHORT)
    second = plain(checkpoints[0], (*SHORT, 30))[0]
    config = {"forced_bos_token_id": 30, "begin_suppress_tokens": [second]}
    target = with_config(checkpoints[0], tmp_path, **config)
    expected = generate(target, SHORT)
    assert expected[0] == 30 != said[0]
    assert expected[1] != second
    pair = configured(pair, target)
    for policy in ("ar", "spec-2"):
        sampling = SamplingParams(max_new_tokens=NUM_NEW)
        assert complete_twice(pair, policy, pair.drafter(), SHORT, sampling) == [expected] * 2
    assert complete_twice(pair, "ar", None, PROMPT, SamplingParams(max_new_tokens=2))[0][0] != 30


def test_a_draft_model_with_the_targets_weights_is_always_right(checkpoints: tuple[Path, Path], tmp_path: Path) -> None:
    """It drafts by the same settings, whatever its own checkpoint says."""
    target = with_config(checkpoints[0], tmp_path, repetition_penalty=1.3, no_repeat_ngram_size=2)
    pair, _ = load(target, checkpoints[0])
    runtime = make_arm_runtime(pair, make_policy("spec-4"), pair.drafter(), PrefixStore(MemoryTier(0)))
    completion = runtime.run(Request(PROMPT, SamplingParams(max_new_tokens=21)))
    assert completion.num_accepted_tokens == completion.num_draft_tokens == 16


def test_a_request_may_say_another_penalty(checkpoints: tuple[Path, Path], pair: ModelPair, tmp_path: Path) -> None:
    target = with_config(checkpoints[0], tmp_path, repetition_penalty=1.3)
    pair = configured(pair, target)
    for penalty in (1.0, 1.7):
        expected = generate(target, PROMPT, repetition_penalty=penalty)
        sampling = SamplingParams(max_new_tokens=NUM_NEW, repetition_penalty=penalty)
        assert expected != generate(target, PROMPT)
        assert complete_twice(pair, "joint-4", pair.drafter(), PROMPT, sampling) == [expected] * 2


def test_without_a_generation_config_the_models_config_is_asked(checkpoints: tuple[Path, Path], tmp_path: Path) -> None:
    """As checkpoints of years ago have it, and as transformers reads them."""
    copy = shutil.copytree(checkpoints[0], tmp_path / "old")
    path = copy / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "no_repeat_ngram_size": 2}), encoding="ascii")
    expected = generate(copy, PROMPT)
    assert expected != plain(checkpoints[0], PROMPT)
    pair, notes = load(copy, checkpoints[1])
    assert notes == []
    assert complete_twice(pair, "kv", None, PROMPT, SamplingParams(max_new_tokens=NUM_NEW)) == [expected] * 2


# What is not applied


def read(folder: Path, **config: Any) -> tuple[str, ...]:
    (folder / "generation_config.json").write_text(json.dumps(config), encoding="ascii")
    return read_generation_config(ModelFiles("it", folder)).not_applied


def test_one_note_names_what_is_not_applied(checkpoints: tuple[Path, Path], tmp_path: Path) -> None:
    config = {"typical_p": 0.9, "watermarking_config": {"greenlist_ratio": 0.3}, "num_beams": 4}
    target = with_config(checkpoints[0], tmp_path, **config)
    _, notes = load(target, checkpoints[1])
    (note,) = notes
    assert f"of {target} sets " in note
    assert "num_beams, watermarking_config, typical_p" in note


def test_values_that_change_nothing_are_no_note(tmp_path: Path) -> None:
    """As older versions of transformers write them all out."""
    neutral = {"num_beams": 1, "guidance_scale": 1.0, "typical_p": 1.0, "epsilon_cutoff": 0.0, "penalty_alpha": None}
    assert read(tmp_path, **neutral, remove_invalid_values=False, stop_strings=None) == ()


def test_what_the_command_line_decides_is_no_note(tmp_path: Path) -> None:
    sampling = {"do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20, "min_p": 0.1}
    ids = {"bos_token_id": 1, "eos_token_id": [1, 2], "pad_token_id": 0}
    other = {"transformers_version": "4.0.0", "use_cache": True, "max_length": 99, "max_new_tokens": 2048}
    assert read(tmp_path, **sampling, **ids, **other) == ()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("repetition_penalty", 0),
        ("repetition_penalty", "high"),
        ("no_repeat_ngram_size", -1),
        ("no_repeat_ngram_size", 2.5),
        ("suppress_tokens", 3),
        ("suppress_tokens", ["a"]),
        ("bad_words_ids", [3]),
        ("sequence_bias", [[[1, 2]]]),
        ("sequence_bias", [[[1, 2], "much"]]),
        ("forced_bos_token_id", "<s>"),
        ("forced_eos_token_id", [None]),
        ("min_length", True),
    ],
)
def test_a_malformed_value_is_an_error_that_names_it(name: str, value: Any, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=f"`{name}` in generation_config.json of it is not ") as raised:
        read(tmp_path, **{name: value})
    assert raised.value.hint


def test_the_shipped_models_ask_for_nothing() -> None:
    """They keep their text, and the argmax on the device."""
    for role in ("target", "draft"):
        files = ModelFiles("tiny", Path(__file__).parent.parent / "rakvctl" / "tiny" / role)
        settings, not_applied = read_generation_config(files)
        assert (settings.changed, not_applied) == ({}, ())


# The peers of `bench`


def test_peers_have_the_settings_that_are_applied(
    checkpoints: tuple[Path, Path], pair: ModelPair, tmp_path: Path
) -> None:
    """And none that are not: they search no beams."""
    config = CONFIGS["several"](plain(checkpoints[0], PROMPT))
    expected = generate(with_config(checkpoints[0], tmp_path / "applied", **config), PROMPT)
    target = with_config(checkpoints[0], tmp_path, **config, num_beams=3)
    told: dict[str, dict[str, Any]] = {
        "hf-generate": {},
        "hf-prompt-lookup": {"prompt_lookup_num_tokens": 5},
        "hf-assisted": {},
    }
    files, draft = ModelFiles("it", target), ModelFiles("draft", checkpoints[1])
    for arm in load_hf_arms(told, configured(pair, target), files, draft, "cpu", time.perf_counter):
        assert arm.prepare(Task(PROMPT, NUM_NEW))().token_ids == expected, arm.name


@pytest.mark.slow
def test_the_peers_of_bench_have_the_same_settings(run: Call, tmp_path: Path) -> None:
    """And only those: beams are not applied, so the peers search none."""
    draft = build_checkpoint(tmp_path / "draft", "gpt2", seed=5, noise=0.02)
    config = {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3, "suppress_tokens": [40, 41], "num_beams": 2}
    more = {"bad_words_ids": [[50], [60, 61]], "sequence_bias": [[[70], 0.5]], "min_new_tokens": 6, "eos_token_id": 0}
    plain_target = build_checkpoint(tmp_path / "target", "gpt2", seed=5)
    target = with_config(plain_target, tmp_path, **config, **more, forced_eos_token_id=0, temperature=0.7)
    prompts = tmp_path / "prompts.txt"
    prompts.write_text(TEXT, encoding="ascii")
    peers = "hf-generate,hf-prompt-lookup,hf-assisted"
    models = ("-m", target, "-d", draft, "--threads", "1", "--device", "cpu")
    assert run("calibrate", *models, "--repeats", "1", "--budget", "1", "-o", tmp_path / "p.yaml").code == 0
    files = ("--profile", tmp_path / "p.yaml", "-w", prompts, "--output-dir", tmp_path / "out")
    finished = run("bench", *models, *files, "-n", "12", "--peers", peers, "--policies", "kv,spec-2,joint-4,auto")
    assert (finished.code, finished.err.count("num_beams")) == (0, 1)
    samples = json.loads((tmp_path / "out" / "results.json").read_text())["samples"]
    assert len(samples) == 3 * 8
    assert all(sample["equal"] for sample in samples)
