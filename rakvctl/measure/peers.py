"""What people would use otherwise: the engines themselves, plain and with their own ways to speculate."""

import re
from typing import Any

from rakvctl.core import gguf_copy
from rakvctl.core.errors import UsageError
from rakvctl.core.loaders import LLAMA_CPP, EngineChoice, choose_backend
from rakvctl.core.models import Notify, find_model
from rakvctl.core.pair import ModelPair
from rakvctl.core.seams import Clock
from rakvctl.measure.arms import Arm

# Looking up takes a number of tokens; without one, what the documentation of either library suggests.
_PEER = re.compile(r"hf-assisted|(hf-generate|llama-cpp)|(hf|llama-cpp)-prompt-lookup(-(?P<tokens>[1-9][0-9]?))?")
_LOOKUP_TOKENS = 10
_NAMES = "hf-generate, hf-prompt-lookup, hf-prompt-lookup-K, hf-assisted, llama-cpp, llama-cpp-prompt-lookup[-K]"


def default_peers(choice: EngineChoice) -> list[str]:
    """Plain decoding of the engine that runs the model."""
    return ["llama-cpp" if choose_backend(choice) == LLAMA_CPP else "hf-generate"]


def make_peers(names: list[str], pair: ModelPair, choice: EngineChoice, clock: Clock, notify: Notify) -> list[Arm]:
    """Load the peers of these names; each model once for all.

    Raises UsageError for a name that is not known, and where a draft model is needed and there is none.
    """
    unknown = [name for name in names if not _PEER.fullmatch(name)]
    if unknown:
        raise UsageError(f"there is no peer {unknown[0]}", f"choose from {_NAMES}")
    if "hf-assisted" in names and not pair.draft_name:
        raise UsageError("hf-assisted needs a draft model", "name one with --draft, or leave hf-assisted out")
    arms: dict[str, Arm] = {}
    told: dict[str, dict[str, Any]] = {name: _told(name) for name in names if name.startswith("hf-")}
    if told:
        from rakvctl.measure.hf_peers import load_hf_arms

        target = find_model(choice.target, "target", notify)
        draft = find_model(pair.draft_name, "draft", notify) if "hf-assisted" in names else None
        arms |= {arm.name: arm for arm in load_hf_arms(told, pair, target, draft, choice.device, clock)}
    for name in names:
        if name not in told:
            from rakvctl.measure.llama_peers import LlamaArm

            path, ends = gguf_copy.find(choice.target), pair.codec.end_token_ids
            arms[name] = LlamaArm(name, path, _lookup_tokens(name), ends, pair.target.info.num_threads, clock)
    return [arms[name] for name in names]


def _lookup_tokens(name: str) -> int:
    """How many tokens a peer looks up; 0 for none."""
    match = _PEER.fullmatch(name)
    return int((match and match["tokens"]) or _LOOKUP_TOKENS) if "prompt-lookup" in name else 0


def _told(name: str) -> dict[str, Any]:
    """What transformers' `generate` is told beside the prompt."""
    num_tokens = _lookup_tokens(name)
    return {"prompt_lookup_num_tokens": num_tokens} if num_tokens else {}
