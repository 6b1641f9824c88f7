"""The step loop: requests in, progress out. Everything that generates is a loop over `step`.

One step admits requests that fit, runs one ragged forward per model over all that waits to be computed, and asks the
strategies of the requests whose rows are ready what to do next.

A failure belongs to the request in which it happened: a logits processor that raises, a guide that no token satisfies,
NaN in its logits. That request ends, with the error in its progress; the others go on, and `step` does not raise.

Continuous batching: Yu et al., "Orca", OSDI 2022, section 4. Requests wait in line and are admitted one by one, as soon
as the batch has places and the cache has pages for the worst that they may need: nothing that runs is ever thrown out.
Prompts are computed in chunks, so that a long one does not hold up those that decode.
"""

import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Generic, Literal, NamedTuple, Protocol, TypeVar

from .backends.base import Backend
from .batch import TokenSequence
from .cache import PrefixCache
from .decoding.continuation import FinishReason, Progress
from .decoding.strategy import Feed, Request, Rows, Speculation, State, Strategy
from .errors import CacheFullError, EngineStateError, ParameterError
from .reference.sampling import Draw
from .runner import Output, Runner


class Work(Protocol):
    """A request, as the scheduler sees it."""

    width: int
    """Sequences it may run at once"""
    pages: int
    """Pages it may need at most"""


@dataclass(frozen=True)
class Limits:
    """What a step may use."""

    max_batch_size: int
    """Sequences at once"""
    prefill_chunk: int
    """Prompt tokens in one step"""


W = TypeVar("W", bound=Work)


class Scheduler(Generic[W]):
    """First come, first served."""

    def __init__(self, limits: Limits, num_pages: int) -> None:
        self.limits = limits
        self.waiting: deque[W] = deque()
        self.running: list[W] = []
        self._places = limits.max_batch_size
        self._pages = num_pages

    def admit(self) -> list[W]:
        """Move requests from the line into the batch while they fit, in their order."""
        admitted = []
        while self.waiting and self.waiting[0].width <= self._places and self.waiting[0].pages <= self._pages:
            work = self.waiting.popleft()
            self._places -= work.width
            self._pages -= work.pages
            self.running.append(work)
            admitted.append(work)
        return admitted

    def remove(self, work: W) -> None:
        """Take out what is done or aborted, running or not."""
        if work in self.running:
            self.running.remove(work)
            self._places += work.width
            self._pages += work.pages
        else:
            self.waiting.remove(work)

    def counts(self, sequences: Iterable[tuple[TokenSequence, bool]]) -> list[int]:
        """How many pending tokens of each sequence the next forward computes.

        Args:
            sequences: each with whether it may be computed in parts

        Returns:
            All pending ones of a sequence that may not be cut; the others, in their order, share `prefill_chunk`.
        """
        budget = self.limits.prefill_chunk
        counts = []
        for sequence, divisible in sequences:
            count = min(sequence.pending, budget) if divisible else sequence.pending
            if divisible:
                budget -= count
            counts.append(count)
        return counts


@dataclass(eq=False)
class Active:
    """A request that waits or runs."""

    id: int
    request: Request
    strategy: Strategy
    width: int
    pages: int
    state: State | None = None
    live: dict[str, list[TokenSequence]] = field(default_factory=dict)
    """Each model's sequences, in the order of the last feeds to it"""
    feeds: list[Feed] = field(default_factory=list)
    fed: list[TokenSequence] = field(default_factory=list)
    """The sequence that each feed became"""
    outputs: list["Slice | None"] = field(default_factory=list)
    """What each feed gave, once it is computed"""
    started: bool = False
    """The prompt has been computed"""

    @property
    def ready(self) -> bool:
        """All that the feeds asked for is there."""
        return bool(self.outputs) and None not in self.outputs

    def keep_outputs(self) -> None:
        """Copy what is there, so that it outlives the next forward pass."""
        self.outputs = [piece and piece.copy() for piece in self.outputs]

    def divisible(self, i: int) -> bool:
        """A feed may be computed in parts when only its last row is wanted and there is no other to its model."""
        feed = self.feeds[i]
        if feed.rows != "last" or self.fed[i].pending == 1:
            return False
        return sum(other.model == feed.model for other in self.feeds) == 1


class Slice(NamedTuple):
    """The rows of a forward pass that belong to one feed."""

    output: Output
    first: int
    stop: int
    own: bool = False
    """The output is a copy, and holds nothing else"""

    def copy(self) -> "Slice":
        """The same rows in arrays of their own, which outlive the next forward pass."""
        if self.own:
            return self
        rows = slice(self.first, self.stop)
        output = Output(self.output.logits[rows].copy(), self.output.hidden[rows].copy())
        return Slice(output, 0, self.stop - self.first, own=True)


