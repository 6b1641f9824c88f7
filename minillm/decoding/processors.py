"""Logits processors: small frozen objects that change the scores of the next token before one is chosen.

`build_processors` lists them in the order in which they run, which is transformers'. The sampling filters
(`filters.py`) follow. transformers has no presence and frequency penalty; here they come right after the repetition
penalty, as in vLLM, and then DRY (`dry.py`). In beam search the processors see log-probabilities instead of logits, as
in transformers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from types import ModuleType
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from ..errors import ParameterError, shown
from .field_values import ByIdentity
from .functions import UserProcessor, called
from .history import History
from .settings import Settings
from .values import LARGE

SHORT_MATCH = 16
"""Tokens up to which a match is sought at all positions at once; longer ones are found by `common_suffixes`."""

LAST = 2**20
"""Place behind all others"""

Sequences = tuple[tuple[tuple[int, ...], float], ...]
"""Sequences of token ids, none empty, each with its bias"""


class LogitsProcessor(Protocol):
    """Changes scores before a token is chosen."""

    def __call__(self, history: History, logits: NDArray[Any], xp: ModuleType) -> NDArray[Any]:
        """Return the new scores of `logits` [N, V] float32, which may be changed in place.

        The array returned is the one to use. `xp` is the array module of `logits` and `history`.
        """


class InPlace:
    """Base of the processors that change single scores in place, of the rows `history.places` if there are others."""

    @property
    def forbids(self) -> bool:
        """Whether it may forbid a token."""
        return True

    @classmethod
    def together(cls, processors: Sequence[Any]) -> LogitsProcessor | None:
        """One processor that does to sequence i what `processors[i]` does; None if there is none."""
        return None


def _each(value: Any, rows: NDArray[np.int64]) -> Any:
    """The parameters of some sequences, which are the same for all or given for each."""
    return value if np.ndim(value) == 0 else value[rows]


def forbid(
    history: History, logits: NDArray[Any], rows: NDArray[np.bool_], ids: Sequence[int], xp: ModuleType
) -> NDArray[Any]:
    """Set the tokens `ids` to -inf in the sequences marked by `rows` [N]."""
    logits[history.at(xp.flatnonzero(rows))[:, None], xp.asarray(ids, xp.int64)] = -xp.inf
    return logits


def force(
    history: History, logits: NDArray[Any], rows: NDArray[np.bool_], ids: Sequence[int], xp: ModuleType
) -> NDArray[Any]:
    """Leave no choice but the tokens `ids` in the sequences marked by `rows` [N]: they get the score 0, others -inf."""
    forced = history.at(xp.flatnonzero(rows))
    logits[forced] = -xp.inf
    logits[forced[:, None], xp.asarray(ids, xp.int64)] = 0.0
    return logits


def build_processors(settings: Settings) -> tuple[LogitsProcessor, ...]:
    """The processors that have an effect, in order."""
    return tuple(processor for _, processor in numbered_processors(settings))


def numbered_processors(settings: Settings) -> tuple[tuple[int, LogitsProcessor], ...]:
    """The processors that have an effect, each with its place in the order of all there are."""
    eos, forced_bos = settings.eos_token_ids, settings.forced_bos_token_id
    decay, allowed = settings.exponential_decay_length_penalty, settings.prefix_allowed_tokens_fn
    in_order: list[LogitsProcessor | Literal[False]] = [
        bool(settings.sequence_bias) and SequenceBias(settings.sequence_bias),
        settings.encoder_repetition_penalty != 1.0 and EncoderRepetitionPenalty(settings.encoder_repetition_penalty),
        *((False, False, False) if settings.samplers else penalties(settings)),  # with an order, they are among these
        settings.no_repeat_ngram_size > 0 and NoRepeatNGram(settings.no_repeat_ngram_size),
        settings.encoder_no_repeat_ngram_size > 0 and EncoderNoRepeatNGram(settings.encoder_no_repeat_ngram_size),
        bool(settings.bad_words_ids) and SequenceBias(tuple((word, -np.inf) for word in settings.bad_words_ids)),
        bool(settings.min_length and eos) and MinLength(settings.min_length, eos),
        bool(settings.min_new_tokens and eos) and MinNewTokens(settings.min_new_tokens, eos),
        allowed is not None and PrefixAllowedTokens(allowed, beams=settings.num_beams > 1),
        forced_bos is not None and ForcedBeginning(forced_bos),
        bool(settings.forced_eos_token_id) and ForcedEnd(settings.forced_eos_token_id),
        decay is not None and bool(eos) and ExponentialDecayLengthPenalty(decay[0], decay[1], eos),
        bool(settings.suppress_tokens) and SuppressTokens(settings.suppress_tokens),
        bool(settings.begin_suppress_tokens)
        and SuppressTokensAtBegin(settings.begin_suppress_tokens, forced_beginning=forced_bos is not None),
        settings.max_thinking_tokens is not None and _thinking_budget(settings),
    ]
    users = [UserProcessor(function) for function in settings.logits_processor]
    numbered = [(place, processor) for place, processor in enumerate([*in_order, *users]) if processor]
    if settings.watermarking_config is not None and not settings.do_sample:  # else it follows the filters
        numbered.append((LAST, watermark_of(settings)))
    return tuple(numbered)


def penalties(settings: Settings) -> tuple[LogitsProcessor | Literal[False], ...]:
    """The penalties on tokens that occur: repetition, presence and frequency, DRY; False for one without effect."""
    of_generated = settings.presence_penalty, settings.frequency_penalty
    return (
        settings.repetition_penalty != 1.0 and RepetitionPenalty(settings.repetition_penalty),
        any(of_generated) and PresenceFrequencyPenalty(*of_generated),
        settings.dry_multiplier > 0.0 and _dry(settings),
    )


def _dry(settings: Settings) -> LogitsProcessor:
    from .dry import NO_BREAKERS, Breakers, Dry  # seldom needed

    breakers = settings.dry_sequence_breakers  # texts where there is no tokenizer
    return Dry(
        settings.dry_multiplier,
        settings.dry_base,
        settings.dry_allowed_length,
        settings.dry_penalty_last_n,
        breakers if isinstance(breakers, Breakers) else NO_BREAKERS,
    )


def watermark_of(settings: Settings) -> LogitsProcessor:
    """The processor that watermarks."""
    from .watermark import watermark  # seldom needed

    return watermark(settings.watermarking_config)


def _thinking_budget(settings: Settings) -> LogitsProcessor | Literal[False]:
    from .thinking import ThinkingBudget  # seldom needed

    markers = settings.thinking_tokens
    return bool(markers) and ThinkingBudget(settings.max_thinking_tokens, *markers)


@dataclass(frozen=True)
class SequenceBias(InPlace):
    """Add a bias to the token that would complete a sequence; always, for a sequence of one token.

    Forbidding a sequence (bad_words_ids) is a bias of -inf. Several biases of one token add up.
    """

    biases: Sequences

    @cached_property
    def tokens(self) -> NDArray[np.int64]:
        """The tokens that can complete a sequence, ascending, [C]."""
        return np.asarray(sorted({sequence[-1] for sequence, _ in self.biases}), np.int64)

    @cached_property
    def _groups(self) -> list[tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float32]]]:
        """Sequences grouped by prefix length m (all but the last token): [G, m] prefixes, [G] columns, [G] biases."""
        groups: dict[int, list[tuple[tuple[int, ...], float]]] = {0: []}
        for sequence, bias in self.biases:
            groups.setdefault(len(sequence) - 1, []).append((sequence, bias))
        return [
            (
                np.asarray([sequence[:-1] for sequence, _ in group], np.int64).reshape(len(group), m),
                np.searchsorted(self.tokens, np.asarray([sequence[-1] for sequence, _ in group], np.int64)),
                np.asarray([bias for _, bias in group], np.float32),
            )
            for m, group in groups.items()
        ]

    def __call__(self, history: History, logits: NDArray[Any], xp: ModuleType) -> NDArray[Any]:
        tokens = xp.asarray(self.tokens)
        total = xp.zeros((len(history.lengths), len(tokens)), logits.dtype)  # [N, C]
        for beginnings, columns, biases in self._groups:
            m = beginnings.shape[1]
            places = history.starts[1:, None] - m + xp.arange(m)  # [N, m]: each sequence's last m tokens
            ends = history.token_ids[xp.maximum(places, 0)]
            matches = (ends[:, None] == xp.asarray(beginnings)).all(axis=-1)  # [N, 1, m] == [G, m] -> [N, G]
            matches &= (history.lengths >= m)[:, None]
            rows, which = xp.nonzero(matches)
            xp.add.at(total, (rows, xp.asarray(columns)[which]), xp.asarray(biases)[which])
        logits[history.at(xp.arange(len(total)))[:, None], tokens] += total
        return logits

    @cached_property
    def of_tokens(self) -> NDArray[np.float32] | None:
        """The bias of each of the tokens that can complete a sequence [C]; None if some sequence is longer than one."""
        total = np.zeros(len(self.tokens), np.float32)
        [(_, columns, biases), *longer] = self._groups
        np.add.at(total, columns, biases)
        return None if longer else total

    @property
    def forbids(self) -> bool:
        """Whether it may forbid a token."""
        return any(bias == -np.inf for _, bias in self.biases)

    @classmethod
    def together(cls, processors: Sequence[Any]) -> "SequenceBiases":
        """Biases of each sequence's own."""
        return SequenceBiases(tuple(processors))


