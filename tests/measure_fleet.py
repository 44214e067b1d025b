"""What a Ray worker costs beside serving in this process: `python -m tests.measure_fleet FILE [GENERATE OPTIONS]`.

Two programs that wait for prompts on a pipe, one with a worker and one without, serve batches of the prompts of FILE in
turn, so that what else the machine does meets both; start-up is apart. A batch's time is that from its first record to
its last. Prints the ratio of each pair of batches, their median and quartiles, and the part of the time that went into
serving prompts.
"""

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_BATCH = 40
_PROGRAM = [sys.executable, "-c", "from rakvctl.cli.app import main; main()", "generate", "--format", "jsonl", "-q"]


class Server:
    """A program that waits for prompts."""

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._stdin, self._stdout = process.stdin, process.stdout

    def serve(self, lines: list[bytes]) -> tuple[float, float]:
        """Seconds from the first record to the last, and what part of them went into serving."""
        self._stdin.writelines(lines)
        self._stdin.flush()
        records = [(json.loads(self._stdout.readline()), time.perf_counter()) for _ in lines]
        seconds = records[-1][1] - records[0][1]
        return seconds, sum(record["total_ms"] for record, _ in records[1:]) / 1e3 / seconds


@contextmanager
def running(arguments: list[str]) -> Iterator[Server]:
    with subprocess.Popen(_PROGRAM + arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        yield Server(process)
        assert process.stdin is not None
        process.stdin.close()
    assert process.returncode == 0


def main() -> None:
    file, *options = sys.argv[1:]
    lines = Path(file).read_bytes().splitlines(keepends=True)
    batches = [lines[start : start + _BATCH] for start in range(0, len(lines) - _BATCH + 1, _BATCH)]
    ratios, serving_alone, serving_worker = [], [], []
    with running(options) as alone, running([*options, "--ray", "local", "--workers", "1"]) as worker:
        for number, batch in enumerate(batches):
            servers = (alone, worker) if number % 2 else (worker, alone)
            times = {server: server.serve(batch) for server in servers}
            if number == 0:
                continue  # everything is done for the first time
            ratios.append(times[worker][0] / times[alone][0])
            serving_alone.append(times[alone][1])
            serving_worker.append(times[worker][1])
            print(f"alone {times[alone][0]:.2f} s, worker {times[worker][0]:.2f} s, {ratios[-1]:.3f}", flush=True)
    low, middle, high = statistics.quantiles(ratios, n=4)
    print(f"median {middle:.3f}, quartiles {low:.3f} to {high:.3f}, {len(ratios)} pairs of batches")
    print(f"serving: alone {statistics.median(serving_alone):.1%}, worker {statistics.median(serving_worker):.1%}")


if __name__ == "__main__":
    main()
