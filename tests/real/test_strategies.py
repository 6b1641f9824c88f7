"""Every decoding strategy on the real model.

A strategy that promises the tokens of greedy search or of sampling is held to them, token by token. The others are held
to their definition, recomputed from the model's logits, or to what they are for. Beam search is compared with
transformers in test_against_transformers.py.
"""

import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minillm import Engine
from minillm.decoding.resolving import STRATEGIES
from minillm.reference.philox import uniform
from minillm.reference.softmax import log_softmax
from tests.comparing import assert_same_draws, assert_same_tokens
from tests.reference.chi_square import p_value

from .conftest import Engines

pytestmark = pytest.mark.real

STORY = "Once upon a time, in a village by the sea,"
Measured = Callable[[str], None]

TESTS = {
    "do_sample": "sampled",
    "mirostat": "mirostat",
    "num_beams": "beam",
    "num_beam_groups": "diverse",
    **dict.fromkeys(("force_words_ids", "force_words", "constraints"), "constrained"),
    "num_particles": "particles",
    "penalty_alpha": "contrastive_search",
    "prompt_lookup_num_tokens": "guess",
    "lookahead_window": "guess",
    "num_assistant_tokens": "draft",
    "amateur": "contrastive_decoding",
}
"""What selects a strategy -> a word in the names of its tests"""


def test_every_strategy_has_a_test() -> None:
    assert TESTS.keys() == STRATEGIES.keys() - {"strategy"}  # of another package
    names = [name for name in globals() if name.startswith("test_")]
    assert all(any(word in name for name in names) for word in TESTS.values())


def log_probs(engine: Engine, tokens: list[int]) -> np.ndarray:
    """Log-probabilities of every next token after each position. [T] -> [T, V] float64"""
    return log_softmax(engine.forward(tokens).astype(np.float64), np)


# --- sampling ---------------------------------------------------------------------------------------------------------


def test_sampled_tokens_are_those_of_the_inverse_cdf(engine: Engine) -> None:
    """Each token is recomputed from the logits of the whole text and the random number of its seed and position."""
    temperature = 0.8
    fields = {"do_sample": True, "temperature": temperature, "top_k": 0, "max_new_tokens": 30}
    result = engine.generate(STORY, seed=5, **fields)
    prompt, tokens = result.prompt_token_ids, result.token_ids
    scores = engine.forward(prompt + tokens)[len(prompt) - 1 :] / np.float32(temperature)  # [new + 1, V]

    def drawn(i: int) -> int:
        order = np.argsort(-scores[i], kind="stable")
        weights = np.exp(scores[i][order].astype(np.float64) - scores[i].max())
        cdf = np.cumsum(weights) / weights.sum()
        return int(order[np.searchsorted(cdf, float(uniform(5, 0, len(prompt) + i)), side="right")])

    for i, token in enumerate(tokens):
        assert_same_draws(
            [token], [drawn(i)], lambda _, i=i: scores[i], lambda _, i=i: float(uniform(5, 0, len(prompt) + i))
        )
    assert result.token_ids == engine.generate(STORY, seed=5, **fields).token_ids
    assert result.token_ids != engine.generate(STORY, seed=6, **fields).token_ids


def test_filters_of_sampled_tokens_keep_what_they_say(engine: Engine) -> None:
    for fields, allowed in (
        ({"top_k": 5}, lambda logs: logs >= np.sort(logs)[-5]),
        ({"top_k": 0, "top_p": 0.7}, lambda logs: in_nucleus(logs, 0.7)),
        ({"top_k": 0, "min_p": 0.2}, lambda logs: logs >= logs.max() + math.log(0.2) - 1e-6),
    ):
        result = engine.generate(STORY, do_sample=True, seed=1, max_new_tokens=30, **fields)
        logs = log_probs(engine, result.prompt_token_ids + result.token_ids)[len(result.prompt_token_ids) - 1 : -1]
        assert all(allowed(row)[token] for row, token in zip(logs, result.token_ids, strict=True)), fields


def in_nucleus(logs: np.ndarray, top_p: float) -> np.ndarray:
    """Which tokens are among the likeliest that together reach top_p. [V] -> [V] bool"""
    order = np.argsort(-logs)
    before = np.cumsum(np.exp(logs[order])) - np.exp(logs[order])
    kept = np.zeros(len(logs), bool)
    kept[order[before < top_p + 1e-6]] = True
    return kept


