"""A rank's part of each forward pass. Rank 0 leads: it tells the others what to compute; the others follow."""

import signal
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..backends.attention_maps import AttentionRecorder
from ..backends.low_rank import AdapterWeights
from ..backends.operations import Backend
from ..backends.pages import Pages
from ..batch import Batch
from ..cache import PagedCache, new_cache
from ..cache.states import new_states
from ..errors import RankError, TaskError
from ..models.base import Model
from ..models.heads import without_head
from ..models.parameters import vocabulary_share
from ..reference.sampling import Draw
from ..runner.hooked_backend import View
from ..runner.runner import Output, Runner
from .hooks import RankHooks, looks_of, views_of
from .logits import RankSampler, RemoteRows, largest, wanted_of
from .messages import (
    CopyPositions,
    Encode,
    End,
    Fetch,
    FreePages,
    Message,
    MicroBatch,
    NewPages,
    Pass,
    Task,
    packed,
    unpacked,
)
from .micro_batches import micro_batches
from .ranks import Ranks


class Part:
    """A rank's share of the model, its backend and its place."""

    def __init__(
        self, ranks: Ranks, model: Model, backend: Backend, adapters: Mapping[str, AdapterWeights] | None = None
    ) -> None:
        self.ranks, self.model, self.backend, self.adapters = ranks, model, backend, adapters or {}
        V, last = model.config.vocab_size, ranks.last
        self.hooks = RankHooks(model, ranks)
        self.shares = [vocabulary_share(V, i, len(last)) for i in range(len(last))]
        """First and stop of the logits of each rank of the last stage"""

    def logits_of(self, i: int) -> int:
        """Number of logits of the last stage's rank number i."""
        return self.shares[i][1] - self.shares[i][0]

    def report(self, output: Output, best: Sequence[int], *, finite: bool) -> NDArray[np.float64]:
        """The largest logits of this rank, after a row that says whether all are finite. [1 + sum of best, 2]"""
        first = self.shares[self.ranks.group.rank][0]
        largest_logits = largest(output.logits, best, first, self.backend.sampler)
        return np.concatenate([[[finite, 0]], largest_logits])


class RankRunner(Runner):
    """A runner whose passes are a rank's part: hidden states come from the stage before, and go to the next one."""

    has_exits = False

    def __init__(self, part: Part, cache: PagedCache, task: Task = "tokens") -> None:
        model = without_head(part.model) if task == "states" else part.model
        super().__init__(model, part.backend, cache, part.ranks.layers, part.adapters, part.hooks)
        self.part, self.task = part, task
        self._received: dict[int, Any] = {}
        """Memory for the hidden states that small passes receive, by their number of tokens"""
        if part.backend.memory.stage_tokens:
            self.replays = True

    def compute(self, backend: Backend, parts: Sequence[MicroBatch], views: Sequence[View] = ()) -> tuple[Output, bool]:
        """This rank's part of a pass, one micro-batch after the other, and whether its results are finite."""
        if len(parts) == 1:
            with self.part.hooks.looking(*parts[0], views):
                return self._compute(backend, *parts[0], views)
        logits, hidden, all_finite = [], [], True
        for micro_batch in parts:
            output, finite = self._compute(backend, *micro_batch)
            all_finite = all_finite and finite
            if output.logits is not None:  # the next part takes their memory
                logits.append(output.logits.copy())
                hidden.append(output.hidden.copy())
        if not logits:
            return Output(None, None), all_finite
        return Output(backend.xp.concatenate(logits), backend.xp.concatenate(hidden)), all_finite

    def _compute(
        self, backend: Backend, batch: Batch, rows: Sequence[int], views: Sequence[View] = ()
    ) -> tuple[Output, bool]:
        ranks, x = self.part.ranks, None
        if not ranks.is_first:
            x = self._hidden(backend, batch.num_tokens)
            ranks.world.receive(x, ranks.before)
        output, finite = super()._run(backend, batch, rows, (), x, views)
        if not ranks.is_last:
            ranks.world.send(output.hidden, ranks.after, "stage")
        return output, finite

    def _hidden(self, backend: Backend, tokens: int) -> Any:
        """Memory for what the stage before sends. -> [T, E]"""
        if (buffer := self._received.get(tokens)) is not None:
            return buffer
        x = backend.xp.empty((tokens, self.model.config.hidden_size), backend.memory.activations.dtype)
        if tokens <= backend.memory.stage_tokens:
            self._received[tokens] = x
        return x


# --- rank 0 ----------------------------------------------------------------------------------------------------------


