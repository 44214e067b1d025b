"""Who serves which prompt: those that begin alike together, and nobody idle while something waits."""

from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from rakvctl.core.errors import UsageError
from rakvctl.fleet.router import Router
from rakvctl.fleet.shares import NodeResources, Share, divide


@dataclass(frozen=True)
class Item:
    number: int
    group: bytes | None


def group_of(home: int, num_workers: int, name: int = 0) -> bytes:
    """A group whose digest names this home."""
    return (home + name * num_workers).to_bytes(8, "little") + b"rest"


def filled(num_workers: int, groups: list[bytes | None]) -> Router[Item]:
    router = Router[Item](num_workers)
    for number, group in enumerate(groups):
        router.add(Item(number, group))
    return router


def all_of(router: Router[Item], worker: int, *, may_steal: bool = True) -> list[int]:
    numbers = []
    while (item := router.take(worker, may_steal=may_steal)) is not None:
        numbers.append(item.number)
    return numbers


def test_prompts_that_begin_alike_go_to_one_worker() -> None:
    groups = [group_of(home, 4, name) for home in range(4) for name in range(5)] * 6
    router = filled(4, groups)
    for worker in range(4):
        served = {groups[number] for number in all_of(router, worker, may_steal=False)}
        assert served == {group for group in groups if int.from_bytes(group[:8], "little") % 4 == worker}
    assert router.num_waiting == 0


def test_a_group_is_served_whole_before_the_next_but_does_not_keep_others_waiting() -> None:
    a, b = group_of(0, 1, 0), group_of(0, 1, 1)
    router = filled(1, [a, b, a, b])
    assert router.take(0) == Item(0, a)
    router.add(Item(4, a))  # comes once its group is begun: behind the others
    assert all_of(router, 0) == [2, 1, 3, 4]


def test_short_prompts_go_to_whoever_has_least_to_do() -> None:
    router = filled(3, [group_of(0, 3)] * 4 + [None] * 8)
    assert [len(all_of(router, worker, may_steal=False)) for worker in range(3)] == [4, 4, 4]


def test_a_worker_that_runs_dry_takes_whole_groups_and_is_their_home_from_then_on() -> None:
    groups = [group_of(0, 2, name) for name in range(4)]
    router = filled(2, [group for group in groups for _ in range(3)])
    assert router.take(0) == Item(0, groups[0])
    assert router.take(1) == Item(6, groups[2])  # half of what waits, from the end, in its order
    assert all_of(router, 1, may_steal=False) == [7, 8, 9, 10, 11]
    assert router.add(Item(12, groups[3])) == 1
    assert router.add(Item(13, groups[0])) == 0


def test_a_group_that_is_alone_is_divided_among_all() -> None:
    """A system prompt that all share: one busy worker and many idle ones would help nobody."""
    router = filled(4, [group_of(0, 4)] * 64)
    served = Counter[int]()
    while router.num_waiting:
        for worker in range(4):
            served[worker] += router.take(worker) is not None
    assert set(served.values()) == {16}


def test_a_worker_that_is_kept_busy_takes_nothing_of_others() -> None:
    router = filled(2, [group_of(0, 2)] * 3)
    assert router.take(1, may_steal=False) is None
    assert router.take(1) is not None


def test_what_a_dead_worker_was_to_serve_comes_first_with_another() -> None:
    router = filled(3, [group_of(1, 3), group_of(1, 3), group_of(2, 3)])
    assert router.put_back(0, [Item(7, None), Item(8, group_of(0, 3))]) == 2
    assert all_of(router, 2, may_steal=False) == [7, 8, 2]
    assert all_of(router, 1, may_steal=False) == [0, 1]


def test_a_closed_worker_gets_nothing_and_its_prompts_are_served() -> None:
    router = filled(3, [group_of(home, 3) for home in range(3)] * 4)
    router.close(1)
    assert all_of(router, 1, may_steal=False) == []
    assert all(router.add(Item(100 + name, group_of(1, 3, name))) != 1 for name in range(20))
    assert sorted(all_of(router, 0)) == [*range(12), *range(100, 120)]


def test_where_groups_moved_is_forgotten_in_the_end() -> None:
    """Memory does not grow with the number of groups that there ever were."""
    router = Router[Item](2)
    for name in range(2000):
        router.add(Item(name, group_of(0, 2, name)))
        assert router.take(1) is not None
    assert len(router._homes) <= 512


