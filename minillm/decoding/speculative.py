"""Speculative decoding: guess several tokens, verify all in one forward pass, keep those that the model would choose.

A pass over a few tokens costs little more than a pass over one as long as it is bound by memory. So each feed holds
the newest token and a guess at what follows it: a line, or a tree of several lines. Then, from the newest token on, a
token is chosen from the model's logits exactly as without guesses, with the same processors and the same uniform
number; if it is in the guess, the logits after it are already computed, and the next one is chosen from them. The
output is therefore the same, greedy or sampled, token by token. Sampling this way is speculative sampling
(arXiv 2211.17192, algorithm 1) with a deterministic draft: it is accepted with probability p(guess), and otherwise the
token is drawn from the others.

Subclasses supply the guesses: a draft model and prompt lookup (below), and lookahead decoding (`lookahead.py`).

Speculative sampling: a small draft model guesses, the target verifies (Leviathan et al., "Fast Inference from
Transformers via Speculative Decoding", arXiv 2211.17192; Chen et al., arXiv 2302.01318).

The draft draws num_assistant_tokens tokens one after the other, each from its own distribution q. One pass of the
target gives its distributions p after each of them. Algorithm 1 then takes a drafted token x with probability
min(1, p(x) / q(x)); the first that is not taken is drawn from max(0, p - q), renormalised, instead, and what was
drafted after it is dropped. If all are taken, one more token is drawn from the target. The tokens are distributed
exactly as the target's own. Processors and filters change p and q alike.

Greedy search is the limit of temperature 0: a drafted token is accepted if it is the target's most likely one.

Prompt lookup: the draft is copied from an earlier occurrence of the newest tokens.

The last max_matching_ngram_size tokens are searched for in the text before them, then fewer; the guess is the
prompt_lookup_num_tokens tokens after the first match. Summaries, corrections and lists repeat their prompt, and the
only cost is the wider pass. Saxena, "Prompt Lookup Decoding", 2023; the rules are those of transformers'
`PromptLookupCandidateGenerator`.
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from ..backends.token_sampler import TokenSampler
from ..reference.philox import Keys
from ..reference.softmax import softmax
from .acceptance import Speculation
from .continuation import Continuation
from .filters import build_filters
from .history import History
from .processors import SHORT_MATCH, build_processors, common_suffixes, rows_without_a_token
from .row_pipeline import Continuations, RowPipeline
from .sampling import Sampling, keys_of
from .settings import Settings
from .strategy import Feed, Request, Rows, State, Strategy


class Guess(NamedTuple):
    """Guessed tokens after the newest one: a line or a tree."""

    tokens: Sequence[int] = ()
    parents: Sequence[int] = ()
    """Parent of each token, -1 if it follows the newest one; empty for a line"""

    def parent(self, node: int) -> int:
        """Index of the preceding token; -1 for the newest token."""
        return self.parents[node] if self.parents else node - 1

    def after(self, node: int) -> list[int]:
        """Indices of the tokens guessed to follow."""
        return [child for child in range(len(self.tokens)) if self.parent(child) == node]

    @property
    def depth(self) -> int:
        """Length of the longest path."""
        depths: list[int] = []
        for node in range(len(self.tokens)):
            parent = self.parent(node)
            depths.append(1 if parent < 0 else depths[parent] + 1)
        return max(depths, default=0)


@dataclass(eq=False)
class Line:
    """A continuation, the guess fed with it, and how much of the guess was accepted."""

    continuation: Continuation
    cached: int
    """Leading positions of prompt and continuation whose K/V are in the cache"""
    guess: Guess = field(default_factory=Guess)
    row: int = 0
    """Row of the newest token's logits; the guess's rows follow"""
    node: int = -1
    """Index of the last accepted token of the guess"""
    accepted: int = 0
    """Number of accepted tokens"""

    def feed(self, request: Request, guess: Guess, parent: int) -> Feed:
        """Feed the tokens missing from the cache, and a guess."""
        missing = (request.prompt_ids + self.continuation.token_ids)[self.cached :]
        feed = Feed(missing + list(guess.tokens), parent, keep=self.cached, rows="all", tree=guess.parents)
        self.cached += len(missing)
        self.guess, self.row, self.node, self.accepted = guess, len(missing) - 1, -1, 0
        return feed

    def follow(self, state: "GuessState") -> bool:
        """Advance to the continuation's newest token. Returns True if it is in the guess, so another can be chosen."""
        if state.fresh:
            return False
        counts = state.counts
        candidates = self.guess.after(self.node)
        token = self.continuation.token_ids[-1]
        node = next((node for node in candidates if self.guess.tokens[node] == token), None)
        counts.tokens += 1
        counts.judged += bool(candidates)
        counts.accepted += node is not None
        if node is None:
            return False
        if node == self.accepted:  # it is at the continuation's position in the cache; other nodes are recomputed
            self.cached += 1
        self.node = node
        self.accepted += 1
        return self.continuation.finish_reason is None


