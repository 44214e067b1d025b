"""Real transformers architectures, tiny and random: every policy gives the tokens of transformers' own `generate`."""

import gc
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, MiniMaxConfig
from transformers.models.llama.modeling_llama import LlamaMLP
from transformers.pytorch_utils import Conv1D

from rakvctl.core.backends import packed
from rakvctl.core.backends.torch_hf import TorchBackend
from rakvctl.core.backends.torch_load import load_backend
from rakvctl.core.engine import Engine
from rakvctl.core.errors import ModelError, UsageError
from rakvctl.core.loading import RuntimeOptions, load_pair, make_runtime
from rakvctl.core.models import ModelFiles
from rakvctl.core.runtime import Runtime
from rakvctl.core.types import Action, Completion, Request, SamplingParams
from tests.checkpoints import (
    CONFIGS,
    SLIDING_WINDOW,
    VOCAB_SIZE,
    build_checkpoint,
    byte_tokenizer,
    random_model,
    save_checkpoint,
)

pytestmark = pytest.mark.usefixtures("one_thread")

REVERSIBLE = [name for name in CONFIGS if name != "mamba"]
MAX_NEW_TOKENS = 24
# Two prompts that share a beginning longer than the window, so that a clone starts beyond it.
FIRST = "The quick brown fox jumps over the lazy dog, and the dog does not mind."
RELATED = "The quick brown fox jumps over the lazy dog, but the cat runs away."

needs_packing = pytest.mark.skipif(
    not packed.can_pack(torch.device("cpu"), torch.float32), reason="weights are packed on x86 CPUs with oneDNN only"
)


def load_noting(
    target: Path, policy: str, draft: Path | None = None, dtype: str = "float32"
) -> tuple[Runtime, list[str]]:
    """A runtime, and the list that its notes to the user go to."""
    notes: list[str] = []
    options = RuntimeOptions(str(target), str(draft) if draft else None, device="cpu", dtype=dtype, policy=policy)
    return make_runtime(load_pair(options, notes.append), options, None), notes


def load(target: Path, policy: str = "ar", draft: Path | None = None, dtype: str = "float32") -> Runtime:
    runtime, notes = load_noting(target, policy, draft, dtype)
    assert notes == []
    return runtime


def serve(runtime: Runtime, prompt: str, **sampling: Any) -> Completion:
    params = SamplingParams(**{"max_new_tokens": MAX_NEW_TOKENS, **sampling})
    return runtime.run(Request(runtime.codec.encode(prompt), params))


