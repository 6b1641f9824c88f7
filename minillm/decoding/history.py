"""The tokens of growing sequences, as logits processors read them: in flat arrays, made when one asks, and counted.

`History` is made for each step; a `TokenCounts` stays with its sequence, so that a step costs only its new tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..reference.philox import uniform

if TYPE_CHECKING:
    from .strategy import Request


class TokenCounts:
    """The tokens of one growing sequence, and how often each was generated. A step costs only its new tokens."""

    def __init__(self, request: "Request") -> None:
        prompt, room = request.prompt_ids, len(request.prompt_ids) + request.max_new_tokens
        self.length = len(prompt)
        self._tokens = np.empty(room, np.int64)
        self._tokens[: self.length] = prompt
        self._places = {token: place for place, token in enumerate(dict.fromkeys(prompt))}
        self._distinct = np.empty(room, np.int64)
        self._distinct[: len(self._places)] = [*self._places]
        self._counts = np.zeros(room, np.int64)

    def extend(self, new_ids: Sequence[int]) -> None:
        """Add generated tokens."""
        for token in new_ids:
            place = self._places.setdefault(token, len(self._places))
            self._tokens[self.length] = self._distinct[place] = token
            self._counts[place] += 1
            self.length += 1

    @property
    def tokens(self) -> NDArray[np.int64]:
        """All tokens, prompt included, [length]."""
        return self._tokens[: self.length]

    @property
    def distinct(self) -> NDArray[np.int64]:
        """Every token that occurs, once, [D]."""
        return self._distinct[: len(self._places)]

    @property
    def counts(self) -> NDArray[np.int64]:
        """How often each of `distinct` was generated, [D]; 0 if it occurs in the prompt only."""
        return self._counts[: len(self._places)]


@dataclass(frozen=True, eq=False)
class History:
    """Tokens of the N sequences so far.

    Attributes:
        lines: all tokens of each sequence, prompt included, [its length] int64 each.
        prompt_lengths: number of prompt tokens of each, [N] int64.
        max_lengths: maximum number of tokens of each, prompt included, [N] int64.
        requests: index of the request that each belongs to, from 0, [N] int64.
        batch_ids: index of each one's prompt in the list given to `Engine.generate`, [N] int64.
        places: row of the logits that each belongs to, [N] int64; None: they are the rows in order.
        token_counts: the same tokens of each sequence, counted; None: they are counted when that is needed.
        given: the user's prompt of each, which an encoder read if the model has one; None: the sequences' prompts.
        keys: seed of each one's request and its index among the request's sequences, [N] each; None: nothing is drawn.
    """

    lines: Sequence[NDArray[np.int64]]
    prompt_lengths: NDArray[np.int64]
    max_lengths: NDArray[np.int64]
    requests: NDArray[np.int64]
    batch_ids: NDArray[np.int64]
    places: NDArray[np.int64] | None = None
    token_counts: Sequence[TokenCounts] | None = None
    given: Sequence[Sequence[int]] | None = None
    keys: tuple[NDArray[np.uint64], NDArray[np.int64]] | None = None

    @classmethod
    def of(
        cls,
        sequences: Sequence[tuple["Request", Sequence[int]]],
        places: Sequence[int] | None = None,
        token_counts: Sequence[TokenCounts] | None = None,
        indices: Sequence[int] | None = None,
    ) -> "History":
        """The history of sequences, each given as its request and the tokens generated so far; and their counts.

        `indices`: each one's index among its request's sequences, if random numbers may be drawn for them.
        """
        lines = (
            [np.asarray((*request.prompt_ids, *generated), np.int64) for request, generated in sequences]
            if token_counts is None
            else [counts.tokens for counts in token_counts]
        )
        prompt_lengths = np.asarray([len(request.prompt_ids) for request, _ in sequences], np.int64)
        numbers: dict[int, int] = {}
        return cls(
            lines,
            prompt_lengths,
            prompt_lengths + np.asarray([request.max_new_tokens for request, _ in sequences], np.int64),
            np.asarray([numbers.setdefault(id(request), len(numbers)) for request, _ in sequences], np.int64),
            np.asarray([request.batch_id for request, _ in sequences], np.int64),
            None if places is None else np.asarray(places, np.int64),
            token_counts,
            [request.given_ids for request, _ in sequences],
            None
            if indices is None
            else (
                np.asarray([request.settings.seed for request, _ in sequences], np.uint64),
                np.asarray(indices, np.int64),
            ),
        )

    def take(self, rows: Sequence[int]) -> "History":
        """The history of some of the sequences."""
        selected = np.asarray(rows, np.int64)
        return History(
            [self.lines[row] for row in rows],
            self.prompt_lengths[selected],
            self.max_lengths[selected],
            self.requests[selected],
            self.batch_ids[selected],
            self.at(selected),
            None if self.token_counts is None else [self.token_counts[row] for row in rows],
            None if self.given is None else [self.given[row] for row in rows],
            None if self.keys is None else (self.keys[0][selected], self.keys[1][selected]),
        )

    def alone(self) -> "History":
        """The same history for logits that have these sequences' rows alone, in order."""
        return self if self.places is None else replace(self, places=None)

    def at(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """The rows of the logits that belong to some sequences, given by their indices. [M] -> [M]"""
        return rows if self.places is None else self.places[rows]

    @cached_property
    def token_ids(self) -> NDArray[np.int64]:
        """All tokens, prompts included, concatenated without padding, [sum of lengths] int64."""
        return np.concatenate([np.empty(0, np.int64), *self.lines])

    @cached_property
    def starts(self) -> NDArray[np.int64]:
        """Offset of each sequence in `token_ids`, then the end of the last one, [N + 1] int64."""
        return np.cumsum([0, *map(len, self.lines)], dtype=np.int64)

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """Number of tokens of each sequence, prompt included, [N]."""
        return np.asarray([*map(len, self.lines)], np.int64)

    @property
    def generated_lengths(self) -> NDArray[np.int64]:
        """Number of generated tokens of each sequence, [N]."""
        return self.lengths - self.prompt_lengths

    def uniforms(self, purpose: int) -> NDArray[Any]:
        """A random number in (0, 1) beside the choice of each sequence's next token, [N] float32."""
        assert self.keys is not None
        return uniform(*self.keys, self.lengths, purpose)

    def rows(self, xp: ModuleType) -> NDArray[np.int64]:
        """Index of the sequence that each token belongs to, [sum of lengths]."""
        rows: NDArray[np.int64] = xp.searchsorted(self.starts, xp.arange(len(self.token_ids)), side="right") - 1
        return rows

    def sequence(self, row: int) -> NDArray[np.int64]:
        """All tokens of one sequence, [its length]."""
        return self.lines[row]

    def source(self, row: int) -> NDArray[np.int64]:
        """The tokens of one sequence's prompt, the encoder's if the model has one, [their number]."""
        if self.given is None:
            return self.sequence(row)[: self.prompt_lengths[row]]
        return np.asarray(self.given[row], np.int64)

    def sources(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The tokens of `source` of all sequences, each at least once: indices of sequences and ids. [M], [M]"""
        lines = [self.source(row) for row in range(len(self.lengths))]
        return np.repeat(np.arange(len(lines)), [*map(len, lines)]), np.concatenate([np.empty(0, np.int64), *lines])

    def seen(self, xp: ModuleType) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The tokens that occur in the sequences, each at least once: indices of sequences and ids. [M], [M]"""
        if self.token_counts is None:
            return self.rows(xp), self.token_ids
        lines = [counts.distinct for counts in self.token_counts]
        return np.repeat(np.arange(len(lines)), [*map(len, lines)]), np.concatenate(lines)

    def generated(self, xp: ModuleType) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """The tokens generated, each once: indices of sequences, ids, and how often. [M], [M], [M]"""
        if self.token_counts is not None:
            rows, ids = self.seen(xp)
            counts = np.concatenate([counts.counts for counts in self.token_counts])
            nonzero = np.flatnonzero(counts)
            return rows[nonzero], ids[nonzero], counts[nonzero]
        rows = self.rows(xp)
        is_generated = xp.arange(len(rows)) - self.starts[rows] >= self.prompt_lengths[rows]
        V = 1 + int(self.token_ids.max(initial=0))
        # One number for each (row, token), so that each distinct pair is counted once.
        pairs, counts = xp.unique(rows[is_generated] * V + self.token_ids[is_generated], return_counts=True)
        return pairs // V, pairs % V, counts
