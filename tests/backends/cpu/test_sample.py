"""argmax against NumPy's, and sampling: the tokens of `reference.sampling`."""

import itertools
from typing import Any

import numpy as np
import pytest

from minillm import reference
from minillm.backends.cpu import launching
from minillm.reference.philox import uniform
from minillm.reference.sampling_by_sorting import sample_by_sorting

from . import kernels
from .kernels import fill, loaded, run

PIECE = 4096
RNG = np.random.default_rng(11)
PLAIN = RNG.standard_normal((7, 9000)).astype(np.float32)


def argmax(logits: np.ndarray, shares: int = 1, workers: int = 1) -> tuple[list[int], list[int]]:
    R, V = logits.shape
    tokens, finite, done = (np.zeros(R, np.int64) for _ in range(3))
    pieces = np.empty(R * -(-V // PIECE), np.int64)
    arguments = fill(
        kernels.ArgmaxArguments, logits=logits, tokens=tokens, finite=finite, pieces=pieces, done=done, R=R, V=V
    )
    for _ in range(2):  # the counters must be ready for the next call
        tokens[:] = finite[:] = -5
        run("argmax", arguments, shares, workers)
        assert not done.any()
    return tokens.tolist(), finite.tolist()


@pytest.mark.parametrize("shape", [(1, 1), (1, 3), (1, 255), (2, 257), (3, 4096), (7, 4097), (2, 9000), (0, 5)])
@pytest.mark.parametrize("rounded", [False, True], ids=["all different", "many equal"])
@pytest.mark.parametrize("shares", [1, 5])
def test_the_first_of_the_largest_is_found(shape: tuple[int, int], rounded: bool, shares: int) -> None:
    logits = np.ascontiguousarray(PLAIN[: shape[0], : shape[1]])
    logits = np.round(logits) if rounded else logits
    assert argmax(logits, shares, 2) == (logits.argmax(axis=-1).tolist(), [1] * len(logits))


@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf, -np.inf, np.finfo(np.float32).max])
@pytest.mark.parametrize("places", [[0], [4095], [4096], [8999], [5, 8000], [8000, 5]])
def test_special_numbers_are_what_they_are_to_numpy(value: float, places: list[int]) -> None:
    logits = PLAIN[:3].copy()
    logits[1, places] = np.copysign(np.float32(value), np.float32(value))
    tokens, finite = argmax(logits)
    assert tokens == logits.argmax(axis=-1).tolist()
    assert finite == [1, int(not np.isnan(logits[1]).any() and not np.isposinf(logits[1]).any()), 1]


def test_nan_comes_before_infinity_and_the_first_of_them_counts() -> None:
    logits = PLAIN[:2].copy()
    logits[0, [3, 5000, 8990]] = np.inf, np.nan, np.nan
    logits[1, [8990, 30]] = np.nan, np.inf
    assert argmax(logits)[0] == [5000, 8990]


def test_both_zeros_are_equal_and_a_row_may_hold_nothing_else() -> None:
    logits = np.array([[-1.0, -0.0, 0.0], [0.0, -0.0, 0.0], [-np.inf] * 3, [-2.0, -1.0, -1.0]], np.float32)
    assert argmax(logits) == ([1, 0, 0, 1], [1] * 4)


# --- sampling ---------------------------------------------------------------------------------------------------------

FILTERS = [
    {"temperature": t, "top_k": k, "top_p": p, "min_p": m}
    for t, k, p, m in itertools.product((1.0, 0.3, 2.5), (0, 1, 7, 10_000), (1.0, 0.9, 0.05), (0.0, 0.1))
]
NOTHING = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}


def sample(logits: np.ndarray, uniforms: np.ndarray, filters: Any, shares: int = 1, workers: int = 1) -> np.ndarray:
    """`filters` is one dict for all rows, or one for each."""
    R, V = logits.shape
    each = [filters] * R if isinstance(filters, dict) else filters
    draws = np.array(
        [(f["temperature"], f["top_p"], f["min_p"], u, f["top_k"]) for f, u in zip(each, uniforms, strict=True)],
        kernels.Draw,
    )
    tokens = np.full(R, -7)
    scratch = np.full((workers, loaded().sample_scratch(kernels.integer(V))), np.nan)
    run(
        "sample",
        fill(kernels.SampleArguments, logits=logits, draws=draws, tokens=tokens, scratch=scratch, R=R, V=V),
        shares,
        workers,
    )
    return tokens


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
        "three": rng.standard_normal((5, 3)),
    }


@pytest.mark.longer
@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", rows(0))
def test_the_same_tokens_as_the_reference(name: str) -> None:
    for seed, filters in enumerate(FILTERS):
        logits = rows(seed)[name].astype(np.float32)
        uniforms = np.random.default_rng(seed + 999).random(len(logits))
        ours = sample(logits, uniforms, filters)
        np.testing.assert_array_equal(ours, sample_by_sorting(logits, uniforms, xp=np, **filters), str(filters))
        np.testing.assert_array_equal(ours, reference.sample(logits, uniforms, xp=np, **filters), str(filters))


def test_every_token_is_reached_by_its_own_uniforms() -> None:
    logits = np.log(np.array([[0.1, 0.4, 0.1, 0.2, 0.2]], np.float32))
    edges = {1: (0.0, 0.4), 3: (0.4, 0.6), 4: (0.6, 0.8), 0: (0.8, 0.9), 2: (0.9, 1.0)}
    for token, (low, high) in edges.items():
        for u in (low + 1e-4, (low + high) / 2, high - 1e-4):
            assert sample(logits, np.array([u]), NOTHING)[0] == token


