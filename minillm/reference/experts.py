"""A mixture of experts: for each token a router chooses k of X MLPs, and only those are computed.

    routing = route(x W_router, k)                     softmax over the experts; the k likeliest and their weights
    rows = x[routing.tokens]                           each token k times, sorted by expert
    hidden = glu(linear_experts(rows, gate_up))        each used expert's matrix is read once, for all of its rows; it
                                                       may have a bias
    y = combine(linear_experts(hidden, down), routing) each token's weighted sum of its k results

Shazeer et al., arXiv 1701.06538; with the softmax before the choice, as here, Fedus et al., arXiv 2101.03961. Scores
may be sigmoids instead, and the choice be corrected by a bias and limited to groups (`RouterSpec`). Sorting by expert
turns the sparse product into a dense one for each expert (a grouped GEMM: Gale et al., arXiv 2211.15841).
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

from .cost import Cost

INDEX_BYTES = 8
"""Bytes of an index of an expert, a token or a row"""


@dataclass(frozen=True)
class RouterSpec:
    """How a router's logits become scores, and scores a choice (DeepSeek-AI, arXiv 2412.19437, 2.1.2 and 2.1.3).

    A bias of each expert, where there is one, is added to its score for the choice alone. With several groups of
    experts, those count whose best two have the largest sum, or the largest best one (arXiv 2405.04434, 2.2.2).
    """

    sigmoid: bool = False
    """The score of an expert is sigmoid(logit), by itself; else its share of the softmax"""
    groups: int = 1
    """Groups of X / groups experts each, in their order"""
    chosen_groups: int = 1
    """Groups whose experts can be chosen"""
    group_best: int = 2
    """Experts of a group whose scores' sum ranks it: the best two, or the best one"""
    scale: float = 1.0
    """Factor of the weights"""


SOFTMAX = RouterSpec()


class Routing(NamedTuple):
    """The experts chosen for T tokens: T k rows, sorted by expert and then by token."""

    experts: Any
    """[T, k]: each token's experts, likeliest first"""
    weights: Any
    """[T, k] float32: each choice's weight in the token's sum"""
    rows: Any
    """[T, k]: the row of each choice"""
    tokens: Any
    """[T k]: the token of each row"""
    starts: Any
    """[X + 1]: expert e has the rows starts[e] : starts[e + 1]"""
    present: Any = None
    """Numbers of the experts that have rows, then -1; only on a backend that reads them on its device"""

    @property
    def used(self) -> float:
        """Number of experts that some token chose; its expectation if the routing has no numbers."""
        return int((self.starts[1:] > self.starts[:-1]).sum())


