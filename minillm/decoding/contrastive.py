"""Contrastive search and contrastive decoding, two unrelated strategies.

Contrastive search: among the most likely tokens, prefer one whose hidden state is unlike the context's.

Su et al., "A contrastive framework for neural text generation", arXiv 2202.06417, section 3.2, equation 5. Each of the
top_k most likely tokens v is fed to the model, and the one is kept that maximises

    (1 - alpha) p(v) - alpha max_j cos(h_v, h_j)

with h_v the hidden state behind v's logits (what the language model head multiplies, as in transformers) and h_j those
of the tokens before it, prompt included; alpha is penalty_alpha. So one step feeds top_k tokens that all continue one
sequence, and keeps one of them; its logits serve the next step. Greedy search with one token of lookahead costs as
much.

Contrastive decoding: prefer tokens that a large model finds more likely than a small one does (Li et al., "Contrastive
Decoding: Open-ended Text Generation as Optimization", arXiv 2210.15097, section 3).

The target is the expert. Among the tokens that are at least contrastive_alpha times as likely as its most likely one
(equation 2), each scores log p_expert - log p_amateur (equation 1), the amateur's logits divided by
amateur_temperature. Greedy search takes the best; sampling draws from the softmax of the scores. Processors and
filters see the scores.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..backends.token_sampler import TokenSampler
from ..errors import ParameterError
from ..reference.softmax import log_softmax, softmax, top_indices
from .continuation import Continuation, reports
from .history import History
from .paired import PairedSampling
from .processors import build_processors, no_token_left, rows_without_a_token
from .settings import Settings
from .strategy import Feed, Request, Rows, State, Strategy


@dataclass(eq=False)
class ContrastiveState(State):
    """The continuation, and the candidates for its next token."""

    candidates: list[int] = field(default_factory=list)
    """[k] ids, most likely first; empty before the prompt is computed"""
    probabilities: Any = None
    """[k], probabilities of the candidates"""
    directions: Any = None
    """[room, W]: the hidden state of each token so far, scaled to unit length; the rest is preallocated"""
    logits: Any = None
    """[1, V], the model's logits that the candidates come from; kept if log-probabilities are wanted"""

    @property
    def continuation(self) -> Continuation:
        """The request's only continuation."""
        return self.results[0]

    @property
    def line(self) -> list[int]:
        """All tokens, prompt first."""
        return self.request.prompt_ids + self.continuation.token_ids


