"""Perplexity against its definition, and the other measures of what a dtype costs."""

import math
from pathlib import Path

import numpy as np
import pytest

from minillm import Engine
from minillm.errors import PromptError
from minillm.measure.precision import HELD_OUT, perplexity, relative_error, sample_logits, weight_bytes, windows
from minillm.reference.softmax import log_softmax


def test_windows_hold_every_token_once_and_begin_with_the_special_token(engine: Engine) -> None:
    text = " ".join(str(n) for n in range(200))
    pieces = list(windows(engine, text))
    start, *ids = engine.tokenizer.encode(text)
    assert len(pieces) > 3
    assert {piece[0] for piece in pieces} == {start}
    assert [token for piece in pieces for token in piece[1:]] == ids
    assert {len(piece) for piece in pieces[:-1]} == {engine.config.max_positions}


def test_perplexity_by_its_definition(engine: Engine) -> None:
    """exp of the mean surprise over all tokens, from whole logits and not from the chunks of `score`."""
    text = "a list of colors, " * 30
    surprises = []
    for piece in windows(engine, text):
        logs = log_softmax(engine.forward(piece).astype(np.float64), np)
        surprises += [-logs[i, token] for i, token in enumerate(piece[1:])]
    assert len(surprises) == len(engine.tokenizer.encode(text)) - 1
    assert perplexity(engine, text) == pytest.approx(math.exp(np.mean(surprises)), rel=1e-5)


def test_an_empty_text_and_a_model_without_a_tokenizer_are_named(engine: Engine, monkeypatch) -> None:
    with pytest.raises(PromptError, match="a text of at least two tokens"):
        perplexity(engine, "")
    monkeypatch.setattr(engine, "tokenizer", None)
    with pytest.raises(PromptError, match="no tokenizer"):
        perplexity(engine, "a")


def test_the_logit_error_is_relative(engine: Engine) -> None:
    logits = sample_logits(engine)
    assert logits.shape == (64, 512)
    again = sample_logits(engine)  # its beginning may be cached now, and summed otherwise
    np.testing.assert_allclose(again, logits, rtol=1e-4, atol=1e-4)
    assert relative_error(logits, logits) == 0
    assert relative_error(logits * np.float32(1.01), logits) == pytest.approx(0.01, rel=1e-3)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "int4"])
def test_bytes_of_weights_by_their_bits(checkpoint: Path, dtype: str) -> None:
    """Counted by hand; the tied head is the embedding and counts once."""
    bits = {"float32": 32, "bfloat16": 16, "int8": 8.5, "int4": 4.5}[dtype]
    E, F, V, positions, L = 32, 40, 512, 64, 2
    padded = 64 if dtype.startswith("int") else F  # of fc2's rows
    projections = L * (4 * E * E + F * E + E * padded) * bits
    vocabulary = V * E * (8.5 if dtype == "int4" else bits)
    table = positions * E * (32 if dtype.startswith("int") else bits)
    vectors = (L * (4 * E + F + E + 2 * 2 * E) + 2 * E) * 32
    with Engine(checkpoint, dtype=dtype, backend="numpy") as engine:
        assert weight_bytes(engine) == (projections + vocabulary + table + vectors) / 8


@pytest.mark.slow
def test_the_demo_model_loses_little() -> None:
    """On a part of its held-out text: 16 and 8 bits cost under 0.1 %, and 4 bits under 1 %; logits tell them apart."""
    text = HELD_OUT.read_text(encoding="utf-8")[-6000:]
    values, logits = {}, {}
    for dtype in ("float32", "bfloat16", "int8", "int4"):
        with Engine(dtype=dtype, backend="numpy", max_batch_size=1) as engine:
            values[dtype], logits[dtype] = perplexity(engine, text), sample_logits(engine)
    assert 1.3 < values["float32"] < 2.5
    costs = {dtype: abs(value / values["float32"] - 1) for dtype, value in values.items()}
    assert 0 < costs["bfloat16"] < 0.001 and 0 < costs["int8"] < 0.001 and 0 < costs["int4"] < 0.01
    errors = [relative_error(logits[dtype], logits["float32"]) for dtype in values]
    assert errors[0] == 0 and 0.001 < errors[1] < errors[2] < 0.02 < errors[3] < 0.15
