"""What happens in a fleet, told to the dispatcher one after another, and what it asks of a cluster in return."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from rakvctl.core.errors import RakvError, RequestError
from rakvctl.core.seams import EngineInfo
from rakvctl.core.serving import PromptId
from rakvctl.core.types import Completion, Request, SamplingParams


@dataclass(frozen=True, slots=True, eq=False)
class Task:
    """One prompt on its way: the `number`-th of all. `token_ids` int32, a ninth of what a tuple of them takes.

    `group`: the same for prompts that begin alike, None for those too short to be stored.
    """

    number: int
    prompt_id: PromptId
    token_ids: np.ndarray
    sampling: SamplingParams
    group: bytes | None
    is_chat: bool = False

    @property
    def request(self) -> Request:
        """What is to be served."""
        return Request(tuple(self.token_ids.tolist()), self.sampling, self.is_chat)


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """Where a worker runs and on what; `notes` is what its user would have been told there."""

    node: str
    processor: str
    engine: EngineInfo
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Loaded:
    """A worker is ready; `life` counts how often it was started anew."""

    worker: int
    life: int
    info: WorkerInfo


@dataclass(frozen=True, slots=True)
class Served:
    """A prompt has its outcome."""

    worker: int
    life: int
    number: int
    outcome: Completion | RequestError


@dataclass(frozen=True, slots=True)
class Died:
    """A worker's process ended while prompts were sent to it, and is being started anew.

    `was_idle`: it had ended before the first of them reached it.
    """

    worker: int
    life: int
    was_idle: bool = False


@dataclass(frozen=True, slots=True)
class Refused:
    """A worker cannot serve, and starting it anew would not help; `error` says why."""

    worker: int
    life: int
    error: RakvError


@dataclass(frozen=True, slots=True)
class Failed:
    """Nothing can go on: what is no user's fault."""

    error: BaseException


WorkerEvent = Loaded | Served | Died | Refused | Failed


class Cluster(Protocol):
    """Workers, numbered from 0 on. Nothing here waits: what comes of a call is told as an event."""

    @property
    def num_workers(self) -> int: ...

    def start(self, tell: Callable[[WorkerEvent], None]) -> None:
        """From now on events go to `tell`, from any thread."""
        ...

    def load(self, worker: int, life: int) -> None:
        """Load models and profile, again where the process is a new one: Loaded, or Refused."""
        ...

    def serve(self, worker: int, life: int, task: Task) -> None:
        """Serve after all that was sent to the worker before: Served, or Died."""
        ...

    def close(self) -> None:
        """End all workers and leave nothing behind."""
        ...
