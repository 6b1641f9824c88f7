"""GPTQ (Frantar et al., arXiv 2210.17323) in the layout that AutoGPTQ introduced and GPTQModel writes.

    X.qweight  int32 [in bits / 32, out]    integers from 0 on, packed down the columns, lowest bits first
    X.qzeros   int32 [G, out bits / 32]     zero points, packed along the rows; less 1 in version 1 of the format
    X.scales   float16 [G, out]
    X.g_idx    int32 [in]                   the group of each input; with desc_act they are no neighbours

Symmetric quantisation has a zero point of half the range. Definition: AutoGPTQ `auto_gptq/nn_modules/qlinear`,
GPTQModel `gptqmodel/nn_modules/qlinear` (`dequantize_weight`).
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...config import Fields
from ...errors import UnsupportedModelError
from ..tensors import FLOATS, StoredTensor
from .matrix import Matrix, Module, Scheme, common_group, integers_dtype, read_bits, read_group_size, unpack_words

LAYOUTS = {"gptq": 1, "gptq_v2": 0}
"""checkpoint_format -> what is added to a stored zero point"""


def read(fields: Fields, expanded: str) -> Scheme:
    """The scheme of a quantization_config; matrices that are not exact in 8 or 4 bits become `expanded`."""
    bits, size = read_bits(fields), read_group_size(fields)
    layout = fields.choice("checkpoint_format", fields.get("format", "gptq"), tuple(LAYOUTS))
    fields.choice("pack_dtype", "int32", ("int32",))
    if fields.get("is_marlin_format", False):
        raise UnsupportedModelError(f"{fields.source}: is_marlin_format is true; minillm reads 'gptq' and 'gptq_v2'")
    changed = [name for name in fields.get("dynamic", {}) if not name.startswith("-:")]
    if changed:
        raise UnsupportedModelError(
            f"{fields.source}: dynamic gives {changed[0]!r:.80} other settings; minillm reads one for all modules"
        )
    symmetric, ordered = fields.get("sym", True), fields.get("desc_act", False)
    exact = (symmetric or bits == 4) and not ordered and (size < 0 or size % 32 == 0)
    return Scheme(
        title=f"GPTQ, {bits} bits, {'rows' if size < 0 else f'groups of {size}'}",
        dtype=integers_dtype(bits, symmetric=symmetric) if exact else expanded,
        group=common_group([size]),
        expanded=expanded,
        markers=("qweight", "qzeros"),
        matrix=lambda module: read_module(module, bits, size, LAYOUTS[layout]),
    )


def read_module(module: Module, bits: int, size: int, added: int) -> Matrix:
    """The matrix of a module."""
    per = 32 // bits
    qweight = module.take("qweight", ("int32",), None, None)
    inputs, outputs = qweight.shape[0] * per, qweight.shape[1]
    size = inputs if size < 0 else size
    groups = -(-inputs // size)
    scales = module.take("scales", FLOATS, groups, outputs)
    zeros = module.take("qzeros", ("int32",), groups, -(-outputs // per))
    order = module.take("g_idx", ("int32",), inputs) if "g_idx" in module else None

    def numbers(first: int, stop: int) -> NDArray[np.int8]:
        words = qweight.stored(("int32",))[:, first:stop]
        return unpack_words(words.T, bits)  # [in bits / 32, n] -> [n, in]

    def zero_points(first: int, stop: int) -> NDArray[Any]:
        stored = unpack_across(zeros, bits, first, stop)
        wrapped = (stored + np.int8(added)).T if bits == 8 else ((stored + np.int8(8 + added)) & np.int8(15)).T - 8
        return wrapped.astype(np.int16)

    return Matrix(
        name=f"{module.name}.weight",
        shape=(outputs, inputs),
        numbers=numbers,
        scales=lambda first, stop: scales.part(1, first, stop).load().T,
        zeros=zero_points,
        size=size,
        columns=None if order is None else lambda: order.stored(("int32",)),
        bits=bits,
    )


def unpack_across(tensor: StoredTensor, bits: int, first: int, stop: int) -> NDArray[np.int8]:
    """Columns `first` to `stop` of integers packed along the rows, less 2**(bits - 1). [n, w] -> [n, stop - first]"""
    per = 32 // bits
    start = first // per
    words = tensor.stored(("int32",))[:, start : -(-stop // per)]
    return unpack_words(words, bits)[:, first - start * per : stop - start * per]
