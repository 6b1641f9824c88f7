"""Building blocks of kernels: a vectorisable exp, conversions of stored numbers, contiguous rows."""

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from numba import types
from numba.extending import overload
from numpy.typing import NDArray

from ..pages import NEGLIGIBLE
from .compiling import FASTMATH
from .intrinsics import FLOAT, INT8, INT32, bfloat16_to_float32, float32_to_bfloat16, intrinsic


def _inner(fastmath: Any) -> Any:
    return numba.njit(fastmath=fastmath, error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True)


inner: Callable[[Callable[..., Any]], Any] = _inner(FASTMATH)
"""Decorator of functions that only kernels call, compiled into them."""
exact: Callable[[Callable[..., Any]], Any] = _inner(False)
"""Likewise, with rounding exactly as written."""
fused: Callable[[Callable[..., Any]], Any] = _inner({"contract"})
"""Likewise, with fused multiply-add but no approximate division, which makes NaN of infinity."""

_LOG2_E = np.float32(1.4426950408889634)
_ROUNDER = np.float32(1.5 * 2**23)  # adding and subtracting it rounds to the nearest integer
_LN_2_HIGH, _LN_2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)
_C2, _C3, _C4 = np.float32(5.0000001201e-1), np.float32(1.6666665459e-1), np.float32(4.1665795894e-2)
_C5, _C6, _C7 = np.float32(8.3334519073e-3), np.float32(1.3981999507e-3), np.float32(1.9875691500e-4)
_LOWEST = np.float32(-87.33)
_ZERO, _ONE, _MOST = np.float32(0), np.float32(1), np.float32(127)
_NAN = np.float32(np.nan)
_INFINITY_BITS = int(np.float32(np.inf).view(np.int32))
_NEGLIGIBLE_BITS = int(NEGLIGIBLE.view(np.int32))


@intrinsic
def _power_of_two(typing_context: Any, rounded: Any) -> Any:
    """2**n as float32, from a float32 `_ROUNDER + n`, whose lowest bits are n."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        exponent = builder.shl(builder.bitcast(args[0], INT32), INT32(23))
        return builder.bitcast(builder.add(exponent, INT32(0x3F800000)), FLOAT)

    return types.float32(types.float32), generate


@fused
def exp(x: Any) -> Any:
    """e**x of a float32 up to 88, with a relative error of 1e-7; 0 below -87.33, NaN of NaN.

    x = n ln 2 + r, and e**r by the polynomial of Cephes' expf (Moshier). The library's exp takes one number at a time;
    these few additions and products vectorise.
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


def multiply_scales(x: Any, scales: Any, page: int, head: int, offset: int, count: int) -> None:
    """x[j] *= scales[page, head, offset + j] for j < count; nothing where `scales` is None. For kernels only."""
    raise NotImplementedError


@overload(multiply_scales)  # type: ignore[untyped-decorator]
def _multiply_scales(x: Any, scales: Any, page: int, head: int, offset: int, count: int) -> Any:
    def nothing(x: Any, scales: Any, page: int, head: int, offset: int, count: int) -> None:
        pass

    def multiply(x: Any, scales: Any, page: int, head: int, offset: int, count: int) -> None:
        here = scales[page, head, offset : offset + count]
        for j in range(count):
            x[j] *= here[j]

    return nothing if scales == types.none else multiply


def store_vector(x: Any, pages: Any, page: int, head: int, offset: int) -> None:
    """Round x [D] and write it to `pages`, an array in a cache dtype and its scales or None. For kernels only."""
    raise NotImplementedError


@overload(store_vector)  # type: ignore[untyped-decorator]
def _store_vector(x: Any, pages: Any, page: int, head: int, offset: int) -> Any:
    def as_float32(x: Any, pages: Any, page: int, head: int, offset: int) -> None:
        target = pages[0][page, head, offset]
        for d in range(len(x)):
            target[d] = x[d]

    def as_bfloat16(x: Any, pages: Any, page: int, head: int, offset: int) -> None:
        target = pages[0][page, head, offset]
        for d in range(len(x)):
            target[d] = float32_to_bfloat16(x[d])

    def as_int8(x: Any, pages: Any, page: int, head: int, offset: int) -> None:
        highest = np.int32(0)
        for d in range(len(x)):
            highest = max(highest, magnitude(x[d]))
        scale, inverse = _int8_scale(highest)
        target = pages[0][page, head, offset]
        for d in range(len(x)):
            target[d] = _nearest(x[d] * inverse)
        pages[1][page, head, offset] = scale

    return {types.float32: as_float32, types.uint16: as_bfloat16, types.int8: as_int8}[pages[0].dtype]


@intrinsic
def magnitude(typing_context: Any, x: Any) -> Any:
    """The bits of |x| as int32: ordered like the numbers, with infinity and NaN above all.

    The maximum of integers vectorises, that of floats does not.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.and_(builder.bitcast(args[0], INT32), INT32(0x7FFFFFFF))

    return types.int32(types.float32), generate


@intrinsic
def _number(typing_context: Any, bits: Any) -> Any:
    """The float32 with these bits."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], FLOAT)

    return types.float32(types.int32), generate


@intrinsic
def _nearest(typing_context: Any, x: Any) -> Any:
    """Round a float32 between -128 and 127 to the nearest integer, ties to even; 0 of NaN."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        rounded = builder.fadd(args[0], FLOAT(float(_ROUNDER)))
        return builder.trunc(builder.bitcast(rounded, INT32), INT8)

    return types.int8(types.float32), generate


@exact
def _int8_scale(highest: Any) -> Any:
    """The scale of a vector whose largest magnitude has these bits, and its inverse, as in `pages.to_int8`."""
    if highest >= _INFINITY_BITS:
        return _NAN, _ZERO
    if highest <= _NEGLIGIBLE_BITS:
        return _ZERO, _ZERO
    return _number(highest) / _MOST, _MOST / _number(highest)


def with_whole_rows(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """The array [T, heads, D] itself where each x[t] is contiguous, else a copy."""
    return x if x.strides[1:] == (4 * x.shape[2], 4) else np.ascontiguousarray(x)
