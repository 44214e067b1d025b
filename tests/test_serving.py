"""One prompt that cannot be served costs no other: whatever the engine, the tokenizer or the disk raises."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rakvctl.cli import inputs
from rakvctl.cli.inputs import Prompt
from rakvctl.cli.render import TextWriter, print_note
from rakvctl.cli.servers import LocalServer
from rakvctl.core.errors import ModelError, RakvError, RequestError
from rakvctl.core.serving import Answer, Job, serve
from rakvctl.core.text import TextCodec
from rakvctl.core.types import Completion, Request, SamplingParams
from rakvctl.fleet.events import Task
from rakvctl.fleet.worker import Worker
from tests.fakes import FakeRuntime, LetterTokenizer

SAMPLING = SamplingParams(max_new_tokens=12)
SHARED = tuple(range(20))
# Each begins as the one before, so that all but the first reuse and restore.
PROMPTS = [(*SHARED, *range(number, number + 4)) for number in range(1, 5)]


class Panic(BaseException):
    """As what a panic of the tokenizer's Rust code becomes in Python: no `Exception`."""


ERRORS = [
    ModelError("llama.cpp gives m.gguf no context of 9216 positions", "take less"),
    KeyError("layer"),
    TypeError("unhashable"),
    OSError(5, "Input/output error"),
    MemoryError(),
    RuntimeError("CUDA out of memory"),
    AssertionError(),
    Panic("called `Option::unwrap()` on a `None` value"),
]

POINTS: dict[str, tuple[Callable[[FakeRuntime], object], str]] = {
    "plan": (lambda fakes: fakes.store, "match"),
    "reserve": (lambda fakes: fakes.target.cache, "reserve"),
    "restore": (lambda fakes: fakes.target.cache, "restore"),
    "prefill": (lambda fakes: fakes.target, "forward"),
    "verify": (lambda fakes: fakes.target, "forward"),
    "propose": (lambda fakes: fakes.draft, "forward"),
    "rollback": (lambda fakes: fakes.target.cache, "rollback"),
    "snapshot": (lambda fakes: fakes.target.cache, "snapshot"),
    "insert": (lambda fakes: fakes.store, "insert"),
}
# Which call of the second prompt fails, where it is not the first.
CALLS = {"verify": 3, "propose": 3, "rollback": 2}


class Once:
    """Stands in for a method and fails at one call of it, after a part of its work where it is a pass."""

    def __init__(self, method: Callable[..., Any], error: BaseException, call: int) -> None:
        self._method, self._error, self._left = method, error, call

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        self._left -= 1
        if self._left == 0:
            if self._method.__name__ == "forward":
                self._method(*arguments, **options)  # what it has written is not to be seen again
            raise self._error
        return self._method(*arguments, **options)


def right(prompt: tuple[int, ...]) -> str:
    return FakeRuntime().run("ar", prompt, SAMPLING).text


def texts(answers: list[Answer]) -> list[str | None]:
    return [answer.outcome.text if isinstance(answer.outcome, Completion) else None for answer in answers]


