"""Log-probabilities of given tokens, in one piece or in many."""

import numpy as np
import pytest

from minillm.engine import inspect
from minillm.engine.inspect import all_logits, score_tokens

from ..tiny import logits_of, tiny_runner

LINE = np.random.default_rng(0).integers(3, 96, 50).tolist()


@pytest.mark.parametrize("chunk", [1, 7, 50, 128])
def test_logits_and_scores_do_not_depend_on_the_chunk(chunk: int, monkeypatch) -> None:
    monkeypatch.setattr(inspect, "CHUNK", chunk)
    runner = tiny_runner(seed=2, pages=3, page_size=8)
    expected = logits_of(runner, LINE).astype(np.float64)
    np.testing.assert_allclose(all_logits(runner, LINE), expected, rtol=0, atol=1e-4)
    log_probs = expected - np.log(np.exp(expected).sum(axis=-1, keepdims=True))
    first, *rest = score_tokens(runner, LINE)
    assert first is None
    np.testing.assert_allclose(rest, log_probs[np.arange(49), LINE[1:]], rtol=0, atol=1e-4)
    assert runner.cache.free_pages == 3  # the pages of those that run are not touched


def test_one_token_follows_nothing() -> None:
    assert score_tokens(tiny_runner(), [5]) == [None]