def generate(checkpoint: Path, prompt: str) -> tuple[int, ...]:
    """What transformers' own `generate` adds to the prompt; the model is as transformers loads it."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    ids = torch.tensor([byte_tokenizer()(prompt).input_ids])
    output = model.generate(
        ids, do_sample=False, max_new_tokens=MAX_NEW_TOKENS, output_logits=True, return_dict_in_generate=True
    )
    best = torch.cat(output.logits).topk(2).values
    # Float sums depend on the width of a pass: at a near tie no comparison of tokens would mean anything.
    assert (best[:, 0] - best[:, 1]).min() > 1e-3, "a near tie: take another seed"
    return tuple(output.sequences[0, ids.shape[1] :].tolist())


@dataclass(frozen=True)
class Family:
    """A target, drafts that agree with it fully, in part and by chance only, and what `generate` makes of prompts."""

    target: Path
    drafts: dict[str, Path]
    expected: dict[str, tuple[int, ...]]


@pytest.fixture(scope="module", params=REVERSIBLE)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    name, folder = request.param, tmp_path_factory.mktemp(request.param)
    target = build_checkpoint(folder / "target", name)
    drafts = {
        "itself": target,
        "akin": build_checkpoint(folder / "akin", name, noise=0.05),
        "stranger": build_checkpoint(folder / "stranger", name, seed=1),
    }
    return Family(target, drafts, {prompt: generate(target, prompt) for prompt in (FIRST, RELATED)})


def test_the_random_models_wander_well_beyond_the_window(family: Family) -> None:
    """What makes the other tests worth their time."""
    for prompt, tokens in family.expected.items():
        assert len(byte_tokenizer()(prompt).input_ids) > 2 * SLIDING_WINDOW
        assert len(tokens) == MAX_NEW_TOKENS > 2 * SLIDING_WINDOW
        assert len(set(tokens)) > MAX_NEW_TOKENS // 3


@pytest.mark.parametrize("policy", ["ar", "kv"])
def test_without_a_draft_the_tokens_are_those_of_generate(family: Family, policy: str) -> None:
    runtime = load(family.target, policy)
    cold, warm, related, again = (serve(runtime, prompt) for prompt in (FIRST, FIRST, RELATED, FIRST))
    assert cold.token_ids == warm.token_ids == again.token_ids == family.expected[FIRST]
    assert related.token_ids == family.expected[RELATED]
    check_reuse(policy == "kv", cold, warm, related, again)


@pytest.mark.parametrize("draft", ["itself", "akin", "stranger"])
@pytest.mark.parametrize("policy", ["spec-1", "spec-2", "spec-3", "joint-4"])
def test_with_a_draft_the_tokens_are_those_of_generate(family: Family, policy: str, draft: str) -> None:
    runtime = load(family.target, policy, family.drafts[draft])
    completions = [serve(runtime, prompt) for prompt in (FIRST, FIRST, RELATED, FIRST)]
    cold, warm, related, again = completions
    assert cold.token_ids == warm.token_ids == again.token_ids == family.expected[FIRST]
    assert related.token_ids == family.expected[RELATED]
    check_reuse(policy == "joint-4", *completions)
    drafted = sum(completion.num_draft_tokens for completion in completions)
    accepted = sum(completion.num_accepted_tokens for completion in completions)
    assert all(completion.decision.action.draft_len == int(policy[-1]) for completion in completions)
    if draft == "itself":
        assert accepted == drafted > 0
    elif draft == "akin":
        assert 0 < accepted < drafted
    else:
        assert accepted < drafted / 2


def check_reuse(reuses: bool, cold: Completion, warm: Completion, related: Completion, again: Completion) -> None:
    shared = len(byte_tokenizer()("The quick brown fox jumps over the lazy dog,").input_ids)
    expected = (0, cold.num_prompt_tokens, shared - 1, cold.num_prompt_tokens) if reuses else (0, 0, 0, 0)
    assert tuple(one.num_reused_tokens for one in (cold, warm, related, again)) == expected


def test_an_end_token_inside_an_accepted_block_ends_the_text_where_generate_ends_it(family: Family) -> None:
    """Also where the checkpoint names several end tokens, as chat models do."""
    tokens = family.expected[FIRST]
    last = next(index for index in range(9, len(tokens)) if tokens[index] not in tokens[:index])
    path = family.target / "generation_config.json"
    before = path.read_text(encoding="utf-8")
    path.write_text(json.dumps({**json.loads(before), "eos_token_id": [0, tokens[last]]}), encoding="utf-8")
    try:
        assert generate(family.target, FIRST) == tokens[: last + 1]
        runtime = load(family.target, "joint-4", family.target)
        for _ in range(2):
            completion = serve(runtime, FIRST)
            assert completion.token_ids == tokens[: last + 1]
            assert completion.finish_reason == "stop"
    finally:
        path.write_text(before, encoding="utf-8")


@pytest.mark.parametrize("architecture", CONFIGS)
def test_a_prompt_longer_than_one_pass_gives_the_logits_of_one_pass(architecture: str) -> None:
    """The engine sends it through the model in pieces: what a piece leaves behind must carry over to the next."""
    model = random_model(architecture)
    token_ids = byte_tokenizer()("A model that is small enough can still be wrong. " * 110).input_ids
    assert len(token_ids) > 2048 + SLIDING_WINDOW
    found = Engine(TorchBackend(model, "test", VOCAB_SIZE)).prefill(token_ids).numpy()
    with torch.inference_mode():
        expected = model(input_ids=torch.tensor([token_ids]), use_cache=False).logits[0, -1:].numpy()
    np.testing.assert_allclose(found, expected, atol=1e-3, rtol=0)


@pytest.mark.parametrize("architecture", REVERSIBLE)
def test_bfloat16_loads_and_runs(architecture: str, tmp_path: Path) -> None:
    checkpoint = build_checkpoint(tmp_path, architecture)
    runtime = load(checkpoint, "joint-4", checkpoint, dtype="bfloat16")
    cold, warm = serve(runtime, FIRST), serve(runtime, FIRST)
    assert len(cold.token_ids) == len(warm.token_ids) == MAX_NEW_TOKENS
    assert warm.num_reused_tokens == warm.num_prompt_tokens


def test_bfloat16_halves_the_states_and_has_a_key_of_its_own(tmp_path: Path) -> None:
    files = ModelFiles("test", build_checkpoint(tmp_path, "llama"))
    single, half = (load_backend(files, "cpu", dtype, VOCAB_SIZE) for dtype in ("float32", "bfloat16"))
    for backend in (single, half):
        backend.forward([1, 2, 3], num_logits=1)
    assert single.cache.num_bytes(10) == 2 * half.cache.num_bytes(10) > 0
    assert single.model_key != half.model_key


def test_the_key_changes_with_the_weights_and_not_with_the_process(tmp_path: Path) -> None:
    files = ModelFiles("test", build_checkpoint(tmp_path, "llama"))
    first, same = (load_backend(files, "cpu", "float32", VOCAB_SIZE).model_key for _ in range(2))
    build_checkpoint(tmp_path, "llama", seed=1)
    other = load_backend(files, "cpu", "float32", VOCAB_SIZE).model_key
    assert first == same != other


# Recurrent models


@pytest.fixture(scope="module")
def mamba(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_checkpoint(tmp_path_factory.mktemp("mamba"), "mamba", seed=1)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_checkpoint(tmp_path_factory.mktemp("llama"), "llama")


@pytest.mark.parametrize(("policy", "with_draft"), [("ar", False), ("kv", False), ("spec-2", True), ("joint-4", True)])
def test_a_recurrent_target_runs_plainly_and_says_so_once(
    mamba: Path, llama: Path, policy: str, with_draft: bool
) -> None:
    runtime, notes = load_noting(mamba, policy, llama if with_draft else None)
    assert len(notes) == 1
    assert "cannot be rolled back" in notes[0]
    for prompt in (FIRST, FIRST, RELATED, FIRST):
        completion = serve(runtime, prompt)
        assert completion.token_ids == generate(mamba, prompt)
        assert completion.decision.action == Action(reuse=False, draft_len=0)
        assert completion.decision.drafter == "none"
        assert completion.num_reused_tokens == completion.num_draft_tokens == 0
    assert len(notes) == 1


@pytest.mark.parametrize("policy", ["spec-2", "joint-4"])
def test_a_recurrent_draft_is_not_used_and_the_user_is_told(mamba: Path, llama: Path, policy: str) -> None:
    runtime, notes = load_noting(llama, policy, mamba)
    assert len(notes) == 1
    assert "no speculation" in notes[0]
    for prompt in (FIRST, FIRST, RELATED):
        completion = serve(runtime, prompt)
        assert completion.token_ids == generate(llama, prompt)
        assert completion.decision.action.draft_len == completion.num_draft_tokens == 0
        assert completion.decision.drafter == "none"
    assert (completion.num_reused_tokens > 0) == (policy == "joint-4")


def test_a_recurrent_target_runs_in_bfloat16(mamba: Path) -> None:
    runtime, _ = load_noting(mamba, "ar", dtype="bfloat16")
    first, second = serve(runtime, FIRST), serve(runtime, FIRST)
    assert len(first.token_ids) == MAX_NEW_TOKENS
    assert first.token_ids == second.token_ids


@pytest.mark.parametrize("cached", [0, 5])
def test_a_pass_of_a_recurrent_model_that_fails_leaves_nothing_to_the_next_sequence(cached: int) -> None:
    """A pass that dies in the second layer has changed the first layer's state; starting anew must clear it."""
    model = random_model("mamba")
    fresh, engine = (Engine(TorchBackend(model, "test", VOCAB_SIZE)) for _ in range(2))
    if cached:
        engine.prefill([9] * cached)

    def fail(*_: Any) -> None:
        raise MemoryError("no room")

    hook = model.backbone.layers[1].register_forward_pre_hook(fail)
    with pytest.raises(MemoryError):
        engine.prefill([3, 2, 1])
    hook.remove()
    engine.rollback(0)
    assert np.array_equal(engine.prefill([1, 2, 3]).numpy(), fresh.prefill([1, 2, 3]).numpy())


