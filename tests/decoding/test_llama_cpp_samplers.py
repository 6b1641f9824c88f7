"""Samplers that llama.cpp has too: what its own code leaves of the same logits (scripts/make_golden_samplers.py)."""

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minillm.decoding.dry import Breakers, Dry, in_tokens
from minillm.decoding.filters import build_filters
from minillm.decoding.sampler_order import LLAMA_CPP

from ..tiny import request_for
from .histories import history

FILE = Path(__file__).parents[1] / "golden_samplers" / "llama_cpp.json"
GOLDEN = json.loads(FILE.read_text(encoding="utf-8"))
PIECES: list[str] = GOLDEN["pieces"]
DRY, XTC, CHAINS = (
    [case for case in GOLDEN["cases"] if case["samplers"] == ["dry"] and len(case["fields"]) == 5],
    [case for case in GOLDEN["cases"] if case["samplers"] == ["xtc"]],
    [case for case in GOLDEN["cases"] if len(case["samplers"]) > 1],
)


def greedily(text: str) -> list[int]:
    """A text in the longest pieces, from left to right, as the script's vocabulary splits it."""
    tokens = []
    while text:
        longest = max((piece for piece in PIECES if text.startswith(piece)), key=len, default=text[0])
        tokens += [PIECES.index(longest)] if longest in PIECES else []
        text = text[len(longest) :]
    return tokens


@cache
def breakers(texts: Sequence[str]) -> Breakers:
    return in_tokens([piece.encode() for piece in PIECES], greedily, texts)


def left(case: dict[str, Any]) -> np.ndarray:
    """The logits that llama.cpp leaves."""
    return np.array([-np.inf if logit is None else logit for logit in case["left"]], np.float32)


def dry(fields: dict[str, Any]) -> Dry:
    return Dry(
        *(fields[f"dry_{name}"] for name in ("multiplier", "base", "allowed_length", "penalty_last_n")),
        breakers(tuple(fields["dry_sequence_breakers"])),
    )


def test_dry_penalises_as_llama_cpp_does() -> None:
    changed = 0
    for case in DRY:
        logits = np.array([case["logits"]], np.float32)
        got = dry(case["fields"])(history(([], case["history"])), logits.copy(), np)
        np.testing.assert_allclose(got[0], left(case), rtol=1e-5)
        changed += (got != logits).any()
    assert changed > 25


@pytest.mark.parametrize("length", [70, 3000])
def test_a_long_repetition_counts_in_full(length: int) -> None:
    """Beyond what is compared at all positions at once."""
    line = np.arange(length)
    tokens, lengths = Dry(1.0, 1.0, 2, -1).repetitions(np.concatenate([line, [length, 1], line]))
    assert dict(zip(tokens.tolist(), lengths.tolist(), strict=True)) == {length: length}


def test_rows_of_a_batch_are_penalised_as_alone() -> None:
    rng = np.random.default_rng(2)
    sequences = [([1], rng.integers(4, size=rng.integers(0, 40)).tolist()) for _ in range(9)]
    logits = rng.standard_normal((9, 6)).astype(np.float32)
    processor = Dry(0.8, 1.75, 2, -1)
    together = processor(history(*sequences), logits.copy(), np)
    for row, sequence in enumerate(sequences):
        np.testing.assert_array_equal(processor(history(sequence), logits[row : row + 1].copy(), np)[0], together[row])
    assert (together != logits).any(axis=-1).sum() >= 5


def test_a_penalty_stays_a_number() -> None:
    [scores] = Dry(1e30, 1e30, 0, -1)(history(([], [1, 2] * 50)), np.zeros((1, 3), np.float32), np)
    assert np.isfinite(scores).all()
    assert scores[0] == 0 > scores[1]


def filtered(case: dict[str, Any]) -> np.ndarray:
    """The logits that the filters of a request leave, whose order is the case's."""
    seen = history(([], case["history"]))
    fields = case["fields"] | {"samplers": case["samplers"], "do_sample": True}
    request = request_for([0], vocab_size=len(PIECES), **fields)
    scores = np.array([case["logits"]], np.float32)
    for filter_ in build_filters(request.settings):
        scores = filter_(seen, scores, np)
    return scores[0]


def test_xtc_drops_the_tokens_that_llama_cpp_drops() -> None:
    dropped = 0
    for case in XTC:
        np.testing.assert_allclose(filtered(case), left(case), rtol=1e-5)
        dropped += None in case["left"]
    assert dropped > 8


@pytest.mark.sampled(2)
@pytest.mark.parametrize("sampler", LLAMA_CPP)
def test_samplers_in_any_order_leave_what_llama_cpp_leaves(sampler: str) -> None:
    """Chains that hold this sampler and others; penalties, which count what was generated, see no prompt here."""
    chains = [case for case in CHAINS if sampler in case["samplers"]]
    assert len(chains) > 25
    for case in chains:
        np.testing.assert_allclose(filtered(case), left(case), rtol=1e-4, atol=1e-5)


@pytest.mark.longer
def test_the_orders_differ() -> None:
    """So that the test above tells them apart."""
    orders = [filtered(case | {"samplers": case["samplers"][::-1]}) for case in CHAINS]
    assert sum(not np.allclose(other, left(case), rtol=1e-4) for other, case in zip(orders, CHAINS, strict=True)) > 25