class Leader:
    """Tells the other ranks what to do, and receives their results."""

    def __init__(self, part: Part) -> None:
        self.part, self.world = part, part.ranks.world
        self.pending: list[Message] = []
        """Messages that the others need before the next pass"""
        self.latest: object = None
        """The results of the last pass"""
        self._caches = 0
        self.close = weakref.finalize(self, _end, part.ranks)
        """End the other ranks: when the engine is closed, dropped, or the program ends"""
        part.backend.sampler = RankSampler(part.backend.sampler)

    def new_cache(self, cache: PagedCache, task: Task) -> int:
        """Announce a cache. Returns its number."""
        self._caches += 1
        sizes = cache.num_pages, cache.page_size
        self.pending.append(NewPages(self._caches, *sizes, cache.prefix_cache, task, cache.num_states))
        return self._caches

    def tell(self, message: Message) -> None:
        """Send a message, and what was pending before it."""
        before = self.pending[:]
        del self.pending[: len(before)]
        self.world.tell(packed([*before, message]))

    @contextmanager
    def leading(self) -> Iterator[None]:
        """A block in which the other ranks wait for this one: an error in it ends them all."""
        try:
            yield
        except RankError:
            raise
        except BaseException as error:
            self.world.abort(f"{type(error).__name__}: {error}")


def _end(ranks: Ranks) -> None:
    ranks.world.tell(packed([End()]))
    ranks.close()


class MirroredPages:
    """Pages whose copies the other ranks make too."""

    def __init__(self, pages: Pages, leader: Leader, number: int) -> None:
        self._pages, self._leader, self._number = pages, leader, number
        weakref.finalize(self, leader.pending.append, FreePages(number)).atexit = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pages, name)

    def copy(self, source: int, target: int, positions: slice) -> None:
        """Copy some positions of a page to another, here and, before their next pass, on the other ranks."""
        self._leader.pending.append(CopyPositions(self._number, source, target, positions.start, positions.stop))
        self._pages.copy(source, target, positions)


