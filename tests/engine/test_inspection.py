"""Predictions at each position, and attention maps."""

import numpy as np
import pytest

from minillm.batch import TokenSequence
from minillm.engine.inspect import attention_maps, last_attention, next_tokens
from minillm.errors import ParameterError

from ..tiny import VARIANTS, logits_of, tiny_runner

LINE = np.random.default_rng(0).integers(3, 96, 20).tolist()


def test_next_tokens_are_the_best_of_the_softmax() -> None:
    runner = tiny_runner(seed=2)
    logits = logits_of(runner, LINE).astype(np.float64)
    expected = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
    positions = next_tokens(runner, LINE, 3)
    assert [p.token_id for p in positions] == LINE
    for i, position in enumerate(positions):
        best = np.argsort(-expected[i], kind="stable")[:3]
        assert [token for token, _ in position.next] == best.tolist()
        np.testing.assert_allclose([p for _, p in position.next], expected[i, best], rtol=1e-4)
        if i:
            assert position.logprob == pytest.approx(np.log(expected[i - 1, LINE[i]]), abs=1e-4)
    assert positions[0].logprob is None


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("variant", VARIANTS)
def test_maps_are_causal_sum_to_1_and_belong_to_their_layer(variant: str, layer: int) -> None:
    runner = tiny_runner(variant, seed=2)
    maps = attention_maps(runner, LINE, layer)
    assert maps.shape == (4, 20, 20)
    np.testing.assert_allclose(maps.sum(axis=-1), 1, rtol=1e-5)
    assert not np.triu(maps, 1).any()
    assert np.abs(maps - attention_maps(runner, LINE, 1 - layer)).max() > 0.1


def test_maps_are_those_of_the_queries_and_keys() -> None:
    """Layer 0 by hand: its queries come from the embedding alone."""
    runner = tiny_runner(seed=2)
    model = runner.model
    x = model.embedding.tokens.data[LINE] + model.embedding.positions.data[:20]
    layer = model.layers[0]
    x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
    x = x * layer.attention_norm.weight.data + layer.attention_norm.weight.bias
    qkv = x @ layer.attention.qkv.data.T + layer.attention.qkv.bias
    q, k = (qkv[:, i * 32 : (i + 1) * 32].reshape(20, 4, 8) for i in (0, 1))
    scores = np.einsum("thd,shd->hts", q, k) / np.sqrt(8)
    scores[:, np.triu(np.ones((20, 20), bool), 1)] = -np.inf
    weights = np.exp(scores)
    weights /= weights.sum(-1, keepdims=True)
    np.testing.assert_allclose(attention_maps(runner, LINE, 0), weights, rtol=0, atol=1e-5)


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_last_tokens_attention_is_the_last_row_of_each_map(variant: str, monkeypatch) -> None:
    monkeypatch.setattr("minillm.engine.inspect.CHUNK", 7)  # the tokens before it come in several chunks
    runner = tiny_runner(variant, seed=2)
    rows = last_attention(runner, LINE, [1, 0])
    maps = [attention_maps(runner, LINE, layer) for layer in (1, 0)]
    np.testing.assert_allclose(rows, [each[:, -1] for each in maps], rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(last_attention(runner, LINE[:1], [0]), np.ones((1, 4, 1)))


def test_an_engine_gives_the_attention_of_every_layer(engine) -> None:
    rows = engine.attention(LINE)
    assert rows.shape == (2, 4, 20)
    np.testing.assert_allclose(rows.sum(-1), 1, rtol=1e-5)
    np.testing.assert_allclose(engine.attention(LINE, [1]), rows[1:], rtol=1e-4, atol=1e-6)
    with pytest.raises(ParameterError, match="layers are 0 to 1"):
        engine.attention(LINE, [2])


def test_looking_leaves_the_runner_alone() -> None:
    runner = tiny_runner(seed=2)
    before = runner.prefill(TokenSequence(LINE)).logits.copy()
    free = runner.cache.free_pages
    attention_maps(runner, LINE, 0)
    assert runner.cache.free_pages == free
    np.testing.assert_allclose(runner.prefill(TokenSequence(LINE)).logits, before, rtol=1e-4, atol=1e-5)
