"""Whole texts through a model, several in a pass, without generating anything.

Texts are sorted by length and packed into passes of a bounded number of tokens. A pass is ragged: texts are never
padded, so a text has the same result in any company. All layers of an encoder take turns in the memory of one
(`Pages.shared`); a decoder's text may take several passes.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..batch import TokenSequence
from ..config import ModelConfig
from ..encoder_input import EncoderInput
from ..errors import TaskError
from ..progress import work
from ..runner.layer_mean import LayerMean
from ..runner.runner import Runner
from ..text.tokenizer import EncodedText

Turn = Callable[[], AbstractContextManager[None]]
"""Makes a `with` block with exclusive use of the backend; between an engine's blocks other calls may step."""

MOST_SEQUENCES = 64
"""Texts of a pass at most"""


class PackedTexts:
    """Runs encoded texts through a model, those of about the same length together."""

    def __init__(self, runner: Runner, budget: int, turn: Turn) -> None:
        """Set the model.

        Args:
            runner: has the model and its backend; its cache is not used
            budget: tokens of a pass, which a longer text of an encoder exceeds
            turn: in which each pass is computed
        """
        self.config: ModelConfig = runner.model.config
        self._budget, self._turn = budget, turn
        self._runner = runner
        self._runners: dict[bool, Runner] = {}
        """Runners with the model's head and without; each gets a cache of its own when it is first needed"""
        self._lock = threading.Lock()

    def _run(
        self,
        texts: Sequence[EncodedText],
        head: bool,
        positions_of: Callable[[EncodedText], range],
        finish: Callable[[int, NDArray[np.float32]], NDArray[np.float32]],
        title: str,
        lora: str | None,
        layer_weights: Sequence[float] = (),
    ) -> list[Any]:
        """Compute all texts, in passes of texts of about the same length.

        Args:
            texts: N of them
            head: run the model's head; else the results are hidden states
            positions_of: a text's positions whose results are wanted
            finish: makes a text's result from its number and these rows [k, W], which are a copy
            title: for the report of progress
            lora: the adapter that computes them
            layer_weights: as in `EmbeddingSettings`

        Raises:
            TaskError: several processes share the model, and the states of all layers are wanted.
        """
        if layer_weights and not self._runner.has_exits:
            raise TaskError("a mean over layers is not offered where several processes share a model: use one")
        order = sorted(range(len(texts)), key=lambda i: -len(texts[i].token_ids))
        results: list[Any] = [None] * len(texts)
        with work(title, len(texts), "texts") as progress:
            for pack in self._packs(texts, order):
                sequences = [self._sequence(texts[i], lora) for i in pack]
                with self._lock:
                    positions = [positions_of(texts[i]) for i in pack]
                    rows = self._pass(self._runner_for(sequences, head), sequences, positions, layer_weights)
                for i, result_rows in zip(pack, rows, strict=True):
                    results[i] = finish(i, result_rows)
                progress.advance(len(pack))
        return results

    def trim(self) -> None:
        """In a turn: free the memory of texts, unless some are computed."""
        if self._lock.acquire(blocking=False):
            try:
                self._runners.clear()
            finally:
                self._lock.release()

    def _packs(self, texts: Sequence[EncodedText], order: Sequence[int]) -> Iterator[list[int]]:
        """Texts that share a pass: as many as fit in the budget, at least one."""
        pack: list[int] = []
        tokens = 0
        for i in order:
            count = len(texts[i].token_ids)
            if pack and (tokens + count > self._budget or len(pack) == MOST_SEQUENCES):
                yield pack
                pack, tokens = [], 0
            pack.append(i)
            tokens += count
        if pack:
            yield pack

    def _sequence(self, text: EncodedText, lora: str | None) -> TokenSequence:
        if self.config.encoder_layers:
            return self._shifted(text.token_ids, lora)
        types: Sequence[int] = ()
        if count := self.config.token_types:
            types = text.types if max(text.types) < count else [0] * len(text.types)
        return TokenSequence(list(text.token_ids), types=types, adapter=lora, unseen=text.unseen)

    def _shifted(self, ids: Sequence[int], lora: str | None) -> TokenSequence:
        """A text that both stacks of an encoder-decoder read, the decoder one token later."""
        first = self.config.decoder_start_token_id
        if self.config.source_wraps:
            first = ids[sum(token != self.config.pad_token_id for token in ids) - 1]
        assert first is not None
        return TokenSequence([first, *ids[:-1]], adapter=lora, encoder_input=EncoderInput(list(ids)))

    def _runner_for(self, sequences: Sequence[TokenSequence], head: bool) -> Runner:
        """A runner whose cache holds these texts."""
        text_runner = self._runners.get(head)
        runner = self._runner
        size = runner.backend.memory.page_size
        pages = sum(-(-len(sequence.token_ids) // size) for sequence in sequences)
        pages *= 2 if self.config.encoder_layers else 1  # of the source too
        if text_runner is None or text_runner.cache.num_pages < pages:
            pages = max(pages, -(-self._budget // size), 0 if text_runner is None else 2 * text_runner.cache.num_pages)
            with self._turn():
                text_runner = self._runners[head] = runner.over_texts(pages, head=head)
        text_runner.backend = runner.backend  # another one may have been put in its place since
        return text_runner

    def _pass(
        self,
        runner: Runner,
        sequences: Sequence[TokenSequence],
        positions: Sequence[range],
        layer_weights: Sequence[float] = (),
    ) -> list[NDArray[np.float32]]:
        """The results at some positions of texts that share a pass, or of one in chunks. [k, W] each"""
        chunks_of_texts: list[list[NDArray[np.float32]]] = [[] for _ in sequences]
        try:
            while any(sequence.pending for sequence in sequences):
                counts = [sequence.pending for sequence in sequences]
                if not self.config.bidirectional and sum(counts) > self._budget:
                    counts = [min(self._budget, counts[0])]  # one long text
                spans, rows, start = [], list[int](), 0
                for sequence, count, places in zip(sequences, counts, positions, strict=True):
                    first = max(places.start, sequence.cached)
                    here = range(first, max(first, min(places.stop, sequence.cached + count)))
                    spans.append(len(here))
                    rows += range(start + here.start - sequence.cached, start + here.stop - sequence.cached)
                    start += count
                mean = LayerMean(layer_weights) if layer_weights else None
                with self._turn():
                    output = runner.forward(sequences, counts, rows=rows, exits=mean)
                    results = np.array(runner.backend.sampler.to_host(output.logits), np.float32)  # [R, W], a copy
                if mean is not None:
                    results = mean.of(results)
                stops = np.cumsum(spans).tolist()
                for chunks, stop, count in zip(chunks_of_texts, stops, spans, strict=True):
                    chunks.append(results[stop - count : stop])
        finally:
            runner.cache.clear()
        return [chunks[0] if len(chunks) == 1 else np.concatenate(chunks) for chunks in chunks_of_texts]


def every_position(text: EncodedText) -> range:
    """The positions of all tokens of a text."""
    return range(len(text.token_ids))
