"""The two products of decode attention, for one query row: its scores, and the weighted sum of values.

Sums stay in registers, stored types are widened on load, and cache lines are prefetched: the hardware prefetcher looks
only a few rows ahead, and starts anew at each 4 KiB.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types

from .intrinsics import (
    FLOAT,
    INT8,
    INT16,
    INT32,
    INT64,
    call,
    constant,
    fma,
    intrinsic,
    load,
    loop,
    splat,
    vector,
)

VECTOR = 16
"""float32 numbers in a vector: one AVX-512, two AVX2 or four NEON registers."""
KEYS = 4
"""Keys multiplied together; buffers of scores have room for up to KEYS - 1 more than they hold."""
AHEAD = 4096
"""Prefetch distance in bytes."""

_LANES = vector(FLOAT, VECTOR)
_WIDE = 4  # vectors of values summed together
_LINE = 64  # bytes of a cache line


def _pointer(context: Any, builder: Any, kind: Any, array: Any) -> Any:
    return context.make_array(kind)(context, builder, array).data


def _widened(builder: Any, stored: Any) -> Any:
    """A vector of float32, bfloat16 (as integers of 16 bits) or int8 as float32."""
    if stored.type.element == INT16:
        words = vector(INT32, VECTOR)
        return builder.bitcast(builder.shl(builder.zext(stored, words), constant(INT32, VECTOR, 16)), _LANES)
    return builder.sitofp(stored, _LANES) if stored.type.element == INT8 else stored


def _load(builder: Any, pointer: Any, rest: Any = None) -> Any:
    """Load 16 stored numbers as float32; or only `rest` of them, the others 0."""
    kind = vector(pointer.type.pointee, VECTOR)
    if rest is None:
        return _widened(builder, load(builder, pointer, kind))
    element = {FLOAT: "f32", INT16: "i16", INT8: "i8"}[kind.element]
    name = f"llvm.masked.load.v{VECTOR}{element}.p0"
    start, zeros = builder.bitcast(pointer, kind.as_pointer()), ir.Constant(kind, None)
    return _widened(builder, call(builder, name, kind, start, INT32(1), _mask(builder, rest), zeros))


def _mask(builder: Any, rest: Any) -> Any:
    lanes = ir.Constant(vector(INT64, VECTOR), [INT64(i) for i in range(VECTOR)])
    return builder.icmp_signed("<", lanes, splat(builder, rest, VECTOR))


def _bytes(builder: Any, pointer: Any) -> Any:
    return builder.bitcast(pointer, INT8.as_pointer())


def _prefetch_lines(builder: Any, lines: Any, addresses: Callable[[Any], list[Any]]) -> None:
    """Prefetch `lines` cache lines, at the addresses that belong to each multiple of a line's length."""

    def ask(line: Any, _: list[Any]) -> list[Any]:
        for address in addresses(builder.mul(line, INT64(_LINE))):
            call(builder, "llvm.prefetch.p0", ir.VoidType(), address, INT32(0), INT32(2), INT32(1))  # read, L2, data
        return []

    loop(builder, lines, [], ask)


def _one_if_any(builder: Any, count: Any) -> Any:
    return builder.select(builder.icmp_signed(">", count, INT64(0)), INT64(1), INT64(0))


def _at_most(builder: Any, x: Any, limit: Any) -> Any:
    return builder.select(builder.icmp_signed("<", x, limit), x, limit)


