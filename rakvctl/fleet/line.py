"""Answers put back in the order of their prompts, of which only so many are on their way at once."""

import threading
from collections.abc import Iterator

from rakvctl.core.serving import Answer


class Line:
    """Places by number, from 0 on: taken by whoever reads the input, freed as the answers leave in order."""

    def __init__(self, num_places: int) -> None:
        """`num_places`: how many prompts may be read before the first of them is answered."""
        self._room = threading.Semaphore(num_places)
        self._answers: dict[int, Answer] = {}
        self.num_left = 0

    def wait_for_place(self) -> None:
        """Wait, in the thread that reads, until one more prompt may be on its way."""
        self._room.acquire()

    def put(self, number: int, answer: Answer) -> None:
        """The answer to the prompt of this number."""
        self._answers[number] = answer

    def leave(self) -> Iterator[Answer]:
        """The answers whose turn it is."""
        while self.num_left in self._answers:
            yield self._answers.pop(self.num_left)
            self.num_left += 1
            self._room.release()

    def leave_all(self) -> Iterator[Answer]:
        """All others too, where it ends early: those before them will not come."""
        for number in sorted(self._answers):
            yield self._answers.pop(number)
