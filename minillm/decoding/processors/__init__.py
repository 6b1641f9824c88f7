"""Logits processors: small frozen objects that change the scores of the next token before one is chosen.

They run in transformers' order: sequence bias, repetition penalty, presence and frequency penalty, no repeated n-grams,
bad words, minimum length, minimum of new tokens, prefix_allowed_tokens_fn, forced BOS, forced EOS, exponential decay,
suppressed tokens, tokens suppressed at the beginning, the user's own. The sampling filters (`filters.py`) follow.
transformers has no presence and frequency penalty; here they come right after the repetition penalty, as in vLLM.

In beam search the processors see log-probabilities instead of logits, as in transformers.
"""

from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import ParameterError
from ..settings import Settings
from .callables import PrefixAllowedTokens, UserProcessor, user_processors
from .history import History, LogitsProcessor
from .lengths import (
    ExponentialDecayLengthPenalty,
    ForcedBeginning,
    ForcedEnd,
    MinLength,
    MinNewTokens,
    SuppressTokens,
    SuppressTokensAtBegin,
)
from .penalties import PresenceFrequencyPenalty, RepetitionPenalty
from .sequences import NoRepeatNGram, SequenceBias

__all__ = [
    "ExponentialDecayLengthPenalty",
    "ForcedBeginning",
    "ForcedEnd",
    "History",
    "LogitsProcessor",
    "MinLength",
    "MinNewTokens",
    "NoRepeatNGram",
    "PrefixAllowedTokens",
    "PresenceFrequencyPenalty",
    "RepetitionPenalty",
    "SequenceBias",
    "SuppressTokens",
    "SuppressTokensAtBegin",
    "UserProcessor",
    "build_processors",
    "no_token_left",
    "rows_without_a_token",
]


def rows_without_a_token(logits: NDArray[Any], xp: ModuleType) -> NDArray[np.bool_]:
    """Mask of the rows that are all -inf, from which no token can be chosen. [R, V] -> [R] bool"""
    rows: NDArray[np.bool_] = logits.max(axis=-1) == -xp.inf
    return rows


def no_token_left() -> ParameterError:
    """The error that every strategy raises for a request with no token left to choose."""
    return ParameterError("the logits processors and filters asked for leave no token to choose from")


def build_processors(settings: Settings) -> tuple[LogitsProcessor, ...]:
    """The processors that have an effect, in order."""
    return tuple(_about_content(settings) + _about_lengths(settings) + user_processors(settings.logits_processor))


def _about_content(settings: Settings) -> list[LogitsProcessor]:
    """Processors that act on content: penalties for repetition, forbidden and biased sequences."""
    processors: list[LogitsProcessor] = []
    if settings.sequence_bias:
        processors.append(SequenceBias(settings.sequence_bias))
    if settings.repetition_penalty != 1.0:
        processors.append(RepetitionPenalty(settings.repetition_penalty))
    if settings.presence_penalty != 0.0 or settings.frequency_penalty != 0.0:
        processors.append(PresenceFrequencyPenalty(settings.presence_penalty, settings.frequency_penalty))
    if settings.no_repeat_ngram_size > 0:
        processors.append(NoRepeatNGram(settings.no_repeat_ngram_size))
    if settings.bad_words_ids:
        processors.append(SequenceBias(tuple((word, -float("inf")) for word in settings.bad_words_ids)))
    return processors


def _about_lengths(settings: Settings) -> list[LogitsProcessor]:
    """Processors that act on length, and on the first and last tokens."""
    processors: list[LogitsProcessor] = []
    eos = settings.eos_token_ids
    if settings.min_length > 0 and eos:
        processors.append(MinLength(settings.min_length, eos))
    if settings.min_new_tokens > 0 and eos:
        processors.append(MinNewTokens(settings.min_new_tokens, eos))
    if settings.prefix_allowed_tokens_fn is not None:
        processors.append(PrefixAllowedTokens(settings.prefix_allowed_tokens_fn, beams=settings.num_beams > 1))
    if settings.forced_bos_token_id is not None:
        processors.append(ForcedBeginning(settings.forced_bos_token_id))
    if settings.forced_eos_token_id:
        processors.append(ForcedEnd(settings.forced_eos_token_id))
    if settings.exponential_decay_length_penalty is not None and eos:
        processors.append(ExponentialDecayLengthPenalty(*settings.exponential_decay_length_penalty, eos))
    if settings.suppress_tokens:
        processors.append(SuppressTokens(settings.suppress_tokens))
    if settings.begin_suppress_tokens:
        forced = settings.forced_bos_token_id is not None
        processors.append(SuppressTokensAtBegin(settings.begin_suppress_tokens, forced_beginning=forced))
    return processors
