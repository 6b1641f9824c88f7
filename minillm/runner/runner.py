"""Runs a forward pass over pending tokens, the same for prefill and decode."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..backends.low_rank import AdapterWeights, adapted
from ..backends.observe import CheckingBackend
from ..backends.operations import Backend
from ..backends.recording import sealed
from ..batch import Batch, TokenSequence
from ..cache import PagedCache, new_cache
from ..cache.windows import with_parts
from ..decoding.strategy import Feed
from ..errors import NumericalError
from ..models.base import Model
from ..models.heads import without_head
from ..reference.sampling import Draw
from .hooked_backend import View
from .model_hooks import ModelHooks, other_rows

if TYPE_CHECKING:
    from .early_exits import EarlyExits
    from .layer_mean import LayerMean


class Output(NamedTuple):
    """Output of a forward pass, valid until the next one."""

    logits: Any
    """[R, V], float32; None of a stage that is not the model's last"""
    hidden: Any
    """[R, W], the hidden states that the language model head multiplied; [T, E] of a stage that is not the last"""


class Slice(NamedTuple):
    """One feed's rows of a forward pass."""

    output: Output
    first: int
    stop: int
    own: bool = False
    """True if the output is a copy with only these rows"""
    exits: Any = None
    """[exits, V], the last row's logits of early exits, if the feed asked for them"""

    def copy(self) -> "Slice":
        """A copy of the rows, which outlives the next forward pass."""
        if self.own:
            return self
        rows = slice(self.first, self.stop)
        output = Output(self.output.logits[rows].copy(), self.output.hidden[rows].copy())
        return Slice(output, 0, self.stop - self.first, own=True, exits=self.exits)


