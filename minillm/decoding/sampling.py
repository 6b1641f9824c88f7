"""Sampling: draw each token from the model's distribution, after the filters."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from ..backends.base import Backend
from ..reference.philox import Keys
from ..reference.sampling import Draw
from .continuation import Continuation
from .filters import MinP, Temperature, TopK, TopP, build_filters
from .greedy import GreedySearch
from .parameters import Settings
from .strategy import Request, State

UNFILTERED: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}


class Sampling(GreedySearch):
    """Draw a token where greedy search would take the likeliest; all else is the same.

    One uniform number per draw, keyed by the request's seed, the continuation's index and the token's position, so a
    draw depends on nothing else in the batch (`reference/philox.py`).
    """

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        filters = build_filters(settings)
        if all(isinstance(filter_, Temperature | TopK | TopP | MinP) for filter_ in filters):
            self.drawn = {name: getattr(settings, name) for name in UNFILTERED}
        else:  # the draw does not know the others: let all of them mask the row
            self.filters = filters
            self.drawn = UNFILTERED

    def next_draw(self, request: Request, continuation: Continuation) -> Draw | None:
        """As `choose` will ask for it, unless the logits are changed before."""
        if not self.on_device or request.guide is not None:
            return None
        place = _place(request, continuation)
        return Draw(**self.drawn, seed=request.settings.seed, sequence=continuation.index, position=place)

    def choose(self, backend: Backend, logits: Any, growing: Sequence[tuple[State, Continuation]]) -> list[int]:
        """One draw for each row of processed logits. [R, V] -> R ids"""
        return [int(token) for token in backend.sample(logits, keys_of(growing), **self.drawn)]


def keys_of(growing: Sequence[tuple[State, Continuation]], purpose: int = 0, ahead: ArrayLike = 0) -> Keys:
    """What decides over the next token of each continuation, or over one `ahead` tokens further. [R]"""
    return Keys(
        np.asarray([state.request.settings.seed for state, _ in growing], np.uint64),
        np.asarray([continuation.index for _, continuation in growing]),
        np.asarray([_place(state.request, continuation) for state, continuation in growing]) + np.asarray(ahead),
        purpose,
    )


def _place(request: Request, continuation: Continuation) -> int:
    """The position of a continuation's next token."""
    return len(request.prompt_ids) + len(continuation.token_ids)
