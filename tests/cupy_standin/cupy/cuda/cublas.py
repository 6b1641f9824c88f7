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
    _multiply(handle, transa, transb, m, n, k, alpha, A, Atype, lda, B, Btype, ldb, beta, C, Ctype, ldc, compute)


def getVersion(handle: int) -> int:  # noqa: N802  CuPy's name
    """Of CUDA 13."""
    return 130_100


class OwnLibrary:
    """The C functions that `minillm/backends/cuda/library.py` calls. A capture takes up their products."""

    def __init__(self) -> None:
        self.workspaces: dict[int, tuple[int, int]] = {}
        self._streams: dict[int, int] = {}

    def cublasCreate_v2(self, handle: Any) -> int:  # noqa: N802  C's name
        """A new handle."""
        handle._obj.value = 1000 + len(self._streams)
        self._streams[handle._obj.value] = -1
        return 0

    def cublasSetMathMode(self, handle: Any, mode: int) -> int:  # noqa: N802  C's name
        """As `setMathMode`."""
        setMathMode(handle.value, mode)
        return 0

    def cublasSetStream_v2(self, handle: Any, stream: Any) -> int:  # noqa: N802  C's name
        """Set the stream, which takes the workspace away."""
        from . import refuse_in_capture

        refuse_in_capture("to set a library's stream")
        self._streams[handle.value] = stream.value or 0
        self.workspaces.pop(handle.value, None)
        return 0

    def cublasSetWorkspace_v2(self, handle: Any, workspace: Any, size: Any) -> int:  # noqa: N802  C's name
        """Set the memory of a handle's products."""
        self.workspaces[handle.value] = workspace.value, size.value
        return 0

    def cublasGemmEx(self, handle: Any, *arguments: Any) -> int:  # noqa: N802  C's name
        """As `gemmEx`, of a handle with a stream and a workspace of its own; now, or when the graph is launched."""
        from . import launch

        assert self._streams[handle.value] >= 0 and handle.value in self.workspaces, "not set up"
        given = [getattr(argument, "value", argument) for argument in arguments]
        given[5], given[12] = (ctypes.addressof(arguments[i]._obj) for i in (5, 12))
        launch(lambda: _multiply(handle.value, *given[:-1]))
        return 0


def _multiply(
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
) -> None:
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
