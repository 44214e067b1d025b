"""Bounds of the sampling parameters, the same for options and for the fields of a JSON line."""

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from rakvctl.core.errors import RakvError


class _Bounds(NamedTuple):
    wanted: str
    contain: Callable[[float], bool]
    hint: str
    kind: type = float


_BOUNDS = {
    "max_new_tokens": _Bounds("an integer from 1 on", lambda value: value >= 1, "leave it out for the default", int),
    "temperature": _Bounds("a number from 0 on", lambda value: value >= 0, "0 is greedy, 2 is very random"),
    "top_p": _Bounds("above 0 and at most 1", lambda value: 0 < value <= 1, "leave it out to draw from all tokens"),
    "top_k": _Bounds("an integer from 0 on", lambda value: value >= 0, "leave it out to draw from all tokens", int),
    "min_p": _Bounds("a number from 0 to 1", lambda value: 0 <= value <= 1, "leave it out to draw from all tokens"),
    "repetition_penalty": _Bounds(
        "a number above 0", lambda value: value > 0, "1 changes nothing, 1.2 makes repetitions much less likely"
    ),
    "seed": _Bounds("an integer from 0 on", lambda value: value >= 0, "leave it out for a new one each time", int),
}
BOUNDED = tuple(_BOUNDS)


def bounded(name: str, value: Any, shown: str, error: type[RakvError]) -> Any:
    """The value of a sampling parameter, as an int or a float. Raises the error, about what is `shown`, for another."""
    bounds = _BOUNDS[name]
    is_number = isinstance(value, bounds.kind | int) and not isinstance(value, bool)
    # The largest float bounds integers too: beyond it they cannot become one.
    if not (is_number and value <= sys.float_info.max and bounds.contain(value)):
        raise error(f"{shown} is not {bounds.wanted}", bounds.hint)
    return bounds.kind(value)