@dataclass(eq=False)
class GuessState(State):
    """The unfinished continuations, in the order of their sequences."""

    lines: list[Line] = field(default_factory=list)
    fresh: bool = True
    """True while only the prompt was fed, once for all continuations"""
    counts: Speculation = field(default_factory=Speculation)


class Guessing(Strategy):
    """Base of the speculative strategies: guess, verify, feed again. Subclasses make the guesses."""

    shared = True
    independent = True

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.choice = Sampling(settings)

    @abstractmethod
    def guess(self, state: Any, line: Line, room: int) -> Guess:
        """Guess the tokens after a continuation, at most `room` deep."""

    def learn(self, sampler: TokenSampler, state: Any, line: Line, logits: Any) -> None:
        """Hook: called with a line's logits, from the newest token on, when its guess is verified."""

    def begin(self, request: Request) -> tuple[State, list[Feed]]:
        """Feed the prompt once; continuations fork from it after the first step."""
        state = GuessState(request)
        self.set_up(state)
        return state, [Feed(request.prompt_ids)]

    def set_up(self, state: GuessState) -> None:
        """Create the request's empty continuations."""
        request, state.pipeline = state.request, self.choice.pipeline
        state.results = [request.continuation(i) for i in request.indices]
        state.lines = [Line(continuation, len(request.prompt_ids)) for continuation in state.results]
        state.speculation = state.counts

    def step(self, sampler: TokenSampler, states: Sequence[State], rows: Rows) -> list[list[Feed]]:
        """Verify each line's guess, and feed the next one."""
        self.verify(sampler, located(states, rows), rows)
        return [self.feeds(state) for state in states if isinstance(state, GuessState)]

    def verify(self, sampler: TokenSampler, located: list[tuple[GuessState, Line, int]], rows: Rows) -> None:
        """Choose tokens as long as they match the guesses.

        Args:
            sampler: the sampler of tokens
            located: lines, each with the row of its newest token's logits
            rows: results of the last feeds
        """
        for state, line, _ in located:
            if not state.fresh:
                state.counts.depths[line.guess.depth] += 1
        walking = located
        while walking:
            logits = rows.logits[np.asarray([first + line.node + 1 for _, line, first in walking])]  # [N, V]
            self.choice.extend(sampler, logits, [(state, line.continuation) for state, line, _ in walking])
            walking = [place for place in walking if place[0].error is None and place[1].follow(place[0])]
        for state, line, first in located:
            if state.error is None:
                self.learn(sampler, state, line, rows.logits[first : first + 1 + len(line.guess.tokens)])

    def feeds(self, state: GuessState) -> list[Feed]:
        """Feed each unfinished continuation with a new guess."""
        if state.error is not None:
            return []
        growing = [(i, line) for i, line in enumerate(state.lines) if line.continuation.finish_reason is None]
        state.lines = [line for _, line in growing]
        feeds = []
        for i, line in growing:
            room = state.request.max_new_tokens - len(line.continuation.token_ids) - 1
            feeds.append(line.feed(state.request, self.guess(state, line, room), 0 if state.fresh else i))
        state.fresh = False
        return feeds


def located(states: Sequence[State], rows: Rows) -> list[tuple[GuessState, Line, int]]:
    """Each line with the row of its newest token's logits. After the prompt all share one row."""
    lines, feed = [], 0
    for state in states:
        assert isinstance(state, GuessState)
        for i, line in enumerate(state.lines):
            lines.append((state, line, rows.starts[feed + (0 if state.fresh else i)] + line.row))
        feed += state.feeds
    return lines


class PromptLookup(Guessing):
    """Guess by prompt lookup."""

    def guess(self, state: GuessState, line: Line, room: int) -> Guess:
        """The tokens after an earlier occurrence of the newest ones."""
        tokens = state.request.prompt_ids + line.continuation.token_ids
        count = min(room, self.settings.prompt_lookup_num_tokens)
        return Guess(look_up(tokens, self.settings.max_matching_ngram_size, count))


def look_up(tokens: Sequence[int], longest: int, count: int) -> list[int]:
    """Up to `count` tokens after the first earlier occurrence of the last n tokens, for the greatest n that has one.

    The cost is linear in the tokens, whatever `longest`.

    Args:
        tokens: all so far
        longest: the greatest n to try
        count: maximum number of tokens
    """
    line = np.asarray(tokens, np.int64)
    ends, n = np.arange(1, len(line)), 0  # positions right after an occurrence of the last n tokens
    while n < min(longest, SHORT_MATCH):
        longer = ends[ends > n]
        longer = longer[line[longer - 1 - n] == line[-1 - n]]
        if not len(longer):
            break
        ends, n = longer, n + 1
    if n == SHORT_MATCH < longest:
        lengths = common_suffixes(line)
        ends = np.flatnonzero(lengths >= min(longest, int(lengths.max())))
    if n == 0:
        return []
    return [int(token) for token in line[ends[0] : ends[0] + count]]


