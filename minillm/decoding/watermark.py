"""Watermarks: a key and the tokens before it decide which tokens are favoured, so that a detector knows the text.

The green list (Kirchenbauer et al. 2301.10226 and 2306.04634): a share `greenlist_ratio` of the vocabulary, drawn by a
seed, gets `bias` on its logits. With "lefthash" the seed comes from the last token, with "selfhash" from the last
`context_width` tokens, the candidate included, of which the 40 best are tried.

SynthID text (Dathathri et al., Nature 634, 2024): each of several keys gives every token a bit, from a hash of the last
`ngram_len` - 1 generated tokens and the token. In a tournament of two candidates a layer, those with the bit win, which
multiplies a token's probability by 1 + bit - (mass of the tokens with the bit). A context that has come before is left
alone.

Both equal transformers' processors on a CPU, bit for bit in what is drawn. They come last, after the filters.
`measure/watermark.py` detects them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..reference.mt19937 import bits, permutation_start, starts_with
from ..reference.softmax import softmax
from .history import History
from .processors import InPlace
from .watermark_config import GreenList, SynthId

TABLE = 1_000_003
"""Members of the table of "selfhash", as in transformers"""
CANDIDATES = 40
"""Best tokens that "selfhash" tries"""
MULTIPLIER = np.int64(6364136223846793005)
"""Multiplier of SynthID's hash, a linear congruential generator with the increment 1"""


def watermark(config: GreenList | SynthId) -> "GreenListWatermark | SynthIdWatermark":
    """The processor of a configuration."""
    return GreenListWatermark(config) if isinstance(config, GreenList) else SynthIdWatermark(config)


@lru_cache(maxsize=4)
def _table(key: int, count: int) -> NDArray[np.int64]:
    """The first members of the table of "selfhash", which tokens index."""
    return permutation_start(key, TABLE, count)


@lru_cache(maxsize=64)
def _green_start(seed: int, vocab_size: int, count: int) -> NDArray[np.int64]:
    return permutation_start(seed, vocab_size, count)


def green_seed(config: GreenList, line: NDArray[np.int64], vocab_size: int) -> int:
    """The seed of the list that follows a sequence; of "selfhash", the candidate is its last token. [T]"""
    if config.seeding_scheme == "lefthash":
        return config.hashing_key * int(line[-1])
    members = _table(config.hashing_key, min(vocab_size, TABLE))[line[-config.context_width :] % TABLE] + 1
    with np.errstate(over="ignore"):  # as 64-bit integers of torch
        return int((np.int64(config.hashing_key) * members * members[-1]).min()) % (2**64 - 1)


def is_green(config: GreenList, line: NDArray[np.int64], token: int, vocab_size: int) -> bool:
    """Whether a token is in the list that follows a sequence, as `green_seed` takes it."""
    count = int(vocab_size * config.greenlist_ratio)
    return starts_with(green_seed(config, line, vocab_size), vocab_size, count, token)


@dataclass(frozen=True)
class GreenListWatermark(InPlace):
    """Raise the scores of the green tokens."""

    config: GreenList

    @property
    def forbids(self) -> bool:
        """Whether it may forbid a token."""
        return False

    def __call__(self, history: History, logits: NDArray[Any], xp: ModuleType) -> NDArray[Any]:
        V = logits.shape[-1]
        for row in range(len(history.lengths)):
            line, [place] = history.sequence(row), history.at(np.asarray([row])).tolist()
            if len(line) >= self.config.context_width:
                logits[place, self.green(line, logits[place], V)] += np.float32(self.config.bias)
        return logits

    def green(self, line: NDArray[np.int64], scores: NDArray[Any], V: int) -> NDArray[np.int64]:
        """The green tokens after a sequence; with "selfhash" those among the best. [T], [V] -> [green]"""
        config = self.config
        if config.seeding_scheme == "lefthash":
            return _green_start(green_seed(config, line, V) % 2**32, V, int(V * config.greenlist_ratio))
        best = np.argsort(-scores, kind="stable")[:CANDIDATES]
        context = line[len(line) - config.context_width :]
        tried = [np.append(context, token) for token in best]
        return best[[is_green(config, line, int(line[-1]), V) for line in tried]]


@lru_cache(maxsize=4)
def _bits_of_hashes(seed: int, size: int) -> NDArray[np.int64]:
    return bits(seed, size)


def hashed(state: NDArray[np.int64], numbers: Iterable[Any]) -> NDArray[np.int64]:
    """SynthID's hash continued by numbers, one after the other; these broadcast against the state."""
    with np.errstate(over="ignore"):
        for number in numbers:
            state = (state + number) * MULTIPLIER + 1
    return state


def context_hashes(config: SynthId, contexts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Hashes of the tokens before each position. [positions, ngram_len - 1] -> [positions]"""
    return hashed(np.ones(len(contexts), np.int64), contexts.T)


def g_values(config: SynthId, contexts: NDArray[np.int64], tokens: NDArray[np.int64]) -> NDArray[np.int64]:
    """The bits of tokens after contexts with these hashes; the two broadcast. [...], [...] -> [..., keys]"""
    hashes = hashed(contexts, [tokens])[..., None]
    keyed = hashed(hashes, [np.asarray(config.keys, np.int64)])  # [..., 1] -> [..., keys]
    return _bits_of_hashes(config.sampling_table_seed, config.sampling_table_size)[keyed % config.sampling_table_size]


def fresh_contexts(config: SynthId, hashes: Sequence[int]) -> list[bool]:
    """Whether each context is not among those remembered before it; a hash of 0 always is, as in transformers."""
    fresh, history = [], [0] * config.context_history_size
    for value in hashes:
        fresh.append(value not in history)
        history = [value, *history[:-1]]
    return fresh


@dataclass(frozen=True)
class SynthIdWatermark(InPlace):
    """Replace the scores by the logarithms of the tournament's probabilities."""

    config: SynthId

    @property
    def forbids(self) -> bool:
        """Whether it may forbid a token."""
        return False

    def __call__(self, history: History, logits: NDArray[Any], xp: ModuleType) -> NDArray[Any]:
        config, width = self.config, self.config.ngram_len - 1
        for row in range(len(history.lengths)):
            generated = history.sequence(row)[history.prompt_lengths[row] :]
            if config.skip_first_ngram_calls and len(generated) < width:
                continue
            padded = np.concatenate([np.zeros(width, np.int64), generated])
            start = width if config.skip_first_ngram_calls else 0
            oldest = max(start, len(generated) - config.context_history_size)
            contexts = np.stack([padded[i : i + width] for i in range(oldest, len(generated) + 1)])
            *before, newest = context_hashes(config, contexts).tolist()
            if newest in before or (newest == 0 and len(before) < config.context_history_size):
                continue
            place = history.at(np.asarray([row]))
            logits[place] = self.updated(logits[place], newest, xp)
        return logits

    def updated(self, scores: NDArray[Any], context: int, xp: ModuleType) -> NDArray[Any]:
        """The scores after the tournament. [1, V] -> [1, V]"""
        probabilities = softmax(scores, xp)
        bits_of = g_values(self.config, np.asarray(context), np.arange(scores.shape[-1]))  # [V, keys]
        for bit in bits_of.T.astype(np.float32):
            probabilities = probabilities * (1 + bit - (bit * probabilities).sum(axis=-1, keepdims=True))
        with np.errstate(divide="ignore", invalid="ignore"):
            updated = np.log(probabilities)
        return np.where(np.isfinite(updated), updated, -np.inf)
