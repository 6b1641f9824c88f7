"""Log-probabilities and the most likely tokens by the kernel: those of the reference."""

import numpy as np
import pytest

from minillm.backends.cpu import launching
from minillm.backends.cpu.sampling import HostSampler
from minillm.backends.token_sampler import TokenSampler


def logits_of(kind: str, V: int, R: int = 5) -> np.ndarray:
    rng = np.random.default_rng(V)
    logits = {
        "plain": rng.standard_normal((R, V)) * 3,
        "flat": 20 + rng.standard_normal((R, V)) * 1e-3,
        "equal": np.full((R, V), -7.5),
        "few levels": rng.integers(-3, 3, (R, V)) * 1.0,
        "peaked": np.where(np.arange(V) == V // 2, 40.0, rng.standard_normal((R, V))),
        "holes": np.where(rng.random((R, V)) < 0.5, -np.inf, rng.standard_normal((R, V))),
    }[kind]
    logits[:, -1] = 0.5  # one token at least is possible
    return logits.astype(np.float32)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("kind", ["plain", "flat", "equal", "few levels", "peaked", "holes"])
@pytest.mark.parametrize("V", [1, 2, 3, 40, 700, 5003])
@pytest.mark.parametrize("threads", [1, 2])
def test_values_and_order_are_the_references(kind: str, V: int, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "_threads", threads)
    logits = logits_of(kind, V)
    tokens = np.random.default_rng(1).integers(0, V, len(logits))
    for top in {0, 1, min(V, 5), min(V, 20), V // 2, V}:
        ours, expected = HostSampler().log_probs(logits, tokens, top), TokenSampler().log_probs(logits, tokens, top)
        np.testing.assert_array_equal(ours.top_ids, expected.top_ids)
        np.testing.assert_allclose(ours.chosen, expected.chosen, rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(ours.top, expected.top, rtol=1e-6, atol=1e-6)


def test_against_the_definition_in_higher_precision() -> None:
    logits = logits_of("plain", 50_272)
    tokens = np.array([0, 1, 50_271, 20_000, 5])
    exact = logits.astype(np.longdouble)
    exact -= np.log(np.exp(exact - exact.max(-1, keepdims=True)).sum(-1, keepdims=True)) + exact.max(-1, keepdims=True)
    ours = HostSampler().log_probs(logits, tokens, 20)
    np.testing.assert_allclose(ours.chosen, exact[np.arange(5), tokens], rtol=1e-6)
    order = np.argsort(-logits, axis=-1, kind="stable")[:, :20]
    np.testing.assert_array_equal(ours.top_ids, order)
    np.testing.assert_allclose(ours.top, np.take_along_axis(exact, order, -1), rtol=1e-6)


def test_no_rows_have_no_log_probabilities() -> None:
    found = HostSampler().log_probs(np.empty((0, 9), np.float32), np.empty(0, np.int64), 4)
    assert (found.chosen.shape, found.top_ids.shape, found.top.shape) == ((0,), (0, 4), (0, 4))


def test_the_scores_of_beams_and_the_best_of_each_row_are_those_of_the_reference() -> None:
    logits = 4 * np.random.default_rng(7).standard_normal((3, 700), np.float32)
    sampler, reference = HostSampler(), TokenSampler()
    np.testing.assert_allclose(sampler.log_softmax(logits), reference.log_softmax(logits), atol=1e-5)
    logits[1, 100:] = -np.inf  # forbidden
    logits[2, [5, 9]] = 50  # ties
    assert np.array_equal(sampler.top(logits, 8), reference.top(logits, 8))
