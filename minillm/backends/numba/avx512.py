"""Tiles of a matrix product in AVX-512 registers: what prefill's products are made of.

A tile is 16, 32 or 48 rows of activations (the lanes of one to three registers) by a few outputs. The activations lie
in panels [depth, rows], so that one load fetches 16 rows; the weights are broadcast, one at a time, from [outputs,
depth]. A loop over the depth keeps the tile's sums in registers and adds them to memory once at its end, as in Goto
and van de Geijn, "Anatomy of high-performance matrix multiplication", ACM TOMS 34 (2008).
"""

from typing import Any

from llvmlite import ir
from numba import types

from .intrinsics import FEATURES, FLOAT, INT32, INT64, call, fma, intrinsic, load, loop, splat, vector

LANES = 16
FLOAT_OUTPUTS = 8
"""Outputs of a float tile: 3 x 8 of the 32 registers hold sums."""
INTEGER_OUTPUTS = 4
"""Outputs of an integer tile: 3 x 4 registers for sums of integers within a group, as many for their scaled sums."""
GROUP = 32
"""Inputs that share a scale in an integer tile."""

HAS_FLOAT_TILES = "avx512f" in FEATURES
HAS_INTEGER_TILES = HAS_FLOAT_TILES and "avx512vnni" in FEATURES

_FLOATS, _INTS = vector(FLOAT, LANES), vector(INT32, LANES)


def _float_tile(registers: int) -> Any:
    """Make the function of a tile of `registers` x 16 rows and `FLOAT_OUTPUTS` outputs.

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
    """Make the function of a tile of `registers` x 16 rows and `INTEGER_OUTPUTS` outputs.

    Called as f(panel, panel_start, first, scales, group_start, weights, weights_start, weights_stride, weight_scales,
    scales_start, scales_stride, groups, sums, sums_start). The panel is int32 [groups, 8, rows], each holding four
    neighbouring int8 of a row; weights are uint8 [outputs, depth], 128 more than they mean, since VNNI's vpdpbusd
    multiplies unsigned bytes by signed ones. `first` int32 [groups, rows] takes that off again: -128 times the sum of
    the row's integers in the group. Then sums [outputs, rows] += sum over groups of weight_scales [outputs, groups] *
    scales [groups, rows] * the group's integer sum.
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
                            integers[i] = call(
                                builder, "llvm.x86.avx512.vpdpbusd.512", _INTS, integers[i], w, x[m]
                            )  # fmt: skip
                scale = _loads(builder, _at(builder, scales, g, width), _FLOATS, registers)
                result = []
                for n, row in enumerate(row_scales):
                    w = splat(builder, load(builder, _at(builder, row, g), FLOAT), LANES)
                    for m in range(registers):
                        i = n * registers + m
                        dot = builder.sitofp(integers[i], _FLOATS)
                        result.append(fma(builder, dot, builder.fmul(scale[m], w), sums[i]))
                return result

            zeros = [ir.Constant(_FLOATS, [0.0] * LANES)] * (registers * INTEGER_OUTPUTS)
            sums = loop(builder, args[11], zeros, step)
            _add(builder, _element(context, builder, signature, args, 12, args[13]), sums)
            return context.get_dummy_value()

        return signature, generate

    return tile


@intrinsic
def transpose(_: Any, source: Any, start: Any, stride: Any, target: Any, target_start: Any, target_stride: Any) -> Any:
    """Transpose 16 x 16 numbers of 4 bytes: target[j, i] = source[i, j], rows `stride` elements apart.

    Each of four rounds exchanges, between pairs of rows, the halves, quarters ... of the blocks that are not yet in
    place (Eklundh, IEEE Trans. Comput. C-21, 1972).
    """
    index = types.intp
    signature = types.void(source, index, index, target, index, index)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        places = _rows(builder, _element(context, builder, signature, args, 0, args[1]), args[2], LANES)
        rows = [load(builder, _as(builder, place, _INTS), _INTS) for place in places]
        for d in (1, 2, 4, 8):
            upper = ir.Constant(_INTS, [j if not j & d else LANES + j - d for j in range(LANES)])
            lower = ir.Constant(_INTS, [j + d if not j & d else LANES + j for j in range(LANES)])
            for i in range(LANES):
                if not i & d:
                    a, b = rows[i], rows[i + d]
                    rows[i], rows[i + d] = builder.shuffle_vector(a, b, upper), builder.shuffle_vector(a, b, lower)
        places = _rows(builder, _element(context, builder, signature, args, 3, args[4]), args[5], LANES)
        for row, place in zip(rows, places, strict=True):
            builder.store(row, _as(builder, place, _INTS), align=4)
        return context.get_dummy_value()

    return signature, generate


float_tile_16, float_tile_32, float_tile_48 = (_float_tile(registers) for registers in (1, 2, 3))
integer_tile_16, integer_tile_32, integer_tile_48 = (_integer_tile(registers) for registers in (1, 2, 3))


# --- pieces of generated code -----------------------------------------------------------------------------------------


def _element(context: Any, builder: ir.IRBuilder, signature: Any, args: Any, number: int, start: Any) -> Any:
    """A pointer to element `start` of the array that is argument `number`."""
    return builder.gep(context.make_array(signature.args[number])(context, builder, args[number]).data, [start])


def _at(builder: ir.IRBuilder, pointer: Any, index: Any, size: int = 1) -> Any:
    """A pointer to element index * size after `pointer`."""
    return builder.gep(pointer, [index if size == 1 else builder.mul(index, INT64(size))])


def _rows(builder: ir.IRBuilder, first: Any, stride: Any, count: int) -> list[Any]:
    """Pointers to the beginnings of `count` rows."""
    return [_at(builder, first, stride, i) if i else first for i in range(count)]


def _as(builder: ir.IRBuilder, pointer: Any, kind: ir.Type) -> Any:
    """The pointer, to values of another type."""
    return builder.bitcast(pointer, kind.as_pointer())


def _loads(builder: ir.IRBuilder, pointer: Any, kind: ir.VectorType, count: int) -> list[Any]:
    """`count` vectors, one after the other."""
    return [load(builder, _at(builder, pointer, INT64(i * LANES)), kind) for i in range(count)]


def _add(builder: ir.IRBuilder, pointer: Any, sums: list[Any]) -> None:
    """Add vectors to what lies from `pointer` on."""
    for i, value in enumerate(sums):
        place = _as(builder, _at(builder, pointer, INT64(i * LANES)), _FLOATS)
        builder.store(builder.fadd(builder.load(place, align=4), value), place, align=4)