@pytest.mark.parametrize("V", [4, 64, 700])
def test_a_mass_that_is_reached_exactly_is_reached(V: int) -> None:
    logits, quarters = np.zeros((4, V), np.float32), np.arange(1, 5) / 4
    assert sample(logits, quarters, NOTHING).tolist() == (quarters * V - 1).tolist()


def test_a_vocabulary_of_real_size_and_uniforms_at_the_ends() -> None:
    logits = (np.random.default_rng(0).standard_normal((5, 50_272)) * 2).astype(np.float32)
    uniforms = np.array([1e-12, 0.25, 0.5, 0.75, 1 - 1e-12])
    for filters in FILTERS[::5]:
        ours = sample(logits, uniforms, filters, 3, 2)
        np.testing.assert_array_equal(ours, reference.sample(logits, uniforms, xp=np, **filters))


def steep(V: int, *, levels: float = 0.0) -> np.ndarray:
    """A row [V] as a model's: likelihoods fall with a power of the rank, most of them far below the best."""
    rng = np.random.default_rng(V)
    logits = rng.permutation(-1.7 * np.log1p(np.arange(V))) + rng.standard_normal(V) * 0.1
    logits[rng.random(V) < 0.05] = -np.inf
    return np.asarray((np.round(logits / levels) * levels if levels else logits)[None], np.float32)


@pytest.mark.slow
@pytest.mark.parametrize("levels", [0.0, 0.5, 1e-5], ids=["all different", "many equal", "nearly equal"])
@pytest.mark.parametrize("V", [64 * 100, 6417])
def test_candidates_far_below_the_best_are_found_too(V: int, levels: float) -> None:
    uniforms = np.concatenate([np.linspace(1e-6, 1 - 1e-6, 60), 1 - 10.0 ** -np.arange(3, 9)])
    logits = np.repeat(steep(V, levels=levels), len(uniforms), axis=0)
    for filters in ({}, {"temperature": 0.7}, {"top_p": 0.5}, {"top_p": 0.99}, {"min_p": 0.01}, {"min_p": 1e-7}):
        given = NOTHING | filters
        expected = sample_by_sorting(logits, uniforms, xp=np, **given)
        np.testing.assert_array_equal(sample(logits, uniforms, given), expected, str(filters))


def test_each_row_has_its_own_filters() -> None:
    logits = (np.random.default_rng(0).standard_normal((len(FILTERS), 700)) * 2).astype(np.float32)
    uniforms = np.random.default_rng(1).random(len(FILTERS))
    ours = sample(logits, uniforms, FILTERS, 4, 2)
    for i, filters in enumerate(FILTERS):
        assert ours[i] == reference.sample(logits[i : i + 1], uniforms[i : i + 1], xp=np, **filters)[0]


@pytest.mark.parametrize("k", [1, 2, 50, 499, 500])
def test_top_k_keeps_ties(k: int) -> None:
    logits = np.random.default_rng(k).integers(0, 40, (3, 500)).astype(np.float32)
    for u in (1e-9, 0.3, 0.999999):
        filters = NOTHING | {"top_k": k, "temperature": 7.0}
        expected = sample_by_sorting(logits, np.full(3, u), xp=np, **filters)
        np.testing.assert_array_equal(sample(logits, np.full(3, u), filters), expected)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_row_that_is_no_distribution_is_marked(bad: float) -> None:
    logits = np.zeros((4, 9), np.float32)
    logits[1, 4], logits[3] = bad, -np.inf
    assert (sample(logits, np.full(4, 0.5), NOTHING) == -1).tolist() == [False, True, False, True]


def test_the_uniform_numbers_are_philoxs() -> None:
    rng = np.random.default_rng(3)
    seeds = np.concatenate([rng.integers(0, 2**64, 200, np.uint64), np.array([0, 1, 2**32 - 1, 2**64 - 1], np.uint64)])
    sequences, positions = (rng.integers(0, 2**32, len(seeds)) for _ in range(2))
    for purpose in (0, 1, 2**32 - 1):
        numbers = np.zeros(len(seeds))
        given = {"seeds": seeds, "sequences": sequences, "positions": positions, "numbers": numbers}
        run("uniforms", fill(launching.Uniforms, **given, R=len(seeds), purpose=purpose), 3, 2)
        np.testing.assert_array_equal(numbers, uniform(seeds, sequences, positions, purpose))


def test_no_rows_are_no_tokens() -> None:
    assert sample(np.empty((0, 9), np.float32), np.empty(0), NOTHING).shape == (0,)


@pytest.mark.parametrize("V", [1, 31, 33, 100, 4100])
def test_a_mask_leaves_the_tokens_whose_bit_is_set(V: int) -> None:
    rng = np.random.default_rng(V)
    logits, rows = rng.standard_normal((5, V)).astype(np.float32), np.array([4, 0, 2])
    allowed = rng.random((3, V)) < 0.3
    allowed[0, -1], allowed[1] = True, False
    masks, left = np.zeros((3, 4 * -(-V // 32)), np.uint8), np.full(3, -1)
    packed = np.packbits(allowed, axis=-1, bitorder="little")
    masks[:, : packed.shape[1]] = packed
    expected = logits.copy()
    expected[rows] = np.where(allowed, logits[rows], -np.inf)
    words = masks.view(np.uint32)
    run("keep_allowed", fill(launching.KeepAllowed, logits=logits, rows=rows, masks=words, left=left, G=3, V=V,
                             W=words.shape[1]), 2, 2)  # fmt: skip
    np.testing.assert_array_equal(logits, expected)
    assert left.tolist() == allowed.any(axis=-1).tolist()