class Runner:
    """A model or a range of its layers (a pipeline stage), the backend that runs it, and its K/V cache."""

    has_exits: ClassVar[bool] = True
    """Whether rows may take early exits"""

    def __init__(
        self,
        model: Model,
        backend: Backend,
        cache: PagedCache,
        layers: range | None = None,
        adapters: Mapping[str, AdapterWeights] | None = None,
        hooks: ModelHooks | None = None,
    ) -> None:
        """`layers` are run, by default all, and `cache` must hold them; `adapters` are the adapters of sequences."""
        self.model = model
        self.cache = cache
        self.hooks = hooks or ModelHooks(model)
        self.backend = backend
        self.adapters = adapters or {}
        self.layers = layers or range(model.config.num_layers)
        self.replays = len(self.layers) == model.config.num_layers  # a stage reads x, which may be anywhere

    @property
    def backend(self) -> Backend:
        """The backend; while one that may change results is in its place, texts share no pages."""
        return self._backend

    @backend.setter
    def backend(self, backend: Backend) -> None:
        self._backend = backend
        self.share_pages()

    def share_pages(self) -> None:
        """Let texts share pages, unless what computes them may change results."""
        self.cache.apart = self.backend.changes_results or bool(self.hooks.functions)

    def apart(self, cache: PagedCache, backend: Backend | None = None) -> "Runner":
        """A runner of the same model with another cache, and with another backend if one is given."""
        return Runner(self.model, backend or self.backend, cache, self.layers, self.adapters, self.hooks)

    def over_texts(self, pages: int, *, head: bool) -> "Runner":
        """A runner of whole texts with a cache of its own; without the model's head its results are hidden states."""
        return Runner(
            self.model if head else without_head(self.model),
            self.backend,
            new_cache(PagedCache, self.model.config, self.backend, pages, shared=self.model.config.bidirectional),
            adapters=self.adapters,
            hooks=self.hooks,
        )

    def trim(self) -> None:
        """Between two passes, give memory that nothing uses back to the system: pages of the cache, and of results."""
        self.cache.trim()
        self.backend.memory.trim()

    def prefill(self, sequence: TokenSequence) -> Output:
        """Compute all pending tokens of one sequence; logits of the last, [1, V]."""
        return self.forward([sequence], [sequence.pending])

    def decode(self, sequences: Sequence[TokenSequence]) -> Output:
        """Compute one pending token of each sequence; logits [N, V]."""
        return self.forward(sequences, [1] * len(sequences))

    def forward(
        self,
        sequences: Sequence[TokenSequence],
        counts: Sequence[int],
        rows: Sequence[int] | None = None,
        draws: Sequence[Draw | None] = (),
        x: Any = None,
        exits: "EarlyExits | LayerMean | None" = None,
    ) -> Output:
        """Compute the next `counts[i]` pending tokens of each sequence; their K/V are in the cache afterwards.

        Args:
            sequences: N of them, each with at least `counts[i]` pending tokens
            counts: at least 1 each; T in all
            rows: rows of the flat batch whose logits to compute; by default each sequence's last
            draws: as in `Memory.run`
            x: the hidden state [T, E] that the stage before handed over, if this is not the first; it must not be a
                result of this runner's own backend, which reuses their memory
            exits: rows of the flat batch that take early exits, whose logits it then has; or the mean over layers

        Raises:
            CacheFullError: the cache cannot take the new tokens; nothing was computed.
            NumericalError: NaN or infinity among the logits, or among the hidden states where others may use the keys
                and values; the message names the operation that produced it.
        """
        for sequence, count in zip(sequences, counts, strict=True):
            self.cache.reserve(sequence, sequence.cached + count)
        if self.model.config.encoder_layers:
            from .encoder_pass import encode_sources  # here, for decoders do without

            encode_sources(self.backend, self.cache, sequences, self.encode, self.hooks)
        batch = Batch.of(sequences, counts, self.cache.page_size)
        if self.cache.windows:
            batch = with_parts(batch, sequences, self.cache.page_size, self.cache.windows)
        if self.cache.has_states:
            batch = self.cache.with_states(batch, sequences, counts)
        logit_rows = [span.stop - 1 for span in batch.spans] if rows is None else rows
        hooked = self.hooks.functions or [sequence for sequence in sequences if sequence.probe is not None]
        views = self.hooks.views(batch, sequences) if hooked else []
        output, finite = self._run(self._backend, batch, logit_rows, draws, x, views, exits)
        if not finite:
            checking = CheckingBackend(self.backend)
            self._run(checking, batch, logit_rows, x=x, views=views, exits=exits)  # once more
            raise checking.error or NumericalError(
                "NaN or infinity among the logits; computed once more, every operation was finite"
            )
        for sequence, count in zip(sequences, counts, strict=True):
            sequence.private = sequence.private or self.cache.apart
            self.cache.advance(sequence, count)
        return output

    def _run(
        self,
        backend: Backend,
        batch: Batch,
        rows: Any,
        draws: Sequence[Draw | None] = (),
        x: Any = None,
        views: Sequence[View] = (),
        exits: "EarlyExits | LayerMean | None" = None,
    ) -> tuple[Output, bool]:
        """The forward pass itself, and whether its results are finite. Empty `rows`: it only fills the K/V cache."""
        last = self.layers.stop == self.model.config.num_layers
        body, head = self._backends(backend, batch, rows, views)
        others = other_rows(views, rows) if views else []
        ragged = batch

        def head_of(some: Sequence[int]) -> Backend:
            return self._backends(backend, ragged, some, ())[1]

        def compute(batch: Batch, rows: Any) -> Output:
            with np.errstate(all="ignore"):  # NaN is reported as an error with the operation's name, not as a warning
                pages, before = self.cache.storage, x if x is None else sealed(x)
                stack = body if exits is None else exits.around(body, self.model, head_of, rows)
                hidden = self.model.forward(stack, batch, pages, layers=self.layers, x=before)  # -> [T, E]
                if not last:
                    return Output(None, hidden)
                if others:
                    self._logits(
                        other_head, body.take_rows(hidden, backend.xp.asarray(others, getattr(rows, "dtype", None)))
                    )
                if len(rows) < batch.num_tokens:
                    if self.cache.prefix_cache:
                        backend.sampler.watch(hidden)
                    hidden = body.take_rows(hidden, rows)  # [T, E] -> [R, E]
                return self._logits(head, hidden)

        other_head = self._backends(backend, batch, others, views)[1] if others else head
        backend.sampler.states_finite()  # forgets those of a pass that has failed
        if self.replays and body.replays and exits is None:
            output = backend.memory.run(self, batch, rows, compute, draws)
        else:
            output = compute(*backend.memory.upload(batch, rows))
        finite = backend.sampler.states_finite() and (exits is None or exits.finite)
        return output, finite and (output.logits is None or backend.sampler.finite(output.logits))

    def _backends(self, backend: Backend, batch: Batch, rows: Any, views: Sequence[View]) -> tuple[Backend, Backend]:
        """Backends with a batch's adapters and hooks: for its layers [T], and for the head, which gets some rows."""
        body = head = backend
        if batch.adapters:
            body, head = adapted(backend, self.adapters, batch, rows)
        return self.hooks.around(body, head, views, rows) if views else (body, head)

    def _logits(self, head: Backend, hidden: Any) -> Output:
        """[R, E] -> [R, V], [R, W]"""
        hidden = self.model.states(head, hidden)  # [R, E] -> [R, W]
        return Output(self.model.logits(head, hidden), hidden)  # [R, W] -> [R, V]

    def head_of(self, states: NDArray[np.float32]) -> NDArray[np.float32]:
        """Results of the head for hidden states that no pass has computed, such as means. [N, E] -> [N, W]

        Raises:
            NumericalError: they contain NaN or infinity.
        """
        backend = self.backend
        with np.errstate(all="ignore"):
            output = self._logits(backend, backend.xp.asarray(states, backend.memory.activations.dtype))
        results = np.array(backend.sampler.to_host(output.logits), np.float32)  # a copy
        if not np.isfinite(results).all():
            raise NumericalError("NaN or infinity among the logits of the head")
        return results

    def encode(self, backend: Backend, batch: Batch, views: Sequence[View] = ()) -> bool:
        """Run the encoder over a batch of sources, and whether its result is finite."""
        from .encoder_pass import encoded

        around = partial(self.hooks.around_encoder, views=views)
        return encoded(self.model, backend, self.cache, batch, self.adapters, around)

    def place(self, live: list[TokenSequence], feeds: Sequence[Feed]) -> list[TokenSequence]:
        """Turn a request's sequences into its feeds' sequences: fork, truncate, free, and append the tokens.

        A parent that several feeds name is forked for all but the last of them, which reuses it.
        """
        parents = [feed.parent for feed in feeds]
        spares = [sequence for i, sequence in enumerate(live) if i not in parents]
        placed = []
        for i, feed in enumerate(feeds):
            placed.append(self._continue(live, feed, spares, last_use=feed.parent not in parents[i + 1 :]))
        for sequence in spares:
            self.cache.free(sequence)
        return placed

    def _continue(
        self, live: list[TokenSequence], feed: Feed, spares: list[TokenSequence], *, last_use: bool
    ) -> TokenSequence:
        if feed.parent is None:
            return TokenSequence(list(feed.tokens), tree=tuple(feed.tree))
        sequence = live[feed.parent]
        keep = sequence.line if feed.keep is None else feed.keep
        if last_use:
            self.cache.truncate(sequence, keep)
        else:
            sequence = self.cache.fork(sequence, keep, spares)
        sequence.token_ids += feed.tokens
        sequence.tree = tuple(feed.tree)
        longest = self.model.config.keys_change_beyond
        if longest is not None and sequence.cached <= longest < len(sequence.token_ids):
            self.cache.forget(sequence)
        return sequence
