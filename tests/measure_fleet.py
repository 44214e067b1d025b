"""What a Ray worker costs beside serving in this process: `python -m tests.measure_fleet FILE [GENERATE OPTIONS]`.

The prompts of FILE go through one process and through one worker in turn; a run's time is that from its first record
to its last, so start-up is apart. Prints the ratio of each pair and their median.
"""

import json
import statistics
import subprocess
import sys
import time

_PAIRS = 5
_PROGRAM = [sys.executable, "-c", "from rakvctl.cli.app import main; main()", "generate", "-o", "jsonl", "-q"]


def run(arguments: list[str]) -> tuple[float, float]:
    """Seconds from the first record to the last, and what part of them went into serving prompts."""
    with subprocess.Popen(_PROGRAM + arguments, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        lines = [(time.perf_counter(), json.loads(line)) for line in process.stdout]
    assert process.returncode == 0
    seconds = lines[-1][0] - lines[0][0]
    return seconds, sum(record["total_ms"] for _, record in lines[1:]) / 1e3 / seconds


def main() -> None:
    file, *options = sys.argv[1:]
    ratios = []
    for _ in range(_PAIRS):
        alone, alone_serving = run(["-f", file, *options])
        worker, worker_serving = run(["-f", file, *options, "--ray", "local", "--workers", "1"])
        ratios.append(worker / alone)
        print(
            f"one process {alone:.1f} s, {alone_serving:.1%} of it serving; one worker {worker:.1f} s, "
            f"{worker_serving:.1%} of it serving; ratio {ratios[-1]:.3f}",
            flush=True,
        )
    print(f"median of the ratios {statistics.median(ratios):.3f}")


if __name__ == "__main__":
    main()
