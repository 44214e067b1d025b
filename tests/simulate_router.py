"""The router among very many workers: `python -m tests.simulate_router [--workers N] [--prompts N] ...`.

The router is the real one; workers, stores and time are simulated. Prompts come from a file as fast as they are taken,
each with one of so many prefixes that are drawn with Zipf's weights. A worker's store holds some prefixes and evicts
the least recently used. A prompt takes its worker a time drawn from an exponential distribution of mean 1, and a
prefix that is not in the store so much more. Answers are put in line again, so that what is read ahead is bounded.
"""

import argparse
import hashlib
import heapq
import random
import time
import tracemalloc
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from rakvctl.fleet.dispatch import READ_AHEAD
from rakvctl.fleet.router import Router

_CHUNK = 100_000


@dataclass(frozen=True, slots=True)
class Prompt:
    """The number-th prompt; its group names its prefix."""

    number: int
    group: bytes


@dataclass(frozen=True, slots=True)
class Result:
    """Shares of 1, times in units of a prompt's mean, `routing_us` and `router_mb` of the real machine."""

    hit_rate: float
    makespan: float
    utilisation: float
    longest_busy: float
    routing_us: float
    router_mb: float


def prompts(count: int, num_prefixes: int, exponent: float, seed: int) -> Iterator[Prompt]:
    """Prefix r of so many is drawn with weight 1 / r^exponent."""
    cumulated = np.cumsum(np.arange(1, num_prefixes + 1) ** -exponent)
    numbers = np.random.default_rng(seed)
    groups = [hashlib.blake2b(str(rank).encode(), digest_size=12).digest() for rank in range(num_prefixes)]
    for start in range(0, count, _CHUNK):
        ranks = np.searchsorted(cumulated, numbers.random(min(_CHUNK, count - start)) * cumulated[-1])
        for offset, rank in enumerate(ranks.tolist()):
            yield Prompt(start + offset, groups[rank])


class Stores:
    """What each worker has in its store, the least recently used first."""

    def __init__(self, num_workers: int, size: int) -> None:
        self._held: list[OrderedDict[bytes, None]] = [OrderedDict() for _ in range(num_workers)]
        self._size = size

    def find(self, worker: int, group: bytes) -> bool:
        """Whether it is there; it is from now on."""
        held = self._held[worker]
        hit = group in held
        held[group] = None
        held.move_to_end(group)
        if len(held) > self._size:
            held.popitem(last=False)
        return hit


def simulate(options: argparse.Namespace, *, by_group: bool) -> Result:
    """One way of routing, over all prompts."""
    router = Router[Prompt](options.workers, by_group=by_group)
    stores = Stores(options.workers, options.store)
    source = prompts(options.prompts, options.prefixes, options.exponent, options.seed)
    length = random.Random(options.seed).expovariate
    busy = np.zeros(options.workers)
    idle = set(range(options.workers))
    running: list[tuple[float, int, int]] = []
    done: set[int] = set()
    num_read = num_in_line = num_hits = 0
    now = routing_s = router_mb = 0.0

    def start(worker: int) -> None:
        nonlocal num_hits, routing_s
        started = time.perf_counter()
        prompt = router.take(worker)
        routing_s += time.perf_counter() - started
        if prompt is None:
            idle.add(worker)
            return
        idle.discard(worker)
        hit = stores.find(worker, prompt.group)
        num_hits += hit
        duration = length(1.0) + (0.0 if hit else options.miss)
        busy[worker] += duration
        heapq.heappush(running, (now + duration, worker, prompt.number))

    if options.memory:
        tracemalloc.start()
    while num_in_line < options.prompts:
        while num_read < min(options.prompts, num_in_line + READ_AHEAD * options.workers):
            started = time.perf_counter()
            home = router.add(next(source))
            routing_s += time.perf_counter() - started
            num_read += 1
            if idle:
                start(home if home in idle else next(iter(idle)))
        now, worker, number = heapq.heappop(running)
        done.add(number)
        while num_in_line in done:
            done.remove(num_in_line)
            num_in_line += 1
        start(worker)
        if tracemalloc.is_tracing() and num_in_line > options.prompts // 2:
            router_mb = _traced_mb()
    return Result(
        hit_rate=num_hits / options.prompts,
        makespan=now,
        utilisation=float(busy.sum()) / options.workers / now,
        longest_busy=float(busy.max() / busy.mean()),
        routing_us=routing_s / options.prompts * 1e6,
        router_mb=router_mb,
    )


def _traced_mb() -> float:
    """Megabytes that the router has allocated and not freed; ends the tracing."""
    snapshot = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(True, "*/fleet/router.py")])
    tracemalloc.stop()
    return sum(entry.size for entry in snapshot.statistics("filename")) / 1e6


def main() -> None:
    """Both ways of routing, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=1_000, help="(default: 1000)")
    parser.add_argument("--prompts", type=int, default=10_000_000, help="(default: 10 million)")
    parser.add_argument("--prefixes", type=int, default=100_000, help="how many there are (default: 100000)")
    parser.add_argument("--exponent", type=float, default=1.0, help="of Zipf's weights (default: 1)")
    parser.add_argument("--store", type=int, default=64, help="prefixes that a worker keeps (default: 64)")
    parser.add_argument("--miss", type=float, default=1.0, help="what a prefix costs, in mean prompts (default: 1)")
    parser.add_argument("--seed", type=int, default=0, help="of all random numbers (default: 0)")
    parser.add_argument(
        "--memory", action="store_true", help="also trace the router's memory up to half of the prompts, which is slow"
    )
    options = parser.parse_args()
    for by_group in (True, False):
        result = simulate(options, by_group=by_group)
        print("by prefix" if by_group else "anywhere", result, flush=True)


if __name__ == "__main__":
    main()