@pytest.mark.parametrize("target", [pytest.param(1.5, marks=pytest.mark.exhaustive), 3.0])
def test_mirostat_holds_the_surprise_at_its_target(target: float, engine: Engine, measured: Measured) -> None:
    """Its threshold and the surprise of each token are recomputed from the logits of the whole text (algorithm 2)."""
    fields = {"do_sample": True, "seed": 3, "mirostat": 2, "mirostat_tau": target, "mirostat_eta": 0.3}
    result = engine.generate(STORY, max_new_tokens=80, eos_token_id=(), **fields)
    threshold, surprises = 2 * target, []
    after = log_probs(engine, result.prompt_token_ids + result.token_ids)[len(result.prompt_token_ids) - 1 : -1]
    for row, token in zip(after, result.token_ids, strict=True):
        kept = row >= min(-threshold * math.log(2), row.max()) - 1e-4
        assert kept[token]
        surprises.append((math.log(np.exp(row[kept]).sum()) - row[token]) / math.log(2))
        threshold -= 0.3 * (surprises[-1] - target)
    mean = float(np.mean(surprises[10:]))
    measured(f"Mirostat with a target of {target} bits: {mean:.2f} bits a token")
    assert mean == pytest.approx(target, abs=0.3)


# --- beams ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampled", [False, True], ids=["plain", "sampled"])
def test_a_beams_score_is_the_models_own_of_its_tokens(sampled: bool, engine: Engine) -> None:
    fields = {"do_sample": True, "seed": 2, "top_k": 0, "temperature": 1.0} if sampled else {}
    result = engine.generate(STORY, num_beams=4, num_return_sequences=4, max_new_tokens=12, **fields)
    prompt, beams = result.prompt_token_ids, result.completions
    assert len({tuple(beam.token_ids) for beam in beams}) == 4
    for beam in beams:
        total = sum(engine.score(prompt + beam.token_ids).logprobs[len(prompt) :])
        assert beam.score == pytest.approx(total / len(beam.token_ids), abs=1e-4)
    assert [beam.score for beam in beams] == sorted((beam.score for beam in beams), reverse=True)


def test_groups_of_diverse_beams_begin_with_plain_ones_and_part(engine: Engine) -> None:
    """Nothing was chosen before the first group, which therefore searches as if it were alone."""
    plain = engine.generate(STORY, num_beams=2, num_return_sequences=2, max_new_tokens=10).completions
    fields = {"num_beam_groups": 3, "diversity_penalty": 50.0}
    diverse = engine.generate(STORY, num_beams=6, num_return_sequences=6, max_new_tokens=10, **fields).completions
    found = {tuple(beam.token_ids): beam.score for beam in diverse}
    for beam in plain:
        assert found[tuple(beam.token_ids)] == pytest.approx(beam.score, abs=1e-4)
    assert len({tokens[0] for tokens in found}) >= 3, "the groups avoid each other's first tokens"


def test_constrained_beams_write_the_words_and_score_as_the_model_does(engine: Engine) -> None:
    words = ["lighthouse", ["storm", "wind"]]
    result = engine.generate(STORY, num_beams=4, max_new_tokens=20, force_words=words)
    assert " lighthouse" in result.text
    assert " storm" in result.text or " wind" in result.text
    prompt, beam = result.prompt_token_ids, result.completions[0]
    total = sum(engine.score(prompt + beam.token_ids).logprobs[len(prompt) :])
    assert beam.score == pytest.approx(total / len(beam.token_ids), abs=1e-4)


def test_particles_keep_to_a_potential_and_share_the_weight_that_it_leaves(engine: Engine) -> None:
    """How likely texts without an "e" are, by particles and by plain sampling."""
    fields = {"do_sample": True, "seed": 4, "max_new_tokens": 4}
    free = engine.generate(STORY, num_return_sequences=200, **fields).completions
    share = sum("e" not in completion.text for completion in free) / 200
    fields |= {"num_particles": 8, "num_return_sequences": 8, "potential": lambda ids, text: "e" not in text}
    estimates = [engine.generate(STORY, **fields | {"seed": seed}) for seed in range(12)]
    assert not any("e" in completion.text for result in estimates for completion in result.completions)
    means = [math.exp(result.log_normalizer) for result in estimates]
    assert np.mean(means) == pytest.approx(share, abs=4 * math.sqrt(share / 200) + 4 * float(np.std(means)) / 12**0.5)


# --- the two that contrast --------------------------------------------------------------------------------------------


def test_contrastive_search_repeats_less_than_greedy_search(engine: Engine, measured: Measured) -> None:
    """Without a penalty it is greedy search, and it never leaves the top_k likeliest tokens."""
    prompt = "Es war einmal ein König, der"
    options = {"max_new_tokens": 40, "eos_token_id": ()}
    greedy = engine.generate(prompt, **options)
    assert engine.generate(prompt, penalty_alpha=1e-9, top_k=4, **options).token_ids == greedy.token_ids
    varied = engine.generate(prompt, penalty_alpha=0.6, top_k=4, **options)
    measured(f"repeated trigrams: greedy {repeated(greedy.token_ids)}, contrastive search {repeated(varied.token_ids)}")
    assert repeated(varied.token_ids) < repeated(greedy.token_ids) / 2
    logs = log_probs(engine, varied.prompt_token_ids + varied.token_ids)[len(varied.prompt_token_ids) - 1 : -1]
    for row, token in zip(logs, varied.token_ids, strict=True):
        assert row[token] >= np.sort(row)[-4]


