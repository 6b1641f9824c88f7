"""Bringing the operands of a large product into the layout of its tiles, piece by piece (see `avx512.py`).

Weights stay as they are stored: a piece of them that fits into the second-level cache is expanded when it is needed,
and serves all rows of activations. Activations are packed once per product.
"""

from typing import Any

import numpy as np

from .avx512 import GROUP, LANES, transpose
from .compiling import kernel
from .intrinsics import bfloat16_to_float32, float16_to_float32

FLOAT32, FLOAT16, BFLOAT16, INT8, INT4 = range(5)
"""How weights are stored."""

SMALLEST = np.float32(1e-30)
"""A group of activations none of which is larger counts as zeros: the inverse of its scale could overflow."""


@kernel()
def expand(
    stored: Any, scales: Any, kind: int, group: int, first: int, last: int, start: int, stop: int, tile: Any, at: int,
    stride: int,
) -> None:  # fmt: skip
    """Weights of the outputs first .. last - 1 and the inputs start .. stop - 1 as float32 [outputs, stride].

    `start` is a multiple of 32; inputs beyond the stored ones are zeros.

    Args:
        stored: uint8 [out, bytes of a row], read-only
        scales: float16 as uint16 [out, in' / group], read-only; any of two dimensions where there are none
        kind: one of `FLOAT32` ... `INT4`
        group: inputs that share a scale
        first, last, start, stop: which weights
        tile: float32, flat, filled from `at` on
        at: see `tile`
        stride: elements from one output to the next in `tile`
    """
    for n in range(first, last):
        row = stored[n]
        base = at + (n - first) * stride - start
        if kind == FLOAT32:
            floats = row.view(np.float32)
            end = min(stop, len(floats))
            for k in range(start, end):
                tile[base + k] = floats[k]
        elif kind <= BFLOAT16:
            halves = row.view(np.uint16)
            end = min(stop, len(halves))
            if kind == FLOAT16:
                for k in range(start, end):
                    tile[base + k] = float16_to_float32(halves[k])
            else:
                for k in range(start, end):
                    tile[base + k] = bfloat16_to_float32(halves[k])
        else:
            end = min(stop, scales.shape[1] * group)
            for g in range(start, end, GROUP):
                scale = float16_to_float32(scales[n, g // group])
                if kind == INT8:
                    for j in range(GROUP):
                        tile[base + g + j] = scale * np.float32(np.int8(row[g + j]))
                else:
                    for j in range(GROUP // 2):
                        pair = row[g // 2 + j]
                        tile[base + g + j] = scale * np.float32(np.int32(pair & 15) - 8)
                        tile[base + g + GROUP // 2 + j] = scale * np.float32(np.int32(pair >> 4) - 8)
        for k in range(end, stop):
            tile[base + k] = np.float32(0)


@kernel()
def expand_integers(
    stored: Any, scales: Any, kind: int, group: int, first: int, last: int, start: int, stop: int, tile: Any, at: int,
    stride: int, tile_scales: Any, scales_at: int,
) -> None:  # fmt: skip
    """Weights as uint8 [outputs, stride], 128 more than they mean, and their scales as float32 [outputs, stride / 32].

    As `expand`, and `start` and `stop` are multiples of 32 within what is stored.
    """
    for n in range(first, last):
        row = stored[n]
        base = at + (n - first) * stride - start
        if kind == INT8:
            for k in range(start, stop):
                tile[base + k] = row[k] ^ np.uint8(128)
        else:
            for g in range(start, stop, GROUP):
                for j in range(GROUP // 2):
                    pair = row[g // 2 + j]
                    tile[base + g + j] = (pair & np.uint8(15)) + np.uint8(120)
                    tile[base + g + GROUP // 2 + j] = (pair >> np.uint8(4)) + np.uint8(120)
        place = scales_at + (n - first) * (stride // GROUP)
        for g in range(start, stop, GROUP):
            tile_scales[place + (g - start) // GROUP] = float16_to_float32(scales[n, g // group])


@kernel()
def pack_floats(x: Any, rows: int, inputs: int, depth: int, first: int, width: int, panels: Any) -> None:
    """Rows first .. first + width - 1 of x [rows, inputs] as a panel [depth, width]; zeros where x has none.

    Args:
        x: float32, flat
        rows: how many x has
        inputs: how many x has
        depth: inputs, rounded up to a multiple of 16
        first: a multiple of 16
        width: 16, 32 or 48
        panels: float32, flat; the panel lies from first * depth on
    """
    base = first * depth
    for r in range(first, first + width, LANES):
        whole = inputs // LANES * LANES if r + LANES <= rows else 0
        for k in range(0, whole, LANES):
            transpose(x, r * inputs + k, inputs, panels, base + k * width + r - first, width)
        for k in range(whole, depth):
            for i in range(LANES):
                there = k < inputs and r + i < rows
                panels[base + k * width + r - first + i] = x[(r + i) * inputs + k] if there else np.float32(0)


@kernel()
def pack_integers(
    x: Any, rows: int, inputs: int, depth: int, first: int, width: int, panels: Any, offsets: Any, scales: Any,
    line: Any,
) -> None:  # fmt: skip
    """Quantise rows to int8 in groups of 32, symmetrically: scale = the group's largest magnitude / 127.

    The panel is int32 [depth / 4, width], four neighbours of a row in each number; `offsets` int32 and `scales`
    float32 are [depth / 32, width], offsets -128 times the sum of a group's integers. What is not finite makes its
    group's scale NaN or infinite, and so the products.

    Args:
        x: float32, flat, [rows, inputs]
        rows: how many x has
        inputs: how many x has
        depth: inputs, rounded up to a multiple of 64
        first: a multiple of 16
        width: 16, 32 or 48
        panels: flat; the panel lies from first * depth / 4 on
        offsets: flat; the panel's lie from first * depth / 32 on
        scales: flat, as `offsets`
        line: int32 [16 * depth / 4], work space
    """
    groups, words = depth // GROUP, depth // 4
    bytes_of_line = line.view(np.int8)
    for r in range(first, first + width, LANES):
        for i in range(LANES):
            for g in range(groups):
                begin = g * GROUP
                count = min(GROUP, inputs - begin) if r + i < rows else 0
                place = first * groups + g * width + r - first + i
                target = bytes_of_line[i * depth + begin : i * depth + begin + GROUP]
                if count == GROUP:
                    source = x[(r + i) * inputs + begin : (r + i) * inputs + begin + GROUP]
                    scales[place], offsets[place] = _quantise(source, target)
                else:
                    padded = np.zeros(GROUP, np.float32)
                    for j in range(count):
                        padded[j] = x[(r + i) * inputs + begin + j]
                    scales[place], offsets[place] = _quantise(padded, target)
        for k in range(0, words, LANES):
            transpose(line, k, words, panels, first * words + k * width + r - first, width)


@kernel()
def _quantise(source: Any, target: Any) -> Any:
    """One group: float32 [32] -> int8 [32]; returns its scale and -128 times its integers' sum."""
    bits = source.view(np.int32)
    largest = np.int32(0)
    for j in range(GROUP):  # as integers, magnitudes keep their order, and NaN is the largest
        largest = max(largest, bits[j] & np.int32(0x7FFFFFFF))
    word = np.empty(1, np.int32)
    word[0] = largest
    magnitude = word.view(np.float32)[0]
    inverse = np.float32(127) / magnitude if magnitude > SMALLEST else np.float32(0)
    total = np.int32(0)
    for j in range(GROUP):
        number = np.int32(np.rint(source[j] * inverse))
        target[j] = np.int8(number)
        total += number
    return (np.float32(0) if magnitude <= SMALLEST else magnitude / np.float32(127)), np.int32(-128) * total


@kernel()
def finish(
    sums: Any, at: int, columns: int, width: int, line: Any, first_row: int, rows: int, first: int, last: int,
    bias: Any, relu: bool, residual: Any, out: Any,
) -> None:  # fmt: skip
    """Turn sums [columns, width] into rows of `out`, with bias, ReLU and residual.

    Args:
        sums: float32, flat, from `at` on
        at: see `sums`
        columns: a multiple of 16
        width: 16, 32 or 48
        line: float32 [16 * columns], work space
        first_row: where the rows lie in `out`
        rows: how many rows `out` has
        first, last: outputs first .. last - 1 are written
        bias: [out], read-only, or [0]
        relu: whether max(y, 0) follows the bias
        residual: [rows, out], or [0, 0]
        out: [rows, out]
    """
    for r in range(0, min(width, rows - first_row), LANES):
        for c in range(0, columns, LANES):
            transpose(sums, at + c * width + r, width, line, c, columns)
        for i in range(min(LANES, rows - first_row - r)):
            row = out[first_row + r + i, first:last]
            y = line[i * columns : i * columns + last - first]
            if len(bias):
                b = bias[first:last]
                for n in range(len(row)):
                    row[n] = y[n] + b[n]
            else:
                for n in range(len(row)):
                    row[n] = y[n]
            if relu:
                for n in range(len(row)):
                    row[n] = np.float32(0) if row[n] < 0 else row[n]  # NaN stays
            if len(residual):
                added = residual[first_row + r + i, first:last]
                for n in range(len(row)):
                    row[n] += added[n]
