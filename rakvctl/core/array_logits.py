"""Scores as a plain array, for engines whose logits are not torch's."""

from dataclasses import dataclass

import numpy as np

from rakvctl.core.errors import no_numbers


@dataclass(frozen=True, slots=True)
class ArrayLogits:
    """Scores, [num_positions, vocab_size] float32."""

    scores: np.ndarray

    def argmax(self) -> list[int]:
        """The best token of each position; of equal scores the lowest id. Raises RequestError without a best one."""
        best = self.scores.argmax(axis=-1)
        # What is no number counts as the best of all.
        if not np.isfinite(np.take_along_axis(self.scores, best[:, None], axis=-1)).all():
            raise no_numbers()
        tokens: list[int] = best.tolist()
        return tokens

    def margins(self) -> list[float]:
        """The best score of each position less the second best."""
        best = self.scores.argmax(axis=-1)[:, None]
        others = self.scores.copy()
        np.put_along_axis(others, best, -np.inf, axis=-1)
        margins = np.take_along_axis(self.scores, best, axis=-1)[:, 0] - others.max(axis=-1)
        return [float(margin) for margin in margins]

    def numpy(self) -> np.ndarray:
        """The scores."""
        return self.scores
