"""What kernels are made of: exp that the compiler can vectorise, stored numbers as float32, rows as plain arrays."""

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from numba import types
from numba.core import cgutils
from numba.extending import overload

from .compiling import FASTMATH
from .intrinsics import FLOAT, INT32, bfloat16_to_float32, float32_to_bfloat16, intrinsic

inner: Callable[[Callable[..., Any]], Any] = numba.njit(
    fastmath=FASTMATH, error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True
)
"""For functions that only kernels call: compiled into them."""
exact: Callable[[Callable[..., Any]], Any] = numba.njit(
    fastmath={"contract"}, error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True
)
"""Likewise, where sums must be taken in the order in which they are written."""

_LOG2_E = np.float32(1.4426950408889634)
_ROUNDER = np.float32(1.5 * 2**23)  # added and taken away again, it leaves the nearest whole number
_LN_2_HIGH, _LN_2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)
_C2, _C3, _C4 = np.float32(5.0000001201e-1), np.float32(1.6666665459e-1), np.float32(4.1665795894e-2)
_C5, _C6, _C7 = np.float32(8.3334519073e-3), np.float32(1.3981999507e-3), np.float32(1.9875691500e-4)
_LOWEST = np.float32(-87.33)
_ZERO, _ONE, _MOST = np.float32(0), np.float32(1), np.float32(127)


@intrinsic
def _power_of_two(typing_context: Any, rounded: Any) -> Any:
    """2**n as float32 of a float32 `_ROUNDER + n`, whose lowest bits are n."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        exponent = builder.shl(builder.bitcast(args[0], INT32), INT32(23))
        return builder.bitcast(builder.add(exponent, INT32(0x3F800000)), FLOAT)

    return types.float32(types.float32), generate


@exact
def exp(x: Any) -> Any:
    """e**x of a float32 up to 88, to 1e-7 of its value; 0 below -87.33, NaN of NaN.

    x = n ln 2 + r, and e**r by the polynomial of Cephes' expf (Moshier). The library's exp would be called for one
    number at a time; these few additions and products run for a whole vector.
    """
    rounded = x * _LOG2_E + _ROUNDER
    n = rounded - _ROUNDER
    r = x - n * _LN_2_HIGH - n * _LN_2_LOW
    series = ((((_C7 * r + _C6) * r + _C5) * r + _C4) * r + _C3) * r + _C2
    y = (series * (r * r) + r + _ONE) * _power_of_two(rounded)
    return _ZERO if x < _LOWEST else y


def widen(x: Any) -> Any:
    """A stored number as float32: float32 itself, int8, or bfloat16 as its bits in uint16. For kernels only."""
    raise NotImplementedError


@overload(widen)  # type: ignore[untyped-decorator]
def _widen(x: Any) -> Any:
    def from_bfloat16(x: Any) -> Any:
        return bfloat16_to_float32(x)

    def from_number(x: Any) -> Any:
        return np.float32(x)

    return from_bfloat16 if x == types.uint16 else from_number


def scale_at(scales: Any, page: int, head: int, offset: int) -> Any:
    """scales[page, head, offset]; 1 where `scales` is None, which the compiler leaves out. For kernels only."""
    raise NotImplementedError


@overload(scale_at)  # type: ignore[untyped-decorator]
def _scale_at(scales: Any, page: int, head: int, offset: int) -> Any:
    def one(scales: Any, page: int, head: int, offset: int) -> Any:
        return _ONE

    def stored(scales: Any, page: int, head: int, offset: int) -> Any:
        return scales[page, head, offset]

    return one if scales == types.none else stored


def store_vector(x: Any, pages: Any, scales: Any, page: int, head: int, offset: int) -> None:
    """Round x [D] to the pages' dtype and write it to pages[page, head, offset]. For kernels only."""
    raise NotImplementedError


@overload(store_vector)  # type: ignore[untyped-decorator]
def _store_vector(x: Any, pages: Any, scales: Any, page: int, head: int, offset: int) -> Any:
    def as_float32(x: Any, pages: Any, scales: Any, page: int, head: int, offset: int) -> None:
        pages[page, head, offset, :] = x

    def as_bfloat16(x: Any, pages: Any, scales: Any, page: int, head: int, offset: int) -> None:
        target = pages[page, head, offset]
        for d in range(len(x)):
            target[d] = float32_to_bfloat16(x[d])

    def as_int8(x: Any, pages: Any, scales: Any, page: int, head: int, offset: int) -> None:
        scales[page, head, offset] = quantise(x, pages[page, head, offset])

    return {types.float32: as_float32, types.uint16: as_bfloat16, types.int8: as_int8}[pages.dtype]


@exact
def quantise(x: Any, target: Any) -> Any:
    """Write x [D] to `target` as int8; return the scale. See `cachedtypes` for the rule."""
    largest, check = _ZERO, _ZERO
    for d in range(len(x)):
        size = abs(x[d])
        largest = size if size > largest else largest
        check += x[d] * _ZERO  # NaN if any of them is NaN or infinite
    if largest == _ZERO or check != _ZERO:
        target[:] = 0
        return largest + check
    inverse = _MOST / largest
    for d in range(len(x)):
        target[d] = np.int8(np.rint(x[d] * inverse))
    return largest / _MOST


@intrinsic
def row_of(typing_context: Any, array: Any, index: Any) -> Any:
    """array[index] of any shape, [n, ...] -> flat, known to be contiguous: its caller says that each row is.

    A column slice of a larger array has rows further apart than they are long. Numba's type for it says nothing about
    the order inside a row either, and every element would be addressed on its own.
    """
    result = types.Array(array.dtype, 1, "C")

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        source = context.make_array(array)(context, builder, args[0])
        strides = cgutils.unpack_tuple(builder, source.strides)
        shape = cgutils.unpack_tuple(builder, source.shape)
        offset = builder.mul(args[1], strides[0])
        data = cgutils.pointer_add(builder, source.data, offset)
        length = shape[1]
        for extent in shape[2:]:
            length = builder.mul(length, extent)
        view = context.make_array(result)(context, builder)
        item = context.get_constant(types.intp, context.get_abi_sizeof(context.get_data_type(array.dtype)))
        context.populate_array(view, data=data, shape=(length,), strides=(item,), itemsize=item, meminfo=None)
        return view._getvalue()

    return result(array, types.intp), generate
