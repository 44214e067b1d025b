"""Workers as Ray actors: Ray schedules them, carries prompts and completions, and starts those anew that die."""

import logging
import os
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from functools import partial
from typing import Any

import ray
from ray.exceptions import RayActorError

from rakvctl.core.errors import RakvError, first_line
from rakvctl.fleet.events import Died, Failed, Loaded, Refused, Served, Task, WorkerEvent
from rakvctl.fleet.shares import NodeResources, Share
from rakvctl.fleet.worker import MakeRuntime, Worker

# A process that ends this often while it loads, as for want of memory, is not started again.
_LOAD_RETRIES = 3
_REACH_SECONDS = 5.0
_CLOSE_SECONDS = 10.0
# What a cluster of this command's own keeps for large objects. None is: prompts and completions travel by themselves.
_OBJECT_STORE_BYTES = 80 * 2**20


def connect(address: str) -> None:
    """Join the cluster at an address, `auto` for the one this machine belongs to, or start one: `local`.

    Raises RakvError where there is none.
    """
    own: dict[str, Any] = {}
    if address == "local":
        # Nobody asked for a web page and for reports about its use.
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        own = {"include_dashboard": False, "object_store_memory": _OBJECT_STORE_BYTES}
    try:
        _reach(address)
        with _uninterrupted(), _as_it_was(signal.SIGTERM):
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **own)
    except (ConnectionError, ValueError, RuntimeError, OSError) as error:
        raise RakvError(
            f"no Ray cluster at {address}: {first_line(error)}",
            "where the cluster asks for tokens, as `ray start` has it by default, set RAY_AUTH_MODE=token; else check "
            "the address, or give --ray auto or local",
        ) from error


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Ctrl-C waits till the end: where its start or its end is broken off, Ray takes the process with it."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _as_it_was(number: signal.Signals) -> Iterator[None]:
    """Ray handles this signal by an orderly exit, with a code that says that all is done."""
    before = signal.getsignal(number)
    try:
        yield
    finally:
        signal.signal(number, before)


def _reach(address: str) -> None:
    """Raise OSError where nobody answers at a host and port, for which Ray would wait many minutes."""
    host, _, port = address.rpartition(":")
    if host:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_REACH_SECONDS).close()


def disconnect() -> None:
    """Leave the cluster; one of this command's own ends."""
    with _uninterrupted():
        ray.shutdown()


def nodes() -> list[NodeResources]:
    """What the nodes of the cluster have."""
    alive = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    return [NodeResources(int(resources.get("CPU", 0)), float(resources.get("GPU", 0))) for resources in alive]


class RayCluster:
    """One actor a share. Calls of one actor run in the order in which they were sent."""

    def __init__(
        self, shares: Sequence[Share], make_runtime: Callable[[Share], MakeRuntime], *, debugging: bool = False
    ) -> None:
        """`make_runtime`: from a share to what loads a runtime that keeps to it; it goes to the node."""
        self._actors = [
            ray.remote(Worker)
            .options(
                num_cpus=share.num_cpus,
                num_gpus=share.num_gpus,
                max_restarts=-1,
                scheduling_strategy="SPREAD",
            )
            .remote(make_runtime(share), debugging)
            for share in shares
        ]
        self._tell: Callable[[WorkerEvent], None] = lambda _event: None
        self._calls: set[Future[Any]] = set()

    @property
    def num_workers(self) -> int:
        """How many there are, those that have ended included."""
        return len(self._actors)

    def start(self, tell: Callable[[WorkerEvent], None]) -> None:
        """From now on events go to `tell`, from a thread of Ray's."""
        self._tell = tell

    def load(self, worker: int, life: int) -> None:
        """Have the models loaded."""
        call = self._actors[worker].load.options(max_task_retries=_LOAD_RETRIES).remote()
        self._when_done(call, partial(self._loaded, worker, life))

    def serve(self, worker: int, life: int, task: Task) -> None:
        """Send a prompt."""
        self._when_done(self._actors[worker].serve.remote(task), partial(self._served, worker, life, task.number))

    def close(self) -> None:
        """End all actors at once, whatever they do, and wait until Ray's threads have told of that."""
        for actor in self._actors:
            ray.kill(actor)
        # A call that ends later, while Python ends, would take the process with it.
        wait(list(self._calls), timeout=_CLOSE_SECONDS)

    def _when_done(self, call: Any, tell: Callable[[Future[Any]], None]) -> None:
        future = call.future()
        self._calls.add(future)
        future.add_done_callback(tell)
        future.add_done_callback(self._calls.discard)

    def _loaded(self, worker: int, life: int, call: Future[Any]) -> None:
        error = call.exception()
        if error is None:
            result = call.result()
            refused = isinstance(result, RakvError)
            self._tell(Refused(worker, life, result) if refused else Loaded(worker, life, result))
        elif isinstance(error, RayActorError):
            hint = "see Ray's logs on its node; mostly there is too little memory for so many workers"
            self._tell(Refused(worker, life, RakvError("a worker dies while it loads the model", hint)))
        else:
            self._tell(Failed(error))

    def _served(self, worker: int, life: int, number: int, call: Future[Any]) -> None:
        error = call.exception()
        if isinstance(error, RayActorError):
            self._tell(Died(worker, life))
        elif error is not None:
            self._tell(Failed(error))
        elif call.result() is None:
            self._tell(Died(worker, life, was_idle=True))
        else:
            self._tell(Served(worker, life, number, call.result()))
