"""Rounding of weights to the block formats of `blocks.py`, by least squares.

Integers q with the scale s leave the squared error |w - s q|^2; for given q it is least at a quotient of sums. So
several scales are tried for a group, each gives integers, these give the best scale for them, and the candidate with
the least error wins. In blocks of 256 the groups' scales are then rounded to integers times a common float16, which is
fitted to all integers in the same way, once. Offsets are fitted together with their scales.

Every weight counts alike. llama.cpp tries scales in much the same way, but counts large weights more in most formats,
and takes those of Q5_0, Q5_1 and MXFP4 from the largest magnitude alone. Its errors on normal weights, times:

    Q4_K 0.998    Q5_K 0.987    Q6_K 0.937    Q5_0 0.937    Q5_1 0.892    IQ4_NL 0.965    IQ4_XS 0.966    MXFP4 0.976

In the fits the first axis runs along a group, so that inner loops run over many groups: [G, n] is n groups of G.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .blocks import BLOCK_FORMATS, FP4, NONLINEAR, BlockFormat, BlockMatrix, Bytes
from .quantize import CHUNK, LARGEST, check_range, extreme, fit_scales, inverse, nearest

Floats = NDArray[np.float32]

LARGEST_OFFSET = 50_000
"""Exclusive upper bound on a weight's magnitude where offsets are float16"""
FACTORS = tuple(1 + i / 50 for i in range(-6, 7))
"""Candidates for a symmetric scale: what they map the largest magnitude to, in parts of the largest integer"""
SPREAD = tuple(i / 5 for i in range(-5, 6))
"""Candidates for a scale with an offset: what they add to the number of steps in a group's range"""
ENDS = (-134, -127, -120, -113, -106, 92, 99, 106, 113, 120)
"""Candidates for the scale of NONLINEAR: what they map the largest magnitude to"""


def quantize_blocks(weight: Floats, form: BlockFormat) -> BlockMatrix:
    """Round a matrix to a block format, with a few MB of temporary memory. [out, in], `in` whole blocks

    Raises:
        ParameterError: a weight is NaN or not below `quantize.LARGEST`, in Q5_1 `LARGEST_OFFSET`.
    """
    pieces = weight.reshape(-1, form.numbers)  # [out, in] -> [blocks, numbers]
    blocks = np.empty((len(pieces), form.bytes), np.uint8)
    step = CHUNK // form.numbers
    for first in range(0, len(pieces), step):
        piece = pieces[first : first + step]
        check_range(piece, LARGEST_OFFSET if form.name == "Q5_1" else LARGEST)
        blocks[first : first + step] = ENCODERS[form.name](piece)
    return BlockMatrix(blocks.reshape(len(weight), -1), form)  # [blocks, bytes] -> [out, bytes of a row]


# --- fits of groups ---------------------------------------------------------------------------------------------------


def fit_affine(weight: Floats, top: int, *, below_zero: bool) -> tuple[Floats, Floats]:
    """Scales and offsets for integers from 0 to `top`; `below_zero` allows no positive offset. [G, n] -> [n], [n]"""
    low, high = weight.min(axis=0), weight.max(axis=0)  # [G, n] -> [n]
    if below_zero:
        low = np.minimum(low, 0)
    steps, total, count = inverse(high - low), weight.sum(axis=0), np.float32(len(weight))
    scales, offsets, best = np.zeros_like(low), low.copy(), np.full_like(low, -1)
    q, product = np.empty_like(weight), np.empty_like(weight)
    for more in SPREAD:
        step = steps * np.float32(top + more)
        nearest(weight, step, q, 0, top, shifts=-low * step)
        sums, squares = q.sum(axis=0), np.multiply(q, q, out=product).sum(axis=0)
        products = np.multiply(weight, q, out=product).sum(axis=0)
        scale = (count * products - sums * total) * inverse(count * squares - sums * sums)
        offset = (total - scale * sums) / count
        if below_zero:
            scale = np.where(offset > 0, products * inverse(squares), scale)
            offset = np.minimum(offset, 0)
        explained = scale * products + offset * total  # w.w without the squared error
        better = explained > best
        np.copyto(best, explained, where=better)
        np.copyto(scales, scale, where=better)
        np.copyto(offsets, offset, where=better)
    return scales, offsets


