"""Operations of latent attention: heads with matrices of their own, values within keys. On the reference and in C."""

from typing import Any

import numpy as np
import pytest

from minillm.backends.cpu.backend import CpuBackend
from minillm.backends.cpu.launching import Program, recording
from minillm.backends.formats import CACHE_FORMATS
from minillm.backends.numpy import NumpyBackend
from minillm.backends.operations import Backend
from minillm.backends.storage import expand
from minillm.backends.weights import Weight
from minillm.batch import Batch, TokenSequence
from minillm.reference.attention import AttentionSpec
from minillm.reference.quantize import quantize

RNG = np.random.default_rng
H, R, C, P = 4, 8, 24, 16
"""Heads; rotated numbers of a key, the others, which are its value; positions of a page"""

BACKENDS = {"numpy": NumpyBackend, "cpu": CpuBackend}


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Backend:
    return BACKENDS[request.param]()


@pytest.mark.parametrize("T", [1, 3, 40])
@pytest.mark.parametrize(("kept", "inputs", "outputs"), [(8, 12, 32), (0, 33, 20), (1, 7, 5)])
def test_each_head_has_a_matrix_of_its_own(backend: Backend, T: int, kept: int, inputs: int, outputs: int) -> None:
    rng = RNG(0)
    x = rng.standard_normal((T, H, kept + inputs)).astype(np.float32)
    matrices = rng.standard_normal((H, outputs, inputs)).astype(np.float32)
    out = backend.linear_heads(x, Weight("w", matrices.reshape(H * outputs, inputs)))
    assert out.shape == (T, H, kept + outputs)
    np.testing.assert_array_equal(out[..., :kept], x[..., :kept])
    expected = np.einsum("thi,hoi->tho", x[..., kept:].astype(np.float64), matrices)
    np.testing.assert_allclose(out[..., kept:], expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("bits", [8, 4])
def test_the_matrices_of_heads_may_have_few_bits(bits: int) -> None:
    x, matrix = (RNG(1).standard_normal(shape).astype(np.float32) for shape in ((5, H, 8 + 64), (H * 20, 64)))
    weight = Weight("w", quantize(matrix, bits))
    plain = NumpyBackend().linear_heads(x, Weight("w", expand(weight.data)))
    ours = CpuBackend().linear_heads(x, weight)
    assert np.abs(ours - plain).max() < 0.02 * np.abs(plain).max()  # rows of x are rounded to 8 bits


def test_a_program_repeats_the_products_of_heads() -> None:
    backend, program = CpuBackend(), Program()
    x, weight = (
        RNG(2).standard_normal((2, H, 20)).astype(np.float32),
        Weight("w", RNG(3).random((H * 5, 12), np.float32)),
    )
    with recording(program):
        out = backend.linear_heads(x, weight)
    assert program.complete
    x *= 2
    program.run()
    np.testing.assert_allclose(out, NumpyBackend().linear_heads(x, weight), rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [name for name in CACHE_FORMATS if name != "int4"])
def test_values_are_the_last_numbers_of_the_keys(dtype: str) -> None:
    """Against expanded keys and values, one query at a time in float64, and the bytes of the cache."""
    rng = RNG(4)
    lengths = [(20, 1), (0, 30), (300, 3)]
    sequences, pages = [], 0
    for cached, new in lengths:
        count = -(-(cached + new) // P)
        sequences.append(TokenSequence([0] * (cached + new), 0, list(range(pages, pages + count))))
        pages += count
    whole = Batch.of(sequences, [cached + new for cached, new in lengths], P)
    S = whole.num_tokens
    k, c = (rng.standard_normal((S, 1, width)).astype(np.float32) for width in (R, C))
    for sequence, (cached, _) in zip(sequences, lengths, strict=True):
        sequence.cached = cached
    batch = Batch.of(sequences, [new for _, new in lengths], P)
    q = rng.standard_normal((batch.num_tokens, H, R + C)).astype(np.float32)
    results: list[Any] = []
    for backend in (NumpyBackend(cache=dtype), CpuBackend(cache=dtype)):
        cache = backend.memory.new_pages((1, pages, 1, P, R + C), C)
        assert list(cache.arrays) == (["keys", "keys.scales"] if dtype == "int8" else ["keys"])
        assert cache.nbytes == pages * P * backend.memory.position_bytes(1, R + C, C)
        backend.store_kv(k, c, cache, 0, whole)
        keys, values = cache.layers[0]
        stored = np.concatenate([keys[i] for i in range(pages)], axis=1)[0]  # [pages P, R + C]
        np.testing.assert_array_equal(values[0], keys[0][..., R:])
        results.append((stored, backend.attend(q, cache, 0, batch, AttentionSpec(0.3)).copy()))
    (stored, plain), (same, ours) = results
    np.testing.assert_array_equal(stored[:51], same[:51])
    np.testing.assert_allclose(ours, plain, rtol=0, atol=3e-6)
    for span in batch.spans:
        rows = np.concatenate([np.arange(page * P, page * P + P) for page in span.pages])
        for row in range(span.start, span.stop):
            seen = stored[rows[: span.context_len - span.stop + row + 1]].astype(np.float64)  # [S, R + C]
            weights = np.exp(0.3 * q[row] @ seen.T)  # [H, S]
            expected = weights @ seen[:, R:] / weights.sum(axis=1, keepdims=True)
            np.testing.assert_allclose(ours[row], expected, rtol=0, atol=1e-5)


def test_pages_are_copied_and_restored_once_for_keys_and_values() -> None:
    cache = CpuBackend().memory.new_pages((1, 3, 1, P, R + C), C)
    cache.keys[...] = RNG(5).standard_normal(cache.keys.shape)
    cache.copy(0, 1, slice(3, 9))
    np.testing.assert_array_equal(cache.values[:, 1, :, 3:9], cache.values[:, 0, :, 3:9])
    cache.write([2], cache.read([0]))
    np.testing.assert_array_equal(cache.values[:, 2], cache.keys[:, 0, ..., R:])
