"""Contrastive decoding: what a large model expects more than a small one does (Li et al., "Contrastive Decoding:
Open-ended Text Generation as Optimization", arXiv 2210.15097, section 3).

The target is the expert. Among the tokens that are at least contrastive_alpha times as likely as its likeliest one
(equation 2), each scores log p_expert - log p_amateur (equation 1), the amateur's logits divided by
amateur_temperature. Greedy search takes the best; sampling draws from the softmax of the scores. Processors and
filters see the scores.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..backends.base import Backend
from ..reference.softmax import log_softmax
from .greedy import GreedySearch, TokenState
from .parameters import Settings
from .sampling import Sampling
from .strategy import Feed, Request, Rows, State, Strategy


class ContrastiveDecoding(Strategy):
    """Feed both models the same tokens, and choose by the difference."""

    shared = True
    independent = True

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.choice: GreedySearch = Sampling(settings) if settings.do_sample else GreedySearch(settings)

    def begin(self, request: Request) -> tuple[State, list[Feed]]:
        """Feed the prompt to both; continuations fork from it after the first step."""
        state, feeds = self.choice.begin(request)
        return state, to_both(feeds)

    def step(self, backend: Backend, states: Sequence[State], rows: Rows) -> list[list[Feed]]:
        """Choose a token for every growing continuation and feed it."""
        expert_rows: list[int] = []
        amateur_rows: list[int] = []
        growing, first = [], 0
        for state in states:
            assert isinstance(state, TokenState)
            state.feeds //= 2  # the expert's come first, then as many of the amateur's
            places = [first + (0 if state.feeds == 1 else i) for i in range(len(state.growing))]
            expert_rows += places
            amateur_rows += [place + state.feeds for place in places]
            growing += [(state, continuation) for continuation in state.growing]
            first += 2 * state.feeds
        expert, amateur = (rows.logits[np.asarray(places)] for places in (expert_rows, amateur_rows))  # [R, V] each
        scores = contrast(
            expert, amateur, self.settings.contrastive_alpha, self.settings.amateur_temperature, backend.xp
        )
        self.choice.extend(backend, scores, growing, raw=expert)
        return [to_both(self.choice.next_feeds(state)) for state in states if isinstance(state, TokenState)]


def to_both(feeds: list[Feed]) -> list[Feed]:
    """The same feeds for the target, then for the amateur."""
    return [Feed(feed.tokens, feed.parent, model=model) for model in ("target", "amateur") for feed in feeds]


def contrast(expert: Any, amateur: Any, alpha: float, temperature: float, xp: Any) -> Any:
    """The score of every token; minus infinity where the expert does not find it plausible.

    Args:
        expert: logits [R, V]
        amateur: logits [R, V]
        alpha: in [0, 1]; the share of the likeliest token's probability that makes a token plausible
        temperature: of the amateur
        xp: the array module
    """
    log_expert = log_softmax(expert, xp)
    log_amateur = log_softmax(amateur / temperature, xp)
    plausible = xp.exp(log_expert - log_expert.max(axis=-1, keepdims=True)) >= alpha  # [R, V]
    return xp.where(plausible, log_expert - log_amateur, -xp.inf)