def fit_symmetric(weight: Floats, half: int) -> Floats:
    """Scales for integers from -half to half - 1. [G, n] -> [n]"""
    ends = [-half * factor for factor in FACTORS]
    return fit_scales(weight, ends, lambda steps, q: nearest(weight, steps, q, -half, half - 1))


class CodeBook:
    """A few integers, and the nearest of them by a table."""

    def __init__(self, values: NDArray[np.int8]) -> None:
        self.values = values.astype(np.float32)
        self.limit = 2 * int(np.abs(self.values).max())
        halves = np.arange(-self.limit, self.limit) / 2 + 0.25  # midpoints of values are multiples of 1/2
        self.table = np.abs(halves[:, None] - self.values).argmin(axis=1).astype(np.uint8)

    def nearest(self, weight: Floats, steps: Floats) -> Bytes:
        """The index of the value nearest to weight x step. [G, n], [n] -> [G, n]"""
        places = weight * (steps * np.float32(2))
        np.clip(places, -self.limit, self.limit - 1, out=places)
        indices: Bytes = self.table[np.floor(places, out=places).astype(np.int16) + np.int16(self.limit)]
        return indices

    def fit(self, weight: Floats) -> Floats:
        """Scales. [G, n] -> [n]"""
        return fit_scales(weight, ENDS, lambda steps, q: self.values.take(self.nearest(weight, steps), out=q))


NONLINEAR_BOOK, FP4_BOOK = CodeBook(NONLINEAR), CodeBook(FP4)


def across(blocks: Floats, group: int) -> Floats:
    """Groups along the first axis. [n, numbers] -> [group, n x groups of a block]"""
    return np.ascontiguousarray(blocks.reshape(-1, group).T)


# --- blocks of 32 -----------------------------------------------------------------------------------------------------


def _q5_0(blocks: Floats) -> Bytes:
    weight = across(blocks, 32)
    scales = fit_symmetric(weight, 16).astype(np.float16)
    q = nearest(weight, inverse(scales), np.empty_like(weight), -16, 15) + np.float32(16)
    return _joined(_halves(scales), *_fifth_bits_and_nibbles(_by_block(q, 32)))


def _q5_1(blocks: Floats) -> Bytes:
    weight = across(blocks, 32)
    scales, offsets = (x.astype(np.float16) for x in fit_affine(weight, 31, below_zero=False))
    steps = inverse(scales)
    q = nearest(weight, steps, np.empty_like(weight), 0, 31, shifts=-offsets.astype(np.float32) * steps)
    return _joined(_halves(scales), _halves(offsets), *_fifth_bits_and_nibbles(_by_block(q, 32)))


def _fifth_bits_and_nibbles(q: Bytes) -> tuple[Bytes, Bytes]:
    """[n, 32] -> [n, 4], [n, 16]"""
    return np.packbits(q >> 4, axis=1, bitorder="little"), _nibbles(q & 15, 16)


def _iq4_nl(blocks: Floats) -> Bytes:
    weight = across(blocks, 32)
    scales = NONLINEAR_BOOK.fit(weight).astype(np.float16)
    return _joined(_halves(scales), _nibbles(_by_block(NONLINEAR_BOOK.nearest(weight, inverse(scales)), 32), 16))


