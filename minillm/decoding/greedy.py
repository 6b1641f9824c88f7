"""Token by token: greedy search, and the steps that sampling shares with it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..backends.base import Backend
from ..ops.softmax import chosen_log_probs, top_log_probs
from .continuation import Continuation, TopLogProbs
from .parameters import Settings
from .processors import History, build_processors
from .strategy import Feed, Request, Rows, State, Strategy


@dataclass(eq=False)
class TokenState(State):
    """Which continuations still grow, in the order of their sequences."""

    growing: list[Continuation] = field(default_factory=list)


class GreedySearch(Strategy):
    """Take the likeliest token, one at a time; of equal logits the smallest id."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.processors = build_processors(settings)

    def begin(self, request: Request) -> tuple[TokenState, list[Feed]]:
        """Feed the prompt once; continuations fork from it after the first step."""
        continuations = [request.continuation(i) for i in range(request.settings.num_return_sequences)]
        return TokenState(request, continuations, growing=list(continuations)), [Feed(request.prompt_ids)]

    def choose(self, ops: Backend, logits: Any, growing: Sequence[tuple[State, Continuation]]) -> list[int]:
        """One token for each row of processed logits. [R, V] -> R ids"""
        return [int(token) for token in ops.argmax(logits)]

    def step(self, ops: Backend, states: Sequence[State], rows: Rows) -> list[list[Feed]]:
        """Choose a token for every growing continuation and feed it."""
        growing = [(state, c) for state in states if isinstance(state, TokenState) for c in state.growing]
        self.extend(ops, _row_per_continuation(rows, states), growing)  # [feeds, V] -> [R, V]
        return [self.next_feeds(state) for state in states if isinstance(state, TokenState)]

    def extend(self, ops: Backend, logits: Any, growing: Sequence[tuple[State, Continuation]], raw: Any = None) -> None:
        """Give each continuation its next token.

        Args:
            ops: the back end
            logits: [R, V], a row for each continuation; may be changed in place
            growing: the continuations, each with the state of its request
            raw: the model's own logits, where `logits` are something else
        """
        raw = logits if raw is None else raw
        report = Report(ops, raw, self.settings, changing=raw is logits and bool(self.processors))
        if self.processors:
            history = history_of([(state.request, continuation.token_ids) for state, continuation in growing])
            for processor in self.processors:
                logits = processor(history, logits, ops.xp)
        tokens = self.choose(ops, logits, growing)
        for row, (token, (_, continuation)) in enumerate(zip(tokens, growing, strict=True)):
            continuation.push(token, *report.of(row, token))

    def next_feeds(self, state: TokenState) -> list[Feed]:
        """Each continuation that still grows is fed its newest token."""
        shared = state.feeds == 1
        feeds = [
            Feed((continuation.token_ids[-1],), parent=0 if shared else i)
            for i, continuation in enumerate(state.growing)
            if continuation.finish_reason is None
        ]
        state.growing = [continuation for continuation in state.growing if continuation.finish_reason is None]
        return feeds


def _row_per_continuation(rows: Rows, states: Sequence[State]) -> Any:
    """After the prompt several continuations look at the same row; from then on each has its own."""
    sources: list[int] = []
    first = 0
    for state in states:
        assert isinstance(state, TokenState)
        shared = state.feeds == 1
        sources += [first if shared else first + i for i in range(len(state.growing))]
        first += state.feeds
    return rows.logits if sources == list(range(len(rows.logits))) else rows.logits[np.asarray(sources)]


def history_of(generated: Sequence[tuple[Request, list[int]]]) -> History:
    """All tokens that each row has seen, prompt first, flat."""
    lines = [request.prompt_ids + tokens for request, tokens in generated]
    starts = np.cumsum([0, *map(len, lines)])
    prompts = [len(request.prompt_ids) for request, _ in generated]
    return History(np.concatenate([np.asarray(line, np.int64) for line in lines]), starts, np.asarray(prompts))


class Report:
    """Log-probabilities of the model's own distribution, before processors change it; computed only where asked."""

    def __init__(self, ops: Backend, logits: Any, settings: Settings, *, changing: bool) -> None:
        self._wanted = settings.logprobs
        self._top: tuple[Any, Any] | None = None
        if self._wanted:
            self._raw = logits.copy() if changing else logits
            if settings.top_logprobs:
                self._top = top_log_probs(logits, settings.top_logprobs, ops.xp)
        self._xp = ops.xp

    def of(self, row: int, token: int) -> tuple[float | None, TopLogProbs | None]:
        """The chosen token's log-probability and the top n, for `Continuation.push`."""
        if not self._wanted:
            return None, None
        log_prob = float(chosen_log_probs(self._raw[row : row + 1], np.asarray([token]), self._xp)[0])
        if self._top is None:
            return log_prob, None
        ids, values = self._top
        return log_prob, [(int(i), float(v)) for i, v in zip(ids[row], values[row], strict=True)]
