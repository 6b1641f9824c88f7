"""A strategy: at each step the token of one rank."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from minillm.decoding.settings import Settings
from minillm.decoding.strategy import Feed, Request, Rows, State, Strategy


class Ranked(Strategy):
    """The token of one rank at each step; rank 0 is greedy search."""

    obeys = frozenset({"min_new_tokens"})

    def __init__(self, settings: Settings, rank: int = 0) -> None:
        """Set the rank, from 0."""
        super().__init__(settings)
        if rank < 0:
            raise ValueError(f"rank should be at least 0, found {rank}")
        self.rank = rank

    def begin(self, request: Request) -> tuple[State, list[Feed]]:
        """The prompt."""
        return State(request, [request.continuation(0)]), [Feed(request.prompt_ids)]

    def step(self, sampler: Any, states: Sequence[State], rows: Rows) -> list[list[Feed]]:
        """One token."""
        [state], [logits] = states, rows.logits
        if len(state.results[0].token_ids) < self.settings.min_new_tokens:
            logits[list(self.settings.eos_token_ids)] = -np.inf
        token = int(np.argsort(-logits, kind="stable")[self.rank])  # [V] -> the rank's token
        ended = state.results[0].push(token)
        return [[] if ended else [Feed([token], parent=0)]]


class Failing(Ranked):
    """One that fails at the second step."""

    def step(self, sampler: Any, states: Sequence[State], rows: Rows) -> list[list[Feed]]:
        """One token, then an error."""
        if states[0].results[0].token_ids:
            raise ZeroDivisionError("nothing here")
        return super().step(sampler, states, rows)
