"""The Walsh-Hadamard transform, which rotates keys and values before they are rounded to 4 bits.

    rotate(x) = x H / sqrt(h),   H[i, j] = (-1)^(bits set in i & j)

h is the largest power of 2 that divides D, at most 256. It is its own inverse and keeps dot products: the scores of
rotated queries and keys are those of the plain ones. A large number is spread over h of them, so that a group of 32 has
no outlier that would leave its neighbours few of 16 integers.

Source: Ashkboos et al., "QuaRot", arXiv 2404.00456, section 4 (keys and values).
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

MOST = 256
"""The most numbers that are rotated together"""


def rotate(x: NDArray[Any]) -> NDArray[np.float32]:
    """Rotate vectors [..., D]; with the roundings of `kernels/cpu/hadamard.h`."""
    D = x.shape[-1]
    h = min(D & -D, MOST)
    y = np.asarray(x, np.float32).reshape(*x.shape[:-1], D // h, h)  # [..., D] -> [..., D / h, h]
    for _ in range(h.bit_length() - 1):
        even, odd = y[..., ::2], y[..., 1::2]
        y = np.concatenate([even + odd, even - odd], axis=-1)
    rotated: NDArray[np.float32] = (y * (np.float32(1) / np.sqrt(np.float32(h)))).reshape(x.shape)
    return rotated
