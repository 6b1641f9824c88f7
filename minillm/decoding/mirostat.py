"""Mirostat 2.0: sampling that steers the text's surprise to a target (Basu et al. 2007.14966, algorithm 2).

A token's surprise is -log2 of its probability, in bits. Each step drops the tokens whose surprise is above mu, draws
from what is left, and moves mu against the error of what was drawn:

    mu <- mu - eta * (surprise - tau),    mu = 2 * tau at first

As in llama.cpp, the surprise observed is that of the distribution drawn from, after the truncation; at least the best
token stays; the temperature is applied before, and no other filter.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..backends.base import Backend
from ..reference.sampling import scale
from ..reference.softmax import softmax
from .continuation import Continuation
from .sampling import UNFILTERED, Sampling, TokenState, keys_of
from .strategy import Feed, Request, State


@dataclass(eq=False)
class MirostatState(TokenState):
    """Where each continuation cuts."""

    mu: dict[int, float] = field(default_factory=dict)
    """The largest surprise allowed, in bits, by the continuation's index"""


class Mirostat(Sampling):
    """Draw each token from what surprises at most mu bits, and correct mu by what came."""

    @property
    def on_device(self) -> bool:
        """Never: it computes the surprise of what it drew."""
        return False

    def begin(self, request: Request) -> tuple[MirostatState, list[Feed]]:
        """As greedy search, with every mu at its beginning."""
        state, feeds = super().begin(request)
        mu = dict.fromkeys(request.indices, 2 * self.settings.mirostat_tau)
        return MirostatState(state.request, state.results, growing=state.growing, mu=mu), feeds

    def choose(self, backend: Backend, logits: Any, growing: Sequence[tuple[State, Continuation]]) -> list[int]:
        """One draw for each row of processed logits. [R, V] -> R ids"""
        xp, rows = backend.xp, np.arange(len(growing))
        scores = scale(logits, self.settings.temperature)
        probs = softmax(scores, xp)
        mus = np.asarray([max(0.0, self._state(state).mu[c.index]) for state, c in growing], np.float32)
        kept = probs >= xp.minimum(xp.exp2(-xp.asarray(mus)), probs.max(axis=-1))[:, None]  # below 0: only the best
        tokens = backend.sample(xp.where(kept, scores, -xp.inf), keys_of(growing), **UNFILTERED)
        mass = xp.where(kept, probs, 0).sum(axis=-1, dtype=xp.float64)  # [R, V] -> [R]
        surprises = -xp.log2(probs[rows, tokens] / mass)
        for (state, continuation), surprise in zip(growing, surprises, strict=True):
            error = float(surprise) - self.settings.mirostat_tau
            self._state(state).mu[continuation.index] -= self.settings.mirostat_eta * error
        return [int(token) for token in tokens]

    @staticmethod
    def _state(state: State) -> MirostatState:
        assert isinstance(state, MirostatState)
        return state