@dataclass(frozen=True)
class SequenceBiases(InPlace):
    """Add to each sequence's scores the biases of its own."""

    processors: tuple[SequenceBias, ...]

    def __call__(self, history: History, logits: NDArray[Any], xp: ModuleType) -> NDArray[Any]:
        rows, ids, biases = [], [], []
        for row, processor in enumerate(self.processors):
            if processor.of_tokens is None:  # it depends on the tokens so far
                processor(history.take([row]), logits, xp)
            else:
                rows.append(row)
                ids.append(processor.tokens)
                biases.append(processor.of_tokens)
        if rows:
            places = np.repeat(history.at(np.asarray(rows)), [*map(len, ids)])
            logits[xp.asarray(places), xp.asarray(np.concatenate(ids))] += xp.asarray(np.concatenate(biases))
        return logits


@dataclass(frozen=True)
class RepetitionPenalty(InPlace):
    """Lower the score of every token that occurs in the sequence, prompt included, once however often it occurs.

    A positive score is divided by the penalty, a negative one multiplied (Keskar et al. 1909.05858, section 4.1, in the
    form used by transformers).
    """

    penalty: Any
    """A number for all sequences, or [N] float32"""

    def __call__(self, history: History, logits: NDArray[Any], xp: ModuleType) -> NDArray[Any]:
        rows, ids = history.seen(xp)
        seen, penalty = (history.at(rows), ids), _each(self.penalty, rows)
        scores = logits[seen]  # [N, V] -> [M]; a token that occurs twice is written twice, the same
        logits[seen] = xp.where(scores < 0, scores * penalty, scores / penalty)
        return logits

    @property
    def forbids(self) -> bool:
        """Whether it may forbid a token."""
        return False

    @classmethod
    def together(cls, processors: Sequence[Any]) -> "RepetitionPenalty":
        """A penalty for each sequence."""
        return cls(np.asarray([processor.penalty for processor in processors], np.float32))


