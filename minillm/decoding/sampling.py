"""Sampling: draw each token from the model's distribution, after temperature, top-k, top-p and min-p."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..backends.base import Backend
from ..ops.philox import uniform
from .continuation import Continuation
from .greedy import GreedySearch
from .strategy import State


class Sampling(GreedySearch):
    """Draw a token where greedy search would take the likeliest; all else is the same.

    One uniform number per draw, keyed by the request's seed, the continuation's index and the token's position, so a
    draw depends on nothing else in the batch (`ops/philox.py`).
    """

    def choose(self, ops: Backend, logits: Any, growing: Sequence[tuple[State, Continuation]]) -> list[int]:
        """One draw for each row of processed logits. [R, V] -> R ids"""
        uniforms = uniform(
            np.asarray([state.request.settings.seed for state, _ in growing], np.uint64),
            [continuation.index for _, continuation in growing],
            [len(state.request.prompt_ids) + len(continuation.token_ids) for state, continuation in growing],
        )
        settings = self.settings
        tokens = ops.sample(
            logits,
            uniforms,
            temperature=settings.temperature,
            top_k=settings.top_k,
            top_p=settings.top_p,
            min_p=settings.min_p,
        )
        return [int(token) for token in tokens]