def jobs(prompts: list[tuple[int, ...]]) -> Iterator[Job]:
    return (Job(number, Request(prompt, SAMPLING)) for number, prompt in enumerate(prompts))


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("point", POINTS)
def test_whatever_fails_while_a_prompt_is_served_is_its_error_alone(
    point: str, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    fakes = FakeRuntime()
    server = LocalServer(fakes.runtime("joint-3"), print_note)
    first = list(server.answers(jobs(PROMPTS[:1]), lambda _: None))
    owner_of, name = POINTS[point]
    owner = owner_of(fakes)
    with monkeypatch.context() as patched:
        patched.setattr(owner, name, Once(getattr(owner, name), error, CALLS.get(point, 1)))
        rest = list(server.answers(jobs(PROMPTS[1:]), lambda _: None))
    assert texts([*first, *rest]) == [right(PROMPTS[0]), None, *map(right, PROMPTS[2:])]
    outcome = rest[0].outcome
    assert isinstance(outcome, RequestError)
    assert outcome.message
    assert outcome.hint


def test_an_error_for_users_keeps_its_own_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hint of ours says more than the name of its class."""
    fakes = FakeRuntime()
    monkeypatch.setattr(fakes.target.cache, "reserve", Once(fakes.target.cache.reserve, ERRORS[0], 1))
    outcome = serve(fakes.runtime("kv"), Request(SHARED, SAMPLING))
    assert isinstance(outcome, RequestError)
    assert (outcome.message, outcome.hint) == ("llama.cpp gives m.gguf no context of 9216 positions", "take less")


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_debugging_raises_it(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    fakes = FakeRuntime()
    monkeypatch.setattr(fakes.target, "forward", Once(fakes.target.forward, error, 1))
    with pytest.raises(type(error)):
        serve(fakes.runtime("kv"), Request(SHARED, SAMPLING), debugging=True)


def test_after_a_failure_both_caches_are_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    fakes = FakeRuntime()
    monkeypatch.setattr(fakes.target, "forward", Once(fakes.target.forward, KeyError("layer"), 3))
    assert isinstance(serve(fakes.runtime("joint-3"), Request(SHARED, SAMPLING)), RequestError)
    assert (fakes.target.cache.length, fakes.draft.cache.length) == (0, 0)


def test_a_cache_that_cannot_be_emptied_either_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(length: int) -> None:
        raise RuntimeError("the device is lost")

    fakes = FakeRuntime()
    monkeypatch.setattr(fakes.target.cache, "rollback", fail)
    outcome = serve(fakes.runtime("kv"), Request(SHARED, SAMPLING))
    assert isinstance(outcome, RequestError)
    assert "could not be cleared" in outcome.message
    assert outcome.message.count("the device is lost") == 2


@pytest.mark.parametrize("error", [BrokenPipeError(), OSError(28, "No space left on device"), RakvError("a", "b")])
def test_an_error_of_who_reads_the_text_ends_the_run(error: Exception) -> None:
    """A closed pipe or a full disk is there for all prompts to come."""

    def write(piece: str) -> None:
        raise error

    with pytest.raises(type(error)) as raised:
        list(LocalServer(FakeRuntime().runtime("kv"), print_note).answers(jobs(PROMPTS), write))
    assert raised.value is error


@pytest.mark.parametrize("end", [KeyboardInterrupt, SystemExit])
def test_what_asks_for_an_end_ends_the_run(end: type[BaseException], monkeypatch: pytest.MonkeyPatch) -> None:
    fakes = FakeRuntime()
    monkeypatch.setattr(fakes.target, "forward", Once(fakes.target.forward, end(), 3))
    with pytest.raises(end):
        list(LocalServer(fakes.runtime("joint-3"), print_note).answers(jobs(PROMPTS), lambda _: None))


def test_what_cannot_be_kept_on_disk_costs_no_prompt(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runtime = FakeRuntime().runtime("kv")
    monkeypatch.setattr(runtime, "settle", Once(lambda: None, MemoryError("no room"), 1))
    answers = list(LocalServer(runtime, print_note).answers(jobs(PROMPTS), lambda _: None))
    assert texts(answers) == list(map(right, PROMPTS))
    assert capsys.readouterr().err.count("no room") == 1


def test_what_a_worker_cannot_keep_on_disk_costs_no_prompt(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    runtime = FakeRuntime().runtime("kv")
    monkeypatch.setattr(runtime, "settle", Once(lambda: None, MemoryError("no room"), 1))
    worker = Worker(lambda _notify: runtime, debugging=False)
    worker.load()
    outcome = worker.serve(Task(0, "a", np.asarray(SHARED, dtype=np.int32), SAMPLING, None))
    assert isinstance(outcome, Completion)
    assert "no room" in caplog.text


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_a_tokenizer_that_fails_at_one_prompt_is_its_error_alone(error: BaseException) -> None:
    class Tokenizer(LetterTokenizer):
        def __call__(self, text: str, **options: object) -> Any:
            if text == "bad":
                raise error
            return super().__call__(text, **options)

    codec = TextCodec(Tokenizer(), frozenset())
    prompts = iter([Prompt(text, text, SAMPLING) for text in ("abc", "bad", "def")])
    requests = [job.request for job in inputs.jobs(prompts, codec, chat=False)]
    assert [isinstance(request, RequestError) for request in requests] == [False, True, False]


def test_a_text_that_breaks_off_is_not_run_into_by_the_next(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with (tmp_path / "out").open("w") as stream:
        writer = TextWriter(stream, several=True)
        writer.text("half of")
        writer.failed(1, RequestError("it broke", "see"))
        writer.text("whole\n")
    assert (tmp_path / "out").read_text() == "half of\n\nwhole\n"
    assert "it broke" in capsys.readouterr().err