@intrinsic
def scores_of(
    typing_context: Any, query: Any, keys: Any, first: Any, count: Any, scores: Any, then: Any, then_first: Any
) -> Any:
    """scores[j] = query . key j, of `count` contiguous keys from element `first` of an array on.

    As many bytes of `then`, from its element `then_first` on, are prefetched meanwhile. Prefetched memory need not
    exist. D = len(query); scores has room for `count` rounded up to a multiple of KEYS.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kinds, count = signature.args, args[3]
        q, k, s, then = (_pointer(context, builder, kinds[i], args[i]) for i in (0, 1, 4, 5))
        k, then = builder.gep(k, [args[2]]), builder.gep(then, [args[6]])
        D = builder.extract_value(context.make_array(kinds[0])(context, builder, args[0]).shape, 0)
        full, rest = builder.sdiv(D, INT64(VECTOR)), builder.srem(D, INT64(VECTOR))
        group_bytes = builder.mul(D, INT64(KEYS * context.get_abi_sizeof(k.type.pointee)))

        def group(g: Any, _: list[Any]) -> list[Any]:
            j = builder.mul(g, INT64(KEYS))
            last = builder.sub(count, INT64(1))
            rows = [
                builder.gep(k, [builder.mul(_at_most(builder, builder.add(j, INT64(r)), last), D)]) for r in range(KEYS)
            ]
            start = builder.mul(g, group_bytes)

            def addresses(at: Any) -> list[Any]:
                at = builder.add(start, at)
                ahead = builder.gep(_bytes(builder, k), [builder.add(at, INT64(AHEAD))])
                return [ahead, builder.gep(_bytes(builder, then), [at])]

            def multiply(at: Any, sums: list[Any], rest: Any = None) -> list[Any]:
                x = _load(builder, builder.gep(q, [at]), rest)
                return [
                    fma(builder, x, _load(builder, builder.gep(row, [at]), rest), total)
                    for row, total in zip(rows, sums, strict=True)
                ]

            _prefetch_lines(builder, builder.sdiv(builder.add(group_bytes, INT64(_LINE - 1)), INT64(_LINE)), addresses)
            zeros = [constant(FLOAT, VECTOR, 0.0)] * KEYS
            sums = loop(builder, full, zeros, lambda d, sums: multiply(builder.mul(d, INT64(VECTOR)), sums))
            tails = _one_if_any(builder, rest)
            sums = loop(builder, tails, sums, lambda _, sums: multiply(builder.sub(D, rest), sums, rest))
            for r, total in enumerate(sums):
                builder.store(_sum(builder, total), builder.gep(s, [builder.add(j, INT64(r))]))
            return []

        groups = builder.sdiv(builder.add(count, INT64(KEYS - 1)), INT64(KEYS))
        loop(builder, groups, [], group)
        return context.get_dummy_value()

    return types.void(query, keys, types.intp, types.intp, scores, then, types.intp), generate


def _sum(builder: Any, lanes: Any) -> Any:
    """The sum across a vector, by repeated halving."""
    width = VECTOR
    while width > 1:
        width //= 2
        low, high = (ir.Constant(vector(INT32, width), list(range(at, at + width))) for at in (0, width))
        lanes = builder.fadd(builder.shuffle_vector(lanes, lanes, low), builder.shuffle_vector(lanes, lanes, high))
    return builder.extract_element(lanes, INT32(0))


@intrinsic
def add_weighted(
    typing_context: Any, weights: Any, values: Any, first: Any, count: Any, result: Any, then: Any, then_first: Any
) -> Any:
    """result += sum of weights[j] value j, of `count` contiguous values from element `first` on.

    D = len(result). At the end the first `AHEAD` bytes of `then`, from its element `then_first` on, are prefetched.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kinds = signature.args
        w, v, out, then = (_pointer(context, builder, kinds[i], args[i]) for i in (0, 1, 4, 5))
        v, then = builder.gep(v, [args[2]]), builder.gep(then, [args[6]])
        D = builder.extract_value(context.make_array(kinds[4])(context, builder, args[4]).shape, 0)
        full, rest = builder.sdiv(D, INT64(VECTOR)), builder.srem(D, INT64(VECTOR))

        def columns(start: Any, turns: Any, vectors: int, rest: Any = None) -> Any:
            """Add `turns` times the columns of `vectors` vectors, from `start` on. -> the column after the last"""

            def turn(_: Any, at: list[Any]) -> list[Any]:
                _add_columns(builder, w, v, out, args[3], D, at[0], vectors, rest)
                return [builder.add(at[0], INT64(VECTOR * vectors))]

            return loop(builder, turns, [start], turn)[0]

        at = columns(INT64(0), builder.sdiv(full, INT64(_WIDE)), _WIDE)
        at = columns(at, builder.srem(full, INT64(_WIDE)), 1)
        columns(at, _one_if_any(builder, rest), 1, rest)
        _prefetch_lines(builder, INT64(AHEAD // _LINE), lambda at: [builder.gep(_bytes(builder, then), [at])])
        return context.get_dummy_value()

    return types.void(weights, values, types.intp, types.intp, result, then, types.intp), generate


def _add_columns(
    builder: Any, weights: Any, values: Any, result: Any, count: Any, D: Any, at: Any, vectors: int, rest: Any
) -> None:
    """Add some columns of all values, from `at` on. Odd and even values have separate sums, which can overlap."""
    last = builder.sub(count, INT64(1))

    def pair(g: Any, sums: list[Any]) -> list[Any]:
        after = []
        for r in range(2):
            j = builder.add(builder.mul(g, INT64(2)), INT64(r))
            there = _at_most(builder, j, last)
            weight = builder.load(builder.gep(weights, [there]))
            weight = builder.select(builder.icmp_signed("<", j, count), weight, FLOAT(0.0))
            factor = splat(builder, weight, VECTOR)
            row = builder.gep(values, [builder.add(builder.mul(there, D), at)])
            for i in range(vectors):
                value = _load(builder, builder.gep(row, [INT64(VECTOR * i)]), rest)
                after.append(fma(builder, factor, value, sums[r * vectors + i]))
        return after

    zeros = [constant(FLOAT, VECTOR, 0.0)] * (2 * vectors)
    sums = loop(builder, builder.sdiv(builder.add(count, INT64(1)), INT64(2)), zeros, pair)
    for i in range(vectors):
        target = builder.gep(result, [builder.add(at, INT64(VECTOR * i))])
        total = builder.fadd(builder.fadd(sums[i], sums[vectors + i]), _load(builder, target, rest))
        place = builder.bitcast(target, _LANES.as_pointer())
        if rest is None:
            builder.store(total, place, align=4)
        else:
            name = f"llvm.masked.store.v{VECTOR}f32.p0"
            call(builder, name, ir.VoidType(), total, place, INT32(4), _mask(builder, rest))


@intrinsic
def highest_of(typing_context: Any, scores: Any, count: Any) -> Any:
    """The largest of the first `count` numbers that are not NaN, -inf where there is none."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        s, count = _pointer(context, builder, signature.args[0], args[0]), args[1]
        nothing = constant(FLOAT, VECTOR, float("-inf"))

        def keep(found: Any, highest: Any) -> Any:
            return builder.select(builder.fcmp_ordered(">", found, highest), found, highest)

        def step(i: Any, highest: list[Any]) -> list[Any]:
            at = builder.mul(i, INT64(VECTOR))
            place = builder.gep(s, [at])
            there = _mask(builder, builder.sub(count, at))
            found = builder.select(there, load(builder, place, _LANES), nothing)
            return [keep(found, highest[0])]

        turns = builder.sdiv(builder.add(count, INT64(VECTOR - 1)), INT64(VECTOR))
        (lanes,) = loop(builder, turns, [nothing], step)
        width = VECTOR
        while width > 1:
            width //= 2
            low, high = (ir.Constant(vector(INT32, width), list(range(at, at + width))) for at in (0, width))
            lanes = keep(builder.shuffle_vector(lanes, lanes, high), builder.shuffle_vector(lanes, lanes, low))
        return builder.extract_element(lanes, INT32(0))

    return types.float32(scores, types.intp), generate
