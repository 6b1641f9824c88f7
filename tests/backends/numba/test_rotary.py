"""Rotary position embedding by a kernel, against complex numbers in float64 and against the reference."""

from typing import Any

import numpy as np
import pytest

pytest.importorskip("numba", reason="this kernel is compiled by Numba")

from minillm.backends.numba.rotary import Rotary
from minillm.backends.numba.rows import THREADED
from minillm.backends.numpy import NumpyBackend
from minillm.backends.weights import Weight
from minillm.batch import Batch, TokenSequence
from minillm.reference.rotary import Rotation, Stretch

RNG = np.random.default_rng
LENGTHS = [(0, 7), (100, 1), (131_071, 1), (5, 3), (131_000, 2)]


def batch_of(lengths: list[tuple[int, int]], tree: tuple[int, ...] = ()) -> Batch:
    """Cached positions and new tokens of each sequence."""
    sequences = [TokenSequence([0] * (cached + new), cached, [0], tree) for cached, new in lengths]
    return Batch.of(sequences, [new for _, new in lengths], 1 << 20)


def heads_of(T: int, H: int, K: int, D: int) -> tuple[np.ndarray, np.ndarray]:
    """Queries and keys as parts of one product: rows lie apart."""
    qkv = RNG(0).standard_normal((T, (H + 2 * K) * D)).astype(np.float32)
    return qkv[:, : H * D].reshape(T, H, D), qkv[:, H * D : (H + K) * D].reshape(T, K, D)


def rotation_of(r: int, **fields: Any) -> Rotation:
    frequencies = 10_000.0 ** (-np.arange(0, r, 2) / r)
    return Rotation(frequencies=Weight("frequencies", frequencies.astype(np.float32)), **fields)


def rotate(rotary: Rotary, q: np.ndarray, k: np.ndarray, batch: Batch, rotation: Rotation) -> tuple[Any, Any]:
    return rotary.rotate(q, k, batch, rotation, *(np.full(x.shape, np.nan, np.float32) for x in (q, k)))


def exact(x: np.ndarray, batch: Batch, rotation: Rotation) -> np.ndarray:
    """Each pair as a complex number times e^(i angle), the angle rounded to float32 as it is defined."""
    angles = batch.positions[:, None].astype(np.float32) * rotation.frequencies.data  # [T, r / 2]
    turns = rotation.scale * np.exp(1j * angles.astype(np.float64))[:, None]  # [T, 1, r / 2]
    half = turns.shape[-1]
    turned = (x[..., :half] + 1j * x[..., half : 2 * half]) * turns
    return np.concatenate([turned.real, turned.imag, x[..., 2 * half :]], axis=-1)


@pytest.mark.parametrize(("H", "K", "D", "r"), [(9, 3, 64, 64), (4, 4, 10, 4), (2, 1, 7, 2), (8, 2, 96, 24)])
@pytest.mark.parametrize("scale", [1.0, 1.3])
def test_pairs_turn_by_their_position(H: int, K: int, D: int, r: int, scale: float) -> None:
    batch, rotation = batch_of(LENGTHS), rotation_of(r, scale=scale)
    q, k = heads_of(batch.num_tokens, H, K, D)
    for ours, x in zip(rotate(Rotary(), q, k, batch, rotation), (q, k), strict=True):
        np.testing.assert_allclose(ours, exact(x, batch, rotation), rtol=0, atol=2e-6)
        np.testing.assert_array_equal(ours[..., r:], x[..., r:])


def test_many_rows_on_all_threads() -> None:
    H, D = 4, 32
    batch, rotation = batch_of([(3, THREADED // (H * D) + 5)]), rotation_of(D)
    q, k = heads_of(batch.num_tokens, H, 2, D)
    for ours, x in zip(rotate(Rotary(), q, k, batch, rotation), (q, k), strict=True):
        np.testing.assert_allclose(ours, exact(x, batch, rotation), rtol=0, atol=2e-6)


def test_tokens_of_a_tree_turn_by_their_depth() -> None:
    batch, rotation = batch_of([(9, 6)], tree=(-1, 0, 0, -1, 3)), rotation_of(16)
    assert batch.positions.tolist() == [9, 10, 11, 11, 10, 11]
    q, k = heads_of(6, 2, 1, 16)
    np.testing.assert_allclose(rotate(Rotary(), q, k, batch, rotation)[0], exact(q, batch, rotation), rtol=0, atol=2e-6)


def test_frequencies_that_sink_are_the_references() -> None:
    batch = batch_of([(0, 20), (64, 1), (90, 3), (500, 1)])
    rotation = rotation_of(16, stretch=Stretch(factor=2.0, original=64), scale=0.9)
    q, k = heads_of(batch.num_tokens, 4, 2, 16)
    expected = NumpyBackend().rotary(q, k, batch, rotation)
    for ours, plain, x in zip(rotate(Rotary(), q, k, batch, rotation), expected, (q, k), strict=True):
        np.testing.assert_allclose(ours, plain, rtol=0, atol=1e-6)
        assert np.abs(ours - exact(x, batch, rotation))[-1].max() > 0.1  # it is not the plain rotation


def test_layers_and_batches_take_turns() -> None:
    """What is kept for a batch and a rotation is used for no other."""
    shared, rotations = Rotary(), [rotation_of(8), rotation_of(16), rotation_of(16, scale=2.0)]
    batches = [batch_of([(5, 2)]), batch_of([(50, 2)]), batch_of([(5, 3)])]
    for i in (0, 1, 2, 1, 0):
        for j in (0, 0, 1, 2, 1):
            q, k = heads_of(batches[i].num_tokens, 2, 1, 16)
            for ours, alone in zip(
                rotate(shared, q, k, batches[i], rotations[j]),
                rotate(Rotary(), q, k, batches[i], rotations[j]),
                strict=True,
            ):
                np.testing.assert_array_equal(ours, alone)


def test_a_row_has_the_same_bits_alone() -> None:
    batch, rotation = batch_of([(0, 3), (77, 1)]), rotation_of(20)
    q, k = heads_of(4, 3, 3, 20)
    together = rotate(Rotary(), q, k, batch, rotation)
    alone = rotate(Rotary(), q[3:], k[3:], batch_of([(77, 1)]), rotation)
    for a, b in zip(together, alone, strict=True):
        np.testing.assert_array_equal(a[3:], b)


def test_an_empty_batch_is_no_work() -> None:
    q, k = heads_of(0, 2, 1, 8)
    batch = Batch.of([TokenSequence([0, 0], 2, [0])], [0], 48)
    assert [x.shape for x in rotate(Rotary(), q, k, batch, rotation_of(8))] == [(0, 2, 8), (0, 1, 8)]


def test_cosines_and_sines_are_good_to_the_last_bit_or_so() -> None:
    """NumPy's, in float32, of every angle up to a position of 131,072."""
    from minillm.reference import cosines_and_sines

    batch, rotation = batch_of([(0, 1), (131_000, 73)]), rotation_of(64)
    angles = (batch.positions[:, None].astype(np.float32) * rotation.frequencies.data).astype(np.float64)
    turns = cosines_and_sines(batch.positions, rotation.frequencies.data, None, rotation.scale, np)
    for ours, wanted in zip(turns, (np.cos(angles), np.sin(angles)), strict=True):
        assert np.abs(ours - wanted).max() <= 1.5 * np.spacing(np.float32(0.5))
