"""Sequential Monte Carlo, against distributions that are enumerated: every text of a tiny vocabulary.

The model is a table of next-token logits by the text so far, which answers a strategy's feeds.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from minillm import Engine, MinillmError
from minillm.backends.token_sampler import TokenSampler
from minillm.decoding import monte_carlo
from minillm.decoding.monte_carlo import MonteCarlo, draw_allowed, effective_number, systematic
from minillm.decoding.strategy import Rows, State
from minillm.errors import ParameterError
from minillm.reference.philox import uniform
from minillm.reference.softmax import log_softmax

from ..reference.chi_square import p_value
from ..tiny import request_for, write_checkpoint

Line = tuple[int, ...]
V, LENGTH, END = 4, 3, 3
PROMPT = [40, 41, 42, 43]


@cache
def logits_after(line: Line) -> np.ndarray:
    """The model: logits [V] of the next token."""
    return np.random.default_rng([7, *line]).normal(0, 1.5, V).astype(np.float32)


class Weights:
    """A potential that weighs, forbids 1 after 0, and asks more of texts that have ended than of others."""

    def prefix(self, ids: Line) -> float:
        if (0, 1) in itertools.pairwise(ids):
            return -math.inf
        return 0.8 * ids.count(2) - 0.4 * len(ids)

    def complete(self, ids: Line) -> float:
        return -math.inf if len(ids) == 1 else self.prefix(ids) + 0.5


def texts() -> Iterator[tuple[Line, float, float]]:
    """Every text, its probability under the model, and its weight."""
    potential, lines = Weights(), [((), 1.0)]
    while lines:
        line, share = lines.pop()
        if line[-1:] == (END,):
            yield line, share, math.exp(potential.complete(line[:-1]))
        elif len(line) == LENGTH:
            yield line, share, math.exp(potential.prefix(line))
        else:
            shares = np.exp(log_softmax(logits_after(line).astype(np.float64), np))
            lines += [((*line, token), share * float(shares[token])) for token in range(V)]


EXACT = {line: share * weight for line, share, weight in texts()}
"""Every text -> the expectation of its weight"""


COMMON = [line for line, weight in EXACT.items() if weight > 0.015 * sum(EXACT.values())]
"""The texts that are counted each by itself; all others are counted together"""
CELLS = np.asarray([EXACT[line] for line in COMMON] + [sum(w for line, w in EXACT.items() if line not in COMMON)])


def particles(seed: int, count: int, *, guide: Any = None, **fields: Any) -> list[tuple[Line, float]]:
    """The texts of one request with this many particles, and the exponentials of their scores."""
    fields = {"num_particles": count, "num_return_sequences": count, "potential": Weights(), "top_k": 0} | fields
    model = {"vocab_size": V, "max_new_tokens": LENGTH, "eos_token_id": END}
    request = replace(request_for([1], do_sample=True, seed=seed, **model, **fields), guide=guide)
    strategy = request.strategy
    assert isinstance(strategy, MonteCarlo)
    state, feeds = strategy.begin(request)
    lines: list[Line] = [()]
    while feeds:
        state.feeds = len(feeds)
        rows = np.stack([logits_after(line) for line in lines])
        [feeds] = strategy.step(TokenSampler(), [state], Rows(rows, range(len(lines) + 1)))
        lines = [(*lines[feed.parent or 0], *feed.tokens) for feed in feeds]
    return [(tuple(result.token_ids), math.exp(result.score or 0.0)) for result in state.results]


def weights(samples: Sequence[tuple[Line, float]]) -> np.ndarray:
    """The weight in each cell."""
    sums = np.zeros(len(CELLS))
    for line, weight in samples:
        assert EXACT[line] > 0
        sums[COMMON.index(line) if line in COMMON else -1] += weight
    return sums


def agrees(rows: Sequence[np.ndarray], expected: np.ndarray = CELLS) -> bool:
    """True if the means of independent weights are the exact ones: each, and their sum, as far as chance allows."""
    sums = np.asarray(rows)  # [runs, cells]
    error = sums.std(axis=0) / math.sqrt(len(rows)) + 1e-12
    statistic, freedom = float((((sums.mean(axis=0) - expected) / error) ** 2).sum()), len(CELLS)
    spread = 2 / (9 * freedom)
    z = ((statistic / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(spread)
    total = sums.sum(axis=1)
    return z < 3.1 and abs(total.mean() - expected.sum()) < 4 * total.std() / math.sqrt(len(rows))


# --- the weights ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("forbidden", [(), (0,), (1, 3), (0, 1, 2, 4)])
def test_the_estimate_of_the_share_allowed_is_unbiased_for_each_token(
    forbidden: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over every order in which tokens may be drawn, with the probability of the order."""
    shares = np.asarray([0.05, 0.4, 0.1, 0.25, 0.2])
    expected = np.zeros(5)
    for order in itertools.permutations(range(5)):
        left, probability = 1.0, 1.0
        for index in order:
            probability, left = probability * shares[index] / left, left - shares[index]
        monkeypatch.setattr(monte_carlo, "_without_replacement", lambda *a, order=order: iter(order))
        index, share = draw_allowed(np.log(shares), lambda i: i not in forbidden, iter(()))
        assert index is not None
        assert 0 < share <= 1 + 1e-12
        expected[index] += probability * share
    assert expected == pytest.approx([0.0 if i in forbidden else p for i, p in enumerate(shares)], abs=1e-12)


