"""Memory layouts of weights, and the instructions that expand them to float32.

Each format expands a block of 32 consecutive inputs to vectors of `LANES` float32, or a single weight to float32. The
dtype of the array selects the format (`FORMATS`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from llvmlite import ir
from numba import types

from .intrinsics import FEATURES, FLOAT, HALF, INT8, INT16, INT32, INT64, call, constant, intrinsic, load, vector

BLOCK = 32
"""Inputs per iteration of a tile's loop, and per 16 bytes of int4."""
LANES = 16 if "avx512f" in FEATURES else 8
"""float32 numbers in a vector. LLVM splits what is wider than a register (8 on NEON: two registers)."""
FLOATS, INTS = vector(FLOAT, LANES), vector(INT32, LANES)


@dataclass(frozen=True)
class Format:
    """One way to store weights."""

    block_bytes: int
    """Bytes that hold a block of 32."""
    expand: Callable[[ir.IRBuilder, Any, Any], list[Any]]
    """(builder, address of a block, its scale in all lanes) -> its weights, 32 / LANES vectors"""
    expand_one: Callable[[ir.IRBuilder, Any, Any], Any]
    """(builder, address of a block, number j in it) -> one weight, without its scale"""
    scaled: bool = False
    """Whether a group has a scale."""
    alone: int | None = None
    """With AVX-512, outputs of a tile of one row; None: as many as for any format"""


def load_block(builder: ir.IRBuilder, address: Any, element: Any, bytes_each: int) -> list[Any]:
    """Load a block's elements as they are stored."""
    starts = range(0, BLOCK * bytes_each, LANES * bytes_each)
    kind = vector(element, LANES)
    return [load(builder, builder.gep(address, [INT64(start)]), kind, align=1) for start in starts]


def load_one(builder: ir.IRBuilder, address: Any, element: Any, bytes_each: int, j: Any) -> Any:
    """Load element j of a block."""
    return load(builder, builder.gep(address, [builder.mul(j, INT64(bytes_each))]), element, align=1)


def expand_float32(builder: ir.IRBuilder, address: Any, scale: Any) -> list[Any]:
    return load_block(builder, address, FLOAT, 4)


def expand_one_float32(builder: ir.IRBuilder, address: Any, j: Any) -> Any:
    return load_one(builder, address, FLOAT, 4, j)


def expand_float16(builder: ir.IRBuilder, address: Any, scale: Any) -> list[Any]:
    return [builder.fpext(halves, FLOATS) for halves in load_block(builder, address, HALF, 2)]


def expand_one_float16(builder: ir.IRBuilder, address: Any, j: Any) -> Any:
    return builder.fpext(load_one(builder, address, HALF, 2, j), FLOAT)


def expand_bfloat16(builder: ir.IRBuilder, address: Any, scale: Any) -> list[Any]:
    words = [builder.zext(bits, INTS) for bits in load_block(builder, address, INT16, 2)]
    return [builder.bitcast(builder.shl(word, constant(INT32, LANES, 16)), FLOATS) for word in words]


def expand_one_bfloat16(builder: ir.IRBuilder, address: Any, j: Any) -> Any:
    word = builder.zext(load_one(builder, address, INT16, 2, j), INT32)
    return builder.bitcast(builder.shl(word, INT32(16)), FLOAT)


def expand_int8(builder: ir.IRBuilder, address: Any, scale: Any) -> list[Any]:
    words = [builder.sext(values, INTS) for values in load_block(builder, address, INT8, 1)]
    return [builder.fmul(builder.sitofp(word, FLOATS), scale) for word in words]


def expand_one_int8(builder: ir.IRBuilder, address: Any, j: Any) -> Any:
    return builder.sitofp(load_one(builder, address, INT8, 1, j), FLOAT)


