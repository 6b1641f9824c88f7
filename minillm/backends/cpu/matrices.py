"""Stored matrices, tables and cached vectors as the kernels in C read them: formats, addresses, sizes."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...reference.blocks import BLOCK_FORMATS, CODE_BOOKS, BlockMatrix
from ...reference.quantize import Quantized
from ..storage import Experts
from ..stored_vectors import StoredVectors
from .launching import Table, address, filled, kernels, not_recorded

CODES = {np.dtype(kind): code for code, kind in enumerate((np.float32, np.float16, np.uint16, np.int8, np.uint8))}
"""Type of an array of weights, keys or values -> its format in C: uint16 holds bfloat16, uint8 pairs of int4"""
BLOCK_CODES = {name: code for code, name in enumerate(BLOCK_FORMATS, len(CODES))}
"""Block format -> its format in C"""
BFLOAT16 = CODES[np.dtype(np.uint16)]
ROUNDING = range(CODES[np.dtype(np.int8)], BLOCK_CODES[CODE_BOOKS[0]])
"""The formats in C for which activations are rounded to integers"""


def contiguous(x: Any) -> Any:
    """An array whose rows follow one another; copied only if they do not."""
    if x is None or x.flags.c_contiguous:
        return x
    not_recorded()
    return np.ascontiguousarray(x)


class StoredMatrix(NamedTuple):
    """A stored matrix as the kernels read it."""

    values: NDArray[Any]
    code: int
    """Its format"""
    scales: NDArray[Any] | None = None
    offsets: NDArray[Any] | None = None
    group: int = 32
    """Inputs that share a scale, of Quantized matrices"""

    @property
    def has_zeros(self) -> bool:
        """Whether its offsets are zero points."""
        return self.offsets is not None and self.offsets.dtype == np.uint8


def stored_matrix(data: Any) -> StoredMatrix:
    """The numbers of a weight as the kernels read them."""
    if isinstance(data, Quantized):
        return StoredMatrix(data.values, CODES[data.values.dtype], data.scales, data.offsets, data.group)
    if isinstance(data, BlockMatrix):
        return StoredMatrix(contiguous(data.blocks), BLOCK_CODES[data.form.name])
    return StoredMatrix(contiguous(data), CODES[data.dtype])


def rounded_sizes(product: Any) -> tuple[int, int, int]:
    """Groups of 32 numbers in a row of rounded x, and how many scales and sums are kept for them."""
    groups = -(-product.inputs // product.group) * product.group // 32
    stride = -(-groups // 16) * 16
    return groups, stride, stride * kernels().sum_parts(product.format)


class ExpertTable:
    """The addresses of all experts' numbers, scales and offsets, and what keeps them valid."""

    def __init__(self, experts: Experts) -> None:
        self.first = experts.matrices[0]
        stored = map(stored_matrix, experts.matrices)
        self.matrices = [(matrix.values, matrix.scales, matrix.offsets) for matrix in stored]
        pointers = [[0 if array is None else address(array) for array in arrays] for arrays in self.matrices]
        self.addresses = np.array(pointers, np.uint64)  # [X, 3]


def table_of(data: Any) -> Any:
    """A table of embeddings in C."""
    if data is None:
        return Table()
    stored = stored_matrix(data)
    return filled(
        Table, values=stored.values, scales=stored.scales, offsets=stored.offsets, format=stored.code,
        group=stored.group, zeros=stored.has_zeros,
    )  # fmt: skip


def cached_layer(keys: Any, values: Any) -> dict[str, Any]:
    """One layer of the cache as fields of arguments."""
    stored = [vectors if isinstance(vectors, StoredVectors) else StoredVectors(vectors) for vectors in (keys, values)]
    return {
        "keys": stored[0].data,
        "values": stored[1].data,
        "key_scales": stored[0].scales,
        "value_scales": stored[1].scales,
        "format": CODES[stored[0].data.dtype],
        "P": keys.shape[2],
    }
