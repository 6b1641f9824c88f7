"""Row-wise operations: norms, the epilogue of a product, gates, and embedding look-up."""

from functools import cache
from typing import Any

import numpy as np
from numba import carray, types
from numpy.typing import NDArray

from ...reference.quantize import LANE, Quantized
from .activations import ACTIVATION_CODES, activate, finish_row
from .arguments import Rows, matrix, number, row_at, share_of, vector
from .compiling import shared_kernel
from .elementary import inner
from .intrinsics import bfloat16_to_float32, float16_to_float32
from .launching import launch, rows_of, shares_of

THREADED = 1 << 16
"""From this size on, all threads take a share of the rows: starting and ending that costs as much as thousands."""

_FLOAT = types.float32
_ZERO, _ONE = np.float32(0), np.float32(1)
_NO_ROW = np.empty(0, np.float32)
_NO_ROWS = np.empty((0, 0), np.float32)
_NO_SCALES = np.empty((1, 0), np.uint16)


def shares_of_rows(out: NDArray[np.float32]) -> int:
    """Number of shares for the rows of `out`; small arrays are one share."""
    return 1 if out.size < THREADED else shares_of(len(out))


# --- layer norm -------------------------------------------------------------------------------------------------------


def layer_norm(
    x: NDArray[np.float32],
    gain: NDArray[np.float32] | None,
    bias: NDArray[np.float32] | None,
    epsilon: float,
    out: NDArray[np.float32],
) -> NDArray[np.float32]:
    """As `reference.layer_norm`. x [T, E] -> out [T, E], both C-contiguous; gain and bias [E] or None."""
    gain, bias = _NO_ROW if gain is None else gain, _NO_ROW if bias is None else bias
    launch(_norm_kernel(), x, gain, bias, float(epsilon), out, shares=shares_of_rows(out))
    return out


@cache
def _norm_kernel() -> int:
    return shared_kernel(_FLOAT)(_norm)


def _norm(arguments: Any, data: Any, share: int, shares: int, worker: int) -> None:
    x, gain, bias = matrix(arguments, 0, np.float32), vector(arguments, 4, np.float32), vector(arguments, 6, np.float32)
    epsilon, out = np.float32(number(arguments[8])), matrix(arguments, 9, np.float32)
    E = x.shape[1]
    first, stop = share_of(len(x), share, shares)
    for t in range(first, stop):
        row, y = x[t], out[t]
        total = 0.0  # float64: where the mean is large, its rounding is most of the error
        for i in range(E):
            total += np.float64(row[i])
        mean = total / E
        for i in range(E):
            y[i] = np.float32(np.float64(row[i]) - mean)
        squares = _ZERO  # in a loop of its own: one that also writes would sum in another order where x and y adjoin
        for i in range(E):
            squares += y[i] * y[i]
        factor = _ONE / np.sqrt(squares / np.float32(E) + epsilon)
        for i in range(E):
            y[i] *= factor
        if len(gain):
            for i in range(E):
                y[i] *= gain[i]
        if len(bias):
            for i in range(E):
                y[i] += bias[i]


def rms_norm(
    x: NDArray[np.float32], gain: NDArray[np.float32] | None, epsilon: float, out: NDArray[np.float32]
) -> NDArray[np.float32]:
    """As `reference.rms_norm`.

    Args:
        x: [T, E] or [T, heads, D]; any stride between x[t], which is contiguous in [T, E]
        gain: [E] or [D], or None
        epsilon: added to the mean square
        out: as x, C-contiguous, filled and returned
    """
    rows, target = (rows_of(x), rows_of(out)) if x.ndim == 3 else (Rows(x), Rows(out))  # [T, heads, D] -> [T, heads D]
    gain = _NO_ROW if gain is None else gain
    launch(_rms_kernel(), target, rows, gain, x.shape[-1], float(epsilon), shares=shares_of_rows(out))
    return out


@cache
def _rms_kernel() -> int:
    return shared_kernel(_FLOAT)(_rms_norm)


