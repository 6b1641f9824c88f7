"""AWQ (Lin et al., arXiv 2306.00978) in the layout "gemm" that AutoAWQ writes.

    X.qweight  int32 [in, out / 8]    integers from 0 to 15, packed along the rows: 0, 2, 4, 6, 1, 3, 5, 7 of each 8
    X.qzeros   int32 [G, out / 8]     zero points, packed alike
    X.scales   float16 [G, out]

Definition: AutoAWQ `awq/modules/linear/gemm.py` (`WQLinear_GEMM`), `awq/utils/packing_utils.py`.
"""

import numpy as np
from numpy.typing import NDArray

from ...config import Fields
from ..tensors import FLOATS, StoredTensor
from .gptq import unpack_across
from .matrix import Matrix, Module, Scheme, common_group, integers_dtype, read_bits, read_group_size

PLACES = np.array([0, 4, 1, 5, 2, 6, 3, 7])
"""The place of each of 8 columns in a word, from its lowest bits on"""


def read(fields: Fields, expanded: str) -> Scheme:
    """The scheme of a quantization_config; matrices that are not exact in 4 bits become `expanded`."""
    read_bits(fields, known=(4,))
    size = read_group_size(fields)
    layout = fields.get("version", fields.get("format", "gemm")).lower()
    Fields({"version": layout}, fields.source).choice("version", "gemm", ("gemm",))
    asymmetric = fields.get("zero_point", True)
    return Scheme(
        title=f"AWQ, 4 bits, {'rows' if size < 0 else f'groups of {size}'}",
        dtype=expanded if size > 0 and size % 32 else integers_dtype(4, symmetric=not asymmetric),
        group=common_group([size]),
        expanded=expanded,
        markers=("qweight", "qzeros"),
        matrix=lambda module: read_module(module, size),
    )


def read_module(module: Module, size: int) -> Matrix:
    """The matrix of a module."""
    qweight = module.take("qweight", ("int32",), None, None)
    inputs, outputs = qweight.shape[0], qweight.shape[1] * 8
    size = inputs if size < 0 else size
    groups = -(-inputs // size)
    zeros = module.take("qzeros", ("int32",), groups, outputs // 8)
    scales = module.take("scales", FLOATS, groups, outputs)

    def unpacked(tensor: StoredTensor, first: int, stop: int) -> NDArray[np.int8]:
        start = first // 8 * 8
        integers = unpack_across(tensor, 4, start, -(-stop // 8) * 8)
        ordered = integers.reshape(len(integers), -1, 8)[..., PLACES].reshape(integers.shape)
        return np.ascontiguousarray(ordered[:, first - start : stop - start].T)  # [in, out] -> [n, in]

    return Matrix(
        name=f"{module.name}.weight",
        shape=(outputs, inputs),
        numbers=lambda first, stop: unpacked(qweight, first, stop),
        scales=lambda first, stop: scales.part(1, first, stop).load().T,
        zeros=lambda first, stop: unpacked(zeros, first, stop),
        size=size,
        bits=4,
    )
