"""Drawing a token: temperature, top-k, top-p and min-p in a few passes over the vocabulary, which is never sorted.

The rule is that of `ops.sampling`, and NumPy computes the weights here too, so the same logits give the same token.
Every filter keeps a prefix of the candidates in their order (by score, then id), so all it does is to lower the mass
of which the uniform number is a share. Where in that order a rank or a mass is reached is found by counting candidates
into buckets by score, the best first, and then looking into one bucket only.
"""

from functools import cache
from typing import Any

import numpy as np
from numba import types
from numpy.typing import NDArray

from ...errors import NumericalError
from .compiling import kernel
from .elementary import exact, inner

_BUCKETS = 4096
_BUCKETS_PER_NAT = 128
"""4096 / 128 = 32: what is less than e**-32 as likely as the best shares the last bucket."""
_FAR = 104.0
"""In nats; what lies further below the best weighs nothing in float32."""
_FEW = 32
"""So many candidates are sorted by insertion."""


class Sampler:
    """Runs `sample`; keeps the memory for one row of the vocabulary from call to call."""

    def __init__(self) -> None:
        self._rows = np.empty((2, 0), np.float32)
        self._members = np.empty(0, np.int64)
        self._histograms = np.empty((3, _BUCKETS))

    def sample(
        self,
        logits: NDArray[np.float32],
        uniforms: NDArray[Any],
        *,
        temperature: float,
        top_k: int,
        top_p: float,
        min_p: float,
    ) -> NDArray[np.int64]:
        """One token of each row, as `ops.sample`. logits [N, V], uniforms [N] -> [N]

        Raises:
            NumericalError: a row holds NaN or +inf, or nothing but -inf.
        """
        N, V = logits.shape
        if len(self._members) != V:
            self._rows, self._members = np.empty((2, V), np.float32), np.empty(V, np.int64)
        scores, weights = self._rows
        tokens = np.empty(N, np.int64)
        for i in range(N):
            np.divide(logits[i], temperature, out=scores)
            best = scores.max()  # NaN wins over every number
            if not np.isfinite(best):
                raise NumericalError(
                    f"row {i} of the logits cannot be sampled from: its largest value is {float(best)}, not finite"
                )
            np.exp(np.subtract(scores, best, out=weights), out=weights)
            tokens[i] = _choose_kernel()(
                self._rows, best, float(uniforms[i]), top_k, top_p, min_p, self._histograms, self._members
            )
        return tokens


@cache
def _choose_kernel() -> Any:
    rows, histograms, members = (
        types.Array(kind, n, "C") for kind, n in ((types.float32, 2), (types.float64, 2), (types.int64, 1))
    )
    number = types.float64
    return kernel(types.int64(rows, types.float32, number, types.int64, number, types.float32, histograms, members))(
        _choose
    )


def _choose(rows: Any, best: Any, u: float, top_k: int, top_p: float, min_p: Any, histograms: Any, members: Any) -> Any:
    """The token at which the share u of the surviving mass is reached.

    Args:
        rows: scores and their weights exp(score - best), [2, V]
        best: the largest score
        u: in (0, 1)
        top_k: 0 keeps all
        top_p: 1 keeps all
        min_p: 0 keeps all
        histograms: [3, _BUCKETS], to be overwritten
        members: [V], to be overwritten
    """
    scores, weights = rows
    masses, counts, finer = histograms
    _count(scores, weights, best, masses, counts)
    mass = masses.sum()
    edge = 0
    if 0 < top_k < len(scores):
        edge, _ = _reach(scores, weights, best, np.float64(top_k), True, counts, finer, members)
        mass = _mass_of(scores, weights, scores[edge])
    if top_p < 1.0:
        _, mass = _reach(scores, weights, best, top_p * mass, False, masses, finer, members)
    if min_p > 0:
        mass = min(mass, _mass_of(weights, weights, min_p))
    token, _ = _reach(scores, weights, best, u * mass, False, masses, finer, members)
    if 0 < top_k < len(scores) and scores[token] < scores[edge]:  # by a rounding error in `mass`
        return edge
    return token


