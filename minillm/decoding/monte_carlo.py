"""Sequential Monte Carlo: texts of the model, weighted by a potential.

A potential gives each text a log weight; -inf forbids it. The target is the model's own distribution of texts p, as
processors, temperature and filters leave it, times the weights:

    p(x) exp(potential(x)) / Z,    Z = sum of p(x) exp(potential(x)) over all texts x

N particles, texts of their own, grow token by token (Loula et al., "Syntactic and semantic control of large language
models via sequential Monte Carlo", arXiv 2504.13139). In each step a particle's weight is multiplied by exp of the
potential's change and by the share of the model's next tokens that the potential allows. Once the weights differ so
much that their effective number (sum w)**2 / sum w**2 is below ess_threshold N, the particles are resampled: N are
drawn from them in proportion to their weights, which become equal. Then many forget a beginning that few could
continue, and their sequences fork in the cache.

Which next tokens are allowed is only asked of those that are drawn (Lipkin et al., "Fast controlled generation from
language models with adaptive weighted rejection sampling", arXiv 2504.05410): tokens are drawn from p without
replacement until one, y, is allowed, which makes y a draw from p among all that are. With R the share of those refused
and z the next draw,

    W = p(y) + (1 - R - p(y)) [z is allowed]

estimates the share Z_t of all allowed tokens without bias whatever y and R are: z is allowed with probability
(Z_t - p(y)) / (1 - R - p(y)). It stands for Z_t in the particle's weight.

A guide says itself which next tokens it allows, so that their share of p is exact; the potential sees the text that it
allows. With a guide alone, particles are samples of the model's distribution of the texts in its form.

So the mean of the weights, times f(x) of each text, has the expectation sum of p(x) exp(potential(x)) f(x), for any f
and any number of particles; with f = 1 it estimates Z. A text that ends is weighed as complete, one that the length
limit cuts off as it is.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..backends.token_sampler import TokenSampler
from ..errors import ParameterError, shown
from ..reference.philox import PARTICLES, RESAMPLING, uniform
from .continuation import Continuation, reports
from .field_values import ByIdentity, potential_functions
from .functions import called
from .guided import restrict
from .row_pipeline import RowPipeline
from .row_processing import process_rows
from .settings import Settings
from .strategy import Feed, Request, Rows, State, Strategy


@dataclass(eq=False)
class Particle:
    """A text with its weight."""

    continuation: Continuation
    potential: float
    """The potential of the text so far"""
    log_weight: float
    spelled: bytes = b""
    """The text so far, if the potential reads it"""
    row: int = 0
    """Index of its sequence among the last feeds"""

    @property
    def running(self) -> bool:
        """True if it goes on."""
        return self.continuation.finish_reason is None and self.log_weight > -math.inf


@dataclass(eq=False)
class MonteCarloState(State):
    """The particles of a request."""

    particles: list[Particle] = field(default_factory=list)


class MonteCarlo(Strategy):
    """Grow num_particles texts, weigh them by the potential, and resample them when few have most of the weight."""

    guided = True

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.pipeline = RowPipeline.of(settings, masked=True)
        potential = settings.potential
        self.prefix, self.complete = (
            replace(function, plugin="" if potential is None else potential.plugin)
            for function in potential_functions(_indifferent if potential is None else potential.function)
        )

    @property
    def max_sequences(self) -> int:
        """One sequence per particle."""
        particles: int = self.settings.num_particles
        return particles

    def begin(self, request: Request) -> tuple[State, list[Feed]]:
        """Feed the prompt once.

        Raises:
            ParameterError: the potential forbids the empty text, with which all begin, or reads texts of a model
                without a tokenizer.
        """
        if request.token_bytes is None and 2 in (self.prefix.arguments, self.complete.arguments):
            raise ParameterError("potential reads texts, and this model has no tokenizer: let it take token ids alone")
        value = self._value(self.prefix, (), b"")
        if value == -math.inf:
            raise ParameterError("potential gives the empty text -inf, with which all texts begin: then there is none")
        text = bool(request.settings.stop_strings)
        particles = [Particle(request.continuation(i, text=text), value, value) for i in range(self.max_sequences)]
        return MonteCarloState(request, pipeline=self.pipeline, particles=particles), [Feed(request.prompt_ids)]

    def step(self, sampler: TokenSampler, states: Sequence[State], rows: Rows) -> list[list[Feed]]:
        """Extend every particle of every request by one token."""
        answers, first = [], 0
        for state in states:
            assert isinstance(state, MonteCarloState)
            answers.append(self._advance(sampler, state, rows.logits[first : first + state.feeds]))
            first += state.feeds
        return answers

    def give_up(self, state: State) -> None:
        """Set the results to the particles as they are."""
        assert isinstance(state, MonteCarloState)
        if state.particles[0].continuation.token_ids:
            self._return_particles(state)

    def _advance(self, sampler: TokenSampler, state: MonteCarloState, logits: Any) -> list[Feed]:
        """Run one step of one request. logits: [feeds, V]"""
        running = [particle for particle in state.particles if particle.running]
        position = len(state.request.prompt_ids) + len(running[0].continuation.token_ids)
        rows = logits[[particle.row for particle in running]]  # [feeds, V] -> [R, V], a copy
        raw = rows.copy() if self.settings.logprobs else None
        self._process(sampler, state, running, rows)
        if state.error is not None:
            return []
        slots = np.asarray([particle.continuation.index for particle in running])
        first = uniform(state.request.settings.seed, slots[:, None], position, PARTICLES + np.arange(4))  # [R, 4]
        for row, particle in enumerate(running):
            uniforms = _uniforms(state.request.settings.seed, int(slots[row]), position, first[row])
            token = self._draw(state.request, particle, rows[row], uniforms)
            if token is not None:
                report: Any = (None, None)
                if raw is not None:
                    [report] = reports(sampler, raw[row : row + 1], [token], [self.settings.top_logprobs])
                self._push(state.request, particle, token, report)
        feeds = self._next_feeds(state, position) if any(particle.running for particle in state.particles) else []
        if not feeds:  # none has gone on, or those that did were not drawn again
            self._return_particles(state)
        return feeds

    def _next_feeds(self, state: MonteCarloState, position: int) -> list[Feed]:
        """Resample the particles if few have most of the weight, and feed each its newest token."""
        log_weights = [particle.log_weight for particle in state.particles]
        if effective_number(log_weights) < self.settings.ess_threshold * self.max_sequences:
            self._resample(state, position)
        feeds = []
        for particle in state.particles:
            if particle.running:
                feeds.append(Feed((particle.continuation.token_ids[-1],), parent=particle.row))
                particle.row = len(feeds) - 1
        return feeds

    def _process(
        self, sampler: TokenSampler, state: MonteCarloState, running: Sequence[Particle], rows: NDArray[Any]
    ) -> None:
        """Apply processors and filters, and then the guides: what is before these is the target's. rows: [R, V]"""
        guides = [particle.continuation.guide for particle in running]
        for particle in running:
            particle.continuation.guide = None
        process_rows(sampler, rows, range(len(running)), [(state, particle.continuation) for particle in running])
        for particle, guide in zip(running, guides, strict=True):
            particle.continuation.guide = guide
        if state.error is None:
            self._guide(sampler, running, rows)

    def _guide(self, sampler: TokenSampler, running: Sequence[Particle], rows: NDArray[Any]) -> None:
        """Forbid what the guides do not allow, and multiply the weights by the share of what they do. rows: [R, V]"""
        guides = [guide for particle in running if (guide := particle.continuation.guide) is not None]
        if not guides:
            return
        before = np.logaddexp.reduce(rows.astype(np.float64), axis=-1)  # [R, V] -> [R]
        for _, error in restrict(sampler, rows, range(len(guides)), guides, [None] * len(guides)):
            raise error
        after = np.logaddexp.reduce(rows.astype(np.float64), axis=-1)
        for particle, change in zip(running, (after - before).tolist(), strict=True):
            particle.log_weight += change

    def _draw(
        self, request: Request, particle: Particle, scores: NDArray[Any], uniforms: Iterator[float]
    ) -> int | None:
        """A particle's next token, which its weight takes into account; None if none is allowed.

        Args:
            request: the particle's
            particle: its potential becomes that with the token
            scores: [V], processed
            uniforms: the random numbers of its draws
        """
        tokens = np.flatnonzero(scores > -np.inf)
        if not len(tokens):
            return None  # the guide's share, 0, is in its weight
        ids, values = tuple(particle.continuation.token_ids), dict[int, float]()

        def allowed(index: int) -> bool:
            token = int(tokens[index])
            if token in particle.continuation.eos_token_ids:
                values[index] = self._value(self.complete, ids, particle.spelled)
            else:
                values[index] = self._value(self.prefix, (*ids, token), self._spelled(request, particle, token))
            return values[index] > -math.inf

        index, share = draw_allowed(scores[tokens], allowed, uniforms)
        if index is None:
            particle.log_weight = -math.inf
            return None
        particle.log_weight += math.log(share) + values[index] - particle.potential
        particle.potential = values[index]
        return int(tokens[index])

    def _push(self, request: Request, particle: Particle, token: int, report: Any) -> None:
        """Append a token to a particle. A text that a stop string or a criterion ends is weighed as complete."""
        continuation = particle.continuation
        particle.spelled = self._spelled(request, particle, token)
        continuation.push(token, *report)
        if continuation.finish_reason == "stop" and token not in continuation.eos_token_ids:
            value = self._value(self.complete, tuple(continuation.token_ids), particle.spelled)
            particle.log_weight += value - particle.potential

    def _spelled(self, request: Request, particle: Particle, token: int) -> bytes:
        """The text of a particle with one more token; empty if the potential does not read it."""
        if request.token_bytes is None or 2 not in (self.prefix.arguments, self.complete.arguments):
            return b""
        return particle.spelled + request.token_bytes(token)

    def _value(self, function: ByIdentity, token_ids: tuple[int, ...], spelled: bytes) -> float:
        """The potential of a text.

        Raises:
            ParameterError: it is not a log weight.
        """
        arguments = (token_ids, spelled.decode(errors="ignore"))[: function.arguments]
        value = called(function, *arguments)
        if isinstance(value, bool | np.bool_):
            return 0.0 if value else -math.inf
        if not isinstance(value, Real) or not float(value) < math.inf:  # NaN is not
            raise ParameterError(
                f"potential {function.function!r} should return a log weight, a number or -inf, or whether it allows a"
                f" text, found {shown(value)}"
            )
        return float(value)

    def _resample(self, state: MonteCarloState, position: int) -> None:
        """Draw N particles from the N, in proportion to their weights."""
        particles = state.particles
        log_weights = np.asarray([particle.log_weight for particle in particles])
        mean = float(np.logaddexp.reduce(log_weights)) - math.log(len(particles))
        u = float(uniform(state.request.settings.seed, 0, position, RESAMPLING))
        ancestors = systematic(log_weights, len(particles), u)
        state.particles = [_copied(particles[a], slot, mean) for slot, a in enumerate(ancestors)]
        state.token_counts.clear()  # they are of the slots' former texts

    def _return_particles(self, state: MonteCarloState) -> None:
        """Set the results: all particles that have a weight, the heaviest first; or fewer, drawn by their weights.

        The scores of either add up, as exp(score), to the mean weight of all particles.

        Raises:
            ParameterError: none has a weight.
        """
        request, particles, count = state.request, state.particles, self.settings.num_return_sequences
        log_weights = np.asarray([particle.log_weight for particle in particles])
        if log_weights.max() == -np.inf:
            name = "potential" if self.settings.guide is None else self.settings.guide[0]
            length = max(len(particle.continuation.token_ids) for particle in particles)
            raise ParameterError(
                f"{name} leaves none of {len(particles)} particles after {length} tokens: it forbids all that could"
                " follow; raise num_particles, or admit more tokens (top_k, top_p)"
            )
        if count < len(particles):
            total = float(np.logaddexp.reduce(log_weights)) - math.log(len(particles))
            u = float(uniform(request.settings.seed, 1, len(request.prompt_ids), RESAMPLING))
            chosen = systematic(log_weights, count, u)
            results = [_copied(particles[i], index, total - math.log(count)) for index, i in enumerate(chosen)]
        else:
            order = [i for i in np.argsort(-log_weights, kind="stable").tolist() if log_weights[i] > -np.inf]
            results = [_copied(particles[i], index, log_weights[i] - math.log(count)) for index, i in enumerate(order)]
        for result in results:
            result.continuation.score = float(result.log_weight)
            result.continuation.decode(request.text_stream)
        state.results = [result.continuation for result in results]