def _rms_norm(arguments: Any, data: Any, share: int, shares: int, worker: int) -> None:
    gain, D, epsilon = vector(arguments, 8, np.float32), arguments[10], np.float32(number(arguments[11]))
    first, stop = share_of(arguments[1], share, shares)
    for t in range(first, stop):
        _rms_norm_row(row_at(arguments, 4, t), D, gain, epsilon, row_at(arguments, 0, t))


@inner
def _rms_norm_row(row: Any, D: int, gain: Any, epsilon: Any, out: Any) -> None:
    """Normalise each run of D numbers."""
    for first in range(0, len(row), D):
        x, y = row[first : first + D], out[first : first + D]
        squares = _ZERO
        for i in range(D):
            squares += x[i] * x[i]
        factor = _ONE / np.sqrt(squares / np.float32(D) + epsilon)
        for i in range(D):
            y[i] = x[i] * factor
        if len(gain):
            for i in range(D):
                y[i] *= gain[i]


# --- the epilogue of a product ----------------------------------------------------------------------------------------


def finish(
    y: NDArray[np.float32],
    bias: NDArray[np.float32] | None,
    activation: str | None,
    residual: NDArray[np.float32] | None,
) -> NDArray[np.float32]:
    """activation(y + bias) + residual in place, reading each row once. y, residual [T, out], bias [out]

    Args:
        y: C-contiguous
        bias: or None
        activation: a key of `ACTIVATION_CODES`
        residual: C-contiguous, or None; not changed
    """
    bias, before = _NO_ROW if bias is None else bias, _NO_ROWS if residual is None else residual
    launch(_finish_kernel(), y, bias, ACTIVATION_CODES[activation], before, shares=shares_of_rows(y))
    return y


@cache
def _finish_kernel() -> int:
    return shared_kernel(_FLOAT)(_finish)


def _finish(arguments: Any, data: Any, share: int, shares: int, worker: int) -> None:
    y, bias, activation = matrix(arguments, 0, np.float32), vector(arguments, 4, np.float32), arguments[6]
    residual = matrix(arguments, 7, np.float32)
    first, stop = share_of(len(y), share, shares)
    for t in range(first, stop):
        finish_row(y[t], bias, activation, residual[t : t + 1])


# --- gates ------------------------------------------------------------------------------------------------------------


def glu(x: NDArray[np.float32], activation: str, out: NDArray[np.float32]) -> NDArray[np.float32]:
    """As `reference.glu`. x [T, 2 F] -> out [T, F], both C-contiguous; `activation` is a key of `ACTIVATION_CODES`."""
    launch(_glu_kernel(), x, ACTIVATION_CODES[activation], out, shares=shares_of_rows(out))
    return out


@cache
def _glu_kernel() -> int:
    return shared_kernel(_FLOAT)(_glu)


def _glu(arguments: Any, data: Any, share: int, shares: int, worker: int) -> None:
    x, activation, out = matrix(arguments, 0, np.float32), arguments[4], matrix(arguments, 5, np.float32)
    first, stop = share_of(len(out), share, shares)
    for t in range(first, stop):
        _glu_row(x[t], activation, out[t])


@inner
def _glu_row(x: Any, activation: int, y: Any) -> None:
    F = len(y)
    for i in range(F):
        y[i] = x[i]
    activate(y, activation)
    for i in range(F):
        y[i] *= x[F + i]


# --- embeddings -------------------------------------------------------------------------------------------------------


def embed(
    ids: NDArray[np.int64], table: Any, out: NDArray[np.float32], positions: Any = None, position_table: Any = None
) -> NDArray[np.float32]:
    """table[ids], plus position_table[positions], of tables in any format of weights.

    Args:
        ids: [T]
        table: [V, E]: float32, float16, uint16 (bfloat16) or `Quantized`
        out: [T, E], filled and returned
        positions: [T], or None
        position_table: [positions, E] likewise, or None
    """
    _look_up(ids, table, out, add=False)
    if position_table is not None:
        _look_up(positions, position_table, out, add=True)
    return out


