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
the same tokens the first one computes these, and the others wait for its pages: nothing is remembered of that, so
whatever becomes of the first one, in the next step they find what it has computed or compute it themselves. A step
looks at each prompt once, and at none any more when its budget is spent: those that wait for their turn cost little.

If a page is missing, a request is preempted (Kwon et al., "PagedAttention", arXiv 2309.06180, section 4.5): it gives
back its pages, keeps its tokens and its strategy's state, and waits in front of the queue. When it is admitted again,
its keys and values are recomputed and it goes on. The first running request by priority and arrival is never preempted,
and may preempt every other one; so it gets its next token in each step, or tokens of its prompt in one of N, until it
ends, then the next one is the first: whoever waits is served after finitely many steps, unless requests of higher
priority arrive for ever.
"""

import time
from bisect import insort
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ..backends.memory import Memory
from ..batch import TokenSequence, common_prefix
from ..cache import PagedCache
from ..cache.prefix import WORTH_WAITING
from ..decoding.continuation import Progress
from ..decoding.prompt_scores import MAX_ROWS, PromptScores
from ..decoding.stats import Stats
from ..decoding.strategy import Feed, Request, State, Strategy
from ..errors import CacheFullError
from ..runner.runner import Slice
from ..source_text import SourceText

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
        """The limits of an engine, `max_batched_tokens` by default those of the backend's memory."""
        budget = max_batched_tokens or max(memory.max_batched_tokens, max_batch_size)
        return cls(max_batch_size, budget, max(memory.max_prompt_tokens, budget))


@dataclass(frozen=True)
class Load:
    """Use of the engine between two steps."""

    waiting: int
    """Requests of which nothing runs: new or preempted ones"""
    running: int
    """Requests that run, at least in part"""
    sequences: int
    """Sequences of running requests"""
    free_pages: int
    """Pages of the K/V cache that a request can get without preemption; of several models' caches, of the fullest"""
    cached_pages: int
    """Those of them in which prompts may find what they begin with, in the target's cache"""
    total_pages: int
    """Pages of the K/V cache"""
    preemptions: int
    """Number of preemptions so far"""


class LostSequence(NamedTuple):
    """A sequence of a preempted request."""

    sequence: TokenSequence
    cached: int
    """Number of positions to recompute"""
    source: TokenSequence | None
    """The sequence with the longest common prefix among those that are recomputed before it"""
    common: int
    """Length of that prefix, whose pages they share"""


class Lost(NamedTuple):
    """The sequences of one model that a preempted request needs again, longest first."""

    sequences: list[LostSequence]
    pages: int
    """Number of pages that they had"""

    @classmethod
    def of(cls, live: Sequence[TokenSequence]) -> "Lost":
        """The positions to recompute if these sequences give back their pages.

        Longest first: then a sequence that is a prefix of another shares all its pages, as it may have done before. So
        together they need no more pages than they had.
        """
        lost: list[LostSequence] = []
        for sequence in sorted(live, key=lambda sequence: -sequence.cached):
            if not sequence.cached:
                break
            line = sequence.token_ids[: sequence.line]
            lengths = [common_prefix(line, other.sequence.token_ids[: other.sequence.line]) for other in lost]
            common = max(lengths, default=0)
            source = lost[lengths.index(common)].sequence if common else None
            lost.append(LostSequence(sequence, sequence.cached, source, common))
        return cls(lost, num_pages(live))


