"""Matrices as weights store them: several in one, the reading of their numbers, and the rounding to 16 bits."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..reference.blocks import BlockMatrix, dequantize_blocks
from ..reference.quantize import Quantized, dequantize
from .formats import (
    BLOCKS,
    FLOAT16,
    INT4,
    INT8,
    STORED_FORMATS,
    Format,
)


@dataclass(frozen=True, eq=False)
class Experts:
    """The matrices of one projection, one for each expert, all of one shape and format."""

    matrices: tuple[Any, ...]
    """[out, in] each"""
    whole: Any = None
    """[X out, in]: the same matrices below one another, where they are so in memory"""

    @property
    def shape(self) -> tuple[int, int, int]:
        """Experts, outputs, inputs."""
        outputs, inputs = self.matrices[0].shape
        return len(self.matrices), outputs, inputs

    @property
    def nbytes(self) -> int:
        """Bytes of storage."""
        return sum(matrix.nbytes for matrix in self.matrices)


@dataclass(frozen=True, eq=False)
class Joined:
    """Matrices [out_i, in] below one another, each in its own format: [sum of out_i, in]."""

    parts: tuple[Any, ...]

    @property
    def shape(self) -> tuple[int, int]:
        """(sum of out_i, in)."""
        return sum(part.shape[0] for part in self.parts), self.parts[0].shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of storage."""
        return sum(part.nbytes for part in self.parts)


def expand(data: Any, rows: Any = slice(None)) -> Any:
    """Convert any format to float32, all rows or those that `rows` picks; float32 itself is not copied."""
    if isinstance(data, Quantized):
        return dequantize(data, rows)
    if isinstance(data, BlockMatrix):
        return dequantize_blocks(data, rows)
    if isinstance(data, Joined):
        return np.concatenate([expand(part) for part in data.parts])[rows]
    picked = data[rows]
    if picked.dtype == np.uint16:
        return np.left_shift(picked, 16, dtype=np.uint32).view(np.float32)
    return picked.astype(np.float32, copy=False)


def some_rows(matrix: Any, rows: slice) -> Any:
    """Some rows of a matrix in any format but `Joined`, as views."""
    return matrix.each(lambda array: array[rows]) if isinstance(matrix, Quantized | BlockMatrix) else matrix[rows]


def narrow(values: NDArray[np.float32], form: Format) -> NDArray[Any]:
    """Round float32 to float16 or bfloat16, to the nearest, ties to even. NaN stays NaN."""
    if form == FLOAT16:
        with np.errstate(over="ignore"):
            return values.astype(np.float16)
    bits = values.view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(values), (bits >> 16) | 0x40, rounded).astype(np.uint16)


def format_of(data: Any) -> Format:
    """The format that a weight's data is in; of several, the one of most rows."""
    if isinstance(data, Experts):
        return format_of(data.matrices[0])
    if isinstance(data, Joined):
        return format_of(max(data.parts, key=lambda part: part.shape[0]))
    if isinstance(data, BlockMatrix):
        return BLOCKS[data.form.name]
    if isinstance(data, Quantized):
        form = INT8 if data.bits == 8 else INT4
        offset_bits = 0 if data.offsets is None else 8 * int(data.offsets.dtype.itemsize)
        return replace(form, group=data.group, offset_bits=offset_bits)
    return STORED_FORMATS["bfloat16" if data.dtype == np.uint16 else str(data.dtype)]
