"""The step loop: takes requests and reports their progress. All generation is a loop over `step`.

One step admits requests that fit, runs one ragged forward per model over all pending tokens, and calls the strategies
of the requests whose rows are ready for their next feeds.

A failure ends only the request in which it happened: a logits processor that raises, a guide that no token satisfies,
NaN in its logits. The error is in that request's progress; the others continue, and `step` does not raise.

Continuous batching: Yu et al., "Orca", OSDI 2022, section 4. Requests are queued and admitted in order, as soon as the
batch has free slots and the cache has pages for their worst case: running requests are never preempted. Prompts are
computed in chunks, so that a long one does not delay decoding requests.
"""

import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Literal, NamedTuple

from .backends.chooser import Chooser
from .batch import TokenSequence
from .cache import PrefixCache
from .decoding.continuation import FinishReason, Progress
from .decoding.strategy import Feed, Request, Rows, State, Strategy
from .errors import CacheFullError, EngineStateError, ParameterError
from .reference.sampling import Draw
from .runner import Output, Runner
from .stats import Stats


@dataclass(frozen=True)
class Limits:
    """Limits of one step."""

    max_batch_size: int
    """Maximum number of sequences"""
    prefill_chunk: int
    """Maximum number of prompt tokens"""


@dataclass(eq=False)
class Active:
    """A queued or running request."""

    id: int
    request: Request
    strategy: Strategy
    width: int
    """Maximum number of sequences it runs at once"""
    pages: int
    """Maximum number of pages it needs"""
    state: State | None = None
    live: dict[str, list[TokenSequence]] = field(default_factory=dict)
    """Sequences by model, in the order of the last feeds to it"""
    feeds: list[Feed] = field(default_factory=list)
    fed: list[TokenSequence] = field(default_factory=list)
    """The sequence of each feed"""
    outputs: list["Slice | None"] = field(default_factory=list)
    """Output of each feed; None until it is computed"""
    started: bool = False
    """True once the prompt has been computed"""

    @property
    def ready(self) -> bool:
        """True if the outputs of all feeds are computed."""
        return bool(self.outputs) and None not in self.outputs

    def keep_outputs(self) -> None:
        """Copy the outputs so far, so that they outlive the next forward pass."""
        self.outputs = [piece and piece.copy() for piece in self.outputs]

    def divisible(self, i: int) -> bool:
        """True if feed i may be computed in chunks: only its last row is needed and it is its model's only feed."""
        feed = self.feeds[i]
        if feed.rows != "last" or self.fed[i].pending == 1:
            return False
        return sum(other.model == feed.model for other in self.feeds) == 1


class Scheduler:
    """First-come, first-served scheduler."""

    def __init__(self, limits: Limits, num_pages: int) -> None:
        self.limits = limits
        self.waiting: deque[Active] = deque()
        self.running: list[Active] = []
        self._places = limits.max_batch_size
        self._pages = num_pages

    def admit(self) -> list[Active]:
        """Move requests from the queue into the batch, in order, while they fit."""
        admitted = []
        while self.waiting and self.waiting[0].width <= self._places and self.waiting[0].pages <= self._pages:
            active = self.waiting.popleft()
            self._places -= active.width
            self._pages -= active.pages
            self.running.append(active)
            admitted.append(active)
        return admitted

    def remove(self, active: Active) -> None:
        """Remove a finished or aborted request, running or queued."""
        if active in self.running:
            self.running.remove(active)
            self._places += active.width
            self._pages += active.pages
        else:
            self.waiting.remove(active)

    def counts(self, sequences: Iterable[tuple[TokenSequence, bool]]) -> list[int]:
        """Number of pending tokens of each sequence to compute in the next forward pass.

        Args:
            sequences: each with True if it may be computed in chunks

        Returns:
            All pending tokens of a sequence that may not be split; the others, in order, share `prefill_chunk`.
        """
        budget = self.limits.prefill_chunk
        counts = []
        for sequence, divisible in sequences:
            count = min(sequence.pending, budget) if divisible else sequence.pending
            if divisible:
                budget -= count
            counts.append(count)
        return counts


class Slice(NamedTuple):
    """One feed's rows of a forward pass."""

    output: Output
    first: int
    stop: int
    own: bool = False
    """True if the output is a copy with only these rows"""

    def copy(self) -> "Slice":
        """A copy of the rows, which outlives the next forward pass."""
        if self.own:
            return self
        rows = slice(self.first, self.stop)
        output = Output(self.output.logits[rows].copy(), self.output.hidden[rows].copy())
        return Slice(output, 0, self.stop - self.first, own=True)


def place_of_choice(group: Sequence[Active], chooser: Chooser) -> Chooser:
    """The chooser of requests with the same strategy: that of the backend that made their logits, or its host.

    It is the host if the strategy or a guide does anything with the logits but choose.
    """
    looked_at = any(active.request.guide is not None for active in group) or not group[0].strategy.on_device
    return chooser.host if looked_at else chooser


