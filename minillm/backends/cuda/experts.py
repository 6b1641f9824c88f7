"""Launches the kernels of a mixture of experts: `kernels/cuda/experts.cu`, and products by `gemv_experts.cu`.

No launch depends on which experts were chosen, so the host need not know, and a decode step is recorded.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from ...reference.experts import SOFTMAX, RouterSpec, Routing
from ...reference.quantize import Quantized
from ..storage import Experts
from .integers import integer_constants, integer_shape
from .kernels import NULL, Kernels, or_null, row_stride
from .linear import expert_shape

MOST_EXPERTS = 1024
"""X that the kernels take"""

MOST_GROUPS = 32
"""Groups of experts that the kernels take"""

GROUPED_ROWS = 256
"""Up to so many rows of all experts together they are multiplied in one launch; for more the host launches products of
each expert's own rows, which are wide enough for `gemm.cu`"""

MOST_EXPERT_ROWS = 16
"""Rows of an expert that are multiplied at a time by matrices of 8 and 4 bits"""

MOST_HEAD_ROWS = 16
"""The same of each head, where matrices of heads are multiplied as experts are"""

ROUTE_TOKENS = 4
"""Tokens of a block of `route`"""

Take = Callable[[tuple[int, ...], Any], Any]
"""Gives an array of this shape and type."""


def route(
    kernels: Kernels,
    logits: Any,
    k: int,
    take: Take,
    *,
    normalised: bool,
    bias: Any | None = None,
    spec: RouterSpec = SOFTMAX,
    factors: Any | None = None,
) -> Routing:
    """The k experts of each token and its rows, sorted by expert, as `reference.route`; all int32.

    Args:
        kernels: of any storage type
        logits: [T, X] float32, contiguous, X up to `MOST_EXPERTS`
        k: experts of each token
        take: allocates the results
        normalised: the weights of a token's experts sum to one
        bias: [X] float32, or None
        spec: scores, groups (up to `MOST_GROUPS`) and the factor of the weights
        factors: [X] float32, or None
    """
    assert spec.groups <= MOST_GROUPS, spec
    T, X = logits.shape
    listed = min(X, T * k)
    experts, weights = take((T, k), np.int32), take((T, k), np.float32)
    rows, tokens, starts = take((T, k), np.int32), take((T * k,), np.int32), take((X + 1,), np.int32)
    present = take((listed,), np.int32)
    if T:
        values = 1 << (-(-X // 32) - 1).bit_length()
        sizes = T, X, k, normalised, spec.sigmoid, spec.groups, spec.chosen_groups, spec.group_best
        arrays = experts, weights, logits, or_null(bias), or_null(factors)
        args: tuple[Any, ...] = (*arrays, *map(np.int32, sizes), np.float32(spec.scale))
        kernels.get("experts", "route", VALUES=values)((-(-T // ROUTE_TOKENS),), (32 * ROUTE_TOKENS,), args)
        threads = min(1024, 32 * max(X, -(-T * k // 32)))
        args = (rows, tokens, starts, present, experts, *map(np.int32, (T * k, X, k, listed)))
        kernels.get("experts", "sort_rows")((1,), (threads,), args)
    return Routing(experts, weights, rows, tokens, starts, present)


def multiply(kernels: Kernels, x: Any, experts: Experts, routing: Routing, out: Any, biases: Any | None = None) -> None:
    """Each row's product with its expert's matrix, + its bias, in one launch.

    Args:
        kernels: for the type of x
        x: [T k, in], sorted by expert
        experts: [X, out, in], in one piece
        routing: of `route`
        out: [T k, out], of x's type
        biases: [X, out] float32, or None
    """
    rows, inputs = x.shape
    if not rows:
        return
    T, matrix, outputs = len(routing.weights), experts.whole, out.shape[1]
    arrays = routing.starts, routing.present, or_null(biases)
    numbers = *map(np.int32, (inputs, outputs)), row_stride(x), row_stride(out)
    if isinstance(matrix, Quantized):
        shape = integer_shape(kernels, matrix, min(T, MOST_EXPERT_ROWS), outputs)
        constants, shared = {**shape._asdict(), **integer_constants(matrix)}, shape.shared(matrix)
        kernel = kernels.get("gemv_experts", "experts_mma", shared_mem=shared, **constants)
        grid = -(-outputs // shape.OUTS), len(routing.present)
        values = matrix.values.view(np.uint8)
        args = (out, x, values, *arrays, *numbers, matrix.scales, or_null(matrix.offsets))
        kernel(grid, (shape.threads,), args, shared_mem=shared)
        return
    name, constants, splits, blocks = expert_shape(kernels, T, outputs)
    last: tuple[Any, ...] = (NULL, NULL) if splits is None else (np.int32(splits),)
    grid = blocks, len(routing.present)
    kernel = kernels.get("gemv_experts", name, **constants)
    kernel(grid, (128 if name == "experts_fma" else 256,), (out, x, matrix, *arrays, *numbers, *last))


def combine(kernels: Kernels, y: Any, routing: Routing, residual: Any | None, out: Any) -> None:
    """Each token's weighted sum of its experts' results, + residual.

    Args:
        kernels: for the type of y
        y: [T k, E], contiguous
        routing: of `route`
        residual: [T, E], or None
        out: [T, E], contiguous
    """
    T, k = routing.weights.shape
    if not T:
        return
    E = out.shape[1]
    vectors = -(-E * out.dtype.itemsize // 16)
    threads = min(256, 32 * -(-vectors // 32))
    stride = np.int32(0) if residual is None else row_stride(residual)
    arrays = out, y, routing.weights, routing.rows, or_null(residual)
    args = (*arrays, np.int32(E), np.int32(k), stride, np.int32(len(y)))
    kernels.get("experts", "combine")((T, -(-vectors // threads)), (threads,), args)
