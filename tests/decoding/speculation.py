"""Two toy speculations, written against `decoding/strategy.py` alone: they show that the interface carries them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from minillm.backends.token_sampler import TokenSampler
from minillm.decoding.continuation import Continuation
from minillm.decoding.strategy import Feed, Request, Rows, State, Strategy


@dataclass(eq=False)
class GuessState(State):
    """One continuation, and what was guessed to follow its newest token."""

    guess: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    """How many guesses each step accepted"""

    @property
    def continuation(self) -> Continuation:
        return self.results[0]

    @property
    def line(self) -> list[int]:
        return self.request.prompt_ids + self.continuation.token_ids

    @property
    def room(self) -> int:
        """How many guesses may follow the newest token, such that no more is fed than greedy search would."""
        return self.request.max_new_tokens - len(self.continuation.token_ids) - 1

    def accept(self, choices: Sequence[int]) -> None:
        """Push the target's choice after each fed token, while the guess that follows equals it."""
        before = len(self.continuation.token_ids)
        for choice, guessed in zip(choices, [*self.guess, None], strict=True):
            if self.continuation.push(choice) or choice != guessed:
                break
        self.accepted.append(len(self.continuation.token_ids) - before - 1)


def rows_of_feeds(states: Sequence[State], rows: Rows) -> list[list[tuple[int, int]]]:
    """For each request the (first, stop) rows of each of its feeds."""
    spans = list(zip(rows.starts, rows.starts[1:], strict=False))
    each = iter(spans)
    return [[next(each) for _ in range(state.feeds)] for state in states]


class NGramSpeculation(Strategy):
    """Guess that what followed the newest token the last time follows it again (prompt lookup, n = 1)."""

    longest = 5

    def begin(self, request: Request) -> tuple[GuessState, list[Feed]]:
        return GuessState(request, [request.continuation(0)]), [Feed(request.prompt_ids)]

    def guess(self, state: GuessState) -> list[int]:
        line = state.line
        earlier = [i for i, token in enumerate(line[:-1]) if token == line[-1]]
        return line[earlier[-1] + 1 :][: min(self.longest, state.room)] if earlier else []

    def step(self, sampler: TokenSampler, states: Sequence[Any], rows: Rows) -> list[list[Feed]]:
        choices = sampler.argmax(rows.logits).tolist()
        for state, [(first, stop)] in zip(states, rows_of_feeds(states, rows), strict=True):
            state.accept(choices[first:stop])
        return [self.feeds(state) for state in states]

    def feeds(self, state: GuessState) -> list[Feed]:
        if state.continuation.finish_reason is not None:
            return []
        state.guess = self.guess(state)
        line = state.line
        return [Feed([line[-1], *state.guess], parent=0, keep=len(line) - 1, rows="all")]


@dataclass(eq=False)
class DraftState(GuessState):
    """Two caches: the target's holds the line, the draft's the line and its guesses."""

    drafting: bool = True


class DraftSpeculation(Strategy):
    """A draft model guesses one token a step; then the target sees them all at once (arXiv 2211.17192)."""

    longest = 3

    def begin(self, request: Request) -> tuple[DraftState, list[Feed]]:
        feeds = [Feed(request.prompt_ids), Feed(request.prompt_ids, model="draft")]
        return DraftState(request, [request.continuation(0)], drafting=False), feeds

    def step(self, sampler: TokenSampler, states: Sequence[Any], rows: Rows) -> list[list[Feed]]:
        choices = sampler.argmax(rows.logits).tolist()
        answers = []
        for state, spans in zip(states, rows_of_feeds(states, rows), strict=True):
            if state.drafting:
                state.guess.append(choices[spans[0][0]])
            else:
                state.accept(choices[slice(*spans[0])])  # the target's rows come first
                state.guess = []
            answers.append(self.feeds(state))
        return answers

    def feeds(self, state: DraftState) -> list[Feed]:
        if state.continuation.finish_reason is not None:
            return []
        line = state.line
        state.drafting = len(state.guess) < min(self.longest, state.room)
        if not state.drafting:
            return [Feed([line[-1], *state.guess], parent=0, keep=len(line) - 1, rows="all")]
        if state.guess:
            return [Feed([state.guess[-1]], parent=0, model="draft")]
        known = min(len(line) - 1, self.draft_knows(state))
        return [Feed(line[known:], parent=0, keep=known, model="draft")]

    def draft_knows(self, state: DraftState) -> int:
        """Positions of the accepted line that the draft has seen: it never sees its last guess."""
        before_last = len(state.line) - 1 - (state.accepted[-1] if state.accepted else 0)
        return before_last + min(state.accepted[-1], self.longest - 1) if len(state.accepted) > 1 else before_last