def gather(group: Sequence[Active], chooser: Chooser, place: Chooser) -> Rows:
    """Concatenate the outputs of several requests' feeds, moved from `chooser` to `place`."""
    slices: list[Slice] = []
    starts, wants_hidden = [0], False
    for active in group:
        for feed, piece in zip(active.feeds, active.outputs, strict=True):
            assert piece is not None
            slices.append(piece)
            starts.append(starts[-1] + piece.stop - piece.first)
            wants_hidden = wants_hidden or feed.hidden
    logits = _end_to_end(slices, "logits", chooser.xp)
    hidden = chooser.to_host(_end_to_end(slices, "hidden", chooser.xp)) if wants_hidden else None
    return Rows(logits if place is chooser else chooser.to_host(logits), starts, hidden)


def _end_to_end(slices: list[Slice], part: Literal["logits", "hidden"], xp: Any) -> Any:
    """Concatenate one part of the outputs; without a copy if the slices are adjacent in the same output."""
    for a, b in pairwise(slices):
        if a.output is not b.output or a.stop != b.first:
            return xp.concatenate([getattr(piece.output, part)[piece.first : piece.stop] for piece in slices])
    whole, first, stop = getattr(slices[0].output, part), slices[0].first, slices[-1].stop
    return whole if stop - first == len(whole) else whole[first:stop]


class PendingFeed(NamedTuple):
    """The tokens of one feed to compute in one forward pass."""

    active: Active
    feed: int
    """Index among the feeds of the request"""
    tokens: int
    """Number of tokens to compute"""