def _look_up(ids: NDArray[np.int64], table: Any, out: NDArray[np.float32], *, add: bool) -> None:
    if isinstance(table, Quantized):
        name, values, scales, group = f"int{table.bits}", table.values, table.scales.view(np.uint16), table.group
    else:
        name = {"float32": "float32", "float16": "float16", "uint16": "bfloat16"}[table.dtype.name]
        values, scales, group = table.view(np.uint16) if name == "float16" else table, _NO_SCALES, 1
    launch(_embed_kernel(name), values, scales, group, ids, add, out, shares=shares_of_rows(out))


@cache
def _embed_kernel(name: str) -> int:
    element, function = {
        "float32": (_FLOAT, _embed_float32),
        "float16": (types.uint16, _embed_float16),
        "bfloat16": (types.uint16, _embed_bfloat16),
        "int8": (types.int8, _embed_int8),
        "int4": (types.uint8, _embed_int4),
    }[name]
    return shared_kernel(element)(function)


@inner
def _operands(arguments: Any, data: Any, share: int, shares: int) -> Any:
    """Decode the arguments: table, its scales, weights per scale; ids, whether to add, out; first row and stop."""
    table, scales = carray(data, (arguments[1], arguments[2])), matrix(arguments, 4, np.uint16)
    ids, out = vector(arguments, 9, np.int64), matrix(arguments, 12, np.float32)
    return table, scales, arguments[8], ids, arguments[11] != 0, out, share_of(len(out), share, shares)


def _embed_float32(arguments: Any, data: Any, share: int, shares: int, worker: int) -> None:
    table, _, _, ids, add, out, (first, stop) = _operands(arguments, data, share, shares)
    for t in range(first, stop):
        row, y = table[ids[t]], out[t]
        for i in range(len(y)):
            y[i] = row[i] + (y[i] if add else _ZERO)


def _embed_float16(arguments: Any, data: Any, share: int, shares: int, worker: int) -> None:
    table, _, _, ids, add, out, (first, stop) = _operands(arguments, data, share, shares)
    for t in range(first, stop):
        row, y = table[ids[t]], out[t]
        for i in range(len(y)):
            y[i] = float16_to_float32(row[i]) + (y[i] if add else _ZERO)


def _embed_bfloat16(arguments: Any, data: Any, share: int, shares: int, worker: int) -> None:
    table, _, _, ids, add, out, (first, stop) = _operands(arguments, data, share, shares)
    for t in range(first, stop):
        row, y = table[ids[t]], out[t]
        for i in range(len(y)):
            y[i] = bfloat16_to_float32(row[i]) + (y[i] if add else _ZERO)


def _embed_int8(arguments: Any, data: Any, share: int, shares: int, worker: int) -> None:
    table, scales, group, ids, add, out, (begin, end) = _operands(arguments, data, share, shares)
    for t in range(begin, end):
        row, y = table[ids[t]], out[t]
        for g in range(scales.shape[1]):
            scale = float16_to_float32(scales[ids[t], g])
            for i in range(g * group, min((g + 1) * group, len(y))):
                y[i] = scale * np.float32(row[i]) + (y[i] if add else _ZERO)


def _embed_int4(arguments: Any, data: Any, share: int, shares: int, worker: int) -> None:
    table, scales, group, ids, add, out, (begin, end) = _operands(arguments, data, share, shares)
    for t in range(begin, end):
        row, y = table[ids[t]], out[t]
        for first in range(0, len(y), LANE):  # 16 bytes: weight j in byte j's low half, weight j + 16 in its high half
            scale = float16_to_float32(scales[ids[t], first // group])
            for j in range(min(LANE, len(y) - first)):
                byte = row[first // 2 + j % (LANE // 2)]
                whole = (byte & 15 if j < LANE // 2 else byte >> 4) - 8
                y[first + j] = scale * np.float32(whole) + (y[first + j] if add else _ZERO)
