"""A stream of prompts over the workers of a cluster: answers come in input order, each exactly once."""

import queue
import threading
from collections import Counter, OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from rakvctl.core.errors import RakvError, RequestError
from rakvctl.core.models import Notify
from rakvctl.core.prefixes import bucket_digest
from rakvctl.core.serving import Answer, Job
from rakvctl.core.types import BUCKET_TOKENS, Completion
from rakvctl.fleet.events import Cluster, Died, Failed, Loaded, Refused, Served, Task, WorkerEvent, WorkerInfo
from rakvctl.fleet.line import Line
from rakvctl.fleet.router import Router

# So many prompts a worker are read ahead: enough for groups to gather, and little memory for any file.
READ_AHEAD = 64
# A prompt that has ended so many workers is not tried again.
MAX_DEATHS = 2
# After so long without a ready worker the user hears of it.
_PATIENCE_SECONDS = 30.0
# A worker has one prompt waiting behind the one it serves, and more where they are so short that the way there counts.
_MIN_IN_FLIGHT, _MAX_IN_FLIGHT, _IN_FLIGHT_MS = 2, 16, 50.0


@dataclass(frozen=True, slots=True)
class _Read:
    """A job from the input, its number counted from 0 on."""

    number: int
    job: Job


@dataclass(frozen=True, slots=True)
class _InputEnded:
    """So many jobs were read; `error`: what ended it early."""

    num_jobs: int
    error: BaseException | None


class _Interrupted:
    """The user wants an end."""


_Event = WorkerEvent | _Read | _InputEnded | _Interrupted


@dataclass(slots=True)
class _Worker:
    """What the dispatcher knows of a worker; `in_flight`: sent and not answered, in the order of sending."""

    life: int = 0
    is_loaded: bool = False
    is_out: bool = False
    in_flight: OrderedDict[int, Task] = field(default_factory=OrderedDict)
    mean_ms: float = _IN_FLIGHT_MS

    @property
    def depth(self) -> int:
        """How many prompts to have in flight."""
        return max(_MIN_IN_FLIGHT, min(_MAX_IN_FLIGHT, 1 + int(_IN_FLIGHT_MS / max(self.mean_ms, 1e-3))))


