"""LLVM operations that Numba does not offer: 16-bit floats, vectors in registers, instructions of one CPU.

Most are LLVM's generic vector operations, which it lowers to those of the CPU (AVX-512, AVX2, NEON). Those for one CPU
have a generic alternative, and are selected by `FEATURES`.
"""

from collections.abc import Callable
from typing import Any

import llvmlite.binding
import numba
import numba.extending
from llvmlite import ir
from numba import types

intrinsic: Callable[[Callable[..., Any]], Any] = numba.extending.intrinsic
"""Numba's decorator, with a type annotation."""


def _features() -> frozenset[str]:
    """The features of the CPU that Numba compiles for: this one, unless NUMBA_CPU_FEATURES or _NAME says otherwise."""
    if numba.config.CPU_FEATURES is not None:
        flags = str(numba.config.CPU_FEATURES).split(",")
        return frozenset(flag[1:] for flag in flags if flag.startswith("+"))
    if numba.config.CPU_NAME is not None:
        return frozenset()
    return frozenset(name for name, there in llvmlite.binding.get_host_cpu_features().items() if there)


FEATURES = _features()
"""CPU features by LLVM's names: "avx512f", "avx512vnni", "avx512bf16", "avx2", "fma", "f16c", "neon" ..."""

INT1, INT8, INT16, INT32, INT64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
HALF, FLOAT = ir.HalfType(), ir.FloatType()


# --- one number -------------------------------------------------------------------------------------------------------


@intrinsic
def bfloat16_to_float32(typing_context: Any, bits: Any) -> Any:
    """The value of a bfloat16 given as uint16: the upper half of a float32."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(builder.shl(builder.zext(args[0], INT32), INT32(16)), FLOAT)

    return types.float32(types.uint16), generate


@intrinsic
def float16_to_float32(typing_context: Any, bits: Any) -> Any:
    """The value of a float16 given as uint16."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fpext(builder.bitcast(args[0], HALF), FLOAT)

    return types.float32(types.uint16), generate


@intrinsic
def float32_to_bfloat16(typing_context: Any, value: Any) -> Any:
    """Round to the nearest bfloat16 as uint16, ties to even; NaN stays NaN."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word = builder.bitcast(args[0], INT32)
        odd = builder.and_(builder.lshr(word, INT32(16)), INT32(1))
        rounded = builder.add(builder.add(word, INT32(0x7FFF)), odd)
        is_nan = builder.fcmp_unordered("uno", args[0], args[0])
        word = builder.select(is_nan, builder.or_(word, INT32(1 << 22)), rounded)
        return builder.trunc(builder.lshr(word, INT32(16)), INT16)

    return types.uint16(types.float32), generate


# --- parts of generated code: vectors ---------------------------------------------------------------------------------


def vector(element: ir.Type, lanes: int) -> ir.VectorType:
    """The type of a vector of `lanes` elements."""
    return ir.VectorType(element, lanes)


def constant(kind: ir.Type, lanes: int, value: float) -> ir.Constant:
    """A vector constant with the same number in all lanes."""
    return ir.Constant(vector(kind, lanes), [kind(value)] * lanes)


def splat(builder: ir.IRBuilder, scalar: Any, lanes: int) -> Any:
    """Broadcast a number to all lanes."""
    kind = vector(scalar.type, lanes)
    one = builder.insert_element(ir.Constant(kind, ir.Undefined), scalar, INT32(0))
    return builder.shuffle_vector(one, one, ir.Constant(vector(INT32, lanes), [0] * lanes))


def load(builder: ir.IRBuilder, pointer: Any, kind: ir.Type, align: int = 4) -> Any:
    """Load a number or a vector from an address that is a multiple of `align` bytes."""
    return builder.load(builder.bitcast(pointer, kind.as_pointer()), align=align)


def call(builder: ir.IRBuilder, name: str, result: ir.Type, *args: Any) -> Any:
    """Call a function by its name: one of LLVM's, or an instruction such as "llvm.x86.avx512.vpdpbusd.512"."""
    kind = ir.FunctionType(result, [arg.type for arg in args])
    function = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
    return builder.call(function, args)


def fma(builder: ir.IRBuilder, x: Any, y: Any, z: Any) -> Any:
    """x y + z on vectors of float32, rounded once."""
    return call(builder, f"llvm.fma.v{x.type.count}f32", x.type, x, y, z)


def loop(
    builder: ir.IRBuilder, count: Any, carried: list[Any], body: Callable[[Any, list[Any]], list[Any]]
) -> list[Any]:
    """`for i in range(count): carried = body(i, carried)`, everything in registers.

    Args:
        builder: where code is generated
        count: number of iterations, a 64-bit value
        carried: values before the first iteration
        body: takes i and the values so far, generates one iteration, returns the values after it
    """
    before = builder.block
    head, turn, end = (builder.append_basic_block(name) for name in ("loop.head", "loop.turn", "loop.end"))
    builder.branch(head)
    builder.position_at_end(head)
    index = builder.phi(INT64)
    phis = [builder.phi(value.type) for value in carried]
    builder.cbranch(builder.icmp_signed("<", index, count), turn, end)
    builder.position_at_end(turn)
    after = body(index, list(phis))
    step = builder.add(index, INT64(1))
    for phi, start, value in zip([index, *phis], [INT64(0), *carried], [step, *after], strict=True):
        phi.add_incoming(start, before)
        phi.add_incoming(value, builder.block)
    builder.branch(head)
    builder.position_at_end(end)
    return list(phis)