def _mxfp4(blocks: Floats) -> Bytes:
    """The better of two exponents, of which the lower one cuts the largest magnitude off if it is above 12."""
    weight = across(blocks, 32)
    lower = np.frexp(np.abs(weight).max(axis=0))[1] + (128 - 4)  # the largest is 2^(e - 128) x 8 to 16
    best, exponents = np.full(len(blocks), np.inf, np.float32), np.zeros(len(blocks), np.uint8)
    q = np.zeros(weight.shape, np.uint8)
    for exponent in (lower, lower + 1):
        exponent = np.maximum(exponent, 0)
        scales = np.ldexp(np.float32(1), exponent - 128)
        indices = FP4_BOOK.nearest(weight, inverse(scales))
        difference = FP4_BOOK.values[indices]
        difference *= scales
        difference -= weight
        error = np.multiply(difference, difference, out=difference).sum(axis=0)
        better = error < best
        np.copyto(best, error, where=better)
        np.copyto(exponents, exponent.astype(np.uint8), where=better)
        np.copyto(q, indices, where=better)
    return _joined(exponents[:, None], _nibbles(_by_block(q, 32), 16))


# --- blocks of 256 ----------------------------------------------------------------------------------------------------


def _affine_super(blocks: Floats, top: int) -> tuple[Bytes, Bytes]:
    """Q4_K's and Q5_K's first 16 bytes, d, dmin and the groups' scales and drops, and integers. [n, 16], [n, 256]"""
    weight = across(blocks, 32)  # [n, 256] -> [32, n x 8]
    scales, offsets = (x.reshape(-1, 8) for x in fit_affine(weight, top, below_zero=True))  # [n x 8] -> [n, 8]

    def rounded(d: Any, dmin: Any) -> tuple[Floats, Floats, Floats]:
        """The groups' scales and drops, each [n, 8], and the integers [32, n x 8], for d and dmin [n]."""
        s, m = (np.clip(np.rint(x * inverse(y)[:, None]), 0, 63) for x, y in ((scales, d), (-offsets, dmin)))
        steps = inverse(d.astype(np.float32)[:, None] * s)
        shifts = dmin.astype(np.float32)[:, None] * m * steps
        return s, m, nearest(weight, steps.ravel(), np.empty_like(weight), 0, top, shifts=shifts.ravel())

    d, dmin = ((x.max(axis=1) / 63).astype(np.float16) for x in (scales, -offsets))
    s, m, q = rounded(d, dmin)
    # two linear equations give the d and dmin with the least |w - d s q + dmin m|^2
    sums, squares, products, totals = (x.sum(axis=0).reshape(-1, 8) for x in (q, q * q, weight * q, weight))
    ss, sm, mm = (s * s * squares).sum(axis=1), (s * m * sums).sum(axis=1), 32 * (m * m).sum(axis=1)  # [n, 8] -> [n]
    sw, mw = (s * products).sum(axis=1), (m * totals).sum(axis=1)
    over = inverse(ss * mm - sm * sm)  # 0 where they have many solutions
    d = np.where(over > 0, (sw * mm - mw * sm) * over, d).astype(np.float16)
    dmin = np.where(over > 0, np.maximum((sw * sm - mw * ss) * over, 0), dmin).astype(np.float16)
    s, m, q = rounded(d, dmin)
    return _joined(_halves(d), _halves(dmin), _six_bits(s.astype(np.uint8), m.astype(np.uint8))), _by_block(q, 256)


def _q4_k(blocks: Floats) -> Bytes:
    head, q = _affine_super(blocks, 15)
    return _joined(head, _nibbles(q, 32))


def _q5_k(blocks: Floats) -> Bytes:
    head, q = _affine_super(blocks, 31)
    return _joined(head, _packed((q >> 4).reshape(-1, 8, 32), 1), _nibbles(q & 15, 32))


def _symmetric_super(
    weight: Floats, scales: Floats, half: int, values: Callable[[Floats], Floats]
) -> tuple[Any, Floats, Floats]:
    """The common float16 [n], the groups' scales [n, groups] from -half to half - 1, and the steps of their weights.

    Args:
        weight: [G, n x groups]
        scales: fitted ones [n, groups]
        half: 128 or 32
        values: the values, times their scales the weights, for steps [n x groups]
    """

    def rounded(d: Any) -> tuple[Floats, Floats]:
        s = np.clip(np.rint(scales * inverse(d)[:, None]), -half, half - 1)
        return s, inverse(d.astype(np.float32)[:, None] * s).ravel()

    d = (extreme(scales.T) / -half).astype(np.float16)
    s, steps = rounded(d)
    v = values(steps)
    products, squares = (x.sum(axis=0).reshape(s.shape) for x in (weight * v, v * v))
    d = ((s * products).sum(axis=1) * inverse((s * s * squares).sum(axis=1))).astype(np.float16)
    return d, *rounded(d)


