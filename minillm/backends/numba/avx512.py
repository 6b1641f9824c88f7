"""Tiles of a matrix product in vector registers, for the products of prefill.

A tile is 16, 32 or 48 rows of activations (the lanes of one to three vectors of 16) by a few outputs. A vector is a
register of AVX-512 or two of AVX2; tiles of integers need AVX-512 with VNNI. The activations are stored in panels
[depth, rows], so that one load fetches 16 rows; the weights are broadcast, one at a time, from [outputs, depth]. A loop
over the depth keeps the tile's sums in registers and adds them to memory once at its end, as in Goto and van de Geijn,
"Anatomy of high-performance matrix multiplication", ACM TOMS 34 (2008).
"""

import math
from typing import Any

from llvmlite import ir
from numba import types

from .intrinsics import FEATURES, FLOAT, INT32, INT64, call, constant, fma, intrinsic, load, loop, splat, vector

LANES = 16
FLOAT_OUTPUTS = 8 if "avx512f" in FEATURES else 4
"""Outputs of a float tile: at most 3 x 8 of AVX-512's 32 registers hold sums, and 2 x 4 of AVX2's 16."""
INTEGER_OUTPUTS = 4
"""Outputs of an integer tile: 3 x 4 registers for sums of integers within a group, as many for their scaled sums."""
GROUP = 32
"""Inputs that share a scale in an integer tile."""

_ROUND, _ROUND_BITS = 1.5 * 2**23, 0x4B400000
"""A float32 whose last bit is worth 1: adding it to a number rounds that to an integer, the difference of the bits."""
_SMALLEST = 1e-30
"""A group of activations without a larger one counts as zeros: the inverse of its scale could overflow."""

HAS_FLOAT_TILES = "avx512f" in FEATURES or {"avx2", "fma"} <= FEATURES
HAS_INTEGER_TILES = {"avx512f", "avx512vnni"} <= FEATURES

_FLOATS, _INTS = vector(FLOAT, LANES), vector(INT32, LANES)


def _float_tile(registers: int) -> Any:
    """Make the intrinsic of a tile of `registers` x 16 rows and `FLOAT_OUTPUTS` outputs.

    Called as f(panel, panel_start, weights, weights_start, weights_stride, depth, sums, sums_start): sums [outputs,
    rows] += weights [outputs, depth] panel [depth, rows], where the arrays are flat float32 and begin at `_start`.
    """

    @intrinsic
    def tile(_: Any, panel: Any, at: Any, weights: Any, row: Any, stride: Any, depth: Any, sums: Any, out: Any) -> Any:
        signature = types.void(
            panel, types.intp, weights, types.intp, types.intp, types.intp, sums, types.intp
        )  # fmt: skip

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            panel = _element(context, builder, signature, args, 0, args[1])
            rows = _rows(builder, _element(context, builder, signature, args, 2, args[3]), args[4], FLOAT_OUTPUTS)

            def step(k: Any, sums: list[Any]) -> list[Any]:
                x = _loads(builder, _at(builder, panel, k, LANES * registers), _FLOATS, registers)
                result = []
                for n, row in enumerate(rows):
                    w = splat(builder, load(builder, _at(builder, row, k), FLOAT), LANES)
                    result += [fma(builder, x[m], w, sums[n * registers + m]) for m in range(registers)]
                return result

            zeros = [ir.Constant(_FLOATS, [0.0] * LANES)] * (registers * FLOAT_OUTPUTS)
            _add(builder, _element(context, builder, signature, args, 6, args[7]), loop(builder, args[5], zeros, step))
            return context.get_dummy_value()

        return signature, generate

    return tile


