"""Several candidates of one row of scores, drawn without replacement, as beam sampling draws its beams.

Each draw removes its candidate, and the next uniform number applies to the remaining mass.
"""

from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .sampling import Ranking, check


def sample_without_replacement(scores: NDArray[Any], uniforms: NDArray[Any], xp: ModuleType) -> NDArray[np.int64]:
    """Draw several distinct candidates, each in proportion to exp(score) among those not drawn yet.

    Once all remaining weights are 0 in float32, the rest follow by descending score, ties by ascending id.

    Args:
        scores: [V]; -inf excludes a candidate while others are left. Not modified.
        uniforms: [n] numbers in (0, 1), one per draw; n at most V.
        xp: the array module of `scores`.

    Returns:
        ids [n], int64, in the order in which they were drawn.

    Raises:
        NumericalError: the scores have NaN or +inf, or only -inf.
    """
    check(scores[None], xp)
    ranking = ShrinkingRanking(scores, xp)
    drawn = []
    for u in uniforms:
        drawn.append(ranking.reach(float(u) * ranking.total)[0] if ranking.total > 0.0 else ranking.best())
        ranking.take_out(drawn[-1])
    ids: NDArray[np.int64] = xp.asarray(drawn, xp.int64)
    return ids


class ShrinkingRanking(Ranking):
    """The candidates of one row that have not been drawn yet."""

    def take_out(self, index: int) -> None:
        """Remove a candidate."""
        xp, b = self.xp, self.bucket[index]
        self.bucket[index] = -1
        self.masses[b] = self.weights[self.bucket == b].sum(dtype=xp.float64)  # subtraction would leave a residue
        self.cumulative = xp.cumsum(self.masses)
        self.total = float(self.cumulative[-1])

    def best(self) -> int:
        """Index of the best candidate; the first of ties."""
        left = self.xp.flatnonzero(self.bucket >= 0)
        return int(left[self.scores[left].argmax()])
