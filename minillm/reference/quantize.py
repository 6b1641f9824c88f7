"""Group quantisation of weights to 8 and 4 bits: weight = scale x integer, one scale per group along the input.

`quantize` is symmetric, without a zero point, as llama.cpp's Q8_0 and Q4_0, and of the same size: 8.5 and 4.5 bits a
weight with groups of 32. A row is padded to a multiple of the group.

Published checkpoints of 4 bits are mostly asymmetric, in one of two ways, with q from 0 to 15:

    weight = scale x q + offset          Q4_1, Q4_K; offsets are float16: 5 bits a weight
    weight = scale x (q - zero)          GPTQ, AWQ, compressed-tensors; zero points are uint8: 4.75 bits

Neither holds the other: scale x zero has up to 15 significant bits, float16 11, and offset / scale is no integer. So
there are both, and each is exact. float32 offsets would hold both, at 5.5 bits a weight.

int4 differs from Q4_0 in its scale. Q4_0 maps the weight of largest magnitude to -8; here the best of four scales
around that one is refined by least squares, which lowers the rms error on normal weights by 5 %
(tests/reference/test_quantize.py).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import ParameterError

GROUPS = (32, 64)
"""Supported group sizes: weights that share a scale."""
LANE = 32
"""4-bit weights are packed in blocks of 32, whatever the group size."""
LARGEST = 400_000
"""Exclusive upper bound on a weight's magnitude, so that scales stay below float16's 65,504."""
SMALLEST = np.finfo(np.float32).tiny
CHUNK = 1 << 17
"""Weights processed at once, so that intermediate results stay in a core's cache."""


