"""Tensor maps: by which the tensor memory accelerator of sm_90 finds boxes of a matrix (`kernels/cuda/tma.cuh`).

A map is 128 bytes that the driver fills, and an argument that a launch passes by value: an array of no dimensions,
which CuPy copies, and a recorded pass keeps. It names an address, so there is one for each place that a matrix lies in;
they are kept, since passes repeat.
"""

import ctypes
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...errors import DeviceError

DRIVER = "libcuda.so.1"
"""The driver's library"""

ARCHITECTURE = "90"

MAP_BYTES, ALIGNMENT = 128, 64
NUMBER = 2
"""Bytes of a number: 16 bits of any type, for they are only copied"""
DEPTH = 64
"""Numbers along memory in a box: 128 bytes, the width of the swizzle"""
PIECE = 16
"""Addresses and strides are multiples of so many bytes"""
RUN = 8
"""Outputs side by side that a lane of `gemm_tma` has of four parts of a tile, two of each"""

UINT16, NO_INTERLEAVE, SWIZZLE_128, PROMOTION_256, ZEROS = 1, 0, 3, 3, 0
"""CUtensorMapDataType, -Interleave, -Swizzle, -L2promotion and -FloatOOBfill of cuda.h"""

Map = NDArray[np.void]


class Tensor(NamedTuple):
    """Numbers of 16 bits in device memory, and the box of them that a copy takes; the first dimension along memory."""

    address: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    """Bytes, of all dimensions but the first"""
    box: tuple[int, ...]

    @property
    def fits(self) -> bool:
        """Whether the accelerator can read it."""
        aligned = not any(number % PIECE for number in (self.address, *self.strides))
        return aligned and all(self.sizes) and max(self.sizes) < 1 << 32 and max(self.strides) < 1 << 40


def check_architecture(architecture: str) -> None:
    """Refuse a GPU on which `gemm_tma` does not run.

    Raises:
        DeviceError: its compute capability is not 9.0.
    """
    if architecture != ARCHITECTURE:
        raise DeviceError(
            f"MINILLM_CUDA_TMA=1 needs a GPU of compute capability 9.0 (H100, H200); this one has "
            f"{architecture[:-1]}.{architecture[-1]}: leave it unset"
        )


def encode_by_driver(tensor: Tensor) -> Map:
    """The map of a tensor, by the driver.

    Raises:
        DeviceError: the driver has no such maps, or refuses this one.
    """
    rank = len(tensor.sizes)
    made = aligned_map()
    try:
        call = ctypes.CDLL(DRIVER).cuTensorMapEncodeTiled
    except (OSError, AttributeError) as error:
        raise DeviceError(
            f"MINILLM_CUDA_TMA=1 needs a driver with cuTensorMapEncodeTiled ({error}): leave it unset"
        ) from None
    code = call(
        ctypes.c_void_p(made.ctypes.data),
        ctypes.c_int(UINT16),
        ctypes.c_uint(rank),
        ctypes.c_void_p(tensor.address),
        (ctypes.c_uint64 * rank)(*tensor.sizes),
        (ctypes.c_uint64 * (rank - 1))(*tensor.strides),
        (ctypes.c_uint * rank)(*tensor.box),
        (ctypes.c_uint * rank)(*(1,) * rank),
        *map(ctypes.c_int, (NO_INTERLEAVE, SWIZZLE_128, PROMOTION_256, ZEROS)),
    )
    if code:
        raise DeviceError(f"the driver refuses {tensor} (CUresult {code}): leave MINILLM_CUDA_TMA unset")
    return made


encode = encode_by_driver
"""Makes maps; a stand-in for CuPy has its own"""


def aligned_map() -> Map:
    """A map that is not filled, at an address that the driver takes. []"""
    room = np.zeros(MAP_BYTES + ALIGNMENT, np.uint8)
    start = -room.ctypes.data % ALIGNMENT
    made: Map = room[start : start + MAP_BYTES].view(f"V{MAP_BYTES}").reshape(())
    return made


class TensorMaps:
    """The maps of a device's matrices, made when first asked for."""

    def __init__(self, address: Callable[[Any], int], made: Callable[[Tensor], Map] | None = None) -> None:
        """`address` gives that of an array's first element; `made` makes a map, `encode` where it is None."""
        self._address = address
        self._encode = lru_cache(maxsize=8192)(made or encode)

    def of_rows(self, x: Any, rows: int) -> Map | None:
        """The map of x [T, in], whose box has `rows` rows and DEPTH columns; None if it cannot be read so."""
        (T, inputs), stride = x.shape, x.strides[0]
        return self._of(Tensor(self._address(x), (inputs, T), (stride,), (DEPTH, rows)))

    def of_outputs(self, weight: Any, outputs: int) -> Map | None:
        """The map of W [out, in] for tiles of `outputs`, whose box is one of four parts of a tile; else None.

        Part j has outputs 2j and 2j + 1 of each 8: so four parts one after the other give a lane, which has two columns
        of each 8, 8 outputs side by side. Dimensions: in, 2, parts, eights.
        """
        (all_outputs, inputs), row = weight.shape, weight.strides[0]
        if all_outputs % RUN:
            return None
        sizes, strides = (inputs, 2, RUN // 2, all_outputs // RUN), (row, 2 * row, RUN * row)
        return self._of(Tensor(self._address(weight), sizes, strides, (DEPTH, 2, 1, outputs // RUN)))

    def _of(self, tensor: Tensor) -> Map | None:
        return self._encode(tensor) if tensor.fits else None
