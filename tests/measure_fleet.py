"""What a Ray worker costs beside serving in this process: `python -m tests.measure_fleet FILE [GENERATE OPTIONS]`.

The prompts of FILE go through one process and through one worker in turn; a run's time is that from its first record
to its last, so start-up is apart. Prints the ratio of each pair and their median.
"""

import statistics
import subprocess
import sys
import time

_PAIRS = 3
_PROGRAM = [sys.executable, "-c", "from rakvctl.cli.app import main; main()", "generate", "-o", "jsonl", "-q"]


def seconds(arguments: list[str]) -> float:
    """From the first record to the last."""
    with subprocess.Popen(_PROGRAM + arguments, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        times = [time.perf_counter() for _ in process.stdout]
    assert process.returncode == 0
    return times[-1] - times[0]


def main() -> None:
    file, *options = sys.argv[1:]
    ratios = []
    for _ in range(_PAIRS):
        alone = seconds(["-f", file, *options])
        worker = seconds(["-f", file, *options, "--ray", "local", "--workers", "1"])
        ratios.append(worker / alone)
        print(f"one process {alone:.1f} s, one worker {worker:.1f} s, ratio {ratios[-1]:.3f}", flush=True)
    print(f"median of the ratios {statistics.median(ratios):.3f}")


if __name__ == "__main__":
    main()
