"""Rotary position embedding as a turn of complex numbers, and what follows from that."""

import numpy as np
import pytest

from minillm.batch import Batch, TokenSequence
from minillm.reference.rotary import Stretch, angles, rotary, rotary_cost

T, HEADS, D = 5, 3, 8
POSITIONS = np.array([0, 1, 7, 300, 4000])


def turned(x: np.ndarray, positions: np.ndarray, frequencies: np.ndarray, scale: float = 1.0) -> np.ndarray:
    """Each pair as a complex number times e^(i p f), in float64."""
    half = len(frequencies)
    pairs = x[..., :half] + 1j * x[..., half : 2 * half].astype(np.float64)
    pairs = pairs * np.exp(1j * (positions[:, None] * frequencies.astype(np.float64)))[:, None] * scale
    return np.concatenate([pairs.real, pairs.imag, x[..., 2 * half :]], axis=-1)


def ours(x: np.ndarray, positions: np.ndarray, frequencies: np.ndarray, growth: np.ndarray | None = None) -> np.ndarray:
    by = angles(positions, frequencies, growth, np)
    out = np.full_like(x, np.nan)
    assert rotary(x, np.cos(by), np.sin(by), np, out) is out
    return out


@pytest.mark.parametrize("half", [1, 3, 4])
def test_pairs_turn_as_complex_numbers_and_what_is_behind_them_stays(half: int) -> None:
    rng = np.random.default_rng(half)
    x, frequencies = rng.standard_normal((T, HEADS, D)), 100.0 ** -np.arange(half) / 3
    before = x.copy()
    np.testing.assert_allclose(ours(x, POSITIONS, frequencies), turned(x, POSITIONS, frequencies), atol=1e-3)
    np.testing.assert_array_equal(x, before)


def test_a_query_and_a_key_meet_by_how_far_apart_they_stand() -> None:
    q, k = np.random.default_rng(0).standard_normal((2, 1, 1, D))
    frequencies = np.array([0.9, 0.2, 0.03, 0.004])

    def product(p: int, s: int) -> float:
        return float((ours(q, np.array([p]), frequencies) * ours(k, np.array([s]), frequencies)).sum())

    assert product(9, 4) == pytest.approx(product(105, 100), abs=1e-4)
    assert abs(product(9, 4) - product(9, 5)) > 1e-2


def test_dynamic_scaling_is_another_base_for_longer_texts() -> None:
    """a^(r / (r - 2)) times the base, by the formula; texts within the original length stay."""
    base, factor, original = 100.0, 3.0, 20
    sequences = [TokenSequence([0] * 50, 48, [0]), TokenSequence([0] * 20, 17, [0]), TokenSequence([0] * 21, 20, [0])]
    batch = Batch.of(sequences, [2, 3, 1], 64)
    growth = Stretch(factor=factor, original=original).growth(batch)
    frequencies = base ** (-np.arange(0, D, 2) / D)
    got = angles(batch.positions, frequencies, growth, np)
    for row, (position, length) in enumerate([(48, 50), (49, 50), (17, 20), (18, 20), (19, 20), (20, 21)]):
        a = factor * length / original - (factor - 1) if length > original else 1
        stretched = (base * a ** (D / (D - 2))) ** (-np.arange(0, D, 2) / D)
        np.testing.assert_allclose(got[row], position * stretched, rtol=1e-5)


def test_a_chunk_of_a_longer_text_is_stretched_as_the_whole_will_be() -> None:
    text = [0] * 60
    whole, chunk = Batch.of([TokenSequence(text, 0, [0])], [60], 64), Batch.of([TokenSequence(text, 10, [0])], [30], 64)
    stretch = Stretch(factor=2.0, original=20)
    assert set(stretch.growth(whole)) == set(stretch.growth(chunk)) == {5.0}


@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("stretched", [True, False])
def test_cost_is_a_count_of_the_operations(scaled: bool, stretched: bool) -> None:
    half, flops = 3, 0
    for _ in range(T):
        for _ in range(half):
            flops += 3 + 2 * stretched + 2 * scaled  # angle, cosine, sine
            flops += HEADS * 6
    x, frequencies = np.zeros((T, HEADS, D), np.float32), np.zeros(half, np.float32)
    read = x.nbytes + frequencies.nbytes + POSITIONS.nbytes
    assert rotary_cost(T, HEADS, D, half, scaled=scaled, stretched=stretched) == (flops, read, x.nbytes, 0)
