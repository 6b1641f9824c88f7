"""The kernels that store keys and values, number for number."""

import numpy as np
import pytest

from minillm.backends.cuda.attention import copy_positions, store_kv
from minillm.backends.cuda.emulator import Emulator, LaunchError
from minillm.backends.cuda.kernels import Kernels

from .launchers import ON_GPU

ml_dtypes = pytest.importorskip("ml_dtypes", reason="bfloat16 needs ml_dtypes (the extra test)")

STORAGE = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
SHAPES = [(2, 16, 64), (3, 16, 7), (5, 3, 8)]  # K, P, D: rows of whole 16-byte pieces and odd ones


@pytest.mark.parametrize(("K", "P", "D"), SHAPES)
@pytest.mark.parametrize("storage", STORAGE)
def test_store_kv_fills_the_slots_and_nothing_else(
    any_emulator: Emulator, storage: str, K: int, P: int, D: int
) -> None:
    rng = np.random.default_rng(K)
    dtype, T, H, pages = STORAGE[storage], 9, 4, 5
    fused = rng.standard_normal((T, (H + 2 * K) * D)).astype(dtype)
    k, v = (fused[:, start * D : (start + K) * D].reshape(T, K, D) for start in (H, H + K))
    keys, values = rng.standard_normal((2, pages, K, P, D)).astype(dtype)
    slots = rng.permutation(pages * P)[:T].astype(np.int32)
    slots[[0, 5]] = -1
    expected = keys.copy(), values.copy()
    for t in range(T):
        if slots[t] >= 0:
            expected[0][slots[t] // P, :, slots[t] % P] = k[t]
            expected[1][slots[t] // P, :, slots[t] % P] = v[t]
    store_kv(Kernels(any_emulator, storage, debug=True), k, v, keys, values, slots)
    assert (keys == expected[0]).all() and (values == expected[1]).all()


def test_rows_at_odd_addresses_are_read_number_by_number(emulator: Emulator) -> None:
    K, P, D = 2, 4, 8
    fused = np.arange(3 * (3 * K * D + 1), dtype=np.float16).reshape(3, -1)
    k, v = (fused[:, start * K * D + 1 : (start + 1) * K * D + 1].reshape(3, K, D) for start in (1, 2))
    keys, values = np.zeros((2, 1, K, P, D), np.float16)
    store_kv(Kernels(emulator, "float16"), k, v, keys, values, np.arange(3, dtype=np.int32))
    assert (keys[0, :, :3].swapaxes(0, 1) == k).all() and (values[0, :, :3].swapaxes(0, 1) == v).all()


@pytest.mark.skipif(ON_GPU, reason="ends the process on a GPU")
def test_a_debug_build_refuses_a_page_that_is_not_there(emulator: Emulator) -> None:
    kernels, (k, v) = Kernels(emulator, "float32", debug=True), np.ones((2, 1, 2, 8), np.float32)
    keys, values = np.zeros((2, 1, 3, 2, 4, 8), np.float32)
    store_kv(kernels, k, v, keys[0], values[0], np.array([11], np.int32))
    with pytest.raises(LaunchError, match=r"kv\.cu:\d+: page is 3, should be from 0 to below 3"):
        store_kv(kernels, k, v, keys[0], values[0], np.array([12], np.int32))
    for pair in ((3, 0), (0, -1)):
        with pytest.raises(LaunchError, match=r"kv\.cu:\d+: (source|target) is (3|-1), should be from 0 to below 3"):
            copy_positions(kernels, keys, values, *pair, 0, 4)


def test_no_tokens_are_no_launch(emulator: Emulator) -> None:
    nothing, cache = np.zeros((0, 2, 8), np.float32), np.zeros((1, 2, 4, 8), np.float32)
    kernels = Kernels(emulator, "float32")
    store_kv(kernels, nothing, nothing, cache, cache, np.zeros(0, np.int32))  # an empty grid would be refused
    copy_positions(kernels, cache[None], cache[None], 0, 0, 2, 2)
    assert not cache.any()


@pytest.mark.parametrize(("K", "P", "D"), SHAPES)
@pytest.mark.parametrize("storage", STORAGE)
def test_copy_positions_is_a_slice_of_all_layers(any_emulator: Emulator, storage: str, K: int, P: int, D: int) -> None:
    keys, values = np.random.default_rng(P).standard_normal((2, 3, 4, K, P, D)).astype(STORAGE[storage])
    expected = keys.copy(), values.copy()
    for first, stop in ((0, P), (1, P - 1), (P - 1, P)):
        for side in expected:
            side[:, 3, :, first:stop] = side[:, 1, :, first:stop]
        copy_positions(Kernels(any_emulator, storage, debug=True), keys, values, 1, 3, first, stop)
        assert (keys == expected[0]).all() and (values == expected[1]).all()
        for side in (keys, values, *expected):
            side[:, 1] += 1
