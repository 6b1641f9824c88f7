"""Contrastive search: of the likeliest tokens take one that does not say what has been said already.

Su et al., "A contrastive framework for neural text generation", arXiv 2202.06417, section 3.2, equation 5. Each of the
top_k likeliest tokens v is fed to the model, and the one is kept that maximises

    (1 - alpha) p(v) - alpha max_j cos(h_v, h_j)

with h_v the hidden state behind v's logits (what the language model head multiplies, as in transformers) and h_j those
of the tokens before it, prompt included; alpha is penalty_alpha. So one step feeds top_k tokens that all continue one
sequence, and keeps one of them; the logits that came with it serve the next step. A greedy search that looks one token
ahead costs as much.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..backends.base import Backend
from ..errors import ParameterError
from ..reference.softmax import softmax
from ..reference.top import top_indices
from .continuation import Continuation
from .parameters import Settings
from .processors import History, build_processors, no_token_left, rows_without_a_token
from .report import Report
from .strategy import Feed, Request, Rows, State, Strategy


@dataclass(eq=False)
class ContrastiveState(State):
    """The continuation, and the tokens that may be its next."""

    candidates: list[int] = field(default_factory=list)
    """[k] ids, likeliest first; empty before the prompt is computed"""
    probabilities: Any = None
    """[k], of the candidates"""
    directions: Any = None
    """[room, W]: the hidden state of each token so far, scaled to length 1; the rest is room for those to come"""
    report: Report | None = None
    """On the logits that the candidates come from"""

    @property
    def continuation(self) -> Continuation:
        """What grows."""
        return self.results[0]

    @property
    def line(self) -> list[int]:
        """All tokens, prompt first."""
        return self.request.prompt_ids + self.continuation.token_ids


class ContrastiveSearch(Strategy):
    """See the module's text."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.alpha = settings.penalty_alpha
        self.processors = build_processors(settings)

    @property
    def max_sequences(self) -> int:
        """Every candidate is a sequence."""
        return self.settings.top_k

    def begin(self, request: Request) -> tuple[State, list[Feed]]:
        """Feed the prompt, and ask for the state behind each of its tokens."""
        state = ContrastiveState(request, [request.continuation(0)])
        return state, [Feed(request.prompt_ids, rows="all", hidden=True)]

    def step(self, backend: Backend, states: Sequence[State], rows: Rows) -> list[list[Feed]]:
        """Choose one of each request's candidates, and feed those that may follow it."""
        answers, first = [], 0
        for state in states:
            assert isinstance(state, ContrastiveState)
            own = slice(rows.starts[first], rows.starts[first + state.feeds])
            answers.append(self._advance(backend, state, rows.logits[own], rows.hidden[own]))
            first += state.feeds
        return answers

    def _advance(self, backend: Backend, state: ContrastiveState, logits: Any, hidden: Any) -> list[Feed]:
        """One step of one request.

        Args:
            backend: the backend that made the rows
            state: of the request
            logits: [k, V], one row per candidate; after the prompt [S, V]
            hidden: [k, W] or [S, W], the states behind them
        """
        directions = hidden / backend.xp.linalg.norm(hidden, axis=-1, keepdims=True)
        if not state.candidates:
            S, W = directions.shape
            state.directions = backend.xp.empty((S + state.request.max_new_tokens, W), directions.dtype)
            state.directions[:S] = directions
            return self._feeds(backend, state, logits[-1:], parent=0)
        chosen = self._choose(backend, state, directions)
        state.directions[len(state.line)] = directions[chosen]
        assert state.report is not None
        state.continuation.push(state.candidates[chosen], *state.report.of(0, state.candidates[chosen]))
        if state.continuation.finish_reason is not None:
            return []
        return self._feeds(backend, state, logits[chosen : chosen + 1], parent=chosen)

    def _choose(self, backend: Backend, state: ContrastiveState, directions: Any) -> int:
        """The place of the best candidate; of equal ones the likelier. directions: [k, W], of length 1"""
        similarity = state.directions[: len(state.line)] @ directions.T  # [S, W] @ [W, k] -> [S, k]
        scores = (1 - self.alpha) * state.probabilities - self.alpha * similarity.max(axis=0)  # -> [k]
        return int(scores.argmax())

    def _feeds(self, backend: Backend, state: ContrastiveState, logits: Any, parent: int) -> list[Feed]:
        """The likeliest tokens, each after the sequence `parent`: top_k, or fewer where fewer are allowed.

        Args:
            backend: the backend that made the row
            state: of the request
            logits: [1, V]
            parent: place of the sequence whose row it is

        Raises:
            ParameterError: top_k is more than the vocabulary has, or the processors leave no token.
        """
        V = logits.shape[-1]
        if self.settings.top_k > V:
            raise ParameterError(f"top_k={self.settings.top_k} with penalty_alpha is more than the vocabulary's {V}")
        state.report = Report(backend, logits, self.settings, changing=True)
        scores = logits.copy()
        if self.processors:
            history = History.of([(state.request, state.continuation.token_ids)])
            for processor in self.processors:
                scores = processor(history, scores, backend.xp)
        if rows_without_a_token(scores, backend.xp).any():
            raise no_token_left()
        probabilities = softmax(scores, backend.xp)[0]  # [1, V] -> [V]
        best = top_indices(scores[0], self.settings.top_k, backend.xp)
        best = best[scores[0][best] > -backend.xp.inf]  # what is forbidden is no candidate
        state.candidates, state.probabilities = [int(i) for i in best], probabilities[best]
        return [Feed((token,), parent=parent, hidden=True) for token in state.candidates]