DRAFT, ACCEPT, RESIDUAL = 1, 2, 3
"""Purposes of draws (see `reference/philox.py`): the draft's token, its acceptance, and its replacement."""


@dataclass(eq=False)
class Draft:
    """Tokens drafted for one continuation, and the draft model's cache state."""

    cached: int
    """Positions of prompt and continuation whose K/V are in the draft model's cache"""
    target_place: int = 0
    """Index of the target's sequence among its last feeds"""
    draft_place: int = 0
    """Index of the draft model's sequence, likewise"""
    start: int = 0
    """Length of the continuation when drafting began"""
    tokens: list[int] = field(default_factory=list)
    probabilities: list[Any] = field(default_factory=list)
    """q of each token, [V]; sampling only"""


@dataclass(eq=False)
class DraftState(GuessState):
    """A draft for each continuation, by its index."""

    drafts: dict[int, Draft] = field(default_factory=dict)
    drafting: int = 0
    """Length of each continuation's draft; 0 while waiting for the target's logits"""


class SpeculativeDecoding(Guessing):
    """Speculative decoding with a draft model."""

    shared = False  # drawing a draft may fail in the middle of a step

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.choice = AcceptOrResample(settings) if settings.do_sample else Sampling(settings)
        self.distribution = Distribution(settings)

    def begin(self, request: Request) -> tuple[State, list[Feed]]:
        """Feed the prompt to both models."""
        state = DraftState(request)
        self.set_up(state)
        state.drafts = {line.continuation.index: Draft(len(request.prompt_ids)) for line in state.lines}
        return state, [Feed(request.prompt_ids), Feed(request.prompt_ids, model="draft")]

    def step(self, sampler: TokenSampler, states: Sequence[State], rows: Rows) -> list[list[Feed]]:
        """Draft one more token for some requests, verify the drafts of others."""
        places = located(states, rows)
        self._draft(sampler, [place for place in places if _drafting(place[0])], rows)
        self.verify(sampler, [place for place in places if not _drafting(place[0])], rows)
        return [self.feeds(state) for state in states if isinstance(state, DraftState)]

    def guess(self, state: DraftState, line: Line, room: int) -> Guess:
        """The drafted tokens."""
        return Guess(tuple(state.drafts[line.continuation.index].tokens))

    def feeds(self, state: GuessState) -> list[Feed]:
        """Feed the draft model until the draft is complete, then the target."""
        assert isinstance(state, DraftState)
        if state.error is not None:
            return []
        if not state.drafting:
            state.lines = [line for line in state.lines if line.continuation.finish_reason is None]
            self._start_drafts(state)
        lengths = [len(state.drafts[line.continuation.index].tokens) for line in state.lines]
        if not state.lines or lengths[0] < state.drafting:
            return self._feed_draft(state)
        state.drafting = 0
        feeds = []
        for place, line in enumerate(state.lines):
            draft = state.drafts[line.continuation.index]
            feeds.append(line.feed(state.request, self.guess(state, line, len(draft.tokens)), draft.target_place))
            draft.target_place = place
        return feeds

    def _start_drafts(self, state: DraftState) -> None:
        """Reset the drafts. All continuations of a request draft equally many tokens, as each needs a feed."""
        rooms = [state.request.max_new_tokens - len(line.continuation.token_ids) - 1 for line in state.lines]
        state.drafting = min([self.settings.num_assistant_tokens, *rooms])
        state.fresh = False
        for line in state.lines:
            draft, continuation = state.drafts[line.continuation.index], line.continuation
            draft.start = len(continuation.token_ids)
            draft.cached = min(draft.cached, len(state.request.prompt_ids) + draft.start - 1)
            draft.tokens, draft.probabilities, line.row = [], [], 0

    def _feed_draft(self, state: DraftState) -> list[Feed]:
        """Feed the draft model the tokens missing from its cache."""
        feeds = []
        for place, line in enumerate(state.lines):
            draft = state.drafts[line.continuation.index]
            tokens = state.request.prompt_ids + line.continuation.token_ids + draft.tokens
            feeds.append(Feed(tokens[draft.cached :], draft.draft_place, keep=draft.cached, model="draft"))
            draft.draft_place, draft.cached = place, len(tokens)
        return feeds

    def _draft(self, sampler: TokenSampler, places: list[tuple[GuessState, Line, int]], rows: Rows) -> None:
        """Choose each draft's next token."""
        if not places:
            return
        drafts = [(state, line.continuation, _draft_of(state, line.continuation)) for state, line, _ in places]
        sequences = [(state.request, c.token_ids + draft.tokens) for state, c, draft in drafts]
        history = History.of(sequences, indices=[c.index for _, c, _ in drafts])
        scores = self.distribution(sampler, history, rows.logits[np.asarray([row for *_, row in places])])  # [N, V]
        if not self.settings.do_sample:
            tokens = sampler.argmax(scores)
        else:
            q = softmax(scores, sampler.xp)
            ahead = [len(draft.tokens) for *_, draft in drafts]
            tokens = _draw(sampler, scores, keys_of([(state, c) for state, c, _ in drafts], DRAFT, ahead))
            for (*_, draft), row in zip(drafts, q, strict=True):
                draft.probabilities.append(row)
        for (*_, draft), token in zip(drafts, tokens, strict=True):
            draft.tokens.append(int(token))


