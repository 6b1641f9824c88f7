"""Log-probabilities of several continuations of a text, whose own keys and values are computed once.

All but the last token of each prefix fills pages of a cache apart from the requests'. Every continuation forks them, so
a pass computes only tokens that differ: the prefix's last one and the continuation but its last.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ..batch import TokenSequence
from ..cache import PagedCache, new_cache
from ..progress import work
from ..reference.softmax import chosen_log_probs
from ..runner.runner import Runner
from .inspect import CHUNK, Turn

BATCH = 512
"""Tokens of a pass that fills pages"""
POSITIONS = 16384
"""Positions of the cache that prefixes and their continuations share; a single longer prefix has more"""


@dataclass(frozen=True)
class ContinuationScore:
    """Log-probabilities of the tokens of a continuation, each given those before it and the prefix.

    Where text and continuation merge in a token, that one is the continuation's, as in lm-evaluation-harness.
    """

    token_ids: list[int]
    logprobs: list[float]
    """Natural logarithms"""
    greedy: bool
    """True if each token is the most likely one in its place, as greedy search would choose it"""

    @property
    def total(self) -> float:
        """The continuation's log-probability."""
        return math.fsum(self.logprobs)


class _Case(NamedTuple):
    """A prefix and its continuations, as token ids."""

    prefix: list[int]
    continuations: list[list[int]]

    def positions(self, page_size: int) -> int:
        """Positions that its sequences take in the cache, in whole pages."""
        longest = len(self.prefix) + max(map(len, self.continuations), default=0)
        return (len(self.continuations) + 1) * -(-longest // page_size) * page_size

    def parts(self, page_size: int) -> "list[_Case]":
        """The case in parts of so few continuations that each fits into the cache, if one continuation does."""
        per_sequence = self.positions(page_size) // (len(self.continuations) + 1)
        count = max(1, POSITIONS // per_sequence - 1)
        return [
            _Case(self.prefix, self.continuations[first : first + count])
            for first in range(0, max(1, len(self.continuations)), count)
        ]


def score_continuations(
    runner: Runner,
    cases: Sequence[tuple[list[int], list[list[int]]]],
    turn: Turn,
    lora: str | None = None,
) -> list[list[ContinuationScore]]:
    """The scores of the continuations of each prefix.

    Args:
        runner: of a decoder
        cases: each a prefix, of at least one token, and its continuations
        turn: makes a `with` block in which the backend is this call's
        lora: name of the adapter that computes them

    Raises:
        NumericalError: NaN or infinity among the logits.
    """
    P = runner.backend.memory.page_size
    parts = [_Case(*case).parts(P) for case in cases]
    left = [part for its_parts in parts for part in its_parts]
    scores: list[list[ContinuationScore]] = []
    total = sum(len(case.continuations) for case in left)
    with work("scoring", total, "continuations") as progress:
        while left:
            group, positions = [left.pop(0)], 0
            positions = group[0].positions(P)
            while left and positions + left[0].positions(P) <= POSITIONS:
                positions += left[0].positions(P)
                group.append(left.pop(0))
            cache = new_cache(PagedCache, runner.model.config, runner.backend, positions // P, layers=runner.layers)
            scores += _scored(runner.apart(cache), group, turn, lora)
            progress.advance(sum(len(case.continuations) for case in group))
    of_parts = iter(scores)
    return [[score for _ in its_parts for score in next(of_parts)] for its_parts in parts]


def _scored(runner: Runner, group: Sequence[_Case], turn: Turn, lora: str | None) -> list[list[ContinuationScore]]:
    """The scores of some cases whose sequences fit into the runner's cache."""
    beginnings = [TokenSequence(case.prefix[:-1], adapter=lora) for case in group]
    _fill(runner, [sequence for sequence in beginnings if sequence.pending], turn)
    sequences = []
    for case, beginning in zip(group, beginnings, strict=True):
        whole = len(case.prefix) + max(map(len, case.continuations), default=0)
        keep = beginning.cached if _shares_keys(runner, beginning.cached, whole) else 0
        for continuation in case.continuations:
            sequence = runner.cache.fork(beginning, keep)
            sequence.token_ids = [*case.prefix, *continuation[:-1]]
            sequences.append(sequence)
    texts = [(case.prefix, continuation) for case in group for continuation in case.continuations]
    rows = iter(_rows(runner, sequences, texts, turn))
    return [[next(rows) for _ in case.continuations] for case in group]


def _shares_keys(runner: Runner, cached: int, whole: int) -> bool:
    """Whether keys of a prefix are those of the longer text, which some rotary scalings make depend on its length."""
    config = runner.model.config
    longest = config.keys_change_beyond
    return not config.keys_follow_length and (longest is None or not cached <= longest < whole)


def _fill(runner: Runner, sequences: list[TokenSequence], turn: Turn) -> None:
    """Compute all pending tokens of some sequences, as many at once as fit in a pass."""
    while sequences:
        chosen, counts, room = [], [], BATCH
        for sequence in sequences:
            if room:
                chosen.append(sequence)
                counts.append(min(room, sequence.pending))
                room -= counts[-1]
        with turn():
            runner.forward(chosen, counts, rows=())
        sequences = [sequence for sequence in sequences if sequence.pending]


def _rows(
    runner: Runner, sequences: list[TokenSequence], texts: Sequence[tuple[list[int], list[int]]], turn: Turn
) -> list[ContinuationScore]:
    """The scores of continuations, from the logits of the last tokens of each sequence."""
    log_probs: list[list[float]] = [[] for _ in sequences]
    greedy = [True] * len(sequences)
    waiting = [i for i, sequence in enumerate(sequences) if texts[i][1]]
    while waiting:
        chosen, counts, rows, targets, room = [], [], [], [], CHUNK
        start = 0
        for i in waiting:
            count = min(room, sequences[i].pending)
            if not count:
                break
            prefix, continuation = texts[i]
            first = sequences[i].cached  # position of the pass's first token; the last prefix token predicts the first
            scored = range(max(first, len(prefix) - 1), first + count)
            rows += [start + position - first for position in scored]
            targets += [(i, continuation[position - len(prefix) + 1]) for position in scored]
            chosen.append(sequences[i])
            counts.append(count)
            start, room = start + count, room - count
        with turn():
            logits = runner.backend.sampler.to_host(runner.forward(chosen, counts, rows=rows).logits)  # [R, V]
            tokens = np.array([token for _, token in targets], np.int64)
            values, best = chosen_log_probs(logits, tokens, np), logits.argmax(axis=-1)
        for (i, token), value, most in zip(targets, values.tolist(), best.tolist(), strict=True):
            log_probs[i].append(value)
            greedy[i] = greedy[i] and token == most
        waiting = [i for i in waiting if sequences[i].pending]
    return [ContinuationScore(list(continuation), log_probs[i], greedy[i]) for i, (_, continuation) in enumerate(texts)]
