"""The step loop: takes requests and reports their progress. All generation is a loop over `step`.

One step admits requests that fit, runs one ragged forward per model over all pending tokens, and calls the strategies
of the requests whose rows are ready for their next feeds.

A failure ends only the request in which it happened: a logits processor that raises, a guide that no token satisfies,
NaN in its logits. The error is in that request's progress; the others continue, and `step` does not raise.

Continuous batching: Yu et al., "Orca", OSDI 2022, section 4. Which requests run, and how many tokens of each, is chosen
by the scheduler (`scheduler.py`).
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from typing import Any, Literal

from ..backends import compile_seconds, working_time
from ..backends.chooser import Chooser
from ..batch import TokenSequence
from ..decoding.continuation import FinishReason, Progress
from ..decoding.prompt_scores import PromptScores
from ..decoding.stats import Stats
from ..decoding.strategy import Feed, Request, Rows, Strategy
from ..errors import CacheFullError, EngineStateError, ParameterError
from ..reference.sampling import Draw
from ..runner.runner import Runner, Slice
from ..source_text import SourceText
from .ahead import DEVICE_ERRORS, Flight, can_run_ahead, land, take_off
from .scheduler import Active, Limits, Load, Piece, Scheduler


def place_of_choice(group: Sequence[Active], chooser: Chooser) -> Chooser:
    """The chooser of requests advanced together: that of the backend that made their logits, or its host."""
    return chooser if group[0].strategy.on_device else chooser.host


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


class StepLoop:
    """Runs requests concurrently, step by step."""

    def __init__(self, runners: dict[str, Runner], limits: Limits) -> None:
        """Args:
        runners: by model name as in `Feed.model`; "target" is required
        limits: of one step
        """
        self.runners = runners
        self.stats = Stats()
        if any(runner.model.config.keys_follow_length for runner in runners.values()):
            limits = replace(limits, headroom=None)  # keys that are computed again would be others
        self.scheduler = self._new_scheduler(limits)
        self._requests: dict[int, list[Active]] = {}
        """The unfinished parts of each request."""
        self._progress: list[tuple[int, Progress]] = []
        self._deadlines: dict[int, float] = {}
        self._underway: tuple[int, ...] = ()
        """Requests that the step under way began with"""
        self._last_id = self._arrivals = 0
        self._runs_ahead = can_run_ahead([*runners.values()])
        self._flight: Flight | None = None
        """A decode step that was launched ahead (`ahead.py`)"""

    def _new_scheduler(self, limits: Limits) -> Scheduler:
        return Scheduler(limits, {name: runner.cache for name, runner in self.runners.items()}, self.stats)

    def new_id(self) -> int:
        """The number of a request that is to be added."""
        self._last_id += 1
        return self._last_id

    def add(
        self,
        request: Request,
        strategy: Strategy,
        *,
        priority: int = 0,
        deadline: float | None = None,
        request_id: int | None = None,
    ) -> int:
        """Queue a request. Independent sequences run in several parts if the batch is too small for all.

        Args:
            request: to be run
            strategy: that runs it
            priority: smaller ones are admitted first, get pages first and are preempted last; equal ones by arrival
            deadline: in seconds of `time.monotonic()`; the first step after it ends the request with "timeout"
            request_id: a number of `new_id`, by default the next one

        Returns:
            The request's number.

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
        pages = self._pages_needed(request, min(width, limit), request.max_new_tokens + strategy.extra_positions)
        available = min(runner.cache.num_pages for runner in self.runners.values())
        if pages > available:
            raise CacheFullError(
                f"the request may need {pages} pages of the K/V cache, which has {available}: "
                "raise cache_bytes, or lower max_new_tokens or the number of sequences"
            )
        request_id = request_id or self.new_id()
        headroom = self.scheduler.limits.headroom
        ahead = request.max_new_tokens if headroom is None else min(headroom, request.max_new_tokens)
        actives = []
        for part, part_width in parts:
            active = Active(request_id, part, strategy, part_width, priority, self._arrivals)
            active.first_pages = self._pages_needed(request, part_width, ahead + strategy.extra_positions)
            active.max_pages = pages
            self._arrivals += 1
            actives.append(active)
        for active in actives:
            self.scheduler.add(active)
        if deadline is not None:
            self._deadlines[request_id] = deadline
        self._requests[request_id] = actives  # last: what is not here yet, `reset` drops
        return request_id

    def _pages_needed(self, request: Request, width: int, positions: int) -> int:
        """Maximum number of pages of a request with so many positions after the prompt.

        Its sequences share the prompt's full pages; all others may differ.

        They share none where each may be computed anew, and always their source. Each model's cache has the same number
        of pages, and no model uses more of them than the target.
        """
        cache, shared = self.runners["target"].cache, self._shared_pages(request)
        source = cache.pages_for(len(request.source_ids or ()))
        return source + shared + width * (cache.pages_for(len(request.prompt_ids) + positions) - shared)

    def _shared_pages(self, request: Request) -> int:
        """Number of pages of its prompt that a request's sequences share."""
        recomputed = any(runner.model.config.keys_change_beyond is not None for runner in self.runners.values())
        if recomputed or not request.settings.use_cache:
            return 0
        return len(request.prompt_ids) // self.runners["target"].cache.page_size

    def room(self, request: Request, strategy: Strategy) -> int:
        """Most new tokens that a request may ask for so that the cache holds it alone; below 1: not even its prompt."""
        cache, prompt = self.runners["target"].cache, len(request.prompt_ids)
        width = min(strategy.max_sequences, self.scheduler.limits.max_batch_size)
        available = min(runner.cache.num_pages for runner in self.runners.values())
        shared = self._shared_pages(request)
        own = (available - cache.pages_for(len(request.source_ids or ())) - shared) // width
        return (shared + own) * cache.page_size - prompt - strategy.extra_positions

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
        return bool(self._requests or self._progress)

    def knows(self, request_id: int) -> bool:
        """True while the request is queued or running."""
        return request_id in self._requests

    def prompt_progress(self, request_id: int) -> tuple[int, int]:
        """Tokens of the prompt of a queued or running request that are in the cache, and all of them."""
        active = self._requests[request_id][0]
        sequences, total = active.live.get("target", ()), len(active.request.prompt_ids)
        return min(sequences[0].cached if sequences else 0, total), total

    def step(self) -> list[tuple[int, Progress]]:
        """Advance all requests by one forward pass. Returns (request id, progress) pairs.

        A request that fails ends with the reason "error" and the error in its progress.
        """
        self.advance()
        return self.take_progress()

    def take_progress(self) -> list[tuple[int, Progress]]:
        """The progress of requests since the last call, which forgets it."""
        progress, self._progress, self._underway = self._progress, [], ()
        return progress

    def advance(self) -> None:
        """As `step`; `take_progress` returns what it would. After an interruption inside, `reset` must follow."""
        self._underway = (*self._requests,)
        self._end_overdue()
        admitted = self.scheduler.admit()
        for active in admitted:
            if active.state is None:
                self._begin(active)
        began, compiled = working_time(), compile_seconds()
        prompts = False
        tokens = self._read_ahead(alone=not admitted)
        if tokens is None:
            prompts = any(not active.started or active.lost for active in self.scheduler.running)
            tokens = sum(self._timed_forward(name, prompts) for name in self.runners)
            self._ask([active for active in self.scheduler.running if active.ready])
        if self._runs_ahead and self._flight is None and not self.scheduler.may_admit:
            self._flight = take_off(self.runners["target"], self.scheduler.running)
        seconds = working_time() - began
        self.stats.compile_seconds += compile_seconds() - compiled
        self.stats.steps += 1
        if prompts:
            self.stats.prefill_tokens += tokens
            self.stats.prefill_seconds += seconds
        else:
            self.stats.decode_tokens += tokens
            self.stats.decode_seconds += seconds

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

    def forget(self, request_id: int) -> None:
        """Abort a request of which nothing more is to be told."""
        self.abort(request_id)
        self._progress = [told for told in self._progress if told[0] != request_id]

    def load(self) -> Load:
        """Use of the engine now."""
        return self.scheduler.load()

    def reset(self) -> None:
        """Restore a consistent state after a step was interrupted.

        Running requests end with the reason "error"; queued ones stay queued. The caches are cleared.
        """
        for runner in self.runners.values():
            runner.cache.clear()
        requests, waiting = self._requests, self.scheduler.waiting
        self._requests, self._flight = {}, None
        self.scheduler = self._new_scheduler(self.scheduler.limits)
        error = EngineStateError("the step that computed this request was interrupted")
        ended = {request_id for request_id, progress in self._progress if progress.request_finished}
        for request_id in dict.fromkeys((*self._underway, *requests)):
            actives = requests.get(request_id, [])
            if actives and all(active in waiting and active.state is None for active in actives):
                self._requests[request_id] = actives
                for active in actives:
                    self.scheduler.add(active)
            elif request_id not in ended:
                indices = [i for active in actives for i in active.request.indices] or [0]
                self._progress += ((request_id, Progress(i, finish_reason="error", error=error)) for i in indices)
                self._mark_end(request_id)
        self._deadlines = {i: deadline for i, deadline in self._deadlines.items() if i in self._requests}
        self._underway = ()

    # --- a request's beginning and end ---------------------------------------------------------------------------

    def _begin(self, active: Active) -> None:
        active.admitted_at, active.prompt_scores = time.monotonic(), active.request.prompt_scores
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
            if reason == "timeout" and active.state is not None:
                with suppress(Exception):  # of a text that cannot be decoded: then there are no results
                    active.strategy.give_up(active.state)
            results = [] if active.state is None else active.state.results
            for continuation in results:
                if continuation.finish_reason is None:
                    continuation.cut_off(reason)
            told = [p for continuation in results if (p := continuation.take())]
            missing = set(active.request.indices) - {continuation.index for continuation in results}
            told += [Progress(index, finish_reason=reason) for index in sorted(missing)]
            for piece in told:
                piece.error = error if piece.finish_reason == "error" else None
                progress.append(active.reported(piece))
        for active in list(self._requests.get(request_id, ())):
            self._end(active)
        if progress:
            progress[-1].request_finished = True
        return progress

    def _end_overdue(self) -> None:
        """End the requests whose deadline has passed."""
        now = time.monotonic() if self._deadlines else 0.0
        for request_id in [request_id for request_id, deadline in self._deadlines.items() if deadline <= now]:
            self._progress += [(request_id, progress) for progress in self._cut_off(request_id, "timeout")]

    def _end(self, active: Active) -> None:
        """Free a finished request's sequences; prompts may find them, unless the request failed."""
        if active.state is not None and active.state.speculation is not None:
            self.stats.speculation.add(active.state.speculation)
        failed = active.state is not None and active.state.error is not None
        for name, live in active.live.items():
            cache = self.runners[name].cache
            for sequence in live:
                if failed:
                    cache.discard(sequence)
                else:
                    cache.retire(sequence)
        self.scheduler.remove(active)
        parts = self._requests[active.id]
        parts.remove(active)
        if not parts:
            del self._requests[active.id]
            self._deadlines.pop(active.id, None)

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
                if active.request.source_ids is not None:
                    source = active.sources.setdefault(name, SourceText(active.request.source_ids))
                    for sequence in active.live[name]:
                        sequence.source, sequence.private = source, True  # its keys depend on the source too
                placed[name] = iter(active.live[name])
        active.fed = [next(placed[feed.model]) for feed in feeds]
        if not active.request.settings.use_cache:  # the naive way: every step recomputes everything
            for feed, sequence in zip(feeds, active.fed, strict=True):
                sequence.private = True
                self.runners[feed.model].cache.forget(sequence)

    def _timed_forward(self, name: str, prompts: bool) -> int:
        began = working_time()
        tokens = self._forward(name)
        if tokens and not prompts:
            self.stats.decode_passes[name] += 1
            self.stats.decode_pass_seconds[name] += working_time() - began
        return tokens

    def _forward(self, name: str) -> int:
        """Run one model over its pending tokens. Returns the number of tokens computed."""
        work = self.scheduler.schedule(name)
        if not work:
            return 0
        order: dict[object, int] = {}  # of strategies: rows of one call are adjacent, in the order in which they run

        def place(piece: Piece) -> tuple[int, int, int]:
            active = piece.active
            return order.setdefault(active.strategy.batch_key, len(order)), active.priority, active.order

        work.sort(key=place)
        return self._compute(name, work)

    def _compute(self, name: str, work: Sequence[Piece]) -> int:
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

    def _pass(self, name: str, work: Sequence[Piece]) -> int:
        """Run one forward pass over the pending tokens of several feeds. Returns the number of tokens computed.

        Raises:
            NumericalError: NaN or infinity among the logits.
        """
        rows: list[int] = []
        draws: list[Draw | None] = []
        completed: list[tuple[Active, int, slice]] = []
        scored: list[tuple[PromptScores, slice]] = []
        stop = 0
        for piece in work:
            active, i, sequence, count, _ = piece
            if active.cached_tokens is None and name == "target":
                active.cached_tokens = sequence.cached
            if (positions := piece.scored) and active.prompt_scores is not None and i is not None:
                scored.append((active.prompt_scores, slice(len(rows), len(rows) + len(positions))))
                if active.feeds[i].rows == "last":  # else they are among the feed's own
                    first = stop - sequence.cached  # row of position 0
                    rows += range(first + positions.start, first + positions.stop)
                    draws += [None] * len(positions)
            stop += count
            if i is not None and count == sequence.pending:
                feed = active.feeds[i]
                wanted = 1 if feed.rows == "last" else len(feed.tokens)
                completed.append((active, i, slice(len(rows), len(rows) + wanted)))
                rows += range(stop - wanted, stop)
                draws += [None] * (wanted - 1) + [feed.draw]
        sequences, counts = [piece.sequence for piece in work], [piece.tokens for piece in work]
        output = self.runners[name].forward(sequences, counts, rows, draws)
        for scores, part in scored:
            scores.add(self.runners[name].backend.chooser, output.logits[part])
        for active, i, part in completed:
            active.outputs[i] = Slice(output, part.start, part.stop)
        for active, _, _ in completed:
            if len(self.runners) > 1 or not active.ready:  # the next pass may run before the strategy is called
                active.keep_outputs()
        return stop

    def _read_ahead(self, *, alone: bool) -> int | None:
        """Read the tokens of the step that was launched ahead. Returns the number of sequences that it advanced.

        None: no step was, or it has to be computed again, in the ordinary way.

        Args:
            alone: no other request is to be served next, so that the next step is launched before this one is read
        """
        flight, self._flight = self._flight, None
        if flight is None:
            return None
        began, runner = working_time(), self.runners["target"]
        following = flight.follow(runner) if alone else None
        try:
            tokens = flight.read()
        except DEVICE_ERRORS:  # the ordinary way will meet it again, and tell the requests
            tokens = None
        if tokens is None:
            land(flight)
            return None
        advanced = self._take_tokens(flight, tokens.tolist())
        if following is None:
            land(flight)
        self._flight = following
        self.stats.decode_passes["target"] += 1
        self.stats.decode_pass_seconds["target"] += working_time() - began
        return advanced

    def _take_tokens(self, flight: Flight, tokens: list[int]) -> int:
        """Give the sequences of a flight their tokens. Returns how many had not ended since it was launched."""
        advanced, cache = 0, self.runners["target"].cache
        ended: dict[Active, list[TokenSequence]] = {}
        for row, token in zip(flight.rows, tokens, strict=True):
            active, continuation, sequence = row.active, row.continuation, row.sequence
            if continuation.finish_reason is not None:
                continue
            advanced += 1
            cache.advance(sequence, 1)
            try:
                if continuation.push(token):
                    ended.setdefault(active, []).append(sequence)
                else:
                    sequence.token_ids.append(token)
            except Exception as error:
                self._fail(active, error)
                continue
            if (progress := continuation.take()) is not None:
                self._progress.append((active.id, active.reported(progress)))
        for active, sequences in ended.items():
            self._end_sequences(active, sequences)
        return advanced

    def _end_sequences(self, active: Active, sequences: list[TokenSequence]) -> None:
        """Free sequences of a request whose continuations have ended, and the request if they were the last."""
        live = active.live["target"]
        if active not in self._requests.get(active.id, ()):  # another part of the request has failed
            return
        if len(sequences) == len(live):
            self._end(active)
            if active.id not in self._requests:
                self._mark_end(active.id)
            return
        for sequence in sequences:
            live.remove(sequence)
            self.runners["target"].cache.free(sequence)

    def _ask(self, ready: list[Active]) -> None:
        """Advance the ready requests, grouped by the calls that serve them."""
        groups: dict[object, list[Active]] = {}
        for active in ready:
            groups.setdefault(active.strategy.batch_key, []).append(active)
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
            if not active.started:
                active.started, active.started_at = True, time.monotonic()
                self.stats.prompt_tokens += len(active.request.given_ids)
                self.stats.cached_tokens += active.cached_tokens or 0
            if state.error is not None:
                self._fail(active, state.error)
                continue
            self._progress += [(active.id, active.reported(p)) for c in state.results if (p := c.take())]
            if feeds:
                self._place(active, feeds)
            else:
                self._end(active)
                if active.id not in self._requests:
                    self._mark_end(active.id)

    def _mark_end(self, request_id: int) -> None:
        """Mark the last progress of a request that has ended."""
        last = next((progress for i, progress in reversed(self._progress) if i == request_id), None)
        if last is None:
            last = Progress(0)
            self._progress.append((request_id, last))
        last.request_finished = True
