"""The worked example of beam search that is usual in lectures: three tokens I, L, U, and two beams. No model is needed.

Step by step, with the probability of each whole line:

    I .6   L .3   U .1                                     beams: I .6, L .3
    II .12   IL .42   IU .06   LI .15   LL .06   LU .09    beams: IL .42, LI .15
    ILI .084   ILL .294   ILU .042   LII .045   ...        results: ILL .294, ILI .084
"""

import math

import numpy as np
import pytest

from minillm.backends.token_sampler import TokenSampler
from minillm.decoding.beam import BeamSearch, BeamState, DiverseBeamSearch
from minillm.decoding.resolving import resolve
from minillm.decoding.settings import GenerationConfig, Settings
from minillm.decoding.strategy import Request, Rows

MODEL = {
    "": (0.6, 0.3, 0.1),
    "I": (0.2, 0.7, 0.1),
    "L": (0.5, 0.2, 0.3),
    "IL": (0.2, 0.7, 0.1),
    "LI": (0.3, 0.4, 0.3),
}
"""Text so far -> the probabilities of I, L and U"""


def settings(**fields: object) -> Settings:
    config = GenerationConfig(num_beams=2, num_return_sequences=2, max_new_tokens=3, length_penalty=0.0, **fields)
    return resolve(config, {}, vocab_size=3, eos_token_id=None)


def words(token_ids: list[int]) -> str:
    return "".join("ILU"[token] for token in token_ids)


def test_the_example_step_by_step() -> None:
    search = BeamSearch(settings())
    state, feeds = search.begin(Request([], search.settings, search))
    assert isinstance(state, BeamState)
    lines, steps = [""], []
    while feeds:
        logits = np.log([MODEL[line] for line in lines]).astype(np.float32)  # [len(feeds), 3]
        state.feeds = len(feeds)
        [feeds] = search.step(TokenSampler(), [state], Rows(logits, range(len(feeds) + 1)))
        lines = [lines[feed.parent or 0] + words(list(feed.tokens)) for feed in feeds]
        steps.append({line: math.exp(score) for line, score in zip(lines, state.scores, strict=False)})
    assert steps[:2] == [pytest.approx({"I": 0.6, "L": 0.3}), pytest.approx({"IL": 0.42, "LI": 0.15})]
    found = {words(result.token_ids): math.exp(result.score or 0) for result in state.results}
    assert list(found.items()) == [("ILL", pytest.approx(0.294)), ("ILI", pytest.approx(0.084))]


def test_the_example_with_a_group_for_each_beam() -> None:
    """The second group avoids what the first one says: penalty 1 is more than I is likelier than L at first."""
    search = DiverseBeamSearch(settings(num_beam_groups=2, diversity_penalty=1.0))
    state, feeds = search.begin(Request([], search.settings, search))
    lines, steps = [""], []
    while feeds:
        logits = np.log([MODEL.get(line, (1 / 3, 1 / 3, 1 / 3)) for line in lines]).astype(np.float32)
        state.feeds = len(feeds)
        [feeds] = search.step(TokenSampler(), [state], Rows(logits, range(len(feeds) + 1)))
        lines = [lines[feed.parent or 0] + words(list(feed.tokens)) for feed in feeds]
        steps.append(lines)
    assert steps[:2] == [["I", "L"], ["IL", "LI"]]  # after L the best is I anyway
    assert words(state.results[0].token_ids) == "ILL"
    assert state.results[1].token_ids[0] == 1