def _q6_k(blocks: Floats) -> Bytes:
    weight = across(blocks, 16)  # [n, 256] -> [16, n x 16]

    def integers(steps: Floats) -> Floats:
        return nearest(weight, steps, np.empty_like(weight), -32, 31)

    d, s, steps = _symmetric_super(weight, fit_symmetric(weight, 32).reshape(-1, 16), 128, integers)
    q = _by_block(integers(steps) + np.float32(32), 256)
    more = _packed((q >> 4).reshape(-1, 4, 32), 2).reshape(-1, 64)  # [2 n, 4, 32] -> [2 n, 32] -> [n, 64]
    return _joined(_nibbles(q & 15, 64), more, s.astype(np.int8).view(np.uint8), _halves(d))


def _iq4_xs(blocks: Floats) -> Bytes:
    weight, book = across(blocks, 32), NONLINEAR_BOOK  # [n, 256] -> [32, n x 8]
    fitted = book.fit(weight).reshape(-1, 8)
    d, s, steps = _symmetric_super(weight, fitted, 32, lambda steps: book.values[book.nearest(weight, steps)])
    biased = (s + np.float32(32)).astype(np.uint8)  # [n, 8]
    low = _packed((biased & 15).reshape(-1, 4, 2).swapaxes(1, 2), 4)  # two neighbours in a byte: [n, 2, 4] -> [n, 4]
    high = _packed((biased >> 4).reshape(-1, 2, 4).swapaxes(1, 2), 2)  # [n, 4, 2] -> [n, 2]
    return _joined(_halves(d), high, low, _nibbles(_by_block(book.nearest(weight, steps), 256), 16))


# --- parts of blocks, each the inverse of a function of `blocks.py` ---------------------------------------------------


def _by_block(q: NDArray[Any], numbers: int) -> Bytes:
    """Integers in the order of the weights. [G, n x groups] -> [n, numbers]"""
    return np.ascontiguousarray(q.astype(np.uint8).T).reshape(-1, numbers)


def _halves(floats: NDArray[Any]) -> Bytes:
    """The bytes of float16 numbers. [n] -> [n, 2]"""
    return floats.astype("<f2").view(np.uint8).reshape(-1, 2)


def _packed(fields: NDArray[Any], bits: int) -> Bytes:
    """Numbers of `bits` bits in bytes, from the lowest on. [n, 8 / bits, ...] -> [n, ...]"""
    shifts = np.arange(0, 8, bits, dtype=np.uint8).reshape(-1, *(1,) * (fields.ndim - 2))
    packed: Bytes = np.bitwise_or.reduce(fields << shifts, axis=1)
    return packed


def _nibbles(q: NDArray[Any], size: int) -> Bytes:
    """Nibbles in bytes, of each 2 x size the first `size` low, the others high. [n, numbers] -> [n, numbers / 2]"""
    return _packed(q.reshape(-1, 2, size), 4).reshape(len(q), -1)


def _six_bits(scales: Bytes, drops: Bytes) -> Bytes:
    """Eight numbers of 6 bits for scales and eight for offsets. [n, 8], [n, 8] -> [n, 12]"""
    low, middle = (x[:, :4] | x[:, 4:] >> 4 << 6 for x in (scales, drops))
    return np.concatenate([low, middle, scales[:, 4:] & 15 | (drops[:, 4:] & 15) << 4], axis=1)


def _joined(*parts: Bytes) -> Bytes:
    return np.concatenate(parts, axis=1)


ENCODERS: dict[str, Callable[[Floats], Bytes]] = {
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4,
}
"""Formats that are written -> the bytes of blocks, [n, weights] -> [n, bytes]"""
assert set(ENCODERS) <= set(BLOCK_FORMATS)