class Distribution:
    """Turns logits into the scores whose softmax is sampled: processors, then filters."""

    def __init__(self, settings: Settings) -> None:
        self.processors, self.filters = build_processors(settings), build_filters(settings)

    def __call__(self, sampler: TokenSampler, history: History, logits: Any) -> Any:
        """Apply processors and filters. [N, V] -> [N, V]; `logits` may be changed."""
        for processor in self.processors:
            logits = processor(history, logits, sampler.xp)
        if self.processors:  # no allowed token: any draft will do, since the target decides
            logits[rows_without_a_token(logits, sampler.xp)] = 0.0
        for filter_ in self.filters:
            logits = filter_(history, logits, sampler.xp)
        return logits


class AcceptOrResample(Sampling):
    """Sampling with a draft: accept the drafted token, or draw from the residual distribution."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.pipeline = RowPipeline.of(settings, masked=True)  # p, as Algorithm 1 compares it

    def choose(self, sampler: TokenSampler, logits: Any, growing: Continuations) -> list[int]:
        """Choose one token for each row of processed logits. [R, V] -> R ids"""
        drafted = [
            _draft_of(state, c).start + len(_draft_of(state, c).tokens) > len(c.token_ids) for state, c in growing
        ]
        tokens = [-1] * len(growing)
        for judge, choose in ((True, self._accept_or_resample), (False, super().choose)):
            rows = [row for row, is_drafted in enumerate(drafted) if is_drafted is judge]
            if rows:
                chosen = choose(sampler, logits[np.asarray(rows)], [growing[row] for row in rows])
                for row, token in zip(rows, chosen, strict=True):
                    tokens[row] = token
        return tokens

    def _accept_or_resample(self, sampler: TokenSampler, scores: Any, growing: Continuations) -> list[int]:
        """Apply algorithm 1 to one drafted token per row."""
        p = softmax(scores, sampler.xp)  # [R, V]
        drafts = [(_draft_of(state, c), len(c.token_ids)) for state, c in growing]
        drafted = np.asarray([draft.tokens[length - draft.start] for draft, length in drafts])
        q = sampler.xp.stack([draft.probabilities[length - draft.start] for draft, length in drafts])  # [R, V]
        accepted = self.accepts(p, q, drafted, keys_of(growing, ACCEPT).uniforms())
        tokens = [int(token) for token in drafted]
        rejected = [row for row, is_accepted in enumerate(accepted) if not is_accepted]
        if rejected:
            scores = residual_scores(p[rejected], q[rejected], sampler.xp)
            instead = _draw(sampler, scores, keys_of([growing[row] for row in rejected], RESIDUAL))
            for row, token in zip(rejected, instead, strict=True):
                tokens[row] = int(token)
        return tokens

    def accepts(self, p: Any, q: Any, drafted: Any, uniforms: Any) -> Any:
        """Accept each drafted token with probability min(1, p / q). [R, V], [R, V], [R], [R] -> [R] bool"""
        rows = np.arange(len(drafted))
        return uniforms * q[rows, drafted] < p[rows, drafted]


def residual_scores(p: Any, q: Any, xp: Any) -> Any:
    """Logarithm of max(0, p - q), or of p if that is all zero (p = q, always accepted). [R, V] -> [R, V]"""
    residual = xp.maximum(p - q, 0)
    residual = xp.where(residual.any(axis=-1, keepdims=True), residual, p)
    return xp.where(residual > 0, xp.log(xp.maximum(residual, xp.finfo(residual.dtype).tiny)), -xp.inf)


def _draw(sampler: TokenSampler, scores: Any, keys: Keys) -> Any:
    """Draw one token for each row, without filters. [R, V] -> [R]"""
    return sampler.sample(scores, keys, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)


def _drafting(state: State) -> bool:
    return isinstance(state, DraftState) and state.drafting > 0


def _draft_of(state: State, continuation: Continuation) -> Draft:
    assert isinstance(state, DraftState)
    return state.drafts[continuation.index]
