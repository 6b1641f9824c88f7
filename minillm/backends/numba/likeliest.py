"""The argmax of each row of logits, and whether all are finite, found by the program that computed the logits.

After the step NumPy takes longer for both, since the logits have left the core's cache or are in another core's.
"""

from functools import cache
from typing import Any

import numpy as np
from numba import types
from numpy.typing import NDArray

from .arguments import matrix, share_of
from .compiling import shared_kernel
from .elementary import inner, magnitude
from .launching import launch, shares_of

_PIECE = 4096
"""Logits searched together"""
_BLOCK = 256
"""Logits searched one by one for the largest of a piece"""
_INFINITE = int(np.float32(np.inf).view(np.int32))
_NOT_A_NUMBER = np.int32((1 << 31) - 1)
"""The rank of NaN, above all others, as in NumPy's argmax"""
_LEAST = np.int32(-(1 << 31))


class Likeliest:
    """Argmax and finiteness of some logits; valid until they change."""

    def __init__(self, logits: NDArray[np.float32]) -> None:
        """Launch the search in C-contiguous logits [R, V]; a program being recorded will repeat it."""
        self.logits = logits
        rows, V = logits.shape
        self._found = np.empty((rows, 2), np.int64)
        pieces = np.empty((rows * -(-V // _PIECE), 2), np.int64)
        launch(_search_kernel(), logits, pieces, shares=shares_of(len(pieces)))
        launch(_compare_kernel(), pieces, self._found)

    def tokens(self) -> list[int]:
        """Per row the smallest id of the largest logit, or of the first NaN if there is one."""
        return [token for _, token in self._found.tolist()]

    def finite(self) -> bool:
        """Whether no logit is NaN or plus infinity."""
        return all(rank < _INFINITE for rank, _ in self._found.tolist())


@inner
def _rank(x: Any) -> Any:
    """An integer ordered like float32 values; the same for both zeros, the largest for NaN."""
    size = magnitude(x)
    rank = -size if x < 0 else size
    return rank if size <= _INFINITE else _NOT_A_NUMBER


@cache
def _search_kernel() -> int:
    return shared_kernel(types.float32)(_search)


def _search(arguments: Any, data: Any, share: int, shares: int, worker: int) -> None:
    """The highest rank in each piece of a row, and its first index. [R, V] -> [pieces, 2]"""
    logits, pieces = matrix(arguments, 0, np.float32), matrix(arguments, 4, np.int64)
    rows, V = logits.shape
    begin, end = share_of(len(pieces), share, shares)
    for piece in range(begin, end):
        each = len(pieces) // rows
        row, first = logits[piece // each], piece % each * _PIECE
        highest, block = _LEAST, first
        for start in range(first, min(first + _PIECE, V), _BLOCK):
            found = _LEAST
            for x in row[start : min(start + _BLOCK, V)]:
                found = max(found, _rank(x))
            if found > highest:
                highest, block = found, start
        while _rank(row[block]) != highest:
            block += 1
        pieces[piece, 0], pieces[piece, 1] = highest, block


@cache
def _compare_kernel() -> int:
    return shared_kernel(types.int64)(_compare)


def _compare(arguments: Any, data: Any, share: int, shares: int, worker: int) -> None:
    """The best piece of each row, the first among equals. [pieces, 2] -> [R, 2]"""
    pieces, best = matrix(arguments, 0, np.int64), matrix(arguments, 4, np.int64)
    each = len(pieces) // len(best)
    for row in range(len(best)):
        best[row] = pieces[row * each]
        for piece in range(row * each + 1, (row + 1) * each):
            if pieces[piece, 0] > best[row, 0]:
                best[row] = pieces[piece]
