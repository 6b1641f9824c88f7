"""What is done to each row on its own: norms, what follows a product, gates, and looking up embeddings."""

from functools import cache
from typing import Any

import numpy as np
from numba import prange, types
from numpy.typing import NDArray

from ...ops.quantize import LANE, Quantized
from .activations import ACTIVATION_CODES, activate, finish_row
from .compiling import kernel
from .elementary import inner, row_of, with_whole_rows
from .intrinsics import bfloat16_to_float32, float16_to_float32

THREADED = 1 << 16
"""Numbers from which on all threads take a share of the rows: to begin and to end that costs as much as thousands."""

_FLOAT = types.float32
_ZERO, _ONE = np.float32(0), np.float32(1)
_NO_ROW = np.empty(0, np.float32)
_NO_ROWS = np.empty((0, 0), np.float32)


def _stored(element: Any, dimensions: int) -> Any:
    """The type of a parameter: it may be mapped from a file, read-only and at any address."""
    return types.Array(element, dimensions, "C", readonly=True, aligned=False)


# --- layer norm -------------------------------------------------------------------------------------------------------


def layer_norm(
    x: NDArray[np.float32],
    gain: NDArray[np.float32] | None,
    bias: NDArray[np.float32] | None,
    epsilon: float,
    out: NDArray[np.float32],
) -> NDArray[np.float32]:
    """As `ops.layer_norm`. x [T, E] -> out [T, E], both C-contiguous; gain and bias [E] or None."""
    _norm_kernel()(x, _NO_ROW if gain is None else gain, _NO_ROW if bias is None else bias, epsilon, out)
    return out


@cache
def _norm_kernel() -> Any:
    rows, parameter = types.Array(_FLOAT, 2, "C"), _stored(_FLOAT, 1)
    return kernel(types.void(rows, parameter, parameter, _FLOAT, rows))(_norm)


def _norm(x: Any, gain: Any, bias: Any, epsilon: Any, out: Any) -> None:
    T, E = x.shape
    for t in range(T):
        row, y = x[t], out[t]
        total = 0.0  # float64: where the mean is large, its rounding is most of the error
        for i in range(E):
            total += np.float64(row[i])
        mean = total / E
        squares = _ZERO
        for i in range(E):
            y[i] = np.float32(np.float64(row[i]) - mean)
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
    """As `ops.rms_norm`.

    Args:
        x: [T, E] or [T, heads, D]; rows x[t] may lie apart, those of [T, E] are contiguous each
        gain: [E] or [D], or None
        epsilon: added to the mean square
        out: as x, C-contiguous, filled and returned
    """
    D, flat, target = x.shape[-1], x, out
    if x.ndim == 3:
        size = len(x), x.shape[1] * D
        flat, target = with_whole_rows(x).reshape(size), out.reshape(size)  # [T, heads, D] -> [T, heads D]
    _rms_kernel()(flat, D, _NO_ROW if gain is None else gain, epsilon, target)
    return out


@cache
def _rms_kernel() -> Any:
    rows, out = types.Array(_FLOAT, 2, "A"), types.Array(_FLOAT, 2, "C")
    return kernel(types.void(rows, types.int64, _stored(_FLOAT, 1), _FLOAT, out), parallel=True)(_rms_norm)


def _rms_norm(x: Any, D: int, gain: Any, epsilon: Any, out: Any) -> None:
    if out.size < THREADED:
        for t in range(len(out)):
            _rms_norm_row(row_of(x, t), D, gain, epsilon, out[t])
    else:
        for t in prange(len(out)):
            _rms_norm_row(row_of(x, t), D, gain, epsilon, out[t])


@inner
def _rms_norm_row(row: Any, D: int, gain: Any, epsilon: Any, out: Any) -> None:
    """Each D numbers by themselves."""
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


# --- what follows a product -------------------------------------------------------------------------------------------


def finish(
    y: NDArray[np.float32],
    bias: NDArray[np.float32] | None,
    activation: str | None,
    residual: NDArray[np.float32] | None,
) -> NDArray[np.float32]:
    """activation(y + bias) + residual in place, each row brought in once. y, residual [T, out], bias [out]

    Args:
        y: C-contiguous
        bias: or None
        activation: a key of `ACTIVATION_CODES`
        residual: C-contiguous, or None; left as it is
    """
    _finish_kernel()(
        y, _NO_ROW if bias is None else bias, ACTIVATION_CODES[activation], _NO_ROWS if residual is None else residual
    )
    return y


