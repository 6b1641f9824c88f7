"""Products of few rows with int4 by integer dot products: 16 outputs in the lanes of a register.

Activations are rounded as for products of many rows: to int8, in groups of 32 (see `avx512.group_scale`). A tile takes
64 bytes of each of 16 outputs and transposes them, so that a register holds eight weights of each; VNNI's vpdpbusd
multiplies these by integers of a row, four at a time, and adds up. One of its operands is unsigned: weights are stored
as value + 8, and a group's sum begins at -8 times the sum of the row's integers. Sums of a group are exact; groups are
added in float32, in order. The result is bit-identical to that of an integer tile of `avx512.py`.
"""

from typing import Any

from llvmlite import ir
from numba import types

from .avx512 import GROUP, LANES, dot, group_scale, rounded, scaled_sum, transposed
from .formats import pointers
from .intrinsics import (
    FLOAT,
    HALF,
    INT8,
    INT16,
    INT32,
    INT64,
    call,
    constant,
    intrinsic,
    load,
    loop,
    splat,
    vector,
)
from .tiles import MOST_ROWS, prefetch

STEP = 64
"""Bytes of an output per iteration of a tile's loop."""
GROUPS_A_STEP = 2 * STEP // GROUP
AHEAD = 1024
"""Prefetch distance in bytes: further along an output, and then in the one 16 below. Prefetching whole outputs one
after the other, as `tiles` does, took a fifth longer."""
OFFSET = 8
"""Added to a weight to make it an unsigned byte."""

_FLOATS, _INTS, _BYTES = vector(FLOAT, LANES), vector(INT32, LANES), vector(INT8, LANES)


