"""Processors that match token sequences: biases, bad words, repeated n-grams."""

from dataclasses import dataclass
from functools import cached_property
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .history import History

FEW = 16
"""Tokens of an n-gram compared at all positions at once; the remaining candidates are checked one by one."""

Sequences = tuple[tuple[tuple[int, ...], float], ...]
"""Sequences of token ids, none empty, each with its bias"""


@dataclass(frozen=True)
class SequenceBias:
    """Add a bias to the token that would complete a sequence; always, for a sequence of one token.

    Forbidding a sequence (bad_words_ids) is a bias of -inf. Several biases of one token add up.
    """

    biases: Sequences

    @cached_property
    def _last(self) -> tuple[NDArray[np.int64], dict[int, int]]:
        """The tokens that can complete a sequence [C], and the column of each."""
        tokens = sorted({sequence[-1] for sequence, _ in self.biases})
        return np.asarray(tokens, np.int64), {token: column for column, token in enumerate(tokens)}

    @cached_property
    def _groups(self) -> list[tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float32]]]:
        """Sequences grouped by prefix length m (all but the last token): [G, m] prefixes, [G] columns, [G] biases."""
        groups: dict[int, list[tuple[tuple[int, ...], float]]] = {0: []}
        for sequence, bias in self.biases:
            groups.setdefault(len(sequence) - 1, []).append((sequence, bias))
        return [
            (
                np.asarray([sequence[:-1] for sequence, _ in group], np.int64).reshape(len(group), m),
                np.asarray([self._last[1][sequence[-1]] for sequence, _ in group], np.int64),
                np.asarray([bias for _, bias in group], np.float32),
            )
            for m, group in groups.items()
        ]

    def __call__(self, history: History, logits: NDArray[Any], xp: ModuleType) -> NDArray[Any]:
        tokens = xp.asarray(self._last[0])
        total = xp.zeros((len(logits), len(tokens)), logits.dtype)  # [N, C]
        for beginnings, columns, biases in self._groups:
            m = beginnings.shape[1]
            places = history.starts[1:, None] - m + xp.arange(m)  # [N, m]: each sequence's last m tokens
            ends = history.token_ids[xp.maximum(places, 0)]
            matches = (ends[:, None] == xp.asarray(beginnings)).all(axis=-1)  # [N, 1, m] == [G, m] -> [N, G]
            matches &= (history.lengths >= m)[:, None]
            rows, which = xp.nonzero(matches)
            xp.add.at(total, (rows, xp.asarray(columns)[which]), xp.asarray(biases)[which])
        logits[:, tokens] += total
        return logits


@dataclass(frozen=True)
class NoRepeatNGram:
    """Forbid every token that would complete an n-gram that the sequence, prompt included, already contains.

    Paulus et al. 1705.04304, section 2.5, for any `n`. The cost is linear in the tokens, whatever `n`.
    """

    n: int

    def __call__(self, history: History, logits: NDArray[Any], xp: ModuleType) -> NDArray[Any]:
        if self.n > history.lengths.max(initial=0):
            return logits
        places = xp.arange(max(0, len(history.token_ids) - self.n + 1))  # possible starts of an n-gram
        rows = history.rows(xp)[places]
        inside = places + self.n <= history.starts[rows + 1]
        places, rows = places[inside], rows[inside]
        for i in range(min(self.n - 1, FEW)):  # keep those that begin as the sequence's last n - 1 tokens do
            same = history.token_ids[places + i] == history.token_ids[history.starts[rows + 1] - (self.n - 1) + i]
            places, rows = places[same], rows[same]
        if self.n - 1 <= FEW:
            logits[rows, history.token_ids[places + self.n - 1]] = -xp.inf
            return logits
        for row in {int(row) for row in rows}:  # the first FEW tokens match: compare the rest
            line = history.sequence(row)
            logits[row, line[common_ends(line) >= self.n - 1]] = -xp.inf
        return logits


def common_ends(line: NDArray[np.int64]) -> NDArray[np.int64]:
    """Length of the common suffix of line[:i] and the whole line, for each position i. [T] -> [T].

    The Z-algorithm (Gusfield, "Algorithms on strings, trees and sequences", 1997, section 1.4) on the reversed line:
    each round reuses the match that reaches furthest, so the total cost is O(T).
    """
    reverse = line[::-1].tolist()
    T = len(reverse)
    lengths = [0] * T  # longest common prefix of `reverse` and reverse[j:]; j = 0 is not needed
    first = stop = 0  # the match that reaches furthest is reverse[first:stop]
    for j in range(1, T):
        length = min(lengths[j - first], stop - j) if j < stop else 0
        while j + length < T and reverse[length] == reverse[j + length]:
            length += 1
        if j + length > stop:
            first, stop = j, j + length
        lengths[j] = length
    return np.asarray([0, *lengths[:0:-1]], np.int64)  # reverse[j:] is the text before position T - j
