"""Operations of the CPU backend, called one by one: shared memory, arrays that lie apart, every 16-bit number."""

from typing import Any

import numpy as np
import pytest

from minillm.backends.cpu.backend import CpuBackend
from minillm.backends.cpu.launching import Program, recording
from minillm.backends.formats import CACHE_FORMATS
from minillm.backends.numpy import NumpyBackend
from minillm.backends.weights import Weight
from minillm.batch import Batch, TokenSequence
from minillm.errors import NumericalError
from minillm.reference.attention import AttentionSpec
from minillm.reference.philox import Keys
from minillm.reference.quantize import quantize
from minillm.reference.rotary import Rotation, Stretch

RNG = np.random.default_rng
BITS = np.arange(1 << 16, dtype=np.uint16)
P = 64


def batch_of(lengths: list[tuple[int, int]], tree: tuple[int, ...] = ()) -> Batch:
    """A batch of sequences, each with this many cached positions and new tokens."""
    sequences, pages = [], 0
    for cached, new in lengths:
        count = -(-(cached + new) // P)
        sequences.append(TokenSequence([0] * (cached + new), cached, list(range(pages, pages + count)), tree=tree))
        pages += count
    return Batch.of(sequences, [new for _, new in lengths], P)


def rotation_of(r: int, **fields: Any) -> Rotation:
    frequencies = (10_000.0 ** (-np.arange(0, r, 2) / r)).astype(np.float32)
    return Rotation(frequencies=Weight("frequencies", frequencies), **fields)


def test_rotations_and_batches_take_turns() -> None:
    """Angles kept for a batch and a rotation are used for no other; those of a tree follow the depth of its tokens."""
    backend, numpy = CpuBackend(), NumpyBackend()
    stretched = rotation_of(16, stretch=Stretch(factor=2.0, original=64), scale=0.9)
    rotations = [rotation_of(8), rotation_of(16), rotation_of(16, scale=2.0), stretched]
    tree = batch_of([(9, 6)], tree=(-1, 0, 0, -1, 3))
    batches = [batch_of([(5, 2), (90, 3), (0, 1)]), batch_of([(50, 6)]), tree, batch_of([(0, 400)])]
    assert tree.positions.tolist() == [9, 10, 11, 11, 10, 11]
    for batch in (batches[i] for i in (0, 1, 2, 1, 0, 3)):
        for rotation in (rotations[i] for i in (0, 0, 1, 2, 3, 1)):
            qkv = RNG(0).standard_normal((batch.num_tokens, 5 * 16)).astype(np.float32)
            q, k = qkv[:, :32].reshape(-1, 2, 16), qkv[:, 32:48].reshape(-1, 1, 16)
            found, expected = (each.rotary(q, k, batch, rotation) for each in (backend, numpy))
            for ours, plain in zip(found, expected, strict=True):
                np.testing.assert_allclose(ours, plain, rtol=0, atol=1e-5)


def test_layers_with_and_without_a_window_take_turns() -> None:
    """They share memory for parts of results, whose number depends on the window."""
    H, K, D, rng = 4, 2, 20, RNG(0)
    batch = batch_of([(5, 1), (0, 30), (70, 9), (515, 1), (1100, 3)])
    shared, numpy = CpuBackend(), NumpyBackend()
    cache = shared.memory.new_pages((1, 1 + max(page for span in batch.spans for page in span.pages), K, P, D))
    cache.keys[...], cache.values[...] = rng.standard_normal((2, *cache.keys.shape)).astype(np.float32)
    q = rng.standard_normal((batch.num_tokens, H, D)).astype(np.float32)
    for window in (9, None, 40, 9, None):
        found, alone, plain = (
            each.attend(q, cache, 0, batch, AttentionSpec(0.4, window=window)) for each in (shared, CpuBackend(), numpy)
        )
        np.testing.assert_array_equal(found, alone)
        np.testing.assert_allclose(found, plain, rtol=0, atol=2e-6)


def test_rows_that_do_not_lie_together_are_copied_and_a_program_is_told() -> None:
    """A program would go on reading the copy."""
    heads = RNG(0).standard_normal((3, 4, 6)).astype(np.float32)
    backend, numpy, gain = CpuBackend(), NumpyBackend(), Weight("norm", np.ones(6, np.float32))
    whole, apart, wide = heads[:, 1:3], heads[:, ::2], np.repeat(heads, 2, axis=2)[:, :, ::2]
    for x, complete in ((whole, True), (apart, False), (wide, False)):
        program = Program()
        with recording(program):
            found = backend.rms_norm(x, gain, 1e-5)
        np.testing.assert_allclose(found, numpy.rms_norm(x, gain, 1e-5), rtol=1e-6)
        assert (len(program), program.complete) == (1, complete)


# --- numbers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 17])
@pytest.mark.parametrize("form", ["float16", "bfloat16"])
def test_every_finite_16_bit_number_is_widened_exactly(form: str, rows: int) -> None:
    weight = BITS.view(np.float16) if form == "float16" else BITS
    wide = weight.astype(np.float32) if form == "float16" else (BITS.astype(np.uint32) << 16).view(np.float32)
    finite = np.isfinite(wide)
    column = np.repeat(weight[finite][:, None], 33, axis=1)  # whole vectors, and one number after them
    for place in (3, 32):
        x = np.zeros((rows, 33), np.float32)
        x[:, place] = 1
        found = CpuBackend().linear(x, Weight("column", column))
        np.testing.assert_array_equal(found, np.broadcast_to(wide[finite], found.shape))


def test_the_cache_rounds_to_the_nearest_bfloat16_and_ties_to_even() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="the reference for bfloat16 needs ml_dtypes")
    halfway = (BITS.astype(np.uint32) << 16 | 0x8000).view(np.float32)
    random = RNG(0).integers(0, 1 << 32, 1 << 14, dtype=np.uint32).view(np.float32)
    with np.errstate(all="ignore"):
        given = np.concatenate([halfway, np.nextafter(halfway, np.float32(0)), random])
        expected = given.astype(ml_dtypes.bfloat16).astype(np.float32).reshape(-1, 1, 64)
    backend, k = CpuBackend(cache="bfloat16"), given.reshape(-1, 1, 64)
    batch = batch_of([(0, len(k))])
    cache = backend.memory.new_pages((1, len(batch.spans[0].pages), 1, P, 64))
    backend.store_kv(k, k, cache, 0, batch)
    for stored in cache.layers[0]:
        np.testing.assert_array_equal(stored[:].reshape(-1, 1, 64)[: len(k)], expected)


