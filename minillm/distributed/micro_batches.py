"""The parts of a forward pass on which pipeline stages work at the same time.

A stage computes them in order, so a part may continue a sequence that another one begins.
"""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from ..batch import Batch, Span
from ..parallel import Parallel
from .messages import MicroBatch


def micro_batches(
    batch: Batch, rows: Sequence[int], parallel: Parallel, *, causal: bool = True
) -> tuple[tuple[MicroBatch, ...], NDArray[np.int64]]:
    """A batch in parts of about as many tokens, cut also within prompts, but not within trees or texts with states.

    Of a model that is not `causal`, whose tokens see those after them, texts stay whole.

    Returns:
        The parts, and the given rows in their order: numbers from 0 to R - 1. [R]
    """
    count, T = parallel.micro_batches_of(batch.num_tokens), batch.num_tokens
    cuts = {i * T // count for i in range(1, count)}
    for span in batch.spans:
        if span.tree is not None or not causal or batch.state_before is not None:
            cuts = {span.start if span.start < cut < span.stop else cut for cut in cuts}
    bounds = sorted({0, *cuts, T})
    logit_rows = np.asarray(rows, np.int64)
    parts, order = [], []
    for first, stop in pairwise(bounds):
        inside = np.flatnonzero((logit_rows >= first) & (logit_rows < stop))
        order.append(inside)
        parts.append(MicroBatch(part_of(batch, first, stop), tuple((logit_rows[inside] - first).tolist())))
    if len(parts) == 1:
        parts = [MicroBatch(batch, tuple(logit_rows.tolist()))]
    return tuple(parts), np.concatenate(order)


def part_of(batch: Batch, first: int, stop: int) -> Batch:
    """Tokens `first` to `stop` of a batch, as a batch to be computed after those before them; no tree may be cut."""
    spans: list[Span] = []
    adapters: list[str | None] = []
    for i, span in enumerate(batch.spans):
        start, end = max(span.start, first), min(span.stop, stop)
        if start < end:
            assert span.tree is None or (start, end) == (span.start, span.stop)
            context_len = span.context_len - (span.stop - end)
            spans.append(span._replace(start=start - first, stop=end - first, context_len=context_len))
            adapters += batch.adapters[i : i + 1]
    before = None if batch.state_before is None else batch.state_before[first:stop]
    return Batch(
        batch.token_ids[first:stop],
        batch.positions[first:stop],
        batch.slot_pages[first:stop],
        batch.slot_offsets[first:stop],
        tuple(spans),
        adapters=tuple(adapters),
        types=None if batch.types is None else batch.types[first:stop],
        state_before=before if before is None else np.where(before < 0, before, before - first),
        state_after=None if batch.state_after is None else batch.state_after[first:stop],
    )
