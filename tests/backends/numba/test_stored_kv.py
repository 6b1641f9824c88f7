"""The kernel that stores keys and values rounds them as `pages.py` does."""

import numpy as np
import pytest

pytest.importorskip("numba", reason="these kernels are compiled by Numba")

from minillm import reference
from minillm.backends.formats import CACHE_FORMATS
from minillm.backends.numba.attention import store_kv
from minillm.backends.pages import StoredVectors
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
