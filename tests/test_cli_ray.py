"""`rakvctl generate --ray`: the same records as one process makes, whatever dies meanwhile.

Each test starts a cluster of its own with worker processes, which takes seconds.
"""

import importlib.util
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from rakvctl.core.errors import RakvError, RequestError, UsageError
from rakvctl.core.loading import RuntimeOptions
from rakvctl.core.models import Notify
from rakvctl.core.runtime import Runtime
from rakvctl.core.serving import Job
from rakvctl.core.types import Completion, Request, SamplingParams
from rakvctl.fleet import fleet
from rakvctl.fleet.dispatch import Dispatcher
from rakvctl.fleet.fleet import FleetOptions, open_fleet
from rakvctl.fleet.shares import Share
from tests.fakes import FakeRuntime
from tests.program import Call, assert_error

needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="the extra ray is not installed")

PROGRAM = [sys.executable, "-c", "from rakvctl.cli.app import main; main()"]
# As often as this is a worker killed; many times are for once in a while.
NUM_KILLS = int(os.environ.get("RAKVCTL_TEST_WORKER_KILLS", "2"))
DEADLINE_SECONDS = 120.0 + 15 * NUM_KILLS
STARTS = [f"def {name}(items, total):\n    '''Return what is there of {name} and no more.'''\n" for name in "abcdefgh"]


