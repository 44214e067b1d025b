"""What Linux control groups (cgroups, versions 1 and 2) leave this process: memory and processor time.

A limit of any group above the process's own holds too, so all levels are read.
"""

from collections.abc import Iterator
from pathlib import Path

_ROOT, _MEMBERSHIP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
# Limit, usage, and of memory.stat what is counted as used and can be had at once: file pages not read of late.
_MEMORY_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def memory_left_bytes(root: Path = _ROOT, membership: Path = _MEMBERSHIP) -> int | None:
    """Memory that the process can still take under its tightest limit; None where there is no limit."""
    left = [
        max(0, limit - usage + _stat(group, reclaimable))
        for group in _groups("memory", root, membership)
        for limit_file, usage_file, reclaimable in _MEMORY_FILES
        if (limit := _number(group / limit_file)) is not None and (usage := _number(group / usage_file)) is not None
    ]
    return min(left, default=None)


def cpu_quota(root: Path = _ROOT, membership: Path = _MEMBERSHIP) -> float | None:
    """Processors' worth of time under the tightest quota, such as 1.5; None where there is no quota."""
    quotas = []
    for group in _groups("cpu", root, membership):
        together = _text(group / "cpu.max").split()
        quota, period = together or (_text(group / "cpu.cfs_quota_us"), _text(group / "cpu.cfs_period_us"))
        if quota.isdigit() and period.isdigit() and int(period):  # not `max` nor -1
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def _groups(controller: str, root: Path, membership: Path) -> Iterator[Path]:
    """Directories of the process's group and of those above it, in the hierarchies that may limit this.

    A container may be told a path outside of what it sees; what it sees then begins with its own group.
    """
    for line in _text(membership).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        mount = root / controller if controllers else root
        parts = [part for part in path.split("/") if part and part != ".."]
        yield from (mount.joinpath(*parts[:depth]) for depth in range(len(parts) + 1))


def _number(path: Path) -> int | None:
    text = _text(path)
    return int(text) if text.isdigit() else None


def _stat(group: Path, name: str) -> int:
    """One line of memory.stat."""
    lines = (line.split() for line in _text(group / "memory.stat").splitlines())
    return next((int(value) for key, value in lines if key == name), 0)


def _text(path: Path) -> str:
    """A file's content; nothing where there is none, as not every level has every file."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
