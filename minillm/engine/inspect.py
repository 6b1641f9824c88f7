"""Model outputs at every position: logits, log-probabilities of given tokens (`Score`), most likely next tokens,
attention maps; and the attention of one token in every layer.
"""

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..backends.attention_maps import AttentionRecorder
from ..backends.observe import put_between
from ..batch import TokenSequence
from ..cache import PagedCache, new_cache
from ..decoding.hooks import Hooks
from ..encoder_input import EncoderInput
from ..progress import work
from ..reference.softmax import chosen_log_probs, top_log_probs
from ..runner.hooked_backend import Probe
from ..runner.runner import Runner
from ..text.display import brief, results_html, view_tokens

Turn = Callable[[], AbstractContextManager[None]]
"""Makes a `with` block with exclusive use of the backend; between an engine's blocks other calls may step."""

CHUNK = 128
"""Number of positions whose logits are held at once: [128, V] takes 26 MB for OPT."""


def logits_by_chunk(
    runner: Runner,
    token_ids: list[int],
    turn: Turn = nullcontext,
    lora: str | None = None,
    source: EncoderInput | None = None,
    embeddings: NDArray[np.float32] | None = None,
    *,
    host: bool = True,
) -> Iterator[tuple[int, Any]]:
    """Iterate over the logits of all positions in chunks, each computed and consumed in its own turn.

    `lora` names the adapter that computes them; `source` is what the encoder of an encoder-decoder reads;
    `embeddings` [T, E] stand in the place of the tokens'.

    Yields:
        The first position of the chunk, and its logits [chunk, V] on the `host`, or where the model computes them,
        valid until the next chunk.
    """
    backend = runner.backend
    apart = runner.apart(cache_for(runner, token_ids, () if source is None else source.token_ids))
    sequence = TokenSequence(list(token_ids), adapter=lora, encoder_input=source)
    if embeddings is not None:
        sequence.probe = Probe(Hooks(embeddings=embeddings), 0)
    while sequence.pending:
        first, count = sequence.cached, min(CHUNK, sequence.pending)
        with turn():
            logits = apart.forward([sequence], [count], rows=range(count)).logits
            yield first, backend.sampler.to_host(logits) if host else logits


def all_logits(
    runner: Runner,
    token_ids: list[int],
    turn: Turn = nullcontext,
    lora: str | None = None,
    source: EncoderInput | None = None,
    embeddings: NDArray[np.float32] | None = None,
    *,
    host: bool = True,
) -> Any:
    """The logits of every position, float32; arguments as of `logits_by_chunk`. [T] -> [T, V]"""
    out = (np if host else runner.backend.xp).empty((len(token_ids), runner.model.config.vocab_size), np.float32)
    with work("computing logits", len(token_ids), "tokens") as progress:
        for first, logits in logits_by_chunk(runner, token_ids, turn, lora, source, embeddings, host=host):
            out[first : first + len(logits)] = logits
            progress.advance(len(logits))
    return out


def score_tokens(
    runner: Runner,
    token_ids: list[int],
    turn: Turn = nullcontext,
    lora: str | None = None,
    source: EncoderInput | None = None,
) -> list[float | None]:
    """log p(token | those before it) of each token; None for the first. Arguments as of `logits_by_chunk`."""
    scores: list[float | None] = [None]
    with work("scoring", len(token_ids), "tokens") as progress:
        for first, logits in logits_by_chunk(runner, token_ids, turn, lora, source):
            following = np.asarray(token_ids[first + 1 : first + 1 + len(logits)], np.int64)  # the last has none
            scores += chosen_log_probs(logits[: len(following)], following, np).tolist()
            progress.advance(len(logits))
    return scores


@dataclass(frozen=True)
class Position:
    """One position of a prompt."""

    token_id: int
    logprob: float | None
    """log p(this token | those before); None for the first"""
    next: list[tuple[int, float]]
    """Most likely next tokens with their probabilities, best first"""


