"""Which worker serves which prompt: those that begin alike go to the same one, and nobody waits while others have work.

Knows nothing of clusters and models. `tests/simulate_router.py` shows what it does among a thousand workers.
"""

import random
from collections import OrderedDict, deque
from collections.abc import Hashable, Iterable
from typing import Generic, Protocol, TypeVar

import numpy as np

# Where groups that have moved now live is remembered for so many of them a worker.
_REMEMBERED_PER_WORKER = 256


class Grouped(Protocol):
    """An item to be routed. `group`: the same for all that should go to one worker; None: to any."""

    @property
    def group(self) -> bytes | None: ...


Item = TypeVar("Item", bound=Grouped)


class _Queue(Generic[Item]):
    """What waits for one worker, by group; groups in the order in which the first of their items came.

    `begun` is what waits of the group that is being served. What comes to it later waits behind the other groups:
    else a large one would keep the others waiting without end.
    """

    def __init__(self) -> None:
        self.groups: OrderedDict[Hashable, deque[Item]] = OrderedDict()
        self.begun: deque[Item] = deque()

    def add(self, key: Hashable, items: Iterable[Item]) -> None:
        self.groups.setdefault(key, deque()).extend(items)

    def take(self) -> Item | None:
        if not self.begun and self.groups:
            _, self.begun = self.groups.popitem(last=False)
        return self.begun.popleft() if self.begun else None


class Router(Generic[Item]):
    """One queue a worker, and a home for each group: the worker that its digest names, so that most need no memory.

    A worker that has run dry takes whole groups from the end of the longest queue, half of what waits there, and is
    their home from then on. Only a group that is all its queue has is divided: else many prompts of one kind would
    keep one worker busy and all others idle.
    """

    def __init__(self, num_workers: int, *, by_group: bool = True) -> None:
        """`by_group`: False sends items anywhere, to see what that costs."""
        self._queues: list[_Queue[Item]] = [_Queue() for _ in range(num_workers)]
        self._num_waiting = np.zeros(num_workers, dtype=np.int64)
        self._open = list(range(num_workers))
        self._homes: OrderedDict[bytes, int] = OrderedDict()
        self._anywhere = None if by_group else random.Random(0)  # noqa: S311 - not for secrets

    @property
    def num_waiting(self) -> int:
        """Items in all queues."""
        return int(self._num_waiting.sum())

    def add(self, item: Item) -> int:
        """Put an item into the queue of its home; return which worker that is."""
        worker = self._home(item)
        self._put(worker, [item])
        return worker

    def put_back(self, worker: int, items: Iterable[Item]) -> int:
        """Put items that a worker was to serve and did not before all that waits for another; return for which."""
        others = [other for other in self._open if other != worker] or self._open
        other = others[int(self._num_waiting[others].argmin())]
        waiting = self._queues[other].begun
        before = len(waiting)
        waiting.extendleft(reversed(list(items)))
        self._num_waiting[other] += len(waiting) - before
        return other

    def take(self, worker: int, *, may_steal: bool = True) -> Item | None:
        """The next item for a worker, from another's queue where its own is empty; None where there is nothing."""
        if may_steal and not self._num_waiting[worker]:
            self._steal(worker)
        item = self._queues[worker].take()
        if item is not None:
            self._num_waiting[worker] -= 1
        return item

    def close(self, worker: int) -> None:
        """Send nothing to this worker any more; what waits for it goes to the others, of which there must be one."""
        self._open.remove(worker)
        self._homes = OrderedDict((group, home) for group, home in self._homes.items() if home != worker)
        while (item := self.take(worker, may_steal=False)) is not None:
            self.add(item)

    def _home(self, item: Item) -> int:
        if item.group is None:
            return self._least_loaded()
        if self._anywhere is not None:
            return self._anywhere.choice(self._open)
        if item.group in self._homes:
            self._homes.move_to_end(item.group)
            return self._homes[item.group]
        return self._open[int.from_bytes(item.group[:8], "little") % len(self._open)]

    def _least_loaded(self) -> int:
        return self._open[int(self._num_waiting[self._open].argmin())]

    def _put(self, worker: int, items: Iterable[Item]) -> None:
        queue = self._queues[worker]
        for item in items:
            # Items of no group are never together.
            queue.add(id(item) if item.group is None else item.group, [item])
            self._num_waiting[worker] += 1

    def _steal(self, worker: int) -> None:
        """Fill an empty queue from the longest one."""
        victim = int(self._num_waiting.argmax())
        queue, length = self._queues[victim], int(self._num_waiting[victim])
        taken: deque[Item] = deque()
        while queue.groups and 2 * len(taken) < length:
            _, items = queue.groups.popitem()
            taken.extendleft(reversed(items))
            if items[0].group is not None:
                self._move(items[0].group, worker)
        if not taken:
            taken.extendleft(queue.begun.pop() for _ in range((length + 1) // 2))
            if taken and taken[0].group is not None:
                self._move(taken[0].group, worker)
        self._num_waiting[victim] -= len(taken)
        self._put(worker, taken)

    def _move(self, group: bytes, worker: int) -> None:
        self._homes[group] = worker
        self._homes.move_to_end(group)
        if len(self._homes) > _REMEMBERED_PER_WORKER * len(self._queues):
            self._homes.popitem(last=False)
