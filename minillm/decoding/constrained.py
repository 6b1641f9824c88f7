"""Constrained beam search: beam search for texts that contain given phrases.

Post and Vilar, "Fast lexically constrained decoding with dynamic beam allocation for neural machine translation",
arXiv 1804.06609; alternatives, one of which has to occur, are Hu et al.'s ("Improved lexically constrained decoding",
NAACL 2019).

Beside the best candidates of a step stand those that bring a beam forward with its constraints (`constraints`). The
candidates are sorted into banks by how far they have come; the beams go to the best of each bank, from the furthest
bank to the first, then to the second of each, and so on. So however unlikely a phrase is, some beam works at it, and
others stay free until a better place for it comes. Only texts with all phrases end, as results.

The rules are those of transformers 4.55, the last version that had it built in, with four differences. A phrase has
to occur in the generated text: there, one that the prompt holds counted. Results with all phrases come before others,
which are returned where the length limit ends the search with too few of the former: there, all ranked by their scores,
and one without a phrase might come first. Two beams never share how far they have come: there, they did with
alternatives that part after a common beginning. And banks never mix: there, a sum that was higher by 100 outweighed a
bank.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..backends.token_sampler import TokenSampler
from ..errors import ParameterError
from .beam import BeamState, EarlierBeamSearch, Extensions
from .constraints import DisjunctiveConstraint, Progress
from .settings import Settings
from .strategy import Request

CONSTRAINING = ("constraints", "force_words_ids", "force_words")
"""Fields that constrain; those that the user has not set may be a checkpoint's, or made of the others"""


@dataclass(eq=False)
class ConstrainedState(BeamState):
    """The running beams, and how far they have come."""

    progress: list[Progress] = field(default_factory=list)
    """[beams]"""
    free: int = 0
    """The candidates of this step that no constraint has added: the first so many"""


class ConstrainedBeamSearch(EarlierBeamSearch):
    """Beam search for texts that fulfil the request's constraints."""

    def __init__(self, settings: Settings) -> None:
        """Take the constraints of the settings.

        Raises:
            ParameterError: they do not fit into max_new_tokens, or go on after the end of a sequence.
        """
        super().__init__(settings)
        phrases = [*settings.force_words_ids]
        self.constraints = [user.function for user in settings.constraints] + [*map(DisjunctiveConstraint, phrases)]
        self.name = next((name for name in CONSTRAINING if name in settings.explicit), "force_words_ids")
        ours = [constraint for constraint in self.constraints if isinstance(constraint, DisjunctiveConstraint)]
        for phrase in (phrase for constraint in ours for phrase in constraint.phrases):
            if ends := set(phrase) & set(settings.eos_token_ids):
                raise ParameterError(
                    f"{self.name}: {list(phrase)} holds the end-of-sequence token {min(ends)}, after which no text goes"
                    " on: leave it out"
                )
        least = sum(min(map(len, constraint.phrases)) for constraint in ours)
        if settings.max_new_tokens is not None and least > settings.max_new_tokens:
            raise ParameterError(
                f"{self.name}: a text with all of them has at least {least} tokens, and max_new_tokens="
                f"{settings.max_new_tokens} allows fewer: raise it"
            )

    def first_beams(self, request: Request) -> BeamState:
        """The initial beam, with nothing fulfilled."""
        state = super().first_beams(request)
        return ConstrainedState(request, beams=state.beams, scores=state.scores, progress=[self.beginning])

    @property
    def beginning(self) -> Progress:
        """The progress of an empty text."""
        return Progress.of(self.constraints)

    def candidates(self, sampler: TokenSampler, state: BeamState, scores: Any) -> tuple[list[int], list[int], Any]:
        """Candidates of beam search, best first, and those that bring a beam forward with its constraints.

        Raises:
            ParameterError: a constraint names a token that is not in the vocabulary.
        """
        assert isinstance(state, ConstrainedState)
        parents, tokens, sums = super().candidates(sampler, state, scores)
        state.free = len(parents)
        forward = [(i, t) for i, progress in enumerate(state.progress) for t in dict.fromkeys(progress.next_tokens())]
        if not parents or not forward:
            return parents, tokens, sums
        V = scores.shape[-1]
        outside = next((token for _, token in forward if not 0 <= token < V), None)
        if outside is not None:
            raise ParameterError(f"constraints: {outside} is not in the vocabulary of {V} tokens")
        beams, forced = np.asarray(forward).T
        more = scores[beams, forced] + state.scores[beams]
        allowed = np.flatnonzero(more > -np.inf)
        sums = np.concatenate([sums, more[allowed]])
        return parents + beams[allowed].tolist(), tokens + forced[allowed].tolist(), sums

    def collect(self, state: BeamState, extensions: Extensions) -> None:
        """Collect the candidates that ended with all constraints fulfilled."""
        ended = [i for i in self.ended(extensions, "stop") if self.progress(state, extensions, i).done]
        self.add_results(state, extensions, ended)

    def select(self, state: BeamState, extensions: Extensions) -> list[int]:
        """The next beams: the best of each bank in turn. Those that the length limit ends are results."""
        assert isinstance(state, ConstrainedState)
        going_on = [i for i, beam in enumerate(extensions.beams) if beam.finish_reason != "stop"]
        pool = [i for i in going_on if i < state.free][: self.num_beams]
        known = {(extensions.parents[i], extensions.tokens[i]) for i in pool}
        pool += [i for i in going_on if i >= state.free and (extensions.parents[i], extensions.tokens[i]) not in known]
        progress = {i: self.progress(state, extensions, i) for i in pool}
        banks: dict[int, list[int]] = {}
        for i in sorted(pool, key=lambda i: -extensions.sums[i]):
            banks.setdefault(progress[i].bank, []).append(i)
        turns = [(turn, -bank, i) for bank, members in banks.items() for turn, i in enumerate(members)]
        order = [i for _, _, i in sorted(turns)][: self.num_beams]
        state.progress = [progress[i] for i in order]
        cut_off = [i for i in order if extensions.beams[i].finish_reason == "length"]
        if cut_off and not self.done(state, extensions.sums, extensions.length):
            self.add_cut_off(state, extensions, cut_off)
        return order

    def add_cut_off(self, state: BeamState, extensions: Extensions, cut_off: list[int]) -> None:
        """Add the beams that the length limit has ended to the results, all of them: `return_best` ranks them."""
        results = [(self.score(extensions.sums[i], extensions.length), extensions.beams[i]) for i in cut_off]
        state.finished = sorted(state.finished + results, key=lambda result: -result[0])

    def progress(self, state: BeamState, extensions: Extensions, candidate: int) -> Progress:
        """How far a candidate has come."""
        assert isinstance(state, ConstrainedState)
        return state.progress[extensions.parents[candidate]].after(extensions.tokens[candidate])

    def return_best(self, state: Any, finished: Any) -> None:
        """Set the request's results, those with all constraints fulfilled before others."""
        super().return_best(state, sorted(finished, key=lambda result: not self.fulfils(result[1].token_ids)))

    def fulfils(self, token_ids: Sequence[int]) -> bool:
        """True if a text fulfils all constraints."""
        progress = self.beginning
        for token in token_ids:
            progress = progress.after(token)
        return progress.done
