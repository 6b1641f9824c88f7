"""Tiles: a few rows of activations times a few rows of weights, with every sum in a register.

A tile goes along the input in blocks of 32. For each block it loads the weights of its outputs once, expands them to
float32 and multiplies them with all its rows. The sum of one row and one output is one vector of `LANES` partial sums,
which are added up at the end. The order of additions is the same in every tile, so a row's result is bit-identical for
any number of rows.
"""

from dataclasses import dataclass
from typing import Any

from llvmlite import ir
from numba import types

from .formats import BLOCK, FLOATS, FORMATS, INTS, LANES, Format, pointers, scale_of
from .intrinsics import FEATURES, FLOAT, INT32, INT64, call, constant, fma, intrinsic, load, loop, splat

MOST_ROWS = 8
"""Rows that a tile can have."""
PANEL = 24
"""Outputs computed together: their weights stay in a core's cache for all rows, if those are more than 8."""
AHEAD = 16384
"""Prefetch distance in bytes. Rows of weights read in parallel are more streams than the hardware prefetcher follows:
prefetching took one row of bfloat16 from a third to four fifths of the bandwidth."""

OUTPUTS = (
    {1: 4, 2: 6, 3: 4, 4: 4, 5: 4, 6: 3, 7: 3, 8: 3}
    if "avx512f" in FEATURES  # 32 registers of 16
    else {1: 4, 2: 4, 3: 3, 4: 2, 5: 2, 6: 1, 7: 1, 8: 1}  # 16 registers of 8
)
"""Rows of a tile -> its outputs: as many sums as leave registers for weights. A tile of one row is bound by reading
weights, which is fastest sequentially. So some formats have fewer outputs there (`Format.alone`), unless the latency of
dependent additions dominates."""


@dataclass(frozen=True)
class Operands:
    """Operands of a panel: addresses, row strides in bytes, counts; all values of generated code."""

    x: Any
    x_stride: Any
    weight: Any
    weight_stride: Any
    scales: Any
    scales_stride: Any
    group_shift: Any
    out: Any
    out_stride: Any
    blocks: Any
    stop: Any
    """the output after the panel's last"""


@intrinsic
def multiply_panel(
    typing_context: Any, x: Any, weight: Any, scales: Any, group_shift: Any, out: Any,
    row: Any, rows: Any, first: Any, stop: Any,
) -> Any:  # fmt: skip
    """out[row : row + rows, first : stop] = x[row : row + rows] W[first : stop]^T over all whole blocks of 32 inputs.

    At most `MOST_ROWS` rows. Arrays are contiguous; the other arguments are int64.
    """
    form = FORMATS[weight.dtype]

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        matrix = {name: pointers(context, builder, signature.args[i], args[i]) for i, name in MATRICES.items()}
        row, rows, first, stop = args[5:]
        x_start, x_stride, _ = matrix["x"]
        out_start, out_stride, _ = matrix["out"]
        columns = builder.sdiv(x_stride, INT64(4))
        at = Operands(
            builder.gep(x_start, [builder.mul(row, x_stride)]), x_stride, *matrix["weight"][:2], *matrix["scales"][:2],
            args[3], builder.gep(out_start, [builder.mul(row, out_stride)]), out_stride,
            builder.sdiv(columns, INT64(BLOCK)), stop,
        )  # fmt: skip
        end = builder.append_basic_block("end")
        switch = builder.switch(rows, end)
        for tile_rows in range(1, MOST_ROWS + 1):
            switch.add_case(INT64(tile_rows), builder.append_basic_block(f"rows{tile_rows}"))
            builder.position_at_end(switch.cases[-1][1])
            walk_panel(builder, form, at, tile_rows, first)
            builder.branch(end)
        builder.position_at_end(end)
        return context.get_dummy_value()

    arguments = (x, weight, scales, types.int64, out, types.int64, types.int64, types.int64, types.int64)
    return types.void(*arguments), generate


MATRICES = {0: "x", 1: "weight", 2: "scales", 4: "out"}
"""Argument number -> name of the arrays of `multiply_panel`."""


def walk_panel(builder: ir.IRBuilder, form: Format, at: Operands, rows: int, first: Any) -> None:
    """Generate the tiles of a panel, one after the other."""
    outputs = form.alone if rows == 1 and form.alone and LANES == 16 else OUTPUTS[rows]
    count = builder.sdiv(builder.add(builder.sub(at.stop, first), INT64(outputs - 1)), INT64(outputs))

    def turn(i: Any, carried: list[Any]) -> list[Any]:
        multiply_tile(builder, form, at, rows, outputs, builder.add(first, builder.mul(i, INT64(outputs))))
        return carried

    loop(builder, count, [], turn)


