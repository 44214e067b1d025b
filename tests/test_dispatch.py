"""A stream of prompts over workers: each answered once, in order, whatever happens to the workers.

The workers are threads with toy models; `test_cli_ray` has processes and Ray.
"""

import queue
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from rakvctl.core.errors import ModelError, RakvError, RequestError
from rakvctl.core.models import Notify
from rakvctl.core.runtime import Runtime
from rakvctl.core.serving import Answer, Job
from rakvctl.core.types import Completion, Request, SamplingParams
from rakvctl.fleet.dispatch import Dispatcher
from rakvctl.fleet.events import Died, Failed, Loaded, Refused, Served, Task, WorkerEvent, WorkerInfo
from rakvctl.fleet.worker import Worker
from tests.fakes import FakeRuntime

SAMPLING = SamplingParams(max_new_tokens=6)


def runtime(notify: Notify) -> Runtime:
    notify("a toy")
    return FakeRuntime().runtime("kv")


@dataclass
class Threads:
    """A cluster of threads. `poison`: prompts that end whoever serves them; `refuse`: workers that cannot load.

    `dies_idle`: workers that end unnoticed once, before their first prompt.
    """

    num_workers: int
    poison: frozenset[int] = frozenset()
    refuse: frozenset[int] = frozenset()
    dies_idle: frozenset[int] = frozenset()
    kills: Counter[int] = field(default_factory=Counter)
    make_runtime: Callable[[Notify], Runtime] = runtime
    num_served: Counter[int] = field(default_factory=Counter)
    calls: list[queue.SimpleQueue[tuple[int, Task | None]]] = field(default_factory=list)
    closed: bool = False

    def start(self, tell: Callable[[WorkerEvent], None]) -> None:
        self.tell = tell
        for worker in range(self.num_workers):
            self.calls.append(queue.SimpleQueue())
            threading.Thread(target=self._work, args=(worker,), daemon=True).start()

    def load(self, worker: int, life: int) -> None:
        self.calls[worker].put((life, None))

    def serve(self, worker: int, life: int, task: Task) -> None:
        self.calls[worker].put((life, task))

    def close(self) -> None:
        self.closed = True

    def _work(self, number: int) -> None:
        present, worker = -1, Worker(self.make_runtime, debugging=False)
        while not self.closed:
            life, task = self.calls[number].get()
            if task is None:
                present, worker = life, Worker(self.make_runtime, debugging=False)
                result = worker.load()
                self._tell_loaded(number, life, result)
                if number in self.dies_idle and life == 0:
                    worker = Worker(self.make_runtime, debugging=False)
            elif life != present or task.number in self.poison or self.kills[task.number]:
                self.kills[task.number] -= life == present and self.kills[task.number] > 0
                present = -1
                self.tell(Died(number, life))
            else:
                outcome = worker.serve(task)
                self.num_served[number] += 1
                self.tell(
                    Died(number, life, was_idle=True) if outcome is None else Served(number, life, task.number, outcome)
                )

    def _tell_loaded(self, number: int, life: int, result: WorkerInfo | RakvError) -> None:
        if number in self.refuse:
            self.tell(Refused(number, life, ModelError(f"no model on {number}", "put it there")))
        elif isinstance(result, WorkerInfo):
            self.tell(Loaded(number, life, result))


def prompts(count: int, num_prefixes: int = 0, seed: int = 0) -> list[tuple[int, ...]]:
    """Token ids: `num_prefixes` different beginnings of 20, and ends of their own; without any, all different."""
    numbers = random.Random(seed)
    starts = [tuple(numbers.randrange(32) for _ in range(20)) for _ in range(num_prefixes)]
    return [
        (numbers.choice(starts) if starts else ()) + tuple(numbers.randrange(32) for _ in range(6))
        for _ in range(count)
    ]


def jobs(texts: list[tuple[int, ...]]) -> Iterator[Job]:
    for number, ids in enumerate(texts):
        yield Job(f"p{number}", Request(ids, SAMPLING))


def expected(texts: list[tuple[int, ...]]) -> list[str]:
    alone = FakeRuntime().runtime("ar")
    return [alone.run(Request(ids, SAMPLING)).text for ids in texts]


