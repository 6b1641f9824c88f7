"""Mirostat 2.0: sampling with feedback control of the text's surprise (Basu et al. 2007.14966, algorithm 2).

A token's surprise is -log2 of its probability, in bits. Each step drops the tokens whose surprise is above mu, draws
from the rest, and corrects mu by the error of the drawn token:

    mu <- mu - eta * (surprise - tau),    mu = 2 * tau at first

As in llama.cpp, the surprise is measured in the truncated distribution; at least the best token is kept; of the other
filters only the temperature is applied, before.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..backends.token_sampler import TokenSampler
from ..reference.sampling import scale
from ..reference.softmax import softmax
from .row_pipeline import UNFILTERED, Continuations
from .sampling import Sampling, TokenState, keys_of
from .strategy import Feed, Request, State


@dataclass(eq=False)
class MirostatState(TokenState):
    """The truncation threshold mu of each continuation."""

    mu: dict[int, float] = field(default_factory=dict)
    """The largest surprise allowed, in bits, by the continuation's index"""


class Mirostat(Sampling):
    """Draw each token from those with a surprise of at most mu bits, then update mu."""

    on_device = False  # it computes the surprise of the drawn token

    @property
    def batch_key(self) -> object:
        """Itself: only requests with equal settings share a call."""
        return self

    def begin(self, request: Request) -> tuple[MirostatState, list[Feed]]:
        """As greedy search, with every mu at its initial value."""
        state, feeds = super().begin(request)
        mu = dict.fromkeys(request.indices, 2 * self.settings.mirostat_tau)
        return MirostatState(request, state.results, pipeline=self.pipeline, growing=state.growing, mu=mu), feeds

    def choose(self, sampler: TokenSampler, logits: Any, growing: Continuations) -> list[int]:
        """Draw one token for each row of processed logits. [R, V] -> R ids"""
        xp, rows = sampler.xp, np.arange(len(growing))
        scores = scale(logits, self.settings.temperature)
        probs = softmax(scores, xp)
        mus = np.asarray([max(0.0, self._state(state).mu[c.index]) for state, c in growing], np.float32)
        likely = probs >= xp.minimum(xp.exp2(-xp.asarray(mus)), probs.max(axis=-1))[:, None]  # below 0: only the best
        tokens = sampler.sample(xp.where(likely, scores, -xp.inf), keys_of(growing), **UNFILTERED._asdict())
        mass = xp.where(likely, probs, 0).sum(axis=-1, dtype=xp.float64)  # [R, V] -> [R]
        surprises = -xp.log2(probs[rows, tokens] / mass)
        for (state, continuation), surprise in zip(growing, surprises, strict=True):
            error = float(surprise) - self.settings.mirostat_tau
            self._state(state).mu[continuation.index] -= self.settings.mirostat_eta * error
        return [int(token) for token in tokens]

    @staticmethod
    def _state(state: State) -> MirostatState:
        assert isinstance(state, MirostatState)
        return state
