"""DRY, "don't repeat yourself": a penalty for tokens that would continue a repetition, which grows with its length.

A token that would extend a repetition of n tokens, n at least `dry_allowed_length`, loses

    dry_multiplier * dry_base ** (n - dry_allowed_length)

from its logit. n is the length of the longest suffix of the sequence, prompt included, that stands before an earlier
occurrence of the token. A sequence breaker in the sequence ends repetitions: only what follows the last one counts. A
token that contains a breaker is never penalised.

The rules are those of llama.cpp's sampler (src/llama-sampler.cpp), which go back to p-e-w's proposal for
text-generation-webui (pull request 5677).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import ParameterError
from ..text.tokenizer import Tokenizer
from .history import History
from .processors import InPlace, common_suffixes
from .settings import Settings
from .values import LARGE

MOST_BYTES, MOST_TOKENS = 40, 20
"""Longest text of a breaker, and most tokens after its first one, as in llama.cpp"""
LONGEST = 64
"""Tokens up to which repetitions are compared at all positions at once; longer ones by `common_suffixes`"""
MOST_LOG = 88.7228391
"""Logarithm of the largest float32: a power of the base is at most that"""


@dataclass(frozen=True, eq=False)
class Breakers:
    """Sequence breakers in a vocabulary's tokens, compared by identity."""

    tails: dict[int, set[tuple[int, ...]]]
    """Token that contains a breaker or its beginning -> the tokens that complete it; () if it contains all of it"""

    @cached_property
    def whole(self) -> frozenset[int]:
        """Tokens that contain a whole breaker."""
        return frozenset(head for head, tails in self.tails.items() if () in tails)

    @cached_property
    def _heads(self) -> NDArray[np.int64]:
        return np.asarray(sorted(self.tails), np.int64)

    def tokens_after(self, line: NDArray[np.int64]) -> int:
        """Number of tokens after the last breaker; all if there is none. line: [T]"""
        if not len(self._heads):
            return len(line)
        for place in np.flatnonzero(np.isin(line, self._heads))[::-1].tolist():
            after = line[place + 1 : place + 1 + MOST_TOKENS].tolist()
            fits: list[int] = [len(tail) for tail in self.tails[int(line[place])] if [*tail] == after[: len(tail)]]
            if fits:
                return len(line) - int(place) - 1 - max(fits)
        return len(line)


NO_BREAKERS = Breakers({})


@lru_cache(maxsize=16)
def breakers_of(tokenizer: Tokenizer, texts: tuple[str, ...]) -> Breakers:
    """The breakers `texts` in a tokenizer's tokens; the vocabulary is searched once for each set of texts."""
    pieces = [tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size)]
    return in_tokens(pieces, lambda text: tokenizer.encode(text, add_special_tokens=False), texts)


def in_tokens(pieces: Sequence[bytes], encode: Callable[[str], Sequence[int]], texts: Sequence[str]) -> Breakers:
    """Breakers in the tokens of a vocabulary.

    Args:
        pieces: the bytes of each token
        encode: the tokens of a text, without special ones
        texts: the breakers
    """
    tails: dict[int, set[tuple[int, ...]]] = {}
    holding: dict[int, list[int]] = {}
    for token, piece in enumerate(pieces):
        for byte in set(piece):
            holding.setdefault(byte, []).append(token)
    for text in texts:
        whole = text.encode()[:MOST_BYTES]
        beginnings = [(whole[:i], whole[i:]) for i in range(1, len(whole)) if whole[i] & 0xC0 != 0x80]
        ends = {begin: tuple(encode(end.decode(errors="ignore"))[:MOST_TOKENS]) for begin, end in beginnings}
        for token in holding.get(whole[0], ()):
            piece = pieces[token]
            if whole in piece:
                tails.setdefault(token, set()).add(())
                continue
            at = piece.find(whole[:1], max(0, len(piece) - len(whole) + 1))
            while at >= 0:
                if piece[at:] in ends:
                    tails.setdefault(token, set()).add(ends[piece[at:]])
                at = piece.find(whole[:1], at + 1)
    return Breakers(tails)


def with_breakers(settings: Settings, tokenizer: Tokenizer | None) -> Settings:
    """The settings with their sequence breakers in tokens; without a tokenizer there are none.

    Raises:
        ParameterError: the user names breakers, and there is no tokenizer.
    """
    texts = settings.dry_sequence_breakers
    if tokenizer is None and texts and "dry_sequence_breakers" in settings.explicit:
        raise ParameterError(
            "dry_sequence_breakers needs a tokenizer, and this model has none: name one by Engine(tokenizer=...)"
        )
    breakers = NO_BREAKERS if tokenizer is None else breakers_of(tokenizer, texts)
    return replace(settings, dry_sequence_breakers=breakers)


@dataclass(frozen=True)
class Dry(InPlace):
    """Lower the scores of the tokens that would continue a repetition; see the module docstring."""

    multiplier: float
    base: float
    allowed_length: int
    last_n: int
    """Tokens at the sequence's end that count; -1: all"""
    breakers: Breakers = NO_BREAKERS

    @property
    def forbids(self) -> bool:
        """Whether it may forbid a token."""
        return False

    def __call__(self, history: History, logits: NDArray[Any], xp: ModuleType) -> NDArray[Any]:
        for row in range(len(history.lengths)):
            line = history.sequence(row)
            tokens, lengths = self.repetitions(line if self.last_n < 0 else line[max(0, len(line) - self.last_n) :])
            exponents = lengths - self.allowed_length
            if self.base > 1.000001:
                exponents = np.minimum(exponents, int(MOST_LOG / math.log(self.base)))
            penalties = np.minimum(self.multiplier * self.base ** exponents.astype(np.float64), LARGE)
            logits[history.at(np.asarray([row])), tokens] -= penalties.astype(logits.dtype)
        return logits

    def repetitions(self, line: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Tokens that would continue a repetition, each once, and its longest length so far. [T] -> [M], [M]"""
        limit = self.breakers.tokens_after(line)
        nothing = np.empty(0, np.int64)
        if len(line) <= self.allowed_length or limit < self.allowed_length:
            return nothing, nothing
        places, lengths = _repeated(line, self.allowed_length, limit)
        order = np.argsort(lengths, kind="stable")
        longest = dict(zip(line[places[order]].tolist(), lengths[order].tolist(), strict=True))
        tokens = [token for token in longest if token not in self.breakers.whole]
        return np.asarray(tokens, np.int64), np.asarray([longest[token] for token in tokens], np.int64)


def _repeated(line: NDArray[np.int64], least: int, most: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Places after which `least` tokens or more repeat the line's end: the place of the next token, and how many.

    No more than `most` are counted. [T] -> [M], [M]
    """
    T = len(line)
    places = np.arange(1, T)
    lengths = np.zeros(T, np.int64)  # by place
    matching, length = places, 0
    while len(matching) and length < min(most, LONGEST):
        matching = matching[matching > length]
        matching = matching[line[matching - 1 - length] == line[T - 1 - length]]
        length += 1
        lengths[matching] = length
    if len(matching) and length < most:
        lengths = np.minimum(common_suffixes(line), most)
    places = places[lengths[1:] >= least]
    return places, lengths[places]