class LeadingRunner(RankRunner):
    """The runner of rank 0, which has the books of the cache."""

    def __init__(self, leader: Leader, cache: PagedCache, task: Task = "tokens") -> None:
        super().__init__(leader.part, cache, task)
        self.leader = leader
        self._number = leader.new_cache(cache, task)
        cache.storage = MirroredPages(cache.storage, leader, self._number)  # type: ignore[assignment]

    def apart(self, cache: PagedCache, backend: Backend | None = None) -> "Runner":
        """A runner of all ranks with another cache; the backend is this rank's alone."""
        runner = LeadingRunner(self.leader, cache)
        runner.backend = backend or self.backend
        return runner

    def trim(self) -> None:
        """Give memory of the cache back to the system, of this rank alone; the passes that all ranks repeat stay."""
        self.cache.trim()

    def over_texts(self, pages: int, *, head: bool) -> "Runner":
        """A runner of whole texts, of all ranks."""
        config = self.part.model.config
        if head and config.fills_masks:
            raise TaskError("several processes fill no masks: load the model in one")
        if config.encoder_layers:
            raise TaskError("several processes classify no texts with an encoder-decoder: load the model in one")
        shared = config.bidirectional
        cache = new_cache(PagedCache, config, self.backend, pages, layers=self.layers, shared=shared)
        return LeadingRunner(self.leader, cache, "labels" if head else "states")

    def head_of(self, states: NDArray[np.float32]) -> NDArray[np.float32]:
        """As `Runner.head_of`, on this rank alone, which has the whole head if it is of the last stage."""
        if not self.part.ranks.is_last:
            raise TaskError("stages of layers compute no labels of the mean of all tokens: share the model otherwise")
        return super().head_of(states)

    def encode(self, backend: Backend, batch: Batch, views: Sequence[View] = ()) -> bool:
        """Run the encoder on all ranks, which have the same result."""
        with self.leader.leading():
            self.leader.tell(Encode(self._number, batch, looks_of(batch, views)))
            finite = super().encode(backend, batch, views)
        self.part.hooks.take_error()
        return finite

    def _run_texts(
        self, backend: Backend, batch: Batch, rows: Sequence[int], views: Sequence[View]
    ) -> tuple[Output, bool]:
        """A pass over whole texts, whose results one rank of the last stage sends if this is another stage."""
        ranks = self.part.ranks
        parallel = replace(ranks.parallel, micro_batches=1) if views else ranks.parallel
        parts, order = micro_batches(batch, rows, parallel, causal=not self.model.config.bidirectional)
        with self.leader.leading():
            self.leader.tell(Pass(self._number, parts, (), whole=False, looks=looks_of(batch, views)))
            self.leader.latest = None
            output, finite = self.compute(backend, parts, views)
            results = output.logits
            if not ranks.is_last:
                width = len(self.model.config.labels) if self.task == "labels" else ranks.width  # of a text or token
                results = np.empty((len(order), width), np.float32)
                ranks.world.receive(results, ranks.last[0])
                finite = bool(np.isfinite(results).all())
        self.part.hooks.take_error()
        if len(parts) > 1:
            results = results[np.argsort(order, kind="stable")]
        return Output(results, results), finite

    def _run(
        self,
        backend: Backend,
        batch: Batch,
        rows: Any,
        draws: Sequence[Draw | None] = (),
        x: Any = None,
        views: Sequence[View] = (),
        exits: Any = None,
    ) -> tuple[Output, bool]:
        if self.task != "tokens":
            return self._run_texts(backend, batch, [int(row) for row in rows], views)
        parallel, recorder = self.part.ranks.parallel, backend if isinstance(backend, AttentionRecorder) else None
        if recorder is not None or views:
            parallel = replace(parallel, micro_batches=1)  # a map is of all tokens, a hook sees all rows of a text
        parts, order = micro_batches(batch, [int(row) for row in rows], parallel)
        best, whole = wanted_of(draws, len(order))
        maps = () if recorder is None else tuple(sorted(recorder.wanted))
        with self.leader.leading():
            looks = looks_of(batch, views)
            self.leader.tell(Pass(self._number, parts, tuple(best[row] for row in order), whole, maps, looks))
            output, finite = self.compute(backend, parts, views)
            results = Results(self.leader, output, [best[row] for row in order], finite=finite)
            places = np.argsort(order, kind="stable")  # of each row among all parts' rows
            logits: Any = RemoteRows(results, "logits", places, self.model.config.vocab_size)
            if whole:
                logits = results.collect("logits", len(order))[places]
            if recorder is not None:
                self._collect_maps(recorder, batch)
        self.part.hooks.take_error()
        hidden = output.hidden
        if not self.part.ranks.is_last:
            hidden = RemoteRows(results, "hidden", places, self.part.ranks.width)
        return Output(logits, hidden), results.finite

    def _collect_maps(self, recorder: AttentionRecorder, batch: Batch) -> None:
        """Complete the attention maps of this rank's heads, and add the maps of other stages' layers."""
        ranks, [span] = self.part.ranks, batch.spans
        shape = span.stop - span.start, span.context_len
        for layer in sorted(recorder.wanted):
            stage = next(i for i, share in enumerate(ranks.weights) if layer in share.layers) // ranks.parallel.tensor
            parts = []
            for source in ranks.parallel.ranks_of(stage):
                if source != ranks.rank:
                    parts.append(np.empty((self.part.model.config.num_heads, *shape), np.float32))
                    ranks.world.receive(parts[-1], source)
                else:
                    parts.append(recorder.maps[layer])
                if source != ranks.rank and layer not in recorder.masked:
                    masked = np.empty(shape, np.uint8)
                    ranks.world.receive(masked, source)
                    recorder.masked[layer] = masked.astype(np.bool_)
            recorder.maps[layer] = np.concatenate(parts)  # [H / ranks, T, S] each -> [H, T, S]


class Results:
    """The results of the last pass: what this rank has, and what the ranks of the last stage have sent."""

    def __init__(self, leader: Leader, own: Output, best: Sequence[int], *, finite: bool) -> None:
        part, world = leader.part, leader.world
        self._leader, self._own, self._fetched = leader, own, dict[str, NDArray[np.float32]]()
        reports = np.empty((len(part.ranks.last), 1 + sum(best), 2))  # [ranks, 1 + sum of best, 2]
        for i, source in enumerate(part.ranks.last):
            if source == world.rank:
                reports[i] = part.report(own, best, finite=finite)
            else:
                world.receive(reports[i], source)
        self.finite = finite and bool(reports[:, 0, 0].all())
        self._best = reports[:, 1:]
        self._starts = np.cumsum([0, *best])
        self._rows = len(best)
        leader.latest = self

    def best(self, row: int) -> NDArray[np.float64]:
        """As `Source`."""
        return self._best[:, self._starts[row] : self._starts[row + 1]]

    def fetch(self, what: str, rows: Sequence[int]) -> NDArray[np.float32]:
        """As `Source`: all rows at once, when the first are looked at."""
        if what not in self._fetched:
            assert self._leader.latest is self
            with self._leader.leading():
                self._leader.tell(Fetch(what, tuple(range(self._rows))))
                self._fetched[what] = self.collect(what, self._rows)
        return self._fetched[what][list(rows)]

    def collect(self, what: str, rows: int) -> NDArray[np.float32]:
        """The logits or hidden states of so many rows, as the ranks of the last stage send them."""
        part, world = self._leader.part, self._leader.world
        if what == "hidden":
            out = np.empty((rows, part.ranks.width), np.float32)
            world.receive(out, part.ranks.last[0])
            return out
        columns = []
        for i, source in enumerate(part.ranks.last):
            if source == world.rank:
                columns.append(part.backend.sampler.to_host(self._own.logits))
            else:
                columns.append(np.empty((rows, part.logits_of(i)), np.float32))
                world.receive(columns[-1], source)
        return np.concatenate(columns, axis=1)  # [R, V / ranks] each -> [R, V]


