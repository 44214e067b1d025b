"""What the README quotes, not tests: `python -m tests.measure_generate speed|pair|repeat|memory|start`.

speed: `ar` against transformers' `generate(do_sample=False)`, same weights, dtype and threads, in turn.
pair: on `tiny`, steps of target and draft, and the policies.
repeat: time to first token of a 1,000-token prompt, cold and as an exact repeat, in turn.
memory: peak resident memory of whole processes.
start: from imported torch and transformers to the first token on `tiny`, in processes of their own.
Prints a JSON object with medians and quartiles, the raw samples and the machine.
"""

import argparse
import json
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM

from rakvctl.core.backends.torch_load import load_backend
from rakvctl.core.backends.torch_loader import load_codec
from rakvctl.core.engine import Engine
from rakvctl.core.models import find_model
from rakvctl.core.types import Request, SamplingParams
from tests.serving import Pair
from tests.workloads import real_prompts

MIB = 2**20


def spread(samples: list[float]) -> dict[str, Any]:
    """Median, quartiles and the samples themselves."""
    low, _, high = statistics.quantiles(samples, n=4)
    return {
        "median": statistics.median(samples),
        "quartiles": [low, high],
        "samples": [round(sample, 4) for sample in samples],
    }


def load(name: str) -> Pair:
    """The target alone; plain decoding drafts nothing."""
    files = find_model(name, "target", print)
    codec = load_codec(files)
    backend = load_backend(files, "cpu", "float32", codec.vocab_size)
    return Pair(codec, backend, backend)


def seconds(call: Callable[[], Any]) -> tuple[float, Any]:
    """Wall-clock time of a call, and what it returns."""
    started = time.perf_counter()
    result = call()
    return time.perf_counter() - started, result


def measure_speed(name: str, num_prompts: int, num_tokens: int) -> dict[str, Any]:
    """Tokens a second of both arms on each prompt, the order swapped from prompt to prompt."""
    pair = load(name)
    peer = AutoModelForCausalLM.from_pretrained(find_model(name, "target", print).location, dtype=torch.float32).eval()
    # Both arms make exactly `num_tokens`: nothing ends a sequence early.
    pair = Pair(type(pair.codec)(pair.codec.tokenizer, frozenset()), pair.target, pair.draft)
    peer.generation_config.eos_token_id = None
    runtime = pair.runtime("ar")
    encoded = (pair.codec.encode(prompt) for prompt in real_prompts())
    prompts = [ids for ids in encoded if len(ids) < 1200][: num_prompts + 1]

    def ours(ids: tuple[int, ...]) -> list[int]:
        return list(runtime.run(Request(ids, SamplingParams(max_new_tokens=num_tokens))).token_ids)

    def theirs(ids: tuple[int, ...]) -> list[int]:
        output = peer.generate(
            torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.int64),
            max_new_tokens=num_tokens, do_sample=False, pad_token_id=0,
        )  # fmt: skip
        tokens: list[int] = output[0, len(ids) :].tolist()
        return tokens

    rates: dict[str, list[float]] = {"ar": [], "generate": []}
    num_equal = 0
    for index, ids in enumerate(prompts):
        arms = [("ar", ours), ("generate", theirs)]
        outputs = {}
        for arm, call in arms if index % 2 else arms[::-1]:
            took, outputs[arm] = seconds(lambda call=call, ids=ids: call(ids))
            if index > 0:  # the first prompt warms up
                rates[arm].append(len(outputs[arm]) / took)
        num_equal += index > 0 and outputs["ar"] == outputs["generate"]
    ratios = [a / b for a, b in zip(rates["ar"], rates["generate"], strict=True)]
    return {
        "tokens_per_s": {arm: spread(samples) for arm, samples in rates.items()},
        "ratio": spread(ratios),
        "equal_outputs": f"{num_equal} of {num_prompts}",
    }


def measure_pair(num_prompts: int, num_tokens: int) -> dict[str, Any]:
    """On `tiny`: one-token steps of target and draft in turn, and tokens a second of the policies in turn."""
    target, draft = (find_model("tiny", role, print) for role in ("target", "draft"))
    codec = load_codec(target)
    pair = Pair(codec, *(load_backend(files, "cpu", "float32", codec.vocab_size) for files in (target, draft)))
    engines = {"target": Engine(pair.target), "draft": Engine(pair.draft)}
    for engine in engines.values():
        engine.prefill(range(1, 257))
    steps: dict[str, list[float]] = {"target": [], "draft": []}
    for _ in range(300):
        for name, engine in engines.items():
            steps[name].append(seconds(lambda engine=engine: engine.step(5).argmax())[0] * 1e3)
            engine.rollback(256)
    rates: dict[str, list[float]] = {"ar": [], "spec-2": [], "spec-4": [], "spec-8": []}
    prompts = [ids for ids in map(codec.encode, real_prompts()) if len(ids) < 1200][:num_prompts]
    sampling = SamplingParams(max_new_tokens=num_tokens)
    num_drafted = num_accepted = 0
    for ids in prompts:
        for policy in random.sample(list(rates), len(rates)):
            completion = pair.runtime(policy).run(Request(ids, sampling))
            rates[policy].append(len(completion.token_ids) / completion.total_ms * 1e3)
            if policy == "spec-4":
                num_drafted += completion.num_draft_tokens
                num_accepted += completion.num_accepted_tokens
    return {
        "step_ms": {name: spread(samples) for name, samples in steps.items()},
        "step_ratio": statistics.median(steps["draft"]) / statistics.median(steps["target"]),
        "tokens_per_s": {policy: spread(samples) for policy, samples in rates.items()},
        "spec_4_acceptance_rate": num_accepted / num_drafted,
    }