@pytest.mark.parametrize("cache_dtype", CACHE_FORMATS)
def test_what_is_stored_is_what_the_reference_stores(cache_dtype: str) -> None:
    batch, rng = batch_of([(4, 5), (0, 3)]), RNG(1)
    k, v = (rng.standard_normal((8, 3, 19)) * 10.0 ** rng.integers(-6, 6, (2, 8, 3, 1))).astype(np.float32)
    stored = []
    for backend in (CpuBackend(cache=cache_dtype), NumpyBackend(cache=cache_dtype)):
        cache = backend.memory.new_pages((1, 2, 3, P, 19))
        backend.store_kv(k, v, cache, 0, batch)
        stored.append(np.stack([each[:] for each in cache.layers[0]]))
    np.testing.assert_array_equal(*stored)


@pytest.mark.parametrize("rows", [3, 40])
@pytest.mark.parametrize("bits", [8, 4])
def test_an_infinity_that_is_rounded_shows_behind_relu(bits: int, rows: int) -> None:
    """Activations are rounded to 8 bits, which have no infinity; relu would turn a large negative number into 0."""
    weight = Weight("matrix", quantize(RNG(0).standard_normal((33, 96)).astype(np.float32), bits))
    for value in (np.inf, -np.inf):
        x = RNG(1).standard_normal((rows, 96)).astype(np.float32)
        x[1, 40] = value
        found = CpuBackend().linear(x, weight, activation="relu")
        assert np.isnan(found[1]).all() and np.isfinite(np.delete(found, 1, axis=0)).all()


# --- tokens -----------------------------------------------------------------------------------------------------------

PLAIN = {"temperature": 0.5, "top_k": 3, "top_p": 0.9, "min_p": 0.1}


def keys_of(rows: int) -> Keys:
    return Keys(np.arange(rows, dtype=np.uint64), *np.zeros((2, rows), np.int64))


def test_sampling_leaves_logits_as_they_are() -> None:
    logits = RNG(0).standard_normal((2, 50)).astype(np.float32)
    before = logits.copy()
    CpuBackend().sampler.sample(logits, keys_of(2), **PLAIN)
    np.testing.assert_array_equal(logits, before)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_row_that_cannot_be_sampled_from_is_named(bad: float) -> None:
    logits = np.zeros((3, 9), np.float32)
    logits[1, 4] = bad
    with pytest.raises(NumericalError, match=r"^row 1 of the logits cannot be sampled from"):
        CpuBackend().sampler.sample(logits, keys_of(3), **PLAIN)