def multiply_tile(builder: ir.IRBuilder, form: Format, at: Operands, rows: int, outputs: int, first: Any) -> None:
    """Generate one tile, outputs `first` and following. Those beyond the panel repeat its last and are not stored."""
    numbers = [builder.add(first, INT64(i)) for i in range(outputs)]
    last = builder.sub(at.stop, INT64(1))
    clamped = [builder.select(builder.icmp_signed("<", o, last), o, last) for o in numbers]
    weights = [builder.gep(at.weight, [builder.mul(o, at.weight_stride)]) for o in clamped]
    scales = [builder.gep(at.scales, [builder.mul(o, at.scales_stride)]) for o in clamped]
    xs = [builder.gep(at.x, [builder.mul(INT64(r), at.x_stride)]) for r in range(rows)]
    if form.scaled:
        for row in scales:
            prefetch(builder, row, AHEAD // form.block_bytes * 2)

    def turn(block: Any, sums: list[Any]) -> list[Any]:
        here = builder.gep(weights[0], [builder.mul(block, INT64(outputs * form.block_bytes))])
        for line in range(0, outputs * form.block_bytes, 64):
            prefetch(builder, here, AHEAD + line)
        expanded = [expand(builder, form, at, row, of, block) for row, of in zip(weights, scales, strict=True)]
        sums = list(sums)
        for part in range(BLOCK // LANES):
            for r, row in enumerate(xs):
                offset = builder.add(builder.mul(block, INT64(4 * BLOCK)), INT64(4 * LANES * part))
                x = load(builder, builder.gep(row, [offset]), FLOATS)
                for i in range(outputs):
                    sums[r * outputs + i] = fma(builder, x, expanded[i][part], sums[r * outputs + i])
        return sums

    results = add_up(builder, loop(builder, at.blocks, [constant(FLOAT, LANES, 0)] * (rows * outputs), turn))
    for i, o in enumerate(numbers):
        with builder.if_then(builder.icmp_signed("<", o, at.stop)):
            for r in range(rows):
                offset = builder.add(builder.mul(INT64(r), at.out_stride), builder.shl(o, INT64(2)))
                address = builder.bitcast(builder.gep(at.out, [offset]), FLOAT.as_pointer())
                builder.store(results[r * outputs + i], address)


def expand(builder: ir.IRBuilder, form: Format, at: Operands, weights: Any, scales: Any, block: Any) -> list[Any]:
    """Expand one output's weights of a block to float32."""
    scale = None
    if form.scaled:
        half = scale_of(builder, scales, block, at.group_shift)
        scale = builder.fpext(splat(builder, half, LANES), FLOATS)
    return form.expand(builder, builder.gep(weights, [builder.mul(block, INT64(form.block_bytes))]), scale)


def prefetch(builder: ir.IRBuilder, address: Any, offset: int) -> None:
    """Prefetch a cache line for reading. Beyond the end of an array this does nothing."""
    where = builder.gep(address, [INT64(offset)])
    call(builder, "llvm.prefetch.p0", ir.VoidType(), where, INT32(0), INT32(3), INT32(1))


def add_up(builder: ir.IRBuilder, sums: list[Any]) -> list[Any]:
    """The sum over the lanes of each vector, lane i with lane i + LANES / 2 first, many vectors at a time.

    Two vectors become one whose lower half holds the first's folded lanes and whose upper half the second's; so 16
    vectors of 16 lanes take 15 additions of whole vectors.
    """
    vectors, width = list(sums), LANES  # `width` lanes of a vector belong to one sum
    while width > 1:
        if len(vectors) % 2:
            vectors.append(ir.Constant(FLOATS, ir.Undefined))
        vectors = [fold(builder, a, b, width) for a, b in zip(vectors[::2], vectors[1::2], strict=True)]
        width //= 2
    return [builder.extract_element(vectors[i // LANES], INT32(i % LANES)) for i in range(len(sums))]


def fold(builder: ir.IRBuilder, a: Any, b: Any, width: int) -> Any:
    """Add the upper half of each `width` lanes to the lower one, in a and b, side by side in one vector."""
    lower = [start + i for start in range(0, 2 * LANES, width) for i in range(width // 2)]
    halves = [
        builder.shuffle_vector(a, b, ir.Constant(INTS, [lane + shift for lane in lower])) for shift in (0, width // 2)
    ]
    return builder.fadd(*halves)