def test_tokens_are_asked_for_as_they_are_drawn() -> None:
    asked: list[int] = []

    def allowed(index: int) -> bool:
        asked.append(index)
        return index == 5

    scores = np.log(np.asarray([0.3, 0.25, 0.2, 0.15, 0.09, 0.01], np.float32))
    uniforms = uniform(0, np.arange(300)[:, None], 0, np.arange(6)).tolist()
    chosen = [draw_allowed(scores, allowed, iter(numbers))[0] for numbers in uniforms]
    assert set(chosen) == {5}
    assert len(asked) < 300 * 6  # one more than until it is allowed, not all
    assert draw_allowed(scores, lambda i: False, iter(uniforms[0])) == (None, 0.0)


@pytest.mark.slow
def test_every_text_has_its_exact_weight_on_average() -> None:
    """Particles that are never resampled are independent of each other."""
    count = 1500
    drawn = particles(2, count, ess_threshold=0.0)
    dead = [np.zeros(len(CELLS))] * (count - len(drawn))
    assert agrees([weights([(line, count * weight)]) for line, weight in drawn] + dead)


@pytest.mark.parametrize("returned", [3, pytest.param(12, marks=pytest.mark.slow)])
def test_so_it_has_with_resampling(returned: int) -> None:
    """Also where fewer are drawn from them in proportion to the weights."""
    fields = {"ess_threshold": 1.0, "num_return_sequences": returned}
    assert agrees([weights(particles(seed, 12, **fields)) for seed in range(100)])


class NoOneAfterZero:
    """A guide that forbids 1 after 0, and the end of a text at its beginning."""

    words = 1

    def __init__(self, last: int | None = None) -> None:
        self.last = last

    def fill(self, mask: np.ndarray) -> None:
        mask[:] = {None: 0b0111, 0: 0b1101}.get(self.last, 0b1111)

    def push(self, token_id: int) -> None:
        self.last = token_id

    def fork(self) -> "NoOneAfterZero":
        return NoOneAfterZero(self.last)


class Milder:
    """The same potential where a guide forbids what it forbids."""

    def prefix(self, ids: Line) -> float:
        return 0.8 * ids.count(2) - 0.4 * len(ids)

    def complete(self, ids: Line) -> float:
        return -math.inf if len(ids) == 1 else self.prefix(ids) + 0.5


@pytest.mark.longer
def test_a_guide_forbids_and_a_potential_weighs() -> None:
    """Texts that end at once are left out of what is expected: of those the potential above had none to forbid."""
    cells = CELLS.copy()
    if (END,) in COMMON:
        cells[COMMON.index((END,))] = 0.0
    else:
        cells[-1] -= EXACT[(END,)]
    fields = {"ess_threshold": 1.0, "potential": Milder(), "guide": NoOneAfterZero}
    assert agrees([weights(particles(seed, 12, **fields)) for seed in range(100)], cells)


def test_fewer_texts_have_the_weight_of_all() -> None:
    for seed in range(5):
        sums = [sum(weight for _, weight in particles(seed, 5, num_return_sequences=n)) for n in (1, 3, 5)]
        assert sums == pytest.approx([sums[0]] * 3)


@pytest.mark.longer
def test_many_particles_have_the_target_distribution() -> None:
    """Chi-square of counts; draws at even distances only make it smaller."""
    drawn = particles(5, 2000, num_return_sequences=1000)
    assert len({weight for _, weight in drawn}) == 1
    counts = weights([(line, 1.0) for line, _ in drawn])
    assert p_value(counts, 1000 * CELLS / CELLS.sum()) > 1e-3


