"""Greedy search: which token is taken, what is told about it, and which object serves whom."""

import numpy as np
import pytest

from minillm.backends.token_sampler import TokenSampler
from minillm.decoding.beam import BeamSearch
from minillm.decoding.resolving import strategy_for
from minillm.decoding.sampling import Sampling
from minillm.decoding.strategy import Rows

from ..tiny import request_for

LOGITS = np.array([[0.0, 3.0, 1.0, 3.0], [2.0, -1.0, 2.5, 0.0]], np.float32)


def step(*requests, logits: np.ndarray = LOGITS):
    """One step of greedy search after the prompts. Returns each request's continuation and feeds."""
    strategy = Sampling(requests[0].settings)
    states = [strategy.begin(request)[0] for request in requests]
    feeds = strategy.step(TokenSampler(), states, Rows(logits.copy(), list(range(len(logits) + 1))))
    return [state.results[0] for state in states], feeds


def test_the_likeliest_is_taken_and_of_equal_ones_the_smallest_id() -> None:
    continuations, feeds = step(request_for([0], vocab_size=4), request_for([0, 2], vocab_size=4))
    assert [c.token_ids for c in continuations] == [[1], [2]]
    assert [[(list(feed.tokens), feed.parent, feed.keep) for feed in line] for line in feeds] == [
        [([1], 0, None)],
        [([2], 0, None)],
    ]


def test_what_ended_is_fed_no_more() -> None:
    ends, goes_on = request_for([0], vocab_size=4, eos_token_id=1), request_for([0], vocab_size=4, eos_token_id=3)
    continuations, feeds = step(ends, goes_on)
    assert [c.finish_reason for c in continuations] == ["stop", None]
    assert feeds[0] == []
    assert len(feeds[1]) == 1


@pytest.mark.parametrize("penalty", [1.0, 1.5])
def test_the_report_is_of_the_distribution_before_processors(penalty: float) -> None:
    request = request_for([1, 2], vocab_size=4, top_logprobs=2, repetition_penalty=penalty)
    [continuation], _ = step(request, logits=LOGITS[:1])
    exact = LOGITS[0].astype(np.float64) - np.log(np.exp(LOGITS[0].astype(np.float64)).sum())
    assert continuation.token_ids == [1 if penalty == 1 else 3]
    np.testing.assert_allclose(continuation.log_probs, [exact[1 if penalty == 1 else 3]], rtol=1e-6)
    [top] = continuation.top_log_probs
    assert [token for token, _ in top] == [1, 3]
    np.testing.assert_allclose([value for _, value in top], exact[[1, 3]], rtol=1e-6)


def test_requests_that_choose_alike_share_a_strategy() -> None:
    def chosen(**fields):
        return strategy_for(request_for([1], **fields).settings)

    assert chosen() is chosen(max_new_tokens=3)
    assert chosen(do_sample=True, seed=1) is chosen(do_sample=True, seed=2)
    assert chosen(do_sample=True, top_k=3) is not chosen(do_sample=True, top_k=4)
    assert chosen(logprobs=True) is not chosen()
    assert [type(chosen(**fields)) for fields in ({}, {"do_sample": True}, {"num_beams": 2})] == [
        Sampling,
        Sampling,
        BeamSearch,
    ]
