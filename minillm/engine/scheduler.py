"""The scheduler: which requests run in the next step, how many tokens of each, and who gives way when pages run out.

Requests wait in order of priority, then of arrival. One is admitted when the batch has slots for its sequences and the
cache has pages for its prompt, and for the next tokens of it and of all that run: not for all that it may generate. One
that does not fit is passed by later ones that do, `MAX_PASSES` times; then nothing passes it until it is admitted.

Each forward pass has a token budget (Agrawal et al., "Sarathi-Serve", arXiv 2403.02310, section 4): the tokens of
decoding sequences count first, and chunks of prompts fill what is left. So a long prompt delays the others' next token
by no more than the budget takes.

Prompts are served by priority, and equal ones by the number of tokens left to compute, the fewest first (shortest
remaining time: Schrage, Operations Research 16, 1968): a short prompt waits for no long one. They leave a share to the
one that has waited longest, a token in `PROMPT_SHARE`. So of N prompts of equal priority each gets tokens in one of N
steps at least, however many shorter ones come; what another one computes for it counts.

Prompts take over what the prefix cache has of them when they begin, and before each chunk. Of several that begin with
the same tokens the first one computes these, and the others wait for its pages (`leaders.py`). A step looks at each
prompt once, and at none any more when its budget is spent: those that wait for their turn cost little.

If a page is missing, a request is preempted (Kwon et al., "PagedAttention", arXiv 2309.06180, section 4.5): it gives
back its pages, keeps its tokens and its strategy's state, and waits in front of the queue. When it is admitted again,
its keys and values are recomputed and it goes on. The first running request by priority and arrival is never preempted,
and may preempt every other one; so it gets its next token in each step, or tokens of its prompt in one of N, until it
ends, then the next one is the first: whoever waits is served after finitely many steps, unless requests of higher
priority arrive for ever.
"""

from bisect import insort
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ..backends.memory import Memory
from ..cache import PagedCache
from ..decoding.prompt_scores import MAX_ROWS
from ..decoding.stats import Stats
from ..encoder_input import EncoderInput
from ..errors import CacheFullError
from .leaders import Leaders
from .preemption import choose_victim
from .recompute import Recompute, num_pages
from .run import Chunk, Run

MAX_PASSES = 8
"""Number of later requests that may be admitted before a waiting one that does not fit."""
PROMPT_SHARE = 8
"""Prompts get at least one token in so many of the budget, even if decoding sequences use it up."""
SOURCES_TOGETHER = 4
"""Times the budget of a pass without decoding sequences if its prompts have sources to encode: a text that is encoded
later is then decoded later, in steps of fewer rows than all texts would make together"""


@dataclass(frozen=True)
class Limits:
    """Limits of one step."""

    max_batch_size: int
    """Maximum number of sequences"""
    max_batched_tokens: int
    """Maximum number of tokens of a forward pass in which sequences decode. Exceeded only by what may not be split: one
    token of each sequence, more with guesses; the prompt of a search that reads each of its rows"""
    max_prompt_tokens: int
    """The same for a pass in which none decodes, so that a larger chunk delays nobody"""
    headroom: int | None = 32
    """Number of tokens for which the pages of a request, and of those that run, must be free when it is admitted. None:
    all that it may generate, so that none is ever preempted"""

    @classmethod
    def of(cls, memory: Memory, max_batch_size: int, max_batched_tokens: int | None = None) -> "Limits":
        """The limits of an engine, `max_batched_tokens` by default the backend's memory's."""
        budget = max_batched_tokens or max(memory.max_batched_tokens, max_batch_size)
        return cls(max_batch_size, budget, max(memory.max_prompt_tokens, budget))


def _to_compute(chunk: Chunk, cache: PagedCache) -> Chunk:
    """A prompt without what the cache has of it, which it takes over."""
    if not chunk.skips or chunk.feed is None or chunk.tokens == 1:
        return chunk
    cache.match(chunk.sequence)
    return chunk._replace(tokens=chunk.sequence.pending)


def _leads(chunk: Chunk, count: int, due: Chunk, cache: PagedCache) -> bool:
    """True if computing `count` tokens of one prompt computes tokens that another one then need not."""
    due = _to_compute(due, cache)
    return due.skips and cache.computes_next(chunk.sequence, count, due.sequence)