def _indifferent(token_ids: tuple[int, ...]) -> float:
    """The potential beside a guide alone."""
    return 0.0


def _copied(particle: Particle, slot: int, log_weight: float) -> Particle:
    """A copy of a particle, in a slot of its own."""
    continuation = particle.continuation.fork()
    continuation.index = slot
    return replace(particle, continuation=continuation, log_weight=log_weight)


def draw_allowed(
    scores: NDArray[Any], allowed: Callable[[int], bool], uniforms: Iterator[float]
) -> tuple[int | None, float]:
    """Draw an index in proportion to exp(score) among those allowed, and estimate what share of all these have.

    Args:
        scores: [n], finite
        allowed: whether an index is; asked of those that are drawn, one after the other
        uniforms: numbers in (0, 1), one per draw

    Returns:
        the index, and the estimate W of the module's head, in (0, 1]; None and 0 if none is allowed.
    """
    shares = np.exp(scores.astype(np.float64) - scores.max())
    shares /= shares.sum()
    drawn = _without_replacement(shares.copy(), uniforms)
    left = 1.0
    for index in drawn:
        if allowed(index):
            rest = max(0.0, left - shares[index])
            following = next(drawn, None)
            return index, float(shares[index]) + (rest if following is not None and allowed(following) else 0.0)
        left -= shares[index]
    return None, 0.0


