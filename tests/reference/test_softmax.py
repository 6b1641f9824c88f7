"""Softmax and log-probabilities against the definition in float64; the best few scores against sorting them all."""

import tracemalloc

import numpy as np
import pytest

from minillm.reference.softmax import chosen_log_probs, log_softmax, log_sum_exp, softmax, top_indices, top_log_probs


def scores(shape: tuple[int, ...], scale: float = 4.0, seed: int = 0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(shape) * scale).astype(np.float32)


def defined_softmax(x: np.ndarray) -> np.ndarray:
    weights = np.exp(x.astype(np.longdouble))
    return weights / weights.sum(axis=-1, keepdims=True)


@pytest.mark.parametrize("shape", [(7,), (3, 50), (2, 3, 5)])
def test_softmax_is_its_definition(shape: tuple[int, ...]) -> None:
    x = scores(shape)
    before = x.copy()
    assert softmax(x, np).dtype == np.float32
    np.testing.assert_allclose(softmax(x, np), defined_softmax(x), rtol=2e-6)
    np.testing.assert_allclose(log_softmax(x, np), np.log(defined_softmax(x)), rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(x, before)


@pytest.mark.parametrize("function", [softmax, log_softmax])
def test_out_may_be_another_array_or_the_same(function) -> None:
    x = scores((3, 50))
    expected = function(x, np)
    out = np.empty_like(x)
    assert function(x, np, out=out) is out
    np.testing.assert_array_equal(out, expected)
    assert function(x, np, out=x) is x
    np.testing.assert_array_equal(x, expected)


def test_large_scores_do_not_overflow() -> None:
    x = np.array([[1e4, 1e4, -1e4], [-1e30, 0.0, -np.inf]], np.float32)
    assert softmax(x, np).tolist() == [[0.5, 0.5, 0.0], [0.0, 1.0, 0.0]]
    np.testing.assert_allclose(log_softmax(x, np)[0, :2], np.log(0.5), rtol=1e-6)
    assert log_softmax(x, np)[1].tolist() == [np.float32(-1e30), 0.0, -np.inf]
    np.testing.assert_allclose(log_sum_exp(x, np), [1e4 + np.log(2), 0.0])


def test_a_row_of_nothing_but_minus_infinity_is_nan_as_documented() -> None:
    x = np.full((1, 3), -np.inf, np.float32)
    for function in (softmax, log_softmax):
        with pytest.warns(RuntimeWarning):
            assert np.isnan(function(x, np)).all()


def test_chosen_log_probs_are_entries_of_the_log_softmax() -> None:
    logits, ids = scores((6, 1000)), np.array([0, 999, 3, 3, 500, 17])
    expected = np.log(defined_softmax(logits))[np.arange(6), ids]
    got = chosen_log_probs(logits, ids)
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("n", [0, 1, 5, 40])
def test_top_log_probs_are_the_head_of_the_sorted_log_softmax(n: int) -> None:
    logits = scores((4, 40)).round()  # whole numbers: many equal scores
    ids, log_probs = top_log_probs(logits, n)
    assert ids.shape == log_probs.shape == (4, n)
    for row in range(4):
        expected = sorted(range(40), key=lambda token: (-logits[row, token], token))[:n]
        assert ids[row].tolist() == expected
        np.testing.assert_allclose(log_probs[row], np.log(defined_softmax(logits[row]))[expected], rtol=1e-6, atol=1e-6)


def test_forbidden_tokens_have_log_probability_minus_infinity() -> None:
    logits = np.array([[0.0, -np.inf, 1.0]], np.float32)
    assert chosen_log_probs(logits, np.array([1])).tolist() == [-np.inf]
    ids, log_probs = top_log_probs(logits, 3)
    assert ids.tolist() == [[2, 0, 1]]
    assert log_probs[0, 2] == -np.inf


def test_log_probabilities_of_a_few_tokens_need_no_second_array_of_logits() -> None:
    logits = scores((64, 20_000))
    tracemalloc.start()
    chosen_log_probs(logits, np.zeros(64, np.int64))
    top_log_probs(logits, 5)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < logits.nbytes / 10


@pytest.mark.parametrize("size", [1, 2, 9, 100, 1000, 5003])
@pytest.mark.parametrize("kind", ["distinct", "many equal", "mostly forbidden"])
def test_the_best_come_first_and_of_equals_the_lower_index(size: int, kind: str) -> None:
    rng = np.random.default_rng(size)
    for n in {0, 1, min(size, 8), size // 2, size}:
        scores = rng.normal(size=size).astype(np.float32)
        if kind == "many equal":
            scores = np.round(scores)
        if kind == "mostly forbidden":
            scores[rng.random(size) < 0.99] = -np.inf
        expected = np.argsort(-scores, kind="stable")[:n]
        np.testing.assert_array_equal(top_indices(scores, n, np), expected)