def started(cluster: Threads, notify: Notify = lambda _: None, **options: Any) -> Dispatcher:
    dispatcher = Dispatcher(cluster, notify, **options)
    dispatcher.start()
    return dispatcher


def run(cluster: Threads, texts: list[tuple[int, ...]], notes: list[str] | None = None) -> list[Answer]:
    answers = list(started(cluster, (notes if notes is not None else []).append).answers(jobs(texts)))
    cluster.close()
    assert [answer.prompt_id for answer in answers] == [f"p{number}" for number in range(len(texts))]
    return answers


def texts_of(answers: list[Answer]) -> list[str | None]:
    return [answer.outcome.text if isinstance(answer.outcome, Completion) else None for answer in answers]


def num_hits(answers: list[Answer]) -> int:
    return sum(isinstance(answer.outcome, Completion) and answer.outcome.num_matched_tokens > 0 for answer in answers)


@pytest.mark.parametrize("num_workers", [1, 3])
def test_answers_are_those_of_one_process_in_order(num_workers: int) -> None:
    texts = prompts(200, num_prefixes=7)
    cluster = Threads(num_workers)
    assert texts_of(run(cluster, texts)) == expected(texts)
    assert len(cluster.num_served) == num_workers


def test_no_prompts_need_no_answers() -> None:
    assert run(Threads(2), []) == []


def test_prefixes_are_found_as_often_as_in_one_process_and_less_often_anywhere() -> None:
    """Of 600 prompts 580 begin like an earlier one; sent anywhere, each of four workers must learn each prefix."""
    texts = prompts(600, num_prefixes=20)
    alone = FakeRuntime().runtime("kv")
    in_one_process = sum(alone.run(Request(ids, SAMPLING)).num_matched_tokens > 0 for ids in texts)
    assert in_one_process == 580
    assert num_hits(run(Threads(4), texts)) >= 0.95 * in_one_process
    anywhere = Threads(4)
    dealt = list(started(anywhere, by_group=False).answers(jobs(texts)))
    anywhere.close()
    assert num_hits(dealt) < 0.92 * in_one_process


def test_a_prompt_that_cannot_be_read_or_served_is_an_error_in_its_place() -> None:
    def mixed() -> Iterator[Job]:
        yield Job("a", Request((1, 2), SAMPLING))
        yield Job("b", RequestError("bad line", "mend it"))
        yield Job("c", Request((3,) * 40, SAMPLING))
        yield Job("d", Request((4, 5), SAMPLING))

    cluster = Threads(2, make_runtime=lambda _: FakeRuntime(target_positions=30).runtime("ar"))
    answers = list(started(cluster).answers(mixed()))
    assert [answer.prompt_id for answer in answers] == ["a", "b", "c", "d"]
    errors = [answer.outcome.message for answer in answers if isinstance(answer.outcome, RequestError)]
    assert errors == ["bad line", "the prompt has 40 tokens, the model room for 30 with at least one new token"]


def test_prompts_of_a_worker_that_dies_are_served_once_and_rightly() -> None:
    texts = prompts(300, num_prefixes=5)
    victims = random.Random(1).sample(range(300), 20)
    notes: list[str] = []
    answers = run(Threads(3, kills=Counter(victims)), texts, notes)
    assert texts_of(answers) == expected(texts)
    assert sum("died" in note for note in notes) == 20


def test_a_single_worker_that_dies_goes_on() -> None:
    texts = prompts(50)
    assert texts_of(run(Threads(1, kills=Counter([0, 10, 49])), texts)) == expected(texts)


def test_a_prompt_that_ends_two_workers_is_an_error_and_its_neighbours_are_not() -> None:
    texts = prompts(60)
    answers = run(Threads(3, poison=frozenset([11, 12, 40])), texts)
    failed = [number for number, answer in enumerate(answers) if isinstance(answer.outcome, RequestError)]
    assert failed == [11, 12, 40]
    outcome = answers[11].outcome
    assert isinstance(outcome, RequestError)
    assert outcome.message == "2 workers died while serving it"


def test_a_worker_that_ended_unnoticed_is_nobodys_fault() -> None:
    """Whatever prompt is sent to it first did not end it: even one that had ended another worker is tried again."""
    texts = prompts(30)
    answers = run(Threads(1, dies_idle=frozenset([0]), kills=Counter([0])), texts)
    assert texts_of(answers) == expected(texts)


