"""What mostly follows a token: asked of the model itself, kept for its checkpoint, proposed where nothing matches."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from rakvctl.core.acceptance import Experience
from rakvctl.core.backends.fake import FakeBackend, FakeCosts, VirtualClock
from rakvctl.core.backends.torch_load import load_backend
from rakvctl.core.engine import Engine
from rakvctl.core.errors import RakvError
from rakvctl.core.lookup import History, LookupDrafter
from rakvctl.core.models import ModelFiles
from rakvctl.core.pair import ModelPair
from rakvctl.core.policies import make_policy
from rakvctl.core.runtime import Runtime
from rakvctl.core.store import PrefixStore
from rakvctl.core.successors import read_successors, successors_path, write_successors
from rakvctl.core.text import TextCodec
from rakvctl.core.tiers import MemoryTier
from rakvctl.core.types import Evidence, Request, SamplingParams
from rakvctl.core.verify import GreedyVerifier
from rakvctl.measure.successors import measure_successors
from tests.checkpoints import VOCAB_SIZE, build_checkpoint
from tests.profiles import AnyLetterTokenizer, toy_pair, toy_profile
from tests.program import Call

LINE_END = 10 % 32


@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen3", "gemma3", "mistral"])
def test_one_pass_says_of_each_token_what_a_text_of_two_says(name: str, tmp_path: Path) -> None:
    backend = load_backend(ModelFiles("test", build_checkpoint(tmp_path, name)), "cpu", "float32", VOCAB_SIZE)
    engine = Engine(backend)
    engine.prefill((5, 6, 7))
    tokens = [3, 200, 7, 7, 11, 319, 0]
    found = engine.likeliest_after(1, tokens)
    assert engine.length == 3
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    with torch.inference_mode():
        plain = model(input_ids=torch.tensor([[1, token] for token in tokens])).logits[:, -1, :VOCAB_SIZE]
    assert found == plain.argmax(dim=-1).tolist()


def test_a_model_without_positions_to_roll_back_is_not_asked(tmp_path: Path) -> None:
    backend = load_backend(ModelFiles("test", build_checkpoint(tmp_path, "mamba")), "cpu", "float32", VOCAB_SIZE)
    assert backend.likeliest_after(1, [2, 3]) == []


def timed_pair(token_ms: float, vocab_size: int = 3000) -> tuple[ModelPair, VirtualClock]:
    clock = VirtualClock()

    class WideTokenizer(AnyLetterTokenizer):
        def get_vocab(self) -> dict[str, int]:
            return {str(token): token for token in range(vocab_size)}

    costs = FakeCosts(pass_ms=1.0, token_ms=token_ms)
    target = Engine(FakeBackend(seed=1, vocab_size=vocab_size, clock=clock, costs=costs))
    return ModelPair(TextCodec(WideTokenizer(), frozenset()), target, "toy"), clock


def test_as_many_tokens_are_asked_for_as_there_is_time() -> None:
    pair, clock = timed_pair(token_ms=1.0)
    found = measure_successors(pair, 2.0, clock, lambda *_: None)
    assert 1000 < len(found) < 2000
    assert clock() <= 2.0
    assert list(found) == pair.target.likeliest_after(LINE_END, range(len(found)))


def test_a_slow_model_is_not_kept_at_it() -> None:
    """The first pass is a small one, and tells what the next would take."""
    pair, clock = timed_pair(token_ms=100.0)
    assert len(measure_successors(pair, 0.1, clock, lambda *_: None)) == 16
    assert clock() < 2.0


def test_asking_goes_on_where_it_ended_the_last_time() -> None:
    pair, clock = timed_pair(token_ms=1.0)
    first = measure_successors(pair, 1.0, clock, lambda *_: None)
    whole = measure_successors(replace(pair, successors=first), 100.0, clock, lambda *_: None)
    assert whole[: len(first)] == first
    assert len(whole) == 3000
    before = clock()
    assert measure_successors(replace(pair, successors=whole), 100.0, clock, lambda *_: None) == whole
    assert clock() == before


def test_what_was_found_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "directory" / "found.npy"
    assert read_successors(path, 100) == ()
    write_successors(path, [5, 99, 0])
    assert read_successors(path, 100) == (5, 99, 0)
    with pytest.raises(RakvError, match="another vocabulary"):
        read_successors(path, 99)


@pytest.mark.parametrize(
    "content",
    [
        np.array([[1, 2]], dtype=np.int32),
        np.array([1, 2], dtype=np.int64),
        np.array([1, -2], dtype=np.int32),
        np.zeros(101, dtype=np.int32),
        np.array(["a"]),
        np.array([{}], dtype=object),
        b"",
        b"nonsense",
        b"\x93NUMPY\x01\x00v\x00{'descr': '<i4', 'fortran_order': False, 'shape': (99999999999,), }",
    ],
    ids=repr,
)
def test_a_damaged_file_is_refused(content: "np.ndarray | bytes", tmp_path: Path) -> None:
    path = tmp_path / "damaged.npy"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        np.save(path, content, allow_pickle=True)
    with pytest.raises(RakvError):
        read_successors(path, 100)


def test_where_nothing_matches_what_mostly_follows_is_proposed_as_far_as_it_is_known() -> None:
    drafter = LookupDrafter(History(0), successors=(1, 3, 0, 7, 2))
    drafter.start([8, 0], None, 0)
    proposal = drafter.propose([8, 0], 8, GreedyVerifier())
    assert proposal.token_ids == (1, 3, 7)
    assert proposal.evidence == tuple(Evidence(1 + depth, "habit") for depth in range(3))
    assert drafter.propose([8, 0], 2, GreedyVerifier()).token_ids == (1, 3)
    assert drafter.propose([8, 0, 9], 8, GreedyVerifier()).token_ids == ()
    drafter.start([0, 5, 0], None, 0)
    assert drafter.propose([0, 5, 0], 8, GreedyVerifier()).token_ids[0] == 5, "what the text says goes first"


def test_auto_emits_the_same_tokens_whatever_it_takes_for_the_model_s_habits() -> None:
    request = Request(tuple(range(30)), SamplingParams(max_new_tokens=200))
    outputs, rounds = set(), []
    for successors in ((), tuple(range(32)), tuple(toy_pair(VirtualClock()).target.likeliest_after(1, range(32)))):
        clock = VirtualClock()
        pair = toy_pair(clock)
        runtime = Runtime(
            codec=pair.codec,
            target=pair.target,
            drafter=None,
            store=PrefixStore(MemoryTier(0)),
            policy=make_policy("auto", toy_profile(with_draft=False), successors),
            experience=Experience(),
            clock=clock,
        )
        completion = runtime.run(request)
        outputs.add(completion.token_ids)
        rounds.append(completion.rounds_by_draft_len)
    assert len(outputs) == 1
    assert rounds[0] != rounds[1]


def test_calibrate_keeps_what_it_finds_and_generate_uses_it(run: Call, tiny_checkpoint: Path) -> None:
    target = str(tiny_checkpoint / "target")
    finished = run("calibrate", "-m", target, "--repeats", "1", "--budget", "5", "--json")
    record = json.loads(finished.out)
    assert record["successors"] == VOCAB_SIZE
    path = successors_path(record["profile"]["fingerprint"]["target_digest"])
    assert len(read_successors(path, VOCAB_SIZE)) == VOCAB_SIZE
    generate = ("generate", "hello there", "-m", target, "-n", "24", "-o", "jsonl")
    expected = json.loads(run(*generate, "--policy", "ar").out)["text"]
    assert json.loads(run(*generate).out)["text"] == expected
    path.write_bytes(b"nonsense")
    damaged = run(*generate)
    assert (damaged.code, json.loads(damaged.out)["text"]) == (0, expected)
    assert "calibrate writes it anew" in damaged.err
    assert run("calibrate", "-m", target, "--repeats", "1", "--budget", "5").code == 0
    assert len(read_successors(path, VOCAB_SIZE)) == VOCAB_SIZE
    assert run(*generate).err == ""
