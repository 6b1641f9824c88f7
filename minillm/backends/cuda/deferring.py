"""Puts off RMS norms of a decode step until the products after them have been taken: their launches are left out.

    rms_norm, fused, attention_decode, gemv, rms_norm, fused, gemv      a Llama layer: 7 launches
    deferred, attention_decode, gemv, deferred, gemv                    -> 5

`defer` reads the launches that `fusing.fuse` has made. A product multiplies x by the norm's gain, and its sums by the
norm's scale (`kernels/cuda/gemv_deferred.cu`), where nobody else reads what the norm gives. What it does not recognise
stays as it is: more than `MOST_ROWS` rows, matrices of 8 or 4 bits, layer norms, norms of heads or with a residual.

Off unless MINILLM_CUDA_DEFERRED=1 asks for it: what the norm gives is not rounded, so the bits are others, and it has
run on the emulator alone.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from .fusing import Address, Ending, Reads
from .kernels import NULL, Kernels, Launch
from .linear import split_arguments
from .rows import NormArguments

PRODUCTS = ("gemv_fma", "fused_fma")
NAME = "deferred_fma"
MOST_ROWS = 4
"""Beyond, products are tensor cores', which multiply what has been rounded"""


def defer(kernels: Kernels, launches: Sequence[Launch], results: Iterable[Any], address: Address) -> list[Launch]:
    """The launches of a step, in the same order, without the norms that products can put off.

    Args:
        kernels: where products with a norm are compiled
        launches: in order; each is complete when the next begins
        results: arrays that are read when the step has ended, or None
        address: of an array's first element, on the device
    """
    reads = Reads(launches, [array for array in results if array is not None], address)
    made: list[Launch] = []
    for i, launch in enumerate(launches):
        together = _deferred(kernels, launches[i - 1], launch, reads, i) if i else None
        if together is None:
            made.append(launch)
        else:
            made[-1] = together
    return made


def _deferred(kernels: Kernels, before: Launch, launch: Launch, reads: Reads, i: int) -> Launch | None:
    """Launch i with the norm before it; None if that is none, or has to run."""
    if before.name != "rms_norm" or launch.name not in PRODUCTS or launch.constants["ROWS"] > MOST_ROWS:
        return None
    norm = NormArguments(*before.args)
    product, (*ending, splits) = split_arguments(launch.args)
    if norm.gain is NULL or norm.residual is not NULL or len(before.grid) != 1 or reads.address(norm.gain) % 16:
        return None
    if (
        reads.address(product.x) != reads.address(norm.out)
        or product.inputs != norm.E
        or product.rows != before.grid[0]
    ):
        return None
    if reads.after(i, norm.out) or (product.residual is not NULL and reads.overlap(product.residual, norm.out)):
        return None
    if reads.overlap(product.out, norm.x):  # which other blocks still read
        return None
    product = product._replace(x=norm.x, x_stride=norm.x_stride)
    args = (*product, *(ending or Ending()), norm.gain, np.float32(norm.epsilon), splits)
    kernel = kernels.get("gemv_deferred", NAME, **launch.constants)
    return Launch(NAME, launch.constants, kernel, launch.grid, launch.block, args, launch.shared_mem)