def place_of_choice(group: Sequence[Active], backend: Backend) -> Backend:
    """Where requests with the same strategy choose: on the backend that made their logits, or on its host.

    They come to the host where anything is done with them but a choice: by the strategy, or by what guides a request.
    """
    looked_at = any(active.request.guide is not None for active in group) or not group[0].strategy.on_device
    return backend.host if looked_at else backend


def gather(group: Sequence[Active], backend: Backend, place: Backend) -> Rows:
    """The outputs of several requests' feeds, end to end: made by `backend`, and where `place` looks for them."""
    slices: list[Slice] = []
    starts, wants_hidden = [0], False
    for active in group:
        for feed, piece in zip(active.feeds, active.outputs, strict=True):
            assert piece is not None
            slices.append(piece)
            starts.append(starts[-1] + piece.stop - piece.first)
            wants_hidden = wants_hidden or feed.hidden
    logits = _end_to_end(slices, "logits", backend.xp)
    hidden = backend.to_host(_end_to_end(slices, "hidden", backend.xp)) if wants_hidden else None
    return Rows(logits if place is backend else backend.to_host(logits), starts, hidden)


def _end_to_end(slices: list[Slice], part: Literal["logits", "hidden"], xp: Any) -> Any:
    """One part of the outputs; without a copy where the slices lie end to end, and itself where they are all of it."""
    for a, b in pairwise(slices):
        if a.output is not b.output or a.stop != b.first:
            return xp.concatenate([getattr(piece.output, part)[piece.first : piece.stop] for piece in slices])
    whole, first, stop = getattr(slices[0].output, part), slices[0].first, slices[-1].stop
    return whole if stop - first == len(whole) else whole[first:stop]


class PendingFeed(NamedTuple):
    """What one forward pass computes of one feed."""

    active: Active
    place: int
    """The feed's, among those of the request"""
    tokens: int
    """How many"""


@dataclass
class Stats:
    """What the steps did, and how long it took."""

    prefill_tokens: int = 0
    """Prompt tokens computed; those found in the cache are not counted"""
    prefill_seconds: float = 0.0
    decode_tokens: int = 0
    """Tokens computed after the prompts"""
    decode_seconds: float = 0.0
    steps: int = 0
    speculation: Speculation = field(default_factory=Speculation)
    """Of requests that are done, as far as they guessed"""
    decode_passes: Counter[str] = field(default_factory=Counter)
    """Forward passes of each model in steps without prompts, and their seconds"""
    decode_pass_seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))


