"""The step loop: takes requests and reports their events. All generation is a loop over `step`.

One step admits requests that fit, runs one ragged forward pass per model over all pending tokens, and asks the
strategies of the requests whose rows are ready for their next feeds.

A failure ends only the request in which it happened: a logits processor that raises, a guide that no token satisfies,
NaN in its logits. The error is in that request's events; the others continue, and `step` does not raise.

Continuous batching: Yu et al., "Orca", OSDI 2022, section 4. Which requests run, and how many tokens of each, is chosen
by the scheduler (`scheduler.py`). On a GPU a step may be launched before the one before it is read (`async_decode.py`).
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import count, pairwise
from typing import Any, Literal

from ..backends import compile_seconds, working_time
from ..backends.token_sampler import TokenSampler
from ..batch import TokenSequence
from ..decoding.event import Event, FinishReason
from ..decoding.prompt_scores import PromptScores
from ..decoding.stats import Stats
from ..decoding.strategy import Feed, Request, Rows
from ..encoder_input import EncoderInput
from ..errors import CacheFullError, EngineStateError, ParameterError
from ..reference.sampling import Draw
from ..runner.runner import Runner, Slice
from .async_decode import DEVICE_ERRORS, PendingStep, can_run_ahead, hand_back, launch_first, launch_next, take_tokens
from .load import Load
from .run import Chunk, Run
from .scheduler import Limits, Scheduler


class StepLoop:
    """Runs requests concurrently, step by step."""

    def __init__(self, runners: dict[str, Runner], limits: Limits) -> None:
        """Begin without requests.

        Args:
            runners: by model name as in `Feed.model`; "target" is required
            limits: limits of one step
        """
        self.runners = runners
        self.stats = Stats()
        if any(runner.model.config.keys_follow_length for runner in runners.values()):
            limits = replace(limits, headroom=None)  # keys that are computed again would be others
        self.scheduler = self._new_scheduler(limits)
        self._runs: dict[int, list[Run]] = {}
        """The unfinished parts of each request"""
        self._events: list[Event] = []
        self._deadlines: dict[int, float] = {}
        self._underway: tuple[int, ...] = ()
        """Requests that the step under way began with"""
        self._ids, self._arrivals = count(1), count()
        self._runs_ahead = can_run_ahead([*runners.values()])
        self._pending: PendingStep | None = None
        """A decode step that was launched ahead, and whose tokens the host has not read"""

    def _new_scheduler(self, limits: Limits) -> Scheduler:
        return Scheduler(limits, {name: runner.cache for name, runner in self.runners.items()}, self.stats)

    # --- a step --------------------------------------------------------------------------------------------------

    def step(self) -> list[Event]:
        """Advance all requests by one forward pass. Returns their events.

        A request that fails ends with the reason "error" and the error in its event.
        """
        self.advance()
        return self.take_events()

    def advance(self) -> None:
        """As `step`; `take_events` returns what it would. After an interruption inside, `reset` must follow."""
        self._underway = (*self._runs,)
        self._end_overdue()
        admitted = self._admit()
        began, compiled = working_time(), compile_seconds()
        tokens, prompts = self._take_pending(follow=not admitted), False
        if tokens is None:
            prompts = any(not run.started or run.recompute for run in self.scheduler.running)
            tokens = sum([self._forward(name, prompts) for name in self.runners])
            self._choose([run for run in self.scheduler.running if run.ready])
        if self._runs_ahead and self._pending is None and not self.scheduler.may_admit:
            self._pending = launch_first(self.runners["target"], self.scheduler.running)
        self.stats.count_step(tokens, working_time() - began, compile_seconds() - compiled, prompts=prompts)

    def step_or_raise(self) -> list[Event]:
        """As `step`, but raise a request's error, for callers that own all requests.

        Raises:
            Exception: the error that ended a request.
        """
        events = self.step()
        for event in events:
            if event.error is not None:
                raise event.error
        return events

    def take_events(self) -> list[Event]:
        """The events of requests since the last call, which forgets them."""
        events, self._events, self._underway = self._events, [], ()
        return events

    def _admit(self) -> list[Run]:
        """Begin the requests that the scheduler admits. Returns them."""
        admitted = self.scheduler.admit()
        for run in admitted:
            if run.state is None:
                self._begin(run)
        return admitted

    def _take_pending(self, *, follow: bool) -> int | None:
        """Read the tokens of the step that was launched ahead. Returns the number of sequences that it advanced.

        None: no step was, or it has to be computed again, in the ordinary way.

        Args:
            follow: launch the next step before this one is read
        """
        pending, self._pending = self._pending, None
        if pending is None:
            return None
        began, runner = working_time(), self.runners["target"]
        following = launch_next(pending, runner) if follow else None
        try:
            tokens = pending.read()
        except DEVICE_ERRORS:  # the ordinary way will meet it again, and tell the requests
            tokens = None
        if tokens is None:
            hand_back(pending)
            return None
        taken = take_tokens(pending, tokens.tolist(), runner.cache)
        self._events += (run.addressed(event) for run, event in taken.events)
        for run, error in taken.failed.items():
            self._fail(run, error)
        for run, sequences in taken.ended.items():
            self._end_sequences(run, sequences)
        if following is None:
            hand_back(pending)
        self._pending = following
        self.stats.count_pass("target", working_time() - began)
        return taken.advanced

    def _forward(self, name: str, prompts: bool) -> int:
        """Run one model over its pending tokens. Returns their number.

        Args:
            name: the model's name
            prompts: the step computes prompts, or recomputes
        """
        began = working_time()
        chunks = self.scheduler.schedule(name)
        if not chunks:
            return 0
        order: dict[object, int] = {}  # of strategies: rows of one call are adjacent, in the order in which they run

        def place(chunk: Chunk) -> tuple[int, int, int]:
            run = chunk.run
            return order.setdefault(run.batch_key, len(order)), run.request.priority, run.order

        chunks.sort(key=place)
        tokens = self._compute(name, chunks)
        if tokens and not prompts:
            self.stats.count_pass(name, working_time() - began)
        return tokens

    def _compute(self, name: str, chunks: Sequence[Chunk]) -> int:
        """Run one forward pass; if it fails, one per request, and requests that fail again end.

        A failed pass marks no token as cached, so its tokens are recomputed.
        """
        try:
            tokens = self._pass(name, chunks)
        except Exception as error:
            by_request: dict[int, list[Chunk]] = {}
            for chunk in chunks:
                by_request.setdefault(chunk.run.id, []).append(chunk)
            if len(by_request) == 1:
                self._fail(chunks[0].run, error)
                return 0
            tokens = 0
            for own in by_request.values():
                tokens += self._compute(name, own)
                for chunk in own:
                    chunk.run.keep_outputs()
            return tokens
        for chunk in chunks:
            if chunk.run.probe is not None and chunk.run.probe.error is not None:
                self._fail(chunk.run, chunk.run.probe.error)
        return tokens

    def _pass(self, name: str, chunks: Sequence[Chunk]) -> int:
        """Run one forward pass over the pending tokens of several feeds. Returns the number of tokens computed.

        Raises:
            NumericalError: NaN or infinity among the logits.
        """
        rows: list[int] = []
        draws: list[Draw | None] = []
        completed: list[tuple[Run, int, slice]] = []
        scored: list[tuple[PromptScores, slice]] = []
        stop = 0
        for run, i, sequence, tokens, _ in chunks:
            if run.cached_tokens is None and name == "target":
                run.cached_tokens = sequence.cached
            feed = None if i is None else run.feeds[i]
            if run.prompt_scores is not None and (positions := Chunk(run, i, sequence, tokens).scored):
                scored.append((run.prompt_scores, slice(len(rows), len(rows) + len(positions))))
                if feed is not None and feed.rows == "last":  # else they are among the feed's own
                    first = stop - sequence.cached  # row of position 0
                    rows += range(first + positions.start, first + positions.stop)
                    draws += [None] * len(positions)
            stop += tokens
            if i is not None and feed is not None and tokens == sequence.pending:
                height = 1 if feed.rows == "last" else len(feed.tokens)
                completed.append((run, i, slice(len(rows), len(rows) + height)))
                rows += range(stop - height, stop)
                draws += [None] * (height - 1) + [feed.draw]
        sequences, counts = [chunk.sequence for chunk in chunks], [chunk.tokens for chunk in chunks]
        layers = {rows[its.stop - 1]: own for run, i, its in completed if (own := run.feeds[i].exits)}
        exits = _early_exits(layers) if layers else None
        more = {"exits": exits} if layers else {}
        output = self.runners[name].forward(sequences, counts, rows, draws, **more)
        for scores, its_rows in scored:
            scores.add(self.runners[name].backend.sampler, output.logits[its_rows])
        for run, i, its_rows in completed:
            logits = exits and exits.of_row(rows[its_rows.stop - 1])
            run.outputs[i] = Slice(output, its_rows.start, its_rows.stop, exits=logits)
        for run, _, _ in completed:
            if len(self.runners) > 1 or not run.ready:  # the next pass may run before the strategy is called
                run.keep_outputs()
        return stop

    def _choose(self, ready: list[Run]) -> None:
        """Ask the strategies of the ready runs for their next feeds, one call for those that it serves together."""
        groups: dict[object, list[Run]] = {}
        for run in ready:
            groups.setdefault(run.batch_key, []).append(run)
        for group in groups.values():
            self._choose_together(group)

    def _choose_together(self, group: list[Run]) -> None:
        """Call a strategy's `step`, and apply the feeds that it returns for each run."""
        states = [run.state for run in group if run.state is not None]
        for run, state in zip(group, states, strict=True):
            state.feeds = len(run.feeds)
        strategy, sampler = group[0].request.strategy, self.runners["target"].backend.sampler
        place = sampler if strategy.on_device else sampler.host
        next_feeds: list[list[Feed]] = [[] for _ in group]
        try:
            next_feeds = strategy.step(place, states, gather(group, sampler, place))
        except Exception as error:
            for state in states:
                state.error = state.error or error
        for run, state, feeds in zip(group, states, next_feeds, strict=True):
            if run.id not in self._runs:  # another part of the request has failed
                continue
            if not run.started:
                run.started, run.started_at = True, time.monotonic()
                self.stats.prompt_tokens += len(run.request.given_ids)
                self.stats.cached_tokens += run.cached_tokens or 0
            if state.error is not None:
                self._fail(run, state.error)
                continue
            self._events += run.events()
            if feeds:
                self._place(run, feeds)
            else:
                self._end(run)
                if run.id not in self._runs:
                    self._mark_end(run.id)

    # --- a request's beginning and end ---------------------------------------------------------------------------

    def new_id(self) -> int:
        """The number of a request that is to be added."""
        return next(self._ids)

    def check(self, request: Request) -> None:
        """Refuse a request that can never run. Reads nothing that a step changes.

        Raises:
            ParameterError: it needs more sequences at once than the batch has slots; its hooks are another model's.
            CacheFullError: it does not fit into the cache even alone.
        """
        if request.hooks is not None:
            self.runners["target"].hooks.check(request.hooks)
        if request.settings.dola_layers and not self.runners["target"].has_exits:
            raise ParameterError("dola_layers is not offered where several processes share a model: use one")
        strategy, limit = request.strategy, self.scheduler.limits.max_batch_size
        sequences = strategy.sequences_per_result if strategy.independent else strategy.max_sequences
        if sequences > limit:
            raise ParameterError(
                f"the request needs {sequences} sequences at once, and max_batch_size is {limit}: raise max_batch_size "
                f"to at least {sequences}"
            )
        pages, available = self._max_pages(request), min(runner.cache.num_pages for runner in self.runners.values())
        if pages > available:
            raise CacheFullError(
                f"the request may need {pages} pages of the K/V cache, which has {available}: "
                "raise cache_bytes, or lower max_new_tokens or the number of sequences"
            )

    def add(self, request: Request, request_id: int | None = None) -> int:
        """Queue a request. Independent sequences run in several parts if the batch is too small for all.

        Args:
            request: to be run
            request_id: a number of `new_id`, given to a request that has been checked; by default the next one

        Returns:
            The request's number.

        Raises:
            ParameterError, CacheFullError: as `check`.
        """
        if request_id is None:
            self.check(request)
            request_id = self.new_id()
        limits, strategy = self.scheduler.limits, request.strategy
        sequences, headroom = strategy.max_sequences, limits.headroom
        parts = [(request, sequences)]
        if sequences > limits.max_batch_size:
            width = strategy.sequences_per_result
            size = limits.max_batch_size // width
            groups = [request.indices[i : i + size] for i in range(0, sequences // width, size)]
            parts = [(replace(request, part=group), width * len(group)) for group in groups]
        soon = request.max_new_tokens if headroom is None else min(headroom, request.max_new_tokens)
        runs = []
        for part, its_sequences in parts:
            run = Run(request_id, part, its_sequences, next(self._arrivals))
            run.first_pages = self._pages_needed(request, its_sequences, soon + strategy.extra_positions)
            run.max_pages = self._max_pages(request)
            runs.append(run)
        for run in runs:
            self.scheduler.add(run)
        if request.deadline is not None:
            self._deadlines[request_id] = request.deadline
        self._runs[request_id] = runs  # last: what is not here yet, `reset` drops
        return request_id

    def _max_pages(self, request: Request) -> int:
        """Maximum number of pages of a request, or of each of its parts."""
        strategy = request.strategy
        sequences = min(strategy.max_sequences, self.scheduler.limits.max_batch_size)
        return self._pages_needed(request, sequences, request.max_new_tokens + strategy.extra_positions)

    def _pages_needed(self, request: Request, sequences: int, positions: int) -> int:
        """Maximum number of pages of a request with so many positions after the prompt.

        Its sequences share the prompt's full pages; all others may differ.

        They share none where each may be computed anew, and always their source. Each model's cache has the same number
        of pages, and no model uses more of them than the target.
        """
        cache, beginnings = self.runners["target"].cache, request.beginnings
        pages, forks = cache.pages_for(len(request.source_ids or ())), max(1, sequences // len(beginnings))
        for token_ids in beginnings:
            shared = self._shared_pages(request, token_ids)
            pages += shared + forks * (cache.pages_for(len(token_ids) + positions) - shared)
        return pages

    def _shared_pages(self, request: Request, token_ids: Sequence[int]) -> int:
        """Number of pages of a text that a request's sequences share if they begin with it."""
        recomputed = any(runner.model.config.keys_change_beyond is not None for runner in self.runners.values())
        if recomputed or not request.settings.use_cache:
            return 0
        cache = self.runners["target"].cache
        return len(token_ids) // cache.whole_positions * cache.whole_positions // cache.page_size

    def _begin(self, run: Run) -> None:
        run.admitted_at, run.prompt_scores = time.monotonic(), run.request.prompt_scores
        try:
            run.state, feeds = run.request.strategy.begin(run.request)
        except Exception as error:
            self._fail(run, error)
        else:
            self._place(run, feeds)

    def _place(self, run: Run, feeds: list[Feed]) -> None:
        """Make the sequences of the feeds."""
        run.feeds, run.fed, run.outputs = feeds, [], [None] * len(feeds)
        placed: dict[str, Iterator[TokenSequence]] = {}
        for name, runner in self.runners.items():
            mine = [feed for feed in feeds if feed.model == name]
            if mine:
                run.live[name] = runner.place(run.live.get(name, []), mine)
                for sequence in run.live[name] if name == "target" else ():
                    sequence.adapter = run.request.settings.lora
                if run.request.source_ids is not None:
                    new = EncoderInput(run.request.source_ids, run.request.frames)
                    source = run.encoder_inputs.setdefault(name, new)
                    for sequence in run.live[name]:
                        sequence.encoder_input, sequence.private = source, True  # its keys depend on the source too
                for sequence in run.live[name] if name == "target" and run.probe is not None else ():
                    sequence.probe, sequence.private = run.probe, True  # all of it is computed, for itself alone
                placed[name] = iter(run.live[name])
        run.fed = [next(placed[feed.model]) for feed in feeds]
        if not run.request.settings.use_cache:  # the naive way: every step recomputes everything
            for feed, sequence in zip(feeds, run.fed, strict=True):
                sequence.private = True
                self.runners[feed.model].cache.forget(sequence)

    def abort(self, request_id: int) -> None:
        """Abort a request and free its memory; each unfinished result ends with the reason "abort".

        A finished or unknown request is ignored.
        """
        self._cut_off(request_id, "abort")

    def forget(self, request_id: int) -> None:
        """Abort a request without further events."""
        self.abort(request_id)
        self._events = [event for event in self._events if event.request_id != request_id]

    def _end_overdue(self) -> None:
        """End the requests whose deadline has passed."""
        if self._deadlines:
            now = time.monotonic()
            for request_id in [request_id for request_id, deadline in self._deadlines.items() if deadline <= now]:
                self._cut_off(request_id, "timeout")

    def _fail(self, run: Run, error: Exception) -> None:
        """End a request with an error."""
        for sibling in self._runs.get(run.id, ()):
            if sibling.state is not None:
                sibling.state.error = error
        self._cut_off(run.id, "error", error)

    def _cut_off(self, request_id: int, reason: FinishReason, error: Exception | None = None) -> None:
        """End all parts of a request early."""
        events: list[Event] = []
        for run in self._runs.get(request_id, ()):
            if reason == "timeout" and run.state is not None:
                with suppress(Exception):  # of a text that cannot be decoded: then there are no results
                    run.request.strategy.give_up(run.state)
            events += run.last_events(reason, error)
        for run in list(self._runs.get(request_id, ())):
            self._end(run)
        if events:
            events[-1].request_finished = True
        self._events += events

    def _end(self, run: Run) -> None:
        """Free a finished request's sequences; prompts may find them, unless the request failed."""
        if run.state is not None and run.state.speculation is not None:
            self.stats.speculation.add(run.state.speculation)
        if run.probe is not None:
            self.stats.watched_bytes += run.probe.kept_bytes
        failed = run.state is not None and run.state.error is not None
        for name, live in run.live.items():
            cache = self.runners[name].cache
            for sequence in live:
                if failed:
                    cache.discard(sequence)
                else:
                    cache.retire(sequence)
        self.scheduler.remove(run)
        parts = self._runs[run.id]
        parts.remove(run)
        if not parts:
            del self._runs[run.id]
            self._deadlines.pop(run.id, None)

    def _end_sequences(self, run: Run, sequences: list[TokenSequence]) -> None:
        """Free sequences of a request whose continuations have ended, and the request if they were the last."""
        live = run.live["target"]
        if run not in self._runs.get(run.id, ()):  # another part of the request has failed
            return
        if len(sequences) == len(live):
            self._end(run)
            if run.id not in self._runs:
                self._mark_end(run.id)
            return
        for sequence in sequences:
            live.remove(sequence)
            self.runners["target"].cache.free(sequence)

    def _mark_end(self, request_id: int) -> None:
        """Mark the last event of a request that has ended."""
        last = next((event for event in reversed(self._events) if event.request_id == request_id), None)
        if last is None:
            last = Event(request_id, 0, "", ())
            self._events.append(last)
        last.request_finished = True

    def reset(self) -> None:
        """Restore a consistent state after a step was interrupted.

        Running requests end with the reason "error"; queued ones stay queued. The caches are cleared.
        """
        for runner in self.runners.values():
            runner.cache.clear()
        unfinished, waiting = self._runs, self.scheduler.waiting
        self._runs, self._pending = {}, None
        self.scheduler = self._new_scheduler(self.scheduler.limits)
        error = EngineStateError("the step that computed this request was interrupted")
        ended = {event.request_id for event in self._events if event.request_finished}
        for request_id in dict.fromkeys((*self._underway, *unfinished)):
            runs = unfinished.get(request_id, [])
            if runs and all(run in waiting and run.state is None for run in runs):
                self._runs[request_id] = runs
                for run in runs:
                    self.scheduler.add(run)
            elif request_id not in ended:
                indices = [i for run in runs for i in run.request.indices] or [0]
                self._events += (Event(request_id, i, "", (), finish_reason="error", error=error) for i in indices)
                self._mark_end(request_id)
        self._deadlines = {i: deadline for i, deadline in self._deadlines.items() if i in self._runs}
        self._underway = ()

    # --- what is known of requests -------------------------------------------------------------------------------

    def room(self, request: Request) -> int:
        """Most new tokens that a request may ask for so that the cache holds it alone; below 1: not even its prompt."""
        cache, strategy = self.runners["target"].cache, request.strategy
        sequences = min(strategy.max_sequences, self.scheduler.limits.max_batch_size)
        available = min(runner.cache.num_pages for runner in self.runners.values())
        shared = [self._shared_pages(request, token_ids) for token_ids in request.beginnings]
        own = (available - cache.pages_for(len(request.source_ids or ())) - sum(shared)) // sequences
        positions = [
            (pages + own) * cache.page_size - len(token_ids)
            for pages, token_ids in zip(shared, request.beginnings, strict=True)
        ]
        return min(positions) - strategy.extra_positions

    @property
    def longest(self) -> int | None:
        """Maximum number of positions of a sequence that is alone in the caches; None without a model."""
        if not self.runners:
            return None
        cache, config = self.runners["target"].cache, self.runners["target"].model.config
        pages = min(runner.cache.num_pages for runner in self.runners.values())
        source = cache.pages_for(config.max_source_positions) if config.encoder_layers else 0
        return max(1, pages - source) * cache.page_size

    @property
    def busy(self) -> bool:
        """True while any request is queued or running, or its end has not been reported."""
        return bool(self._runs or self._events)

    def knows(self, request_id: int) -> bool:
        """True while the request is queued or running."""
        return request_id in self._runs

    def prompt_progress(self, request_id: int) -> tuple[int, int]:
        """Tokens of the prompt of a queued or running request that are in the cache, and all of them."""
        run = self._runs[request_id][0]
        sequences, total = run.live.get("target", ()), len(run.request.prompt_ids)
        return min(sequences[0].cached if sequences else 0, total), total

    def load(self) -> Load:
        """Use of the engine now."""
        return Load.of(self.scheduler, self.stats)


def gather(group: Sequence[Run], sampler: TokenSampler, place: TokenSampler) -> Rows:
    """Concatenate the outputs of several requests' feeds, moved from `sampler` to `place`."""
    slices: list[Slice] = []
    starts, wants_hidden = [0], False
    for run in group:
        for feed, rows in zip(run.feeds, run.outputs, strict=True):
            assert rows is not None
            slices.append(rows)
            starts.append(starts[-1] + rows.stop - rows.first)
            wants_hidden = wants_hidden or feed.hidden
    logits = _end_to_end(slices, "logits", sampler.xp)
    hidden = sampler.to_host(_end_to_end(slices, "hidden", sampler.xp)) if wants_hidden else None
    exits = [rows.exits for rows in slices] if group[0].feeds[0].exits else []
    return Rows(logits if place is sampler else sampler.to_host(logits), starts, hidden, exits)


def _early_exits(layers: dict[int, tuple[int, ...]]) -> Any:
    """The early exits of a pass. `layers`: row of the batch -> the layers after which it exits"""
    from ..runner.early_exits import EarlyExits  # seldom needed

    return EarlyExits(layers)


def _end_to_end(slices: list[Slice], kind: Literal["logits", "hidden"], xp: Any) -> Any:
    """Concatenate logits or hidden states; without a copy if the slices are adjacent in the same output."""
    for a, b in pairwise(slices):
        if a.output is not b.output or a.stop != b.first:
            return xp.concatenate([getattr(rows.output, kind)[rows.first : rows.stop] for rows in slices])
    whole, first, stop = getattr(slices[0].output, kind), slices[0].first, slices[-1].stop
    return whole if stop - first == len(whole) else whole[first:stop]
