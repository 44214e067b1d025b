"""The errors that users see: what is wrong, what to do about it, and the exit code."""

from collections.abc import Iterator
from contextlib import contextmanager


class RakvError(Exception):
    """An error for users. `message` says what is wrong, `hint` what to do."""

    exit_code = 1

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __reduce__(self) -> tuple[type["RakvError"], tuple[str, str]]:
        """How it travels from one process to another."""
        return type(self), (self.message, self.hint)


class DamagedEntryError(Exception):
    """A stored prefix is not as it was written, so the request goes without it."""


def first_line(error: BaseException) -> str:
    """What an exception of somebody else's says, in one line; its kind where it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


class UsageError(RakvError):
    """The command, an option or a combination of options makes no sense."""

    exit_code = 2


class ModelError(RakvError):
    """A model cannot be had, cannot be loaded, or does not fit its draft."""


class RequestError(RakvError):
    """One prompt cannot be served; others can."""


class ProfileError(RakvError):
    """The hardware profile is missing, damaged, or of another machine, pair or configuration."""

    exit_code = 3


@contextmanager
def errors_at(place: str) -> Iterator[None]:
    """Let the errors of a request say where it stands, such as `p.jsonl, line 57`; empty where that is nowhere."""
    try:
        yield
    except RequestError as error:
        if not place:
            raise
        raise RequestError(f"{place}: {error.message}", error.hint) from error


def no_numbers() -> RequestError:
    """The model gives no scores to choose a token by."""
    return RequestError("the model's scores are no numbers", "its weights may be damaged, or too large for its --dtype")
