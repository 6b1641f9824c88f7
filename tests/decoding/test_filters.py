"""Filters of sampling on small rows worked out by hand."""

import numpy as np
import pytest

from minillm.decoding.filters import MinP, Renormalize, Temperature, TopK, TopP, build_filters
from minillm.decoding.processors import LogitsProcessor
from minillm.decoding.resolving import resolve
from minillm.decoding.settings import GenerationConfig

from .histories import history

SEEN = history(([0], []))
ALL = {
    "do_sample": True, "eta_cutoff": 0.1, "epsilon_cutoff": 0.1, "typical_p": 0.5, "min_p": 0.1, "top_p": 0.9,
    "top_k": 7, "top_n_sigma": 1, "top_h": 0.5, "temperature": 0.5, "xtc_probability": 0.5,
}  # fmt: skip


def kept(filter_: LogitsProcessor, probabilities: list[float]) -> list[int]:
    with np.errstate(divide="ignore"):
        logits = np.log(np.array([probabilities], np.float32))
    return np.flatnonzero(filter_(SEEN, logits, np)[0] > -np.inf).tolist()


def test_temperature_divides() -> None:
    logits = np.array([[3.0, -1.0, -np.inf]], np.float32)
    assert Temperature(2.0)(SEEN, logits, np).tolist() == [[1.5, -0.5, -np.inf]]


@pytest.mark.parametrize(
    ("k", "expected"),
    [(1, [3]), (2, [1, 3]), (3, [0, 1, 3, 4]), (4, [0, 1, 3, 4]), (5, [0, 1, 2, 3, 4]), (9, [0, 1, 2, 3, 4])],
)
def test_top_k_keeps_what_equals_the_last_one(k: int, expected: list[int]) -> None:
    assert kept(TopK(k), [0.1, 0.2, 0.05, 0.55, 0.1]) == expected


@pytest.mark.parametrize(
    ("p", "expected"),
    [
        (1e-9, [1]),
        (0.39, [1]),
        (0.41, [0, 1]),
        (0.69, [0, 1]),
        (0.71, [0, 1, 3]),
        (0.94, [0, 1, 2, 3]),  # of the two equal ones, the lower id
        (1.0, [0, 1, 2, 3, 4]),
    ],
)
def test_top_p_keeps_the_fewest_that_reach_p(p: float, expected: list[int]) -> None:
    assert kept(TopP(p), [0.3, 0.4, 0.05, 0.2, 0.05]) == expected


def test_top_p_stops_where_p_is_reached_exactly() -> None:
    assert kept(TopP(0.5), [0.25] * 4) == [0, 1]


def test_top_p_of_what_is_left() -> None:
    assert kept(TopP(0.6), [0.0, 0.5, 0.25, 0.0]) == [1]  # the shares are 2/3 and 1/3


@pytest.mark.parametrize(("min_p", "expected"), [(0.0, [0, 1, 2]), (0.19, [0, 1, 2]), (0.21, [0, 1]), (1.0, [0])])
def test_min_p_is_relative_to_the_best(min_p: float, expected: list[int]) -> None:
    assert kept(MinP(min_p), [0.5, 0.4, 0.1]) == expected


def test_only_filters_with_an_effect_are_built_in_order() -> None:
    def build(**fields: object) -> tuple[LogitsProcessor, ...]:
        return build_filters(resolve(GenerationConfig(**fields), {}, vocab_size=100, eos_token_id=2))

    assert build() == ()
    assert build(do_sample=True) == (TopK(50),)
    assert build(do_sample=True, top_k=0, top_p=1.0, min_p=0.0, temperature=1.0) == ()
    assert build(do_sample=True, min_p=0.1, top_p=0.9, top_k=7, temperature=0.5) == (
        Temperature(0.5),
        TopK(7),
        TopP(0.9),
        MinP(0.1),
    )
    assert [type(filter_).__name__ for filter_ in build(**ALL)] == [
        *("Temperature", "TopH", "TopNSigma", "TopK", "TopP", "MinP", "Typical", "EpsilonCutoff", "EtaCutoff", "Xtc")
    ]
    assert build(num_beams=3, renormalize_logits=True) == (Renormalize(),)