def route(
    logits: Any,
    k: int,
    xp: Any,
    *,
    normalised: bool,
    bias: Any | None = None,
    spec: RouterSpec = SOFTMAX,
    factors: Any | None = None,
) -> Routing:
    """Choose the k likeliest experts of each token; the first among equals.

    Args:
        logits: [T, X] float32, not modified
        k: experts of each token
        xp: the array module
        normalised: the weights of a token's k experts sum to one; else they are their scores among all X
        bias: added to the scores for the choice, [X] float32, or None
        spec: scores, groups and the factor of the weights
        factors: a factor of each expert's weight, [X] float32, or None (Gemma 4, after the weights are normalised)
    """
    T, X = logits.shape
    if spec.sigmoid:
        scores = 1 / (1 + xp.exp(-logits))
    else:
        scores = xp.exp(logits - logits.max(axis=1, keepdims=True))
        scores /= scores.sum(axis=1, keepdims=True)
    ranked = logits if bias is None else scores + bias
    if spec.groups > 1:
        ranked = _within_groups(scores if bias is None else ranked, spec, xp)
    chosen = xp.argsort(-ranked, axis=1, kind="stable")[:, :k]  # [T, X] -> [T, k]
    weights = xp.take_along_axis(scores, chosen, axis=1)  # [T, X] -> [T, k]
    if normalised:
        weights /= weights.sum(axis=1, keepdims=True) + LEAST_SUM
    if spec.scale != 1:
        weights *= xp.float32(spec.scale)
    if factors is not None:
        weights *= xp.take(factors, chosen)
    by_expert = chosen.ravel()  # [T, k] -> [T k]
    order = xp.argsort(by_expert, kind="stable")
    rows = xp.empty_like(order)
    rows[order] = xp.arange(T * k)
    starts = xp.zeros(X + 1, order.dtype)
    starts[1:] = xp.cumsum(xp.bincount(by_expert, minlength=X))
    return Routing(chosen, weights, rows.reshape(T, k), order // k, starts)


LEAST_SUM = 1e-20
"""Added to the sum of a token's scores, which may all be zero"""


def _within_groups(ranked: Any, spec: RouterSpec, xp: Any) -> Any:
    """Minus infinity for experts outside of each token's best groups. [T, X] -> [T, X]"""
    T, X = ranked.shape
    by_group = ranked.reshape(T, spec.groups, -1)  # [T, X] -> [T, groups, X / groups]
    sums = xp.sort(by_group, axis=2)[:, :, -spec.group_best :].sum(axis=2)  # -> [T, groups]
    best = xp.argsort(-sums, axis=1, kind="stable")[:, : spec.chosen_groups]
    counts = xp.zeros(sums.shape, bool)
    counts[xp.arange(T)[:, None], best] = True
    return xp.where(counts[:, :, None], by_group, -xp.inf).astype(ranked.dtype).reshape(T, X)


def route_cost(
    T: int,
    X: int,
    k: int,
    *,
    normalised: bool,
    biased: bool = False,
    spec: RouterSpec = SOFTMAX,
    by_factors: bool = False,
) -> Cost:
    """Softmax's four FLOPs for each logit (difference, exponential, sum, division), or a sigmoid's three.

    One for each bias, and one for each group's sum; two for each weight normalised, and one for each factor. It reads
    the logits, biases and experts' factors; it writes each choice's expert, weight, row and token, and each expert's
    start.
    """
    flops = (3 if spec.sigmoid else 4) * T * X + T * X * biased + 2 * T * k * normalised
    flops += T * spec.groups * (spec.groups > 1) + T * k * ((spec.scale != 1) + by_factors)
    return Cost(flops, 4 * (T * X + X * (biased + by_factors)), T * k * (3 * INDEX_BYTES + 4) + INDEX_BYTES * (X + 1))


def linear_experts(
    x: Any, matrix_of: Callable[[int], Any], starts: Any, xp: Any, out: Any, biases: Any | None = None
) -> Any:
    """Each row's product with its expert's matrix, y = x W_e^T + b_e.

    Args:
        x: [T k, in], sorted by expert
        matrix_of: the matrix [out, in] of an expert's number; called for those that have rows
        starts: [X + 1], a `Routing`'s starts in the host's memory
        xp: the array module
        out: [T k, out], filled and returned
        biases: [X, out], or None
    """
    for expert, (first, stop) in enumerate(pairwise(starts)):
        if first < stop:
            xp.matmul(x[first:stop], matrix_of(expert).T, out=out[first:stop])  # [n, in] x [in, out] -> [n, out]
            if biases is not None:
                out[first:stop] += biases[expert]
    return out


def linear_experts_cost(
    rows: int, inputs: int, outputs: int, expert_bytes: int, used: float, number_bytes: int = 4, *, bias: bool = False
) -> Cost:
    """2 in out FLOPs for each row, whatever its expert; only the `used` experts' matrices are read, once each.

    With a bias, out more for each row: it reads and writes each result once more if it is not fused.

    Args:
        rows: T k
        inputs: input width of each expert
        outputs: output width of each expert
        expert_bytes: size of one expert's stored matrix and bias
        used: experts that have rows, or their expected number
        number_bytes: size of an activation
        bias: each expert has one
    """
    read, result = number_bytes * rows * inputs + round(used * expert_bytes), number_bytes * rows * outputs
    return Cost(rows * outputs * (2 * inputs + bias), read, result, 2 * result * bias)


def combine(y: Any, routing: Routing, residual: Any | None, xp: Any, out: Any) -> Any:
    """Each token's weighted sum of its experts' results, likeliest first, then + residual.

    Args:
        y: [T k, E], sorted by expert
        routing: routing of the T tokens
        residual: [T, E] or None; not modified
        xp: the array module
        out: [T, E], filled and returned
    """
    out[...] = 0
    for j in range(routing.weights.shape[1]):
        out += routing.weights[:, j, None] * y[routing.rows[:, j]]  # [T k, E] -> [T, E]
    if residual is not None:
        out += residual
    return out


def combine_cost(T: int, E: int, k: int, *, residual: bool, number_bytes: int = 4) -> Cost:
    """k products and sums for each result, and one sum with a residual; rows, weights and their places are read."""
    results = T * E
    read = number_bytes * results * (k + residual) + T * k * (INDEX_BYTES + 4)
    saved = 2 * number_bytes * results * (k + residual)  # writing and reading each product, and the sum
    return Cost(results * (2 * k + residual), read, number_bytes * results, saved)


def expected_experts(T: int, X: int, k: int) -> float:
    """The expected number of experts that T tokens use, if each chooses k of X at random: X (1 - (1 - k / X)^T)."""
    return float(X * (1 - (1 - k / X) ** T))