# --- the other ranks -------------------------------------------------------------------------------------------------


class MirrorCache(PagedCache):
    """The pages of a cache whose books rank 0 keeps, and its states."""

    has_states = True

    def __init__(self, part: Part, message: NewPages) -> None:
        config = part.model.config
        shared = config.bidirectional and message.task != "tokens"
        super().__init__(config, part.backend, message.pages, message.page_size, part.ranks.layers, shared)
        self.prefix_cache = message.prefix_cache
        self.storage.states = new_states(config, part.backend, message.states, part.ranks.layers)


class Follower:
    """Computes a rank's part of what rank 0 runs."""

    def __init__(self, part: Part) -> None:
        self.part, self.world = part, part.ranks.world
        self._runners: dict[int, RankRunner] = {}
        self._output = Output(None, None)

    def follow(self) -> None:
        """Compute until rank 0 has closed its engine. Ctrl-C is left to rank 0.

        Raises:
            RankError: a rank has failed.
        """
        main = threading.current_thread() is threading.main_thread()
        handler = signal.signal(signal.SIGINT, signal.SIG_IGN) if main else None
        try:
            while self._obey_all(unpacked(self.world.listen())):
                pass
        except RankError:
            raise
        except BaseException as error:
            self.world.abort(f"{type(error).__name__}: {error}")
        finally:
            if main:
                signal.signal(signal.SIGINT, handler)

    def _obey_all(self, messages: Sequence[Message]) -> bool:
        """Do what messages say. Returns whether there will be others."""
        for message in messages:
            self._obey(message)
        return not isinstance(messages[-1], End)

    def _obey(self, message: Message) -> None:
        match message:
            case NewPages():
                cache = MirrorCache(self.part, message)
                self._runners[message.number] = RankRunner(self.part, cache, message.task)
            case Encode(number, batch, looks):
                self._runners[number].encode(self.part.backend, batch, views_of(batch, looks))
            case FreePages():
                del self._runners[message.number]
            case CopyPositions(number, source, target, first, stop):
                self._runners[number].cache.storage.copy(source, target, slice(first, stop))
            case Pass(number, parts, best, whole, maps, looks):
                recorder = AttentionRecorder(self.part.backend, maps)
                backend = recorder if maps else self.part.backend
                runner = self._runners[number]
                self._output, finite = runner.compute(backend, parts, views_of(parts[0].batch, looks))
                if runner.task != "tokens":
                    self._send_texts()
                elif self.part.ranks.is_last:
                    self.world.send(self.part.report(self._output, best, finite=finite), 0, "logits")
                if whole:
                    self._send("logits", rows=range(len(best)))
                self._send_maps(recorder)
            case Fetch(what, rows):
                self._send(what, rows)

    def _send(self, what: str, rows: Sequence[int]) -> None:
        """Send rows of the last results to rank 0; hidden states are sent by one rank."""
        ranks = self.part.ranks
        if ranks.is_last and (what == "logits" or ranks.group.rank == 0):
            stored = self._output.logits if what == "logits" else self._output.hidden
            self.world.send(self.part.backend.sampler.to_host(stored)[list(rows)], 0, "logits")

    def _send_texts(self) -> None:
        """Send the results of a pass over whole texts to rank 0, if its stage does not have them."""
        ranks = self.part.ranks
        if ranks.is_last and not ranks.is_first and ranks.group.rank == 0:
            rows = self.part.backend.sampler.to_host(self._output.logits)
            self.world.send(np.ascontiguousarray(rows, np.float32), 0, "logits")

    def _send_maps(self, recorder: AttentionRecorder) -> None:
        """Send the attention maps of this rank's heads to rank 0; what a layer's mask hides is sent by one rank."""
        for layer in sorted(recorder.maps):
            self.world.send(np.ascontiguousarray(recorder.maps[layer], np.float32), 0, "attention")
            if not self.part.ranks.is_first and self.part.ranks.group.rank == 0:
                self.world.send(recorder.masked[layer].astype(np.uint8), 0, "attention")
