"""Logits processors: small frozen objects that change the scores of the next token before one is chosen.

`build_processors` lists them in the order in which they run, which is transformers'. The sampling filters
(`filters.py`) follow. transformers has no presence and frequency penalty; here they come right after the repetition
penalty, as in vLLM. In beam search the processors see log-probabilities instead of logits, as in transformers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from types import ModuleType
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from ..errors import ParameterError, shown
from .settings import Settings
from .strategy import Request
from .values import LARGE, ByIdentity

SHORT_MATCH = 16
"""Tokens up to which a match is sought at all positions at once; longer ones are found by `common_suffixes`."""

Sequences = tuple[tuple[tuple[int, ...], float], ...]
"""Sequences of token ids, none empty, each with its bias"""


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


def build_processors(settings: Settings) -> tuple[LogitsProcessor, ...]:
    """The processors that have an effect, in order."""
    eos, forced_bos = settings.eos_token_ids, settings.forced_bos_token_id
    penalties = settings.presence_penalty, settings.frequency_penalty
    decay, allowed = settings.exponential_decay_length_penalty, settings.prefix_allowed_tokens_fn
    in_order: list[LogitsProcessor | Literal[False]] = [
        bool(settings.sequence_bias) and SequenceBias(settings.sequence_bias),
        settings.repetition_penalty != 1.0 and RepetitionPenalty(settings.repetition_penalty),
        any(penalties) and PresenceFrequencyPenalty(*penalties),
        settings.no_repeat_ngram_size > 0 and NoRepeatNGram(settings.no_repeat_ngram_size),
        bool(settings.bad_words_ids) and SequenceBias(tuple((word, -np.inf) for word in settings.bad_words_ids)),
        bool(settings.min_length and eos) and MinLength(settings.min_length, eos),
        bool(settings.min_new_tokens and eos) and MinNewTokens(settings.min_new_tokens, eos),
        allowed is not None and PrefixAllowedTokens(allowed, beams=settings.num_beams > 1),
        forced_bos is not None and ForcedBeginning(forced_bos),
        bool(settings.forced_eos_token_id) and ForcedEnd(settings.forced_eos_token_id),
        decay is not None and bool(eos) and ExponentialDecayLengthPenalty(*decay, eos),
        bool(settings.suppress_tokens) and SuppressTokens(settings.suppress_tokens),
        bool(settings.begin_suppress_tokens)
        and SuppressTokensAtBegin(settings.begin_suppress_tokens, forced_beginning=forced_bos is not None),
    ]
    users = [UserProcessor(function) for function in settings.logits_processor]
    return (*(processor for processor in in_order if processor), *users)


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
        for i in range(min(self.n - 1, SHORT_MATCH)):  # keep those that begin as the sequence's last n - 1 tokens do
            same = history.token_ids[places + i] == history.token_ids[history.starts[rows + 1] - (self.n - 1) + i]
            places, rows = places[same], rows[same]
        if self.n - 1 <= SHORT_MATCH:
            logits[rows, history.token_ids[places + self.n - 1]] = -xp.inf
            return logits
        for row in {int(row) for row in rows}:  # the first SHORT_MATCH tokens match: compare the rest
            line = history.sequence(row)
            logits[row, line[common_suffixes(line) >= self.n - 1]] = -xp.inf
        return logits


def common_suffixes(line: NDArray[np.int64]) -> NDArray[np.int64]:
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


@dataclass(frozen=True)
class MinLength:
    """Forbid every end-of-sequence token while the sequence, prompt included, is shorter than `min_length`."""

    min_length: int
    eos_token_ids: tuple[int, ...]

    def __call__(self, history: History, logits: NDArray[Any], xp: ModuleType) -> NDArray[Any]:
        return forbid(logits, history.lengths < self.min_length, self.eos_token_ids, xp)


@dataclass(frozen=True)
class MinNewTokens:
    """Forbid every end-of-sequence token while fewer than `min_new_tokens` have been generated."""

    min_new_tokens: int
    eos_token_ids: tuple[int, ...]

    def __call__(self, history: History, logits: NDArray[Any], xp: ModuleType) -> NDArray[Any]:
        return forbid(logits, history.generated_lengths < self.min_new_tokens, self.eos_token_ids, xp)


@dataclass(frozen=True)
class ForcedBeginning:
    """Force `token_id` after a prompt of one token (transformers' forced_bos_token_id)."""

    token_id: int

    def __call__(self, history: History, logits: NDArray[Any], xp: ModuleType) -> NDArray[Any]:
        return force(logits, history.lengths == 1, (self.token_id,), xp)


@dataclass(frozen=True)
class ForcedEnd:
    """Force one of `token_ids` as the last token before the length limit (transformers' forced_eos_token_id)."""

    token_ids: tuple[int, ...]

    def __call__(self, history: History, logits: NDArray[Any], xp: ModuleType) -> NDArray[Any]:
        return force(logits, history.lengths == history.max_lengths - 1, self.token_ids, xp)


@dataclass(frozen=True)
class ExponentialDecayLengthPenalty:
    """Raise the EOS tokens' scores with every token after the first `start` generated ones.

    k tokens past `start` the score s of each end-of-sequence token grows by |s| * (factor ** k - 1); a factor below 1
    delays the end. Forbidden tokens stay forbidden.
    """

    start: int
    factor: float
    eos_token_ids: tuple[int, ...]

    def __call__(self, history: History, logits: NDArray[Any], xp: ModuleType) -> NDArray[Any]:
        past = history.generated_lengths - self.start
        rows = xp.flatnonzero(past > 0)
        with np.errstate(over="ignore"):  # a score grows to what float32 holds, and no further
            growth = xp.minimum(self.factor ** past[rows].astype(xp.float64) - 1, LARGE).astype(logits.dtype)
        where = rows[:, None], xp.asarray(self.eos_token_ids)
        scores = logits[where]  # [N, V] -> [rows, number of EOS ids]
        finite = xp.isfinite(scores)
        logits[where] = scores + xp.where(finite, abs(xp.where(finite, scores, 0)) * growth[:, None], 0)
        return logits


@dataclass(frozen=True)
class SuppressTokens:
    """Forbid `token_ids` everywhere."""

    token_ids: tuple[int, ...]

    def __call__(self, history: History, logits: NDArray[Any], xp: ModuleType) -> NDArray[Any]:
        logits[:, xp.asarray(self.token_ids)] = -xp.inf
        return logits


@dataclass(frozen=True)
class SuppressTokensAtBegin:
    """Forbid `token_ids` as the first generated token; as the second where the first is forced."""

    token_ids: tuple[int, ...]
    forced_beginning: bool
    """True if a `ForcedBeginning` is among the processors."""

    def __call__(self, history: History, logits: NDArray[Any], xp: ModuleType) -> NDArray[Any]:
        forced = (history.prompt_lengths == 1) & self.forced_beginning
        return forbid(logits, history.generated_lengths == forced, self.token_ids, xp)


@dataclass(frozen=True)
class PrefixAllowedTokens:
    """Forbid all tokens but those that a function returns for the sequence so far (De Cao et al. 2010.00904).

    The function takes the index of the prompt in the list of prompts and all tokens of the sequence, [its length]
    int64, and returns token ids. If all of these are already forbidden, they are allowed again with the score 0; in
    beam search, only if that is so for every beam of the request.
    """

    function: ByIdentity
    beams: bool

    def __call__(self, history: History, logits: NDArray[Any], xp: ModuleType) -> NDArray[Any]:
        mask = xp.full_like(logits, -xp.inf)
        for row in range(len(logits)):
            mask[row, self._allowed(history, row, logits.shape[-1], xp)] = 0.0
        scores: NDArray[Any] = logits + mask
        dead = scores.max(axis=-1, initial=-xp.inf) == -xp.inf  # [N, V] -> [N]
        if self.beams:
            dead = ~xp.isin(history.requests, history.requests[~dead])  # no beam of the request is alive
        scores[dead] = mask[dead]
        return scores

    def _allowed(self, history: History, row: int, vocab_size: int, xp: ModuleType) -> NDArray[np.int64]:
        answer = self.function.function(int(history.batch_ids[row]), history.sequence(row))
        try:
            ids = xp.asarray(answer)
        except (TypeError, ValueError):
            ids = xp.empty(0)
        whole = ids.ndim == 1 and ids.dtype.kind in "iu" and len(ids) > 0
        if not whole or ids.min() < 0 or ids.max() >= vocab_size:
            raise ParameterError(
                f"prefix_allowed_tokens_fn should return at least one token id from 0 to {vocab_size - 1},"
                f" found {shown(answer)}"
            )
        allowed: NDArray[np.int64] = ids.astype(xp.int64)
        return allowed


@dataclass(frozen=True)
class UserProcessor:
    """A user's processor with checks of its return value."""

    function: ByIdentity

    def __call__(self, history: History, logits: NDArray[Any], xp: ModuleType) -> NDArray[Any]:
        result: Any = self.function.function(history, logits, xp)
        shape = getattr(result, "shape", None)
        if shape != logits.shape or result.dtype.kind != "f":
            found = type(result).__name__ if shape is None else f"{result.dtype} {list(shape)}"
            raise ParameterError(
                f"logits_processor {self.function.function!r} should return scores, float32 {list(logits.shape)},"
                f" found {found}"
            )
        scores: NDArray[Any] = result.astype(xp.float32, copy=False)
        return scores


def rows_without_a_token(logits: NDArray[Any], xp: ModuleType) -> NDArray[np.bool_]:
    """Mask of the rows that are all -inf, from which no token can be chosen. [R, V] -> [R] bool"""
    rows: NDArray[np.bool_] = logits.max(axis=-1) == -xp.inf
    return rows


def no_token_left() -> ParameterError:
    """The error that every strategy raises for a request with no token left to choose."""
    return ParameterError("the logits processors and filters forbid every token: relax or remove one of them")
