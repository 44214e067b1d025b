"""How the cores and GPUs of a cluster are divided among workers."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from rakvctl.core.errors import UsageError


@dataclass(frozen=True, slots=True)
class NodeResources:
    """What a node has to give: CPU cores and GPUs."""

    num_cpus: int
    num_gpus: float


@dataclass(frozen=True, slots=True)
class Share:
    """What a worker gets: whole CPU cores, which are its threads, and GPUs or a part of one."""

    num_cpus: int
    num_gpus: float


def divide(
    nodes: Sequence[NodeResources], num_workers: int | None, num_cpus: int | None, num_gpus: float | None
) -> list[Share]:
    """A share for each worker; None leaves it open.

    Without a number of workers there are as many as have room where `num_cpus` or `num_gpus` is given; else one for
    each GPU, and without any GPU one for each node. Without `num_cpus` the workers of a node have equal parts of its
    cores. Raises UsageError where there is no room for all of them.
    """
    if num_gpus is None:
        has_gpus = any(node.num_gpus >= 1 for node in nodes)
        num_gpus = 1.0 if has_gpus else 0.0
    rooms = [_room(node, num_cpus, num_gpus) for node in nodes]
    if num_workers is None and num_cpus is None and num_gpus == 0:
        placed = Counter({index: 1 for index, room in enumerate(rooms) if room})
    elif num_workers is None:
        placed = Counter(dict(enumerate(rooms)))
    else:
        placed = _spread(rooms, num_workers)
    if not placed.total() or (num_workers is not None and placed.total() < num_workers):
        raise UsageError(
            f"there is room for {sum(rooms)} workers with --worker-cpus {num_cpus or 1} --worker-gpus {num_gpus:g}"
            + (f", not for {num_workers}" if num_workers else ""),
            "give fewer --workers, or less to each with --worker-cpus and --worker-gpus",
        )
    return [
        Share(num_cpus or nodes[index].num_cpus // count, num_gpus)
        for index, count in placed.items()
        for _ in range(count)
    ]


def _room(node: NodeResources, num_cpus: int | None, num_gpus: float) -> int:
    """How many workers fit on a node, of one core where it is left open."""
    by_cpus = node.num_cpus // (num_cpus or 1)
    return min(by_cpus, int(node.num_gpus / num_gpus)) if num_gpus else by_cpus


def _spread(rooms: Sequence[int], num_workers: int) -> Counter[int]:
    """So many workers over nodes, one after another to where the largest part of the room is left."""
    placed = Counter[int]()
    for _ in range(min(num_workers, sum(rooms))):
        placed[max(range(len(rooms)), key=lambda index: (rooms[index] - placed[index]) / max(rooms[index], 1))] += 1
    return placed