def next_tokens(runner: Runner, token_ids: list[int], top: int, lora: str | None = None) -> list[Position]:
    """The `top` most likely next tokens at each position, with probabilities; `lora` names an adapter."""
    positions: list[Position] = []
    logprob: float | None = None
    with work("computing logits", len(token_ids), "tokens") as progress:
        for first, logits in logits_by_chunk(runner, token_ids, lora=lora):
            ids, values = top_log_probs(logits, top, np)  # [T, V] -> 2 x [T, top]
            for i, row in enumerate(logits):
                expected = [(int(t), float(np.exp(v))) for t, v in zip(ids[i], values[i], strict=True)]
                positions.append(Position(token_ids[first + i], logprob, expected))
                if first + i + 1 < len(token_ids):
                    following = np.asarray([token_ids[first + i + 1]])
                    logprob = float(chosen_log_probs(row[None], following, np)[0])
            progress.advance(len(logits))
    return positions


def attention_maps(runner: Runner, token_ids: list[int], layer: int) -> NDArray[np.float32]:
    """The attention weights of each head of one layer over a prompt. [T] -> [H, T, T]; rows sum to 1."""
    return masked_attention_maps(runner, token_ids, layer)[0]


def masked_attention_maps(
    runner: Runner, token_ids: list[int], layer: int, lora: str | None = None
) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
    """The attention maps of a layer, and the pairs that its mask hides, which are no weights of zero.

    `lora` names the adapter that computes them.

    [T] -> [H, T, T], [T, T]
    """
    apart = runner.apart(cache_for(runner, token_ids))
    with put_between(apart, AttentionRecorder(runner.backend, {layer})) as recorder:
        apart.prefill(TokenSequence(list(token_ids), adapter=lora))
    return recorder.maps[layer], recorder.masked[layer]


def last_attention(
    runner: Runner, token_ids: list[int], layers: Collection[int], turn: Turn = nullcontext, lora: str | None = None
) -> NDArray[np.float32]:
    """The attention weights of the last token in some layers. [T] -> [len(layers), H, T]; rows sum to 1.

    The tokens before it fill a cache of their own, in chunks, each in its own turn. `lora` names the adapter that
    computes them.
    """
    apart, sequence = runner.apart(cache_for(runner, token_ids)), TokenSequence(list(token_ids), adapter=lora)
    with work("computing attention", len(token_ids), "tokens") as progress:
        while sequence.pending > 1:
            with turn():
                apart.forward([sequence], [min(CHUNK, sequence.pending - 1)], rows=())
            progress.advance(sequence.cached - progress.done)
        with turn(), put_between(apart, AttentionRecorder(runner.backend, layers)) as recorder:
            apart.prefill(sequence)
        progress.advance()
    return np.stack([recorder.maps[layer][:, 0] for layer in layers])  # [H, 1, T] each -> [len(layers), H, T]


def cache_for(runner: Runner, token_ids: Sequence[int], source_ids: Sequence[int] = ()) -> PagedCache:
    """A cache for one sequence and its source, apart from the running requests'."""
    backend = runner.backend
    pages = sum(-(-len(ids) // backend.memory.page_size) for ids in (token_ids, source_ids))
    return new_cache(PagedCache, runner.model.config, backend, pages, layers=runner.layers)


@dataclass(frozen=True)
class Score:
    """Log-probabilities of a text's tokens. A notebook shows the text, its tokens in shades as of a `Generation`.

    Example:
        >>> engine.score("A list of colors: red, orange, yellow")
        Score(tokens=11, total=..., perplexity=...)
    """

    token_ids: list[int]
    logprobs: list[float | None]
    """Natural logarithms; None for the first token"""
    token_bytes: list[bytes] = field(default_factory=list, compare=False)
    """UTF-8 bytes of each token, as of an `Event`; empty without a tokenizer"""

    def __repr__(self) -> str:
        return brief("Score", tokens=len(self.token_ids), total=self.total, perplexity=self.perplexity)

    def _repr_html_(self) -> str:
        note = f"{len(self.token_ids)} tokens · log-probability {self.total:.4g} · perplexity {self.perplexity:.4g}"
        return results_html([([], view_tokens(self.token_ids, self.token_bytes, self.logprobs), note)])

    @property
    def total(self) -> float:
        """Summed log-probability of all tokens after the first."""
        return math.fsum(value for value in self.logprobs if value is not None)

    @property
    def perplexity(self) -> float:
        """exp(-mean log-probability); 1 for fewer than two tokens."""
        return math.exp(-self.total / max(1, len(self.token_ids) - 1))
