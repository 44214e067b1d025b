"""Who serves the prompts of `generate`: a runtime in this process, or the workers of a cluster."""

import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

from rakvctl.cli import render
from rakvctl.cli.page import counted
from rakvctl.core.models import Notify
from rakvctl.core.runtime import Runtime
from rakvctl.core.seams import EngineInfo
from rakvctl.core.serving import Answer, Job, serve, settle
from rakvctl.core.text import TextCodec
from rakvctl.fleet.fleet import Fleet


class Server(Protocol):
    """Serves prompts in their order."""

    @property
    def codec(self) -> TextCodec: ...

    @property
    def places(self) -> Mapping[int | None, str]:
        """What each worker runs on, in words; this process is None."""
        ...

    def answers(self, jobs: Iterator[Job], on_text: Callable[[str], None]) -> Iterator[Answer]:
        """The answer to each job; `on_text` gets the text of a completion before it comes."""
        ...


class LocalServer:
    """This process; text comes piece by piece."""

    def __init__(self, runtime: Runtime, notify: Notify) -> None:
        """`notify` hears of what could not be kept for later processes."""
        self._runtime = runtime
        self._notify = notify

    @property
    def codec(self) -> TextCodec:
        """The target's tokenizer."""
        return self._runtime.codec

    @property
    def places(self) -> dict[int | None, str]:
        """The engine."""
        return {None: _engine(self._runtime.engine)}

    def answers(self, jobs: Iterator[Job], on_text: Callable[[str], None]) -> Iterator[Answer]:
        """One after another; what an answer's reader need not wait for is done after it was taken."""
        debugging = render.debugging()
        for job in jobs:
            yield Answer(job.prompt_id, serve(self._runtime, job.request, on_text, debugging=debugging))
            settle(self._runtime, self._notify, debugging=debugging)


class FleetServer:
    """Workers; text comes whole."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    @property
    def codec(self) -> TextCodec:
        """The target's tokenizer."""
        return self._fleet.codec

    @property
    def places(self) -> dict[int | None, str]:
        """Node, processor and engine of each worker that was ready."""
        return {
            worker: f"{info.node}: {info.processor}; {_engine(info.engine)}"
            for worker, info in sorted(self._fleet.infos.items())
        }

    def answers(self, jobs: Iterator[Job], on_text: Callable[[str], None]) -> Iterator[Answer]:
        """As they are done, in the order of the jobs; Ctrl-C ends that after all that is done."""
        with _on_interrupt(self._fleet.interrupt):
            yield from self._fleet.answers(jobs, on_text)


def _engine(info: EngineInfo) -> str:
    threads = counted(info.num_threads, "thread")
    return f"{info.backend}; {info.dtype} on {info.device}, {threads}; {info.versions}"


@contextmanager
def _on_interrupt(interrupt: Callable[[], None]) -> Iterator[None]:
    """Call it at the first Ctrl-C instead of raising wherever the program happens to be; a second one raises."""

    def handle(_signal: int, _frame: object) -> None:
        signal.signal(signal.SIGINT, before)
        interrupt()

    before = signal.getsignal(signal.SIGINT)
    if before is not signal.SIG_IGN:  # as in the background of a shell's script
        signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