@intrinsic
def round_row(
    _: Any, x: Any, row: Any, integers: Any, start: Any, groups: Any, scales: Any, corrections: Any,
    place: Any,
) -> Any:  # fmt: skip
    """Round a row of x [T, in] to integers[start : start + 32 groups]; inputs beyond x are zero.

    Writes scales[place : place + groups], and corrections[place : place + groups], -`OFFSET` times the sum of each
    group.
    """
    index = types.intp
    signature = types.void(x, index, integers, index, index, scales, corrections, index)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        source, stride, _ = pointers(context, builder, signature.args[0], args[0])
        source = builder.gep(source, [builder.mul(args[1], stride)])
        inputs = builder.sdiv(stride, INT64(4))
        target = _element(context, builder, signature, args, 2, args[3])
        scales, corrections = (_element(context, builder, signature, args, i, args[7]) for i in (5, 6))

        def turn(group: Any, carried: list[Any]) -> list[Any]:
            halves = []
            for half in range(0, GROUP, LANES):
                first = builder.add(builder.mul(group, INT64(GROUP)), INT64(half))
                address = builder.gep(source, [builder.mul(first, INT64(4))])
                halves.append(masked_load(builder, address, _INTS, _first_lanes(builder, builder.sub(inputs, first))))
            magnitudes = [builder.and_(x, constant(INT32, LANES, 0x7FFFFFFF)) for x in halves]
            largest = call(builder, "llvm.umax.v16i32", _INTS, *magnitudes)
            largest = call(builder, "llvm.vector.reduce.umax.v16i32", INT32, largest)
            inverse, scale = group_scale(builder, splat(builder, largest, LANES))
            whole = [rounded(builder, builder.bitcast(x, _FLOATS), inverse) for x in halves]
            at = builder.gep(target, [builder.mul(group, INT64(GROUP))])
            for half, integers in enumerate(whole):
                place = builder.bitcast(builder.gep(at, [INT64(half * LANES)]), _BYTES.as_pointer())
                builder.store(builder.trunc(integers, _BYTES), place, align=1)
            total = call(builder, "llvm.vector.reduce.add.v16i32", INT32, builder.add(*whole))
            correction = builder.mul(total, INT32(-OFFSET))
            builder.store(correction, builder.gep(corrections, [group]), align=4)
            builder.store(builder.extract_element(scale, INT32(0)), builder.gep(scales, [group]), align=4)
            return carried

        loop(builder, args[4], [], turn)
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def gather_scales(_: Any, scales: Any, first: Any, last: Any, target: Any, start: Any) -> Any:
    """target[start :] = float16 scales [out, groups] of 16 outputs as float32 [groups', 16]; groups' is a multiple of
    16.

    The outputs are `first` and following, with `last` repeated beyond it. Missing groups are zero.
    """
    index = types.intp
    signature = types.void(scales, index, index, target, index)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        matrix, stride, _ = pointers(context, builder, signature.args[0], args[0])
        rows = _outputs(builder, matrix, stride, args[1], args[2])
        groups = builder.sdiv(stride, INT64(2))
        target = _element(context, builder, signature, args, 3, args[4])

        def ask(i: Any, carried: list[Any]) -> list[Any]:
            tile = builder.mul(stride, INT64(LANES))
            prefetch(builder, builder.gep(rows[0], [builder.add(tile, builder.mul(i, INT64(64)))]), 0)
            return carried

        loop(builder, builder.sdiv(stride, INT64(4)), [], ask)  # 16 outputs of `stride` bytes are stride / 4 lines

        def turn(i: Any, carried: list[Any]) -> list[Any]:
            at = builder.mul(i, INT64(LANES))
            there = _first_lanes(builder, builder.sub(groups, at))
            byte = builder.mul(at, INT64(2))
            halves = [masked_load(builder, builder.gep(row, [byte]), vector(INT16, LANES), there) for row in rows]
            wide = [builder.fpext(builder.bitcast(half, vector(HALF, LANES)), _FLOATS) for half in halves]
            place = builder.gep(target, [builder.mul(at, INT64(LANES))])
            for k, column in enumerate(transposed(builder, wide)):
                address = builder.bitcast(builder.gep(place, [INT64(k * LANES)]), _FLOATS.as_pointer())
                builder.store(column, address, align=4)
            return carried

        loop(builder, builder.sdiv(builder.add(groups, INT64(LANES - 1)), INT64(LANES)), [], turn)
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def multiply_tile(
    _: Any, weight: Any, first: Any, last: Any, weight_scales: Any, scale_start: Any, group_shift: Any, integers: Any,
    start: Any, scales: Any, corrections: Any, place: Any, steps: Any, out: Any, row: Any, rows: Any,
) -> Any:  # fmt: skip
    """out[row : row + rows, first : first + 16] of rounded rows and 16 outputs; none beyond `last` is written.

    At most `MOST_ROWS` rows. Their integers begin at integers[start], their scales and corrections at `place` (see
    `round_row`), the scales of the weights at weight_scales[scale_start] (see `gather_scales`).
    """
    index = types.intp
    signature = types.void(
        weight, index, index, weight_scales, index, index, integers, index, scales, corrections, index, index, out,
        index, index,
    )  # fmt: skip

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        matrix, stride, _ = pointers(context, builder, signature.args[0], args[0])
        outputs = _outputs(builder, matrix, stride, args[1], args[2])
        weight_scales = _element(context, builder, signature, args, 3, args[4])
        x = _element(context, builder, signature, args, 6, args[7])
        x_scales, corrections = (_element(context, builder, signature, args, i, args[10]) for i in (8, 9))
        y, y_stride, _ = pointers(context, builder, signature.args[12], args[12])
        y = builder.gep(y, [builder.add(builder.mul(args[13], y_stride), builder.mul(args[1], INT64(4)))])
        there = _first_lanes(builder, builder.sub(builder.add(args[2], INT64(1)), args[1]))
        groups = builder.mul(args[11], INT64(GROUPS_A_STEP))

        def tile(count: int) -> None:
            def turn(step: Any, sums: list[Any]) -> list[Any]:
                byte = builder.mul(step, INT64(STEP))
                left = builder.sdiv(builder.sub(stride, byte), INT64(4))
                mask = _first_lanes(builder, left)
                stored = [masked_load(builder, builder.gep(output, [byte]), _INTS, mask) for output in outputs]
                ahead = builder.add(byte, INT64(AHEAD))
                below = builder.mul(stride, INT64(LANES - 1))
                within = builder.icmp_signed("<", ahead, stride)
                ahead = builder.add(ahead, builder.select(within, INT64(0), below))
                for output in outputs:
                    prefetch(builder, builder.gep(output, [ahead]), 0)
                columns = transposed(builder, stored)
                sums = list(sums)
                size = LANES // GROUPS_A_STEP
                for g in range(GROUPS_A_STEP):
                    words = _unsigned(builder, columns[g * size : (g + 1) * size])
                    group = builder.add(builder.mul(step, INT64(GROUPS_A_STEP)), INT64(g))
                    shared = builder.mul(builder.lshr(group, args[5]), INT64(LANES))
                    weight_scale = load(builder, builder.gep(weight_scales, [shared]), _FLOATS)
                    for r in range(count):
                        number = builder.add(builder.mul(groups, INT64(r)), group)
                        four = builder.gep(x, [builder.mul(number, INT64(GROUP))])
                        correction = load(builder, builder.gep(corrections, [number]), INT32)
                        halves = [splat(builder, correction, LANES), constant(INT32, LANES, 0)]
                        for k, word in enumerate(words):
                            integer = load(builder, builder.gep(four, [INT64(4 * k)]), INT32)
                            halves[k % 2] = dot(builder, halves[k % 2], word, splat(builder, integer, LANES))
                        x_scale = splat(builder, load(builder, builder.gep(x_scales, [number]), FLOAT), LANES)
                        sums[r] = scaled_sum(builder, builder.add(*halves), x_scale, weight_scale, sums[r])
                return sums

            for r, result in enumerate(loop(builder, args[11], [constant(FLOAT, LANES, 0)] * count, turn)):
                masked_store(builder, result, builder.gep(y, [builder.mul(INT64(r), y_stride)]), there)

        end = builder.append_basic_block("end")
        switch = builder.switch(args[14], end)
        for count in range(1, MOST_ROWS + 1):
            switch.add_case(INT64(count), builder.append_basic_block(f"rows{count}"))
            builder.position_at_end(switch.cases[-1][1])
            tile(count)
            builder.branch(end)
        builder.position_at_end(end)
        return context.get_dummy_value()

    return signature, generate


