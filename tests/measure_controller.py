"""What the README quotes of the controller, not a test: `python -m tests.measure_controller --target tiny`.

Calibrates the pair unless --profile names what was measured before, then runs held-out requests with every action:
prompts of 32 to 1,000 tokens of real text, 16 to 96 new tokens, a third of them each without a stored prefix, with a
part of the prompt stored, and with all of it. Prints a JSON object.
"""

import argparse
import json
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

from rakvctl.core.loading import RuntimeOptions, load_pair
from rakvctl.core.pair import ModelPair
from rakvctl.core.profile_file import read_profile, refuse_foreign
from rakvctl.core.text import TextCodec
from rakvctl.measure.arms import Task
from rakvctl.measure.calibrate import calibrate
from rakvctl.measure.controller import ControllerStudy, summarize
from rakvctl.measure.timing import Effort
from tests.workloads import real_prompts

HITS = ("none", "partial", "exact")


def cases(codec: TextCodec, num_cases: int, seed: int) -> Iterator[Task]:
    """Prompts cut from real texts one after another, so that most lengths mix several of them."""
    rng = random.Random(seed)
    prompts = list(real_prompts())
    for number in range(num_cases):
        length = round(32 * (1000 / 32) ** rng.random())
        ids: list[int] = []
        while len(ids) < length:
            ids += codec.encode(rng.choice(prompts))
        prompt = tuple(ids[:length])
        hit = HITS[number % len(HITS)]
        shared = rng.randint(17, length)
        stored = {"none": None, "partial": prompt[:shared], "exact": prompt}[hit]
        yield Task(prompt, rng.randint(16, 96), stored)


def endless(pair: ModelPair) -> ModelPair:
    """The same pair with no end tokens: every request makes all its tokens."""
    return replace(pair, codec=type(pair.codec)(pair.codec.tokenizer, frozenset()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="tiny")
    parser.add_argument("--profile", type=Path)
    parser.add_argument("--cases", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--budget", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    pair = load_pair(RuntimeOptions(target=arguments.target), print)
    if arguments.profile:
        profile = read_profile(arguments.profile)
        refuse_foreign(profile, pair.fingerprint(), str(arguments.profile))
    else:
        profile = calibrate(pair, Effort(budget_s=arguments.budget), time.perf_counter, lambda *_: None).profile
    study = ControllerStudy(
        endless(pair), profile, repeats=arguments.repeats, seed=arguments.seed, clock=time.perf_counter
    )
    trials = []
    for trial in study.run(list(cases(pair.codec, arguments.cases, arguments.seed))):
        trials.append(trial)
        print(len(trials), trial.decision.action, trial.best, f"{trial.regret:.3f}", file=sys.stderr, flush=True)
    record = asdict(summarize(trials)) | {
        "profile": asdict(profile),
        "trials": [
            {
                "prompt_tokens": len(trial.case.prompt),
                "max_new_tokens": trial.case.max_new_tokens,
                "stored_tokens": len(trial.case.stored or ()),
                "alpha": trial.decision.alpha,
                "chosen": str(trial.decision.action),
                "actual_ms": {str(action): ms for action, ms in trial.actual_ms.items()},
                "predicted_ms": {str(action): ms for action, ms in trial.predicted_ms.items()},
            }
            for trial in trials
        ],
    }
    print(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