@dataclass(frozen=True, eq=False)
class Quantized:
    """An 8- or 4-bit matrix [out, in]; in' is `in` padded to a multiple of the group."""

    values: NDArray[Any]
    """int8 [out, in'], or uint8 [out, in' / 2] where each 16 bytes hold 32 integers from 0 to 15: byte j has integer j
    in its low four bits and integer j + 16 in its high ones"""
    scales: NDArray[np.float16]
    """[out, in' / group]"""
    inputs: int
    """in, without the padding"""
    offsets: NDArray[Any] | None = None
    """[out, in' / group]: float16 offsets, or in 4 bits uint8 zero points; None: of 4 bits all zero points are 8"""

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in), without padding."""
        return len(self.values), self.inputs

    @property
    def bits(self) -> int:
        """8 or 4."""
        return 8 if self.values.dtype == np.int8 else 4

    @property
    def group(self) -> int:
        """Weights that share a scale."""
        return int(self.values.shape[1] * 8 // self.bits // max(self.scales.shape[1], 1))

    @property
    def has_zeros(self) -> bool:
        """Whether it has zero points."""
        return self.offsets is not None and self.offsets.dtype == np.uint8

    @property
    def nbytes(self) -> int:
        """Bytes of storage."""
        return self.values.nbytes + self.scales.nbytes + (0 if self.offsets is None else self.offsets.nbytes)

    def each(self, change: Callable[[NDArray[Any]], NDArray[Any]]) -> "Quantized":
        """A matrix with the same change to each of its arrays, such as the order of its rows."""
        offsets = None if self.offsets is None else change(self.offsets)
        return Quantized(change(self.values), change(self.scales), self.inputs, offsets)


def quantize(weight: Any, bits: int, group: int = 32) -> Quantized:
    """Quantise a matrix to 8 or 4 bits in chunks of rows, with less than 4 MB of temporary memory.

    Args:
        weight: [out, in] float32; a memory-mapped array is read once
        bits: 8 or 4
        group: weights that share a scale, 32 or 64

    Raises:
        ParameterError: another number of bits or group size, or a weight that is NaN or not below `LARGEST`.
    """
    if bits not in (8, 4) or group not in GROUPS:
        raise ParameterError(f"weights are quantised to 8 or 4 bits in groups of 32 or 64, not {bits} bits by {group}")
    outputs, inputs = weight.shape
    groups = -(-inputs // group)
    values = np.empty((outputs, groups * group * bits // 8), np.int8 if bits == 8 else np.uint8)
    scales = np.empty((outputs, groups), np.float16)
    round_groups = round_to_8_bits if bits == 8 else round_to_4_bits
    rows = max(1, CHUNK // max(1, groups * group))
    for start in range(0, outputs, rows):
        block = np.zeros((min(rows, outputs - start), groups * group), np.float32)
        block[:, :inputs] = weight[start : start + rows]
        check_range(block)
        across = np.ascontiguousarray(block.reshape(-1, group).T)  # [rows, in'] -> [G, rows x groups]: long inner loops
        block_scales, q = round_groups(across)
        scales[start : start + rows] = block_scales.reshape(-1, groups)
        values[start : start + rows] = (q if bits == 8 else pack(q)).T.reshape(len(block), -1)
    return Quantized(values, scales, inputs)


def dequantize(quantized: Quantized, rows: Any = slice(None)) -> NDArray[np.float32]:
    """Dequantise all rows, or those selected by `rows`. [out, in'] -> [rows, in]"""
    values, scales = quantized.values[rows], quantized.scales[rows]
    if quantized.bits == 4:
        values = unpack(values)
    grouped = values.reshape(*scales.shape, quantized.group).astype(np.float32)  # [rows, in'] -> [rows, in' / G, G]
    offsets = None if quantized.offsets is None else quantized.offsets[rows][..., None].astype(np.float32)
    if offsets is not None and quantized.bits == 4:
        grouped += 8 - offsets if quantized.has_zeros else 8  # unpacked integers are from -8 on
    grouped *= scales[..., None].astype(np.float32)
    if offsets is not None and not quantized.has_zeros:
        grouped += offsets
    rounded: NDArray[np.float32] = grouped.reshape(len(values), -1)[:, : quantized.inputs]
    return rounded


def widened(quantized: Quantized) -> Quantized:
    """A symmetric 4-bit matrix as an 8-bit one of the same values, with the same scales."""
    assert quantized.offsets is None
    return Quantized(unpack(quantized.values), quantized.scales, quantized.inputs)


def with_zeros(quantized: Quantized) -> Quantized:
    """A symmetric 4-bit matrix as one of the same values with zero points."""
    return replace(quantized, offsets=np.full(quantized.scales.shape, 8, np.uint8))


def check_range(weight: NDArray[np.float32], largest: int = LARGEST) -> None:
    """Check weights that are to be quantised.

    Raises:
        ParameterError: one is NaN or not below `largest`.
    """
    if not max(weight.max(initial=0), -weight.min(initial=0)) < largest:  # or NaN
        raise ParameterError(f"weights to be quantised must be finite and below {largest:,}; this matrix has others")


def round_to_8_bits(weight: NDArray[np.float32]) -> tuple[NDArray[np.float16], NDArray[np.int8]]:
    """Scales that map a group's largest magnitude to 127, and the integers. [G, n] -> [n], [G, n]

    The error is at most half the scale.
    """
    largest = np.abs(weight).max(axis=0)
    scales = (largest / 127).astype(np.float16)
    short = largest > np.float32(127.5) * scales.astype(np.float32)  # rounded down so far that 127 is too small
    scales[short] = np.nextafter(scales[short], np.float16(np.inf))
    q = weight * inverse(scales)
    return scales, np.rint(q, out=q).astype(np.int8)


def round_to_4_bits(weight: NDArray[np.float32]) -> tuple[NDArray[np.float16], NDArray[np.int8]]:
    """The best of four scales, refined by least squares, and integers from -8 to 7. [G, n] -> [n], [G, n]

    A group's squared error is at most that of mapping its largest magnitude to -8, but for the rounding of the scale to
    float16.
    """
    scales = fit_scales(weight, (-7.2, -8.0, -8.8, -9.6), lambda steps, q: nearest(weight, steps, q)).astype(np.float16)
    return scales, nearest(weight, inverse(scales), np.empty_like(weight)).astype(np.int8)


def fit_scales(
    weight: NDArray[np.float32], ends: Sequence[float], integers: Callable[[NDArray[Any], NDArray[Any]], object]
) -> NDArray[np.float32]:
    """The best of several scales, refined by least squares. [G, n] -> [n]

    Integers q with scale s leave the squared error |w - s q|^2; it is least at s = w.q / q.q, where it is
    w.w - (w.q)^2 / q.q. So of several q the best has the largest (w.q)^2 / q.q.

    Args:
        weight: [G, n]
        ends: what candidates map a group's largest magnitude to
        integers: writes the integers for the steps [n], which are 1 / scale, to its second argument [G, n]
    """
    steps = inverse(extreme(weight))
    q, product = np.empty_like(weight), np.empty_like(weight)
    best, fitted = np.zeros_like(steps), np.zeros_like(steps)
    for end in ends:
        integers(steps * np.float32(end), q)
        wq = np.multiply(weight, q, out=product).sum(axis=0)  # [G, n] -> [n]
        slope = wq / np.maximum(np.multiply(q, q, out=product).sum(axis=0), 1)
        better = wq * slope > best
        np.copyto(best, wq * slope, where=better)
        np.copyto(fitted, slope, where=better)
    return fitted


def extreme(weight: NDArray[np.float32]) -> NDArray[np.float32]:
    """The number of largest magnitude, with its sign. [G, n] -> [n]"""
    largest, smallest = weight.max(axis=0), weight.min(axis=0)
    extremes: NDArray[np.float32] = np.where(largest > -smallest, largest, smallest)
    return extremes


def nearest(
    weight: NDArray[np.float32],
    steps: NDArray[np.float32],
    out: NDArray[np.float32],
    low: int = -8,
    high: int = 7,
    *,
    shifts: NDArray[np.float32] | None = None,
) -> NDArray[np.float32]:
    """The integers from `low` to `high` nearest to weight x step + shift, as float32. [G, n], [n] -> [G, n]"""
    np.multiply(weight, steps, out=out)
    if shifts is not None:
        out += shifts
    np.rint(out, out=out)
    return np.clip(out, low, high, out=out)


def inverse(scales: NDArray[Any]) -> NDArray[np.float32]:
    """1 / scale in float32; 0 if the scale is 0, or so small that it would be infinite."""
    wide = scales.astype(np.float32)
    return np.divide(np.float32(1), wide, out=np.zeros_like(wide), where=np.abs(wide) >= SMALLEST)


def pack(q: NDArray[np.int8]) -> NDArray[np.uint8]:
    """Pack integers from -8 to 7 two to a byte: weights j and j + 16 of each 32. [G, n] -> [G / 2, n]"""
    halves = (q + np.int8(8)).view(np.uint8).reshape(-1, 2, LANE // 2, q.shape[1])
    packed: NDArray[np.uint8] = (halves[:, 0] | halves[:, 1] << np.uint8(4)).reshape(-1, q.shape[1])
    return packed


def unpack(packed: NDArray[np.uint8]) -> NDArray[np.int8]:
    """Unpack stored rows to integers from -8 to 7. [rows, in' / 2] -> [rows, in']"""
    lanes = packed.reshape(len(packed), -1, 1, LANE // 2)
    halves = np.concatenate([lanes & 15, lanes >> 4], axis=2)  # [rows, n, 1, 16] -> [rows, n, 2, 16]
    return halves.reshape(len(packed), -1).view(np.int8) - np.int8(8)