@dataclass(frozen=True)
class EncoderRepetitionPenalty(RepetitionPenalty):
    """Raise the score of every token of the prompt, an encoder-decoder's source, once however often it occurs there.

    The penalty of `RepetitionPenalty` inverted: a positive score is multiplied, a negative one divided (transformers'
    encoder_repetition_penalty).
    """

    def __call__(self, history: History, logits: NDArray[Any], xp: ModuleType) -> NDArray[Any]:
        rows, ids = history.sources()
        source, penalty = (history.at(rows), ids), 1 / _each(self.penalty, rows)
        scores = logits[source]  # [N, V] -> [M]
        logits[source] = xp.where(scores < 0, scores * penalty, scores / penalty)
        return logits


@dataclass(frozen=True)
class PresenceFrequencyPenalty(InPlace):
    """Lower the score of generated tokens: score - frequency * count - presence * (count > 0), prompt not counted.

    The formula is from OpenAI's API reference; as in vLLM, only generated tokens count. Negative values encourage
    repetition.
    """

    presence: Any
    """A number for all sequences, or [N] float64"""
    frequency: Any
    """Likewise"""

    def __call__(self, history: History, logits: NDArray[Any], xp: ModuleType) -> NDArray[Any]:
        rows, ids, counts = history.generated(xp)
        lowered = _each(self.presence, rows) + _each(self.frequency, rows) * counts
        logits[history.at(rows), ids] -= lowered.astype(logits.dtype)
        return logits

    @property
    def forbids(self) -> bool:
        """Whether it may forbid a token."""
        return False

    @classmethod
    def together(cls, processors: Sequence[Any]) -> "PresenceFrequencyPenalty":
        """Penalties for each sequence."""
        return cls(
            np.asarray([processor.presence for processor in processors], np.float64),
            np.asarray([processor.frequency for processor in processors], np.float64),
        )


