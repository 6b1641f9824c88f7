"""Detection of watermarked texts: how far the share of marked tokens is above chance."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..decoding.field_values import phrase
from ..decoding.resolving import read_field
from ..decoding.values import whole
from ..decoding.watermark import context_hashes, fresh_contexts, g_values, is_green
from ..decoding.watermark_config import GreenList, SynthId
from ..errors import ParameterError, shown


@dataclass(frozen=True)
class WatermarkScore:
    """The marked share of a text, and how likely so much is by chance."""

    scored: int
    """Number of draws that were looked at: tokens, or bits of tokens"""
    marked: int
    """How many of these were in favour of the watermark"""
    expected: float
    """Share of marked ones in a text without this watermark"""

    @property
    def fraction(self) -> float:
        """Share of marked ones."""
        return self.marked / self.scored

    @property
    def z_score(self) -> float:
        """Standard deviations above the share expected; 3 and more is a usual threshold."""
        deviation = math.sqrt(self.scored * self.expected * (1 - self.expected))
        return (self.marked - self.expected * self.scored) / deviation

    @property
    def p_value(self) -> float:
        """Probability of this z-score or a higher one in a text without this watermark."""
        return 0.5 * math.erfc(self.z_score / math.sqrt(2))


def detect(
    token_ids: Sequence[int],
    watermarking_config: Mapping[str, Any],
    vocab_size: int,
    *,
    ignore_repeated_ngrams: bool = False,
) -> WatermarkScore:
    """Score the tokens of a text.

    A green list's score is that of transformers' WatermarkDetector. Of SynthID's it is the sum of the bits, in contexts
    that have not come before; trained detectors, which transformers has, find shorter texts.

    Args:
        token_ids: the text, best without its prompt and without a beginning-of-sequence token
        watermarking_config: as the text was generated with
        vocab_size: number of tokens that the model scores (`engine.config.vocab_size`)
        ignore_repeated_ngrams: count equal sequences of tokens once (green lists)

    Raises:
        ParameterError: the settings are invalid, or the text is too short for them; an id is outside the vocabulary.
    """
    config = read_field("watermarking_config", watermarking_config)
    try:
        tokens, V = phrase(token_ids), whole(1)(vocab_size)
    except ValueError:
        raise ParameterError(
            f"detect takes token ids and the size of their vocabulary, found {shown(token_ids)} and {shown(vocab_size)}"
        ) from None
    if max(tokens) >= V:
        raise ParameterError(
            f"token {max(tokens)} is not among the vocabulary's {V} tokens: give the model's vocab_size"
        )
    line = np.asarray(tokens, np.int64)
    if isinstance(config, SynthId):
        return _bits(config, line)
    return _green_tokens(config, line, V, ignore_repeated_ngrams)


def _need(tokens: int, line: Sequence[int]) -> None:
    if len(line) < tokens:
        raise ParameterError(f"the text has {len(line)} tokens: its watermark needs at least {tokens} to be detected")


def _green_tokens(config: GreenList, line: Any, vocab_size: int, once: bool) -> WatermarkScore:
    """Count the tokens that are in their green list."""
    _need(config.context_width + 1, line)
    own = config.seeding_scheme == "selfhash"  # the token is among those that seed its list
    width = config.context_width + (0 if own else 1)
    counts: dict[tuple[int, ...], int] = {}
    for start in range(len(line) - width + 1):
        ngram = tuple(line[start : start + width].tolist())
        counts[ngram] = 1 if once else counts.get(ngram, 0) + 1
    green = sum(
        count
        for ngram, count in counts.items()
        if is_green(config, np.asarray(ngram if own else ngram[:-1]), ngram[-1], vocab_size)
    )
    return WatermarkScore(sum(counts.values()), green, config.greenlist_ratio)


def _bits(config: SynthId, line: Any) -> WatermarkScore:
    """Count the bits of the tokens whose context is new."""
    _need(config.ngram_len, line)
    width = config.ngram_len - 1
    contexts = np.stack([line[i : i + width] for i in range(len(line) - width)])  # [T - width, width]
    hashes = context_hashes(config, contexts)
    fresh = np.asarray(fresh_contexts(config, hashes.tolist()))
    values = g_values(config, hashes, line[width:])[fresh]  # [T - width, keys] -> [fresh, keys]
    return WatermarkScore(values.size, int(values.sum()), 0.5)
