"""Lookahead decoding: speculation without a draft model (Fu et al., "Break the Sequential Dependency of LLM Inference
Using Lookahead Decoding", arXiv 2402.02057, section 3).

Greedy tokens solve x[i] = argmax p(. | x[:i]) for all i at once. Jacobi's iteration starts from any x and computes all
right-hand sides in one pass; a window of the last N - 1 iterations over W positions ahead of the text is kept:

    level 0    x0  a1  a2  a3       x0 is the newest token; each level is one iteration further,
    level 1    b1  b2  b3  b4       and begins one position further
    level 2    c2  c3  c4  c5

A token attends to the text, to level 0 up to its own column, and to the tokens above it in its column. So each column
is a line of N - 1 tokens, and the pass predicts one more: an N-gram, which goes into a pool under its first token. In
the same pass up to G of the pool's N-grams that begin with the newest token are verified. Window and N-grams form one
tree, in which lines share common prefixes; the window's own lines are guesses too, and are verified for free.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..backends.token_sampler import TokenSampler
from ..reference.philox import uniform
from .settings import Settings
from .speculative import Guess, Guessing, GuessState, Line
from .strategy import Feed, Request, State

FILLING = 4
"""Purpose of the draws that fill the window (see `reference/philox.py`); they affect only the number of passes."""


@dataclass(eq=False)
class Window:
    """Jacobi iterations and N-gram pool of one continuation."""

    levels: list[list[int]]
    """[N - 1][W]; the first token of level 0 is the newest of the text"""
    pool: dict[int, list[tuple[int, ...]]] = field(default_factory=dict)
    """First token -> the N - 1 tokens that followed it, latest last"""
    ends: list[int] = field(default_factory=list)
    """For each column that was fed, the index of its last token in the guess; -1: the newest token"""
    length: int = 0
    """Length of the continuation when the window was fed"""


@dataclass(eq=False)
class LookaheadState(GuessState):
    """A window for each continuation, by its index."""

    windows: dict[int, Window] = field(default_factory=dict)


class Lookahead(Guessing):
    """Lookahead decoding: guesses by Jacobi iteration."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.window, self.ngram = settings.lookahead_window, settings.lookahead_ngram_size
        self.extra_positions = (self.window + settings.lookahead_guesses) * (self.ngram - 1)

    def begin(self, request: Request) -> tuple[State, list[Feed]]:
        """Feed the prompt; each window is initialised with random tokens of the prompt."""
        state = LookaheadState(request)
        self.set_up(state)
        for line in state.lines:
            levels = [self._draw(request, line, level, self.window) for level in range(self.ngram - 1)]
            state.windows[line.continuation.index] = Window(levels)
        return state, [Feed(request.prompt_ids)]

    def guess(self, state: LookaheadState, line: Line, room: int) -> Guess:
        """The pool's N-grams that begin with the newest token, followed by the window."""
        window = state.windows[line.continuation.index]
        newest = line.continuation.token_ids[-1]
        window.levels[0][0] = newest
        window.length = len(line.continuation.token_ids)
        tree = Tree()
        for ngram in reversed(window.pool.get(newest, [])):
            tree.add(ngram[:room])
        window.ends = tree.add_window(window.levels, room)
        return Guess(tree.tokens, tree.parents)

    def learn(self, sampler: TokenSampler, state: LookaheadState, line: Line, logits: Any) -> None:
        """Collect the N-grams completed by the pass, and move the window to the new end of the text."""
        window = state.windows[line.continuation.index]
        if state.fresh or line.continuation.finish_reason is not None:
            return
        latest = (
            [int(token) for token in sampler.argmax(logits[[end + 1 for end in window.ends]])] if window.ends else []
        )
        for column, token in enumerate(latest):
            first, *rest = (level[column] for level in window.levels)
            self._remember(window, first, (*rest, token))
        shift = len(line.continuation.token_ids) - window.length - 1
        for level, row in enumerate([*window.levels[1:], latest]):
            remaining = row[shift:]
            window.levels[level] = remaining + self._draw(state.request, line, level, self.window - len(remaining))

    def _remember(self, window: Window, first: int, rest: tuple[int, ...]) -> None:
        """Add an N-gram to the pool, which keeps the latest G with the same first token."""
        ngrams = window.pool.setdefault(first, [])
        if rest in ngrams:
            ngrams.remove(rest)
        ngrams.append(rest)
        del ngrams[: -self.settings.lookahead_guesses]

    def _draw(self, request: Request, line: Line, level: int, count: int) -> list[int]:
        """Random prompt tokens for window positions without an iteration yet."""
        first = len(request.prompt_ids) + len(line.continuation.token_ids)
        uniforms = uniform(
            request.settings.seed, line.continuation.index, first + np.arange(count), FILLING + level
        )  # [count]
        return [request.prompt_ids[int(u * len(request.prompt_ids))] for u in uniforms]


class Tree:
    """Prefix tree of guessed token sequences after the newest token."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self._places: dict[tuple[int, int], int] = {}

    def add(self, line: Sequence[int], parent: int = -1) -> int:
        """Add a line after `parent`. Returns the index of its last token."""
        for token in line:
            key = parent, token
            if key not in self._places:
                self._places[key] = len(self.tokens)
                self.tokens.append(token)
                self.parents.append(parent)
            parent = self._places[key]
        return parent

    def add_window(self, levels: Sequence[Sequence[int]], room: int) -> list[int]:
        """Add the columns that end at most `room` tokens deep. Returns the index of each one's last token."""
        deepest = len(levels) - 1  # depth of the first column, whose first token is the newest one
        ends, above = [], -1
        for column in range(min(len(levels[0]), room - deepest + 1)):
            if column > 0:
                above = self.add([levels[0][column]], above)
            ends.append(self.add([level[column] for level in levels[1:]], above))
        return ends
