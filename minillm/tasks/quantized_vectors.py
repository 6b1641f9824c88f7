"""Vectors of texts in 8 bits or 1 bit a dimension, as sentence-transformers' `quantize_embeddings` gives them.

Source: sentence-transformers 6.2, `util/quantization.py`.
"""

from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from ..errors import ParameterError, shown

Precision = Literal["float32", "int8", "uint8", "binary", "ubinary"]
"""Numbers of a vector: float32; 256 steps between the ranges' ends; or one bit, 1 where positive, packed in bytes"""
PRECISIONS: tuple[Precision, ...] = get_args(Precision)


def quantize_vectors(
    vectors: NDArray[np.float32], precision: Precision, ranges: NDArray[np.float32] | None = None
) -> NDArray[Any]:
    """Vectors in fewer bits. [N, W] -> [N, W] for int8 and uint8; [N, W / 8], rounded up, for binary and ubinary

    Args:
        vectors: float32
        precision: of the result
        ranges: for int8 and uint8 the least and the largest value of each dimension, [2, W]; by default of `vectors`

    Raises:
        ParameterError: the precision is unknown, the ranges have another shape, or are missing with fewer than two
            vectors.
    """
    vectors = np.asarray(vectors, np.float32)
    match precision:
        case "float32":
            return vectors
        case "binary" | "ubinary":
            bits = np.packbits(vectors > 0, axis=-1)  # [N, W] -> [N, W / 8]
            signed = np.asarray(bits.astype(np.int16) - 128, np.int8)
            return bits if precision == "ubinary" else signed
        case "int8" | "uint8":
            if ranges is None and (vectors.ndim < 2 or len(vectors) < 2):
                raise ParameterError(f"{precision} needs ranges [2, W], or at least two vectors to take them from")
            ends = np.array([vectors.min(axis=0), vectors.max(axis=0)]) if ranges is None else np.asarray(ranges)
            ends = ends.astype(np.float32)
            if ends.shape != (2, vectors.shape[-1]):
                raise ParameterError(f"ranges should have the shape (2, {vectors.shape[-1]}), found {ends.shape}")
            steps = (ends[1] - ends[0]) / 255
            levels = np.clip(np.floor((vectors - ends[0]) / np.where(steps == 0, 1, steps)), 0, 255)
            return np.asarray(levels if precision == "uint8" else levels - 128, precision)
    raise ParameterError(f"precision {shown(precision)} is not known: expected one of {', '.join(PRECISIONS)}")