@dataclass(frozen=True)
class NoRepeatNGram(InPlace):
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
            logits[history.at(rows), history.token_ids[places + self.n - 1]] = -xp.inf
            return logits
        for row in xp.unique(rows):  # the first SHORT_MATCH tokens match: compare the rest
            line = history.sequence(row)
            logits[history.at(row), line[common_suffixes(line) >= self.n - 1]] = -xp.inf
        return logits


@dataclass(frozen=True)
class EncoderNoRepeatNGram(InPlace):
    """Forbid every token that would complete an n-gram of the prompt, an encoder-decoder's source.

    transformers' encoder_no_repeat_ngram_size. What was generated may come again: `NoRepeatNGram` forbids that.
    """

    n: int

    def __call__(self, history: History, logits: NDArray[Any], xp: ModuleType) -> NDArray[Any]:
        for row in range(len(history.lengths)):
            source, line = history.source(row), history.sequence(row)
            if self.n <= min(len(source), len(line) + 1):
                logits[history.at(np.asarray([row])), followers(source, line[len(line) + 1 - self.n :])] = -xp.inf
        return logits


def followers(line: NDArray[np.int64], beginning: NDArray[np.int64]) -> NDArray[np.int64]:
    """The tokens that come after `beginning`, wherever it occurs in `line`. [T], [m] -> [places]"""
    m = len(beginning)
    if m > SHORT_MATCH:
        suffixes = common_suffixes(np.concatenate([line, beginning]))  # of line[:i] and `beginning`, or longer
        return line[m:][suffixes[m : len(line)] >= m]
    places = np.arange(len(line) - m)
    for i in range(m):
        places = places[line[places + i] == beginning[i]]
    return line[places + m]


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
class MinLength(InPlace):
    """Forbid every end-of-sequence token while the sequence, prompt included, is shorter than `min_length`."""

    min_length: Any
    """A number for all sequences, or [N]"""
    eos_token_ids: tuple[int, ...]

    def __call__(self, history: History, logits: NDArray[Any], xp: ModuleType) -> NDArray[Any]:
        return forbid(history, logits, history.lengths < self.min_length, self.eos_token_ids, xp)

    @classmethod
    def together(cls, processors: Sequence[Any]) -> "MinLength | None":
        """A minimum for each sequence, if all have the same end-of-sequence tokens."""
        eos = processors[0].eos_token_ids
        minima = np.asarray([processor.min_length for processor in processors])
        return cls(minima, eos) if all(processor.eos_token_ids == eos for processor in processors) else None


