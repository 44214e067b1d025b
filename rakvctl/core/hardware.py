"""What this machine is: the processor's name and the memory that is free."""

import os
import platform
from pathlib import Path

import psutil


def processor_name() -> str:
    """The processor and how many of its cores there are, such as `AMD EPYC, 2 cores`."""
    return f"{_model_name()}, {os.cpu_count()} cores"


def _model_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def free_memory_bytes() -> int:
    """Memory that processes can still be given without swapping."""
    return int(psutil.virtual_memory().available)
