"""Sampling by two rows of logits for each token: those of two models, or those after two prompts.

Each continuation has two sequences, which get the same new tokens. A subclass says where the second one comes from, and
makes one row of scores of the two; `Sampling` does the rest.
"""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..backends.token_sampler import TokenSampler
from .sampling import Sampling, TokenState
from .settings import Settings
from .strategy import Feed, Rows, State, Strategy


class PairedSampling(Strategy):
    """Choose each token by the logits of two sequences; log-probabilities are those of the first one's model."""

    shared = True
    independent = True

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.choice = Sampling(settings)

    @abstractmethod
    def second_feeds(self, feeds: list[Feed], sequences: int) -> list[Feed]:
        """The feeds of the second sequences, for those of the first ones; each has had `sequences` of them so far."""

    @abstractmethod
    def combined(self, first: Any, second: Any, xp: Any) -> Any:
        """The scores of all tokens. Logits [R, V] of both -> [R, V]"""

    def step(self, sampler: TokenSampler, states: Sequence[State], rows: Rows) -> list[list[Feed]]:
        """Choose a token for every growing continuation, and feed it to both of its sequences."""
        first_rows: list[int] = []
        second_rows: list[int] = []
        growing, start = [], 0
        for state in states:
            assert isinstance(state, TokenState)
            state.feeds //= 2  # the second sequences' feeds come after those of all first ones
            places = [start + (0 if state.feeds == 1 else i) for i in range(len(state.growing))]
            first_rows += places
            second_rows += [place + state.feeds for place in places]
            growing += [(state, continuation) for continuation in state.growing]
            start += 2 * state.feeds
        first, second = (rows.logits[np.asarray(places)] for places in (first_rows, second_rows))  # [R, V] each
        self.choice.extend(sampler, self.combined(first, second, sampler.xp), growing, raw=first)
        return [self._pairs(state) for state in states if isinstance(state, TokenState)]

    def _pairs(self, state: TokenState) -> list[Feed]:
        """The next feeds of a request; their draws are not known in advance."""
        feeds = [feed._replace(draw=None) for feed in self.choice.next_feeds(state)]
        return [*feeds, *self.second_feeds(feeds, state.feeds)]
