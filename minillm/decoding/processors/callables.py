"""Processors that call the user's functions."""

from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import ParameterError, shown
from ..values import ByIdentity
from .history import History, LogitsProcessor


@dataclass(frozen=True)
class PrefixAllowedTokens:
    """Forbid all tokens but those that a function returns for the sequence so far (De Cao et al. 2010.00904).

    The function takes the index of the prompt in the list of prompts and all tokens of the sequence, [its length]
    int64, and returns token ids. If all of these are already forbidden, they are allowed again with the score 0; in
    beam search, only if that is so for every beam of the request.
    """

    function: ByIdentity
    beams: bool

    def __call__(self, history: History, logits: NDArray[Any], xp: ModuleType) -> NDArray[Any]:
        mask = xp.full_like(logits, -xp.inf)
        for row in range(len(logits)):
            mask[row, self._allowed(history, row, logits.shape[-1], xp)] = 0.0
        scores: NDArray[Any] = logits + mask
        dead = scores.max(axis=-1, initial=-xp.inf) == -xp.inf  # [N, V] -> [N]
        if self.beams:
            dead = ~xp.isin(history.requests, history.requests[~dead])  # no beam of the request is alive
        scores[dead] = mask[dead]
        return scores

    def _allowed(self, history: History, row: int, vocab_size: int, xp: ModuleType) -> NDArray[np.int64]:
        answer = self.function.function(int(history.batch_ids[row]), history.sequence(row))
        try:
            ids = xp.asarray(answer)
        except (TypeError, ValueError):
            ids = xp.empty(0)
        whole = ids.ndim == 1 and ids.dtype.kind in "iu" and len(ids) > 0
        if not whole or ids.min() < 0 or ids.max() >= vocab_size:
            raise ParameterError(
                f"prefix_allowed_tokens_fn should return at least one token id from 0 to {vocab_size - 1},"
                f" found {shown(answer)}"
            )
        allowed: NDArray[np.int64] = ids.astype(xp.int64)
        return allowed


@dataclass(frozen=True)
class UserProcessor:
    """A user's processor with checks of its return value."""

    function: ByIdentity

    def __call__(self, history: History, logits: NDArray[Any], xp: ModuleType) -> NDArray[Any]:
        result: Any = self.function.function(history, logits, xp)
        shape = getattr(result, "shape", None)
        if shape != logits.shape or result.dtype.kind != "f":
            found = type(result).__name__ if shape is None else f"{result.dtype} {list(shape)}"
            raise ParameterError(
                f"logits_processor {self.function.function!r} should return scores, float32 {list(logits.shape)},"
                f" found {found}"
            )
        scores: NDArray[Any] = result.astype(xp.float32, copy=False)
        return scores


def user_processors(functions: Sequence[ByIdentity]) -> list[LogitsProcessor]:
    """The user's processors, in the order given."""
    return [UserProcessor(function) for function in functions]