class Routing(RuleBasedStateMachine):
    """Whatever happens: every item comes out exactly once, and a worker gets one as long as there are any."""

    def __init__(self) -> None:
        super().__init__()
        self.router = Router[Item](4)
        self.open = [0, 1, 2, 3]
        self.waiting: set[int] = set()
        self.num_added = 0
        self.taken: list[Item] = []

    @rule(group=st.none() | st.integers(0, 9))
    def add(self, group: int | None) -> None:
        self.router.add(Item(self.num_added, None if group is None else group.to_bytes(8, "little")))
        self.waiting.add(self.num_added)
        self.num_added += 1

    @rule(worker=st.integers(0, 3))
    def take(self, worker: int) -> None:
        if worker in self.open:
            item = self.router.take(worker)
            assert (item is None) == (not self.waiting)
            if item is not None:
                self.waiting.remove(item.number)
                self.taken.append(item)

    @precondition(lambda self: self.taken)
    @rule(count=st.integers(1, 3), worker=st.integers(0, 3))
    def put_back(self, count: int, worker: int) -> None:
        back, self.taken = self.taken[-count:], self.taken[:-count]
        self.router.put_back(worker, back)
        self.waiting |= {item.number for item in back}

    @precondition(lambda self: len(self.open) > 1)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from(self.open))
        self.open.remove(worker)
        self.router.close(worker)

    def teardown(self) -> None:
        assert self.router.num_waiting == len(self.waiting)
        assert sorted(all_of(self.router, self.open[0])) == sorted(self.waiting)


TestRouting = Routing.TestCase

# What each worker gets

LARGE, SMALL = NodeResources(16, 0), NodeResources(4, 0)
GPUS = NodeResources(16, 4)


@pytest.mark.parametrize(
    ("nodes", "asked", "shares"),
    [
        ([LARGE, SMALL], (None, None, None), [Share(16, 0), Share(4, 0)]),
        ([LARGE, SMALL], (None, 4, None), [Share(4, 0)] * 5),
        ([LARGE], (4, None, None), [Share(4, 0)] * 4),
        ([LARGE, SMALL], (5, None, None), [Share(4, 0)] * 5),
        ([SMALL], (3, None, None), [Share(1, 0)] * 3),
        ([GPUS, SMALL], (None, None, None), [Share(4, 1)] * 4),
        ([GPUS], (None, None, 0.5), [Share(2, 0.5)] * 8),
        ([GPUS], (2, None, None), [Share(8, 1)] * 2),
        ([GPUS], (None, None, 0), [Share(16, 0)]),
        ([NodeResources(0, 0), SMALL], (None, None, None), [Share(4, 0)]),
    ],
)
def test_a_cluster_is_divided_among_workers(
    nodes: list[NodeResources], asked: tuple[int | None, int | None, float | None], shares: list[Share]
) -> None:
    assert divide(nodes, *asked) == shares


@pytest.mark.parametrize(
    ("nodes", "asked", "message"),
    [
        ([SMALL], (5, None, None), "room for 4 workers with --worker-cpus 1 --worker-gpus 0, not for 5"),
        ([SMALL], (2, 3, None), "room for 1 workers with --worker-cpus 3"),
        ([SMALL], (None, 8, None), "room for 0 workers with --worker-cpus 8"),
        ([SMALL], (1, None, 1), "--worker-gpus 1"),
        ([], (None, None, None), "room for 0 workers"),
    ],
)
def test_no_room_is_said_before_anything_waits_for_it(
    nodes: list[NodeResources], asked: tuple[int | None, int | None, float | None], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        divide(nodes, *asked)


@given(
    st.lists(st.builds(NodeResources, st.integers(0, 64), st.integers(0, 8)), max_size=6),
    st.none() | st.integers(1, 40),
    st.none() | st.integers(1, 16),
    st.none() | st.sampled_from([0, 0.25, 0.5, 1, 2]),
)
def test_no_node_gives_more_than_it_has(
    nodes: list[NodeResources], num_workers: int | None, num_cpus: int | None, num_gpus: float | None
) -> None:
    try:
        shares = divide(nodes, num_workers, num_cpus, num_gpus)
    except UsageError:
        return
    assert num_workers in (None, len(shares))
    assert all(share.num_cpus >= 1 for share in shares)
    assert sum(share.num_cpus for share in shares) <= sum(node.num_cpus for node in nodes)
    assert sum(share.num_gpus for share in shares) <= sum(node.num_gpus for node in nodes)
