"""Expectations that others publish: the numbers of llama.cpp's test-sampling, and examples of transformers' docs."""

import numpy as np
import pytest

from minillm.decoding.filters import MinP, TopK, TopNSigma, TopP, Typical
from minillm.decoding.processors import (
    LogitsProcessor,
    NoRepeatNGram,
    PresenceFrequencyPenalty,
    RepetitionPenalty,
    SequenceBias,
)
from minillm.reference.softmax import softmax

from .histories import history

RISING = [0.1, 0.2, 0.3, 0.4]
EQUAL = [0.2] * 5
ALL = RISING
THREE = [0, 0.2 / 0.9, 0.3 / 0.9, 0.4 / 0.9]
TWO = [0, 0, 0.3 / 0.7, 0.4 / 0.7]
ONE = [0, 0, 0, 1]

FILTERS = [
    (TopK(1), RISING, ONE),
    (TopK(3), RISING, THREE),
    (TopK(4), RISING, ALL),
    (TopP(1e-9), RISING, ONE),  # theirs: 0, which minillm refuses
    (TopP(0.7), RISING, TWO),
    (TopP(0.8), RISING, THREE),
    (TopP(1.0), RISING, ALL),
    (MinP(0.0), RISING, ALL),
    (MinP(0.24), RISING, ALL),
    (MinP(0.26), RISING, THREE),
    (MinP(0.49), RISING, THREE),
    (MinP(0.51), RISING, TWO),
    (MinP(0.74), RISING, TWO),
    (MinP(0.76), RISING, ONE),
    (MinP(1.0), RISING, ONE),
    (Typical(0.5), [0.97, 0.01, 0.01, 0.01], [1, 0, 0, 0]),
    (Typical(0.5), [0.4, 0.2, 0.2, 0.2], [0, 1 / 3, 1 / 3, 1 / 3]),
    (TopNSigma(1.0), RISING, TWO),
    (TopNSigma(3.0), RISING, ALL),
]


def apply(processor: LogitsProcessor, probabilities: list[float], generated: list[int]) -> np.ndarray:
    logits = np.log(np.array([probabilities], np.float32))
    return softmax(processor(history(([], generated)), logits, np), np)[0]


@pytest.mark.parametrize(("filter_", "probabilities", "expected"), FILTERS)
def test_filters_of_llama_cpp(filter_: LogitsProcessor, probabilities: list[float], expected: list[float]) -> None:
    np.testing.assert_allclose(apply(filter_, probabilities, [0]), expected, atol=1e-5)


@pytest.mark.parametrize(
    ("said", "repeated", "counted"),
    [
        ([0], [0, 0.25, 0.25, 0.25, 0.25], [0.000011, 0.249997, 0.249997, 0.249997, 0.249997]),
        ([0, 1, 2], [0, 0, 0, 0.5, 0.5], [0.000023, 0.000023, 0.000023, 0.499966, 0.499966]),
        ([0, 1, 2, 0, 0], [0, 0, 0, 0.5, 0.5], [0.000000, 0.000023, 0.000023, 0.499977, 0.499977]),
    ],
)
def test_penalties_of_llama_cpp(said: list[int], repeated: list[float], counted: list[float]) -> None:
    np.testing.assert_allclose(apply(RepetitionPenalty(50.0), EQUAL, said), repeated, atol=1e-5)
    np.testing.assert_allclose(apply(PresenceFrequencyPenalty(5.0, 5.0), EQUAL, said), counted, atol=1e-5)


@pytest.mark.parametrize("order", ["kp", "km", "pk", "pm", "mk", "mp", "kpm", "kmp", "pkm", "pmk", "mkp", "mpk"])
def test_several_filters_of_llama_cpp(order: str) -> None:
    """Their queue over 10,000 tokens of probabilities in proportion to 0, 1, 2, ...: who is the last to stay."""
    V, k, p, m = 10_000, 100, 0.8, 0.1
    filters = {"k": TopK(k), "p": TopP(p), "m": MinP(m)}
    logits = np.log(np.maximum(np.arange(V), 1e-30)).astype(np.float32)[None]
    worst = 1
    for name in order:
        logits = filters[name](history(([0], [])), logits, np)
        if name == "k":
            worst = max(worst, V - k)
        elif name == "m":
            worst = max(worst, int(np.ceil(m * (V - 1))))
        else:
            mass = np.cumsum(np.arange(V - 1, worst - 1, -1))
            worst = V - 1 - int(np.argmax(mass >= p * mass[-1]))
        kept = np.flatnonzero(logits[0] > -np.inf)
        assert (int(kept[0]), int(kept[-1]), len(kept)) == (worst, V - 1, V - worst)


def test_ngrams_of_transformers() -> None:
    """Their example of 2-grams: after 40 2883 2712 4346 each token is known by its successor."""
    seen = history(([40, 2883, 2712], [4346, 40]), ([40, 2883, 2712], [4346]), ([2712], [40, 2712]))
    logits = NoRepeatNGram(2)(seen, np.zeros((3, 5000), np.float32), np)
    assert [np.flatnonzero(row == -np.inf).tolist() for row in logits] == [[2883], [], [40]]


def test_sequence_bias_of_transformers() -> None:
    """Their example [[[10, 45], -2.0], [[64], -7.5]]: the first counts only where 45 would complete it."""
    bias = SequenceBias((((10, 45), -2.0), ((64,), -7.5)))
    logits = bias(history(([3, 10], []), ([10, 3], [])), np.zeros((2, 70), np.float32), np)
    assert [{int(i): float(row[i]) for i in np.flatnonzero(row)} for row in logits] == [
        {45: -2.0, 64: -7.5},
        {64: -7.5},
    ]
