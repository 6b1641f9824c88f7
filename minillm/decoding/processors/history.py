"""The interface of logits processors, and the token history that they are given."""

from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ..strategy import Request


@dataclass(frozen=True, eq=False)
class History:
    """Tokens of the N sequences so far, concatenated without padding.

    Attributes:
        token_ids: all tokens, prompts included, [sum of lengths] int64.
        starts: offset of each sequence in `token_ids`, then the end of the last one, [N + 1] int64.
        prompt_lengths: number of prompt tokens of each, [N] int64.
        max_lengths: maximum number of tokens of each, prompt included, [N] int64.
        requests: index of the request that each belongs to, from 0, [N] int64.
        batch_ids: index of each one's prompt in the list given to `Engine.generate`, [N] int64.
    """

    token_ids: NDArray[np.int64]
    starts: NDArray[np.int64]
    prompt_lengths: NDArray[np.int64]
    max_lengths: NDArray[np.int64]
    requests: NDArray[np.int64]
    batch_ids: NDArray[np.int64]

    @classmethod
    def of(cls, sequences: Sequence[tuple[Request, Sequence[int]]]) -> "History":
        """The history of sequences, each given as its request and the tokens generated so far."""
        lines = [(*request.prompt_ids, *generated) for request, generated in sequences]
        prompt_lengths = np.asarray([len(request.prompt_ids) for request, _ in sequences], np.int64)
        numbers: dict[int, int] = {}
        return cls(
            np.concatenate([np.asarray(line, np.int64) for line in [(), *lines]]),
            np.cumsum([0, *map(len, lines)], dtype=np.int64),
            prompt_lengths,
            prompt_lengths + np.asarray([request.max_new_tokens for request, _ in sequences], np.int64),
            np.asarray([numbers.setdefault(id(request), len(numbers)) for request, _ in sequences], np.int64),
            np.asarray([request.batch_id for request, _ in sequences], np.int64),
        )

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Number of tokens of each sequence, prompt included, [N]."""
        return self.starts[1:] - self.starts[:-1]

    @property
    def generated_lengths(self) -> NDArray[np.int64]:
        """Number of generated tokens of each sequence, [N]."""
        return self.lengths - self.prompt_lengths

    def rows(self, xp: ModuleType) -> NDArray[np.int64]:
        """Index of the sequence that each token belongs to, [sum of lengths]."""
        rows: NDArray[np.int64] = xp.searchsorted(self.starts, xp.arange(len(self.token_ids)), side="right") - 1
        return rows

    def sequence(self, row: int) -> NDArray[np.int64]:
        """All tokens of one sequence, [its length]."""
        return self.token_ids[self.starts[row] : self.starts[row + 1]]


class LogitsProcessor(Protocol):
    """Changes scores before a token is chosen."""

    def __call__(self, history: History, logits: NDArray[Any], xp: ModuleType) -> NDArray[Any]:
        """Return the new scores of `logits` [N, V] float32, which may be changed in place.

        The array returned is the one to use. `xp` is the array module of `logits` and `history`.
        """


def forbid(logits: NDArray[Any], rows: NDArray[np.bool_], ids: Sequence[int], xp: ModuleType) -> NDArray[Any]:
    """Set the tokens `ids` to -inf in the rows marked by `rows` [N]."""
    logits[xp.flatnonzero(rows)[:, None], xp.asarray(ids, xp.int64)] = -xp.inf
    return logits


def force(logits: NDArray[Any], rows: NDArray[np.bool_], ids: Sequence[int], xp: ModuleType) -> NDArray[Any]:
    """Leave no choice but the tokens `ids` in the rows marked by `rows` [N]: they get the score 0, all others -inf."""
    logits[rows] = -xp.inf
    logits[xp.flatnonzero(rows)[:, None], xp.asarray(ids, xp.int64)] = 0.0
    return logits