class ReaderGoneError(Exception):
    """Whoever read the text has gone away."""


@pytest.mark.parametrize("num_pieces", [0, 1, 5])
@pytest.mark.parametrize("architecture", ["llama", "mamba"])
def test_a_reader_that_goes_away_is_what_the_caller_hears_of(
    mamba: Path, llama: Path, architecture: str, num_pieces: int
) -> None:
    """As when stdout is closed by `| head -1`. The cleaning up must not hide it, and the next request is served."""
    runtime, _ = load_noting(mamba if architecture == "mamba" else llama, "ar", dtype="bfloat16")
    expected = serve(runtime, FIRST).token_ids
    pieces: list[str] = []

    def read(text: str) -> None:
        if len(pieces) == num_pieces:
            raise ReaderGoneError
        pieces.append(text)

    request = Request(runtime.codec.encode(FIRST), SamplingParams(max_new_tokens=MAX_NEW_TOKENS))
    with pytest.raises(ReaderGoneError):
        runtime.run(request, read)
    assert serve(runtime, FIRST).token_ids == expected


# Caches


@pytest.fixture(scope="module")
def minimax(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its linear attention keeps its states in a cache class of its own."""
    config = MiniMaxConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_local_experts=2,
    )
    return save_checkpoint(tmp_path_factory.mktemp("minimax"), AutoModelForCausalLM.from_config(config))


@pytest.mark.parametrize("role", ["target", "draft"])
def test_a_model_that_refuses_our_cache_is_refused_when_it_is_loaded(minimax: Path, llama: Path, role: str) -> None:
    """And not with the same error for every prompt."""
    target, draft = (minimax, llama) if role == "target" else (llama, minimax)
    with pytest.raises(ModelError, match=f"cannot run {minimax}: .*cache of its own") as caught:
        load_noting(target, "spec-2", draft)
    assert "another model" in caught.value.hint


@pytest.mark.parametrize("architecture", CONFIGS)
def test_a_model_that_was_just_loaded_has_an_empty_cache(architecture: str, tmp_path: Path) -> None:
    """It has made its first passes by then."""
    model = random_model(architecture)
    files = ModelFiles("test", save_checkpoint(tmp_path, model))
    backend = load_backend(files, "cpu", "float32", VOCAB_SIZE)
    assert backend.cache.length == 0
    with torch.inference_mode():
        expected = model(input_ids=torch.tensor([[3, 2, 1]])).logits[0, -1:].numpy()
    np.testing.assert_allclose(backend.forward([3, 2, 1], num_logits=1).numpy(), expected, atol=1e-3, rtol=0)


# Vocabularies


def loudly_padded(directory: Path, num_rows: int) -> Path:
    """A GPT-2 whose rows beyond the tokenizer's have by far the largest logits, always.

    Coordinate 0 of the last state is 1 whatever the input; the real rows ignore it, the padding rows hold 1000 there.
    """
    model = random_model("gpt2", num_rows=num_rows)
    with torch.no_grad():
        model.transformer.ln_f.weight[0], model.transformer.ln_f.bias[0] = 0.0, 1.0
        model.transformer.wte.weight[:, 0] = 0.0
        model.transformer.wte.weight[VOCAB_SIZE:] = 0.0
        model.transformer.wte.weight[VOCAB_SIZE:, 0] = 1000.0
    return save_checkpoint(directory, model)


def test_the_padded_model_of_these_tests_would_emit_padding_if_it_could(tmp_path: Path) -> None:
    assert min(generate_ids(loudly_padded(tmp_path, VOCAB_SIZE + 1), FIRST)) >= VOCAB_SIZE


def generate_ids(checkpoint: Path, prompt: str) -> list[int]:
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    ids = torch.tensor([byte_tokenizer()(prompt).input_ids])
    return [int(token) for token in model.generate(ids, do_sample=False, max_new_tokens=8)[0, ids.shape[1] :]]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(("target_rows", "draft_rows"), [(384, 384), (384, 352), (352, 384), (384, 320), (320, 384)])
def test_padding_ids_are_never_emitted_however_target_and_draft_are_padded(
    tmp_path: Path, target_rows: int, draft_rows: int, temperature: float
) -> None:
    target = loudly_padded(tmp_path / "target", target_rows)
    draft = loudly_padded(tmp_path / "draft", draft_rows)
    plain = load(target, "ar")
    paired = load(target, "joint-4", draft)
    for _ in range(2):
        completion = serve(paired, FIRST, temperature=temperature, seed=1)
        assert max(completion.token_ids) < VOCAB_SIZE
        assert completion.num_draft_tokens > 0
        assert completion.num_accepted_tokens > 0
        if temperature == 0:
            assert completion.token_ids == serve(plain, FIRST).token_ids
    assert max(serve(plain, FIRST, temperature=temperature, seed=1).token_ids) < VOCAB_SIZE


@pytest.mark.parametrize("architecture", CONFIGS)
def test_padding_changes_no_token(architecture: str, tmp_path: Path) -> None:
    unpadded = build_checkpoint(tmp_path / "unpadded", architecture)
    padded = build_checkpoint(tmp_path / "padded", architecture, num_rows=VOCAB_SIZE + 64)
    (wide, _), (narrow, _) = (load_noting(checkpoint, "ar") for checkpoint in (padded, unpadded))
    assert serve(wide, FIRST).token_ids == serve(narrow, FIRST).token_ids


def test_a_draft_with_another_tokenizer_is_refused(tmp_path: Path, llama: Path) -> None:
    draft = save_checkpoint(tmp_path, random_model("llama"), byte_tokenizer(300))
    with pytest.raises(UsageError, match="different tokenizers") as caught:
        load(llama, "spec-2", draft)
    assert "--draft none" in caught.value.hint


def test_a_draft_whose_tokens_are_the_same_in_another_order_is_refused(tmp_path: Path, llama: Path) -> None:
    """Equal sizes prove nothing."""
    draft = build_checkpoint(tmp_path, "llama")
    path = draft / "tokenizer.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    vocab = content["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    path.write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(UsageError, match="different tokenizers"):
        load(llama, "spec-2", draft)


# Packed weights


def conv1d(num_in: int, num_out: int) -> nn.Module:
    layer: nn.Module = Conv1D(num_out, num_in)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.2)
    return layer


LINEARS: dict[str, Callable[[int, int], nn.Module]] = {
    "linear": lambda num_in, num_out: nn.Linear(num_in, num_out),
    "linear without bias": lambda num_in, num_out: nn.Linear(num_in, num_out, bias=False),
    "conv1d": conv1d,
}


@needs_packing
@pytest.mark.parametrize("kind", LINEARS)
@pytest.mark.parametrize("shape", [(1, 1), (48, 64), (64, 48), (100, 7), (7, 321)])
@pytest.mark.parametrize("rows", [(1, 1), (1, 4), (1, 5), (1, 9), (1, 300), (3,), (2, 3, 4)])
def test_a_packed_layer_computes_what_the_plain_one_does(
    kind: str, shape: tuple[int, int], rows: tuple[int, ...]
) -> None:
    with torch.random.fork_rng(devices=[]), torch.inference_mode():
        torch.manual_seed(0)
        model = nn.ModuleDict({"layer": LINEARS[kind](*shape)}).eval()
        states = torch.randn(*rows, shape[0])
        expected = model["layer"](states)
        packed.pack_linears(model)
        found = model["layer"](states)
    assert isinstance(model["layer"], packed.PackedLinear)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


@needs_packing
@pytest.mark.parametrize("architecture", REVERSIBLE)
def test_a_packed_model_computes_what_the_plain_one_does(architecture: str) -> None:
    plain, model = random_model(architecture), random_model(architecture)
    ids = torch.tensor([byte_tokenizer()(FIRST).input_ids])
    packed.pack_linears(model)
    with torch.inference_mode():
        torch.testing.assert_close(model(input_ids=ids).logits, plain(input_ids=ids).logits, atol=1e-4, rtol=0)


@needs_packing
@pytest.mark.parametrize("architecture", REVERSIBLE)
def test_a_packed_model_holds_no_second_copy_of_its_layers(architecture: str) -> None:
    """Only embeddings remain as matrices, and a matrix shared with an embedding stays that embedding's."""
    model = random_model(architecture)
    embeddings = [module.weight.numel() for module in model.modules() if isinstance(module, nn.Embedding)]
    packed.pack_linears(model)
    assert not [module for module in model.modules() if isinstance(module, (nn.Linear, Conv1D))]
    assert any(isinstance(module, packed.PackedLinear) for module in model.modules())
    matrices = [weight.numel() for weight in model.parameters() if weight.dim() == 2 and min(weight.shape) > 8]
    assert sorted(matrices) == sorted(embeddings)


@needs_packing
def test_what_the_loader_gives_is_packed_in_float32_only(llama: Path) -> None:
    files = ModelFiles("test", llama)
    kinds = {
        dtype: {type(module) for module in load_backend(files, "cpu", dtype, VOCAB_SIZE)._model.modules()}
        for dtype in ("float32", "bfloat16")
    }
    assert packed.PackedLinear in kinds["float32"]
    assert nn.Linear not in kinds["float32"]
    assert packed.PackedLinear not in kinds["bfloat16"]


@needs_packing
@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="only Linux tells what is mapped")
@pytest.mark.parametrize("architecture", REVERSIBLE)
def test_of_the_checkpoint_file_a_packed_model_holds_on_to_embeddings_only(architecture: str, tmp_path: Path) -> None:
    """Each of them is a map of its own. One more, held by a bias, would keep all weights in memory a second time."""
    files = ModelFiles("test", build_checkpoint(tmp_path, architecture))
    backend = load_backend(files, "cpu", "float32", VOCAB_SIZE)
    gc.collect()
    maps = [line for line in Path("/proc/self/maps").read_text().splitlines() if str(tmp_path) in line]
    embeddings = [module for module in backend._model.modules() if isinstance(module, nn.Embedding)]
    assert len(maps) <= len(embeddings)


@needs_packing
def test_a_model_that_reads_a_packed_layers_weights_itself_runs_unpacked(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = serve(load_noting(llama, "ar")[0], FIRST).token_ids
    forward = LlamaMLP.forward
    monkeypatch.setattr(LlamaMLP, "forward", lambda self, x: forward(self, x.to(self.up_proj.weight.dtype)))
    assert serve(load_noting(llama, "ar")[0], FIRST).token_ids == expected
