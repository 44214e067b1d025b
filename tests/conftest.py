"""What tests share: a pair of small random models in a directory."""

import io
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.program import own_settings, run

# Workers of pytest-xdist share the cores: more threads than that wait for each other. Set before torch is imported.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

__all__ = ["own_settings", "run"]

# How long an example takes says more of what else the machine does than of the code.
settings.register_profile("rakvctl", deadline=None)
settings.load_profile("rakvctl")


@pytest.fixture(autouse=True)
def no_profile_of_the_users(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """What tests measure is kept for this run only."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path_factory.getbasetemp() / "data"))


@pytest.fixture(autouse=True)
def interruptible_tests() -> Iterator[None]:
    """The program changes what Ctrl-C does in its process, which here is that of the tests."""
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Threads cost more than they bring for models as small as those of tests."""
    # Here and not above: tests of what needs no torch run without importing it.
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def nothing_on_stdin(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt argument takes in what is on stdin, and pytest's own refuses to be read."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with `target` and `draft`: random GPT-2s of 256 positions, both with one byte-level tokenizer.

    Greedy completions of them are always cut by their length: the end token, id 0, scores 0 everywhere, which is never
    the best of all tokens.
    """
    # Here and not above: tests of what needs no torch run without importing it.
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    from tests.checkpoints import byte_tokenizer, save_checkpoint

    tokenizer = byte_tokenizer()
    directory = tmp_path_factory.mktemp("tiny")
    for role, num_layers in (("target", 2), ("draft", 1)):
        config = GPT2Config(
            vocab_size=len(tokenizer),
            n_positions=256,
            n_embd=32,
            n_layer=num_layers,
            n_head=2,
            bos_token_id=0,
            eos_token_id=0,
            initializer_range=0.2,
        )
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(num_layers)
            model = GPT2LMHeadModel(config)
            model.transformer.wte.weight[0] = 0.0
        save_checkpoint(directory / role, model, tokenizer)
    return directory
