"""The sampling kernel chooses the very tokens of `reference.sampling`."""

import itertools

import numpy as np
import pytest

pytest.importorskip("numba", reason="this kernel is compiled by Numba")

from minillm import reference
from minillm.backends.numba.choice import Sampler
from minillm.errors import NumericalError
from minillm.reference.sampling import sample_by_sorting

FILTERS = [
    {"temperature": t, "top_k": k, "top_p": p, "min_p": m}
    for t, k, p, m in itertools.product((1.0, 0.3, 2.5), (0, 1, 7, 10_000), (1.0, 0.9, 0.05), (0.0, 0.1))
]


def rows(seed: int) -> dict[str, np.ndarray]:
    """Logits [N, V] of several shapes of distribution."""
    rng = np.random.default_rng(seed)
    holes = rng.standard_normal((4, 300))
    holes[rng.random(holes.shape) < 0.7] = -np.inf
    return {
        "plain": rng.standard_normal((4, 500)) * 3,
        "flat": rng.standard_normal((2, 3000)) * 1e-3,
        "all but equal": 5 + rng.integers(0, 3, (2, 2000)) * 1e-6,
        "equal": np.zeros((2, 700)),
        "few levels": rng.integers(-3, 3, (4, 400)) * 1.0,
        "peaked": np.where(np.arange(300) == 17, 40.0, rng.standard_normal((3, 300))),
        "far apart": rng.standard_normal((3, 900)) * 200,
        "holes": holes,
        "one": np.ones((3, 1)),
    }


@pytest.mark.parametrize("name", rows(0))
def test_the_same_tokens_as_the_reference(name: str) -> None:
    sampler = Sampler()
    for seed, filters in enumerate(FILTERS):
        logits = rows(seed)[name].astype(np.float32)
        uniforms = np.random.default_rng(seed + 999).random(len(logits))
        ours = sampler.sample(logits, uniforms, **filters)
        np.testing.assert_array_equal(ours, sample_by_sorting(logits, uniforms, xp=np, **filters), str(filters))
        np.testing.assert_array_equal(ours, reference.sample(logits, uniforms, xp=np, **filters), str(filters))


def test_every_token_is_reached_by_its_own_uniforms() -> None:
    logits = np.log(np.array([[0.1, 0.4, 0.1, 0.2, 0.2]], np.float32))
    edges = {1: (0.0, 0.4), 3: (0.4, 0.6), 4: (0.6, 0.8), 0: (0.8, 0.9), 2: (0.9, 1.0)}
    nothing = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    for token, (low, high) in edges.items():
        for u in (low + 1e-4, (low + high) / 2, high - 1e-4):
            assert Sampler().sample(logits, np.array([u]), **nothing)[0] == token


def test_a_vocabulary_of_real_size_and_uniforms_at_the_ends() -> None:
    logits = (np.random.default_rng(0).standard_normal((5, 50_272)) * 2).astype(np.float32)
    uniforms = np.array([1e-12, 0.25, 0.5, 0.75, 1 - 1e-12])
    for filters in FILTERS[::5]:
        ours = Sampler().sample(logits, uniforms, **filters)
        np.testing.assert_array_equal(ours, reference.sample(logits, uniforms, xp=np, **filters))


def test_the_logits_are_left_as_they_are() -> None:
    logits = np.random.default_rng(0).standard_normal((2, 50)).astype(np.float32)
    before = logits.copy()
    Sampler().sample(logits, np.array([0.3, 0.6]), temperature=0.5, top_k=3, top_p=0.9, min_p=0.1)
    np.testing.assert_array_equal(logits, before)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_row_that_is_no_distribution_is_named(bad: float) -> None:
    logits = np.zeros((3, 9), np.float32)
    logits[1, 4] = bad
    with pytest.raises(NumericalError, match="row 1 of the logits"):
        Sampler().sample(logits, np.full(3, 0.5), temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)


def test_no_rows_are_no_tokens() -> None:
    none = Sampler().sample(np.empty((0, 9), np.float32), np.empty(0), temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
    assert none.shape == (0,) and none.dtype == np.int64
