"""What of the machine this process may use: under control groups, affinity and quotas less than there is."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from rakvctl.core import cgroup, hardware
from rakvctl.core.backends.torch_loader import TorchLoader
from rakvctl.core.errors import RakvError, UsageError
from rakvctl.core.hardware import free_memory_bytes, num_cores, processor_name
from rakvctl.core.loading import RuntimeOptions, load_codec, load_pair
from rakvctl.fleet import fleet
from rakvctl.fleet.shares import Share
from tests.program import Call, assert_error

MIB = 2**20


class Groups:
    """A made-up hierarchy of control groups."""

    def __init__(self, folder: Path, membership: str) -> None:
        self.root = folder / "cgroup"
        self.membership = folder / "self"
        self.membership.write_text(membership)

    def write(self, group: str, **files: str) -> None:
        """Files of one group; `__` in a name stands for the dot."""
        (self.root / group).mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (self.root / group / name.replace("__", ".")).write_text(content + "\n")

    def memory(self) -> int | None:
        return cgroup.memory_left_bytes(self.root, self.membership)

    def cpus(self) -> float | None:
        return cgroup.cpu_quota(self.root, self.membership)


@pytest.fixture
def v2(tmp_path: Path) -> Groups:
    groups = Groups(tmp_path, "0::/pod/box\n")
    groups.write("", memory__stat="inactive_file 5")
    groups.write("pod", memory__max=str(900 * MIB), memory__current=str(700 * MIB), memory__stat="anon 1")
    files = {"memory__max": str(800 * MIB), "memory__current": str(500 * MIB)}
    groups.write("pod/box", **files, memory__stat=f"active_file 9\ninactive_file {100 * MIB}", cpu__max="max 100000")
    return groups


@pytest.fixture
def v1(tmp_path: Path) -> Groups:
    """As in a container that sees its own group as the root, but is told its path outside."""
    groups = Groups(tmp_path, "4:memory:/docker/abc\n2:cpu,cpuacct:/docker/abc\n0::/\n")
    files = {"memory__limit_in_bytes": str(300 * MIB), "memory__usage_in_bytes": str(250 * MIB)}
    groups.write("memory", **files, memory__stat=f"inactive_file 7\ntotal_inactive_file {30 * MIB}")
    groups.write("cpu", cpu__cfs_quota_us="250000", cpu__cfs_period_us="100000")
    return groups


def test_the_tightest_group_counts_and_reclaimable_pages_are_free(v2: Groups) -> None:
    assert v2.memory() == 200 * MIB, "the pod's: 900 - 700; the box has 800 - (500 - 100)"
    v2.write("pod", memory__max="max")
    assert v2.memory() == 400 * MIB
    v2.write("pod/box", memory__max="max")
    assert v2.memory() is None


def test_a_full_group_has_nothing_left(v2: Groups) -> None:
    v2.write("pod", memory__current=str(950 * MIB))
    assert v2.memory() == 0


def test_memory_of_version_1_is_read(v1: Groups) -> None:
    assert v1.memory() == 80 * MIB


def test_a_quota_of_version_1_is_read(v1: Groups) -> None:
    assert v1.cpus() == pytest.approx(2.5)
    v1.write("cpu", cpu__cfs_quota_us="-1")
    assert v1.cpus() is None


def test_a_quota_of_version_2_above_the_group_counts(v2: Groups) -> None:
    assert v2.cpus() is None
    v2.write("pod", cpu__max="150000 100000")
    assert v2.cpus() == pytest.approx(1.5)


def test_without_control_groups_nothing_is_limited(tmp_path: Path) -> None:
    assert cgroup.memory_left_bytes(tmp_path / "absent", tmp_path / "absent") is None
    assert cgroup.cpu_quota(tmp_path / "absent", tmp_path / "absent") is None


def test_free_memory_is_what_the_group_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "memory_left_bytes", lambda: 5 * MIB)
    assert free_memory_bytes() == 5 * MIB
    monkeypatch.setattr(hardware, "memory_left_bytes", lambda: 2**60)
    assert 0 < free_memory_bytes() <= psutil.virtual_memory().total


@pytest.mark.parametrize(
    ("allowed", "quota", "expected"), [(8, None, 8), (8, 2.9, 2), (8, 0.5, 1), (2, 6.0, 2), (1, None, 1)]
)
def test_cores_are_those_that_affinity_and_quota_leave(
    allowed: int, quota: float | None, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(allowed)))
    monkeypatch.setattr(hardware, "cpu_quota", lambda: quota)
    assert num_cores() == expected
    assert processor_name().endswith(f", {expected} cores")


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs affinity")
def test_more_threads_than_the_affinity_allows_are_refused() -> None:
    core = min(os.sched_getaffinity(0))
    code = f"import os, sys; os.sched_setaffinity(0, {{{core}}}); from rakvctl.cli.app import main; main()"
    command = [sys.executable, "-c", code, "generate", "x", "--threads", "2"]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    assert finished.returncode == 2
    assert finished.stderr.splitlines()[0] == "Error: --threads 2 is more than the 1 core that this process may use"


@pytest.fixture
def one_core(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    import torch

    before = torch.get_num_threads()
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    yield
    torch.set_num_threads(before)


def test_torch_takes_no_more_threads_than_there_are_cores(one_core: None) -> None:
    import torch

    torch.set_num_threads(2)
    TorchLoader("cpu", "float32", None)
    assert torch.get_num_threads() == 1


# --- of a cluster, each worker's node has its own cores


def test_threads_are_checked_where_the_model_is_loaded_and_not_by_the_driver(one_core: None) -> None:
    import torch

    torch.set_num_threads(2)
    assert load_codec(RuntimeOptions(num_threads=64), print).vocab_size > 0
    assert torch.get_num_threads() <= 2
    with pytest.raises(UsageError, match="--threads 64"):
        load_pair(RuntimeOptions(num_threads=64), print)


def test_the_driver_of_a_cluster_refuses_no_threads(run: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    def open_fleet(_fleet: object, options: RuntimeOptions, *_: object, **__: object) -> None:
        raise RakvError(f"workers were asked for {options.num_threads} threads", "")

    monkeypatch.setattr("rakvctl.cli.generate.open_fleet", open_fleet)
    assert_error(run("generate", "x", "--ray", "local", "--threads", "4096"), 1, "asked for 4096 threads")


def test_a_worker_takes_its_share_of_cores_as_far_as_its_node_has_them(
    one_core: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cluster may have been told of more cores than there are."""
    monkeypatch.setattr(fleet, "load_runtime", lambda options, *_: options)

    def threads(options: RuntimeOptions, share: Share) -> int | None:
        return fleet._runtime_of(options, share)(print).num_threads  # type: ignore[attr-defined]

    assert threads(RuntimeOptions(), Share(4, 0.0)) == 1
    assert threads(RuntimeOptions(num_threads=3), Share(4, 0.0)) == 3, "left to the check of the worker"
    assert threads(RuntimeOptions(), Share(4, 1.0)) is None