def repeated(tokens: list[int]) -> int:
    """How many trigrams came before."""
    counts = Counter(zip(tokens, tokens[1:], tokens[2:], strict=False))
    return sum(count - 1 for count in counts.values())


def test_contrastive_decoding_is_the_papers_formula(engines: Engines, int4: Path) -> None:
    """log p_expert - log p_amateur among the tokens that the expert finds at least 0.1 times as likely as the best."""
    contrasting, expert, amateur = engines(amateur=int4), engines(), engines(int4)
    result = contrasting.generate(STORY, max_new_tokens=16)
    tokens = result.prompt_token_ids + result.token_ids
    logs, theirs = (log_probs(one, tokens)[len(result.prompt_token_ids) - 1 : -1] for one in (expert, amateur))
    plausible = logs >= logs.max(axis=-1, keepdims=True) + math.log(0.1)  # [new, V]
    scores = np.where(plausible, logs - theirs, -np.inf)
    for row, token in zip(scores, result.token_ids, strict=True):
        assert_same_tokens([token], [int(row.argmax())], lambda _, row=row: row)
    assert result.token_ids != expert.generate(STORY, max_new_tokens=16).token_ids


# --- guesses ----------------------------------------------------------------------------------------------------------

GUESSES: dict[str, dict[str, Any]] = {
    "prompt lookup": {"prompt_lookup_num_tokens": 6},
    "lookahead": {"lookahead_window": 5, "lookahead_ngram_size": 3},
}


def note_guesses(engine: Engine, name: str, measured: Measured) -> None:
    """Note what became of an engine's guesses so far."""
    counts = engine.stats.speculation
    measured(
        f"{name}: {counts.accepted} of {counts.judged} guesses accepted ({counts.acceptance_rate:.0%}), "
        f"{counts.tokens_per_step:.2f} tokens a pass"
    )
    assert counts.tokens_per_step > 1


@pytest.mark.parametrize("name", GUESSES)
def test_guesses_leave_greedy_tokens_as_they_are(
    name: str, engines: Engines, expected: dict[str, Any], measured: Measured
) -> None:
    """Those of transformers, in a ragged batch."""
    cases, engine = expected["continuations"], engines(max_batch_size=9)
    before = engine.stats.speculation.accepted
    results = engine.generate([case["prompt"] for case in cases], max_new_tokens=20, **GUESSES[name])
    assert [result.token_ids for result in results] == [case["tokens"][:20] for case in cases]
    assert engine.stats.speculation.accepted > before + 20
    note_guesses(engine, name, measured)


@pytest.mark.parametrize("name", ["prompt lookup", pytest.param("lookahead", marks=pytest.mark.exhaustive)])
def test_guesses_leave_sampled_tokens_as_they_are(name: str, engine: Engine) -> None:
    fields = {"do_sample": True, "temperature": 0.5, "seed": 4, "max_new_tokens": 40, "num_return_sequences": 2}
    prompt = "1, 2, 3, 4, 5, 6,"
    plain = [c.token_ids for c in engine.generate(prompt, **fields).completions]
    assert [c.token_ids for c in engine.generate(prompt, **fields, **GUESSES[name]).completions] == plain


def test_a_quantised_draft_leaves_greedy_tokens_as_they_are(
    engines: Engines, int4: Path, expected: dict[str, Any], measured: Measured
) -> None:
    cases, engine = expected["continuations"], engines(draft=int4)
    results = engine.generate([case["prompt"] for case in cases], max_new_tokens=20)
    assert [result.token_ids for result in results] == [case["tokens"][:20] for case in cases]
    note_guesses(engine, "the model in int4 as its own draft", measured)
    assert engine.stats.speculation.acceptance_rate > 0.5


def test_a_quantised_draft_leaves_the_distribution_as_it_is(engines: Engines, int4: Path) -> None:
    """The second token after a prompt, which is drawn by acceptance of a guess, against its probabilities."""
    draws, prompt = 240, "The capital of France is Paris. The capital of Italy"
    engine = engines(draft=int4, max_batch_size=24)
    fields = {"do_sample": True, "top_k": 0, "temperature": 1.0, "max_new_tokens": 2, "num_assistant_tokens": 1}
    result = engine.generate(prompt, seed=1, num_return_sequences=draws, **fields)
    [(first, times)] = Counter(c.token_ids[0] for c in result.completions).most_common(1)
    seconds = Counter(c.token_ids[1] for c in result.completions if c.token_ids[0] == first)
    probabilities = np.exp(log_probs(engines(), [*result.prompt_token_ids, first])[-1])
    likely = np.flatnonzero(times * probabilities >= 5)
    observed = [*(seconds[int(token)] for token in likely), times - sum(seconds[int(token)] for token in likely)]
    cells = times * np.array([*probabilities[likely], 1 - probabilities[likely].sum()])
    assert times > draws / 2 and len(likely) >= 1
    assert p_value(observed, cells) > 0.001
