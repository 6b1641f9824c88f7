"""The encoder's forward pass over the sources of some sequences, before their first decoder pass.

An encoder reads a text as a whole, so a source is never computed in chunks. Sources of different lengths are computed
together, without padding; each token attends to its own source alone.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ..backends.low_rank import AdapterWeights, adapted
from ..backends.observe import CheckingBackend
from ..backends.operations import Backend
from ..batch import Batch, TokenSequence
from ..cache import PagedCache
from ..errors import NumericalError
from ..models.encoder_decoder import EncoderDecoder
from .hooked_backend import View
from .model_hooks import ModelHooks


def encode_sources(
    backend: Backend,
    cache: PagedCache,
    sequences: Sequence[TokenSequence],
    encode: Callable[[Backend, Batch, Sequence[View]], bool],
    hooks: ModelHooks,
) -> None:
    """Compute the keys and values of cross-attention of those sources that have none yet.

    Args:
        backend: that runs the encoder
        cache: in which each sequence has reserved its own and its source's pages
        sequences: sequences of a decoder pass; several may have the same source
        encode: runs the encoder over sources, and returns whether its result is finite (`encoded`)
        hooks: the model's

    Raises:
        NumericalError: NaN or infinity in the encoder's result; the message names the operation that produced it.
    """
    sources = {sequence.encoder_input: sequence for sequence in sequences if sequence.encoder_input is not None}
    new = {source: sequence for source, sequence in sources.items() if not source.computed}
    texts = [
        TokenSequence(source.token_ids, pages=source.pages, adapter=sequence.adapter, probe=sequence.probe)
        for source, sequence in new.items()
    ]
    if not texts:
        return
    batch = Batch.of(texts, [len(text.token_ids) for text in texts], cache.page_size)
    frames = [source.frames for source in new if source.frames is not None]
    if frames:
        batch = replace(batch, frames=np.concatenate(frames))  # -> [2 T, M]
    views = hooks.views(batch, texts, "encoder.")
    if not encode(backend, batch, views):
        checking = CheckingBackend(backend)
        encode(checking, batch, views)  # once more
        raise checking.error or NumericalError(
            "NaN or infinity in the encoder's result; computed once more, every operation was finite"
        )
    for source in new:
        source.computed = True


def encoded(
    model: Any,
    backend: Backend,
    cache: PagedCache,
    batch: Batch,
    adapters: Mapping[str, AdapterWeights],
    around: Callable[[Backend], Backend],
) -> bool:
    """Run the encoder over sources, and whether its result is finite.

    Args:
        model: an `EncoderDecoder`
        backend: that runs it
        cache: with the sources' pages
        batch: each source as a sequence, whole
        adapters: LoRA adapters by name
        around: puts hooks around a backend, if some text has them
    """
    assert isinstance(model, EncoderDecoder)
    body = around(adapted(backend, adapters, batch, [])[0] if batch.adapters else backend)
    batch, _ = backend.memory.upload(batch, [])
    with np.errstate(all="ignore"):  # reported with the operation's name
        x = model.encode(body, batch, cache.storage)  # [T] -> [T, E]
        return bool(np.isfinite(backend.sampler.to_host(x)).all())
