"""Very many short prompts through Ray, on toy models: `python -m tests.measure_stream [COUNT]`.

Everything between a prompt file and the file of records is the program's own; only the models are toys. Prints how
much memory this process, the driver, has as the prompts stream through.
"""

import os
import random
import sys
import time
from collections.abc import Iterator
from functools import partial

import psutil

from rakvctl.cli.render import JsonlWriter
from rakvctl.cli.stats import Totals
from rakvctl.core.models import Notify
from rakvctl.core.runtime import Runtime
from rakvctl.core.serving import Job
from rakvctl.core.types import Completion, Request, SamplingParams
from rakvctl.fleet import ray_cluster
from rakvctl.fleet.dispatch import Dispatcher
from rakvctl.fleet.shares import Share
from tests.fakes import FakeRuntime


def toy(_: Notify) -> Runtime:
    """A runtime that serves a prompt in about a millisecond."""
    return FakeRuntime().runtime("kv")


def jobs(count: int) -> Iterator[Job]:
    """Prompts of 26 tokens with a thousand different beginnings, each with one token to follow."""
    numbers = random.Random(0)
    starts = [tuple(numbers.randrange(32) for _ in range(20)) for _ in range(1000)]
    for number in range(count):
        ids = numbers.choice(starts) + tuple(numbers.randrange(32) for _ in range(6))
        yield Job(f"prompt-{number}", Request(ids, SamplingParams(max_new_tokens=2)))


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 200_000
    process, totals = psutil.Process(), Totals()
    ray_cluster.connect("local")
    cluster = ray_cluster.RayCluster([Share(1, 0)] * 2, lambda _share: toy)
    dispatcher = Dispatcher(cluster, partial(print, "Note:"))
    dispatcher.start()
    started = time.perf_counter()
    with open(os.devnull, "w") as nowhere:
        writer = JsonlWriter(nowhere)
        for number, answer in enumerate(dispatcher.answers(jobs(count)), start=1):
            assert isinstance(answer.outcome, Completion)
            assert answer.prompt_id == f"prompt-{number - 1}"
            totals.add(answer.outcome, answer.worker)
            writer.done(answer.prompt_id, answer.outcome)
            if number in (1_000, 10_000) or number % (count // 10) == 0:
                seconds = time.perf_counter() - started
                memory = process.memory_full_info().uss / 2**20
                print(f"{number} prompts, {seconds:.0f} s, driver {memory:.1f} MiB", flush=True)
    cluster.close()
    ray_cluster.disconnect()


if __name__ == "__main__":
    main()