def measure_repeat(name: str, num_repeats: int) -> dict[str, Any]:
    """Time to first token, ms, of prompts of 1,000 tokens: cold, then at once again."""
    pair = load(name)
    ids = [token for prompt in real_prompts() for token in pair.codec.encode(prompt)]
    runtime = pair.runtime("kv")
    cold, warm = [], []
    for index in range(num_repeats + 1):
        request = Request(tuple(ids[index * 1000 : index * 1000 + 1000]), SamplingParams(max_new_tokens=4))
        first, again = runtime.run(request), runtime.run(request)
        assert again.token_ids == first.token_ids
        if index > 0:
            cold.append(first.ttft_ms)
            warm.append(again.ttft_ms)
    ratios = [again / first for first, again in zip(cold, warm, strict=True)]
    return {"cold_ttft_ms": spread(cold), "repeat_ttft_ms": spread(warm), "ratio": spread(ratios)}


def measure_memory(name: str) -> dict[str, float]:
    """Peak resident MiB: of the imports alone, and of `generate` with 14 different prompts that fill the store."""
    lines = [f"Story {i}: " + f"number {i} cat sat on the mat and looked at dog {i}; " * 62 for i in range(14)]
    prompts = "".join(json.dumps({"prompt": line, "max_new_tokens": 4}) + "\n" for line in lines)
    generate = [sys.executable, "-m", "rakvctl", "generate", "-m", name, "--raw"]
    return {
        "imports_mib": peak_mib([sys.executable, "-c", "import torch, transformers"], ""),
        "weights_mib": sum(p.nbytes for p in _parameters(name)) / MIB,
        "generate_with_full_store_mib": peak_mib(generate, prompts),
        "generate_one_prompt_mib": peak_mib([*generate, "--kv-budget", "0", "-n", "16"], "Once upon a time"),
    }


def _parameters(name: str) -> list[torch.Tensor]:
    location = find_model(name, "target", print).location
    return list(AutoModelForCausalLM.from_pretrained(location, dtype=torch.float32).parameters())


def peak_mib(command: list[str], stdin: str) -> float:
    """Peak resident memory of a child process, by the operating system's own account."""
    code = (
        "import resource, subprocess, sys\n"
        "subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL)\n"
        "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *command], input=stdin, text=True, capture_output=True, check=True
    )
    return int(done.stdout) * 1024 / MIB


def measure_start(num_repeats: int) -> dict[str, Any]:
    """Seconds from imported modules to the first token on `tiny`, as the command does it."""
    code = (
        "import gc, time; gc.disable(); begin = time.perf_counter()\n"
        "import torch, transformers; imported = time.perf_counter()\n"
        "{model_code}modeled = time.perf_counter()\n"
        "from rakvctl.core.loading import RuntimeOptions\n"
        "from rakvctl.measure.ready import load_runtime\n"
        "from rakvctl.core.types import Request, SamplingParams\n"
        "runtime = load_runtime(RuntimeOptions(), lambda _: None, lambda *_: None)\n"
        "runtime.run(Request(runtime.codec.encode('def f(x):'), SamplingParams(max_new_tokens=1)))\n"
        "print(imported - begin, modeled - imported, time.perf_counter() - modeled)"
    )
    code = code.format(model_code="import transformers.models.gpt2.modeling_gpt2;")
    samples = []
    for repeat in range(num_repeats + 1):
        done = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True, check=True)
        if repeat == 0:
            continue  # which may have had to measure a profile
        samples.append([float(value) for value in done.stdout.split()])
    imports, modeling, ours = (list(column) for column in zip(*samples, strict=True))
    return {
        "import_torch_transformers_s": spread(imports),
        "import_model_code_s": spread(modeling),
        "first_token_s": spread(ours),
    }


def main() -> None:
    """Run one of the measurements."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["speed", "pair", "repeat", "memory", "start"])
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--prompts", type=int, default=12, help="prompts or repetitions (default: 12)")
    parser.add_argument("--new-tokens", type=int, default=128, help="new tokens a prompt (default: 128)")
    arguments = parser.parse_args()
    results = {
        "speed": lambda: measure_speed(arguments.target, arguments.prompts, arguments.new_tokens),
        "pair": lambda: measure_pair(arguments.prompts, arguments.new_tokens),
        "repeat": lambda: measure_repeat(arguments.target, arguments.prompts),
        "memory": lambda: measure_memory(arguments.target),
        "start": lambda: measure_start(arguments.prompts),
    }[arguments.what]()
    machine = f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    print(json.dumps({"measured": arguments.what, "machine": machine, "versions": versions, **results}, indent=1))


if __name__ == "__main__":
    main()
