"""The matrix product of every projection, y = activation(x W^T + b) + residual; and the look-up of rows, embedding.

Weights keep the checkpoints' layout [out, in]. The product of one row then reads W's rows contiguously, and a
checkpoint's file can be used in place.
"""

from typing import Any

from .activation import FLOPS_PER_ELEMENT, LINEAR_ACTIVATIONS
from .cost import Cost


def linear(
    x: Any,
    weight: Any,
    bias: Any | None,
    xp: Any,
    out: Any,
    *,
    activation: str | None = None,
    residual: Any | None = None,
) -> Any:
    """y = activation(x W^T + b) + residual.

    Args:
        x: [T, in]
        weight: [out, in]
        bias: [out] or None
        xp: the array module
        out: [T, out], filled and returned
        activation: a name in `LINEAR_ACTIVATIONS`, or None
        residual: [T, out] or None; not modified
    """
    y = xp.matmul(x, weight.T, out=out)  # [T, in] x [in, out] -> [T, out]
    if bias is not None:
        y += bias
    if activation is not None:
        y = LINEAR_ACTIVATIONS[activation](y, xp)
    if residual is not None:
        y += residual
    return y


def linear_cost(
    T: int,
    inputs: int,
    outputs: int,
    weight_bytes: int,
    *,
    bias: bool,
    activation: str | None,
    residual: bool,
    number_bytes: int = 4,
    result_bytes: int = 4,
) -> Cost:
    """2 T in out FLOPs for the product, T out each for bias and residual, and the activation's.

    `weight_bytes` is the size of the stored weight, bias included, read once for any number of rows and not at all for
    none. A number takes `result_bytes` in the result, `number_bytes` in inputs and residual.
    """
    elements = T * outputs
    flops = 2 * elements * inputs + elements * (bias + residual)
    if activation is not None:
        flops += elements * FLOPS_PER_ELEMENT[activation]
    read = number_bytes * (T * inputs + elements * residual) + (weight_bytes if T else 0)
    steps = bias + (activation is not None) + residual  # each reads and writes the result
    return Cost(flops, read, result_bytes * elements, steps * 2 * number_bytes * elements)


def reduce_cost(numbers: int, ranks: int, number_bytes: int = 4) -> Cost:
    """The sum of `numbers` numbers over ranks: the message of each rank is read, one result written; nothing on one."""
    if ranks == 1:
        return Cost(0)
    return Cost((ranks - 1) * numbers, ranks * number_bytes * numbers, number_bytes * numbers)


def embed(
    table: Any,
    ids: Any,
    xp: Any,
    out: Any,
    positions: Any = None,
    position_table: Any = None,
    types: Any = None,
    type_table: Any = None,
    *,
    scale: float = 1.0,
) -> Any:
    """Token embedding: scale * table[ids], plus the rows of positions and of token types if the model learned some.

    Args:
        table: [V, E]
        ids: [T]
        xp: the array module
        out: [T, E], filled and returned
        positions: [T], or None
        position_table: [positions, E], or None
        types: [T], or None
        type_table: [types, E], or None: BERT's segments (Devlin et al., arXiv 1810.04805, section 3)
        scale: factor of the token's vector
    """
    out[...] = table[ids]  # not xp.take: it would copy a column-major table
    if scale != 1:
        out *= scale
    if position_table is not None:
        out += position_table[positions]
    if type_table is not None:
        out += type_table[types]
    return out


def embed_cost(
    T: int,
    E: int,
    row_bytes: int,
    position_row_bytes: int = 0,
    number_bytes: int = 4,
    *,
    type_row_bytes: int = 0,
    scaled: bool = False,
) -> Cost:
    """T E products if scaled, T E additions for positions and for types; T ids and T rows of each table read.

    T E numbers are written. The `..._bytes` are the size of one row of each table; 0: there is no such table.
    """
    result = number_bytes * T * E
    added = [row for row in (position_row_bytes, type_row_bytes) if row]
    read = T * (8 + row_bytes) + sum(T * (8 + row) for row in added)
    steps = len(added) + scaled
    return Cost(steps * T * E, read, result, steps * 2 * result)
