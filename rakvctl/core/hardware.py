"""What this machine is, and what of it this process may use: the processor, its cores, and memory."""

import os
import platform
from pathlib import Path

import psutil

from rakvctl.core.cgroup import cpu_quota, memory_left_bytes


def processor_name() -> str:
    """The processor and how many of its cores this process may use, such as `AMD EPYC, 2 cores`."""
    return f"{_model_name()}, {num_cores()} cores"


def num_cores() -> int:
    """Cores that this process may use: those of its affinity, as far as its quota of processor time goes."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cpu_quota()
    # Rounded down: threads that wait for each other are as slow as the one that is out of time.
    return allowed if quota is None else max(1, min(allowed, int(quota)))


def _model_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def free_memory_bytes() -> int:
    """Memory that this process can still be given without swapping, and under the limits of its control groups."""
    available, left = int(psutil.virtual_memory().available), memory_left_bytes()
    return available if left is None else min(available, left)
