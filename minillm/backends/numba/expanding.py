"""Expands pieces of stored weights for the tiles of a product: to float32, or to bytes with their scales.

The conversions are LLVM's operations on vectors of 32 weights, which run on every CPU.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from .elementary import inner
from .intrinsics import (
    FLOAT,
    HALF,
    INT8,
    INT16,
    INT32,
    bfloat16_to_float32,
    constant,
    float16_to_float32,
    intrinsic,
    load,
    splat,
    vector,
)

FLOAT32, FLOAT16, BFLOAT16, SIGNED8, SIGNED4 = range(5)
"""Kinds of stored weights: floats; int8; int4, two in a byte (see `reference.quantize`)."""
GROUP = 32
"""Weights converted at once."""


@intrinsic
def _expand_32(_: Any, kind: Any, stored: Any, byte: Any, scale: Any, tile: Any, at: Any) -> Any:
    """tile[at : at + 32] = the weights from `byte` on, times `scale`. `kind` is a literal."""
    if not isinstance(kind, types.IntegerLiteral):
        return None
    signature = types.void(kind, stored, types.intp, types.float32, tile, types.intp)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        source = _pointer(context, builder, signature, args, 1, 2)
        stored_as = signature.args[0].literal_value
        if stored_as == FLOAT32:
            values = load(builder, source, vector(FLOAT, GROUP))
        elif stored_as == FLOAT16:
            values = builder.fpext(load(builder, source, vector(HALF, GROUP)), vector(FLOAT, GROUP))
        elif stored_as == BFLOAT16:
            bits = builder.zext(load(builder, source, vector(INT16, GROUP)), vector(INT32, GROUP))
            values = builder.bitcast(builder.shl(bits, constant(INT32, GROUP, 16)), vector(FLOAT, GROUP))
        else:
            if stored_as == SIGNED8:
                signed = load(builder, source, vector(INT8, GROUP))
            else:
                signed = builder.sub(_nibbles(builder, source), constant(INT8, GROUP, 8))
            values = builder.sitofp(signed, vector(FLOAT, GROUP))
            values = builder.fmul(values, splat(builder, args[3], GROUP))
        target = _pointer(context, builder, signature, args, 4, 5)
        builder.store(values, builder.bitcast(target, values.type.as_pointer()), align=4)
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def _expand_32_bytes(_: Any, kind: Any, stored: Any, byte: Any, tile: Any, at: Any) -> Any:
    """tile[at : at + 32] = 128 + the weights from `byte` on, without their scale, in uint8. `kind` is a literal."""
    if not isinstance(kind, types.IntegerLiteral):
        return None
    signature = types.void(kind, stored, types.intp, tile, types.intp)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        source = _pointer(context, builder, signature, args, 1, 2)
        if signature.args[0].literal_value == SIGNED8:
            values = builder.xor(load(builder, source, vector(INT8, GROUP)), constant(INT8, GROUP, -128))
        else:
            values = builder.add(_nibbles(builder, source), constant(INT8, GROUP, 120))
        target = _pointer(context, builder, signature, args, 3, 4)
        builder.store(values, builder.bitcast(target, values.type.as_pointer()), align=1)
        return context.get_dummy_value()

    return signature, generate


def _pointer(context: Any, builder: ir.IRBuilder, signature: Any, args: Any, array: int, start: int) -> Any:
    """A pointer into the array that is argument number `array`, at the element that argument `start` names."""
    data = context.make_array(signature.args[array])(context, builder, args[array]).data
    return builder.gep(data, [args[start]])


def _nibbles(builder: ir.IRBuilder, source: Any) -> Any:
    """16 bytes as 32: the low nibbles, then the high ones."""
    pairs = load(builder, source, vector(INT8, GROUP // 2))
    low = builder.and_(pairs, constant(INT8, GROUP // 2, 15))
    high = builder.lshr(pairs, constant(INT8, GROUP // 2, 4))
    return builder.shuffle_vector(low, high, ir.Constant(vector(INT32, GROUP), list(range(GROUP))))


@inner
def expand(
    stored: Any, row_bytes: int, scales: Any, kind: int, group: int, first: int, last: int, start: int, stop: int,
    tile: Any, at: int, stride: int,
) -> None:  # fmt: skip
    """Expand weights of the outputs first .. last - 1 and the inputs start .. stop - 1 to float32 [outputs, stride].

    `start` is a multiple of 32; inputs beyond the stored ones are zeros.

    Args:
        stored: uint8, flat: [out, row_bytes]
        row_bytes: bytes of an output
        scales: float16 as uint16 [out, in' / group]; any of two dimensions where there are none
        kind: one of `FLOAT32` ... `SIGNED4`
        group: inputs that share a scale
        first: first output
        last: output after the last
        start: first input
        stop: input after the last
        tile: float32, flat, filled from `at` on
        at: see `tile`
        stride: elements from one output to the next in `tile`
    """
    bits = 32 if kind == FLOAT32 else 16 if kind <= BFLOAT16 else 8 if kind == SIGNED8 else 4
    inputs = row_bytes * 8 // bits
    end = min(stop, inputs)
    for n in range(first, last):
        row, target = n * row_bytes, at + (n - first) * stride - start
        whole = end // GROUP * GROUP
        for k in range(start, whole, GROUP):
            byte = row + k * bits // 8
            if kind == FLOAT32:
                _expand_32(FLOAT32, stored, byte, np.float32(1), tile, target + k)
            elif kind == FLOAT16:
                _expand_32(FLOAT16, stored, byte, np.float32(1), tile, target + k)
            elif kind == BFLOAT16:
                _expand_32(BFLOAT16, stored, byte, np.float32(1), tile, target + k)
            elif kind == SIGNED8:
                _expand_32(SIGNED8, stored, byte, float16_to_float32(scales[n, k // group]), tile, target + k)
            else:
                _expand_32(SIGNED4, stored, byte, float16_to_float32(scales[n, k // group]), tile, target + k)
        for k in range(max(start, whole), end):  # only floats: int8 and int4 are stored in whole groups
            byte = row + k * bits // 8
            if kind == FLOAT32:
                tile[target + k] = stored[byte : byte + 4].view(np.float32)[0]
            else:
                half = stored[byte : byte + 2].view(np.uint16)[0]
                tile[target + k] = float16_to_float32(half) if kind == FLOAT16 else bfloat16_to_float32(half)
        for k in range(end, stop):
            tile[target + k] = np.float32(0)


@inner
def expand_integers(
    stored: Any, row_bytes: int, scales: Any, kind: int, group: int, first: int, last: int, start: int, stop: int,
    tile: Any, at: int, stride: int, tile_scales: Any, scales_at: int,
) -> None:  # fmt: skip
    """Expand weights to uint8 [outputs, stride], value + 128, and their scales to float32 [outputs, stride / 32].

    As `expand`, and `start` and `stop` are multiples of 32 within what is stored.
    """
    for n in range(first, last):
        row, target = n * row_bytes, at + (n - first) * stride - start
        place = scales_at + (n - first) * (stride // GROUP)
        for k in range(start, stop, GROUP):
            if kind == SIGNED8:
                _expand_32_bytes(SIGNED8, stored, row + k, tile, target + k)
            else:
                _expand_32_bytes(SIGNED4, stored, row + k // 2, tile, target + k)
            tile_scales[place + (k - start) // GROUP] = float16_to_float32(scales[n, k // group])