@exact
def _bucket(distance: Any, per_unit: Any) -> Any:
    """Which bucket, of those as wide as 1 / `per_unit`, lies so far below the best."""
    return int(min(distance * per_unit, np.float64(_BUCKETS - 1)))


@exact
def _count(scores: Any, weights: Any, best: Any, masses: Any, counts: Any) -> None:
    """How much mass and how many candidates each bucket of 1 / _BUCKETS_PER_NAT holds."""
    masses[:] = 0
    counts[:] = 0
    for i in range(len(scores)):
        b = _bucket(best - scores[i], np.float32(_BUCKETS_PER_NAT))
        masses[b] += weights[i]
        counts[b] += 1


@inner
def _mass_of(keys: Any, weights: Any, least: Any) -> Any:
    """The mass of the candidates whose key is at least `least`."""
    mass = 0.0
    for i in range(len(keys)):
        mass += np.float64(weights[i]) if keys[i] >= least else 0.0
    return mass


@exact
def _bucket_reaching(histogram: Any, before: float, target: float) -> Any:
    """The first bucket with which the sum reaches `target` (or the last that holds anything), and the sum before it."""
    found, sum_before = 0, before
    for b in range(_BUCKETS):
        if histogram[b] > 0:
            found, sum_before = b, before
            before += histogram[b]
            if before >= target:
                break
    return found, sum_before


@exact
def _reach(
    scores: Any, weights: Any, best: Any, target: float, by_rank: bool, histogram: Any, finer: Any, members: Any
) -> Any:
    """The first candidate in order with which the sum reaches `target`, and the sum up to and with it.

    What is summed is weights or, `by_rank`, candidates; `histogram` is that of the whole row.
    """
    bucket, before = _bucket_reaching(histogram, 0.0, target)
    count = 0
    for i in range(len(scores)):
        if _bucket(best - scores[i], np.float32(_BUCKETS_PER_NAT)) == bucket:
            members[count] = i
            count += 1
    while count > _FEW:
        kept, before = _narrow(scores, weights, members, count, before, target, by_rank, finer)
        if kept == count:  # all are equal, and their ids ascend
            return _walk(weights, members, count, before, target, by_rank)
        count = kept
    for j in range(1, count):
        i, k = members[j], j
        while k > 0 and scores[members[k - 1]] < scores[i]:
            members[k] = members[k - 1]
            k -= 1
        members[k] = i
    return _walk(weights, members, count, before, target, by_rank)


@exact
def _narrow(
    scores: Any, weights: Any, members: Any, count: int, before: float, target: float, by_rank: bool, histogram: Any
) -> Any:
    """Only those members that share a bucket, of buckets between the highest and the lowest of them.

    Returns:
        how many are left, at the beginning of `members`; and the sum before them.
    """
    high, low = scores[members[0]], scores[members[0]]
    for j in range(count):
        high, low = max(high, scores[members[j]]), min(low, scores[members[j]])
    if high == low:
        return count, before
    top = np.float64(high)
    per_unit = (_BUCKETS - 1) / min(top - np.float64(low), _FAR)
    histogram[:] = 0
    for j in range(count):
        i = members[j]
        histogram[_bucket(top - np.float64(scores[i]), per_unit)] += 1.0 if by_rank else np.float64(weights[i])
    bucket, before = _bucket_reaching(histogram, before, target)
    kept = 0
    for j in range(count):
        i = members[j]
        if _bucket(top - np.float64(scores[i]), per_unit) == bucket:
            members[kept] = i
            kept += 1
    return kept, before


@exact
def _walk(weights: Any, members: Any, count: int, before: float, target: float, by_rank: bool) -> Any:
    """Likewise among candidates that are in order."""
    reached = before
    for j in range(count):
        reached += 1.0 if by_rank else weights[members[j]]
        if reached >= target:
            return members[j], reached
    return members[count - 1], reached
