"""Pearson's chi-square test, without SciPy."""

import math
from collections.abc import Sequence

import numpy as np


def p_value(observed: Sequence[int] | np.ndarray, expected: Sequence[float] | np.ndarray) -> float:
    """Probability of counts at least this far from `expected`, by the Wilson-Hilferty normal approximation.

    A cell that cannot occur (expected 0) but did gives 0. Expected counts should be 5 or more elsewhere.
    """
    observed, expected = np.asarray(observed, float).ravel(), np.asarray(expected, float).ravel()
    if observed[expected == 0].any():
        return 0.0
    possible = expected > 0
    statistic = float(((observed - expected)[possible] ** 2 / expected[possible]).sum())
    freedom = int(possible.sum()) - 1
    spread = 2 / (9 * freedom)
    z = ((statistic / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(spread)
    return 0.5 * math.erfc(z / math.sqrt(2))