@dataclass(frozen=True)
class MinNewTokens(InPlace):
    """Forbid every end-of-sequence token while fewer than `min_new_tokens` have been generated."""

    min_new_tokens: Any
    """A number for all sequences, or [N]"""
    eos_token_ids: tuple[int, ...]

    def __call__(self, history: History, logits: NDArray[Any], xp: ModuleType) -> NDArray[Any]:
        return forbid(history, logits, history.generated_lengths < self.min_new_tokens, self.eos_token_ids, xp)

    @classmethod
    def together(cls, processors: Sequence[Any]) -> "MinNewTokens | None":
        """A minimum for each sequence, if all have the same end-of-sequence tokens."""
        eos = processors[0].eos_token_ids
        minima = np.asarray([processor.min_new_tokens for processor in processors])
        return cls(minima, eos) if all(processor.eos_token_ids == eos for processor in processors) else None


@dataclass(frozen=True)
class ForcedBeginning(InPlace):
    """Force `token_id` after a prompt of one token (transformers' forced_bos_token_id)."""

    token_id: int

    def __call__(self, history: History, logits: NDArray[Any], xp: ModuleType) -> NDArray[Any]:
        return force(history, logits, history.lengths == 1, (self.token_id,), xp)


@dataclass(frozen=True)
class ForcedEnd(InPlace):
    """Force one of `token_ids` as the last token before the length limit (transformers' forced_eos_token_id)."""

    token_ids: tuple[int, ...]

    def __call__(self, history: History, logits: NDArray[Any], xp: ModuleType) -> NDArray[Any]:
        return force(history, logits, history.lengths == history.max_lengths - 1, self.token_ids, xp)


@dataclass(frozen=True)
class ExponentialDecayLengthPenalty(InPlace):
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
        where = history.at(rows)[:, None], xp.asarray(self.eos_token_ids)
        scores = logits[where]  # [N, V] -> [rows, number of EOS ids]
        finite = xp.isfinite(scores)
        logits[where] = scores + xp.where(finite, abs(xp.where(finite, scores, 0)) * growth[:, None], 0)
        return logits


@dataclass(frozen=True)
class SuppressTokens(InPlace):
    """Forbid `token_ids` everywhere."""

    token_ids: tuple[int, ...]

    def __call__(self, history: History, logits: NDArray[Any], xp: ModuleType) -> NDArray[Any]:
        return forbid(history, logits, xp.ones(len(history.lengths), xp.bool_), self.token_ids, xp)

    @classmethod
    def together(cls, processors: Sequence[Any]) -> "SuppressedTokens":
        """Tokens of each sequence's own."""
        return SuppressedTokens(tuple(processor.token_ids for processor in processors))


@dataclass(frozen=True)
class SuppressedTokens(InPlace):
    """Forbid `token_ids[i]` in sequence i."""

    token_ids: tuple[tuple[int, ...], ...]

    def __call__(self, history: History, logits: NDArray[Any], xp: ModuleType) -> NDArray[Any]:
        rows = np.repeat(np.arange(len(self.token_ids)), [*map(len, self.token_ids)])
        logits[history.at(rows), np.asarray([token for ids in self.token_ids for token in ids])] = -xp.inf
        return logits


@dataclass(frozen=True)
class SuppressTokensAtBegin(InPlace):
    """Forbid `token_ids` as the first generated token; as the second where the first is forced."""

    token_ids: tuple[int, ...]
    forced_beginning: bool
    """True if a `ForcedBeginning` is among the processors."""

    def __call__(self, history: History, logits: NDArray[Any], xp: ModuleType) -> NDArray[Any]:
        forced = (history.prompt_lengths == 1) & self.forced_beginning
        return forbid(history, logits, history.generated_lengths == forced, self.token_ids, xp)


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
        answer = called(self.function.function, int(history.batch_ids[row]), history.sequence(row))
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


def rows_without_a_token(logits: NDArray[Any], xp: ModuleType) -> NDArray[np.bool_]:
    """Mask of the rows that are all -inf, from which no token can be chosen. [R, V] -> [R] bool"""
    rows: NDArray[np.bool_] = logits.max(axis=-1) == -xp.inf
    return rows


def no_token_left() -> ParameterError:
    """The error that every strategy raises for a request with no token left to choose."""
    return ParameterError("the logits processors and filters forbid every token: relax or remove one of them")