class ContrastiveSearch(Strategy):
    """Contrastive search; see the module docstring."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.alpha = settings.penalty_alpha
        self.processors = build_processors(settings)

    @property
    def max_sequences(self) -> int:
        """One sequence per candidate."""
        candidates: int = self.settings.top_k
        return candidates

    def begin(self, request: Request) -> tuple[State, list[Feed]]:
        """Feed the prompt, and request the hidden state of each of its tokens."""
        state = ContrastiveState(request, [request.continuation(0)])
        return state, [Feed(request.prompt_ids, rows="all", hidden=True)]

    def step(self, sampler: TokenSampler, states: Sequence[State], rows: Rows) -> list[list[Feed]]:
        """Choose one of each request's candidates, and feed the candidates for the token after it."""
        answers, first = [], 0
        for state in states:
            assert isinstance(state, ContrastiveState)
            own = slice(rows.starts[first], rows.starts[first + state.feeds])
            answers.append(self._advance(sampler, state, rows.logits[own], rows.hidden[own]))
            first += state.feeds
        return answers

    def _advance(self, sampler: TokenSampler, state: ContrastiveState, logits: Any, hidden: Any) -> list[Feed]:
        """Run one step of one request.

        Args:
            sampler: the sampler for the rows
            state: the request's state
            logits: [k, V], one row per candidate; after the prompt [S, V]
            hidden: [k, W] or [S, W], the hidden states of the same rows
        """
        directions = hidden / sampler.xp.linalg.norm(hidden, axis=-1, keepdims=True)
        if not state.candidates:
            S, W = directions.shape
            state.directions = sampler.xp.empty((S + state.request.max_new_tokens, W), directions.dtype)
            state.directions[:S] = directions
            return self._feeds(sampler, state, logits[-1:], parent=0)
        chosen = self._choose(sampler, state, directions)
        state.directions[len(state.line)] = directions[chosen]
        token = state.candidates[chosen]
        reported = self.settings.logprobs
        report = reports(sampler, state.logits, [token], [self.settings.top_logprobs])[0] if reported else (None, None)
        state.continuation.push(token, *report)
        if state.continuation.finish_reason is not None:
            return []
        return self._feeds(sampler, state, logits[chosen : chosen + 1], parent=chosen)

    def _choose(self, sampler: TokenSampler, state: ContrastiveState, directions: Any) -> int:
        """Index of the best candidate; ties go to the more likely one. directions: [k, W], unit vectors"""
        similarity = state.directions[: len(state.line)] @ directions.T  # [S, W] @ [W, k] -> [S, k]
        scores = (1 - self.alpha) * state.probabilities - self.alpha * similarity.max(axis=0)  # -> [k]
        return int(scores.argmax())

    def _feeds(self, sampler: TokenSampler, state: ContrastiveState, logits: Any, parent: int) -> list[Feed]:
        """Feeds of the most likely tokens after the sequence `parent`: top_k, or fewer if fewer are allowed.

        Args:
            sampler: the sampler for the row
            state: the request's state
            logits: [1, V]
            parent: index of the sequence that the row belongs to

        Raises:
            ParameterError: top_k is more than the vocabulary has, or the processors leave no token.
        """
        V = logits.shape[-1]
        if self.settings.top_k > V:
            raise ParameterError(f"top_k={self.settings.top_k} is more than the vocabulary's {V} tokens: lower it")
        state.logits = logits.copy() if self.settings.logprobs else None
        scores = logits.copy()
        if self.processors:
            history = History.of([(state.request, state.continuation.token_ids)])
            for processor in self.processors:
                scores = processor(history, scores, sampler.xp)
        if rows_without_a_token(scores, sampler.xp).any():
            raise no_token_left()
        probabilities = softmax(scores, sampler.xp)[0]  # [1, V] -> [V]
        best = top_indices(scores[0], self.settings.top_k, sampler.xp)
        best = best[scores[0][best] > -sampler.xp.inf]  # forbidden tokens are no candidates
        state.candidates, state.probabilities = [int(i) for i in best], probabilities[best]
        return [Feed((token,), parent=parent, hidden=True) for token in state.candidates]


class ContrastiveDecoding(PairedSampling):
    """Feed both models the same tokens, and choose by the difference of their log-probabilities."""

    def begin(self, request: Request) -> tuple[State, list[Feed]]:
        """Feed the prompt to both models; continuations fork from it after the first step."""
        state, feeds = self.choice.begin(request)
        feeds = [feed._replace(draw=None) for feed in feeds]
        return state, [*feeds, *self.second_feeds(feeds, 0)]

    def second_feeds(self, feeds: list[Feed], sequences: int) -> list[Feed]:
        """The same for the amateur."""
        return [feed._replace(model="amateur") for feed in feeds]

    def combined(self, first: Any, second: Any, xp: Any) -> Any:
        """The contrastive scores, the first logits being the expert's. [R, V] each -> [R, V]"""
        return contrast(first, second, self.settings.contrastive_alpha, self.settings.amateur_temperature, xp)


def contrast(expert: Any, amateur: Any, alpha: float, temperature: float, xp: Any) -> Any:
    """Contrastive score of every token; -inf for tokens that are implausible to the expert.

    Args:
        expert: logits [R, V]
        amateur: logits [R, V]
        alpha: in [0, 1]; a token is plausible from this share of the most likely token's probability on
        temperature: the amateur's temperature
        xp: the array module
    """
    log_expert = log_softmax(expert, xp)
    log_amateur = log_softmax(amateur / temperature, xp)
    plausible = xp.exp(log_expert - log_expert.max(axis=-1, keepdims=True)) >= alpha  # [R, V]
    return xp.where(plausible, log_expert - log_amateur, -xp.inf)
