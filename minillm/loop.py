"""The step loop: requests in, progress out. Everything that generates is a loop over `step`.

One step admits requests that fit, runs one ragged forward per model over all that waits to be computed, and asks the
strategies of the requests whose rows are ready what to do next.
"""

import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from .active import Active, Slice, gather, place_of_choice
from .batch import Sequence as Tokens
from .cache import PrefixCache
from .decoding.continuation import Progress
from .decoding.speculation import Speculation
from .decoding.strategy import Feed, Request, Strategy
from .errors import CacheFullError, ParameterError
from .ops.sampling import Draw
from .runner import Runner
from .scheduler import Limits, Scheduler


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
        self._requests: dict[int, Active] = {}
        self._progress: list[tuple[int, Progress]] = []
        self._next_id = 0

    def add(self, request: Request, strategy: Strategy) -> int:
        """Put a request in line.

        Raises:
            ParameterError: it wants more sequences at once than the batch has places.
            CacheFullError: the cache could not hold it even alone.
        """
        width = strategy.max_sequences
        limit = self.scheduler.limits.max_batch_size
        if width > limit:
            raise ParameterError(f"{width} sequences at once are asked for; max_batch_size is {limit}")
        pages = self._pages_needed(request, width, strategy.slack)
        available = min(runner.cache.num_pages for runner in self.runners.values())
        if pages > available:
            raise CacheFullError(
                f"the request may need {pages} pages of the K/V cache, which has {available}: "
                "raise cache_bytes, or lower max_new_tokens or the number of sequences"
            )
        self._next_id += 1
        active = Active(self._next_id, request, strategy, width, pages)
        self._requests[active.id] = active
        self.scheduler.waiting.append(active)
        return active.id

    def _pages_needed(self, request: Request, width: int, slack: int = 0) -> int:
        """The prompt's full pages are shared by all sequences; every other page may be each one's own.

        Each model's cache has the same number of pages, and no model takes more of them than the target.
        """
        cache, prompt = self.runners["target"].cache, len(request.prompt_ids)
        shared = prompt // cache.page_size if request.settings.use_cache else 0
        return shared + width * (cache.pages_for(prompt + request.max_new_tokens + slack) - shared)

    @property
    def busy(self) -> bool:
        """Some request waits or runs."""
        return bool(self._requests)

    def knows(self, request_id: int) -> bool:
        """The request waits or runs."""
        return request_id in self._requests

    def step(self) -> list[tuple[int, Progress]]:
        """Advance everything by one forward pass. Returns each request's progress under its id.

        Raises:
            NumericalError: the model gave NaN or infinity.
            Exception: what a strategy raised, or a function of the user's that it called. Its requests end for the
                reason "abort"; `take_progress`, or else the next step, reports that.
        """
        for active in self.scheduler.admit():
            state, feeds = active.strategy.begin(active.request)
            active.state = state
            self._place(active, feeds)
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
        return self.take_progress()

    def take_progress(self) -> list[tuple[int, Progress]]:
        """What a step that raised had come to; `step` returns all else."""
        progress, self._progress = self._progress, []
        return progress

    def abort(self, request_id: int) -> list[Progress]:
        """Drop a request and free its memory; each result that was not done ends for the reason "abort".

        One that is done or unknown is left alone.
        """
        active = self._requests.get(request_id)
        if active is None:
            return []
        results = active.state.results if active.state is not None else []
        for continuation in results:
            if continuation.finish_reason is None:
                continuation.finish("abort")
        progress = [p for continuation in results if (p := continuation.take())]
        missing = set(range(active.request.settings.num_return_sequences)) - {c.index for c in results}
        self._end(active)
        return progress + [Progress(index, finish_reason="abort") for index in sorted(missing)]

    def _place(self, active: Active, feeds: list[Feed]) -> None:
        """Make the sequences that the feeds ask for."""
        active.feeds, active.fed, active.outputs = feeds, [], [None] * len(feeds)
        placed: dict[str, Iterator[Tokens]] = {}
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
        work = [(active, i, count) for (active, i), count in zip(waiting, limits, strict=True) if count]
        places: dict[int, int] = {}  # of strategies, so that the rows of each lie end to end
        work.sort(key=lambda one: places.setdefault(id(one[0].strategy), len(places)))
        sequences: list[Tokens] = []
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
        """Ask the strategies of all that are ready, those with the same one together.

        Where one raises, its requests end, since nobody knows how far they came. The others are asked in the next step
        if they were not yet, which needs their rows to outlive this one.
        """
        groups: dict[int, list[Active]] = {}
        for active in ready:
            groups.setdefault(id(active.strategy), []).append(active)
        for group in groups.values():
            try:
                self._advance(group)
            except BaseException:
                for active in group:
                    self._progress += [(active.id, p) for p in self.abort(active.id)]
                for active in ready:
                    active.keep_outputs()
                raise

    def _advance(self, group: list[Active]) -> None:
        """Ask one strategy, and do for each of its requests what it answers."""
        states = [active.state for active in group if active.state is not None]
        for active, state in zip(group, states, strict=True):
            state.feeds = len(active.feeds)
        ops = self.runners["target"].ops
        place = place_of_choice(group, ops)
        answers = group[0].strategy.step(place, states, gather(group, ops, place))
        for active, state, feeds in zip(group, states, answers, strict=True):
            self._progress += [(active.id, p) for c in state.results if (p := c.take())]
            active.started = True
            if feeds:
                self._place(active, feeds)
            else:
                self._end(active)

    def _end(self, active: Active) -> None:
        """Free what a request holds; its longest sequence may serve a later prompt."""
        if active.state is not None and active.state.speculation is not None:
            self.stats.speculation.add(active.state.speculation)
        for name, live in active.live.items():
            if self._prefixes is not None and name == "target" and live:
                self._prefixes.keep(max(live, key=lambda sequence: sequence.cached))
            for sequence in live:
                self.runners[name].cache.free(sequence)
        self.scheduler.remove(active)
        del self._requests[active.id]
