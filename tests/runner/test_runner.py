"""The forward pass: prefill and decode agree, rows are returned as requested, and NaN is reported."""

import numpy as np
import pytest

from minillm.backends.numpy import NumpyBackend
from minillm.batch import TokenSequence
from minillm.cache import PagedCache
from minillm.errors import NumericalError
from minillm.runner.runner import Runner

from ..families import CONFIGS
from ..tiny import VARIANTS, logits_of, model_of, random_prompts, runner_of, tiny_model, tiny_runner

LINE = np.random.default_rng(0).integers(3, 96, 30).tolist()


@pytest.mark.parametrize("variant", VARIANTS)
def test_prefill_and_decode_give_the_logits_of_one_pass(variant: str) -> None:
    runner = tiny_runner(variant, seed=2, page_size=8)
    expected = logits_of(runner, LINE)
    sequence = TokenSequence(LINE[:10])
    np.testing.assert_allclose(runner.prefill(sequence).logits[0], expected[9], rtol=0, atol=1e-4)
    for i in range(10, 30):
        sequence.token_ids.append(LINE[i])
        assert sequence.pending == 1
        np.testing.assert_allclose(runner.decode([sequence]).logits[0], expected[i], rtol=0, atol=1e-4)


def test_a_mixture_of_prefill_chunks_and_decode_is_one_pass() -> None:
    runner = tiny_runner(seed=2, page_size=4)
    sequences = [TokenSequence(list(prompt)) for prompt in random_prompts(4, seed=2, longest=9)]
    runner.forward(sequences[:2], [s.pending for s in sequences[:2]])
    for sequence in sequences[:2]:
        sequence.token_ids.append(50)
    sequences[2].token_ids = LINE[:12]
    counts = [1, 1, 7, sequences[3].pending]
    output = runner.forward(sequences, counts)
    assert output.logits.shape == (4, 96)
    assert sequences[2].pending == 5
    for row, sequence in zip(output.logits, sequences, strict=True):
        seen = sequence.token_ids[: sequence.cached]
        np.testing.assert_allclose(row, logits_of(runner, seen)[-1], rtol=0, atol=1e-5)


@pytest.mark.parametrize("rows", [[], [0], [4, 2], list(range(7))], ids=str)
def test_logits_of_the_rows_that_are_wanted(rows: list[int]) -> None:
    runner = tiny_runner(seed=2)
    output = runner.forward([TokenSequence(LINE[:3]), TokenSequence(LINE[:4])], [3, 4], rows)
    assert output.logits.shape == (len(rows), 96)
    assert output.hidden.shape == (len(rows), 32)
    every = np.concatenate([logits_of(runner, LINE[:3]), logits_of(runner, LINE[:4])])
    np.testing.assert_allclose(output.logits, every[rows], rtol=0, atol=1e-5)


# --- numbers that are none --------------------------------------------------------------------------------------------


def poisoned(name: str, value: float, variant: str = "pre-norm") -> Runner:
    """A runner whose model has one bad number in the named weight."""
    model = tiny_model(variant, seed=2)
    layer = model.layers[1]
    weights = {
        "embed_tokens": model.embedding.tokens,
        "embed_positions": model.embedding.positions,
        "qkv": layer.attention.qkv,
        "out_proj": layer.attention.out,
        "fc1": layer.mlp.up,
        "fc2": layer.mlp.down,
        "self_attn_layer_norm": layer.attention_norm.weight,
        "final_layer_norm": model.final_norm.weight,
        "lm_head": model.head.weight,
    }
    data = weights[name].data
    data[(5,) * data.ndim] = value
    return runner_of(model)


PLACES = {
    "embed_tokens": "before the first layer, made by embed with embed_tokens and embed_positions",
    "embed_positions": "before the first layer, made by embed with embed_tokens and embed_positions",
    "qkv": "in layer 1, made by linear with layers.1.self_attn.qkv",
    "out_proj": "in layer 1, made by linear with layers.1.self_attn.out_proj",
    "fc1": "in layer 1, made by linear with layers.1.fc1",
    "fc2": "in layer 1, made by linear with layers.1.fc2",
    "self_attn_layer_norm": "in layer 1, made by layer_norm with layers.1.self_attn_layer_norm",
    "final_layer_norm": "in layer 2, made by layer_norm with final_layer_norm",
    "lm_head": "in layer 2, made by linear with lm_head",
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("value", [np.nan, np.inf], ids=str)
@pytest.mark.parametrize("name", PLACES)
def test_nan_and_infinity_are_named_with_layer_and_operation(name: str, value: float) -> None:
    runner = poisoned(name, value, "untied")
    with pytest.raises(NumericalError, match=PLACES[name].replace(".", r"\.")):
        runner.prefill(TokenSequence([3, 4, 5, 6, 5, 7, 8]))


def test_numbers_that_outgrow_float32_are_named() -> None:
    model = tiny_model(seed=2)
    model.layers[1].mlp.up.data[:] *= 1e30
    model.layers[1].mlp.down.data[:] *= 1e30
    with pytest.raises(NumericalError, match=r"NaN or infinity in layer 1, made by linear with layers\.1\.fc2"):
        runner_of(model).prefill(TokenSequence([3, 4, 5]))


def test_numbers_after_experts_are_named_too() -> None:
    """A router's result is a tuple of arrays, with None for one that the backend has no use for."""
    model = model_of(CONFIGS["mixtral"]["two of four"])
    model.final_norm.weight.data[5] = np.nan
    with pytest.raises(NumericalError, match=r"NaN or infinity in layer \d, made by rms_norm with"):
        runner_of(model).prefill(TokenSequence([3, 4, 5]))


def test_after_the_error_the_sequence_is_as_it_was_and_others_run() -> None:
    runner = poisoned("embed_tokens", np.nan)
    bad, good = TokenSequence([3, 5, 4]), TokenSequence([3, 4, 6])
    with pytest.raises(NumericalError):
        runner.prefill(bad)
    assert (bad.cached, bad.pending) == (0, 3)
    runner.cache.free(bad)
    assert runner.cache.free_pages == runner.cache.num_pages
    with pytest.raises(NumericalError, match="embed_tokens"):  # the tied head has the bad number too
        runner.prefill(good)


# --- stages of a pipeline ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS)
def test_two_stages_give_the_logits_of_one_bit_for_bit(variant: str) -> None:
    """Each has a backend and a cache of its own layers; the hidden state is handed over."""
    model = tiny_model(variant, seed=2)
    whole, middle = runner_of(model, page_size=8), len(model.layers) // 2
    stages = []
    for layers in (range(middle), range(middle, len(model.layers))):
        backend = NumpyBackend()
        cache = PagedCache(model.config, backend, 64, 8, layers)
        assert cache.storage.keys.shape[0] == len(layers)
        stages.append(Runner(model, backend, cache, layers))
    prompts = random_prompts(3, seed=4, longest=15)
    sequences = [[TokenSequence(list(prompt)) for prompt in prompts] for _ in range(3)]
    for token in (5, 6, 7):
        alone, first, last = sequences
        counts = [sequence.pending for sequence in alone]
        expected = whole.forward(alone, counts)
        handed_over = stages[0].forward(first, counts)
        assert handed_over.logits is None
        assert handed_over.hidden.shape == (sum(counts), model.config.hidden_size)
        output = stages[1].forward(last, counts, x=handed_over.hidden.copy())
        np.testing.assert_array_equal(output.logits, expected.logits)
        np.testing.assert_array_equal(output.hidden, expected.hidden)
        for sequence in (*alone, *first, *last):
            sequence.token_ids.append(token)
