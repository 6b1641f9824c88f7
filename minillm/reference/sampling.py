"""How one row of logits and one uniform number become a token.

What is drawn from, in this order, on float32 scores:

    temperature   scores / temperature
    top-k         drop what is below the k-th largest score; its equals survive
    top-p         keep the fewest best candidates whose share of the mass reaches p (Holtzman et al. 1904.09751)
    min-p         drop what is less than min_p times as likely as the best (Nguyen et al. 2407.01082)

How it is drawn: the candidates are ordered by score, largest first, equal scores by ascending id. A candidate weighs
exp(score - best score), in float32; weights are added up in float64. The token is the first candidate at which the
cumulative mass reaches u times the mass of all survivors (inverse CDF).

This is what transformers does, with one thing fixed that it leaves open: which of several *equal* scores survive at the
edge of top-p (its sort is not stable; here, the lower ids).

`sample_by_sorting` says this as plainly as possible. `sample` chooses the same tokens without sorting: in the order
above every filter keeps a *prefix*, so all that a filter does to the inverse CDF is to lower the mass that u is a share
of. The two add the same weights in a different order, so they could only differ where u times the mass falls within a
rounding error of float64 (below 1e-11 of the mass) of the edge between two candidates.

`sample_without_replacement` draws several candidates of one row: after each draw the one that was drawn is taken out,
and the next uniform number is a share of the mass that is left.
"""

from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import NumericalError

_BUCKETS = 4096
_BUCKETS_PER_NAT = 128
"""4096 / 128 = 32: what is less than e**-32 as likely as the best shares the last bucket."""


