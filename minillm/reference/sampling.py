"""Sampling of a token from a row of logits and a uniform number.

The filters, in this order, on float32 scores:

    temperature   scores / temperature
    top-k         drop scores below the k-th largest; ties are kept
    top-p         keep the fewest best candidates whose share of the mass reaches p (Holtzman et al. 1904.09751)
    min-p         drop candidates less than min_p times as likely as the best (Nguyen et al. 2407.01082)

A temperature of 0 takes the most likely token, and the filters have no say.

The draw: candidates are ordered by descending score, ties by ascending id. A candidate's weight is
exp(score - best score), in float32; weights are summed in float64. The token is the first candidate at which the
cumulative mass reaches u times the mass of all survivors (inverse CDF).

This is what transformers does, except for *ties* at the edge of top-p: its sort is not stable, here the lower ids
survive.

`sampling_by_sorting.py` is the specification. `sample` chooses the same tokens without sorting: in the order above
every filter keeps a *prefix*, so a filter only lowers the mass by which u is multiplied. The two sum the same weights
in a different order, so they can only differ if u times the mass is within a rounding error of float64 (below 1e-11 of
the mass) of the edge between two candidates.
"""

from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import NumericalError

_BUCKETS = 4096
_BUCKETS_PER_NAT = 128
"""4096 / 128 = 32: candidates less than e**-32 times as likely as the best share the last bucket."""


class Parameters(NamedTuple):
    """Parameters of the draw from one row, as of `sample`."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float


class Draw(NamedTuple):
    """Arguments of the draw from one row, other than its logits."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    sequence: int
    position: int
    """Together with the two fields above, the key of the uniform number (`philox.uniform`)."""


DRAWS = np.dtype(list(zip(Draw._fields, ("f4", "i4", "f8", "f4", "u8", "i4", "i4"), strict=True)))
"""The type of an array of draws, one for each row; a temperature of 0 takes the row's most likely token."""


def scale(logits: NDArray[Any], temperature: float) -> NDArray[Any]:
    """Divide by the temperature (> 0): above 1 flattens the distribution, below 1 sharpens it."""
    return logits if temperature == 1.0 else logits / temperature


def sample(
    logits: NDArray[np.float32],
    uniforms: NDArray[Any],
    *,
    temperature: Any,
    top_k: Any,
    top_p: Any,
    min_p: Any,
    xp: ModuleType,
) -> NDArray[np.int64]:
    """Draw one token from each row. Each parameter is one number for all rows, or [N].

    Args:
        logits: [N, V]; -inf excludes a token. Not modified.
        uniforms: [N] numbers in (0, 1), one per row.
        temperature: >= 0; 0 takes the most likely token, the smallest id among equals.
        top_k: keep the k best; 0 keeps all.
        top_p: in (0, 1]; 1 keeps all.
        min_p: in [0, 1]; 0 keeps all.
        xp: the array module of `logits`.

    Returns:
        token ids [N], int64.

    Raises:
        NumericalError: a row has NaN or +inf, or only -inf.
    """
    check(logits, xp)
    parameters = (uniforms, temperature, top_k, top_p, min_p)
    columns = [np.broadcast_to(parameter, len(logits)).tolist() for parameter in parameters]
    tokens = [
        _sample_row(scale(row, t), u, k, p, m, xp) if np.float32(t) > 0 else int(row.argmax())
        for row, u, t, k, p, m in zip(logits, *columns, strict=True)
    ]
    drawn: NDArray[np.int64] = xp.asarray(tokens, xp.int64)
    return drawn


def _sample_row(scores: NDArray[Any], u: float, top_k: int, top_p: float, min_p: float, xp: ModuleType) -> int:
    """Draw one token from `scores` [V], already divided by the temperature."""
    V = len(scores)
    ids = None
    if 0 < top_k < V:
        ids = xp.flatnonzero(scores >= xp.partition(scores, V - top_k)[V - top_k])
        scores = scores[ids]  # [V] -> [top_k or more]
    ranking = Ranking(scores, xp)
    mass = ranking.total
    if top_p < 1.0:
        _, mass = ranking.reach(top_p * mass)
    if min_p > 0.0:
        mass = min(mass, float(ranking.weights[ranking.weights >= min_p].sum(dtype=xp.float64)))
    index, _ = ranking.reach(u * mass)
    return index if ids is None else int(ids[index])


class Ranking:
    """The candidates of one row, in buckets that are sorted on demand.

    Scores are counted into buckets of 1/128 nat, best bucket first. The masses of the buckets tell which one reaches a
    cumulative mass, and only that bucket is sorted: O(V) for any distribution.
    """

    def __init__(self, scores: NDArray[Any], xp: ModuleType) -> None:
        self.scores, self.xp = scores, xp
        shifted = scores - scores.max()
        self.weights = xp.exp(shifted)
        shifted *= -_BUCKETS_PER_NAT  # in place: a new array costs more than the arithmetic
        self.bucket = xp.minimum(shifted, _BUCKETS - 1, out=shifted).astype(xp.int16)  # equal scores, equal bucket
        self.masses = xp.bincount(self.bucket, weights=self.weights, minlength=_BUCKETS)
        self.cumulative = xp.cumsum(self.masses)
        self.total = float(self.cumulative[-1])

    def reach(self, mass: float) -> tuple[int, float]:
        """Index of the first candidate at which the cumulative mass reaches `mass`, and the mass through it."""
        xp = self.xp
        b = int(xp.count_nonzero(self.cumulative < mass))
        before = float(self.cumulative[b - 1]) if b > 0 else 0.0
        members = xp.flatnonzero(self.bucket == b)
        members = members[xp.argsort(-self.scores[members], kind="stable")]
        through = before + xp.cumsum(self.weights[members], dtype=xp.float64)
        # The bucket's mass was summed in another order: the last member may miss `mass` by a rounding error.
        rank = min(int(xp.count_nonzero(through < mass)), len(members) - 1)
        return int(members[rank]), float(through[rank])


def check(logits: NDArray[Any], xp: ModuleType) -> None:
    """Raise NumericalError for a row whose largest value is not finite."""
    best = logits.max(axis=-1)  # [N, V] -> [N]; NaN if any value is
    for i in xp.flatnonzero(~xp.isfinite(best)):
        raise NumericalError(
            f"row {int(i)} of the logits cannot be sampled from: its largest value is {float(best[i])}, not finite"
        )
