"""What the cache stores: keys and values in each of its dtypes."""

import numpy as np
import pytest

pytest.importorskip("numba", reason="these kernels are compiled by Numba")

from minillm import reference
from minillm.backends.formats import BFLOAT16, CACHE_FORMATS
from minillm.backends.numba.attention import store_kv
from minillm.backends.pages import Pages, StoredVectors, to_int8
from minillm.batch import Batch, TokenSequence


@pytest.mark.parametrize("dtype", CACHE_FORMATS)
def test_the_kernel_stores_what_numpy_rounds_to(dtype: str) -> None:
    rng = np.random.default_rng(1)
    k, v = (rng.standard_normal((5, 3, 19)) * 10.0 ** rng.integers(-6, 6, (2, 5, 3, 1))).astype(np.float32)
    k[1, 2], k[1, 1], k[2, 0, 4], v[3, 1, 0] = 0, 1e-40, np.nan, np.inf
    ours, plain = ([StoredVectors.empty((3, 3, 4, 19), CACHE_FORMATS[dtype]) for _ in range(2)] for _ in range(2))
    for pages in (*ours, *plain):
        pages.data[...] = 7
        if pages.scales is not None:
            pages.scales[...] = 7
    batch = Batch.of([TokenSequence([0] * 9, 4, [1, 2, 0])], [5], 4)
    store_kv(k, v, *ours, batch)
    reference.store_kv(k, v, *plain, batch)
    for a, b in zip(ours, plain, strict=True):
        np.testing.assert_array_equal(a.data, b.data)
        np.testing.assert_array_equal(a.scales, b.scales)
        assert np.isfinite(a[2, 1, :1]).all()
    assert not np.isfinite(ours[0][2, 0, 2]).all()
    assert not np.isfinite(ours[1][2, 1, 3]).all()


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
    assert pages.heads == 2
    assert pages.nbytes == 2 * 3 * 4 * 2 * 2 * {"float32": 24, "bfloat16": 12, "int8": 6 + 4}[dtype]
    for part, whole in zip(pages.layer(1), (pages.keys, pages.values), strict=True):
        np.testing.assert_array_equal(part[2], whole[1, 2])
