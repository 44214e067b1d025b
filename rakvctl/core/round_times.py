"""What rounds take in use. A profile errs by a few percent, which is as much as the widths of a pass differ by."""

# What a profile says of a width counts as so many rounds; of later ones about the last so many count.
_PRIOR_ROUNDS, _MOST_ROUNDS = 8, 24
# Over so many rounds the pace is averaged: other programs come and go.
_PACE_ROUNDS = 16
# A round that took longer than expected by more than this counts as one that took so much longer, and likewise a
# shorter one: now and then one takes several times as long, for reasons of its own.
_MOST_SURPRISE = 1.25


class RoundTimes:
    """How much longer or shorter rounds of each width take than a profile says, against those of other widths.

    Without this, a width whose time a profile has too low by chance would be chosen for it, again and again. What slows
    all rounds down alike is the pace, and changes no factor.
    """

    def __init__(self) -> None:
        self._pace: float | None = None
        self._factors: dict[int, tuple[float, int]] = {}

    def factor(self, width: int) -> float:
        """What to multiply the profile's time of a pass over so many positions by; 1 where nothing was seen yet."""
        return self._factors.get(width, (1.0, 0))[0]

    def observe(self, width: int, expected_ms: float, actual_ms: float) -> None:
        """Learn from one round; `expected_ms` is the profile's own time. A clock that stood still tells nothing."""
        if actual_ms <= 0:
            return
        factor, num_rounds = self._factors.get(width, (1.0, 0))
        ratio = actual_ms / expected_ms
        pace = self._pace or ratio / factor
        surprise = min(max(ratio / (pace * factor), 1 / _MOST_SURPRISE), _MOST_SURPRISE) - 1.0
        self._pace = pace * (1.0 + surprise / _PACE_ROUNDS)
        num_rounds = min(num_rounds + 1, _MOST_ROUNDS)
        self._factors[width] = factor * (1.0 + surprise / (_PRIOR_ROUNDS + num_rounds)), num_rounds