class Draw(NamedTuple):
    """All that decides over the draw from one row beside its logits."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    sequence: int
    position: int
    """With the two before the key of its uniform number (`philox.uniform`)."""


def scale(logits: NDArray[Any], temperature: float) -> NDArray[Any]:
    """Divide by the temperature (> 0): above 1 flattens the distribution, below 1 sharpens it."""
    return logits if temperature == 1.0 else logits / temperature


def keep_top_k(scores: NDArray[Any], k: int, xp: ModuleType) -> NDArray[Any]:
    """Set to -inf, in place, what is below the k-th largest score of its row [N, V]; k = 0 or k >= V keeps all."""
    V = scores.shape[-1]
    if 0 < k < V:
        kth = xp.partition(scores, V - k, axis=-1)[:, V - k, None]  # [N, V] -> [N, 1]
        scores[scores < kth] = -xp.inf
    return scores


def keep_top_p(scores: NDArray[Any], p: float, xp: ModuleType, least: int = 1) -> NDArray[Any]:
    """Set to -inf, in place, all but the shortest prefix of each ordered row [N, V] with a share p of the mass.

    The `least` best are kept in any case.
    """
    if p < 1.0:
        order, cumulative = _order(scores, xp)
        last = xp.count_nonzero(cumulative < p * cumulative[:, -1:], axis=-1)  # [N, V] -> [N]: rank of the last kept
        rows, ranks = xp.nonzero(xp.arange(scores.shape[-1]) > xp.maximum(last, least - 1)[:, None])
        scores[rows, order[rows, ranks]] = -xp.inf
    return scores


def keep_min_p(scores: NDArray[Any], min_p: float, xp: ModuleType, least: int = 1) -> NDArray[Any]:
    """Set to -inf, in place, what is less than `min_p` times as likely as the best of its row [N, V].

    The `least` best, and what equals the last of them, are kept in any case.
    """
    V = scores.shape[-1]
    if min_p > 0.0 and least < V:
        low = xp.exp(scores - scores.max(axis=-1, keepdims=True)) < min_p
        if least > 1:
            low &= scores < xp.partition(scores, V - least, axis=-1)[:, V - least, None]  # [N, V] -> [N, 1]
        scores[low] = -xp.inf
    return scores


def sample_by_sorting(
    logits: NDArray[np.float32],
    uniforms: NDArray[Any],
    *,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    xp: ModuleType,
) -> NDArray[np.int64]:
    """What `sample` is defined to choose: mask, sort each row in full, add up, look up. Same arguments, same result."""
    _check(logits, xp)
    scores = scale(logits, temperature).copy()
    scores = keep_min_p(keep_top_p(keep_top_k(scores, top_k, xp), top_p, xp), min_p, xp)
    order, cumulative = _order(scores, xp)
    mass = uniforms[:, None].astype(xp.float64) * cumulative[:, -1:]
    rank = xp.count_nonzero(cumulative < mass, axis=-1)  # [N, V] -> [N]
    tokens: NDArray[np.int64] = order[xp.arange(len(order)), rank]
    return tokens


def sample(
    logits: NDArray[np.float32],
    uniforms: NDArray[Any],
    *,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    xp: ModuleType,
) -> NDArray[np.int64]:
    """Draw one token from each row.

    Args:
        logits: [N, V]; -inf marks what must not be drawn. Left unchanged.
        uniforms: [N] numbers in (0, 1), one per row.
        temperature: > 0.
        top_k: keep the k best; 0 keeps all.
        top_p: in (0, 1]; 1 keeps all.
        min_p: in [0, 1]; 0 keeps all.
        xp: the array module of `logits`.

    Returns:
        token ids [N], int64.

    Raises:
        NumericalError: a row holds NaN or +inf, or nothing but -inf.
    """
    _check(logits, xp)
    tokens = [
        _sample_row(scale(row, temperature), float(u), top_k, top_p, min_p, xp)
        for row, u in zip(logits, uniforms, strict=True)
    ]
    drawn: NDArray[np.int64] = xp.asarray(tokens, xp.int64)
    return drawn


def sample_without_replacement(scores: NDArray[Any], uniforms: NDArray[Any], xp: ModuleType) -> NDArray[np.int64]:
    """Draw several different candidates, each in proportion to exp(score) among those not drawn yet.

    Once nothing that weighs anything in float32 is left, the best of the rest follow, of equal ones the lower id first.

    Args:
        scores: [V]; -inf marks what must not be drawn while there is anything else. Left unchanged.
        uniforms: [n] numbers in (0, 1), one per draw; n at most V.
        xp: the array module of `scores`.

    Returns:
        ids [n], int64, in the order in which they were drawn.

    Raises:
        NumericalError: the scores hold NaN or +inf, or nothing but -inf.
    """
    _check(scores[None], xp)
    ranking = _Ranking(scores, xp)
    drawn = []
    for u in uniforms:
        drawn.append(ranking.reach(float(u) * ranking.total)[0] if ranking.total > 0.0 else ranking.best())
        ranking.take_out(drawn[-1])
    ids: NDArray[np.int64] = xp.asarray(drawn, xp.int64)
    return ids


def _sample_row(scores: NDArray[Any], u: float, top_k: int, top_p: float, min_p: float, xp: ModuleType) -> int:
    """Draw one token from `scores` [V], scaled by the temperature already."""
    V = len(scores)
    ids = None
    if 0 < top_k < V:
        ids = xp.flatnonzero(scores >= xp.partition(scores, V - top_k)[V - top_k])
        scores = scores[ids]  # [V] -> [top_k or more]
    ranking = _Ranking(scores, xp)
    mass = ranking.total
    if top_p < 1.0:
        _, mass = ranking.reach(top_p * mass)
    if min_p > 0.0:
        mass = min(mass, float(ranking.weights[ranking.weights >= min_p].sum(dtype=xp.float64)))
    index, _ = ranking.reach(u * mass)
    return index if ids is None else int(ids[index])


class _Ranking:
    """The candidates of one row, ordered only where somebody looks.

    Scores are counted into buckets of 1/128 nat, best bucket first. The masses of the buckets say in which of them a
    cumulative mass is reached, and only that bucket is sorted: O(V) whatever the shape of the distribution.
    """

    def __init__(self, scores: NDArray[Any], xp: ModuleType) -> None:
        self.scores, self.xp = scores, xp
        shifted = scores - scores.max()
        self.weights = xp.exp(shifted)
        shifted *= -_BUCKETS_PER_NAT  # in place: fresh pages cost more here than the arithmetic
        self.bucket = xp.minimum(shifted, _BUCKETS - 1, out=shifted).astype(xp.int16)  # equal scores, equal bucket
        self.masses = xp.bincount(self.bucket, weights=self.weights, minlength=_BUCKETS)
        self.cumulative = xp.cumsum(self.masses)
        self.total = float(self.cumulative[-1])

    def reach(self, mass: float) -> tuple[int, float]:
        """Index of the first candidate at which the cumulative mass reaches `mass`, and the mass up to and with it."""
        xp = self.xp
        b = int(xp.count_nonzero(self.cumulative < mass))
        before = float(self.cumulative[b - 1]) if b > 0 else 0.0
        members = xp.flatnonzero(self.bucket == b)
        members = members[xp.argsort(-self.scores[members], kind="stable")]
        through = before + xp.cumsum(self.weights[members], dtype=xp.float64)
        # The bucket's mass was added up in another order: the last member may miss `mass` by a rounding error.
        rank = min(int(xp.count_nonzero(through < mass)), len(members) - 1)
        return int(members[rank]), float(through[rank])

    def take_out(self, index: int) -> None:
        """Go on as if this candidate had never been there."""
        xp, b = self.xp, self.bucket[index]
        self.bucket[index] = -1
        self.masses[b] = self.weights[self.bucket == b].sum(dtype=xp.float64)  # summed anew: an empty one has no rest
        self.cumulative = xp.cumsum(self.masses)
        self.total = float(self.cumulative[-1])

    def best(self) -> int:
        """Index of the best candidate, of equal ones the first."""
        left = self.xp.flatnonzero(self.bucket >= 0)
        return int(left[self.scores[left].argmax()])


def _order(scores: NDArray[Any], xp: ModuleType) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Ids of each row [N, V] by descending score, then ascending id, and the cumulative mass along that order."""
    order = xp.argsort(-scores, axis=-1, kind="stable")
    ordered = xp.take_along_axis(scores, order, axis=-1)
    return order, xp.cumsum(xp.exp(ordered - ordered[:, :1]), axis=-1, dtype=xp.float64)


def _check(logits: NDArray[Any], xp: ModuleType) -> None:
    """Raise NumericalError for a row that is no distribution."""
    best = logits.max(axis=-1)  # [N, V] -> [N]; NaN wins over every number
    for i in xp.flatnonzero(~xp.isfinite(best)):
        raise NumericalError(
            f"row {int(i)} of the logits cannot be sampled from: its largest value is {float(best[i])}, not finite"
        )
