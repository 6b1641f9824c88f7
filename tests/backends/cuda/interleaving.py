"""The order of a matrix's bytes on the device, with NumPy: what the kernel `interleave` does."""

from dataclasses import replace
from typing import Any

import numpy as np

from minillm.reference.quantize import Quantized


def on_device(matrix: Quantized, *, back: bool = False) -> Quantized:
    """A matrix with its bytes in the order of the device, or `back` in that of files."""
    values = matrix.values
    bytes_of_rows = np.ascontiguousarray(values).view(np.uint8)
    whole = values.shape[1] // 64 * 64
    parts = [bytes_of_rows[:, first : first + 64] for first in range(0, whole, 64)]
    parts = [_chunk(part, back) for part in (*parts, bytes_of_rows[:, whole:])]
    return replace(matrix, values=np.concatenate(parts, axis=1).view(values.dtype))


def _chunk(part: Any, back: bool) -> Any:
    rows, pieces = len(part), part.shape[1] // 16
    if back:
        return part.reshape(rows, 4, pieces, 2, 2).transpose(0, 2, 3, 1, 4).reshape(rows, -1)
    return part.reshape(rows, pieces, 2, 4, 2).transpose(0, 3, 1, 2, 4).reshape(rows, -1)