def expand_int4(builder: ir.IRBuilder, address: Any, scale: Any) -> list[Any]:
    """With AVX-512 by table look-up: a register holds the 16 values times the scale, and four bits select one."""
    starts, kind = range(0, BLOCK // 2, LANES), vector(INT8, LANES)
    pairs = [builder.zext(load(builder, builder.gep(address, [INT64(start)]), kind, align=1), INTS) for start in starts]
    high = [builder.lshr(pair, constant(INT32, LANES, 4)) for pair in pairs]
    if "avx512f" in FEATURES:
        values = builder.fmul(ir.Constant(FLOATS, [FLOAT(i - 8) for i in range(16)]), scale)
        return [call(builder, "llvm.x86.avx512.permvar.sf.512", FLOATS, values, index) for index in pairs + high]
    low = [builder.and_(pair, constant(INT32, LANES, 15)) for pair in pairs]
    centred = [builder.sub(nibble, constant(INT32, LANES, 8)) for nibble in low + high]
    return [builder.fmul(builder.sitofp(value, FLOATS), scale) for value in centred]


def expand_one_int4(builder: ir.IRBuilder, address: Any, j: Any) -> Any:
    byte = load_one(builder, address, INT8, 1, builder.and_(j, INT64(15)))
    shift = builder.trunc(builder.lshr(builder.and_(j, INT64(16)), INT64(2)), INT8)  # 0, or 4 from weight 16 on
    nibble = builder.and_(builder.lshr(byte, shift), INT8(15))
    return builder.sitofp(builder.sub(nibble, INT8(8)), FLOAT)


FORMATS = {
    types.float32: Format(128, expand_float32, expand_one_float32, alone=2),
    types.int16: Format(64, expand_float16, expand_one_float16, alone=1),
    types.uint16: Format(64, expand_bfloat16, expand_one_bfloat16, alone=1),
    types.int8: Format(32, expand_int8, expand_one_int8, scaled=True),
    types.uint8: Format(16, expand_int4, expand_one_int4, scaled=True),
}
"""Type of an array's elements -> its format. Numba has no 16-bit floats on a CPU: float16 is passed as int16, bfloat16
as uint16. int4 is two weights in each byte."""


def scale_of(builder: ir.IRBuilder, row_of_scales: Any, block: Any, group_shift: Any) -> Any:
    """The float16 scale of a block. `group_shift` is 0 for groups of 32 and 1 for groups of 64."""
    position = builder.shl(builder.lshr(block, group_shift), INT64(1))
    return load(builder, builder.gep(row_of_scales, [position]), HALF, align=1)


def pointers(context: Any, builder: ir.IRBuilder, kind: Any, array: Any) -> tuple[Any, Any, Any]:
    """The address of a matrix, its row stride in bytes, and its number of rows."""
    struct = context.make_array(kind)(context, builder, array)
    address = builder.bitcast(struct.data, INT8.as_pointer())
    return address, builder.extract_value(struct.strides, 0), builder.extract_value(struct.shape, 0)


@intrinsic
def weight_at(typing_context: Any, weight: Any, scales: Any, group_shift: Any, o: Any, j: Any) -> Any:
    """Weight (o, j) of a stored matrix as float32."""
    form = FORMATS[weight.dtype]

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        start, stride, _ = pointers(context, builder, signature.args[0], args[0])
        row = builder.gep(start, [builder.mul(args[3], stride)])
        block = builder.lshr(args[4], INT64(5))
        address = builder.gep(row, [builder.mul(block, INT64(form.block_bytes))])
        value = form.expand_one(builder, address, builder.and_(args[4], INT64(BLOCK - 1)))
        if not form.scaled:
            return value
        start, stride, _ = pointers(context, builder, signature.args[1], args[1])
        row_of_scales = builder.gep(start, [builder.mul(args[3], stride)])
        return builder.fmul(value, builder.fpext(scale_of(builder, row_of_scales, block, args[2]), FLOAT))

    return types.float32(weight, scales, types.int64, types.int64, types.int64), generate
