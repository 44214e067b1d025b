"""How many positions a model has, and models whose KV entries depend on how long the sequence is."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from rakvctl.core.backends.position_limits import prefix_stable_positions
from rakvctl.core.backends.torch_hf import TorchBackend
from rakvctl.core.backends.torch_load import load_backend
from rakvctl.core.engine import Engine
from rakvctl.core.errors import RequestError
from rakvctl.core.loading import RuntimeOptions, load_pair, make_runtime
from rakvctl.core.models import ModelFiles
from rakvctl.core.pair import ModelPair
from rakvctl.core.types import Completion, Request, SamplingParams
from tests.architectures import SWITCH_TOKENS, tiny_model
from tests.checkpoints import VOCAB_SIZE, save_checkpoint

pytestmark = pytest.mark.usefixtures("one_thread")

LONGROPE = ["phi3/longrope", "llama/longrope", "phimoe/longrope"]
# Before the switch, up to it, across it while decoding, and beyond it from the start.
LENGTHS = [20, SWITCH_TOKENS - 16, SWITCH_TOKENS - 1, SWITCH_TOKENS, SWITCH_TOKENS + 1, 80]
NUM_TOKENS = 16


def backend_of(name: str, **changed: Any) -> TorchBackend:
    return TorchBackend(tiny_model(name, **changed), "test", VOCAB_SIZE)


def prompt_of(num_tokens: int) -> tuple[int, ...]:
    """Prompts that all begin alike."""
    return tuple(int(token) for token in np.random.default_rng(1).integers(1, VOCAB_SIZE, size=100)[:num_tokens])


def generate(model: Any, prompt: tuple[int, ...]) -> tuple[int, ...]:
    ids = torch.tensor([prompt])
    output = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NUM_TOKENS)
    return tuple(output[0, len(prompt) :].tolist())


def options_of(checkpoint: Path, policy: str = "joint-2") -> RuntimeOptions:
    return RuntimeOptions(str(checkpoint), device="cpu", dtype="float32", policy=policy, drafter="lookup")


@pytest.fixture(scope="module", params=LONGROPE)
def longrope(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[ModelPair, Path]:
    checkpoint = save_checkpoint(tmp_path_factory.mktemp("longrope"), tiny_model(request.param))
    notes: list[str] = []
    pair = load_pair(options_of(checkpoint), notes.append)
    assert len(notes) == 1
    assert f"more than {SWITCH_TOKENS} tokens" in notes[0]
    return pair, checkpoint


@pytest.mark.parametrize("policy", ["ar", "kv", "spec-2", "joint-4"])
def test_longrope_gives_the_tokens_of_generate_under_every_policy(
    longrope: tuple[ModelPair, Path], policy: str
) -> None:
    """Prompts of all lengths one after another, and again: what one stores must not serve another in the wrong way."""
    pair, checkpoint = longrope
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    runtime = make_runtime(pair, options_of(checkpoint, policy), None)
    for length in (*LENGTHS, *reversed(LENGTHS)):
        completion: Completion = runtime.run(Request(prompt_of(length), SamplingParams(max_new_tokens=NUM_TOKENS)))
        assert completion.token_ids == generate(model, prompt_of(length))
        if length + NUM_TOKENS > SWITCH_TOKENS:
            assert completion.num_reused_tokens == completion.num_draft_tokens == 0
    if policy in ("kv", "joint-4"):
        assert runtime.run(Request(prompt_of(20), SamplingParams(max_new_tokens=8))).num_reused_tokens == 20


def test_plain_decoding_has_nothing_to_say_of_longrope(longrope: tuple[ModelPair, Path]) -> None:
    notes: list[str] = []
    load_pair(options_of(longrope[1], "ar"), notes.append)
    assert notes == []


@pytest.mark.parametrize("name", LONGROPE)
def test_where_longrope_switches_is_where_the_logits_of_chunks_leave_those_of_one_pass(name: str) -> None:
    model = tiny_model(name)
    backend = TorchBackend(model, "test", VOCAB_SIZE)
    stable = backend.prefix_stable_positions
    assert stable == SWITCH_TOKENS

    def difference(num_tokens: int) -> float:
        ids = prompt_of(num_tokens)
        backend.cache.rollback(0)
        backend.forward(ids[:10], num_logits=1)
        chunks = backend.forward(ids[10:], num_logits=1).numpy()
        with torch.inference_mode():
            whole = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1:].numpy()
        return float(np.abs(chunks - whole).max())

    assert difference(stable) < 1e-4
    assert difference(stable + 1) > 1e-2


@pytest.mark.parametrize("name", LONGROPE)
def test_a_prompt_across_the_switch_goes_through_the_model_in_one_pass(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rakvctl.core.backends.torch_hf.BLOCK_TOKENS", 16)
    model = tiny_model(name)
    engine = Engine(TorchBackend(model, "test", VOCAB_SIZE))
    ids = prompt_of(80)
    with torch.inference_mode():
        whole = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1:].numpy()
    np.testing.assert_allclose(engine.prefill(ids).numpy(), whole, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["llama", "llama/llama3", "llama/yarn", "llama/dynamic", "gpt2", "bloom"])
def test_other_kinds_are_stable_at_every_length_they_allow(name: str) -> None:
    """Dynamic NTK changes only what comes after the last position that the config allows."""
    assert backend_of(name).prefix_stable_positions is None


def test_dynamic_ntk_is_stable_up_to_the_length_of_its_training() -> None:
    model = tiny_model("llama/dynamic", max_position_embeddings=64)
    for _ in range(2):
        assert prefix_stable_positions(model, None) == 64
        assert prefix_stable_positions(model, 64) is None


def test_the_rotary_embedding_is_as_it_was_after_it_was_measured() -> None:
    for name in ("llama/dynamic", *LONGROPE):
        model = tiny_model(name, max_position_embeddings=64)
        ids = torch.tensor([prompt_of(20)])
        with torch.inference_mode():
            before = model(input_ids=ids).logits
            prefix_stable_positions(model, None)
            assert torch.equal(model(input_ids=ids).logits, before)


def test_only_kinds_that_look_at_the_length_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    monkeypatch.setattr(type(model.model.rotary_emb), "forward", None)
    assert prefix_stable_positions(model, 512) is None


# Limits


@pytest.mark.parametrize(
    ("name", "changed", "limit"),
    [
        ("gpt2", {}, 512),
        ("llama", {"max_position_embeddings": 99}, 99),
        ("mpt", {"max_seq_len": 48}, 48),
        ("dbrx", {"max_seq_len": 48}, 48),
        ("bloom", {}, None),
        ("falcon", {"max_position_embeddings": 99}, 99),
        ("falcon/alibi", {"max_position_embeddings": 99}, None),
        ("mamba", {}, None),
    ],
)
def test_the_limit_is_what_the_config_calls_so_and_none_where_positions_are_unlimited(
    name: str, changed: dict[str, int], limit: int | None
) -> None:
    assert backend_of(name, **changed).max_positions == limit


def served(checkpoint: Path, num_tokens: int) -> Completion:
    pair = load_pair(replace(options_of(checkpoint, "ar"), drafter="auto"), lambda _: None)
    runtime = make_runtime(pair, options_of(checkpoint, "ar"), None)
    return runtime.run(Request(prompt_of(num_tokens), SamplingParams(max_new_tokens=NUM_TOKENS)))


def test_mpt_ends_where_its_table_of_biases_ends(tmp_path: Path) -> None:
    checkpoint = save_checkpoint(tmp_path, tiny_model("mpt", max_seq_len=48))
    completion = served(checkpoint, 40)
    assert len(completion.token_ids) == 8
    with pytest.raises(RequestError, match="room for 48"):
        served(checkpoint, 48)


def test_alibi_goes_on_beyond_what_its_config_names(tmp_path: Path) -> None:
    model = tiny_model("falcon/alibi", max_position_embeddings=24)
    checkpoint = save_checkpoint(tmp_path, model)
    assert served(checkpoint, 40).token_ids == generate(model, prompt_of(40))


# Padding tokens


@pytest.mark.parametrize("pad", [1, 3, 6, 300])
@pytest.mark.parametrize("name", ["roberta", "camembert", "data2vec-text", "opt", "gpt2", "llama"])
def test_a_padding_token_among_the_first_ids_is_no_reason_to_refuse_a_model(
    tmp_path: Path, name: str, pad: int
) -> None:
    files = ModelFiles("test", save_checkpoint(tmp_path, tiny_model(name, pad_token_id=pad)))
    assert load_backend(files, "cpu", "float32", VOCAB_SIZE).cache.length == 0


@pytest.mark.parametrize("name", ["roberta", "opt"])
def test_padding_tokens_inside_a_text_count_as_positions_under_every_policy(tmp_path: Path, name: str) -> None:
    """As in transformers' `generate`, which tells the model where each token stands."""
    model = tiny_model(name, pad_token_id=5)
    checkpoint = save_checkpoint(tmp_path, model)
    prompt = tuple(5 if index % 4 == 3 else token for index, token in enumerate(prompt_of(40)))
    expected = generate(model, prompt)
    for policy in ("ar", "kv", "joint-4"):
        pair = load_pair(options_of(checkpoint, policy), lambda _: None)
        runtime = make_runtime(pair, options_of(checkpoint, policy), None)
        for begun in (30, 40):
            completion = runtime.run(Request(prompt[:begun], SamplingParams(max_new_tokens=NUM_TOKENS)))
        assert completion.token_ids == expected