class StepLoop:
    """Runs requests concurrently, step by step."""

    def __init__(self, runners: dict[str, Runner], limits: Limits, *, prefix_cache: bool = False) -> None:
        """Args:
        runners: by model name as in `Feed.model`; "target" is required
        limits: of one step
        prefix_cache: keep finished sequences for prompts with the same prefix
        """
        self.runners = runners
        self.stats = Stats()
        pages = min((runner.cache.num_pages for runner in runners.values()), default=0)
        self.scheduler = Scheduler(limits, pages)
        self._prefixes = PrefixCache(runners["target"].cache) if prefix_cache else None
        self._requests: dict[int, list[Active]] = {}
        """The unfinished parts of each request."""
        self._progress: list[tuple[int, Progress]] = []
        self._next_id = 0

    def add(self, request: Request, strategy: Strategy) -> int:
        """Queue a request. Independent sequences run in several parts if the batch is too small for all.

        Raises:
            ParameterError: it needs more sequences at once than the batch has slots.
            CacheFullError: it does not fit into the cache even alone.
        """
        width, limit = strategy.max_sequences, self.scheduler.limits.max_batch_size
        parts = [(request, width)]
        if width > limit and strategy.independent:
            indices = [request.indices[i : i + limit] for i in range(0, width, limit)]
            parts = [(replace(request, part=part), len(part)) for part in indices]
        elif width > limit:
            raise ParameterError(
                f"the request needs {width} sequences at once, and max_batch_size is {limit}: raise max_batch_size to "
                f"at least {width}"
            )
        pages = self._pages_needed(request, min(width, limit), strategy.extra_positions)
        available = min(runner.cache.num_pages for runner in self.runners.values())
        if pages > available:
            raise CacheFullError(
                f"the request may need {pages} pages of the K/V cache, which has {available}: "
                "raise cache_bytes, or lower max_new_tokens or the number of sequences"
            )
        self._next_id += 1
        actives = [Active(self._next_id, part, strategy, width, pages) for part, width in parts]
        self._requests[self._next_id] = actives
        self.scheduler.waiting += actives
        return self._next_id

    def _pages_needed(self, request: Request, width: int, extra_positions: int = 0) -> int:
        """Maximum number of pages of a request: its sequences share the prompt's full pages; all others may differ.

        They share none where each may be computed anew. Each model's cache has the same number of pages, and no model
        uses more of them than the target.
        """
        cache, prompt = self.runners["target"].cache, len(request.prompt_ids)
        recomputed = any(runner.model.config.keys_change_beyond is not None for runner in self.runners.values())
        shared = prompt // cache.page_size if request.settings.use_cache and not recomputed else 0
        return shared + width * (cache.pages_for(prompt + request.max_new_tokens + extra_positions) - shared)

    @property
    def busy(self) -> bool:
        """True while any request is queued or running, or its end has not been reported."""
        return bool(self._requests or self._progress)

    def knows(self, request_id: int) -> bool:
        """True while the request is queued or running."""
        return request_id in self._requests

    def step(self) -> list[tuple[int, Progress]]:
        """Advance all requests by one forward pass. Returns (request id, progress) pairs.

        A request that fails ends with the reason "error" and the error in its progress.
        """
        for active in self.scheduler.admit():
            self._begin(active)
        began = time.perf_counter()
        prompts = any(not active.started for active in self.scheduler.running)
        tokens = sum(self._timed_forward(name, prompts) for name in self.runners)
        self._ask([active for active in self.scheduler.running if active.ready])
        seconds = time.perf_counter() - began
        self.stats.steps += 1
        if prompts:
            self.stats.prefill_tokens += tokens
            self.stats.prefill_seconds += seconds
        else:
            self.stats.decode_tokens += tokens
            self.stats.decode_seconds += seconds
        progress, self._progress = self._progress, []
        return progress

    def step_or_raise(self) -> list[tuple[int, Progress]]:
        """As `step`, but raise a request's error, for callers that own all requests.

        Raises:
            Exception: the error that ended a request.
        """
        progress = self.step()
        for _, piece in progress:
            if piece.error is not None:
                raise piece.error
        return progress

    def abort(self, request_id: int) -> list[Progress]:
        """Abort a request and free its memory; each unfinished result ends with the reason "abort".

        A finished or unknown request is ignored.
        """
        return self._cut_off(request_id, "abort")

    def reset(self) -> None:
        """Restore a consistent state after a step was interrupted.

        Running requests end with the reason "error"; queued ones stay queued. The caches are cleared.
        """
        for runner in self.runners.values():
            runner.cache.clear()
        if self._prefixes is not None:
            self._prefixes = PrefixCache(self.runners["target"].cache)
        requests, waiting = self._requests, set(map(id, self.scheduler.waiting))
        self._requests = {}
        pages = min((runner.cache.num_pages for runner in self.runners.values()), default=0)
        self.scheduler = Scheduler(self.scheduler.limits, pages)
        error = EngineStateError("the step that computed this request was interrupted")
        for request_id, actives in requests.items():
            if all(id(active) in waiting for active in actives):
                self._requests[request_id] = actives
                self.scheduler.waiting += actives
            else:
                ends = (Progress(i, finish_reason="error", error=error) for a in actives for i in a.request.indices)
                self._progress += ((request_id, end) for end in ends)

    # --- a request's beginning and end ---------------------------------------------------------------------------

    def _begin(self, active: Active) -> None:
        try:
            active.state, feeds = active.strategy.begin(active.request)
        except Exception as error:
            self._fail(active, error)
        else:
            self._place(active, feeds)

    def _fail(self, active: Active, error: Exception) -> None:
        """End a request with an error."""
        for part in self._requests.get(active.id, ()):
            if part.state is not None:
                part.state.error = error
        self._progress += [(active.id, p) for p in self._cut_off(active.id, "error", error)]

    def _cut_off(self, request_id: int, reason: FinishReason, error: Exception | None = None) -> list[Progress]:
        """End all parts of a request early. Returns their last progress."""
        progress: list[Progress] = []
        for active in self._requests.get(request_id, ()):
            results = [] if active.state is None else active.state.results
            for continuation in results:
                if continuation.finish_reason is None:
                    continuation.cut_off(reason)
            told = [p for continuation in results if (p := continuation.take())]
            progress += [replace(p, error=error) if p.finish_reason == "error" else p for p in told]
            missing = set(active.request.indices) - {continuation.index for continuation in results}
            progress += [Progress(index, finish_reason=reason, error=error) for index in sorted(missing)]
        for active in list(self._requests.get(request_id, ())):
            self._end(active)
        return progress

    def _end(self, active: Active) -> None:
        """Free a finished request's sequences; its longest one goes to the prefix cache."""
        if active.state is not None and active.state.speculation is not None:
            self.stats.speculation.add(active.state.speculation)
        failed = active.state is not None and active.state.error is not None
        for name, live in active.live.items():
            if self._prefixes is not None and name == "target" and live and not failed:
                self._prefixes.keep(max(live, key=lambda sequence: sequence.cached))
            for sequence in live:
                self.runners[name].cache.free(sequence)
        self.scheduler.remove(active)
        parts = self._requests[active.id]
        parts.remove(active)
        if not parts:
            del self._requests[active.id]

    def _place(self, active: Active, feeds: list[Feed]) -> None:
        """Make the sequences of the feeds."""
        active.feeds, active.fed, active.outputs = feeds, [], [None] * len(feeds)
        placed: dict[str, Iterator[TokenSequence]] = {}
        for name, runner in self.runners.items():
            mine = [feed for feed in feeds if feed.model == name]
            if mine:
                active.live[name] = runner.place(active.live.get(name, []), mine)
                for sequence in active.live[name] if name == "target" else ():
                    sequence.adapter = active.request.settings.lora
                placed[name] = iter(active.live[name])
        active.fed = [next(placed[feed.model]) for feed in feeds]
        if not active.request.settings.use_cache:  # the naive way: every step recomputes everything
            for feed, sequence in zip(feeds, active.fed, strict=True):
                self.runners[feed.model].cache.forget(sequence)
        self._reuse_prefix(active)

    def _reuse_prefix(self, active: Active) -> None:
        """Reuse the longest cached prefix of a prompt."""
        if active.started or self._prefixes is None or not active.request.settings.use_cache:
            return
        if active.feeds[0].model != "target" or active.feeds[0].rows == "all":  # cached positions have no logits
            return
        known = self._prefixes.match(active.fed[0].token_ids, active.fed[0].adapter)
        if known is not None:
            active.fed[0].pages, active.fed[0].cached = known.pages, known.cached

    def _timed_forward(self, name: str, prompts: bool) -> int:
        began = time.perf_counter()
        tokens = self._forward(name)
        if tokens and not prompts:
            self.stats.decode_passes[name] += 1
            self.stats.decode_pass_seconds[name] += time.perf_counter() - began
        return tokens

    def _forward(self, name: str) -> int:
        """Run one model over its pending tokens. Returns the number of tokens computed."""
        waiting = [
            (active, i)
            for active in self.scheduler.running
            for i, feed in enumerate(active.feeds)
            if feed.model == name and active.outputs[i] is None
        ]
        if not waiting:
            return 0
        counts = self.scheduler.counts((active.fed[i], active.divisible(i)) for active, i in waiting)
        work = [PendingFeed(active, i, count) for (active, i), count in zip(waiting, counts, strict=True) if count]
        order: dict[int, int] = {}  # of strategies, so that the rows of each are adjacent
        work.sort(key=lambda one: order.setdefault(id(one.active.strategy), len(order)))
        return self._compute(name, work)

    def _compute(self, name: str, work: Sequence[PendingFeed]) -> int:
        """Run one forward pass; if it fails, one per request, and requests that fail again end.

        A failed pass marks no token as cached, so its tokens are recomputed.
        """
        try:
            return self._pass(name, work)
        except Exception as error:
            requests = dict.fromkeys(one.active.id for one in work)
            if len(requests) == 1:
                self._fail(work[0].active, error)
                return 0
            tokens = 0
            for request_id in requests:
                own = [one for one in work if one.active.id == request_id]
                tokens += self._compute(name, own)
                for one in own:
                    one.active.keep_outputs()
            return tokens

    def _pass(self, name: str, work: Sequence[PendingFeed]) -> int:
        """Run one forward pass over the pending tokens of several feeds. Returns the number of tokens computed.

        Raises:
            NumericalError: NaN or infinity among the logits.
        """
        rows: list[int] = []
        draws: list[Draw | None] = []
        completed: list[tuple[Active, int, slice]] = []
        stop = 0
        for active, i, count in work:
            feed = active.feeds[i]
            stop += count
            if count == active.fed[i].pending:
                wanted = 1 if feed.rows == "last" else len(feed.tokens)
                completed.append((active, i, slice(len(rows), len(rows) + wanted)))
                rows += range(stop - wanted, stop)
                draws += [None] * (wanted - 1) + [feed.draw]
        sequences, counts = [one.active.fed[one.feed] for one in work], [one.tokens for one in work]
        output = self.runners[name].forward(sequences, counts, rows, draws)
        for active, i, part in completed:
            active.outputs[i] = Slice(output, part.start, part.stop)
        for active, _, _ in completed:
            if len(self.runners) > 1 or not active.ready:  # the next pass may run before the strategy is called
                active.keep_outputs()
        return stop

    def _ask(self, ready: list[Active]) -> None:
        """Advance the ready requests, grouped by strategy."""
        groups: dict[int, list[Active]] = {}
        for active in ready:
            groups.setdefault(id(active.strategy), []).append(active)
        for group in groups.values():
            self._advance(group)

    def _advance(self, group: list[Active]) -> None:
        """Call a strategy's `step` and apply the feeds that it returns for each request."""
        states = [active.state for active in group if active.state is not None]
        for active, state in zip(group, states, strict=True):
            state.feeds = len(active.feeds)
        chooser = self.runners["target"].backend.chooser
        place = place_of_choice(group, chooser)
        answers: list[list[Feed]] = [[] for _ in group]
        try:
            answers = group[0].strategy.step(place, states, gather(group, chooser, place))
        except Exception as error:
            for state in states:
                state.error = state.error or error
        for active, state, feeds in zip(group, states, answers, strict=True):
            if active.id not in self._requests:  # another part of the request has failed
                continue
            active.started = True
            if state.error is not None:
                self._fail(active, state.error)
                continue
            self._progress += [(active.id, p) for c in state.results if (p := c.take())]
            if feeds:
                self._place(active, feeds)
            else:
                self._end(active)
