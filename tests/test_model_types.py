"""Many model types of transformers: `ar` gives the tokens of `generate`, and every policy those of `ar`."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from rakvctl.core.errors import ModelError
from rakvctl.core.loading import RuntimeOptions, load_pair, make_runtime
from rakvctl.core.pair import ModelPair
from rakvctl.core.types import Request, SamplingParams
from tests.architectures import CAUSAL, REFUSED, UNSTABLE, WITHOUT_ROLLBACK, tiny_model
from tests.checkpoints import byte_tokenizer, save_checkpoint
from tests.profiles import toy_profile

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

NUM_TOKENS = 16
# They repeat themselves, so that looking up proposes tokens, and share more than `BUCKET_TOKENS` first tokens.
FIRST = "The quick brown fox jumps over the lazy dog, and the quick brown fox jumps over"
RELATED = "The quick brown fox jumps over the lazy dog, but the quick brown fox"
# Each with its drafter. Without a draft model `rakv` chooses whether to reuse.
POLICIES = {"ar": "none", "kv": "none", "spec-2": "lookup", "joint-4": "lookup", "auto": "lookup", "rakv": "none"}
# Passes of other widths add up in other orders; what is closer than that is no fault.
_NEAR_TIE = 1e-4


def options_of(checkpoint: Path, policy: str) -> RuntimeOptions:
    drafter = POLICIES[policy]
    return RuntimeOptions(str(checkpoint), draft="none", device="cpu", dtype="float32", policy=policy, drafter=drafter)


def generate(checkpoint: Path, prompt: tuple[int, ...]) -> tuple[int, ...]:
    """What transformers' own `generate` adds to the prompt; the model is as transformers loads it."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    ids = torch.tensor([prompt])
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=NUM_TOKENS,
        output_logits=True,
        return_dict_in_generate=True,
    )
    best = torch.cat(output.logits).topk(2).values
    assert (best[:, 0] - best[:, 1]).min() > _NEAR_TIE, "a near tie: give the type another seed"
    return tuple(output.sequences[0, len(prompt) :].tolist())


def check(pair: ModelPair, checkpoint: Path, policy: str, expected: dict[tuple[int, ...], tuple[int, ...]]) -> int:
    """Serve a prompt cold, warm, and a related one, each with the tokens expected; how many tokens were drafted."""
    runtime = make_runtime(pair, options_of(checkpoint, policy), toy_profile(with_draft=False))
    first, related = expected
    num_drafted = 0
    for prompt in (first, first, related):
        completion = runtime.run(Request(prompt, SamplingParams(max_new_tokens=NUM_TOKENS)))
        assert completion.token_ids == expected[prompt], policy
        num_drafted += completion.num_draft_tokens
    # The last prompt is found in part, where the policy and the model reuse at all.
    reuses = policy in ("kv", "joint-4") and pair.target.has_stable_prefixes(len(first) + NUM_TOKENS)
    assert (completion.num_reused_tokens > 0) == reuses or policy in ("auto", "rakv")
    return num_drafted


@pytest.mark.parametrize("name", [name for name in CAUSAL if name not in REFUSED])
def test_every_policy_gives_the_tokens_of_generate(name: str, tmp_path: Path) -> None:
    checkpoint = save_checkpoint(tmp_path, tiny_model(name))
    prompts = [tuple(byte_tokenizer()(text).input_ids) for text in (FIRST, RELATED)]
    expected = {prompt: generate(checkpoint, prompt) for prompt in prompts}
    assert any(len(set(tokens)) > 1 for tokens in expected.values()), "its texts say the same token over and over"
    notes: list[str] = []
    pair = load_pair(replace(options_of(checkpoint, "auto")), notes.append)
    assert pair.target.can_rollback == (name not in WITHOUT_ROLLBACK)
    assert (pair.target.prefix_stable_positions is not None) == (name in UNSTABLE)
    assert len(notes) == (name in (*WITHOUT_ROLLBACK, *UNSTABLE))
    drafted = {policy: check(pair, checkpoint, policy, expected) for policy in POLICIES}
    assert drafted["ar"] == drafted["kv"] == drafted["rakv"] == 0
    if name not in UNSTABLE:  # of whose texts some are short enough to draft
        assert (sum(drafted.values()) > 0) == (name not in WITHOUT_ROLLBACK)


@pytest.mark.parametrize("name", REFUSED)
def test_a_type_that_cannot_run_here_is_refused_when_it_is_loaded(name: str, tmp_path: Path) -> None:
    checkpoint = save_checkpoint(tmp_path, tiny_model(name))
    with pytest.raises(ModelError, match=REFUSED[name]) as caught:
        load_pair(options_of(checkpoint, "ar"), lambda _: None)
    assert "model" in caught.value.hint