BREAKAGES: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "the share allowed is taken for 1": lambda patch: patch.setattr(
        monte_carlo, "draw_allowed", lambda *a, f=draw_allowed: (f(*a)[0], 1.0)
    ),
    "a particle keeps its weight when it is resampled": lambda patch: patch.setattr(
        monte_carlo,
        "_copied",
        lambda particle, slot, weight, f=monte_carlo._copied: f(particle, slot, particle.log_weight),
    ),
    "all particles draw the same": lambda patch: patch.setattr(
        monte_carlo,
        "uniform",
        lambda seed, slot, position, purpose: uniform(seed, 0 * np.asarray(slot), position, purpose),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("breakage", BREAKAGES)
def test_they_would_tell(breakage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    BREAKAGES[breakage](monkeypatch)
    assert not agrees([weights(particles(seed, 12, ess_threshold=1.0)) for seed in range(100)])


def test_the_effective_number_and_even_draws() -> None:
    assert effective_number([0.0, 0.0, 0.0, 0.0]) == pytest.approx(4)
    assert effective_number([-1e4, -math.inf, -1e4 - 50]) == pytest.approx(1)
    for u in (1e-7, 0.3, 0.999999):
        drawn = systematic(np.asarray([math.log(0.5), -700.0, math.log(0.25), math.log(0.25), -math.inf]), 8, u)
        assert [drawn.count(i) for i in range(5)] == [4, 0, 2, 2, 0]


# --- in the engine ----------------------------------------------------------------------------------------------------


def even(ids: Line) -> float:
    """Even tokens, the higher the better."""
    return -math.inf if any(token % 2 for token in ids) else sum(ids) / 90


SAMPLED: dict[str, Any] = {"do_sample": True, "seed": 3, "num_particles": 4, "potential": even, "max_new_tokens": 6}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return Engine(write_checkpoint(tmp_path_factory.mktemp("model"), seed=3), max_batch_size=12)


def test_scores_are_the_weights_by_the_models_own_probabilities(engine: Engine) -> None:
    """Without resampling and with a potential that allows all, a weight is that of the whole text alone."""
    fields = SAMPLED | {"potential": lambda ids: len(set(ids)) / 5, "ess_threshold": 0.0, "eos_token_id": []}
    result = engine.generate(PROMPT, num_return_sequences=4, **fields)
    for completion in result.completions:
        assert completion.score == pytest.approx(len(set(completion.token_ids)) / 5 - math.log(4))
    assert result.log_normalizer == pytest.approx(math.log(sum(math.exp(c.score or 0) for c in result.completions)))


@pytest.mark.parametrize("threshold", [0.0, 0.5, 1.0])
def test_the_same_beside_others_and_without_a_cache(engine: Engine, threshold: float) -> None:
    """Resampled sequences fork in the cache; penalties count the tokens of their new texts."""
    fields = SAMPLED | {"ess_threshold": threshold, "num_return_sequences": 4, "frequency_penalty": 0.7, "top_p": 0.9}
    alone = engine.generate(PROMPT, **fields)
    assert all(even(tuple(completion.token_ids)) > -math.inf for completion in alone.completions)
    again = engine.generate(PROMPT, use_cache=False, **fields)
    assert [c.token_ids for c in again.completions] == [c.token_ids for c in alone.completions]
    plain = engine.generate([5, 6], max_new_tokens=9)
    tokens: dict[Any, list[int]] = {}
    first, other = engine.add([5, 6], max_new_tokens=9), engine.add(PROMPT, **fields)
    more = engine.add([9, 8, 7], **fields | {"seed": 4})
    while engine.busy:
        for event in engine.step():
            tokens.setdefault((event.request_id, event.index), []).extend(event.token_ids)
    assert tokens[first, 0] == plain.token_ids
    assert [tokens[other, i] for i in range(4)] == [c.token_ids for c in alone.completions]
    assert (more, 0) in tokens
    assert engine.generate(PROMPT, **fields | {"seed": 5}) != alone


def test_processors_see_the_texts_that_particles_have_after_resampling(engine: Engine) -> None:
    seen: list[set[Line]] = []

    def watch(history: Any, logits: np.ndarray, xp: Any) -> np.ndarray:
        seen.append({tuple(line[len(PROMPT) :].tolist()) for line in history.lines})
        return logits

    fields = SAMPLED | {"ess_threshold": 1.0, "num_return_sequences": 4, "eos_token_id": []}
    for completion in engine.generate(PROMPT, logits_processor=[watch], **fields).completions:
        assert all(tuple(completion.token_ids[:step]) in lines for step, lines in enumerate(seen))


@pytest.mark.longer
def test_potentials_read_text_and_may_be_objects_or_answer_yes_and_no() -> None:
    engine = Engine(backend="numpy")
    fields: dict[str, Any] = {"do_sample": True, "seed": 1, "num_particles": 4, "max_new_tokens": 8}

    class Short:
        def prefix(self, ids: Line, text: str) -> bool:
            return "e" not in text

        def complete(self, ids: Line, text: str) -> bool:
            return text.endswith(".")

    for potential in (Short(), lambda ids, text: 0.0 if "e" not in text else -math.inf):
        assert "e" not in engine.generate("Once upon a time", potential=potential, **fields).text
    stopped = engine.generate("Once upon a time", potential=lambda ids: True, stop_strings=" named", **fields)
    assert stopped.completions[0].stop_reason == " named"
    stopped = engine.generate("Once upon a time", potential=Short(), stop_strings=" named", **fields)
    assert stopped.completions[0].stop_reason != " named"  # it does not end with a full stop


def test_a_guide_alone(engine: Engine) -> None:
    """The texts are of its form, and their weights what sampling with a guide leaves out."""
    fields: dict[str, Any] = {"do_sample": True, "seed": 1, "top_k": 0, "num_particles": 4, "num_return_sequences": 4}
    result = engine.generate(PROMPT, guided_choice=["yes", "no"], **fields)
    assert {completion.text for completion in result.completions} <= {"yes", "no"}
    assert result.log_normalizer < -5
    with pytest.raises(MinillmError, match="guided_choice leaves none of 4 particles after 0 tokens"):
        engine.generate(PROMPT, guided_choice=["yes", "no"], **fields | {"top_k": 1})


def test_log_probabilities_are_the_models(engine: Engine) -> None:
    completion = engine.generate(PROMPT, top_logprobs=2, **SAMPLED).completions[0]
    scores = engine.score([*PROMPT, *completion.token_ids]).logprobs[len(PROMPT) :]
    assert completion.logprobs == pytest.approx(scores, abs=1e-4)
    assert completion.top_logprobs is not None
    assert [len(row) for row in completion.top_logprobs] == [2] * len(completion.token_ids)


def test_a_request_whose_time_is_over_has_its_particles_so_far(engine: Engine) -> None:
    request = request_for(PROMPT, **SAMPLED)
    state, feeds = request.strategy.begin(request)
    request.strategy.give_up(state)
    assert state.results == []
    rows = np.zeros((len(feeds), 96), np.float32)
    request.strategy.step(TokenSampler(), [state], Rows(rows, range(len(feeds) + 1)))
    request.strategy.give_up(state)
    assert isinstance(state, State)
    assert [len(result.token_ids) for result in state.results] == [1]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"potential": None}, "num_particles=4 needs a potential or a guide"),
        ({"num_return_sequences": 5}, "num_return_sequences=5 is more than num_particles=4"),
        ({"num_beams": 2}, "num_beams=2 and num_particles=4 each select a strategy"),
        ({"mirostat": 2}, "num_particles=4 with mirostat=2"),
        ({"potential": lambda ids: -math.inf}, "gives the empty text -inf"),
        ({"potential": lambda ids: not ids}, "leaves none of 4 particles after 0 tokens"),
        ({"potential": lambda ids: "a"}, "should return a log weight.* found 'a'"),
        ({"potential": lambda ids: math.nan}, "should return a log weight.* found nan"),
        ({"potential": "nothing"}, "there is no potential 'nothing'"),
    ],
)
def test_what_cannot_be_is_one_line(engine: Engine, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(MinillmError, match=message) as error:
        engine.generate(PROMPT, **SAMPLED | fields)
    assert "\n" not in str(error.value)


@pytest.mark.slow
def test_texts_that_have_ended_come_back_if_resampling_leaves_no_other() -> None:
    with Engine(backend="numpy") as engine:
        fields: Any = {"max_new_tokens": 8, "do_sample": True, "num_particles": 4, "ess_threshold": 1}
        fields |= {"stop_strings": ["e"], "potential": lambda ids, text: "e" not in text}
        for seed in range(60, 100):
            try:
                generation = engine.generate("x", seed=seed, **fields)
            except ParameterError as error:  # none is left, and it says so
                assert "leaves none of 4 particles" in str(error)
                continue
            assert len(generation.completions) == 1 and generation.completions[0].finish_reason is not None
