"""The one product of cuBLAS that minillm calls, in float32 on the host."""

import ctypes
from typing import Any

import numpy as np

CUBLAS_OP_N, CUBLAS_OP_T = 0, 1
CUBLAS_COMPUTE_32F = 68
CUBLAS_GEMM_DEFAULT_TENSOR_OP = 99
SUMS_IN_32_BITS = 16
"""CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION, which CuPy does not bind"""

_modes: dict[int, int] = {}


def setMathMode(handle: int, mode: int) -> None:  # noqa: N802  CuPy's name
    """Set how a handle's products are summed up."""
    _modes[handle] = mode


def gemmEx(  # noqa: N802  CuPy's name
    handle: int,
    transa: int,
    transb: int,
    m: int,
    n: int,
    k: int,
    alpha: int,
    A: int,
    Atype: int,
    lda: int,
    B: int,
    Btype: int,
    ldb: int,
    beta: int,
    C: int,
    Ctype: int,
    ldc: int,
    compute: int,
    algorithm: int,
) -> None:
    """C = alpha A^T B + beta C, of columns. A [k, m], B [k, n], C [m, n]"""
    from . import refuse_in_capture

    refuse_in_capture("a library call")
    assert _modes.get(handle) == SUMS_IN_32_BITS, "blocks that share a sum would add 16-bit numbers"
    assert (transa, transb, compute) == (CUBLAS_OP_T, CUBLAS_OP_N, CUBLAS_COMPUTE_32F)
    one, zero = (ctypes.c_float.from_address(address).value for address in (alpha, beta))
    assert (one, zero) == (1, 0)
    a, b, c = _columns(A, Atype, k, m, lda), _columns(B, Btype, k, n, ldb), _columns(C, Ctype, m, n, ldc)
    c[...] = a.T.astype(np.float32) @ b.astype(np.float32)


def _columns(address: int, kind: int, rows: int, columns: int, stride: int) -> Any:
    """The matrix of a device, column after column, `stride` numbers apart."""
    from . import LIBRARY_TYPES

    assert stride >= rows
    dtype = np.dtype(LIBRARY_TYPES[kind])
    numbers = stride * (columns - 1) + rows
    memory = (ctypes.c_char * (numbers * dtype.itemsize)).from_address(address)
    flat = np.frombuffer(memory, dtype)
    return np.lib.stride_tricks.as_strided(flat, (rows, columns), (dtype.itemsize, stride * dtype.itemsize))
