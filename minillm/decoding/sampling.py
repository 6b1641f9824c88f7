"""Greedy search and sampling, token by token. They differ only in the choice: the most likely token, or a random draw
after the filters.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from ..backends.chooser import Chooser
from ..reference.philox import Keys
from ..reference.sampling import Draw
from .continuation import Continuation, Report
from .filters import MinP, Temperature, TopK, TopP, build_filters
from .guided import restrict
from .processors import History, LogitsProcessor, build_processors, no_token_left, rows_without_a_token
from .settings import Settings
from .strategy import Feed, Request, Rows, State, Strategy


@dataclass(eq=False)
class TokenState(State):
    """The unfinished continuations, in the order of their sequences."""

    growing: list[Continuation] = field(default_factory=list)


class GreedySearch(Strategy):
    """Take the most likely token, one at a time; ties go to the smallest id."""

    guided = True
    shared = True
    independent = True

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.processors = build_processors(settings)
        self.filters: tuple[LogitsProcessor, ...] = ()
        """Filters that mask the rows before `choose`; set by `Sampling`"""

    @property
    def on_device(self) -> bool:
        """True if nothing but the choice itself is needed."""
        return not (self.processors or self.filters or self.settings.logprobs)

    def begin(self, request: Request) -> tuple[TokenState, list[Feed]]:
        """Feed the prompt once; continuations fork from it after the first step."""
        continuations = [request.continuation(i) for i in request.indices]
        draw = self.next_draw(request, continuations[0]) if len(continuations) == 1 else None
        return TokenState(request, continuations, growing=list(continuations)), [Feed(request.prompt_ids, draw=draw)]

    def next_draw(self, request: Request, continuation: Continuation) -> Draw | None:
        """The draw from unmodified logits that `choose` will make for a continuation's next token, if it will."""
        return None

    def choose(self, chooser: Chooser, logits: Any, growing: Sequence[tuple[State, Continuation]]) -> list[int]:
        """Choose one token for each row of processed logits. [R, V] -> R ids"""
        return [int(token) for token in chooser.argmax(logits)]

    def step(self, chooser: Chooser, states: Sequence[State], rows: Rows) -> list[list[Feed]]:
        """Choose a token for every growing continuation and feed it."""
        growing = [(state, c) for state in states if isinstance(state, TokenState) for c in state.growing]
        self.extend(chooser, _row_per_continuation(chooser, rows, states), growing)  # [feeds, V] -> [R, V]
        return [self.next_feeds(state) for state in states if isinstance(state, TokenState)]

    def extend(
        self, chooser: Chooser, logits: Any, growing: Sequence[tuple[State, Continuation]], raw: Any = None
    ) -> None:
        """Give each continuation its next token.

        Args:
            chooser: the chooser of tokens
            logits: [R, V], one row per continuation; may be changed in place
            growing: the continuations, each with its request's state
            raw: the model's own logits, if `logits` are something else

        A continuation that cannot continue, because processors and filters leave no token or because its guide or text
        fails, is left unchanged, with the error in its request's `State.error`.
        """
        guided = any(continuation.guide is not None for _, continuation in growing)
        changing = raw is None and (guided or bool(self.processors or self.filters))
        report = Report(chooser, logits if raw is None else raw, self.settings, changing=changing)
        if guided or self.processors or self.filters:
            logits = self._processed(chooser, logits, growing, guided=guided)
        tokens = self._chosen(chooser, logits, growing)
        for row, (token, (state, continuation)) in enumerate(zip(tokens, growing, strict=True)):
            if state.error is None:
                try:
                    continuation.push(token, *report.of(row, token))
                except Exception as error:
                    state.error = error

    def _chosen(self, chooser: Chooser, logits: Any, growing: Sequence[tuple[State, Continuation]]) -> list[int]:
        """`choose` for all rows; on failure row by row, so that only the request with the bad row ends."""
        try:
            return self.choose(chooser, logits, growing)
        except Exception as error:
            if len(growing) == 1:
                growing[0][0].error = error
                return [0]
            return [
                self._chosen(chooser, logits[row : row + 1], growing[row : row + 1])[0] for row in range(len(growing))
            ]

    def _processed(
        self, chooser: Chooser, logits: Any, growing: Sequence[tuple[State, Continuation]], *, guided: bool
    ) -> Any:
        """Apply processors, then guides, then filters. [R, V] -> [R, V]"""
        unprocessed = logits.copy() if guided and self.processors else logits
        history = History.of([(state.request, continuation.token_ids) for state, continuation in growing])
        for processor in self.processors:
            logits = processor(history, logits, chooser.xp)
        if guided:
            restrict(logits, [continuation.guide for _, continuation in growing], unprocessed, chooser.xp)
        # Before the filters: they keep a token in each row that has one, and fail on a row that has none.
        for row in chooser.xp.flatnonzero(rows_without_a_token(logits, chooser.xp)).tolist():
            growing[row][0].error = no_token_left()
            logits[row] = 0.0  # any choice will do: it is discarded
        for filter_ in self.filters:
            logits = filter_(history, logits, chooser.xp)
        return logits

    def next_feeds(self, state: TokenState) -> list[Feed]:
        """Feed each unfinished continuation its newest token."""
        if state.error is not None:
            return []
        shared = state.feeds == 1
        feeds = [
            Feed((c.token_ids[-1],), parent=0 if shared else i, draw=self.next_draw(state.request, c))
            for i, c in enumerate(state.growing)
            if c.finish_reason is None
        ]
        state.growing = [continuation for continuation in state.growing if continuation.finish_reason is None]
        return feeds


