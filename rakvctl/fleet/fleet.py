"""Prompts over a Ray cluster, as one thing that serves: connect, divide, load, dispatch, leave."""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from rakvctl.core.errors import UsageError
from rakvctl.core.hardware import num_cores
from rakvctl.core.loading import RuntimeOptions, load_codec
from rakvctl.core.models import OUR_NAMES, Notify
from rakvctl.core.runtime import Runtime
from rakvctl.core.serving import Answer, Job
from rakvctl.core.text import TextCodec
from rakvctl.core.types import Completion
from rakvctl.fleet.dispatch import Dispatcher
from rakvctl.fleet.events import WorkerInfo
from rakvctl.fleet.shares import Share, divide
from rakvctl.fleet.worker import MakeRuntime
from rakvctl.measure.ready import load_runtime

INSTALL_RAY = "pip install 'rakvctl[ray]'"


@dataclass(frozen=True, slots=True)
class FleetOptions:
    """The cluster as the command line has it: its address or `local`, and what each worker gets; None: left open."""

    address: str
    num_workers: int | None = None
    num_cpus: int | None = None
    num_gpus: float | None = None


class Fleet:
    """Workers of which one is ready at least; serves like one runtime, in input order."""

    def __init__(self, codec: TextCodec, dispatcher: Dispatcher) -> None:
        self.codec = codec
        self._dispatcher = dispatcher

    @property
    def infos(self) -> Mapping[int, WorkerInfo]:
        """What the workers that have been ready run on."""
        return self._dispatcher.infos

    def answers(self, jobs: Iterator[Job], on_text: Callable[[str], None]) -> Iterator[Answer]:
        """The answer to each job; `on_text` gets the text of a completion before it comes, in one piece.

        Raises RakvError where no worker can serve, KeyboardInterrupt after `interrupt`.
        """
        for answer in self._dispatcher.answers(jobs):
            if isinstance(answer.outcome, Completion):
                on_text(answer.outcome.text)
            yield answer

    def interrupt(self) -> None:
        """End early, with what is done."""
        self._dispatcher.interrupt()


@contextmanager
def open_fleet(
    fleet: FleetOptions, options: RuntimeOptions, notify: Notify, *, debugging: bool = False
) -> Iterator[Fleet]:
    """Connect and start workers, and wait for the first; at the end none is left, nor a cluster of this command's own.

    Raises UsageError without Ray or without room for the workers, RakvError without a cluster at the address, and what
    loading models and profile raises where no worker can.
    """
    try:
        from rakvctl.fleet import ray_cluster
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise UsageError("Ray is not installed", f"run: {INSTALL_RAY}") from error
    if fleet.address != "local":
        options = _known_everywhere(options)
    codec = load_codec(options, notify)
    # Ray prints what it has to say of nodes and processes to stdout, where results go.
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        try:
            ray_cluster.connect(fleet.address)
            shares = divide(ray_cluster.nodes(), fleet.num_workers, fleet.num_cpus, fleet.num_gpus)
            cluster = ray_cluster.RayCluster(shares, partial(_runtime_of, options), debugging=debugging)
            try:
                dispatcher = Dispatcher(cluster, notify)
                dispatcher.start()
                yield Fleet(codec, dispatcher)
            finally:
                cluster.close()
        finally:
            ray_cluster.disconnect()


def _runtime_of(options: RuntimeOptions, share: Share) -> MakeRuntime:
    """What loads a worker's runtime: as many threads as it has cores, where the user says nothing else."""
    leaves_open = options.num_threads is None and share.num_gpus == 0
    return partial(_load, options, share.num_cpus if leaves_open else None)


def _load(options: RuntimeOptions, num_cpus: int | None, notify: Notify) -> Runtime:
    """Runs on the worker's node, which may have fewer cores than the cluster was told."""
    if num_cpus is not None:
        options = replace(options, num_threads=min(num_cpus, num_cores()))
    return load_runtime(options, notify, lambda _stage, _share: None)


def _known_everywhere(options: RuntimeOptions) -> RuntimeOptions:
    """The same files, from whatever directory a worker runs in."""
    return replace(
        options,
        target=_absolute(options.target),
        draft=_absolute(options.draft) if options.draft else options.draft,
        profile=_absolute(options.profile) if options.profile != "auto" else "auto",
        kv_dir=options.kv_dir.absolute() if options.kv_dir else None,
    )


def _absolute(name: str) -> str:
    """The path of a model or profile that is named by one; other names are the same everywhere."""
    path = Path(name)
    return str(path.absolute()) if os.path.exists(path) and name not in (*OUR_NAMES, "none") else name
