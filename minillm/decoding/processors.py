"""Logits processors: small frozen objects that change the scores of the next token before one is chosen.

They run in transformers' order: repetition penalty, presence and frequency penalty, minimum length, minimum of new
tokens; the filters of sampling (`filters.py`) follow. transformers has no presence and frequency penalty; here they
stand right after the repetition penalty, as in vLLM.

In beam search the processors see log-probabilities instead of logits, as in transformers.
"""

from dataclasses import dataclass
from types import ModuleType
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from .parameters import Settings


@dataclass(frozen=True, eq=False)
class History:
    """What the N sequences have seen so far, laid end to end, never padded.

    Attributes:
        token_ids: all tokens, prompts included, [sum of lengths] int64.
        starts: where each sequence begins in `token_ids`, and at last where the last one ends, [N + 1] int64.
        prompt_lengths: how many tokens of each are its prompt, [N] int64.
    """

    token_ids: NDArray[np.int64]
    starts: NDArray[np.int64]
    prompt_lengths: NDArray[np.int64]

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each sequence, prompt included, [N]."""
        return self.starts[1:] - self.starts[:-1]

    @property
    def generated_lengths(self) -> NDArray[np.int64]:
        """Tokens of each sequence after its prompt, [N]."""
        return self.lengths - self.prompt_lengths

    def rows(self, xp: ModuleType) -> NDArray[np.int64]:
        """Index of the sequence that each token belongs to, [sum of lengths]."""
        rows: NDArray[np.int64] = xp.searchsorted(self.starts, xp.arange(len(self.token_ids)), side="right") - 1
        return rows


class LogitsProcessor(Protocol):
    """Changes scores before a token is chosen."""

    def __call__(self, history: History, logits: NDArray[Any], xp: ModuleType) -> NDArray[Any]:
        """Return the new scores of `logits` [N, V] float32, which may be changed in place.

        The array returned is the one to use. `xp` is the array module of `logits` and `history`.
        """


@dataclass(frozen=True)
class RepetitionPenalty:
    """Push down every token that occurs in the sequence, prompt included, once however often it occurs.

    A positive score is divided by the penalty, a negative one multiplied (Keskar et al. 1909.05858, section 4.1, in the
    form that transformers gave it).
    """

    penalty: float

    def __call__(self, history: History, logits: NDArray[Any], xp: ModuleType) -> NDArray[Any]:
        seen = history.rows(xp), history.token_ids
        scores = logits[seen]  # [N, V] -> [sum of lengths]; a token that occurs twice is written twice, the same
        logits[seen] = xp.where(scores < 0, scores * self.penalty, scores / self.penalty)
        return logits


@dataclass(frozen=True)
class PresenceFrequencyPenalty:
    """Push down what was generated: score - frequency * count - presence * (count > 0), the prompt not counted.

    The formula is that of OpenAI's API reference; that only generated tokens count is how vLLM reads it. Negative
    values encourage repetition.
    """

    presence: float
    frequency: float

    def __call__(self, history: History, logits: NDArray[Any], xp: ModuleType) -> NDArray[Any]:
        V = logits.shape[-1]
        rows = history.rows(xp)
        positions = xp.arange(len(rows)) - history.starts[rows]
        generated = positions >= history.prompt_lengths[rows]
        # One number for each (row, token), so that each distinct pair is counted once.
        pairs, counts = xp.unique(rows[generated] * V + history.token_ids[generated], return_counts=True)
        logits[pairs // V, pairs % V] -= (self.presence + self.frequency * counts).astype(logits.dtype)
        return logits


@dataclass(frozen=True)
class MinLength:
    """Forbid every end-of-sequence token while the sequence, prompt included, is shorter than `min_length`."""

    min_length: int
    eos_token_ids: tuple[int, ...]

    def __call__(self, history: History, logits: NDArray[Any], xp: ModuleType) -> NDArray[Any]:
        return _forbid(logits, history.lengths < self.min_length, self.eos_token_ids, xp)


@dataclass(frozen=True)
class MinNewTokens:
    """Forbid every end-of-sequence token while fewer than `min_new_tokens` have been generated."""

    min_new_tokens: int
    eos_token_ids: tuple[int, ...]

    def __call__(self, history: History, logits: NDArray[Any], xp: ModuleType) -> NDArray[Any]:
        return _forbid(logits, history.generated_lengths < self.min_new_tokens, self.eos_token_ids, xp)


def _forbid(logits: NDArray[Any], rows: NDArray[np.bool_], ids: tuple[int, ...], xp: ModuleType) -> NDArray[Any]:
    """Set the tokens `ids` to -inf in the rows marked by `rows` [N]."""
    logits[xp.flatnonzero(rows)[:, None], xp.asarray(ids)] = -xp.inf
    return logits


def build_processors(settings: Settings) -> tuple[LogitsProcessor, ...]:
    """The processors that have an effect, in order."""
    processors: list[LogitsProcessor] = []
    if settings.repetition_penalty != 1.0:
        processors.append(RepetitionPenalty(settings.repetition_penalty))
    if settings.presence_penalty != 0.0 or settings.frequency_penalty != 0.0:
        processors.append(PresenceFrequencyPenalty(settings.presence_penalty, settings.frequency_penalty))
    if settings.min_length > 0 and settings.eos_token_ids:
        processors.append(MinLength(settings.min_length, settings.eos_token_ids))
    if settings.min_new_tokens > 0 and settings.eos_token_ids:
        processors.append(MinNewTokens(settings.min_new_tokens, settings.eos_token_ids))
    return tuple(processors)
