"""`--kv-dir` and `rakvctl kv`: a shell one-liner finds what an earlier one stored, and people can look at it."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from rakvctl.core.backends.torch_load import load_backend
from rakvctl.core.disk import places, shelf
from rakvctl.core.disk.entry_file import read_entry, write_entry
from rakvctl.core.engine import Engine
from rakvctl.core.models import ModelFiles
from rakvctl.core.types import PrefixEntry
from tests.checkpoints import VOCAB_SIZE, build_checkpoint
from tests.program import Call, assert_error

PROMPT = "The quick brown fox jumps over the lazy dog, and the dog does not mind."


def generated(run: Call, target: Path, *arguments: "str | Path") -> dict[str, object]:
    finished = run("generate", PROMPT, "-m", target, "-d", "none", "-n", "24", "-o", "jsonl", *arguments)
    assert finished.code == 0, finished.err
    record: dict[str, object] = json.loads(finished.out)
    return record


@pytest.mark.parametrize("policy", ["kv", "auto"])
def test_the_next_process_reuses_the_prompt(run: Call, tiny_checkpoint: Path, tmp_path: Path, policy: str) -> None:
    arguments = ("--policy", policy, "--kv-dir", tmp_path / "kv")
    first = generated(run, tiny_checkpoint / "target", *arguments)
    again = generated(run, tiny_checkpoint / "target", *arguments)
    plain = generated(run, tiny_checkpoint / "target", "--policy", "ar")
    assert first["reused_tokens"] == 0
    assert again["reused_tokens"] == again["prompt_tokens"]
    assert first["text"] == again["text"] == plain["text"]


def test_auto_looks_up_what_an_earlier_process_answered(run: Call, tiny_checkpoint: Path, tmp_path: Path) -> None:
    arguments = ("--kv-dir", tmp_path / "kv")
    first, again = (generated(run, tiny_checkpoint / "target", *arguments) for _ in range(2))
    assert again["text"] == first["text"]
    # The profile is measured here: on a busy machine it may price a wide pass dear, and `auto` then drafts less.
    assert again["num_accepted_tokens"] >= 12  # type: ignore[operator]
    assert again["num_accepted_tokens"] > first["num_accepted_tokens"]  # type: ignore[operator]


def test_other_weights_in_the_same_place_are_another_model(run: Call, tiny_checkpoint: Path, tmp_path: Path) -> None:
    """lmdeploy#4917: the key holds what the files say, not what they are called."""
    shutil.copytree(tiny_checkpoint / "target", tmp_path / "model")
    shutil.copytree(tiny_checkpoint / "target", tmp_path / "copy")
    arguments = ("--policy", "kv", "--kv-dir", tmp_path / "kv")
    generated(run, tmp_path / "model", *arguments)
    assert generated(run, tmp_path / "copy", *arguments)["reused_tokens"] != 0, "the same bytes are the same model"
    weights = tmp_path / "model" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-400] ^= 0x40
    weights.write_bytes(content)
    assert generated(run, tmp_path / "model", *arguments)["reused_tokens"] == 0


def test_statistics_say_where_a_prefix_was_found(run: Call, tiny_checkpoint: Path, tmp_path: Path) -> None:
    command = ("generate", PROMPT, "-m", tiny_checkpoint / "target", "-d", "none", "--policy", "kv", "-n", "2")
    run(*command, "--kv-dir", tmp_path / "kv")
    finished = run(*command, "--kv-dir", tmp_path / "kv", "--stats")
    (line,) = [line for line in finished.err.splitlines() if "found in" in line]
    assert "1 hit" in line
    assert "cloned" in line


def test_explain_sees_what_is_stored(run: Call, tiny_checkpoint: Path, tmp_path: Path) -> None:
    target = tiny_checkpoint / "target"
    generated(run, target, "--kv-dir", tmp_path / "kv")
    finished = run("explain", PROMPT, "-m", target, "-d", "none", "--kv-dir", tmp_path / "kv", "--json")
    features = json.loads(finished.out)["features"]
    assert features["num_cloned_tokens"] == features["num_prompt_tokens"]
    assert features["source"] != "memory"


def test_calibrate_measures_what_reading_takes(run: Call, tiny_checkpoint: Path, tmp_path: Path) -> None:
    command = ("calibrate", "-m", tiny_checkpoint / "target", "--repeats", "1", "--budget", "2", "--json")
    target = json.loads(run(*command).out)["profile"]["target"]
    assert (target["load"], target["load_cold"]) == (None, None)
    target = json.loads(run(*command, "--kv-dir", tmp_path / "kv").out)["profile"]["target"]
    assert target["load"]["sizes_tokens"] == target["load_cold"]["sizes_tokens"] == target["prefill"]["sizes_tokens"]
    assert {path.name for path in (tmp_path / "kv").iterdir()} >= {shelf.ENTRIES_NAME}
    assert not list((tmp_path / "kv").glob(".measuring*"))


