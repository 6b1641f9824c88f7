"""Processors, guides and filters, applied to the rows of logits of many requests in one pass.

The requests of a batch may have any settings. Each kind of processor runs once, with parameters for each row, over the
rows that it concerns; where it cannot, once for each group of equal ones. All work in place, so that a row costs only
what is done to it. A row's result is the same, bit for bit, whatever rows are beside it.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..backends.token_sampler import TokenSampler
from .continuation import Continuation
from .guided import restrict
from .history import History, TokenCounts
from .processors import InPlace, LogitsProcessor, no_token_left, rows_without_a_token
from .row_pipeline import Continuations, RowPipeline, take_rows

if TYPE_CHECKING:
    from .strategy import State

FEW = 128
"""Tokens of a row that are looked at first"""


def choose_processed(
    choose: Callable[[TokenSampler, Any, Continuations], list[int]],
    sampler: TokenSampler,
    logits: Any,
    growing: Continuations,
    changed: Sequence[int],
) -> list[int]:
    """A token for each row, after some have been processed, on the host; the others stay on the device. -> R ids

    Args:
        choose: chooses a token for each row that it gets
        sampler: the sampler of tokens
        logits: [R, V]; rows may be changed in place
        growing: the R continuations, each with its request's state
        changed: the rows to process, ascending
    """
    if sampler.on_host:
        process_rows(sampler, logits, changed, [growing[row] for row in changed])
        return choose(sampler.host, logits, growing)
    plain = [row for row in range(len(growing)) if row not in changed]
    chosen: dict[int, int] = {}
    if plain:
        theirs = choose(sampler, take_rows(sampler, logits, plain), [growing[row] for row in plain])
        chosen |= zip(plain, theirs, strict=True)
    copied = sampler.to_host(take_rows(sampler, logits, changed))
    processed = [growing[row] for row in changed]
    process_rows(sampler.host, copied, range(len(changed)), processed)
    chosen |= zip(changed, choose(sampler.host, copied, processed), strict=True)
    return [chosen[row] for row in range(len(growing))]


def process_rows(sampler: TokenSampler, logits: Any, places: Sequence[int], growing: Continuations) -> None:
    """Apply processors, then guides, then filters to the row of each of C continuations, in place.

    A continuation that has no token left, or whose guide fails, gets the error in its request's `State.error`; any
    choice from its row will do.

    Args:
        sampler: the host's sampler
        logits: [R, V]
        places: [C], the row of each continuation
        growing: the C continuations
    """
    pipelines = [state.pipeline for state, _ in growing]
    guided = [i for i, (_, continuation) in enumerate(growing) if continuation.guide is not None]
    unprocessed = {i: logits[places[i]].copy() for i in guided if pipelines[i].processors}
    _apply_processors(sampler, logits, places, growing, pipelines)
    if guided:
        guides = [guide for _, continuation in growing if (guide := continuation.guide) is not None]
        originals = [unprocessed.get(i) for i in guided]
        for i, error in restrict(sampler, logits, [places[i] for i in guided], guides, originals):
            growing[guided[i]][0].error = error
    # Before the filters: they keep a token in each row that has one, and fail on a row that has none.
    doubtful = [i for i, pipeline in enumerate(pipelines) if pipeline.forbids or growing[i][1].guide is not None]
    if doubtful:  # nearly always some of the first tokens are left
        few = logits[np.asarray([places[i] for i in doubtful]), :FEW]
        doubtful = [doubtful[n] for n in np.flatnonzero(rows_without_a_token(few, sampler.xp))]
    for i in doubtful:
        if rows_without_a_token(logits[places[i]], sampler.xp):
            growing[i][0].error = growing[i][0].error or no_token_left()
            logits[places[i]] = 0.0
    groups: dict[tuple[LogitsProcessor, ...], list[int]] = {}
    for i, pipeline in enumerate(pipelines):
        if pipeline.filters:
            groups.setdefault(pipeline.filters, []).append(i)
    for filters, members in groups.items():
        reads = pipelines[members[0]].filters_read_history
        history = _history([growing[i] for i in members], None) if reads else History.of([])
        for filter_ in filters:
            _apply(filter_, history, logits, [places[i] for i in members], sampler.xp)


def _apply_processors(
    sampler: TokenSampler, logits: Any, places: Sequence[int], growing: Continuations, pipelines: Sequence[RowPipeline]
) -> None:
    """Apply each kind of processor, in order, to all rows that have one."""
    kinds: dict[int, list[tuple[int, LogitsProcessor]]] = {}  # by place in the order: sequences with their processors
    changed = [i for i, pipeline in enumerate(pipelines) if pipeline.processors]
    for n, i in enumerate(changed):
        for place, processor in pipelines[i].processors:
            kinds.setdefault(place, []).append((n, processor))
    if not changed:
        return
    history = _history([growing[i] for i in changed], [places[i] for i in changed])
    for _, kind in sorted(kinds.items()):
        for processor, members in _merged(kind):
            members_history = history if len(members) == len(changed) else history.take(members)
            if isinstance(processor, InPlace):
                processor(members_history, logits, sampler.xp)
            else:
                _apply(processor, members_history, logits, [places[changed[n]] for n in members], sampler.xp)


def _merged(kind: Sequence[tuple[int, LogitsProcessor]]) -> list[tuple[LogitsProcessor, list[int]]]:
    """Processors that together do what each of one kind does to its sequence, with the sequences of each."""
    sequences, processors = [n for n, _ in kind], [processor for _, processor in kind]
    first = processors[0]
    if all(processor is first for processor in processors):
        return [(first, sequences)]
    merged = type(first).together(processors) if isinstance(first, InPlace) else None
    if merged is not None:
        return [(merged, sequences)]
    groups: dict[LogitsProcessor, list[int]] = {}
    for n, processor in kind:
        groups.setdefault(processor, []).append(n)
    return [*groups.items()]


def _apply(processor: LogitsProcessor, history: History, logits: Any, rows: Sequence[int], xp: Any) -> None:
    """Apply a processor or filter that takes and returns whole arrays of scores."""
    whole = len(rows) == len(logits)  # rows ascend
    scores = logits if whole else logits[np.asarray(rows)]
    changed = processor(history.alone(), scores, xp)
    if changed is not logits:
        logits[slice(None) if whole else np.asarray(rows)] = changed


def _history(growing: Continuations, places: Sequence[int] | None) -> History:
    """The tokens of some continuations so far, and the rows of their logits; None: in order."""
    sequences = [(state.request, continuation.token_ids) for state, continuation in growing]
    counts = [_counts_of(state, continuation) for state, continuation in growing]
    return History.of(sequences, places, counts, [continuation.index for _, continuation in growing])


def _counts_of(state: "State", continuation: Continuation) -> TokenCounts:
    """The counts of a continuation, up to date."""
    counts = state.token_counts.get(continuation.index)
    if counts is None:
        counts = state.token_counts[continuation.index] = TokenCounts(state.request)
    counts.extend(continuation.token_ids[counts.length - len(state.request.prompt_ids) :])
    return counts