class StepLoop:
    """Runs requests side by side, step by step."""

    def __init__(self, runners: dict[str, Runner], limits: Limits, *, prefix_cache: bool = False) -> None:
        """Args:
        runners: by the name that feeds call their model; "target" is one of them
        limits: what one step may use
        prefix_cache: keep what finished for prompts that begin the same way
        """
        self.runners = runners
        self.stats = Stats()
        pages = min((runner.cache.num_pages for runner in runners.values()), default=0)
        self.scheduler: Scheduler[Active] = Scheduler(limits, pages)
        self._prefixes = PrefixCache(runners["target"].cache) if prefix_cache else None
        self._requests: dict[int, list[Active]] = {}
        """The parts of each request that are not done yet."""
        self._progress: list[tuple[int, Progress]] = []
        self._next_id = 0

    def add(self, request: Request, strategy: Strategy) -> int:
        """Put a request in line. Independent sequences run in parts where the batch is too small for all.

        Raises:
            ParameterError: it wants more sequences at once than the batch has places.
            CacheFullError: the cache could not hold it even alone.
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
        pages = self._pages_needed(request, min(width, limit), strategy.slack)
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

    def _pages_needed(self, request: Request, width: int, slack: int = 0) -> int:
        """The prompt's full pages are shared by all sequences; every other page may be each one's own.

        Each model's cache has the same number of pages, and no model takes more of them than the target.
        """
        cache, prompt = self.runners["target"].cache, len(request.prompt_ids)
        shared = prompt // cache.page_size if request.settings.use_cache else 0
        return shared + width * (cache.pages_for(prompt + request.max_new_tokens + slack) - shared)

    @property
    def busy(self) -> bool:
        """True while any request is queued or running, or its end has not been reported."""
        return bool(self._requests or self._progress)

    def knows(self, request_id: int) -> bool:
        """True while the request is queued or running."""
        return request_id in self._requests

    def step(self) -> list[tuple[int, Progress]]:
        """Advance everything by one forward pass. Returns each request's progress under its id.

        A request that cannot go on ends for the reason "error", with the error in its progress.
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
        """As `step`, for a caller to whom all requests belong.

        Raises:
            Exception: why a request could not go on.
        """
        progress = self.step()
        for _, piece in progress:
            if piece.error is not None:
                raise piece.error
        return progress

    def abort(self, request_id: int) -> list[Progress]:
        """Drop a request and free its memory; each result that was not done ends for the reason "abort".

        One that is done or unknown is left alone.
        """
        return self._cut_off(request_id, "abort")

    def reset(self) -> None:
        """Make the books right again after a step that was broken off somewhere in the middle.

        What ran ends for the reason "error"; what waits goes on waiting. The caches forget everything.
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
        """End a request that cannot go on."""
        for part in self._requests.get(active.id, ()):
            if part.state is not None:
                part.state.error = error
        self._progress += [(active.id, p) for p in self._cut_off(active.id, "error", error)]

    def _cut_off(self, request_id: int, reason: FinishReason, error: Exception | None = None) -> list[Progress]:
        """End all parts of a request before their time. Returns what was new of them, and their ends."""
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
        """Free what a request holds; its longest sequence may serve a later prompt."""
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
        """Make the sequences that the feeds ask for."""
        active.feeds, active.fed, active.outputs = feeds, [], [None] * len(feeds)
        placed: dict[str, Iterator[TokenSequence]] = {}
        for name, runner in self.runners.items():
            mine = [feed for feed in feeds if feed.model == name]
            if mine:
                active.live[name] = runner.place(active.live.get(name, []), mine)
                placed[name] = iter(active.live[name])
        active.fed = [next(placed[feed.model]) for feed in feeds]
        if not active.request.settings.use_cache:  # the naive way: every step computes everything once more
            for feed, sequence in zip(feeds, active.fed, strict=True):
                self.runners[feed.model].cache.forget(sequence)
        self._reuse_prefix(active)

    def _reuse_prefix(self, active: Active) -> None:
        """Take over what the cache still knows of a prompt's beginning."""
        if active.started or self._prefixes is None or not active.request.settings.use_cache:
            return
        if active.feeds[0].model != "target" or active.feeds[0].rows == "all":  # rows that are kept are not computed
            return
        known = self._prefixes.match(active.fed[0].token_ids)
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
        """Run one model over what waits for it. Returns the number of tokens computed."""
        waiting = self._waiting(name)
        if not waiting:
            return 0
        limits = self.scheduler.counts((active.fed[i], active.divisible(i)) for active, i in waiting)
        work = [PendingFeed(active, i, count) for (active, i), count in zip(waiting, limits, strict=True) if count]
        places: dict[int, int] = {}  # of strategies, so that the rows of each lie end to end
        work.sort(key=lambda one: places.setdefault(id(one.active.strategy), len(places)))
        return self._compute(name, work)

    def _compute(self, name: str, work: Sequence[PendingFeed]) -> int:
        """One forward pass; where it fails one for each request, and those that fail again end.

        A pass that failed has counted no token as cached, so what it computed is computed anew.
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
        """One forward pass over what several feeds wait for. Returns the number of tokens computed.

        Raises:
            NumericalError: NaN or infinity among the logits.
        """
        sequences: list[TokenSequence] = []
        counts: list[int] = []
        rows: list[int] = []
        draws: list[Draw | None] = []
        owners: list[tuple[Active, int, int, int]] = []
        stop = 0
        for active, i, count in work:
            feed, sequence = active.feeds[i], active.fed[i]
            sequences.append(sequence)
            counts.append(count)
            stop += count
            if count == sequence.pending:
                wanted = 1 if feed.rows == "last" else len(feed.tokens)
                owners.append((active, i, len(rows), len(rows) + wanted))
                rows += range(stop - wanted, stop)
                draws += [None] * (wanted - 1)
                draws.append(feed.draw)
        output = self.runners[name].forward(sequences, counts, rows, draws)
        for active, i, first, stop in owners:
            active.outputs[i] = Slice(output, first, stop)
        for active, *_ in owners:
            if len(self.runners) > 1 or not active.ready:  # the next pass may come before the strategy is asked
                active.keep_outputs()
        return sum(counts)

    def _waiting(self, name: str) -> list[tuple[Active, int]]:
        """The feeds to one model that are not computed yet, with the request they belong to."""
        waiting = []
        for active in self.scheduler.running:
            for i, feed in enumerate(active.feeds):
                if feed.model == name and active.outputs[i] is None:
                    waiting.append((active, i))
        return waiting

    def _ask(self, ready: list[Active]) -> None:
        """Ask the strategies of all that are ready, those with the same one together."""
        groups: dict[int, list[Active]] = {}
        for active in ready:
            groups.setdefault(id(active.strategy), []).append(active)
        for group in groups.values():
            self._advance(group)

    def _advance(self, group: list[Active]) -> None:
        """Ask one strategy, and do for each of its requests what it answers."""
        states = [active.state for active in group if active.state is not None]
        for active, state in zip(group, states, strict=True):
            state.feeds = len(active.feeds)
        backend = self.runners["target"].backend
        place = place_of_choice(group, backend)
        answers: list[list[Feed]] = [[] for _ in group]
        try:
            answers = group[0].strategy.step(place, states, gather(group, backend, place))
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
