"""Requests with all kinds of settings in one call: each gets what it gets alone."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from minillm.backends.cpu.sampling import HostSampler
from minillm.backends.token_sampler import TokenSampler
from minillm.decoding.filters import build_filters
from minillm.decoding.history import History
from minillm.decoding.processors import build_processors, rows_without_a_token
from minillm.decoding.resolving import strategy_for
from minillm.decoding.sampler_order import TRANSFORMERS
from minillm.decoding.sampling import Sampling, TokenState
from minillm.decoding.strategy import Request, Rows
from minillm.errors import ParameterError
from minillm.reference.philox import Keys, uniform
from minillm.reference.sampling_by_sorting import sample_by_sorting
from minillm.reference.softmax import chosen_log_probs, top_log_probs

from ..tiny import request_for

V, EOS = 60, 2
CHOOSERS = {"reference": TokenSampler, "kernels": HostSampler}


def any_fields(rng: np.random.Generator) -> dict[str, Any]:
    """Some of all fields of greedy search and sampling."""
    ids = rng.integers(0, V, 12).tolist()
    fields: dict[str, Any] = {
        "repetition_penalty": float(rng.uniform(0.7, 2)),
        "presence_penalty": float(rng.uniform(-2, 2)),
        "frequency_penalty": float(rng.uniform(-2, 2)),
        "no_repeat_ngram_size": int(rng.integers(1, 4)),
        "sequence_bias": [[[a], float(rng.normal())] for a in ids[:4]] + [[ids[4:6], 2.0]] * int(rng.integers(2)),
        "bad_words_ids": [ids[6:7], ids[7:9]],
        str(rng.choice(["min_new_tokens", "min_length"])): int(rng.integers(1, 7)),
        "dry_multiplier": float(rng.uniform(0.2, 2)),
        "suppress_tokens": ids[9 : 10 + int(rng.integers(3))],
        "begin_suppress_tokens": ids[:3],
        "forced_eos_token_id": EOS,
        "exponential_decay_length_penalty": [1, float(rng.uniform(1, 1.5))],
        "top_logprobs": int(rng.choice([1, 5, 20])),
        "logprobs": True,
    }
    drawn: dict[str, Any] = {
        "temperature": float(rng.uniform(0.3, 2)),
        "top_k": int(rng.integers(1, V)),
        "top_p": float(rng.uniform(0.2, 0.99)),
        "min_p": float(rng.uniform(0.001, 0.3)),
        "typical_p": float(rng.uniform(0.2, 0.99)),
        "epsilon_cutoff": 0.01,
        "eta_cutoff": 0.01,
        "top_h": 0.4,
        "top_n_sigma": 1.5,
        "xtc_probability": 0.7,
        "samplers": rng.permutation(TRANSFORMERS).tolist(),
    }
    kept = {name: value for name, value in fields.items() if rng.random() < 0.2}
    if rng.random() < 0.6:
        often = {"temperature", "top_k", "top_p", "min_p"}
        kept |= {name: value for name, value in drawn.items() if rng.random() < (0.5 if name in often else 0.05)}
        kept |= {"do_sample": True, "seed": int(rng.integers(2**40))}
    return kept


def any_requests(rng: np.random.Generator, count: int) -> list[Request]:
    prompts = [rng.integers(3, V, rng.integers(1, 9)).tolist() for _ in range(count)]
    return [request_for(one, vocab_size=V, max_new_tokens=6, eos_token_id=EOS, **any_fields(rng)) for one in prompts]


def by_definition(request: Request, generated: Sequence[int], logits: np.ndarray) -> tuple[np.ndarray, int | None]:
    """Scores and token of one row: processors and filters one after the other, and a draw from what is left."""
    settings, history = request.settings, History.of([(request, generated)], indices=[0])
    scores = logits[None].copy()
    for processor in build_processors(settings):
        scores = processor(history, scores, np)
    processed = scores.copy()
    if rows_without_a_token(scores, np)[0]:
        return processed[0], None
    if not settings.do_sample:
        return processed[0], int(scores.argmax())
    for filter_ in build_filters(settings):
        scores = filter_(history, scores, np)
    key = settings.seed, 0, len(request.prompt_ids) + len(generated)
    nothing: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    return processed[0], int(sample_by_sorting(scores, np.array([uniform(*key)]), **nothing, xp=np)[0])


def advanced(sampler: TokenSampler, states: Sequence[TokenState], logits: np.ndarray) -> np.ndarray:
    """One step of one call, whose row i belongs to state i. Returns the logits as the step leaves them."""
    changed = logits.copy()
    strategy = strategy_for(states[0].request.settings)
    for state, feeds in zip(states, strategy.step(sampler, states, Rows(changed, range(len(logits) + 1))), strict=True):
        state.feeds = len(feeds)
    return changed


def begun(request: Request) -> TokenState:
    state, _ = strategy_for(request.settings).begin(request)
    assert isinstance(state, TokenState)
    return state


SLOW = [pytest.param(name, seed, marks=pytest.mark.slow) for name in CHOOSERS for seed in range(1, 6)]


@pytest.mark.longer
@pytest.mark.parametrize(("name", "seed"), [("kernels", 0), *SLOW])
def test_each_row_is_as_alone_and_by_definition(name: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    sampler, requests = CHOOSERS[name](), any_requests(rng, 40)
    together, alone = [begun(one) for one in requests], [begun(one) for one in requests]
    kinds = set()
    for _ in range(4):
        running = [i for i, state in enumerate(together) if state.error is None and state.growing]
        raw = (rng.standard_normal((len(running), V)) * 3).astype(np.float32)
        raw[:, 3:6] += 4  # tokens that are often generated again
        expected = [by_definition(together[i].request, together[i].results[0].token_ids, raw[n])
                    for n, i in enumerate(running)]  # fmt: skip
        rows = advanced(sampler, [together[i] for i in running], raw)
        for n, i in enumerate(running):
            [apart] = advanced(sampler, [alone[i]], raw[n : n + 1])
            np.testing.assert_allclose(rows[n], apart, rtol=1e-6)
            pipeline, (scores, token) = together[i].pipeline, expected[n]
            assert pipeline is not None
            if token is None:
                assert isinstance(together[i].error, ParameterError)
                assert isinstance(alone[i].error, ParameterError)
                continue
            if not pipeline.filters:
                np.testing.assert_allclose(rows[n], scores, rtol=1e-6)
            ours, theirs = together[i].results[0], alone[i].results[0]
            assert ours.token_ids[-1] == token
            assert ours.token_ids == theirs.token_ids
            np.testing.assert_allclose(ours.log_probs, theirs.log_probs, rtol=1e-6, atol=1e-6)
            for one, other in zip(ours.top_log_probs, theirs.top_log_probs, strict=True):
                assert [token for token, _ in one or ()] == [token for token, _ in other or ()]
                np.testing.assert_allclose([p for _, p in one or ()], [p for _, p in other or ()], rtol=1e-6, atol=1e-6)
            if together[i].request.settings.logprobs:
                exact = chosen_log_probs(raw[n : n + 1], np.array([token]))
                np.testing.assert_allclose(ours.log_probs[-1], exact[0], rtol=1e-6, atol=1e-6)
            if count := together[i].request.settings.top_logprobs:
                ids, values = top_log_probs(raw[n : n + 1], count)
                assert [token for token, _ in ours.top_log_probs[-1]] == ids[0].tolist()
                np.testing.assert_allclose([p for _, p in ours.top_log_probs[-1]], values[0], rtol=1e-6, atol=1e-6)
            kinds |= {type(processor).__name__ for _, processor in pipeline.processors}
    assert len(kinds) == 11, "every kind of processor was at work"


def test_the_usual_order_by_its_name_changes_nothing() -> None:
    """The penalties then run among the filters, all rows with one order at once: each row by its own tokens, once."""
    rng = np.random.default_rng(8)
    fields: dict[str, Any] = {"repetition_penalty": 1.4, "frequency_penalty": 0.5, "dry_multiplier": 1.0, "top_k": 8}
    fields |= {"dry_sequence_breakers": [], "xtc_probability": 0.5, "xtc_threshold": 0.2, "temperature": 0.7}
    prompts, sampler = rng.integers(3, 9, (6, 9)).tolist(), HostSampler()
    usual, named = (
        [
            begun(request_for(one, vocab_size=V, do_sample=True, seed=i, **fields, **more))
            for i, one in enumerate(prompts)
        ]
        for more in ({}, {"samplers": "transformers"})
    )
    for _ in range(8):
        logits = (rng.standard_normal((6, V)) * 2).astype(np.float32)
        logits[:, 3:9] += 3
        for states in (usual, named):
            advanced(sampler, states, logits)
    tokens = [state.results[0].token_ids for state in usual]
    assert [state.results[0].token_ids for state in named] == tokens
    assert len({*map(tuple, tokens)}) == 6


def test_one_call_serves_all_but_those_with_a_users_function() -> None:
    def key(**fields: Any) -> object:
        return strategy_for(request_for([1], **fields).settings).batch_key

    shared = [{}, {"do_sample": True}, {"do_sample": True, "temperature": 0.3}, {"repetition_penalty": 2.0}]
    assert {key(**fields) for fields in shared} == {Sampling}
    mine: dict[str, Any] = {"logits_processor": [lambda history, logits, xp: logits]}
    apart: list[dict[str, Any]] = [mine, {"num_beams": 2}, {"do_sample": True, "mirostat": 2}]
    assert all(key(**fields) is not Sampling for fields in apart)
    assert key(**mine) is not key(**mine)


@pytest.mark.parametrize("name", CHOOSERS)
def test_a_row_that_fails_fails_alone(name: str) -> None:
    """NaN among the logits of one row, no token left in another, beside rows of all kinds."""
    sampler = CHOOSERS[name]()
    everything = list(range(V))
    fields: list[dict[str, Any]] = [
        {"do_sample": True, "seed": 1},
        {"do_sample": True, "seed": 2},
        {"suppress_tokens": everything[:-1], "no_repeat_ngram_size": 1},
        {"repetition_penalty": 1.5},
        {},
        {"top_logprobs": 2},
    ]
    requests = [request_for([V - 1], vocab_size=V, **one) for one in fields]
    states, alone = [begun(one) for one in requests], [begun(one) for one in requests]
    logits = np.random.default_rng(0).standard_normal((len(fields), V)).astype(np.float32)
    logits[1, 7] = np.nan
    advanced(sampler, states, logits)
    for i, state in enumerate(alone):
        advanced(sampler, [state], logits[i : i + 1])
    assert [type(state.error).__name__ for state in states] == [
        "NoneType", "NumericalError", "ParameterError", "NoneType", "NoneType", "NoneType",
    ]  # fmt: skip
    for state, apart in zip(states, alone, strict=True):
        assert state.results[0].token_ids == apart.results[0].token_ids
        assert type(state.error) is type(apart.error)


def test_parameters_by_row_are_those_of_each_row() -> None:
    rng = np.random.default_rng(5)
    logits = (rng.standard_normal((40, 900)) * 2).astype(np.float32)
    keys = Keys(np.arange(40, dtype=np.uint64), np.zeros(40, np.int64), np.arange(40))
    uniforms = keys.uniforms()
    columns = {
        "temperature": rng.choice([0.0, 0.5, 1.0, 1.7], 40),
        "top_k": rng.choice([0, 1, 5, 100], 40),
        "top_p": rng.choice([1.0, 0.5, 0.9], 40),
        "min_p": rng.choice([0.0, 0.1], 40),
    }

    expected = []
    for i in range(40):
        row: dict[str, Any] = {name: column[i].item() for name, column in columns.items()}
        if row["temperature"] == 0:
            expected.append(int(logits[i].argmax()))
        else:
            expected.append(int(sample_by_sorting(logits[i : i + 1], uniforms[i : i + 1], **row, xp=np)[0]))
    for make in CHOOSERS.values():
        found = make().sample(logits, keys, **columns)
        assert [int(token) for token in found] == expected


@pytest.mark.parametrize("size", [V, 33, 32, 1, 4100])
def test_masks_leave_the_tokens_whose_bit_is_set(size: int) -> None:
    rng = np.random.default_rng(size)
    logits = rng.standard_normal((5, size)).astype(np.float32)
    allowed = rng.random((3, size)) < 0.3
    allowed[1] = False
    packed = np.packbits(allowed, axis=-1, bitorder="little")
    masks = np.zeros((3, 4 * -(-size // 32)), np.uint8)
    masks[:, : packed.shape[1]] = packed
    for make in CHOOSERS.values():
        ours = logits.copy()
        left = make().keep_allowed(ours, [4, 0, 2], masks.view(np.uint32))
        expected = logits.copy()
        for row, kept in zip([4, 0, 2], allowed, strict=True):
            expected[row, ~kept] = -np.inf
        np.testing.assert_array_equal(ours, expected)
        assert left.tolist() == allowed.any(axis=-1).tolist()
