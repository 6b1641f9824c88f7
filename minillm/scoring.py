"""Logits and log-probabilities of tokens that are given, in chunks and with a small cache of their own."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .batch import TokenSequence
from .cache import PagedCache
from .reference.softmax import chosen_log_probs
from .runner import Runner

Turn = Callable[[], AbstractContextManager[None]]
"""Makes a `with` block in which nothing else uses the backend: an engine's, between whose chunks other calls step."""

CHUNK = 128
"""Positions whose logits are held at once: [128, V] takes 26 MB for OPT."""


def logits_by_chunk(runner: Runner, token_ids: list[int], turn: Turn = nullcontext) -> Iterator[tuple[int, Any]]:
    """The logits of every position, chunk by chunk, each computed and looked at in a turn.

    Yields:
        The first position of the chunk, and its logits [chunk, V] on the host, valid until the next chunk.
    """
    model, backend = runner.model, runner.backend
    pages = -(-len(token_ids) // backend.page_size)
    apart = Runner(
        model, backend, PagedCache(model.config, backend, pages)
    )  # requests that run keep the pages promised them
    sequence = TokenSequence(list(token_ids))
    while sequence.pending:
        first, count = sequence.cached, min(CHUNK, sequence.pending)
        with turn():
            yield first, backend.to_host(apart.forward([sequence], [count], rows=range(count)).logits)


def all_logits(runner: Runner, token_ids: list[int], turn: Turn = nullcontext) -> NDArray[np.float32]:
    """The logits of every position. [T] -> [T, V]"""
    out = np.empty((len(token_ids), runner.model.config.vocab_size), np.float32)
    for first, logits in logits_by_chunk(runner, token_ids, turn):
        out[first : first + len(logits)] = logits
    return out


def score_tokens(runner: Runner, token_ids: list[int], turn: Turn = nullcontext) -> list[float | None]:
    """log p(token | those before it) of each token; None for the first, which follows nothing."""
    scores: list[float | None] = [None]
    for first, logits in logits_by_chunk(runner, token_ids, turn):
        following = np.asarray(token_ids[first + 1 : first + 1 + len(logits)], np.int64)  # of the last one none
        scores += chosen_log_probs(logits[: len(following)], following, np).tolist()
    return scores
