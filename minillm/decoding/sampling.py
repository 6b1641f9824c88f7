"""Greedy search and sampling, token by token: the most likely token, or a random draw after the filters.

One call serves all requests of a batch, whatever their settings (`row_pipeline.py`); rows that are changed before the
choice, or whose log-probabilities are wanted, cost extra, and others do not.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from ..backends.token_sampler import TokenSampler
from ..reference.philox import Keys
from ..reference.sampling import Draw, Parameters
from .continuation import Continuation, reports
from .prompt_scores import TopLogProbs
from .row_pipeline import Continuations, RowPipeline, take_rows
from .settings import Settings
from .strategy import Feed, Request, Rows, State, Strategy


@dataclass(eq=False)
class TokenState(State):
    """The unfinished continuations, in the order of their sequences."""

    growing: list[Continuation] = field(default_factory=list)


class Sampling(Strategy):
    """Take the most likely token, ties going to the smallest id; or, with `do_sample`, draw one at random.

    One uniform number per draw, keyed by the request's seed, the continuation's index and the token's position, so a
    draw depends on nothing else in the batch (`reference/philox.py`).
    """

    guided = True
    shared = True
    independent = True
    on_device = True  # it copies the rows to the host that are changed there

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.pipeline = RowPipeline.of(settings)

    @property
    def batch_key(self) -> object:
        """One for all requests, except those with a user's function, which may fail."""
        apart = self.settings.logits_processor or self.settings.prefix_allowed_tokens_fn
        return self if apart else Sampling

    def begin(self, request: Request) -> tuple[TokenState, list[Feed]]:
        """Feed the prompt once; continuations fork from it after the first step."""
        continuations = [request.continuation(i) for i in request.indices]
        state = TokenState(request, continuations, pipeline=self.pipeline, growing=list(continuations))
        draw = self.next_draw(state, continuations[0]) if len(continuations) == 1 else None
        return state, [Feed(request.prompt_ids, draw=draw)]

    def next_draw(self, state: State, continuation: Continuation) -> Draw | None:
        """The draw from unmodified logits that `choose` will make for a continuation's next token, if it will."""
        pipeline, request = state.pipeline, state.request
        if pipeline.changes or continuation.guide is not None or not pipeline.draw.temperature:
            return None
        return Draw(*pipeline.draw, request.settings.seed, continuation.index, _place(request, continuation))

    def choose(self, sampler: TokenSampler, logits: Any, growing: Continuations) -> list[int]:
        """Choose one token for each row of processed logits. [R, V] -> R ids"""
        draws = [state.pipeline.draw for state, _ in growing]
        if not any(draw.temperature for draw in draws):
            return [*map(int, sampler.argmax(logits))]
        columns = zip(Parameters._fields, zip(*draws, strict=True), strict=True)
        parameters: dict[str, Any] = {name: np.asarray(column) for name, column in columns}
        return [*map(int, sampler.sample(logits, keys_of(growing), **parameters))]

    def step(self, sampler: TokenSampler, states: Sequence[State], rows: Rows) -> list[list[Feed]]:
        """Choose a token for every growing continuation and feed it."""
        growing = [(state, c) for state in states if isinstance(state, TokenState) for c in state.growing]
        logits = take_rows(sampler, rows.logits, rows_per_continuation(states))  # [feeds, V] -> [R, V]
        self.extend(sampler, logits, growing)
        return [self.next_feeds(state) for state in states if isinstance(state, TokenState)]

    def extend(self, sampler: TokenSampler, logits: Any, growing: Continuations, raw: Any = None) -> None:
        """Give each continuation its next token.

        Args:
            sampler: the sampler of tokens
            logits: [R, V], one row per continuation; may be changed in place
            growing: the R continuations, each with its request's state
            raw: the model's own logits, if `logits` are something else

        A continuation that cannot continue, because processors and filters leave no token or because its guide or text
        fails, is left unchanged, with the error in its request's `State.error`.
        """
        changed, reported = list[int](), dict[int, int]()
        for row, (state, continuation) in enumerate(growing):
            if state.pipeline.changes or continuation.guide is not None:
                changed.append(row)
            if state.pipeline.top_logprobs is not None:
                reported[row] = state.pipeline.top_logprobs
        unchanged: Any = None
        if reported:
            at_risk = raw is None and sampler.on_host and not reported.keys().isdisjoint(changed)
            rows = [*reported]
            unchanged = (
                sampler.copied(logits, rows) if at_risk else take_rows(sampler, logits if raw is None else raw, rows)
            )
        if changed:
            from .row_processing import choose_processed  # most steps need none

            tokens = choose_processed(self.chosen, sampler, logits, growing, changed)
        else:
            tokens = self.chosen(sampler, logits, growing)
        row_reports: dict[int, tuple[float, TopLogProbs | None]] = {}
        if reported:
            chosen, tops = [tokens[row] for row in reported], [*reported.values()]
            row_reports = dict(zip(reported, reports(sampler, unchanged, chosen, tops), strict=True))
        for row, (state, continuation) in enumerate(growing):
            if state.error is None:
                try:
                    continuation.push(tokens[row], *row_reports.get(row, ()))
                except Exception as error:
                    state.error = error

    def chosen(self, sampler: TokenSampler, logits: Any, growing: Continuations) -> list[int]:
        """`choose` for all rows; on failure row by row, so that only the request with the bad row ends."""
        try:
            return self.choose(sampler, logits, growing)
        except Exception as error:
            if len(growing) == 1:
                growing[0][0].error = growing[0][0].error or error
                return [0]
            return [
                self.chosen(sampler, logits[row : row + 1], growing[row : row + 1])[0] for row in range(len(growing))
            ]

    def next_feeds(self, state: TokenState) -> list[Feed]:
        """Feed each unfinished continuation its newest token."""
        if state.error is not None:
            return []
        shared = state.feeds == 1
        feeds = [
            Feed((c.token_ids[-1],), parent=0 if shared else i, draw=self.next_draw(state, c))
            for i, c in enumerate(state.growing)
            if c.finish_reason is None
        ]
        state.growing = [continuation for continuation in state.growing if continuation.finish_reason is None]
        return feeds


def rows_per_continuation(states: Sequence[State]) -> list[int]:
    """The row of logits of each continuation; after the prompt a request's continuations share the same row."""
    sources: list[int] = []
    first = 0
    for state in states:
        assert isinstance(state, TokenState)
        count = len(state.growing)
        sources += [first] * count if state.feeds == 1 else range(first, first + count)
        first += state.feeds
    return sources


def keys_of(growing: Continuations, purpose: int = 0, ahead: ArrayLike = 0) -> Keys:
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