@dataclass(eq=False)
class Active:
    """A queued or running request, or a part of one."""

    id: int
    request: Request
    strategy: Strategy
    width: int
    """Maximum number of sequences it runs at once"""
    priority: int = 0
    """Smaller ones come first"""
    order: int = 0
    """Place in the order of arrival"""
    first_pages: int = 0
    """Number of pages that must be free for it to begin"""
    max_pages: int = 0
    """Maximum number of pages it needs"""
    state: State | None = None
    live: dict[str, list[TokenSequence]] = field(default_factory=dict)
    """Sequences by model, in the order of the last feeds to it"""
    feeds: list[Feed] = field(default_factory=list)
    fed: list[TokenSequence] = field(default_factory=list)
    """The sequence of each feed"""
    outputs: list[Slice | None] = field(default_factory=list)
    """Output of each feed; None until it is computed"""
    started: bool = False
    """True once the prompt has been computed"""
    lost: dict[str, Lost] = field(default_factory=dict)
    """By model, what is to be recomputed after a preemption before its feeds go on"""
    passed: int = 0
    """Number of later requests admitted before it"""
    admitted_at: float | None = None
    """When it began, in seconds of `time.monotonic`"""
    started_at: float | None = None
    """When its prompt was computed"""
    cached_tokens: int | None = None
    """Prompt tokens found in the prefix cache; None before the first pass"""
    prompt_scores: PromptScores | None = None
    """Receiver of the prompt's log-probabilities, until they are reported"""
    sources: dict[str, SourceText] = field(default_factory=dict)
    """By model, the source that all of its sequences attend to, if they have one"""

    @property
    def ready(self) -> bool:
        """True if the outputs of all feeds are computed, and its sequences are in the cache."""
        return bool(self.outputs) and None not in self.outputs and not self.lost

    def keep_outputs(self) -> None:
        """Copy the outputs so far, so that they outlive the next forward pass."""
        self.outputs = [piece and piece.copy() for piece in self.outputs]

    @property
    def times(self) -> tuple[float, float, float]:
        """Seconds in the queue, until the prompt was computed, and since then."""
        now = time.monotonic()
        admitted = now if self.admitted_at is None else self.admitted_at
        started = now if self.started_at is None else self.started_at
        return admitted - self.request.created, started - admitted, now - started

    def reported(self, progress: Progress) -> Progress:
        """Progress of one of its results, with what is known of the request."""
        progress.prompt_tokens, progress.cached_tokens = len(self.request.given_ids), self.cached_tokens or 0
        if progress.finish_reason is not None:
            progress.times = self.times
        if self.prompt_scores is not None and self.prompt_scores.complete:
            progress.prompt_scores, self.prompt_scores = self.prompt_scores, None
        return progress

    def skips(self, feed: Feed) -> bool:
        """True if positions of a feed need not be computed where the cache has them: nobody wants their logits."""
        return feed.rows == "last" and (self.prompt_scores is None or self.started or feed.model != "target")

    @property
    def longest(self) -> int:
        """Maximum number of cache positions of one of its sequences."""
        return len(self.request.prompt_ids) + self.request.max_new_tokens + self.strategy.extra_positions


class Piece(NamedTuple):
    """Tokens of one sequence to compute in a forward pass."""

    active: Active
    feed: int | None
    """Index among the feeds of the request; None: positions that are recomputed, whose logits nobody needs"""
    sequence: TokenSequence
    tokens: int
    """Number of tokens"""
    whole: int = 0
    """Number of the last of them that may not be split"""

    @property
    def skips(self) -> bool:
        """True if what the cache has of it need not be computed."""
        return self.feed is None or self.active.skips(self.active.feeds[self.feed])

    @property
    def encodes(self) -> int:
        """Tokens of its source that the encoder has to read first."""
        source = self.sequence.source
        return 0 if source is None or source.computed else len(source.token_ids)

    @property
    def scored(self) -> range:
        """Positions whose logits the log-probabilities of the prompt need."""
        scores = self.active.prompt_scores
        if scores is None or self.active.started or self.feed is None or self.active.feeds[self.feed].model != "target":
            return range(0)
        return scores.wanted(self.sequence.cached, self.tokens)


class _Leaders:
    """The prompts of a pass so far, found by the tokens that they compute next: one look for each later prompt."""

    def __init__(self, cache: PagedCache) -> None:
        self._cache = cache
        self._pieces: list[Piece] = []
        self._at: dict[int, dict[tuple[int, ...], list[Piece]]] = {}
        """By a position where a later prompt goes on: those that compute it, by their next `WORTH_WAITING` tokens"""

    def add(self, piece: Piece) -> None:
        """Add a prompt with the tokens that the pass computes of it."""
        self._pieces.append(piece)
        for position, found in self._at.items():
            self._note(piece, position, found)

    def lead(self, follower: TokenSequence) -> bool:
        """True if the pass computes tokens that `follower` then need not."""
        at = follower.cached
        if not (self._pieces and self._cache.prefix_cache) or len(follower.token_ids) - at <= WORTH_WAITING:
            return False
        found = self._at.get(at)
        if found is None:
            found = self._at[at] = {}
            for piece in self._pieces:
                self._note(piece, at, found)
        ahead = found.get(_next_tokens(follower, at), ())
        return any(self._cache.computes_next(one.sequence, one.tokens, follower) for one in ahead)

    def _note(self, piece: Piece, position: int, found: dict[tuple[int, ...], list[Piece]]) -> None:
        if piece.sequence.cached <= position < piece.sequence.cached + piece.tokens:
            found.setdefault(_next_tokens(piece.sequence, position), []).append(piece)


