"""Processors for the beginning and end of a sequence, and for suppressed tokens."""

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..values import LARGE
from .history import History, forbid, force


@dataclass(frozen=True)
class MinLength:
    """Forbid every end-of-sequence token while the sequence, prompt included, is shorter than `min_length`."""

    min_length: int
    eos_token_ids: tuple[int, ...]

    def __call__(self, history: History, logits: NDArray[Any], xp: ModuleType) -> NDArray[Any]:
        return forbid(logits, history.lengths < self.min_length, self.eos_token_ids, xp)


@dataclass(frozen=True)
class MinNewTokens:
    """Forbid every end-of-sequence token while fewer than `min_new_tokens` have been generated."""

    min_new_tokens: int
    eos_token_ids: tuple[int, ...]

    def __call__(self, history: History, logits: NDArray[Any], xp: ModuleType) -> NDArray[Any]:
        return forbid(logits, history.generated_lengths < self.min_new_tokens, self.eos_token_ids, xp)


@dataclass(frozen=True)
class ForcedBeginning:
    """Force `token_id` after a prompt of one token (transformers' forced_bos_token_id)."""

    token_id: int

    def __call__(self, history: History, logits: NDArray[Any], xp: ModuleType) -> NDArray[Any]:
        return force(logits, history.lengths == 1, (self.token_id,), xp)


@dataclass(frozen=True)
class ForcedEnd:
    """Force one of `token_ids` as the last token before the length limit (transformers' forced_eos_token_id)."""

    token_ids: tuple[int, ...]

    def __call__(self, history: History, logits: NDArray[Any], xp: ModuleType) -> NDArray[Any]:
        return force(logits, history.lengths == history.max_lengths - 1, self.token_ids, xp)


@dataclass(frozen=True)
class ExponentialDecayLengthPenalty:
    """Raise the EOS tokens' scores with every token after the first `start` generated ones.

    k tokens past `start` the score s of each end-of-sequence token grows by |s| * (factor ** k - 1); a factor below 1
    delays the end. Forbidden tokens stay forbidden.
    """

    start: int
    factor: float
    eos_token_ids: tuple[int, ...]

    def __call__(self, history: History, logits: NDArray[Any], xp: ModuleType) -> NDArray[Any]:
        past = history.generated_lengths - self.start
        rows = xp.flatnonzero(past > 0)
        with np.errstate(over="ignore"):  # a score grows to what float32 holds, and no further
            growth = xp.minimum(self.factor ** past[rows].astype(xp.float64) - 1, LARGE).astype(logits.dtype)
        where = rows[:, None], xp.asarray(self.eos_token_ids)
        scores = logits[where]  # [N, V] -> [rows, number of EOS ids]
        finite = xp.isfinite(scores)
        logits[where] = scores + xp.where(finite, abs(xp.where(finite, scores, 0)) * growth[:, None], 0)
        return logits


@dataclass(frozen=True)
class SuppressTokens:
    """Forbid `token_ids` everywhere."""

    token_ids: tuple[int, ...]

    def __call__(self, history: History, logits: NDArray[Any], xp: ModuleType) -> NDArray[Any]:
        logits[:, xp.asarray(self.token_ids)] = -xp.inf
        return logits


@dataclass(frozen=True)
class SuppressTokensAtBegin:
    """Forbid `token_ids` as the first generated token; as the second where the first is forced."""

    token_ids: tuple[int, ...]
    forced_beginning: bool
    """True if a `ForcedBeginning` is among the processors."""

    def __call__(self, history: History, logits: NDArray[Any], xp: ModuleType) -> NDArray[Any]:
        forced = (history.prompt_lengths == 1) & self.forced_beginning
        return forbid(logits, history.generated_lengths == forced, self.token_ids, xp)