@cache
def _finish_kernel() -> Any:
    rows = types.Array(_FLOAT, 2, "C")
    return kernel(types.void(rows, _stored(_FLOAT, 1), types.int64, rows), parallel=True)(_finish)


def _finish(y: Any, bias: Any, activation: int, residual: Any) -> None:
    if y.size < THREADED:
        for t in range(len(y)):
            finish_row(y[t], bias, activation, residual[t : t + 1])
    else:
        for t in prange(len(y)):
            finish_row(y[t], bias, activation, residual[t : t + 1])


# --- gates ------------------------------------------------------------------------------------------------------------


def glu(x: NDArray[np.float32], activation: str, out: NDArray[np.float32]) -> NDArray[np.float32]:
    """As `ops.glu`. x [T, 2 F] -> out [T, F], both C-contiguous; `activation` is a key of `ACTIVATION_CODES`."""
    _glu_kernel()(x, ACTIVATION_CODES[activation], out)
    return out


@cache
def _glu_kernel() -> Any:
    rows = types.Array(_FLOAT, 2, "C")
    return kernel(types.void(rows, types.int64, rows), parallel=True)(_glu)


def _glu(x: Any, activation: int, out: Any) -> None:
    if out.size < THREADED:
        for t in range(len(out)):
            _glu_row(x[t], activation, out[t])
    else:
        for t in prange(len(out)):
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
        name = "int8" if table.bits == 8 else "int4"
        _embed_kernel(name)(ids, table.values, table.scales.view(np.uint16), table.group, add, out)
    elif table.dtype == np.float16:
        _embed_kernel("float16")(ids, table.view(np.uint16), add, out)
    else:
        _embed_kernel("float32" if table.dtype == np.float32 else "bfloat16")(ids, table, add, out)


@cache
def _embed_kernel(name: str) -> Any:
    ids, out = types.Array(types.int64, 1, "C"), types.Array(_FLOAT, 2, "C")
    plain: dict[str, Any] = {"float32": (_FLOAT, _embed_float32), "float16": (types.uint16, _embed_float16)}
    plain["bfloat16"] = (types.uint16, _embed_bfloat16)
    if name in plain:
        element, function = plain[name]
        return kernel(types.void(ids, _stored(element, 2), types.boolean, out))(function)
    element, quantised = {"int8": (types.int8, _embed_int8), "int4": (types.uint8, _embed_int4)}[name]
    scales = _stored(types.uint16, 2)
    return kernel(types.void(ids, _stored(element, 2), scales, types.int64, types.boolean, out))(quantised)


def _embed_float32(ids: Any, table: Any, add: bool, out: Any) -> None:
    for t in range(len(ids)):
        row, y = table[ids[t]], out[t]
        for i in range(len(y)):
            y[i] = row[i] + (y[i] if add else _ZERO)


def _embed_float16(ids: Any, table: Any, add: bool, out: Any) -> None:
    for t in range(len(ids)):
        row, y = table[ids[t]], out[t]
        for i in range(len(y)):
            y[i] = float16_to_float32(row[i]) + (y[i] if add else _ZERO)


def _embed_bfloat16(ids: Any, table: Any, add: bool, out: Any) -> None:
    for t in range(len(ids)):
        row, y = table[ids[t]], out[t]
        for i in range(len(y)):
            y[i] = bfloat16_to_float32(row[i]) + (y[i] if add else _ZERO)


def _embed_int8(ids: Any, table: Any, scales: Any, group: int, add: bool, out: Any) -> None:
    for t in range(len(ids)):
        row, y = table[ids[t]], out[t]
        for g in range(scales.shape[1]):
            scale = float16_to_float32(scales[ids[t], g])
            for i in range(g * group, min((g + 1) * group, len(y))):
                y[i] = scale * np.float32(row[i]) + (y[i] if add else _ZERO)


def _embed_int4(ids: Any, table: Any, scales: Any, group: int, add: bool, out: Any) -> None:
    for t in range(len(ids)):
        row, y = table[ids[t]], out[t]
        for first in range(0, len(y), LANE):  # 16 bytes: weight j in byte j's low half, weight j + 16 in its high half
            scale = float16_to_float32(scales[ids[t], first // group])
            for j in range(min(LANE, len(y) - first)):
                byte = row[first // 2 + j % (LANE // 2)]
                whole = (byte & 15 if j < LANE // 2 else byte >> 4) - 8
                y[first + j] = scale * np.float32(whole) + (y[first + j] if add else _ZERO)
