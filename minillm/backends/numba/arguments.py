"""Arguments of launched kernels: their encoding as integers in memory, and how a kernel reads them.

An array of one axis becomes its address and length; one of more axes its address, shape, and row stride in elements. So
a vector takes two integers, a matrix four.
"""

import struct
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.extending import overload
from numpy.typing import NDArray

from .elementary import inner
from .intrinsics import intrinsic


def address_of(array: NDArray[Any]) -> int:
    """The address of an array's first element."""
    address: int = array.__array_interface__["data"][0]
    return address


class Rows(NamedTuple):
    """An array of contiguous rows at any stride, as `row_at` reads it."""

    array: NDArray[np.float32]
    """[rows, columns]"""


def as_numbers(arguments: tuple[Any, ...]) -> list[int]:
    """Encode arguments as integers: contiguous arrays, `Rows`, integers and floats."""
    numbers: list[int] = []
    for argument in arguments:
        if isinstance(argument, Rows):
            argument = argument.array
            assert argument.size == 0 or argument.strides[1] == argument.itemsize, "a row is not in one piece"
        elif isinstance(argument, np.ndarray):
            assert argument.flags.c_contiguous, "the array is not contiguous"
        if isinstance(argument, np.ndarray):
            numbers.append(address_of(argument))
            numbers += argument.shape
            if argument.ndim > 1:
                numbers.append(argument.strides[0] // argument.itemsize)
        elif isinstance(argument, float):
            numbers += struct.unpack("q", struct.pack("d", argument))
        else:
            numbers.append(argument)
    return numbers


# --- in kernels -------------------------------------------------------------------------------------------------------


@intrinsic
def pointer_to(typing_context: Any, address: Any, dtype: Any) -> Any:
    """Convert an address to a pointer to numbers of `dtype`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

    return types.CPointer(dtype.dtype)(types.int64, dtype), generate


@intrinsic
def pointer_like(typing_context: Any, address: Any, other: Any) -> Any:
    """Convert an address to a pointer of the type of `other`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

    return other(types.int64, other), generate


@intrinsic
def number(typing_context: Any, bits: Any) -> Any:
    """Decode the float64 of an argument."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.DoubleType())

    return types.float64(types.int64), generate


@inner
def vector(arguments: Any, at: int, dtype: Any) -> Any:
    """The array [n] that is argument number `at`."""
    return carray(pointer_to(arguments[at], dtype), (arguments[at + 1],))


@inner
def matrix(arguments: Any, at: int, dtype: Any) -> Any:
    """The contiguous array [rows, columns] that is argument number `at`."""
    return carray(pointer_to(arguments[at], dtype), (arguments[at + 1], arguments[at + 2]))


@inner
def flat(arguments: Any, at: int, dtype: Any) -> Any:
    """The contiguous array [rows, columns] that is argument number `at`, as one row."""
    return carray(pointer_to(arguments[at], dtype), (arguments[at + 1] * arguments[at + 2],))


@inner
def row_at(arguments: Any, at: int, row: int) -> Any:
    """A row of the float32 array [rows, columns] that is argument number `at`, with any row stride."""
    start = arguments[at] + 4 * row * arguments[at + 3]
    return carray(pointer_to(start, np.float32), (arguments[at + 2],))


def _scales(arguments: Any, at: int, data: Any) -> Any:
    """The scales [pages, K, P] that are argument number `at`, if `data` has any. For kernels only."""
    raise NotImplementedError


@overload(_scales)  # type: ignore[untyped-decorator]
def _scales_by_type(arguments: Any, at: int, data: Any) -> Any:
    def none(arguments: Any, at: int, data: Any) -> Any:
        return None

    def some(arguments: Any, at: int, data: Any) -> Any:
        shape = arguments[at + 1], arguments[at + 2], arguments[at + 3]
        return carray(pointer_to(arguments[at], np.float32), shape)

    return some if data.dtype == types.int8 else none


@inner
def stored_vectors(arguments: Any, at: int, scales: int, data: Any) -> Any:
    """A layer's keys or values [pages, K, P, D] that are argument number `at`, and their scales or None."""
    shape = arguments[at + 1], arguments[at + 2], arguments[at + 3], arguments[at + 4]
    return carray(pointer_like(arguments[at], data), shape), _scales(arguments, scales, data)


@inner
def share_of(size: int, share: int, shares: int) -> Any:
    """Begin and end of one share of `size` equal items. Later shares are smaller: of four, 7, 5, 3 and 1 sixteenths.

    So workers of different speeds end at nearly the same time.
    """
    left, rest, whole = shares - share, shares - share - 1, shares * shares
    return size - (size * left * left + whole - 1) // whole, size - (size * rest * rest + whole - 1) // whole
