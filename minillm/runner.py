"""One forward pass over pending tokens. Prefill and decode are the same pass; people think of them as two."""

from collections.abc import Sequence as SequenceOf
from typing import Any

import numpy as np

from .backends.base import Backend
from .batch import Batch, Sequence
from .cache import PagedCache
from .models.base import Model


class Runner:
    """A model, the back end that runs it, and its K/V cache."""

    def __init__(self, model: Model, ops: Backend, cache: PagedCache) -> None:
        self.model = model
        self.ops = ops
        self.cache = cache

    def prefill(self, sequence: Sequence) -> Any:
        """Compute all pending tokens of one sequence. Returns the last one's logits [1, V]."""
        return self.forward([sequence], [sequence.pending])

    def decode(self, sequences: SequenceOf[Sequence]) -> Any:
        """Compute one pending token of each sequence. Returns their logits [N, V]."""
        return self.forward(sequences, [1] * len(sequences))

    def forward(
        self, sequences: SequenceOf[Sequence], counts: SequenceOf[int], rows: SequenceOf[int] | None = None
    ) -> Any:
        """Compute the next `counts[i]` pending tokens of each sequence; their K/V are in the cache afterwards.

        Args:
            sequences: N of them, each with at least `counts[i]` pending tokens
            counts: at least 1 each; T in all
            rows: rows of the flat batch whose logits are wanted; by default each sequence's last

        Returns:
            Logits [R, V], float32, valid until the next forward.

        Raises:
            CacheFullError: the cache cannot take the new tokens; nothing was computed.
        """
        for sequence, count in zip(sequences, counts, strict=True):
            self.cache.reserve(sequence, sequence.cached + count)
        batch = Batch.of(sequences, counts, self.cache.page_size)
        wanted = batch.query_starts[1:] - 1 if rows is None else np.asarray(rows, np.int64)
        hidden = self.model.forward(self.ops, batch, self.cache)  # [T] -> [T, E]
        for sequence, count in zip(sequences, counts, strict=True):
            sequence.cached += count
        if len(wanted) < batch.num_tokens:
            hidden = self.ops.take_rows(hidden, wanted)  # [T, E] -> [R, E]
        return self.model.logits(self.ops, hidden)  # [R, E] -> [R, V]
