"""cuBLAS by a handle of our own, whose products a CUDA graph may hold.

CuPy sets the stream of its handle before each call, and refuses that while a stream is captured. Here stream and
workspace are set once, so that a product is nothing but launches: legal in a capture, with a workspace that is never
freed before the graph. The workspace is the handle's alone: products of this backend use it one after the other, in
stream order, recorded or not, and so cuBLAS chooses the same kernels for both.

Source: NVIDIA's cuBLAS documentation (2.1.4 to 2.1.8, cublasSetWorkspace; "CUDA Graphs Support"). The calls are tested
on a stand-in; no GPU has run them yet.
"""

import ctypes
from collections.abc import Callable
from typing import Any

from ...errors import DeviceError

WORKSPACE_BYTES = 32 << 20
"""As cuBLAS recommends for Hopper"""

TYPES = {"float32": 0, "float16": 2, "bfloat16": 14}
"""Name of a dtype -> cudaDataType of library_types.h"""

TRANSPOSED, PLAIN = 1, 0
"""CUBLAS_OP_T, CUBLAS_OP_N"""

COMPUTE_32F, DEFAULT_TENSOR_OP = 68, 99

SUMS_IN_32_BITS = 16
"""CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION of cublas_api.h, which CuPy does not bind. Without it blocks that
share a sum of 16-bit products may add their parts in 16 bits, which overflow"""


def load(version: int) -> Any:
    """The library's C functions; `version` is the major one, that CuPy has loaded."""
    return ctypes.CDLL(f"libcublas.so.{version}")


class OwnHandle:
    """A handle of cuBLAS with a stream and a workspace that do not change."""

    def __init__(self, functions: Any, stream: int, workspace: int, size: int) -> None:
        """Set up a handle on the current device.

        Args:
            functions: of `load`
            stream: a pointer
            workspace: address of memory on the device, which outlives the handle and all graphs
            size: its bytes

        Raises:
            DeviceError: the library refuses a call.
        """
        self._functions, self._handle = functions, ctypes.c_void_p()
        one, zero = ctypes.c_float(1), ctypes.c_float(0)
        self._one, self._zero = one, zero  # of a product, and of what `out` held before
        self._call("cublasCreate_v2", ctypes.byref(self._handle))
        self._call("cublasSetMathMode", self._handle, SUMS_IN_32_BITS)
        self._call("cublasSetStream_v2", self._handle, ctypes.c_void_p(stream))  # first: it resets the workspace
        self._call("cublasSetWorkspace_v2", self._handle, ctypes.c_void_p(workspace), ctypes.c_size_t(size))

    def multiply(self, x: Any, weight: Any, out: Any, address: Callable[[Any], int]) -> None:
        """out = x W^T, of x [T, in], W [out, in] and out [T, out]; the rows of x and out may be parts of longer ones.

        cuBLAS stores columns one after the other: to it, x is [in, T], W is [in, out], and out = W^T x is [out, T].

        Raises:
            DeviceError: the library refuses the call.
        """
        (rows, inputs), outputs, size, kind = x.shape, len(weight), x.dtype.itemsize, TYPES[x.dtype.name]
        self._call(
            "cublasGemmEx",
            self._handle,
            *(TRANSPOSED, PLAIN, outputs, rows, inputs),
            ctypes.byref(self._one),
            *(ctypes.c_void_p(address(weight)), kind, inputs),
            *(ctypes.c_void_p(address(x)), kind, x.strides[0] // size),
            ctypes.byref(self._zero),
            *(ctypes.c_void_p(address(out)), kind, out.strides[0] // size),
            *(COMPUTE_32F, DEFAULT_TENSOR_OP),
        )

    def _call(self, name: str, *arguments: Any) -> None:
        if status := getattr(self._functions, name)(*arguments):
            raise DeviceError(f"cuBLAS refuses {name} (status {status}): leave MINILLM_CUDA_PROMPTS unset")
