"""Beam search: extend the num_beams most likely sequences in parallel and return the best finished ones.

Each step scores every continuation of every beam by its summed log-probability and looks at the best
(1 + number of EOS ids) * num_beams of them, so that num_beams can go on even if the best all end. A candidate that
ends counts as a result only if it ranks among the first num_beams; its score is the sum divided by the generated
length to the power of length_penalty. The rules are those of transformers 5, with two differences. Where scores fall
below -1e9, transformers stops and returns unfinished sequences; here the search continues until there are num_beams
results or no beam is left. And a candidate whose sum is -inf (a token that a processor, a filter or a guide forbids)
is dropped: fewer beams continue, and there may be fewer results. If there is none at all, that is an error.

With sampling the candidates are drawn instead (stochastic beams): without replacement, in proportion to the
exponential of their sums, after the filters of sampling have changed the log-probabilities. They too rank by their sums
(since transformers 5.24; before, in the order in which they were drawn).

A worked example with the vocabulary I, L, U: the model gives I probability 0.6 as the first token, L after I 0.7, and
so on. Two beams hold (I 0.6, L 0.3) after the first step; the best continuations are IL (0.6 * 0.7 = 0.42) and LI
(0.3 * 0.5 = 0.15), then ILL (0.42 * 0.7 = 0.294) and ILI (0.42 * 0.2 = 0.084). No model is needed to run the
strategy; the caller stands in for it and answers each feed with next-token logits:

    search = BeamSearch(settings)                               # num_beams=2, max_new_tokens=3
    state, feeds = search.begin(Request([], settings, search))  # the prompt
    while feeds:
        logits = np.log(...)                                    # [len(feeds), 3], row i for feeds[i]
        state.feeds = len(feeds)
        [feeds] = search.step(TokenSampler(), [state], Rows(logits, starts=range(len(feeds) + 1)))
    state.results[0].token_ids, state.results[0].score

`tests/decoding/test_beam_example.py` is this program, with the numbers of every step.

Diverse beam search: groups of beams that take turns in each step and are penalised for repeating each other's tokens.

Vijayakumar et al., "Diverse beam search", arXiv 1610.02424, section 4 and algorithm 1, with Hamming diversity
(section 4.1): each time that an earlier group has chosen a token in this step, diversity_penalty is subtracted from its
log-probability in the groups that follow. Each group keeps results of its own; all groups' results together are then
ranked. Rules are those of transformers 4.55, the last version that had it built in. They differ from today's beam
search in two points: whether a group can still improve is judged by the best candidate of the step, even if that one
has ended; and with early_stopping=True a group that is full at the last token takes no unfinished beams.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from ..backends.token_sampler import TokenSampler
from ..errors import NumericalError, ParameterError
from ..reference.philox import BEAMS, uniform
from ..reference.sampling_without_replacement import sample_without_replacement
from .continuation import Continuation
from .filters import build_filters
from .guided import restrict
from .history import History
from .processors import build_processors, no_token_left, rows_without_a_token
from .settings import Settings
from .strategy import Candidate, Feed, Request, Rows, State, Strategy

SMALLEST, LARGEST = float(np.finfo(np.float64).tiny), float(np.finfo(np.float64).max)


@dataclass(eq=False)
class BeamState(State):
    """The running beams and the best results so far."""

    beams: list[Continuation] = field(default_factory=list)
    scores: Any = None
    """[beams], summed log-probabilities of the running beams, best first"""
    finished: list[tuple[float, Continuation]] = field(default_factory=list)
    """At most num_beams results, best first"""
    hopeful: bool = True
    """True while a running beam can still beat the worst result"""


class Extensions(NamedTuple):
    """Beams with one more token, the candidates of a step; best first, except for those that a constraint adds."""

    parents: list[int]
    """The beam that each continues"""
    tokens: list[int]
    sums: Any
    """[candidates], summed log-probabilities"""
    beams: list[Continuation]

    @property
    def length(self) -> int:
        """The number of tokens of each."""
        return len(self.beams[0].token_ids)


class BeamSearch(Strategy):
    """Beam search over each request's own sequences, which share the prompt's pages in the cache."""

    guided = True

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        if settings.top_logprobs:
            raise ParameterError("top_logprobs is not supported with num_beams > 1: leave it out, or use one beam")
        self.num_beams = settings.num_beams // settings.num_beam_groups
        self.processors = build_processors(settings)
        self.filters = build_filters(settings)
        self.num_candidates = max(2, 1 + len(settings.eos_token_ids)) * self.num_beams

    def begin(self, request: Request) -> tuple[State, list[Feed]]:
        """Feed the prompt once."""
        return self.first_beams(request), [Feed(request.prompt_ids)]

    def first_beams(self, request: Request) -> BeamState:
        """The initial single, empty beam. Text is decoded during the search only if there are stop strings to find."""
        beam = request.continuation(0, text=bool(request.settings.stop_strings))
        return BeamState(request, beams=[beam], scores=np.zeros(1, np.float32))

    def step(self, sampler: TokenSampler, states: Sequence[State], rows: Rows) -> list[list[Feed]]:
        """Extend every request's beams by one token."""
        answers, first = [], 0
        for state in states:
            assert isinstance(state, BeamState)
            feeds = self.extend(sampler, state, rows.logits[first : first + state.feeds])
            if not feeds:
                self.return_best(state, state.finished)
            answers.append(feeds)
            first += state.feeds
        return answers

    def give_up(self, state: State) -> None:
        """Set the results to the best of the finished and the running beams."""
        results: list[tuple[float, Continuation]] = []
        for group in self.groups_of(state):
            results += group.finished
            for total, beam in zip(group.scores, group.beams, strict=True):
                if beam.token_ids and beam.finish_reason is None:
                    results.append((self.score(total, len(beam.token_ids)), beam))
        if results:
            self.return_best(state, sorted(results, key=lambda result: -result[0]))

    def groups_of(self, state: State) -> list[BeamState]:
        """The sets of beams of a request."""
        assert isinstance(state, BeamState)
        return [state]

    def extend(self, sampler: TokenSampler, state: BeamState, logits: Any, handicap: Any = None) -> list[Feed]:
        """Run one step for a set of beams. Returns no feeds when they are done.

        Args:
            sampler: the sampler for the logits
            state: the beams
            logits: [beams, V]
            handicap: [V], subtracted from each beam's log-probabilities before the processors see them

        Raises:
            ParameterError: no beam has a token left, and none has finished.
            NumericalError: a sum is NaN or +inf.
        """
        scores, raw = self._log_probs(sampler, state, logits, handicap)
        parents, tokens, sums = self.candidates(sampler, state, scores)
        if not parents:
            state.beams, state.scores = [], sums
            return []
        beams = [self._extended(state, p, t, raw) for p, t in zip(parents, tokens, strict=True)]
        extensions = Extensions(parents, tokens, sums, beams)
        self.collect(state, extensions)
        order = self.select(state, extensions)
        if state.request.watch is not None:
            state.request.watch(self._watched(extensions, order))
        state.beams, state.scores = [beams[i] for i in order], sums[order]
        at_the_end = all(beam.finish_reason == "length" for beam in state.beams)  # or none is left
        if at_the_end or not self.goes_on(state, sums):
            return []
        return [Feed((tokens[i],), parent=parents[i]) for i in order]

    def _log_probs(self, sampler: TokenSampler, state: BeamState, logits: Any, handicap: Any) -> tuple[Any, Any]:
        """Processed log-probabilities of each row, and raw ones if log-probabilities are to be returned."""
        scores, raw = self.first_scores(sampler, logits)
        if raw is scores and (self.settings.logprobs or state.request.guide is not None):
            raw = scores.copy()
        if handicap is not None:
            scores -= handicap
        if self.processors or self.filters:
            sequences = [(state.request, beam.token_ids) for beam in state.beams]
            history = History.of(sequences, indices=range(len(sequences)))
            for processor in self.processors:
                scores = processor(history, scores, sampler.xp)
            scores = self._filtered(history, scores, sampler.xp)
        if state.request.guide is not None:
            guides = [beam.guide for beam in state.beams if beam.guide is not None]
            for _, error in restrict(sampler, scores, range(len(guides)), guides, list(raw)):
                raise error
        return scores, raw

    def first_scores(self, sampler: TokenSampler, logits: Any) -> tuple[Any, Any]:
        """The scores of each beam's next tokens, and the model's log-probabilities: the same. [beams, V] each"""
        scores = sampler.log_softmax(logits)  # [beams, V]
        return scores, scores

    def _filtered(self, history: History, scores: Any, xp: Any) -> Any:
        """Apply the filters to rows with at least one allowed token; a row of only -inf is not a distribution."""
        live = ~rows_without_a_token(scores, xp) if self.filters else None  # [beams, V] -> [beams]
        if live is None or not live.any():
            return scores
        filtered = scores if live.all() else scores[live]
        history = history if live.all() else history.take(np.flatnonzero(live).tolist()).alone()
        for filter_ in self.filters:
            filtered = filter_(history, filtered, xp)
        if live.all():
            return filtered
        scores[live] = filtered
        return scores

    def candidates(self, sampler: TokenSampler, state: BeamState, scores: Any) -> tuple[list[int], list[int], Any]:
        """Best (or sampled) candidates over all beams, best first: their parents, tokens and summed log-probabilities.

        Args:
            sampler: the sampler for the scores
            state: the beams
            scores: [beams, V]
        """
        V = scores.shape[-1]
        best = float((scores.max(axis=-1) + state.scores).max())  # NaN wins over every number
        if best == -np.inf:
            return [], [], state.scores[:0]
        if not np.isfinite(best):
            raise NumericalError(f"the best sum of log-probabilities in beam search is {best}, not a finite number")
        if self.settings.do_sample:
            total = (scores + state.scores[:, None]).reshape(-1)  # [beams, V] -> [beams V]
            count, request = min(self.num_candidates, total.size), state.request
            position = len(request.prompt_ids) + len(state.beams[0].token_ids)
            uniforms = uniform(request.settings.seed, np.arange(count), position, BEAMS)
            chosen = sample_without_replacement(total, uniforms, sampler.xp)
            chosen = chosen[np.argsort(-total[chosen], kind="stable")]
            sums = total[chosen]
        else:
            tokens = sampler.top(scores, min(self.num_candidates, V))  # [beams, V] -> [beams, n]
            rows = np.arange(len(tokens))[:, None]
            total = (scores[rows, tokens] + state.scores[:, None]).reshape(-1)  # [beams, n] -> [beams n]
            chosen = (rows * V + tokens).reshape(-1)
            order = np.lexsort((chosen, -total))[: self.num_candidates]
            chosen, sums = chosen[order], total[order]
        allowed = sums > -np.inf  # forbidden tokens are no candidates
        chosen = chosen[allowed]
        return (chosen // V).tolist(), (chosen % V).tolist(), sums[allowed]

    def _extended(self, state: BeamState, parent: int, token: int, raw: Any) -> Continuation:
        """A beam with one more token."""
        candidate = state.beams[parent].fork()
        log_prob = float(raw[min(parent, len(raw) - 1), token]) if self.settings.logprobs else None
        candidate.push(token, log_prob)
        return candidate

    def _watched(self, extensions: Extensions, order: list[int]) -> list[Candidate]:
        """The step's candidates with their outcome, for `Request.watch`."""
        beams = {rank: beam for beam, rank in enumerate(order) if extensions.beams[rank].finish_reason is None}
        return [
            Candidate(
                parent, token, float(total), beams.get(rank), ended.finish_reason is not None and rank < self.num_beams
            )
            for rank, (parent, token, total, ended) in enumerate(zip(*extensions, strict=True))
        ]

    def collect(self, state: BeamState, extensions: Extensions) -> None:
        """Add candidates that ended among the first num_beams to the results."""
        if not state.hopeful:
            return
        if self.settings.early_stopping is True and len(state.finished) == self.num_beams:
            return
        self.add_results(state, extensions, self.ended(extensions, "stop", "length"))

    def ended(self, extensions: Extensions, *reasons: str) -> list[int]:
        """Ranks among the first num_beams candidates of those that ended for one of these reasons."""
        return [i for i, beam in enumerate(extensions.beams[: self.num_beams]) if beam.finish_reason in reasons]

    def add_results(self, state: BeamState, extensions: Extensions, ranks: list[int]) -> None:
        """Add candidates to the results, and keep the num_beams best."""
        new = [(self.score(extensions.sums[i], extensions.length), extensions.beams[i]) for i in ranks]
        state.finished = sorted(state.finished + new, key=lambda result: -result[0])[: self.num_beams]

    def select(self, state: BeamState, extensions: Extensions) -> list[int]:
        """The candidates that become the next beams: the first num_beams that have not ended, rarely fewer."""
        going_on = [i for i, beam in enumerate(extensions.beams) if beam.finish_reason != "stop"]
        return going_on[: self.num_beams]

    def goes_on(self, state: BeamState, sums: Any) -> bool:
        """True if another step can change the results; always so with fewer than num_beams of them."""
        if len(state.finished) < self.num_beams:
            return True
        best = self.best_possible(state, state.scores[0], len(state.beams[0].token_ids))
        state.hopeful = state.hopeful and best > state.finished[-1][0]
        return state.hopeful and self.settings.early_stopping is not True

    def best_possible(self, state: BeamState, total: Any, length: int) -> float:
        """Upper estimate of the final score of a beam with sum `total`; early_stopping selects the formula."""
        if self.settings.early_stopping == "never" and self.settings.length_penalty > 0:
            length = state.request.max_new_tokens
        return self.score(total, length)

    def score(self, total: Any, length: int) -> float:
        """`total` divided by length ** length_penalty; never NaN, -inf only past float64.

        In float64: in float32 the power would be 0 or infinite for a length of 40 and a penalty of 25.
        """
        with np.errstate(over="ignore", under="ignore"):
            power = float(np.float64(length) ** self.settings.length_penalty)
        return float(total) / min(max(power, SMALLEST), LARGEST)

    def return_best(self, state: State, finished: Sequence[tuple[float, Continuation]]) -> None:
        """Set the request's results to the best num_return_sequences, or as many as there are.

        Raises:
            ParameterError: there is none, since no beam had a token left.
        """
        if not finished:
            raise no_token_left()
        best = finished[: self.settings.num_return_sequences]
        for index, (score, continuation) in enumerate(best):
            continuation.index, continuation.score = index, score
            continuation.decode(state.request.text_stream)
        state.results = [continuation for _, continuation in best]


class EarlierBeamSearch(BeamSearch):
    """Beam search that ends by the rules of transformers 4.55."""

    def goes_on(self, state: BeamState, sums: Any) -> bool:
        """True if another step can change the results."""
        return not self.done(state, sums, len(state.beams[0].token_ids))

    def done(self, state: BeamState, sums: Any, length: int) -> bool:
        """True if there are num_beams results, and no better ones to come by the step's best candidate."""
        if len(state.finished) < self.num_beams:
            return False
        if self.settings.early_stopping is True:
            return True
        return state.finished[-1][0] >= self.best_possible(state, sums[0], length)


@dataclass(eq=False)
class DiverseState(State):
    """The groups of one request."""

    groups: list[BeamState] = field(default_factory=list)
    running: list[BeamState] = field(default_factory=list)
    """Groups not done yet; the last feeds belong to them, in this order"""


class DiverseBeamSearch(EarlierBeamSearch):
    """num_beam_groups beam searches of num_beams / num_beam_groups beams each. The first is not penalised."""

    def begin(self, request: Request) -> tuple[State, list[Feed]]:
        """Feed the prompt once."""
        groups = [self.first_beams(request) for _ in range(self.settings.num_beam_groups)]
        return DiverseState(request, groups=groups, running=list(groups)), [Feed(request.prompt_ids)]

    def step(self, sampler: TokenSampler, states: Sequence[State], rows: Rows) -> list[list[Feed]]:
        """Extend every group of every request by one token."""
        answers, first = [], 0
        for state in states:
            assert isinstance(state, DiverseState)
            answers.append(self._extend_groups(sampler, state, rows.logits[first : first + state.feeds]))
            first += state.feeds
        return answers

    def groups_of(self, state: State) -> list[BeamState]:
        """The groups of a request, those that are done included."""
        assert isinstance(state, DiverseState)
        return state.groups

    def _extend_groups(self, sampler: TokenSampler, state: DiverseState, logits: Any) -> list[Feed]:
        """Run one step of one request. logits: [beams of the running groups, V], or [1, V] after the prompt"""
        feeds: list[Feed] = []
        first = 0
        running, state.running = state.running, []
        handicap = sampler.xp.zeros(logits.shape[-1], logits.dtype)
        for group in running:
            shared = not group.beams[0].token_ids
            own = slice(0, 1) if shared else slice(first, first + len(group.beams))
            more = self.extend(sampler, group, logits[own], handicap if group is not state.groups[0] else None)
            feeds += [Feed(feed.tokens, parent=own.start + (feed.parent or 0)) for feed in more]
            if more:
                state.running.append(group)
            first = own.stop
            for beam in group.beams:  # the tokens that the group chose, even if it is done now
                handicap[beam.token_ids[-1]] += self.settings.diversity_penalty
        if not feeds:
            results = [result for group in state.groups for result in group.finished]
            self.return_best(state, sorted(results, key=lambda result: -result[0]))
        return feeds

    def collect(self, state: BeamState, extensions: Extensions) -> None:
        """Collect candidates ended by a token, and those ended by the length limit unless the group is done by then."""
        self.add_results(state, extensions, self.ended(extensions, "stop"))
        cut_off = [i for i, beam in enumerate(extensions.beams) if beam.finish_reason == "length"][: self.num_beams]
        if cut_off and not self.done(state, extensions.sums, extensions.length):
            self.add_results(state, extensions, cut_off)