def _integer_tile(registers: int) -> Any:
    """Make the intrinsic of a tile of `registers` x 16 rows and `FLOAT_OUTPUTS` outputs.

    Called as f(panel, panel_start, first, scales, group_start, weights, weights_start, weights_stride, weight_scales,
    scales_start, scales_stride, groups, sums, sums_start). The panel is int32 [groups, 8, rows], each holding four
    neighbouring int8 of a row; weights are uint8 [outputs, depth], value + 128, since VNNI's vpdpbusd multiplies
    unsigned bytes by signed ones. `first` int32 [groups, rows] corrects for that: -128 times the sum of the row's
    integers in the group. Then sums [outputs, rows] += sum over groups of weight_scales [outputs, groups] * scales
    [groups, rows] * the group's integer sum.
    """

    @intrinsic
    def tile(
        _: Any, panel: Any, at: Any, first: Any, scales: Any, group: Any, weights: Any, row: Any, stride: Any,
        weight_scales: Any, scale_row: Any, scale_stride: Any, groups: Any, sums: Any, out: Any,
    ) -> Any:  # fmt: skip
        index = types.intp
        signature = types.void(
            panel, index, first, scales, index, weights, index, index, weight_scales, index, index, index, sums, index
        )

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            panel = _element(context, builder, signature, args, 0, args[1])
            first, scales = (_element(context, builder, signature, args, i, args[4]) for i in (2, 3))
            rows = _rows(builder, _element(context, builder, signature, args, 5, args[6]), args[7], INTEGER_OUTPUTS)
            row_scales = _element(context, builder, signature, args, 8, args[9])
            row_scales = _rows(builder, row_scales, args[10], INTEGER_OUTPUTS)

            def step(g: Any, sums: list[Any]) -> list[Any]:
                width = LANES * registers
                integers = _loads(builder, _at(builder, first, g, width), _INTS, registers) * INTEGER_OUTPUTS
                words = _at(builder, panel, g, GROUP // 4 * width)
                for k in range(GROUP // 4):
                    x = _loads(builder, _at(builder, words, INT64(k * width)), _INTS, registers)
                    for n, row in enumerate(rows):
                        four = _at(builder, row, builder.add(builder.mul(g, INT64(GROUP)), INT64(4 * k)))
                        w = splat(builder, builder.load(builder.bitcast(four, INT32.as_pointer()), align=1), LANES)
                        for m in range(registers):
                            i = n * registers + m
                            integers[i] = dot(builder, integers[i], w, x[m])
                scale = _loads(builder, _at(builder, scales, g, width), _FLOATS, registers)
                result = []
                for n, row in enumerate(row_scales):
                    w = splat(builder, load(builder, _at(builder, row, g), FLOAT), LANES)
                    for m in range(registers):
                        i = n * registers + m
                        result.append(scaled_sum(builder, integers[i], scale[m], w, sums[i]))
                return result

            place = _element(context, builder, signature, args, 12, args[13])
            sums = loop(builder, args[11], _loads(builder, place, _FLOATS, registers * INTEGER_OUTPUTS), step)
            for i, value in enumerate(sums):
                _store(builder, value, _at(builder, place, INT64(i * LANES)))
            return context.get_dummy_value()

        return signature, generate

    return tile


@intrinsic
def transpose(_: Any, source: Any, start: Any, stride: Any, target: Any, target_start: Any, target_stride: Any) -> Any:
    """Transpose 16 x 16 float32: target[j, i] = source[i, j]; rows are `stride` elements apart in the flat arrays."""
    index = types.intp
    signature = types.void(source, index, index, target, index, index)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        places = _rows(builder, _element(context, builder, signature, args, 0, args[1]), args[2])
        rows = transposed(builder, [load(builder, place, _FLOATS) for place in places])
        target = _element(context, builder, signature, args, 3, args[4])
        for row, place in zip(rows, _rows(builder, target, args[5]), strict=True):
            _store(builder, row, place)
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def finish_tile(
    _: Any, sums: Any, start: Any, stride: Any, bias: Any, bias_start: Any, least: Any, residual: Any,
    residual_start: Any, residual_stride: Any, out: Any, out_start: Any, out_stride: Any,
) -> Any:  # fmt: skip
    """Write 16 rows of 16 outputs: out[i, j] = max(sums[j, i] + bias[j], least) + residual[i, j]; NaN stays."""
    index = types.intp
    signature = types.void(
        sums, index, index, bias, index, types.float32, residual, index, index, out, index, index
    )  # fmt: skip

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        def element(number: int) -> Any:
            return _element(context, builder, signature, args, number, args[number + 1])

        added, floor = load(builder, element(3), _FLOATS), splat(builder, args[5], LANES)
        rows = transposed(builder, [load(builder, place, _FLOATS) for place in _rows(builder, element(0), args[2])])
        residuals, places = _rows(builder, element(6), args[8]), _rows(builder, element(9), args[11])
        for row, before, place in zip(rows, residuals, places, strict=True):
            y = builder.fadd(row, added)
            y = builder.select(builder.fcmp_ordered("<", y, floor), floor, y)
            _store(builder, builder.fadd(y, load(builder, before, _FLOATS)), place)
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def quantise_group(
    _: Any, source: Any, start: Any, panel: Any, panel_start: Any, panel_stride: Any, scales: Any, offsets: Any,
    place: Any,
) -> Any:  # fmt: skip
    """Quantise 32 inputs of 16 rows, float32 [32, 16], to int8 in int32 [8, 16] (`panel_stride` apart), four in each.

    Writes scales[place : place + 16] (see `group_scale`), and offsets[place : place + 16], -128 times the rows' sums of
    integers.
    """
    index = types.intp
    signature = types.void(source, index, panel, index, index, scales, offsets, index)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        source = _element(context, builder, signature, args, 0, args[1])
        largest = constant(INT32, LANES, 0)  # as integers, magnitudes keep their order, and NaN is the largest
        for x in _loads(builder, source, _INTS, GROUP):
            magnitude = builder.and_(x, constant(INT32, LANES, 0x7FFFFFFF))
            largest = call(builder, "llvm.umax.v16i32", _INTS, largest, magnitude)
        inverse, scale = group_scale(builder, largest)
        total = constant(INT32, LANES, 0)
        words = _rows(builder, _element(context, builder, signature, args, 2, args[3]), args[4], GROUP // 4)
        for k, word in enumerate(words):
            four = constant(INT32, LANES, 0)
            for byte in range(4):
                x = load(builder, _at(builder, source, INT64((4 * k + byte) * LANES)), _FLOATS)
                integer = rounded(builder, x, inverse)
                total = builder.add(total, integer)
                integer = builder.and_(integer, constant(INT32, LANES, 255))
                four = builder.or_(four, builder.shl(integer, constant(INT32, LANES, 8 * byte)))
            _store(builder, four, word)
        _store(builder, scale, _element(context, builder, signature, args, 5, args[7]))
        offset = builder.mul(total, constant(INT32, LANES, -128))
        _store(builder, offset, _element(context, builder, signature, args, 6, args[7]))
        return context.get_dummy_value()

    return signature, generate


float_tile_16, float_tile_32, float_tile_48 = (_float_tile(registers) for registers in (1, 2, 3))
integer_tile_16, integer_tile_32, integer_tile_48 = (_integer_tile(registers) for registers in (1, 2, 3))


# --- shared by products of few and of many rows -----------------------------------------------------------------------


def group_scale(builder: ir.IRBuilder, largest: Any) -> tuple[Any, Any]:
    """Inverse scale 127 / largest and scale largest / 127, from the bits of the largest magnitude in a group.

    Both are 0 for a group of negligible numbers. NaN and infinity make the scale NaN, so that they show.
    """
    largest = builder.bitcast(largest, _FLOATS)
    zero = constant(FLOAT, LANES, 0.0)
    tiny = builder.fcmp_ordered("<", largest, constant(FLOAT, LANES, _SMALLEST))
    inverse = builder.select(tiny, zero, builder.fdiv(constant(FLOAT, LANES, 127.0), largest))
    scale = builder.select(tiny, zero, builder.fmul(largest, constant(FLOAT, LANES, 1 / 127)))
    finite = builder.fcmp_ordered("<", largest, constant(FLOAT, LANES, math.inf))
    return inverse, builder.select(finite, scale, constant(FLOAT, LANES, math.nan))


def rounded(builder: ir.IRBuilder, x: Any, inverse: Any) -> Any:
    """x * inverse rounded to the nearest integers, ties to even."""
    bits = builder.bitcast(fma(builder, x, inverse, constant(FLOAT, LANES, _ROUND)), _INTS)
    return builder.sub(bits, constant(INT32, LANES, _ROUND_BITS))


def dot(builder: ir.IRBuilder, sums: Any, unsigned: Any, signed: Any) -> Any:
    """sums + the dot product of the four unsigned and the four signed bytes in each lane."""
    return call(builder, "llvm.x86.avx512.vpdpbusd.512", _INTS, sums, unsigned, signed)


def scaled_sum(builder: ir.IRBuilder, integer: Any, x_scale: Any, weight_scale: Any, total: Any) -> Any:
    """total + integer * (x_scale * weight_scale), rounded twice; defined once, for the same bits everywhere."""
    return fma(builder, builder.sitofp(integer, _FLOATS), builder.fmul(x_scale, weight_scale), total)


def transposed(builder: ir.IRBuilder, rows: list[Any]) -> list[Any]:
    """Transpose 16 x 16 numbers of 32 bits, given and returned as rows.

    Four rounds of exchanges between pairs of rows (Eklundh, "A fast computer method for matrix transposing", IEEE
    Transactions on Computers C-21, 1972), by shuffles that AVX-512 does in one instruction without a table: two that
    interleave single numbers in each quarter of a register, and transpose blocks of 4 x 4; then two of whole quarters.
    """
    interleaved = [quarter + lane for quarter in (0, 4, 8, 12) for lane in (0, 16, 1, 17)]
    even_quarters = [quarter + lane for quarter in (0, 8, 16, 24) for lane in range(4)]
    for distance, lanes, shift in (
        (2, interleaved, 2),
        (1, interleaved, 2),
        (4, even_quarters, 4),
        (8, even_quarters, 4),
    ):
        low, high = ir.Constant(_INTS, lanes), ir.Constant(_INTS, [lane + shift for lane in lanes])
        before, rows = rows, list(rows)
        for i in (i for i in range(LANES) if not i & distance):
            pair = before[i], before[i + distance]
            rows[i], rows[i + distance] = builder.shuffle_vector(*pair, low), builder.shuffle_vector(*pair, high)
    return rows


# --- pieces of generated code -----------------------------------------------------------------------------------------


def _element(context: Any, builder: ir.IRBuilder, signature: Any, args: Any, number: int, start: Any) -> Any:
    """A pointer to element `start` of the array that is argument `number`."""
    return builder.gep(context.make_array(signature.args[number])(context, builder, args[number]).data, [start])


def _at(builder: ir.IRBuilder, pointer: Any, index: Any, size: int = 1) -> Any:
    """A pointer to element index * size after `pointer`."""
    return builder.gep(pointer, [index if size == 1 else builder.mul(index, INT64(size))])


def _rows(builder: ir.IRBuilder, first: Any, stride: Any, count: int = LANES) -> list[Any]:
    """Pointers to the beginnings of `count` rows."""
    return [_at(builder, first, stride, i) if i else first for i in range(count)]


def _store(builder: ir.IRBuilder, value: Any, pointer: Any) -> None:
    """Write a vector to an address that need not be aligned beyond one element."""
    builder.store(value, builder.bitcast(pointer, value.type.as_pointer()), align=4)


def _loads(builder: ir.IRBuilder, pointer: Any, kind: ir.VectorType, count: int) -> list[Any]:
    """`count` vectors, one after the other."""
    return [load(builder, _at(builder, pointer, INT64(i * LANES)), kind) for i in range(count)]


def _add(builder: ir.IRBuilder, pointer: Any, sums: list[Any]) -> None:
    """Add vectors to the numbers in memory from `pointer` on."""
    for i, value in enumerate(sums):
        place = _at(builder, pointer, INT64(i * LANES))
        _store(builder, builder.fadd(load(builder, place, _FLOATS), value), place)
