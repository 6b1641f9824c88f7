"""Samples a token with temperature, top-k, top-p and min-p in a few passes over the vocabulary, without sorting it.

The rule is that of `reference.sampling`, and NumPy computes the weights here too, so the same logits give the same
token. Every filter keeps a prefix of the candidates in their order (by score, then id), so it only lowers the mass that
the uniform number is a fraction of. The candidate at which a mass is reached is found by summing the weights in buckets
by score, best first, and then searching one bucket.
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
_BUCKETS_PER_NAT = np.float32(128)
"""4096 / 128 = 32: candidates less than e**-32 times as likely as the best share the last bucket."""
_FAR = 104.0
"""In nats; candidates further below the best weigh nothing in float32."""
_FEW = 32
"""Up to this many candidates are sorted by insertion."""
_BLOCK = 64
"""Candidates tested together: most blocks have none in the wanted bucket."""


class Sampler:
    """Samples tokens; keeps the memory for one row of the vocabulary from call to call."""

    def __init__(self) -> None:
        self._scores = self._weights = np.empty(0, np.float32)
        self._buckets = np.empty(0, np.int16)
        self._members = np.empty(0, np.int64)
        self._masses = np.empty((2, _BUCKETS))

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
        """One token of each row, as `reference.sample`. logits [N, V], uniforms [N] -> [N]

        Raises:
            NumericalError: a row holds NaN or +inf, or nothing but -inf.
        """
        N, V = logits.shape
        if len(self._scores) != V:
            self._scores, self._weights = np.empty((2, V), np.float32)
            self._buckets, self._members = np.empty(V, np.int16), np.empty(V, np.int64)
        tokens = np.empty(N, np.int64)
        for i in range(N):
            scores = np.divide(logits[i], temperature, out=self._scores)
            best = scores.max()  # NaN if there is any
            if not np.isfinite(best):
                raise NumericalError(
                    f"row {i} of the logits cannot be sampled from: its largest value is {float(best)}, not finite"
                )
            ids = None
            if 0 < top_k < V:
                ids = _best_of(scores, top_k)
                scores = scores[ids]
            weights = np.subtract(scores, best, out=self._weights[: len(scores)])
            np.exp(weights, out=weights)
            index = _choose_kernel()(
                scores, weights, best, float(uniforms[i]), top_p, min_p, self._buckets, self._masses, self._members
            )
            tokens[i] = index if ids is None else ids[index]
        return tokens


def _best_of(scores: NDArray[np.float32], k: int) -> NDArray[np.int64]:
    """Ids, ascending, of the k best scores [V] and of all ties with the last of them; 0 < k < V.

    k of the block maxima, which are scores too, reach the k-th largest maximum. So the k-th largest score is not below
    it, and only the few scores that reach it are searched.
    """
    size = max(1, int(len(scores) ** 0.5))
    blocks = len(scores) // size
    if k > blocks:
        return np.flatnonzero(scores >= np.partition(scores, -k)[-k])
    maxima = scores[: blocks * size].reshape(blocks, size).max(axis=1)  # [V] -> [blocks]
    ids = np.flatnonzero(scores >= np.partition(maxima, -k)[-k])
    found = scores[ids]
    return np.asarray(ids[found >= np.partition(found, -k)[-k]])


@cache
def _choose_kernel() -> Any:
    def array(kind: Any, dimensions: int = 1) -> Any:
        return types.Array(kind, dimensions, "C")

    rows, number = array(types.float32), types.float64
    memory = array(types.int16), array(types.float64, 2), array(types.int64)
    return kernel(types.int64(rows, rows, types.float32, number, number, types.float32, *memory))(_choose)


def _choose(
    scores: Any, weights: Any, best: Any, u: float, top_p: float, min_p: Any, buckets: Any, masses: Any, members: Any
) -> Any:
    """The index at which the fraction u of the surviving mass is reached.

    Args:
        scores: [M]
        weights: exp(score - best), [M]
        best: the largest score
        u: in (0, 1)
        top_p: 1 keeps all
        min_p: 0 keeps all
        buckets: [M or more], to be overwritten
        masses: [2, _BUCKETS], likewise
        members: [M or more], likewise
    """
    coarse, fine = masses
    for i in range(len(scores)):
        buckets[i] = np.int16(min((best - scores[i]) * _BUCKETS_PER_NAT, np.float32(_BUCKETS - 1)))
    coarse[:] = 0
    for i in range(len(scores)):
        coarse[buckets[i]] += weights[i]
    mass = coarse.sum()
    if top_p < 1.0:
        _, mass = _reach(scores, weights, top_p * mass, buckets, coarse, fine, members)
    if min_p > 0:
        mass = min(mass, _mass_reaching(weights, min_p))
    index, _ = _reach(scores, weights, u * mass, buckets, coarse, fine, members)
    return index


@inner
def _mass_reaching(weights: Any, least: Any) -> Any:
    """The mass of the candidates that weigh at least `least`."""
    mass = 0.0
    for i in range(len(weights)):
        mass += np.float64(weights[i]) if weights[i] >= least else 0.0
    return mass


@exact
def _bucket_reaching(masses: Any, before: float, target: float) -> Any:
    """The first bucket with which the mass reaches `target` (else the last of any mass), and the mass before it."""
    found, mass_before = 0, before
    for b in range(_BUCKETS):
        if masses[b] > 0:
            found, mass_before = b, before
            before += masses[b]
            if before >= target:
                break
    return found, mass_before


@exact
def _reach(scores: Any, weights: Any, target: float, buckets: Any, coarse: Any, fine: Any, members: Any) -> Any:
    """Index of the first candidate at which the cumulative mass reaches `target`, and the mass including it."""
    bucket, before = _bucket_reaching(coarse, 0.0, target)
    count = 0
    for first in range(0, len(scores), _BLOCK):
        block = buckets[first : min(first + _BLOCK, len(scores))]
        held = False
        for b in block:
            held |= b == bucket
        if held:
            for i in range(len(block)):
                if block[i] == bucket:
                    members[count] = first + i
                    count += 1
    while count > _FEW:
        kept, before = _narrow(scores, weights, members, count, before, target, fine)
        if kept == count:  # all are equal, and their ids ascend
            break
        count = kept
    else:
        _sort(scores, members, count)
    for j in range(count):
        before += weights[members[j]]
        if before >= target:
            return members[j], before
    return members[count - 1], before  # the sums were taken in another order, and miss `target` by a rounding error


@exact
def _narrow(scores: Any, weights: Any, members: Any, count: int, before: float, target: float, masses: Any) -> Any:
    """Keep the members in the bucket that reaches `target`, of buckets between the highest and the lowest of them.

    Returns:
        number of members kept, at the beginning of `members`; and the mass before them.
    """
    high, low = scores[members[0]], scores[members[0]]
    for j in range(count):
        high, low = max(high, scores[members[j]]), min(low, scores[members[j]])
    if high == low:
        return count, before
    top, last = np.float64(high), np.float64(_BUCKETS - 1)
    per_unit = last / min(top - np.float64(low), _FAR)
    masses[:] = 0
    for j in range(count):
        i = members[j]
        masses[int(min((top - np.float64(scores[i])) * per_unit, last))] += weights[i]
    bucket, before = _bucket_reaching(masses, before, target)
    kept = 0
    for j in range(count):
        i = members[j]
        if int(min((top - np.float64(scores[i])) * per_unit, last)) == bucket:
            members[kept] = i
            kept += 1
    return kept, before


@exact
def _sort(scores: Any, members: Any, count: int) -> None:
    """Sort a few ascending ids by descending score; stable."""
    for j in range(1, count):
        i, k = members[j], j
        while k > 0 and scores[members[k - 1]] < scores[i]:
            members[k] = members[k - 1]
            k -= 1
        members[k] = i
