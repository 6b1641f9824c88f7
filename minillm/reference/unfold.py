"""The rows under each place of a convolution's window, end to end: with a product, a convolution over all channels.

    out[t] = (x[s t - (k - 1) / 2], ..., x[s t + (k - 1) / 2])          with rows of zeros beyond either end
    conv(x)[t] = out[t] W^T + b

A convolution of width k and stride s over rows of C channels, padded by (k - 1) / 2, is so a matrix product whose
weight has k C columns ("im2col": Chellapilla, Puri, Simard, "High performance convolutional neural networks for
document processing", 2006, section 3.1).
"""

from collections.abc import Sequence
from typing import Any

from .cost import Cost


def unfold(x: Any, counts: Sequence[int], width: int, stride: int, out: Any) -> Any:
    """The windows over each text's rows.

    Args:
        x: [R, C], the rows of all texts one after the other
        counts: rows of each text, multiples of the stride
        width: k, odd
        stride: s
        out: [R / s, k C]

    Returns:
        [R / s, k C]
    """
    C, half, start = x.shape[1], width // 2, 0
    for count in counts:
        rows, windows = x[start : start + count], out[start // stride : (start + count) // stride]
        for j in range(width):
            column = windows[:, j * C : (j + 1) * C]  # row s t + j - half of each window t
            first = -(-max(0, half - j) // stride)  # the first window whose row is none before the text
            stop = max(first, min(len(column), -(-(count + half - j) // stride)))
            column[:first] = 0
            column[first:stop] = rows[first * stride + j - half :: stride][: stop - first]
            column[stop:] = 0
        start += count
    return out


def unfold_cost(bytes_read: int, bytes_written: int) -> Cost:
    """The cost of moving the rows [R, C] of so many bytes to windows [R / s, k C] of so many: no arithmetic."""
    return Cost(0, bytes_read, bytes_written)
