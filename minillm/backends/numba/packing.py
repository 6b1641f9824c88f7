"""Converts the activations of a large product to the layout of its tiles, and its results back (see `avx512.py`)."""

from typing import Any

import numpy as np

from .avx512 import GROUP, LANES, finish_tile, quantise_group, transpose
from .elementary import inner


@inner
def pack_floats(
    x: Any, rows: int, inputs: int, start: int, stop: int, first: int, width: int, panel: Any, at: int
) -> None:
    """Pack rows first .. first + width - 1 and inputs start .. stop - 1 of x into a panel [stop - start, width].

    Rows and inputs beyond x are zero.

    Args:
        x: float32, flat: [rows, inputs]
        rows: of x
        inputs: of x
        start: first input
        stop: input after the last; stop - start is a multiple of 16
        first: first row
        width: a multiple of 16
        panel: float32, flat, filled from `at` on
        at: see `panel`
    """
    for r in range(0, width, LANES):
        complete = inputs if first + r + LANES <= rows else 0
        for k in range(start, stop, LANES):
            target = at + (k - start) * width + r
            if k + LANES <= complete:
                transpose(x, (first + r) * inputs + k, inputs, panel, target, width)
                continue
            for j in range(LANES):
                for i in range(LANES):
                    there = k + j < inputs and first + r + i < rows
                    panel[target + j * width + i] = x[(first + r + i) * inputs + k + j] if there else np.float32(0)


@inner
def pack_integers(
    x: Any, rows: int, inputs: int, depth: int, first: int, width: int, panels: Any, offsets: Any, scales: Any,
    block: Any,
) -> None:  # fmt: skip
    """Pack rows first .. first + width - 1 quantised to int8, in groups of 32 inputs (see `avx512.quantise_group`).

    Args:
        x: float32, flat: [rows, inputs]
        rows: of x
        inputs: of x
        depth: inputs, rounded up to a multiple of 32
        first: first row
        width: a multiple of 16
        panels: int32, flat; [depth / 4, width] are filled from first * depth / 4 on
        offsets: int32, flat; [depth / 32, width] are filled from first * depth / 32 on
        scales: float32, as `offsets`
        block: float32 [32 * 16], scratch memory
    """
    for r in range(0, width, LANES):
        for k in range(0, depth, GROUP):
            pack_floats(x, rows, inputs, k, k + GROUP, first + r, LANES, block, 0)
            panel = (first * depth + k * width) // 4 + r
            quantise_group(block, 0, panels, panel, width, scales, offsets, (first * depth + k * width) // GROUP + r)


@inner
def finish(
    sums: Any, at: int, width: int, first_row: int, rows: int, first: int, last: int, bias: Any,
    relu: bool, residual: Any, out: Any, outputs: int,
) -> None:  # fmt: skip
    """Write sums [columns, width] into rows of `out`, with bias, ReLU and residual.

    Args:
        sums: float32, flat, from `at` on; columns are a multiple of 16
        at: see `sums`
        width: 16, 32 or 48
        first_row: first row in `out`
        rows: of `out`
        first: outputs first .. last - 1 are written
        last: see `first`
        bias: [out], read-only, or [16] zeros
        relu: whether max(y, 0) follows the bias
        residual: [rows, out], flat, or [16] zeros
        out: [rows, out], flat
        outputs: of a row of `out`
    """
    least = np.float32(0) if relu else np.float32(-np.inf)
    has_bias, has_residual = int(len(bias) == outputs), int(len(residual) == rows * outputs)
    for r in range(first_row, min(first_row + width, rows), LANES):
        for n in range(first, last, LANES):
            source = at + (n - first) * width + r - first_row
            if r + LANES <= rows and n + LANES <= last:
                finish_tile(
                    sums, source, width, bias, n * has_bias, least, residual, (r * outputs + n) * has_residual,
                    outputs * has_residual, out, r * outputs + n, outputs,
                )  # fmt: skip
                continue
            for i in range(min(LANES, rows - r)):
                for j in range(min(LANES, last - n)):
                    y = sums[source + j * width + i] + bias[(n + j) * has_bias]
                    y = least if y < least else y  # NaN stays
                    place = (r + i) * outputs + n + j
                    out[place] = y + residual[place * has_residual]