def _without_replacement(shares: NDArray[np.float64], uniforms: Iterator[float]) -> Iterator[int]:
    """All indices, each drawn in proportion to its share among those not drawn yet. shares: [n], set to 0 one by one"""
    for _ in range(len(shares)):
        cumulative = np.cumsum(shares)
        index = int(np.searchsorted(cumulative, next(uniforms) * cumulative[-1]))
        yield index
        shares[index] = 0.0


def _uniforms(seed: int, slot: int, position: int, first: NDArray[Any]) -> Iterator[float]:
    """The random numbers of one token's draws, of which the first are known."""
    known = first.astype(np.float64)
    count = 0
    while True:
        yield from known.tolist()
        count += len(known)
        known = uniform(seed, slot, position, PARTICLES + count + np.arange(4 * count)).astype(np.float64)


def effective_number(log_weights: Sequence[float]) -> float:
    """(sum w)**2 / sum w**2: the number of equal weights that would be worth as much. At least one is above -inf."""
    weights = np.exp(np.asarray(log_weights) - max(log_weights))
    return float(weights.sum() ** 2 / (weights**2).sum())


def systematic(log_weights: NDArray[Any], count: int, u: float) -> list[int]:
    """Indices of `count` draws in proportion to the weights, at even distances from one uniform number. -> [count]

    An index with a share s of the weight is drawn floor(s count) or ceil(s count) times.
    """
    weights = np.exp(log_weights - log_weights.max())
    cumulative = np.cumsum(weights)
    chosen = np.searchsorted(cumulative, (np.arange(count) + u) / count * cumulative[-1])
    indices: list[int] = np.minimum(chosen, np.flatnonzero(weights)[-1]).tolist()
    return indices
