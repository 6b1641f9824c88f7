"""Guess several tokens, look at all of them in one pass of the model, keep those that it would have chosen itself.

A pass over a few tokens costs little more than a pass over one as long as memory is what takes the time. So each feed
holds the newest token and a guess at what follows it: a line, or a tree of several lines. Then, from the newest token
on, a token is chosen from the model's logits exactly as without guesses, with the same processors and the same uniform
number; if it stands in the guess, the logits after it are there already, and the next one is chosen from them. What
comes out is therefore the same, greedy or sampled, token by token. Sampling this way is speculative sampling
(arXiv 2211.17192, algorithm 1) with a draft that is sure of its guess: it is accepted with probability p(guess), and
otherwise the token is drawn from the others.

Where guesses come from is the business of the strategies built on this: `prompt_lookup`, `lookahead`, `speculative`.
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from ..backends.base import Backend
from .continuation import Continuation
from .greedy import GreedySearch
from .parameters import Settings
from .sampling import Sampling
from .speculation import Speculation
from .strategy import Feed, Request, Rows, State, Strategy


class Guess(NamedTuple):
    """What may follow the newest token."""

    tokens: Sequence[int] = ()
    parents: Sequence[int] = ()
    """Of each token, -1 where it follows the newest one; empty for a line"""

    def parent(self, node: int) -> int:
        """Place of the token before; -1 for the newest token."""
        return self.parents[node] if self.parents else node - 1

    def after(self, node: int) -> list[int]:
        """Places of the tokens guessed to follow."""
        return [child for child in range(len(self.tokens)) if self.parent(child) == node]

    @property
    def depth(self) -> int:
        """Guesses in a row, at most."""
        depths: list[int] = []
        for node in range(len(self.tokens)):
            parent = self.parent(node)
            depths.append(1 if parent < 0 else depths[parent] + 1)
        return max(depths, default=0)


@dataclass(eq=False)
class Line:
    """A continuation, the guess that was fed with it, and how far the guess has turned out right."""

    continuation: Continuation
    cached: int
    """Positions of prompt and continuation whose K/V lie in the cache in their places"""
    guess: Guess = field(default_factory=Guess)
    row: int = 0
    """The row of the newest token's logits; those of the guess follow"""
    node: int = -1
    """The last token of the guess that turned out right"""
    accepted: int = 0
    """How many turned out right"""

    def feed(self, request: Request, guess: Guess, parent: int) -> Feed:
        """Feed what the cache lacks, and a guess."""
        missing = (request.prompt_ids + self.continuation.token_ids)[self.cached :]
        feed = Feed(missing + list(guess.tokens), parent, keep=self.cached, rows="all", tree=guess.parents)
        self.cached += len(missing)
        self.guess, self.row, self.node, self.accepted = guess, len(missing) - 1, -1, 0
        return feed

    def follow(self, state: "GuessState") -> bool:
        """Go on to the continuation's newest token; whether the guess has it, so that another can be chosen."""
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
        if node == self.accepted:  # it lies where the continuation has it: the others will be computed once more
            self.cached += 1
        self.node = node
        self.accepted += 1
        return self.continuation.finish_reason is None


@dataclass(eq=False)
class GuessState(State):
    """The continuations that still grow, in the order of their sequences."""

    lines: list[Line] = field(default_factory=list)
    fresh: bool = True
    """So far only the prompt was fed, once for all continuations"""
    counts: Speculation = field(default_factory=Speculation)


class Guessing(Strategy):
    """Guess, verify, feed again. What derives from it guesses."""

    shared = True
    independent = True

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.choice: GreedySearch = Sampling(settings) if settings.do_sample else GreedySearch(settings)

    @abstractmethod
    def guess(self, state: Any, line: Line, room: int) -> Guess:
        """What may follow a continuation; at most `room` tokens deep."""

    def learn(self, backend: Backend, state: Any, line: Line, logits: Any) -> None:
        """Look at a line's logits, from the newest token on, when its guess is verified."""

    def begin(self, request: Request) -> tuple[State, list[Feed]]:
        """Feed the prompt once; continuations fork from it after the first step."""
        state = GuessState(request)
        self.set_up(state)
        return state, [Feed(request.prompt_ids)]

    def set_up(self, state: GuessState) -> None:
        """Empty continuations."""
        request = state.request
        state.results = [request.continuation(i) for i in request.indices]
        state.lines = [Line(continuation, len(request.prompt_ids)) for continuation in state.results]
        state.speculation = state.counts

    def step(self, backend: Backend, states: Sequence[State], rows: Rows) -> list[list[Feed]]:
        """Verify every line's guess, and feed the next one."""
        self.verify(backend, located(states, rows), rows)
        return [self.feeds(state) for state in states if isinstance(state, GuessState)]

    def verify(self, backend: Backend, located: list[tuple[GuessState, Line, int]], rows: Rows) -> None:
        """Choose tokens while they are those guessed.

        Args:
            backend: the backend
            located: lines, each with the row of its newest token's logits
            rows: of the last feeds
        """
        for state, line, _ in located:
            if not state.fresh:
                state.counts.depths[line.guess.depth] += 1
        walking = located
        while walking:
            logits = rows.logits[np.asarray([first + line.node + 1 for _, line, first in walking])]  # [N, V]
            self.choice.extend(backend, logits, [(state, line.continuation) for state, line, _ in walking])
            walking = [place for place in walking if place[0].error is None and place[1].follow(place[0])]
        for state, line, first in located:
            if state.error is None:
                self.learn(backend, state, line, rows.logits[first : first + 1 + len(line.guess.tokens)])

    def feeds(self, state: GuessState) -> list[Feed]:
        """Each continuation that still grows goes on with a new guess."""
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
    """Every line with the row of its newest token's logits. After the prompt they all share its row."""
    lines, feed = [], 0
    for state in states:
        assert isinstance(state, GuessState)
        for i, line in enumerate(state.lines):
            lines.append((state, line, rows.starts[feed + (0 if state.fresh else i)] + line.row))
        feed += state.feeds
    return lines