def prompt_file(path: Path, count: int, max_new_tokens: int) -> Path:
    numbers = random.Random(0)
    lines = [
        {
            "id": f"p{number}",
            "prompt": f"{numbers.choice(STARTS)}    for item in items[{number}:]:\n",
            "max_new_tokens": numbers.randint(max_new_tokens // 2, max_new_tokens),
        }
        for number in range(count)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def command(*arguments: str | Path) -> list[str]:
    return [*PROGRAM, "generate", "--policy", "kv", "--threads", "1", *map(str, arguments)]


def on_ray(*arguments: str | Path, workers: int = 2) -> list[str]:
    return command("--ray", "local", "--workers", str(workers), *arguments)


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def what_counts(record: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(record.get(name) for name in ("id", "text", "finish_reason", "prompt_tokens", "completion_tokens"))


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prompt_file(tmp_path_factory.mktemp("prompts") / "p.jsonl", count=120, max_new_tokens=24)


@pytest.fixture(scope="module")
def alone(prompts: Path) -> list[dict[str, Any]]:
    """What one process makes of them."""
    out = prompts.with_name("alone.jsonl")
    subprocess.run(command("-f", prompts, "--out", out), check=True, timeout=DEADLINE_SECONDS)
    return records(out)


@contextmanager
def running(arguments: list[str], **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    """A process of its own, in a session of its own, which is over at the end."""
    with subprocess.Popen(arguments, start_new_session=True, stderr=subprocess.PIPE, **options) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def wait_until(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def serving_workers(driver: int) -> list[psutil.Process]:
    """The processes that serve for a driver."""
    children = psutil.Process(driver).children(recursive=True)
    return [child for child in children if title(child).startswith("ray::Worker.serve")]


def title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return ""


@needs_ray
def test_records_are_those_of_one_process_in_order(prompts: Path, alone: list[dict[str, Any]], tmp_path: Path) -> None:
    finished = subprocess.run(on_ray("-f", prompts, "--stats"), capture_output=True, timeout=DEADLINE_SECONDS)
    assert finished.returncode == 0
    made = [json.loads(line) for line in finished.stdout.decode().splitlines()]
    assert [what_counts(record) for record in made] == [what_counts(record) for record in alone]
    stats = " ".join(finished.stderr.decode().split())
    assert "2 workers" in stats
    assert "120 done, 0 failed" in stats
    num_hits = sum(record["reused_tokens"] > 0 for record in made)
    assert num_hits >= 0.95 * sum(record["reused_tokens"] > 0 for record in alone)


@needs_ray
def test_one_prompt_gives_its_text(alone: list[dict[str, Any]], prompts: Path) -> None:
    first = json.loads(prompts.read_text().splitlines()[0])
    arguments = on_ray(first["prompt"], "-n", str(first["max_new_tokens"]), workers=1)
    finished = subprocess.run(arguments, capture_output=True, timeout=DEADLINE_SECONDS)
    assert finished.stdout.decode() == alone[0]["text"].removesuffix("\n") + "\n"


@needs_ray
def test_workers_that_are_killed_lose_and_double_nothing(
    prompts: Path, alone: list[dict[str, Any]], tmp_path: Path
) -> None:
    """By SIGKILL, at random moments of their work, and what Ray says of that is no part of the results."""
    out, numbers = tmp_path / "out.jsonl", random.Random(0)
    long = prompt_file(tmp_path / "p.jsonl", count=100 * NUM_KILLS, max_new_tokens=32)
    expected_path = tmp_path / "alone.jsonl"
    subprocess.run(command("-f", long, "--out", expected_path), check=True, timeout=DEADLINE_SECONDS)
    with running(on_ray("-f", long, "--out", out), stdout=subprocess.PIPE) as driver:
        for _ in range(NUM_KILLS):
            # Once the last death is got over: a prompt that meets two by chance is taken for the reason of both.
            wait_until(lambda: len(serving_workers(driver.pid)) == 2)
            time.sleep(numbers.random())
            numbers.choice(serving_workers(driver.pid)).kill()
            wait_until(lambda: len(serving_workers(driver.pid)) < 2)
        printed, said = driver.communicate(timeout=DEADLINE_SECONDS)
    assert driver.returncode == 0
    assert printed == b""
    assert said.decode().count("died; what it was to serve runs again") == NUM_KILLS
    expected = records(expected_path)
    assert [what_counts(record) for record in records(out)] == [what_counts(record) for record in expected]


def records_so_far(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


@needs_ray
def test_a_killed_driver_is_resumed(prompts: Path, alone: list[dict[str, Any]], tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    with running(on_ray("-f", prompts, "--out", out)) as driver:
        wait_until(lambda: len(records_so_far(out)) >= 20)
        workers = serving_workers(driver.pid)
        driver.kill()
    _, left = psutil.wait_procs(workers, timeout=30)
    assert left == []
    assert len(records_so_far(out)) < len(alone)
    subprocess.run(on_ray("-f", prompts, "--out", out, "--resume"), check=True, timeout=DEADLINE_SECONDS)
    assert [what_counts(record) for record in records(out)] == [what_counts(record) for record in alone]


@needs_ray
def test_an_interrupt_writes_what_is_done_and_leaves_nothing_running(prompts: Path, tmp_path: Path) -> None:
    """Even while a pipe is waited for."""
    out = tmp_path / "out.jsonl"
    lines = prompts.read_bytes().splitlines(keepends=True)[:10]
    with running(on_ray("--format", "jsonl", "--out", out), stdin=subprocess.PIPE) as driver:
        assert driver.stdin is not None
        driver.stdin.write(b"".join(lines))
        driver.stdin.flush()
        wait_until(lambda: len(records_so_far(out)) == 10)
        children = psutil.Process(driver.pid).children(recursive=True)
        driver.send_signal(signal.SIGINT)
        driver.wait(timeout=60)
        assert driver.stderr is not None
        said = driver.stderr.read().decode()
    assert driver.returncode == 130
    assert said.splitlines()[0] == "Error: interrupted"
    assert said.splitlines()[1:] == [
        f"Hint: the records in {out} are complete; the same command with --resume goes on from there"
    ]
    _, left = psutil.wait_procs(children, timeout=30)
    assert [process for process in left if title(process)] == []
    assert len(records(out)) == 10


@needs_ray
def test_a_driver_that_is_told_to_end_does_not_say_that_all_is_done(prompts: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    with running(on_ray("-f", prompts, "--out", out)) as driver:
        wait_until(lambda: len(records_so_far(out)) >= 5)
        workers = serving_workers(driver.pid)
        driver.terminate()
        assert driver.wait(timeout=60) == -signal.SIGTERM
        assert driver.stderr is not None
        assert driver.stderr.read() == b""
    _, left = psutil.wait_procs(workers, timeout=30)
    assert left == []


@needs_ray
def test_what_cannot_be_served_is_said_once(tmp_path: Path) -> None:
    finished = subprocess.run(
        command("--ray", "local", "--workers", "2", "-m", tmp_path, "hello"),
        capture_output=True,
        timeout=DEADLINE_SECONDS,
    )
    assert (finished.returncode, finished.stdout) == (1, b"")
    first, second = finished.stderr.decode().splitlines()
    assert first.startswith("Error: ")
    assert "no config.json" in first
    assert second.startswith("Hint: ")


@needs_ray
@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("--ray", "local", "--workers", "1000"), 2, "not for 1000"),
        (("--ray", "127.0.0.1:1"), 1, "no Ray cluster at 127.0.0.1:1"),
    ],
)
def test_a_cluster_that_is_not_there_is_an_error(arguments: tuple[str, ...], code: int, message: str) -> None:
    finished = subprocess.run(command(*arguments, "hello"), capture_output=True, timeout=DEADLINE_SECONDS)
    assert (finished.returncode, finished.stdout) == (code, b"")
    first, second = finished.stderr.decode().splitlines()
    assert first.startswith("Error: ")
    assert message in first
    assert second.startswith("Hint: ")


def test_without_ray_its_option_is_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "rakvctl.fleet.ray_cluster", raising=False)
    with (
        pytest.raises(UsageError, match="Ray is not installed") as raised,
        open_fleet(FleetOptions("local"), RuntimeOptions(), lambda _: None),
    ):
        pass
    assert raised.value.hint == f"run: {fleet.INSTALL_RAY}"


@pytest.mark.parametrize("workers", ["0", "-1", "many", "1.5", ""])
def test_a_number_of_workers_is_one_or_more(run: Call, workers: str) -> None:
    assert_error(run("generate", "hello", "--ray", "local", f"--workers={workers}"), 2, "is not a number of workers")


@pytest.mark.parametrize("address", ["cluster", "LOCAL", "ray://head:10001", "head:", ":6379", "head:port"])
def test_what_is_no_address_is_wrong_usage(run: Call, address: str) -> None:
    assert_error(run("generate", "hello", "--ray", address), 2, f"--ray {address} is no address of a cluster")


@pytest.mark.parametrize("option", ["--workers=2", "--worker-cpus=1", "--worker-gpus=1"])
def test_workers_without_a_cluster_are_wrong_usage(run: Call, option: str) -> None:
    assert_error(run("generate", "hello", option), 2, "workers are a cluster's")


# Processes that end by themselves: toy models, driven from here


def dies_of_thirteen(_: Notify) -> Runtime:
    """A runtime whose process ends when it is to serve a prompt that begins with token 13."""
    toy = FakeRuntime().runtime("kv")

    class Mortal(Runtime):
        def __init__(self) -> None:
            """As it is, but for one prompt."""

        engine = toy.engine
        settle = toy.settle

        def run(self, request: Request, on_text: Callable[[str], None] = lambda _: None) -> Completion:
            if request.prompt_token_ids[0] == 13:
                os._exit(1)
            return toy.run(request, on_text)

    return Mortal()


def dies_while_loading(_: Notify) -> Runtime:
    os._exit(1)


@pytest.fixture
def local_ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    from rakvctl.fleet import ray_cluster

    monkeypatch.setattr(sys, "stdout", open(os.devnull, "w"))  # noqa: SIM115 - what Ray says there is not ours
    ray_cluster.connect("local")
    yield ray_cluster
    ray_cluster.disconnect()


@needs_ray
def test_a_prompt_that_ends_its_worker_twice_is_an_error_record(local_ray: Any) -> None:
    cluster = local_ray.RayCluster([Share(1, 0)] * 2, lambda _share: dies_of_thirteen)
    requests = [Request((13 if number == 7 else 1, number), SamplingParams(max_new_tokens=4)) for number in range(20)]
    dispatcher = Dispatcher(cluster, lambda _: None)
    dispatcher.start()
    answers = list(dispatcher.answers(Job(*pair) for pair in enumerate(requests)))
    cluster.close()
    assert [answer.prompt_id for answer in answers] == list(range(20))
    assert [answer.prompt_id for answer in answers if isinstance(answer.outcome, RequestError)] == [7]
    alone = FakeRuntime().runtime("ar")
    for answer, request in zip(answers, requests, strict=True):
        if isinstance(answer.outcome, Completion):
            assert answer.outcome.text == alone.run(request).text


@needs_ray
def test_workers_that_die_while_they_load_are_given_up(local_ray: Any) -> None:
    cluster = local_ray.RayCluster([Share(1, 0)] * 2, lambda _share: dies_while_loading)
    with pytest.raises(RakvError, match="a worker dies while it loads the model"):
        Dispatcher(cluster, lambda _: None).start()
    cluster.close()
