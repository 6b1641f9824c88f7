"""The kernel that stores keys and values rounds them as `pages.py` does."""

import numpy as np
import pytest

from minillm import reference
from minillm.backends.cpu.backend import CpuBackend
from minillm.backends.formats import CACHE_FORMATS
from minillm.backends.pages import Pages, StoredVectors
from minillm.batch import Batch, TokenSequence


@pytest.mark.parametrize("dtype", CACHE_FORMATS)
def test_the_kernel_stores_what_numpy_rounds_to(dtype: str) -> None:
    rng = np.random.default_rng(1)
    k, v = (rng.standard_normal((5, 3, 19)) * 10.0 ** rng.integers(-6, 6, (2, 5, 3, 1))).astype(np.float32)
    k[1, 2], k[1, 1], k[2, 0, 4], v[3, 1, 0] = 0, 1e-40, np.nan, np.inf
    ours, plain = (Pages(np, (1, 3, 3, 4, 19), CACHE_FORMATS[dtype]) for _ in range(2))
    for stored in (ours.keys, ours.values, plain.keys, plain.values):
        for array in (stored.data, stored.scales) if isinstance(stored, StoredVectors) else (stored,):
            if array is not None:
                array[...] = 7
    batch = Batch.of([TokenSequence([0] * 9, 4, [1, 2, 0])], [5], 4)
    CpuBackend().store_kv(k, v, ours, 0, batch)
    reference.store_kv(k, v, *plain.layer(0), batch)
    for a, b in zip(ours.layer(0), plain.layer(0), strict=True):
        pairs = [(a.data, b.data), (a.scales, b.scales)] if isinstance(a, StoredVectors) else [(a, b)]
        for found, expected in pairs:
            np.testing.assert_array_equal(found, expected)
        assert np.isfinite(a[2, 1, :1]).all()
    assert not np.isfinite(ours.layer(0)[0][2, 0, 2]).all()
    assert not np.isfinite(ours.layer(0)[1][2, 1, 3]).all()
