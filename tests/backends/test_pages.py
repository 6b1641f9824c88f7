"""Keys and values as the cache stores them, in each of its formats."""

import numpy as np
import pytest

from minillm.backends.formats import BFLOAT16, CACHE_FORMATS
from minillm.backends.pages import Pages
from minillm.backends.stored_vectors import StoredVectors, from_int4, to_int4, to_int8
from minillm.reference.rotate import rotate


def test_bfloat16_is_the_nearest() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="an independent bfloat16")
    bits = np.random.default_rng(0).integers(0, 2**32, 4096, dtype=np.uint32)
    bits[:3] = 0x3F808000, 0x3F818000, 0x7F7FFFFF  # two ties, and what rounds to infinity
    x = bits.view(np.float32)
    x = np.where(np.isnan(x), np.float32(1), x).reshape(64, 64)
    pages = StoredVectors.empty((64, 64), BFLOAT16)
    with np.errstate(over="ignore"):
        pages[:] = x
        np.testing.assert_array_equal(pages[:], x.astype(ml_dtypes.bfloat16).astype(np.float32))


def test_int8_is_off_by_half_a_step_at_most() -> None:
    x = np.random.default_rng(0).standard_normal((100, 64)).astype(np.float32)
    whole, scales = to_int8(x)
    assert np.abs(whole).max(axis=1).min() == 127
    assert (np.abs(whole * scales[:, None] - x) <= np.abs(x).max(axis=1, keepdims=True) / 254 * (1 + 1e-5)).all()


@pytest.mark.parametrize("D", [64, 20, 80])
def test_int4_is_off_by_half_a_step_at_most_of_the_rotated_vector(D: int) -> None:
    """Or by one where the number of largest magnitude has an opposite of nearly its size: there is no integer 8."""
    x = np.random.default_rng(0).standard_normal((50, D)).astype(np.float32)
    packed, scales = to_int4(x)
    groups = -(-D // 32)
    assert packed.shape == (50, groups * 16) and scales.shape == (50, groups) and scales.dtype == np.float16
    steps = np.repeat(np.abs(scales.astype(np.float32)), 32, axis=1)[:, :D]
    off = np.abs(rotate(from_int4(packed, scales, D)) - rotate(x)) / steps
    assert off.max() < 1.01 and np.mean(off > 0.505) < 0.02
    assert np.linalg.norm(from_int4(packed, scales, D) - x) < 0.1 * np.linalg.norm(x)


def test_a_rotation_is_its_own_inverse_and_keeps_products() -> None:
    """Against the matrix, whose rows are the Walsh functions."""
    for D, h in ((64, 64), (80, 16), (7, 1), (512, 256), (96, 32)):
        x, y = np.random.default_rng(1).standard_normal((2, 3, D)).astype(np.float32)
        matrix = np.ones((1, 1))
        while len(matrix) < h:
            matrix = np.block([[matrix, matrix], [matrix, -matrix]])
        expected = x.reshape(3, -1, h).astype(np.float64) @ matrix / np.sqrt(h)
        np.testing.assert_allclose(rotate(x), expected.reshape(3, D), atol=1e-6)
        np.testing.assert_allclose(rotate(rotate(x)), x, atol=2e-6)
        np.testing.assert_allclose(rotate(x) @ rotate(y).T, x @ y.T, rtol=1e-4, atol=1e-4)


def test_a_large_number_leaves_its_neighbours_integers() -> None:
    """Rounded as it is, the vector would have a step of 12: all others would be zeros."""
    x = np.random.default_rng(2).standard_normal((20, 64)).astype(np.float32)
    x[:, 5] = 96
    stored = from_int4(*to_int4(x), 64)
    others = np.delete(np.arange(64), 5)
    assert np.abs(stored[:, others] - x[:, others]).mean() < 1


@pytest.mark.parametrize("dtype", CACHE_FORMATS)
def test_copying_positions_copies_all_layers(dtype: str) -> None:
    pages = Pages(np, (2, 3, 2, 4, 6), CACHE_FORMATS[dtype])
    x = np.random.default_rng(0).standard_normal((2, 2, 3, 2, 4, 6)).astype(np.float32)
    pages.keys[:], pages.values[:] = x
    before = np.array([pages.keys[:], pages.values[:]])
    pages.copy(0, 2, slice(1, 3))
    after = np.array([pages.keys[:], pages.values[:]])
    np.testing.assert_array_equal(after[:, :, 2, :, 1:3], before[:, :, 0, :, 1:3])
    after[:, :, 2, :, 1:3] = before[:, :, 2, :, 1:3]
    np.testing.assert_array_equal(after, before)
    other = Pages(np, (2, 5, 2, 4, 6), CACHE_FORMATS[dtype])
    other.write([4, 0], pages.read([2, 1]))
    for stored, array in zip(other.arrays.values(), pages.arrays.values(), strict=True):
        np.testing.assert_array_equal(stored[:, [4, 0]], array[:, [2, 1]])
    assert pages.heads == 2
    assert pages.nbytes == 2 * 3 * 4 * 2 * 2 * {"float32": 24, "bfloat16": 12, "int8": 6 + 4, "int4": 16 + 2}[dtype]
    for part, whole in zip(pages.layers[1], (pages.keys, pages.values), strict=True):
        np.testing.assert_array_equal(part[2], whole[1, 2])