def _unsigned(builder: ir.IRBuilder, words: list[Any]) -> list[Any]:
    """A group's 32 weights as unsigned bytes, four registers of pairs to eight: the low four bits, then the high."""
    low = constant(INT32, LANES, 0x0F0F0F0F)
    high = [builder.lshr(word, constant(INT32, LANES, 4)) for word in words]
    return [builder.and_(word, low) for word in words + high]


def _outputs(builder: ir.IRBuilder, matrix: Any, stride: Any, first: Any, last: Any) -> list[Any]:
    """Addresses of 16 rows of a matrix, `last` again for those beyond it."""
    numbers = [builder.add(first, INT64(i)) for i in range(LANES)]
    clamped = [builder.select(builder.icmp_signed("<", o, last), o, last) for o in numbers]
    return [builder.gep(matrix, [builder.mul(o, stride)]) for o in clamped]


def _element(context: Any, builder: ir.IRBuilder, signature: Any, args: Any, number: int, start: Any) -> Any:
    """A pointer to element `start` of the array that is argument `number`."""
    return builder.gep(context.make_array(signature.args[number])(context, builder, args[number]).data, [start])


def _first_lanes(builder: ir.IRBuilder, count: Any) -> Any:
    """A mask of the first `count` lanes; of all if `count` is 16 or more."""
    lanes = ir.Constant(_INTS, list(range(LANES)))
    return builder.icmp_signed("<", lanes, splat(builder, builder.trunc(count, INT32), LANES))


def masked_load(builder: ir.IRBuilder, address: Any, kind: ir.VectorType, mask: Any) -> Any:
    """Load the lanes of a vector that `mask` selects; the others are zero, and their memory is not read."""
    pointer = builder.bitcast(address, kind.as_pointer())
    return _masked(builder, "load", kind, [pointer, INT32(1), mask, ir.Constant(kind, None)])


def masked_store(builder: ir.IRBuilder, value: Any, address: Any, mask: Any) -> None:
    """Store the lanes of a vector that `mask` selects."""
    pointer = builder.bitcast(address, value.type.as_pointer())
    _masked(builder, "store", value.type, [value, pointer, INT32(1), mask])


def _masked(builder: ir.IRBuilder, kind: str, value: ir.VectorType, args: list[Any]) -> Any:
    result = value if kind == "load" else ir.VoidType()
    element = str(value.element)
    name = {"float": "f32"}.get(element, element)
    return call(builder, f"llvm.masked.{kind}.v{value.count}{name}.p0", result, *args)