def _row_per_continuation(chooser: Chooser, rows: Rows, states: Sequence[State]) -> Any:
    """One row of logits per continuation; after the prompt a request's continuations share the same row."""
    sources: list[int] = []
    first = 0
    for state in states:
        assert isinstance(state, TokenState)
        shared = state.feeds == 1
        sources += [first if shared else first + i for i in range(len(state.growing))]
        first += state.feeds
    if sources == list(range(len(rows.logits))):
        return rows.logits
    return chooser.xp.take(rows.logits, chooser.xp.asarray(sources), axis=0)


UNFILTERED: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}


class Sampling(GreedySearch):
    """Draw tokens at random instead of taking the most likely one.

    One uniform number per draw, keyed by the request's seed, the continuation's index and the token's position, so a
    draw depends on nothing else in the batch (`reference/philox.py`).
    """

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        filters = build_filters(settings)
        if all(isinstance(filter_, Temperature | TopK | TopP | MinP) for filter_ in filters):
            self.drawn = {name: getattr(settings, name) for name in UNFILTERED}
        else:  # the draw itself does not support the others: let all of them mask the row
            self.filters = filters
            self.drawn = UNFILTERED

    def next_draw(self, request: Request, continuation: Continuation) -> Draw | None:
        """The draw that `choose` will make, or None if the logits are changed first."""
        if not self.on_device or request.guide is not None:
            return None
        place = _place(request, continuation)
        return Draw(**self.drawn, seed=request.settings.seed, sequence=continuation.index, position=place)

    def choose(self, chooser: Chooser, logits: Any, growing: Sequence[tuple[State, Continuation]]) -> list[int]:
        """Draw one token for each row of processed logits. [R, V] -> R ids"""
        return [int(token) for token in chooser.sample(logits, keys_of(growing), **self.drawn)]


def keys_of(growing: Sequence[tuple[State, Continuation]], purpose: int = 0, ahead: ArrayLike = 0) -> Keys:
    """Random keys of each continuation's next token, or of the one `ahead` tokens further. [R]"""
    return Keys(
        np.asarray([state.request.settings.seed for state, _ in growing], np.uint64),
        np.asarray([continuation.index for _, continuation in growing]),
        np.asarray([_place(state.request, continuation) for state, continuation in growing]) + np.asarray(ahead),
        purpose,
    )


def _place(request: Request, continuation: Continuation) -> int:
    """The position of a continuation's next token."""
    return len(request.prompt_ids) + len(continuation.token_ids)