def test_a_worker_that_cannot_load_is_gone_without_and_none_left_is_an_error() -> None:
    texts, notes = prompts(40), list[str]()
    assert texts_of(run(Threads(3, refuse=frozenset([0, 2])), texts, notes)) == expected(texts)
    assert sum("cannot serve: no model on" in note for note in notes) == 2
    with pytest.raises(ModelError, match="no model on"):
        started(Threads(2, refuse=frozenset([0, 1])))


def test_what_workers_of_a_node_would_all_say_is_said_once() -> None:
    notes: list[str] = []
    run(Threads(3), prompts(9), notes)
    assert [note.partition(": ")[2] for note in notes] == ["a toy"]


def test_a_wait_for_the_first_worker_is_explained_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where others have all cores of the cluster, which may take hours."""
    monkeypatch.setattr("rakvctl.fleet.dispatch._PATIENCE_SECONDS", 0.05)

    def slow(_: Notify) -> Runtime:
        time.sleep(0.5)
        return FakeRuntime().runtime("kv")

    notes: list[str] = []
    cluster = Threads(2, make_runtime=slow)
    run(cluster, prompts(4), notes)
    assert [note for note in notes if "still no worker is ready" in note] == notes[:1]


def test_what_nobody_foresaw_is_raised() -> None:
    class Broken(Threads):
        def serve(self, worker: int, life: int, task: Task) -> None:
            self.tell(Failed(TypeError("a bug")))

    with pytest.raises(TypeError, match="a bug"):
        run(Broken(2), prompts(3))


def test_an_input_that_breaks_off_is_an_error_after_the_answers_to_what_came() -> None:
    def broken() -> Iterator[Job]:
        yield from jobs(prompts(5))
        raise RakvError("cannot read p.jsonl", "check the path")

    answers: list[Answer] = []
    with pytest.raises(RakvError, match=r"cannot read p\.jsonl"):
        answers.extend(started(Threads(2)).answers(broken()))
    assert [answer.prompt_id for answer in answers] == [f"p{number}" for number in range(5)]


def test_an_answer_does_not_wait_for_the_next_prompt() -> None:
    """Somebody may read it before he knows what to ask next."""
    answered = threading.Event()

    def conversation() -> Iterator[Job]:
        for job in jobs(prompts(3)):
            yield job
            assert answered.wait(30)
            answered.clear()

    for _ in started(Threads(2)).answers(conversation()):
        answered.set()


def test_only_so_much_is_read_ahead() -> None:
    """A file of any size streams through the same memory."""
    num_read = 0

    def counted() -> Iterator[Job]:
        nonlocal num_read
        for job in jobs(prompts(500)):
            num_read += 1
            yield job

    dispatcher = started(Threads(2), read_ahead=8)
    for num_answered, _ in enumerate(dispatcher.answers(counted())):
        assert num_read <= num_answered + 2 * 8 + 1
    assert num_read == 500


def test_an_interrupt_gives_what_is_done_and_ends() -> None:
    """The first prompt never ends, those after it are answered nevertheless."""
    never = threading.Event()

    class Stuck(Worker):
        def serve(self, task: Task) -> Completion | RequestError | None:
            if task.number == 0:
                never.wait()
            return super().serve(task)

    class Hanging(Threads):
        def _work(self, number: int) -> None:
            worker = Stuck(self.make_runtime, debugging=False)
            while True:
                life, task = self.calls[number].get()
                if task is None:
                    self._tell_loaded(number, life, worker.load())
                else:
                    outcome = worker.serve(task)
                    assert outcome is not None
                    self.num_served[number] += 1
                    self.tell(Served(number, life, task.number, outcome))

    cluster = Hanging(2)
    dispatcher = started(cluster)

    def interrupt_when_served() -> None:
        while cluster.num_served.total() < 10:
            time.sleep(0.01)
        dispatcher.interrupt()

    threading.Thread(target=interrupt_when_served, daemon=True).start()
    answers: list[Answer] = []
    with pytest.raises(KeyboardInterrupt):
        answers.extend(dispatcher.answers(jobs(prompts(12))))
    numbers = [int(str(answer.prompt_id)[1:]) for answer in answers]
    assert len(numbers) >= 9
    assert 0 not in numbers
    assert numbers == sorted(numbers)
