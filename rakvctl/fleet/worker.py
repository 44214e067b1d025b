"""A worker: one runtime in a process of its own, on whatever node it finds itself."""

import gc
import logging
import socket
from collections.abc import Callable

from rakvctl.core.errors import RakvError, RequestError
from rakvctl.core.hardware import processor_name
from rakvctl.core.models import Notify
from rakvctl.core.runtime import Runtime
from rakvctl.core.serving import serve, settle
from rakvctl.core.types import Completion
from rakvctl.fleet.events import Task, WorkerInfo

MakeRuntime = Callable[[Notify], Runtime]


class Worker:
    """Serves one prompt after another. What may take long or fail is in `load`, so that making one does not."""

    def __init__(self, make_runtime: MakeRuntime, debugging: bool) -> None:
        """`make_runtime` is called here, with the node's own files, processor and profile."""
        self._make_runtime = make_runtime
        self._debugging = debugging
        self._runtime: Runtime | None = None

    def load(self) -> WorkerInfo | RakvError:
        """Make the runtime; an error for users is returned, as it is the same however often this is tried."""
        notes: list[str] = []
        try:
            self._runtime = self._make_runtime(notes.append)
        except RakvError as error:
            return error
        # What was imported and loaded stays: leave it out of all collections to come.
        gc.collect()
        gc.freeze()
        return WorkerInfo(socket.gethostname(), processor_name(), self._runtime.engine, tuple(notes))

    def serve(self, task: Task) -> Completion | RequestError | None:
        """Serve a prompt; None: this process is not the one that was loaded, since that one has ended."""
        if self._runtime is None:
            return None
        outcome = serve(self._runtime, task.request, debugging=self._debugging)
        # Ray keeps what a worker logs on its node.
        settle(self._runtime, logging.getLogger(__name__).warning, debugging=self._debugging)
        return outcome
