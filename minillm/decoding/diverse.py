"""Diverse beam search: groups of beams that search one after the other and avoid each other's tokens.

Vijayakumar et al., "Diverse beam search", arXiv 1610.02424, section 4 and algorithm 1, with Hamming diversity
(section 4.1): each time that an earlier group has chosen a token in this step, diversity_penalty is subtracted from its
log-probability in the groups that follow. Each group keeps results of its own; all groups' results together are then
ranked. Rules are those of transformers 4.55, the last version that had it built in. They differ from today's beam
search in two points: whether a group may still improve is judged by the best candidate of the step, even if that one
has ended; and with early_stopping=True a group that is full when the last token comes takes no unended beams.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..backends.base import Backend
from .beam import BeamSearch, BeamState
from .continuation import Continuation
from .strategy import Feed, Request, Rows, State


@dataclass(eq=False)
class DiverseState(State):
    """The groups of one request."""

    groups: list[BeamState] = field(default_factory=list)
    running: list[BeamState] = field(default_factory=list)
    """Those that are not done yet; the last feeds are theirs, in this order"""


class DiverseBeamSearch(BeamSearch):
    """num_beam_groups beam searches of num_beams / num_beam_groups beams each. The first is undisturbed."""

    def begin(self, request: Request) -> tuple[State, list[Feed]]:
        """Feed the prompt once."""
        groups = [self.first_beams(request) for _ in range(self.settings.num_beam_groups)]
        return DiverseState(request, groups=groups, running=list(groups)), [Feed(request.prompt_ids)]

    def step(self, backend: Backend, states: Sequence[State], rows: Rows) -> list[list[Feed]]:
        """Extend every group of every request by one token."""
        answers, first = [], 0
        for state in states:
            assert isinstance(state, DiverseState)
            answers.append(self._extend_groups(backend, state, rows.logits[first : first + state.feeds]))
            first += state.feeds
        return answers

    def _extend_groups(self, backend: Backend, state: DiverseState, logits: Any) -> list[Feed]:
        """One step of one request. logits: [beams of the running groups, V], or [1, V] after the prompt"""
        feeds: list[Feed] = []
        first = 0
        running, state.running = state.running, []
        handicap = backend.xp.zeros(logits.shape[-1], logits.dtype)
        for group in running:
            shared = not group.beams[0].token_ids
            own = slice(0, 1) if shared else slice(first, first + len(group.beams))
            more = self.extend(backend, group, logits[own], handicap if group is not state.groups[0] else None)
            feeds += [Feed(feed.tokens, parent=own.start + (feed.parent or 0)) for feed in more]
            if more:
                state.running.append(group)
            first = own.stop
            for beam in group.beams:  # what the group chose, whether or not it goes on
                handicap[beam.token_ids[-1]] += self.settings.diversity_penalty
        if not feeds:
            results = [result for group in state.groups for result in group.finished]
            self.return_best(state, sorted(results, key=lambda result: -result[0]))
        return feeds

    def collect(self, state: BeamState, extended: list[Continuation], sums: Any) -> None:
        """What a token ended counts at once; what the limit of length ended, only if the group is not done by then."""
        self.add_results(state, [c.finish_reason == "stop" for c in extended[: self.num_beams]], extended, sums)
        cut_off = [i for i, candidate in enumerate(extended) if candidate.finish_reason == "length"][: self.num_beams]
        if cut_off and not self._done(state, sums, len(extended[0].token_ids)):
            self.add_results(state, [i in cut_off for i in range(len(extended))], extended, sums)

    def goes_on(self, state: BeamState, sums: Any) -> bool:
        """Whether another step can change the group's results."""
        return not self._done(state, sums, len(state.beams[0].token_ids))

    def _done(self, state: BeamState, sums: Any, length: int) -> bool:
        if len(state.finished) < self.num_beams:
            return False
        if self.settings.early_stopping is True:
            return True
        return state.finished[-1][0] >= self.best_possible(state, sums[0], length)
