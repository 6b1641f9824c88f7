"""What the cache stores: keys and values in each of its formats."""

import numpy as np
import pytest

from minillm.backends.formats import BFLOAT16, CACHE_FORMATS
from minillm.backends.pages import Pages
from minillm.backends.stored_vectors import StoredVectors, to_int8


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
    assert pages.nbytes == 2 * 3 * 4 * 2 * 2 * {"float32": 24, "bfloat16": 12, "int8": 6 + 4}[dtype]
    for part, whole in zip(pages.layer(1), (pages.keys, pages.values), strict=True):
        np.testing.assert_array_equal(part[2], whole[1, 2])