def test_the_directory_can_be_looked_at_and_cleared(run: Call, tiny_checkpoint: Path, tmp_path: Path) -> None:
    directory = tmp_path / "kv"
    assert_error(run("kv", "ls"), 2, "no directory")
    assert_error(run("kv", "ls", "--kv-dir", directory), 2, "is no directory")
    record = generated(run, tiny_checkpoint / "target", "--policy", "kv", "--kv-dir", directory)
    (entry,) = json.loads(run("kv", "ls", "--kv-dir", directory, "--json").out)["entries"]
    assert entry["tokens"] == record["prompt_tokens"]
    assert entry["key"] in run("kv", "ls", "--kv-dir", directory).out
    stats = json.loads(run("kv", "stats", "--kv-dir", directory, "--json").out)
    assert (stats["entries"], stats["texts"]) == (1, 0)
    assert run("kv", "stats", "--kv-dir", directory).out.startswith("1 entry, ")
    assert run("kv", "verify", "--kv-dir", directory).out == "1 entry as written\n"
    (path,) = (directory / shelf.ENTRIES_NAME).iterdir()
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    damaged = run("kv", "verify", "--kv-dir", directory)
    assert (damaged.code, damaged.out) == (1, "0 entries as written\n")
    assert "is damaged" in damaged.err
    generated(run, tiny_checkpoint / "target", "--policy", "kv", "--kv-dir", directory)
    assert run("kv", "clear", "--kv-dir", directory).out == "1 entry cleared\n"
    assert json.loads(run("kv", "ls", "--kv-dir", directory, "--json").out) == {"entries": []}
    assert list((directory / shelf.ENTRIES_NAME).iterdir()) == []


def test_a_directory_that_others_may_write_to_is_an_error(run: Call, tiny_checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    finished = run(
        "generate", PROMPT, "-m", tiny_checkpoint / "target", "--policy", "kv", "--kv-dir", tmp_path / "open"
    )
    assert_error(finished, 1, "others may write")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma3"])
def test_states_come_back_bit_by_bit(name: str, dtype: str, tmp_path: Path) -> None:
    files = ModelFiles("test", build_checkpoint(tmp_path / "model", name))
    engine = Engine(load_backend(files, "cpu", dtype, VOCAB_SIZE))
    prompt = tuple(index * 7 % VOCAB_SIZE for index in range(300))
    logits = engine.prefill(prompt).numpy()[-1]
    states = engine.snapshot(300)
    path = tmp_path / "entry.safetensors"
    path.touch(mode=0o600)
    write_entry(path, PrefixEntry("key", np.asarray(prompt), states, logits.copy()))
    entry = read_entry(path, 2**30)
    for num_tokens in (1, 128, 200, 300):
        engine.restore(entry.kv, num_tokens)
        again = engine.snapshot(num_tokens)
        for start in range(0, num_tokens, 128):
            end = min(start + 128, num_tokens)
            for stored, kept in zip(again.arrays(start, end), states.arrays(start, end), strict=True):
                assert np.array_equal(stored.view(np.uint8), np.ascontiguousarray(kept).view(np.uint8))


@pytest.mark.parametrize("action", ["ls", "stats", "verify", "clear"])
def test_a_directory_that_cannot_be_used_is_an_error(run: Call, tmp_path: Path, action: str) -> None:
    places.claim_directory(tmp_path / "kv")
    (tmp_path / "kv" / shelf.INDEX_NAME).mkdir()
    assert_error(run("kv", action, "--kv-dir", tmp_path / "kv"), 1, "stored prefixes in")


@pytest.mark.parametrize("action", ["ls", "stats", "verify", "clear"])
def test_a_directory_of_other_files_is_refused_and_left_as_it_is(run: Call, tmp_path: Path, action: str) -> None:
    (tmp_path / "entries").mkdir()
    for name in ("entries/mine.safetensors", "entries/0123456789abcdef01234567.safetensors", shelf.INDEX_NAME):
        (tmp_path / name).write_text("mine")
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    assert_error(run("kv", action, "--kv-dir", tmp_path), 2, "no prefix cache")
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


@pytest.mark.parametrize("action", ["ls", "stats", "verify", "clear"])
def test_nothing_is_made_in_an_empty_directory_that_is_looked_at(run: Call, tmp_path: Path, action: str) -> None:
    assert run("kv", action, "--kv-dir", tmp_path).code == 0
    assert list(tmp_path.iterdir()) == []


def test_a_seed_repeats_its_text_whatever_is_stored(run: Call, tiny_checkpoint: Path, tmp_path: Path) -> None:
    arguments = ("--kv-dir", tmp_path / "kv", "--temperature", "1", "--seed", "5")
    texts = {str(generated(run, tiny_checkpoint / "target", *arguments)["text"]) for _ in range(3)}
    assert len(texts) == 1


def test_explain_makes_no_directory(run: Call, tiny_checkpoint: Path, tmp_path: Path) -> None:
    finished = run("explain", PROMPT, "-m", tiny_checkpoint / "target", "-d", "none", "--kv-dir", tmp_path / "none")
    assert finished.code == 0
    assert not (tmp_path / "none").exists()
