"""The innermost product of prefill attention: a block of C += A B, kept in registers over k.

Numba cannot keep an array in registers, so these few instructions are generated.
"""

from typing import Any

from numba import types

from .intrinsics import FEATURES, FLOAT, INT64, fma, intrinsic, load, loop, splat, vector

VECTOR = 16
"""float32 numbers in a vector: one AVX-512, two AVX2 or four NEON registers."""
ROWS = 4
"""Rows of C in one block."""
WIDE = 4 if "avx512f" in FEATURES else 1
"""Vectors in a row of a wide block: 4 x 4 sums fill AVX-512's 32 registers well; 16 registers of 8 hold 4 x 1."""

_LANES = vector(FLOAT, VECTOR)


def _block(vectors: int) -> Any:
    """Build the operation for blocks of ROWS x (`vectors` VECTOR)."""

    @intrinsic
    def products(
        typing_context: Any, c: Any, a: Any, a_row: Any, a_column: Any, b: Any, stride: Any, count: Any
    ) -> Any:
        """c[r, i] += sum over k < count of a[r a_row + k a_column] b[k, i]; rows of b and c are `stride` apart.

        c, a and b are flat float32 arrays that begin at the block.
        """

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            c, a, b = (context.make_array(signature.args[i])(context, builder, args[i]).data for i in (0, 1, 4))
            a_row, a_column, stride, count = args[2], args[3], args[5], args[6]

            def places(array: Any, row: Any) -> list[Any]:
                start = builder.gep(array, [builder.mul(stride, row)])
                return [builder.gep(start, [INT64(VECTOR * v)]) for v in range(vectors)]

            def step(k: Any, sums: list[Any]) -> list[Any]:
                b_row = [load(builder, place, _LANES) for place in places(b, k)]
                after = []
                for r in range(ROWS):
                    at = builder.add(builder.mul(a_row, INT64(r)), builder.mul(k, a_column))
                    factor = splat(builder, load(builder, builder.gep(a, [at]), FLOAT), VECTOR)
                    held = sums[r * vectors : (r + 1) * vectors]
                    after += [fma(builder, factor, x, y) for x, y in zip(b_row, held, strict=True)]
                return after

            targets = [place for r in range(ROWS) for place in places(c, INT64(r))]
            before = [load(builder, target, _LANES) for target in targets]
            for target, total in zip(targets, loop(builder, count, before, step), strict=True):
                builder.store(total, builder.bitcast(target, _LANES.as_pointer()), align=4)
            return context.get_dummy_value()

        return types.void(c, a, types.intp, types.intp, b, types.intp, types.intp), generate

    return products


add_wide, add_narrow = _block(WIDE), _block(1)
