"""Processors that penalise repetition."""

from dataclasses import dataclass
from types import ModuleType
from typing import Any

from numpy.typing import NDArray

from .history import History


@dataclass(frozen=True)
class RepetitionPenalty:
    """Lower the score of every token that occurs in the sequence, prompt included, once however often it occurs.

    A positive score is divided by the penalty, a negative one multiplied (Keskar et al. 1909.05858, section 4.1, in the
    form used by transformers).
    """

    penalty: float

    def __call__(self, history: History, logits: NDArray[Any], xp: ModuleType) -> NDArray[Any]:
        seen = history.rows(xp), history.token_ids
        scores = logits[seen]  # [N, V] -> [sum of lengths]; a token that occurs twice is written twice, the same
        logits[seen] = xp.where(scores < 0, scores * self.penalty, scores / self.penalty)
        return logits


@dataclass(frozen=True)
class PresenceFrequencyPenalty:
    """Lower the score of generated tokens: score - frequency * count - presence * (count > 0), prompt not counted.

    The formula is that of OpenAI's API reference; as in vLLM, only generated tokens count. Negative values encourage
    repetition.
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
