"""Diverse beam search: what its groups do to each other. transformers 4.55.4 is in test_golden_searches.py."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from minillm.backends.token_sampler import TokenSampler
from minillm.decoding.beam import DiverseBeamSearch, DiverseState
from minillm.decoding.strategy import Rows
from minillm.runner.runner import Runner

from ..tiny import loop_of, random_prompts, request_for, run, runner_of, tiny_model

PROMPTS = random_prompts(5, seed=6)


@pytest.fixture(scope="module")
def runner() -> Runner:
    return runner_of(tiny_model(seed=2), pages=900, page_size=4)


def search(runner: Runner, **fields: Any) -> list[list[list[int]]]:
    requests = [request_for(p, max_new_tokens=10, num_return_sequences=4, **fields) for p in PROMPTS]
    return [[r.token_ids for r in one] for one in run(loop_of(target=runner, max_batch_size=24), requests)]


@pytest.mark.longer
@pytest.mark.sampled(2)
@pytest.mark.parametrize("fields", [{}, {"repetition_penalty": 1.4, "length_penalty": 0.0}], ids=str)
def test_one_group_is_beam_search(runner: Runner, fields: dict[str, Any]) -> None:
    """Where nothing ends early; for what does, the two have rules of their own."""
    requests = [request_for(p, max_new_tokens=10, num_beams=4, num_return_sequences=4, **fields) for p in PROMPTS]
    loop = loop_of(target=runner, max_batch_size=24)
    found = run(loop, requests, DiverseBeamSearch(replace(requests[0].settings, num_beam_groups=1)))
    expected = search(runner, num_beams=4, **fields)
    assert [[r.token_ids for r in one] for one in found] == expected
    assert search(runner, num_beams=4, num_beam_groups=1, **fields) == expected


@pytest.mark.slow
def test_a_higher_penalty_makes_the_groups_differ(runner: Runner) -> None:
    def distinct(penalty: float) -> int:
        found = search(runner, num_beams=4, num_beam_groups=4, diversity_penalty=penalty)
        return sum(len({line[i] for line in lines}) for lines in found for i in range(10))

    assert distinct(1e-6) == len(PROMPTS) * 10  # four times the greedy line
    assert distinct(1e-6) < distinct(1.0) < distinct(20.0) == 4 * len(PROMPTS) * 10


@pytest.mark.longer
def test_the_first_group_is_a_beam_search_of_its_size(runner: Runner) -> None:
    groups = search(runner, num_beams=4, num_beam_groups=2, diversity_penalty=5.0)
    requests = [request_for(p, max_new_tokens=10, num_beams=2) for p in PROMPTS]
    for lines, [best] in zip(groups, run(loop_of(target=runner, max_batch_size=24), requests), strict=True):
        assert best.token_ids in lines


@pytest.mark.parametrize(("early_stopping", "expected"), [(True, [[2], [0, 2]]), (False, [[2], [0, 1]])])
def test_a_group_that_is_full_with_the_last_token_takes_none_that_are_cut_off(early_stopping, expected) -> None:
    """The second token: after 0, token 1 is likelier than the end; but the end makes the group full."""
    fields = {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 1.0, "eos_token_id": [2]}
    request = request_for([1], vocab_size=4, max_new_tokens=2, early_stopping=early_stopping, **fields)
    search = DiverseBeamSearch(request.settings)
    state, _ = search.begin(request)
    assert isinstance(state, DiverseState)
    first = np.log([[0.35, 0.1, 0.5, 0.05]]).astype(np.float32)
    [feeds] = search.step(TokenSampler(), [state], Rows(first, [0, 1]))
    state.feeds = len(feeds)
    rows = [[0.02, 0.50, 0.47, 0.01] if feed.tokens[0] == 0 else [0.97, 0.01, 0.01, 0.01] for feed in feeds]
    search.step(TokenSampler(), [state], Rows(np.log(rows).astype(np.float32), range(len(feeds) + 1)))
    assert [result.token_ids for _, result in state.groups[0].finished] == expected