class Dispatcher:
    """Reads ahead, routes, sends, and puts the answers back in line. One for each run."""

    def __init__(
        self, cluster: Cluster, notify: Notify, *, by_group: bool = True, read_ahead: int = READ_AHEAD
    ) -> None:
        """`read_ahead`: how many prompts a worker are read before the first of them is answered."""
        self._cluster = cluster
        self._notify = notify
        self._router: Router[Task] = Router(cluster.num_workers, by_group=by_group)
        self._workers = [_Worker() for _ in range(cluster.num_workers)]
        self._idle: set[int] = set()
        self._events: queue.SimpleQueue[_Event] = queue.SimpleQueue()
        self._line = Line(read_ahead * cluster.num_workers)
        self._deaths = Counter[int]()
        self._ended: _InputEnded | None = None
        self._notes: set[str] = set()
        self._refusals: list[str] = []
        self._has_waited = False
        self.infos: dict[int, WorkerInfo] = {}

    def interrupt(self) -> None:
        """End early: `answers` yields what is done and raises KeyboardInterrupt. A signal's handler may call this."""
        self._events.put(_Interrupted())

    def start(self) -> None:
        """Have all workers load, and wait for the first that is ready. Raises RakvError where none can be."""
        self._cluster.start(self._events.put)
        for worker in range(self._cluster.num_workers):
            self._cluster.load(worker, 0)
        while not self.infos:
            try:
                self._handle(self._events.get(timeout=None if self._has_waited else _PATIENCE_SECONDS))
            except queue.Empty:
                self._has_waited = True
                self._notify("still no worker is ready: models are being loaded, or others have the cluster's cores")

    def answers(self, jobs: Iterator[Job]) -> Iterator[Answer]:
        """The answer to each job, in their order, as they become known; once the workers are started.

        Raises what reading `jobs` raises, after the answers to all before it, and RakvError where no worker is left.
        """
        threading.Thread(target=self._read, args=(jobs,), name="reader", daemon=True).start()
        try:
            while self._ended is None or self._line.num_left < self._ended.num_jobs:
                self._handle(self._events.get())
                yield from self._line.leave()
        except KeyboardInterrupt:
            yield from self._line.leave_all()
            raise
        if self._ended.error is not None:
            raise self._ended.error

    def _read(self, jobs: Iterator[Job]) -> None:
        """Read the input in a thread of its own: a pipe may have nothing while answers come."""
        number, error = 0, None
        try:
            self._line.wait_for_place()
            for job in jobs:
                self._events.put(_Read(number, job))
                number += 1
                self._line.wait_for_place()
        except BaseException as raised:  # told to the thread that everybody listens to
            error = raised
        self._events.put(_InputEnded(number, error))

    def _handle(self, event: _Event) -> None:
        match event:
            case Failed():
                raise event.error
            case _Interrupted():
                raise KeyboardInterrupt
            case _InputEnded():
                self._ended = event
            case _Read():
                self._accept(event.number, event.job)
            case _ if event.life != self._workers[event.worker].life:
                pass  # of a process that has been given up
            case Loaded():
                self._greet(event)
            case Served():
                self._take_outcome(event)
            case Died():
                self._start_anew(event)
            case Refused():
                self._give_up(event.worker, event.error)

    def _accept(self, number: int, job: Job) -> None:
        if isinstance(job.request, RequestError):
            self._line.put(number, Answer(job.prompt_id, job.request))
            return
        ids = np.asarray(job.request.prompt_token_ids, dtype=np.int32)
        group = bucket_digest("", ids) if len(ids) >= BUCKET_TOKENS else None
        task = Task(number, job.prompt_id, ids, job.request.sampling, group, job.request.is_chat)
        home = self._router.add(task)
        self._feed(home)
        if self._idle and self._router.num_waiting:
            self._feed(min(self._idle, key=lambda number: len(self._workers[number].in_flight)))

    def _feed(self, number: int) -> None:
        """Send a worker as much as keeps it busy; others' prompts only where it would run dry."""
        worker = self._workers[number]
        while worker.is_loaded and len(worker.in_flight) < worker.depth:
            task = self._router.take(number, may_steal=len(worker.in_flight) < _MIN_IN_FLIGHT)
            if task is None:
                break
            worker.in_flight[task.number] = task
            self._cluster.serve(number, worker.life, task)
        if worker.is_loaded and len(worker.in_flight) < _MIN_IN_FLIGHT:
            self._idle.add(number)
        else:
            self._idle.discard(number)

    def _greet(self, event: Loaded) -> None:
        self.infos[event.worker] = event.info
        for note in event.info.notes:
            if note not in self._notes:  # all of a node would say the same
                self._notes.add(note)
                self._notify(f"{event.info.node}: {note}")
        self._tell_refusals()
        self._workers[event.worker].is_loaded = True
        self._feed(event.worker)

    def _take_outcome(self, event: Served) -> None:
        worker = self._workers[event.worker]
        task = worker.in_flight.pop(event.number)
        if isinstance(event.outcome, Completion):
            worker.mean_ms += (event.outcome.total_ms - worker.mean_ms) / 8
        self._finish(task, event.outcome, event.worker)
        self._feed(event.worker)

    def _finish(self, task: Task, outcome: Completion | RequestError, worker: int) -> None:
        self._deaths.pop(task.number, None)
        self._line.put(task.number, Answer(task.prompt_id, outcome, worker))

    def _start_anew(self, event: Died) -> None:
        """Run what was in flight elsewhere; the first of it was being served, and may be the reason."""
        worker = self._workers[event.worker]
        worker.life += 1
        worker.is_loaded = False
        self._idle.discard(event.worker)
        tasks = list(worker.in_flight.values())
        worker.in_flight.clear()
        self._notify(f"{self._name(event.worker)} died; what it was to serve runs again")
        if not event.was_idle:
            self._deaths[tasks[0].number] += 1
            if self._deaths[tasks[0].number] >= MAX_DEATHS:
                self._finish(tasks.pop(0), _poisonous(), event.worker)
        self._cluster.load(event.worker, worker.life)
        self._feed(self._router.put_back(event.worker, tasks))
        self._feed_idle()

    def _feed_idle(self) -> None:
        for number in list(self._idle):
            self._feed(number)

    def _give_up(self, number: int, error: RakvError) -> None:
        """Go on without a worker, as long as there are others."""
        self._workers[number].is_out = True
        self._idle.discard(number)
        if all(worker.is_out for worker in self._workers):
            raise error
        self._refusals.append(f"{self._name(number)} cannot serve: {error.message}; {error.hint}")
        self._tell_refusals()
        self._router.close(number)
        self._feed_idle()

    def _tell_refusals(self) -> None:
        """While no worker has been ready, all may have the same to say, and then it is said once, as an error."""
        if self.infos:
            for refusal in self._refusals:
                self._notify(refusal)
            self._refusals.clear()

    def _name(self, number: int) -> str:
        info = self.infos.get(number)
        return f"worker {number} on {info.node}" if info else f"worker {number}"


def _poisonous() -> RequestError:
    return RequestError(f"{MAX_DEATHS} workers died while serving it", "run it alone, without --ray, to see why")
