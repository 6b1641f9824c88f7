"""Model outputs at every position: logits, log-probabilities of given tokens, most likely next tokens, attention
maps.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .backends.observe import WrappedBackend
from .backends.operations import Backend
from .backends.weights import Weight
from .batch import Batch, TokenSequence
from .cache import PagedCache
from .reference.attention import attention_scores
from .reference.softmax import chosen_log_probs, softmax, top_log_probs
from .runner import Runner

Turn = Callable[[], AbstractContextManager[None]]
"""Makes a `with` block with exclusive use of the backend; between an engine's blocks other calls may step."""

CHUNK = 128
"""Number of positions whose logits are held at once: [128, V] takes 26 MB for OPT."""


def logits_by_chunk(
    runner: Runner, token_ids: list[int], turn: Turn = nullcontext, lora: str | None = None
) -> Iterator[tuple[int, Any]]:
    """Iterate over the logits of all positions in chunks, each computed and consumed in its own turn.

    `lora` names the adapter that computes them.

    Yields:
        The first position of the chunk, and its logits [chunk, V] on the host, valid until the next chunk.
    """
    model, backend = runner.model, runner.backend
    pages = -(-len(token_ids) // backend.memory.page_size)
    apart = Runner(
        model, backend, PagedCache(model.config, backend, pages), adapters=runner.adapters
    )  # running requests keep their reserved pages
    sequence = TokenSequence(list(token_ids), adapter=lora)
    while sequence.pending:
        first, count = sequence.cached, min(CHUNK, sequence.pending)
        with turn():
            yield first, backend.chooser.to_host(apart.forward([sequence], [count], rows=range(count)).logits)


def all_logits(
    runner: Runner, token_ids: list[int], turn: Turn = nullcontext, lora: str | None = None
) -> NDArray[np.float32]:
    """The logits of every position. [T] -> [T, V]"""
    out = np.empty((len(token_ids), runner.model.config.vocab_size), np.float32)
    for first, logits in logits_by_chunk(runner, token_ids, turn, lora):
        out[first : first + len(logits)] = logits
    return out


def score_tokens(
    runner: Runner, token_ids: list[int], turn: Turn = nullcontext, lora: str | None = None
) -> list[float | None]:
    """log p(token | those before it) of each token; None for the first."""
    scores: list[float | None] = [None]
    for first, logits in logits_by_chunk(runner, token_ids, turn, lora):
        following = np.asarray(token_ids[first + 1 : first + 1 + len(logits)], np.int64)  # the last position has none
        scores += chosen_log_probs(logits[: len(following)], following, np).tolist()
    return scores


@dataclass(frozen=True)
class Position:
    """One position of a prompt."""

    token_id: int
    logprob: float | None
    """log p(this token | those before); None for the first"""
    next: list[tuple[int, float]]
    """Most likely next tokens with their probabilities, best first"""


def next_tokens(runner: Runner, token_ids: list[int], top: int) -> list[Position]:
    """The `top` most likely next tokens at each position, with probabilities."""
    positions: list[Position] = []
    logprob: float | None = None
    for first, logits in logits_by_chunk(runner, token_ids):
        ids, values = top_log_probs(logits, top, np)  # [T, V] -> 2 x [T, top]
        for i, row in enumerate(logits):
            expected = [(int(t), float(np.exp(v))) for t, v in zip(ids[i], values[i], strict=True)]
            positions.append(Position(token_ids[first + i], logprob, expected))
            if first + i + 1 < len(token_ids):
                following = np.asarray([token_ids[first + i + 1]])
                logprob = float(chosen_log_probs(row[None], following, np)[0])
    return positions


class AttentionRecorder(WrappedBackend):
    """Backend wrapper that records the attention weights of one layer."""

    def __init__(self, inner: Backend, layer: int) -> None:
        super().__init__(inner)
        self.wanted = layer
        self.map: NDArray[np.float32] | None = None
        """[H, T, S]"""

    def observe(self, operation: str, weight: Weight | None, result: Any, **arguments: Any) -> None:
        """Recompute the map from the layer's queries and keys."""
        if operation == "attend" and self.layer == self.wanted:
            keys, _ = arguments["cache"].layer(self.wanted)
            host = self.chooser.to_host
            slopes, bias = arguments["slopes"], arguments["bias"]
            variant = {name: arguments[name] for name in ("causal", "window", "softcap")}
            variant["slopes"] = None if slopes is None else host(slopes.data)
            variant["bias"] = None if bias is None else [host(each) for each in bias]
            q, batch, scale = host(arguments["q"]), arguments["batch"], arguments["scale"]
            self.map = attention_map(q, host(keys), batch, scale, np, **variant)[0]


def attention_map(q: Any, keys: Any, batch: Batch, scale: float, xp: Any, **variant: Any) -> list[Any]:
    """Attention weights of each sequence [H, n, S], for inspection; arguments as of `attend`."""
    maps, biases = [], variant.pop("bias", None)
    for i, span in enumerate(batch.spans):
        n, H, _ = q[span.start : span.stop].shape
        variant["bias"] = None if biases is None else biases[i]
        scores = attention_scores(q[span.start : span.stop], keys, span, span.stop, scale, xp, **variant)
        maps.append(softmax(scores, xp).reshape(H, n, span.context_len))  # [K, G n, S] -> [H, n, S]
    return maps


def attention_maps(runner: Runner, token_ids: list[int], layer: int) -> NDArray[np.float32]:
    """The attention weights of each head of one layer over a prompt. [T] -> [H, T, T]; rows sum to 1."""
    pages = -(-len(token_ids) // runner.backend.memory.page_size)
    recorder = AttentionRecorder(runner.backend, layer)
    Runner(runner.model, recorder, PagedCache(runner.model.config, runner.backend, pages)).prefill(
        TokenSequence(list(token_ids))
    )
    assert recorder.map is not None
    return recorder.map