def _to_compute(piece: Piece, cache: PagedCache) -> Piece:
    """A prompt without what the cache has of it, which it takes over."""
    if not piece.skips or piece.feed is None or piece.tokens == 1:
        return piece
    cache.match(piece.sequence)
    return piece._replace(tokens=piece.sequence.pending)


def _leads(piece: Piece, count: int, due: Piece, cache: PagedCache) -> bool:
    """True if computing `count` tokens of one prompt computes tokens that another one then need not."""
    due = _to_compute(due, cache)
    return due.skips and cache.computes_next(piece.sequence, count, due.sequence)


def _next_tokens(sequence: TokenSequence, position: int) -> tuple[int, ...]:
    return tuple(sequence.token_ids[position : position + WORTH_WAITING])


class Scheduler:
    """Chooses the requests and the tokens of each step; see the module docstring."""

    def __init__(self, limits: Limits, caches: Mapping[str, PagedCache], stats: Stats) -> None:
        """Args:
        limits: of one step
        caches: of each model, by name
        stats: where preemptions are counted
        """
        self.limits = limits
        self.waiting: list[Active] = []
        """In the order in which they are to be admitted"""
        self.running: list[Active] = []
        """In the order of priority, then of arrival"""
        self._caches = caches
        self._stats = stats
        self._waited: dict[str, dict[Active, int]] = {}
        """By model, the passes in which the prompts of each request have got nothing since they last got tokens"""

    # --- which requests run ------------------------------------------------------------------------------------------

    def add(self, active: Active) -> None:
        """Queue a request: by priority, then those that were preempted, then by arrival."""
        insort(self.waiting, active, key=lambda one: (one.priority, one.state is None, one.order))

    def remove(self, active: Active) -> None:
        """Remove a finished or aborted request, running or queued."""
        (self.running if active in self.running else self.waiting).remove(active)

    def admit(self) -> list[Active]:
        """Move requests from the queue into the batch while they fit, as every one does alone. Returns them."""
        places = self.limits.max_batch_size - sum(active.width for active in self.running)
        if not self.waiting or places <= 0:
            return []
        pages = self._uncommitted_pages()
        admitted: list[Active] = []
        too_large: list[Active] = []
        most_passed = 0  # the most that one of these was passed; a thousand may wait
        for active in self.waiting:
            needed = self._pages_to_begin(active)
            if active.width > places or needed > pages:
                too_large.append(active)
                most_passed = max(most_passed, active.passed)
            else:
                admitted.append(active)
                places, pages, active.passed = places - active.width, pages - needed, 0
                for other in too_large:
                    other.passed += 1
                most_passed += bool(too_large)
            if places <= 0 or most_passed >= MAX_PASSES:
                break
        for active in admitted:
            self.waiting.remove(active)
            insort(self.running, active, key=lambda one: (one.priority, one.order))
        return admitted

    @property
    def may_admit(self) -> bool:
        """True if `admit` might admit a request now."""
        return bool(self.waiting) and sum(active.width for active in self.running) < self.limits.max_batch_size

    def _uncommitted_pages(self) -> int:
        """Free pages less those that the running requests need for their next tokens."""
        return min(
            (
                cache.free_pages - sum(self._pages_ahead(active, name) for active in self.running)
                for name, cache in self._caches.items()
            ),
            default=0,
        )

    def _pages_to_begin(self, active: Active) -> int:
        """Number of pages that must be free for a queued request."""
        if not active.started:
            return active.first_pages
        return max(self._pages_ahead(active, name) for name in self._caches)

    def _pages_ahead(self, active: Active, name: str) -> int:
        """Number of pages that a request still needs in one cache for its next `headroom` tokens."""
        live = active.live.get(name, [])
        held, headroom = num_pages(live), self.limits.headroom
        if headroom is None:
            return max(0, active.max_pages - held)
        if not active.started:
            return max(0, active.first_pages - held)
        cache, lost, needed = self._caches[name], active.lost.get(name), held
        had = {sequence: len(sequence.pages) for sequence in live}
        if lost is not None:
            needed = lost.pages
            had |= {one.sequence: cache.pages_for(one.cached) for one in lost.sequences}
        for sequence in live:
            positions = min(len(sequence.token_ids) + headroom, active.longest)
            needed += max(0, cache.pages_for(positions) - had[sequence])
        return max(0, min(needed, active.max_pages) - held)

    @property
    def num_waiting(self) -> int:
        """Number of requests in the queue of which nothing runs."""
        if not self.waiting:
            return 0
        return len({active.id for active in self.waiting}.difference(active.id for active in self.running))

    def load(self) -> Load:
        """Use of the engine now."""
        return Load(
            waiting=self.num_waiting,
            running=len({active.id for active in self.running}),
            sequences=sum(len(active.live.get("target", ())) for active in self.running),
            free_pages=min((cache.free_pages for cache in self._caches.values()), default=0),
            cached_pages=self._caches["target"].cached_pages if self._caches else 0,
            total_pages=min((cache.num_pages for cache in self._caches.values()), default=0),
            preemptions=self._stats.preemptions,
        )

    # --- how many tokens ---------------------------------------------------------------------------------------------

    def schedule(self, name: str) -> list[Piece]:
        """The tokens that one model computes next, each sequence with pages for them. It may preempt requests.

        Args:
            name: of the model
        """
        cache = self._caches[name]
        pieces: list[Piece] = []
        prompts: list[Piece] = []
        for active in self.running:
            if name in active.lost:
                prompts += self._recompute(active, name)
                if name in active.lost:
                    continue
            started, outputs, fed = active.started, active.outputs, active.fed
            for i, feed in enumerate(active.feeds):
                if outputs[i] is not None or feed.model != name:
                    continue
                sequence = fed[i]
                pending = len(sequence.token_ids) - sequence.cached
                if started and pending <= len(feed.tokens):
                    pieces.append(Piece(active, i, sequence, pending))
                else:
                    whole = 1 if feed.rows == "last" else len(feed.tokens)
                    prompts.append(Piece(active, i, sequence, pending, whole))
        if prompts:
            budget = self._budget_beside(pieces)
            if not pieces and any(piece.encodes for piece in prompts):
                budget *= SOURCES_TOGETHER
            pieces += self._in_turn(name, prompts, budget)
        tokens = sum([piece.tokens + piece.encodes for piece in pieces])
        if cache.free_pages < 2 * len(pieces) + tokens // cache.page_size:
            return self._reserve(cache, name, pieces)
        return pieces  # there are enough: for each a copy of its last page, one that is begun, and full ones

    def _budget_beside(self, decoding: Sequence[Piece]) -> int:
        """Number of tokens of prompts in a forward pass with these tokens of decoding sequences."""
        if not decoding:
            return self.limits.max_prompt_tokens
        budget = self.limits.max_batched_tokens
        return max(budget - sum(piece.tokens for piece in decoding), budget // PROMPT_SHARE, 1)

    def _in_turn(self, name: str, prompts: Sequence[Piece], budget: int) -> list[Piece]:
        """The part of each prompt that is computed in the next forward pass: see the module docstring.

        Args:
            name: of the model
            prompts: with all their pending tokens, in the order in which their requests run
            budget: number of tokens for all of them
        """
        cache, waited = self._caches[name], self._waited.get(name, {})
        prompts = [piece if piece.active in waited else _to_compute(piece, cache) for piece in prompts]
        left = Counter[Active]()
        for piece in prompts:
            left[piece.active] += piece.tokens + piece.encodes
        due = min(prompts, key=lambda piece: (piece.active.priority, -waited.get(piece.active, 0)))
        order = sorted(prompts, key=lambda piece: (piece.active.priority, left[piece.active]))
        if due.encodes or due.whole >= due.tokens:  # no share is enough for what may not be split
            order.sort(key=lambda piece: piece is not due)
        chosen = self.chunks(order, budget, cache, due)
        served = {piece.active for piece in chosen} | {due.active}  # it itself, or another one computes its next tokens
        self._waited[name] = {active: 0 if active in served else waited.get(active, 0) + 1 for active in left}
        return chosen

    def chunks(self, prompts: Iterable[Piece], budget: int, cache: PagedCache, due: Piece | None = None) -> list[Piece]:
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
        rows, chosen, leaders = MAX_ROWS, list[Piece](), _Leaders(cache)
        encoded: set[SourceText | None] = set()
        for piece in prompts:
            if piece is due:
                share = rows_share = 0
            if budget <= share:
                continue
            first = not (chosen or share)
            piece = _to_compute(piece, cache)
            if piece.skips and leaders.lead(piece.sequence):
                continue
            encodes = 0 if piece.sequence.source in encoded else piece.encodes
            if encodes and encodes >= budget - share and not first:
                continue  # the encoder reads a source in one pass
            if due and share and piece.tokens > budget - share and _leads(piece, budget, due, cache):
                share = rows_share = 0  # it will find them
            count, scored = piece.tokens, bool(piece.scored)
            limit = max(1, budget - share - encodes)
            limit = min(limit, rows - rows_share) if scored else limit
            if count > limit:
                count = min(limit, count - piece.whole)
                count = piece.tokens if first and count == 0 else count
            if count:
                budget = max(0, budget - encodes - count)
                rows -= min(rows, count) if scored else 0
                encoded.add(piece.sequence.source)
                chosen.append(piece._replace(tokens=count))
                leaders.add(chosen[-1])
        return chosen

    def _recompute(self, active: Active, name: str) -> Iterator[Piece]:
        """Positions that a request lost by preemption, except those that wait for another sequence's common prefix."""
        cache, done = self._caches[name], True
        for sequence, cached, source, common in active.lost[name].sequences:
            if source is not None and not sequence.cached and source.cached >= common:
                twin = cache.fork(source, common)
                sequence.pages, sequence.cached = twin.pages, twin.cached
            begins = source is None or sequence.cached > 0
            if begins and sequence.cached < cached:
                cache.match(sequence, cached)
            done = done and sequence.cached >= cached
            if begins and sequence.cached < cached:
                tree = cached - (len(sequence.token_ids) - len(sequence.tree))  # positions of a tree that it had
                yield Piece(active, None, sequence, cached - sequence.cached, max(0, tree))
        if done:
            del active.lost[name]

    # --- who gives way -----------------------------------------------------------------------------------------------

    def _reserve(self, cache: PagedCache, name: str, pieces: list[Piece]) -> list[Piece]:
        """Give each sequence pages for its tokens, preempting requests if there are too few. Returns what is left."""
        gone: set[Active] = set()
        for piece in pieces:
            while piece.active not in gone:
                try:
                    cache.reserve(piece.sequence, piece.sequence.cached + piece.tokens)
                    break
                except CacheFullError:
                    victim = self._victim(piece.active, name)
                    if victim is None:  # it is alone: the pass will raise the error
                        break
                    self.preempt(victim)
                    gone.add(victim)
        return [piece for piece in pieces if piece.active not in gone] if gone else pieces

    def _victim(self, needy: Active, name: str) -> Active | None:
        """The request to preempt so that `needy` gets a page: of the lowest priority, and cheapest to recompute.

        It may be `needy` itself, unless that is the first of all, so never one of higher priority. None if no other
        one has a page to give.
        """
        candidates = [active for active in self.running[1:] if active is needy or self._own_pages(active, name)]
        return max(candidates, key=lambda one: (one.priority, -self._cost(one), one.order), default=None)

    def _cost(self, active: Active) -> int:
        """Number of positions that it alone has in the caches, those that its sequences share counted once."""
        return sum(sum(self._own_pages(active, name).values()) for name in active.live)

    def _own_pages(self, active: Active, name: str) -> dict[int, int]:
        """The pages of one cache that no other request uses, and the number of positions computed in each."""
        cache, owners = self._caches[name], Counter[int]()
        positions: dict[int, int] = {}
        for sequence in active.live.get(name, ()):
            owners.update(sequence.pages)
            for i, page in enumerate(sequence.pages):
                computed = min(cache.page_size, max(0, sequence.cached - i * cache.page_size))
                positions[page] = max(positions.get(page, 0), computed)
            if sequence.source is not None and sequence is active.live[name][0]:
                owners.update(sequence.source.pages)
                positions |= dict.fromkeys(sequence.source.pages, cache.page_size)
        return {page: positions[page] for page, count in owners.items() if count == cache.owners(page)}

    def preempt(self, active: Active) -> None:
        """Take all pages of a running request, and queue it to be recomputed."""
        for name, live in active.live.items():
            if name not in active.lost and any(sequence.cached for sequence in live):
                active.lost[name] = Lost.of(live)  # else it begins again with what it has lost already
            for sequence in live:
                self._caches[name].forget(sequence)
        self.running.remove(active)
        self.add(active)
        self._stats.preemptions += 1


def num_pages(live: Sequence[TokenSequence]) -> int:
    """Number of pages of some sequences and of their sources, those that they share counted once."""
    own = len(live[0].pages) if len(live) == 1 else len({page for sequence in live for page in sequence.pages})
    return own + sum(len(source.pages) for source in {sequence.source for sequence in live} if source is not None)
