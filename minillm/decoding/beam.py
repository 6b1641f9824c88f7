"""Beam search: follow the num_beams likeliest beginnings at once, and return the best that end.

Each step scores every continuation of every beam by its summed log-probability and looks at the best
(1 + number of EOS ids) * num_beams of them, so that num_beams can go on even if the best all end. A candidate that
ends counts as a result only if it ranks among the first num_beams; its score is the sum divided by the generated
length to the power of length_penalty. Rules, and the order of floating-point operations, are those of transformers 5.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..backends.base import Backend
from ..errors import ParameterError
from ..ops.softmax import log_softmax
from .continuation import Continuation
from .parameters import Settings
from .processors import History, build_processors
from .strategy import Feed, Request, Rows, State, Strategy

NEVER = np.float32(-1e9)
"""The score of a beam that only copies the first, and of a result that is not there yet."""


@dataclass(eq=False)
class BeamState(State):
    """The running beams and the best results so far."""

    beams: list[Continuation] = field(default_factory=list)
    scores: Any = None
    """[beams], summed log-probabilities of the running beams, best first"""
    finished: list[tuple[float, Continuation]] = field(default_factory=list)
    """At most num_beams results, best first"""
    hopeful: bool = True
    """A running beam may still beat the worst result"""


class BeamSearch(Strategy):
    """Beam search over each request's own sequences, which share the prompt's pages in the cache."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        if settings.top_logprobs:
            raise ParameterError("top_logprobs is not offered with num_beams > 1: ask for logprobs, or one beam")
        self.num_beams = settings.num_beams
        self.processors = build_processors(settings)
        self.candidates = max(2, 1 + len(settings.eos_token_ids)) * self.num_beams

    def begin(self, request: Request) -> tuple[BeamState, list[Feed]]:
        """Feed the prompt once. Text is made while searching only if stop strings have to be found in it."""
        text = bool(request.settings.stop_strings)
        state = BeamState(request)
        state.beams = [request.continuation(i, text=text) for i in range(self.num_beams)]
        state.scores = np.full(self.num_beams, NEVER, np.float32)
        state.scores[0] = 0  # the first candidates all come from one beam: the others are its copies
        return state, [Feed(request.prompt_ids)]

    def step(self, ops: Backend, states: Sequence[State], rows: Rows) -> list[list[Feed]]:
        """Extend every request's beams by one token."""
        feeds, first = [], 0
        for state in states:
            assert isinstance(state, BeamState)
            feeds.append(self._advance(ops, state, rows.logits[first : first + state.feeds]))
            first += state.feeds
        return feeds

    def _advance(self, ops: Backend, state: BeamState, logits: Any) -> list[Feed]:
        """One step of one request. logits: [beams, V], or [1, V] after the prompt"""
        prompt_only = state.feeds == 1 and self.num_beams > 1
        scores, raw = self._log_probs(ops, state, logits)
        parents, tokens, sums = self._best(scores, state.scores)
        extended = [self._extend(state, p, t, raw) for p, t in zip(parents, tokens, strict=True)]
        ended = np.asarray([candidate.finish_reason is not None for candidate in extended])
        self._collect(state, extended, sums, ended)
        running = np.flatnonzero(~ended)[: self.num_beams]  # fewer where stop strings ended more than was expected
        state.beams, state.scores = [extended[i] for i in running], sums[running]
        if not state.beams or not self._goes_on(state):
            self._return_best(state)
            return []
        return [Feed((tokens[i],), parent=0 if prompt_only else parents[i]) for i in running]

    def _log_probs(self, ops: Backend, state: BeamState, logits: Any) -> tuple[Any, Any]:
        """Each row's log-probabilities, processed, and raw where log-probabilities are to be returned."""
        scores = log_softmax(logits, ops.xp)  # [beams, V]
        raw = scores.copy() if self.settings.logprobs and self.processors else scores
        if self.processors:
            prompt = state.request.prompt_ids
            lines = [prompt + beam.token_ids for beam in state.beams[: len(logits)]]
            flat = np.concatenate([np.asarray(line, np.int64) for line in lines])
            history = History(flat, np.cumsum([0, *map(len, lines)]), np.full(len(lines), len(prompt)))
            for processor in self.processors:
                scores = processor(history, scores, ops.xp)
        return scores, raw

    def _best(self, scores: Any, sums: Any) -> tuple[list[int], list[int], Any]:
        """The best candidates over all beams: their parents, tokens and summed log-probabilities.

        Args:
            scores: [beams, V], or [1, V] after the prompt, where every beam has the same
            sums: [beams]
        """
        total = (scores + sums[:, None]).reshape(-1)  # [beams, V] -> [beams V]
        count = min(self.candidates, total.size)
        top = np.argpartition(-total, count - 1)[:count]
        top = top[np.lexsort((top, -total[top]))]  # best first; of equal ones the smaller index
        V = scores.shape[-1]
        return [int(i) for i in top // V], [int(i) for i in top % V], total[top]

    def _extend(self, state: BeamState, parent: int, token: int, raw: Any) -> Continuation:
        """A beam with one more token."""
        candidate = state.beams[parent].fork()
        log_prob = float(raw[min(parent, len(raw) - 1), token]) if self.settings.logprobs else None
        candidate.push(token, log_prob)
        return candidate

    def _collect(self, state: BeamState, extended: list[Continuation], sums: Any, ended: Any) -> None:
        """Keep the num_beams best of the old results and the new ones."""
        if not state.hopeful:
            return
        if self.settings.early_stopping is True and len(state.finished) == self.num_beams:
            return
        length = len(extended[0].token_ids)
        for candidate, total in zip(extended[: self.num_beams], sums, strict=False):
            if candidate.finish_reason is not None:
                state.finished.append((float(total / np.float32(length**self.settings.length_penalty)), candidate))
        state.finished = sorted(state.finished, key=lambda result: -result[0])[: self.num_beams]

    def _goes_on(self, state: BeamState) -> bool:
        """Whether another step can change the results."""
        full = len(state.finished) == self.num_beams
        settings = self.settings
        best_length = len(state.beams[0].token_ids)
        if settings.early_stopping == "never" and settings.length_penalty > 0:
            best_length = state.request.max_new_tokens
        best_possible = state.scores[0] / np.float32(best_length**settings.length_penalty)
        worst_finished = state.finished[-1][0] if full else NEVER
        state.hopeful = state.hopeful and bool(best_possible > worst_finished)
        return state.hopeful and not (full and settings.early_stopping is True)

    def _return_best(self, state: BeamState) -> None:
        """Hand over the num_return_sequences best results."""
        best = state.finished[: self.settings.num_return_sequences]
        for index, (score, continuation) in enumerate(best):
            continuation.index, continuation.score = index, score
            if continuation.stream is None and state.request.text_stream is not None:
                continuation.stream = state.request.text_stream()
                for token in continuation.token_ids:
                    continuation.stream.push(token)
                continuation.stream.flush()
        state.results = [continuation for _, continuation in best]