class Scheduler:
    """Chooses the requests and the tokens of each step; see the module docstring."""

    def __init__(self, limits: Limits, caches: Mapping[str, PagedCache], stats: Stats) -> None:
        """Args:
        limits: limits of one step
        caches: each model's cache, by name
        stats: where preemptions are counted
        """
        self.limits = limits
        self.waiting: list[Run] = []
        """In the order in which they are to be admitted"""
        self.running: list[Run] = []
        """In the order of priority, then of arrival"""
        self.caches = caches
        self._stats = stats
        self._waited: dict[str, dict[Run, int]] = {}
        """By model, the passes in which the prompts of each request have got nothing since they last got tokens"""

    # --- which requests run ------------------------------------------------------------------------------------------

    def add(self, run: Run) -> None:
        """Queue a request: by priority, then those that were preempted, then by arrival."""
        insort(self.waiting, run, key=lambda run: (run.request.priority, run.state is None, run.order))

    def remove(self, run: Run) -> None:
        """Remove a finished or aborted request, running or queued."""
        (self.running if run in self.running else self.waiting).remove(run)

    def admit(self) -> list[Run]:
        """Move requests from the queue into the batch while they fit, as every one does alone. Returns them."""
        if not self.may_admit:
            return []
        places = self.limits.max_batch_size - sum(run.max_sequences for run in self.running)
        pages = self._uncommitted_pages()
        admitted: list[Run] = []
        too_large: list[Run] = []
        most_passed = 0  # the most that one of these was passed; a thousand may wait
        for run in self.waiting:
            needed = self._pages_to_begin(run)
            if run.max_sequences > places or needed > pages:
                too_large.append(run)
                most_passed = max(most_passed, run.times_passed_over)
            else:
                admitted.append(run)
                places, pages, run.times_passed_over = places - run.max_sequences, pages - needed, 0
                for other in too_large:
                    other.times_passed_over += 1
                most_passed += bool(too_large)
            if places <= 0 or most_passed >= MAX_PASSES:
                break
        for run in admitted:
            self.waiting.remove(run)
            insort(self.running, run, key=lambda run: (run.request.priority, run.order))
        return admitted

    @property
    def may_admit(self) -> bool:
        """True if `admit` might admit a request now."""
        return bool(self.waiting) and sum(run.max_sequences for run in self.running) < self.limits.max_batch_size

    def _uncommitted_pages(self) -> int:
        """Free pages less those that the running requests need for their next tokens."""
        return min(
            (
                cache.free_pages - sum(self._pages_ahead(run, name) for run in self.running)
                for name, cache in self.caches.items()
            ),
            default=0,
        )

    def _pages_to_begin(self, run: Run) -> int:
        """Number of pages that must be free for a queued request."""
        if not run.started:
            return run.first_pages
        return max(self._pages_ahead(run, name) for name in self.caches)

    def _pages_ahead(self, run: Run, name: str) -> int:
        """Number of pages that a run still needs in one cache for its next `headroom` tokens."""
        live = run.live.get(name, [])
        owned, headroom = num_pages(live), self.limits.headroom
        if headroom is None:
            return max(0, run.max_pages - owned)
        if not run.started:
            return max(0, run.first_pages - owned)
        cache, recompute, needed = self.caches[name], run.recompute.get(name), owned
        pages = {sequence: len(sequence.pages) for sequence in live}
        if recompute is not None:
            needed = recompute.pages
            pages |= {lost.sequence: cache.pages_for(lost.cached) for lost in recompute.sequences}
        for sequence in live:
            positions = min(len(sequence.token_ids) + headroom, run.longest)
            needed += max(0, cache.pages_for(positions) - pages[sequence])
        return max(0, min(needed, run.max_pages) - owned)

    @property
    def num_waiting(self) -> int:
        """Number of queued requests that wait entirely."""
        if not self.waiting:
            return 0
        return len({run.id for run in self.waiting}.difference(run.id for run in self.running))

    # --- how many tokens ---------------------------------------------------------------------------------------------

    def schedule(self, name: str) -> list[Chunk]:
        """The tokens that one model computes next, each sequence with pages for them. It may preempt requests.

        Args:
            name: the model's name
        """
        cache = self.caches[name]
        chunks: list[Chunk] = []
        prompts: list[Chunk] = []
        for run in self.running:
            if name in run.recompute:
                prompts += self._recompute(run, name)
                if name in run.recompute:
                    continue
            started, outputs, fed = run.started, run.outputs, run.fed
            for i, feed in enumerate(run.feeds):
                if outputs[i] is not None or feed.model != name:
                    continue
                sequence = fed[i]
                pending = len(sequence.token_ids) - sequence.cached
                if started and pending <= len(feed.tokens):
                    chunks.append(Chunk(run, i, sequence, pending))
                else:
                    whole = 1 if feed.rows == "last" else len(feed.tokens)
                    prompts.append(Chunk(run, i, sequence, pending, whole))
        if prompts:
            budget = self._budget_beside(chunks)
            if not chunks and any(chunk.encodes for chunk in prompts):
                budget *= SOURCES_TOGETHER
            chunks += self._in_turn(name, prompts, budget)
        tokens = sum([chunk.tokens + chunk.encodes for chunk in chunks])
        pages = 2 * len(chunks) + tokens // cache.page_size
        if cache.free_pages < pages or (cache.windows and not cache.takes(pages)):
            return self._reserve(cache, name, chunks)
        return chunks  # there are enough: for each a copy of its last page, one that is begun, and full ones

    def _budget_beside(self, decoding: Sequence[Chunk]) -> int:
        """Number of tokens of prompts in a forward pass with these tokens of decoding sequences."""
        if not decoding:
            return self.limits.max_prompt_tokens
        budget = self.limits.max_batched_tokens
        return max(budget - sum(chunk.tokens for chunk in decoding), budget // PROMPT_SHARE, 1)

    def _in_turn(self, name: str, prompts: Sequence[Chunk], budget: int) -> list[Chunk]:
        """The part of each prompt that is computed in the next forward pass: see the module docstring.

        Args:
            name: the model's name
            prompts: with all their pending tokens, in the order in which their requests run
            budget: number of tokens for all of them
        """
        cache, waited = self.caches[name], self._waited.get(name, {})
        prompts = [chunk if chunk.run in waited else _to_compute(chunk, cache) for chunk in prompts]
        left = Counter[Run]()
        for chunk in prompts:
            left[chunk.run] += chunk.tokens + chunk.encodes
        due = min(prompts, key=lambda chunk: (chunk.run.request.priority, -waited.get(chunk.run, 0)))
        order = sorted(prompts, key=lambda chunk: (chunk.run.request.priority, left[chunk.run]))
        if due.encodes or due.whole >= due.tokens:  # no share is enough for what may not be split
            order.sort(key=lambda chunk: chunk is not due)
        chosen = self.chunks(order, budget, cache, due)
        served = {chunk.run for chunk in chosen} | {due.run}  # it itself, or another one computes its next tokens
        self._waited[name] = {run: 0 if run in served else waited.get(run, 0) + 1 for run in left}
        return chosen

    def chunks(self, prompts: Sequence[Chunk], budget: int, cache: PagedCache, due: Chunk | None = None) -> list[Chunk]:
        """The part of each prompt that fits into the next forward pass.

        A prompt waits if one before it computes its next tokens in this pass: then it will find them in the cache.

        Args:
            prompts: with all their pending tokens, in the order in which they are served
            budget: number of tokens for all of them; exceeded only if the first one may not be split. Those whose
                log-probabilities are wanted also share `MAX_ROWS`
            cache: the model's
            due: the one of them to which those before it leave a share
        """
        share = 0 if due is None else max(1, budget // PROMPT_SHARE)
        rows_share = MAX_ROWS // PROMPT_SHARE if due is not None and due.scored else 0
        rows, chosen = MAX_ROWS, list[Chunk]()
        leaders = Leaders(cache) if len(prompts) > 1 else None
        encoded: set[EncoderInput | None] = set()
        for chunk in prompts:
            if chunk is due:
                share = rows_share = 0
            if budget <= share:
                continue
            first = not (chosen or share)
            chunk = _to_compute(chunk, cache)
            if leaders is not None and chunk.skips and leaders.lead(chunk.sequence):
                continue
            encodes = 0 if chunk.sequence.encoder_input in encoded else chunk.encodes
            if encodes and encodes >= budget - share and not first:
                continue  # the encoder reads a source in one pass
            if due and share and chunk.tokens > budget - share and _leads(chunk, budget, due, cache):
                share = rows_share = 0  # it will find them
            count, scored = chunk.tokens, bool(chunk.scored)
            limit = max(1, budget - share - encodes)
            limit = min(limit, rows - rows_share) if scored else limit
            if count > limit:
                count = min(limit, count - chunk.whole)
                count = chunk.tokens if first and count == 0 else count
            if count:
                budget = max(0, budget - encodes - count)
                rows -= min(rows, count) if scored else 0
                encoded.add(chunk.sequence.encoder_input)
                chosen.append(chunk._replace(tokens=count))
                if leaders is not None:
                    leaders.add(chosen[-1])
        return chosen

    def _recompute(self, run: Run, name: str) -> Iterator[Chunk]:
        """Positions that a run lost by preemption."""
        for sequence, count, whole in run.recompute[name].positions(self.caches[name]):
            yield Chunk(run, None, sequence, count, whole)
        if run.recompute[name].done:
            del run.recompute[name]

    # --- who gives way -----------------------------------------------------------------------------------------------

    def _reserve(self, cache: PagedCache, name: str, chunks: list[Chunk]) -> list[Chunk]:
        """Give each sequence pages for its tokens, preempting requests if there are too few. Returns what is left."""
        gone: set[Run] = set()
        for chunk in chunks:
            while chunk.run not in gone:
                try:
                    cache.reserve(chunk.sequence, chunk.sequence.cached + chunk.tokens)
                    break
                except CacheFullError:
                    victim = choose_victim(chunk.run, self.running, self.caches, name)
                    if victim is None:  # it is alone: the pass will raise the error
                        break
                    self.preempt(victim)
                    gone.add(victim)
        return [chunk for chunk in chunks if chunk.run not in gone] if gone else chunks

    def preempt(self, run: Run) -> None:
        """Take all pages of a run, and queue it to be recomputed."""
        for name, live in run.live.items():
            if name not in run.recompute and any(sequence.cached for sequence in live):
                run.recompute[name] = Recompute.of(live)  # else it begins again with what it has lost already
            for sequence in live:
                self.caches[name].forget(sequence)
        self.running.remove(run)
        self.add(run)
        self._stats.preemptions += 1
