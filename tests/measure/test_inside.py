"""Logit lens, ablation, patching and steering against the same thing done by hand, or to the weights."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from minillm import Engine
from minillm.errors import ParameterError
from minillm.measure.inside import ablate_heads, logit_lens, patch, steering_vector
from minillm.reference.softmax import log_softmax

from ..tiny import write_checkpoint

PROMPT = "Count: 3, 4, 5,"


@pytest.fixture(scope="module", params=[pytest.param("numpy", marks=pytest.mark.slow), "cpu"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    with Engine(backend=request.param) as engine:
        yield engine


@pytest.mark.longer
def test_the_lens_is_the_final_norm_and_the_head_after_each_block(engine: Engine) -> None:
    lens = logit_lens(engine, PROMPT, top=3)
    L, T = engine.config.num_layers, len(lens.token_ids)
    assert lens.next_ids.shape == lens.log_probs.shape == (L + 1, T, 3)
    names = ["embedding", *(f"blocks.{i}.residual" for i in range(L))]
    rows = engine.generate(PROMPT, max_new_tokens=1, watch=names).watched
    with Engine(backend="numpy") as plain:  # whose weights are arrays
        norm, head = plain.runner.model.final_norm.weight, plain.runner.model.head.weight.data
        for i, name in enumerate(names):
            x = rows[name]
            x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
            log_probs = log_softmax((x * norm.data + norm.bias) @ head.astype(np.float32).T, np)
            best = np.argsort(-log_probs, axis=-1)[:, :3]
            np.testing.assert_allclose(lens.log_probs[i], np.take_along_axis(log_probs, best, -1), atol=1e-3)
            assert (lens.next_ids[i] == best).mean() > 0.9  # ties


def test_an_ablated_head_is_one_whose_columns_are_zero(tmp_path: Path) -> None:
    base = write_checkpoint(tmp_path / "base", seed=2)
    layer, head = 1, 2
    shutil.copytree(base, tmp_path / "without")
    tensors = load_file(base / "model.safetensors")
    [name] = [name for name in tensors if name.endswith(f"layers.{layer}.self_attn.out_proj.weight")]
    heads = json.loads((base / "config.json").read_text(encoding="utf-8"))["num_attention_heads"]
    D = tensors[name].shape[1] // heads
    tensors[name][:, head * D : (head + 1) * D] = 0
    save_file(tensors, tmp_path / "without" / "model.safetensors")
    ids = [5, 40, 41, 42, 43]
    with Engine(base) as engine, Engine(tmp_path / "without") as changed:
        token, effects = ablate_heads(engine, ids)
        before, after = (log_softmax(one.forward(ids)[-1:], np)[0, token] for one in (engine, changed))
        assert token == engine.forward(ids)[-1].argmax()
        assert effects.shape == (engine.config.num_layers, heads)
        assert effects[layer, head] == pytest.approx(before - after, abs=1e-4)
        assert abs(effects[layer, head]) > 1e-3


@pytest.mark.longer
def test_patches_of_the_only_position_that_differs_restore_the_answer(engine: Engine) -> None:
    prompt, source = "Count: 3, 4, 5,", "Count: 3, 4, 6,"
    token, restored = patch(engine, prompt, source)
    ids, source_ids = (engine.tokenizer.encode(text) for text in (prompt, source))
    [different] = [i for i, pair in enumerate(zip(ids, source_ids, strict=True)) if len({*pair}) == 2]
    assert token == engine.forward(source_ids)[-1].argmax()
    assert restored.shape == (engine.config.num_layers, len(ids))
    np.testing.assert_allclose(restored[:, :different], 0, atol=1e-4)  # the texts are equal there
    np.testing.assert_allclose(restored[-1, -1], 1, atol=1e-4)  # all that the head sees
    np.testing.assert_allclose(restored[-1, different], 0, atol=1e-4)  # too late for the last position
    row = engine.generate(source, max_new_tokens=1, watch=["blocks.0.residual"]).watched["blocks.0.residual"][different]

    def by_hand(array: np.ndarray, place: object) -> np.ndarray:
        array[different] = row
        return array

    with engine.hooks({"blocks.0.residual": by_hand}):
        patched = engine.forward(ids)
    values = [
        log_softmax(logits[-1:], np)[0, token] for logits in (engine.forward(ids), patched, engine.forward(source_ids))
    ]
    assert restored[0, different] == pytest.approx((values[1] - values[0]) / (values[2] - values[0]), abs=1e-3)


@pytest.mark.longer
def test_texts_that_cannot_be_compared_are_refused(engine: Engine) -> None:
    with pytest.raises(ParameterError, match="same number of tokens, found 9 and 7"):
        patch(engine, PROMPT, "Monday, Tuesday,")
    with pytest.raises(ParameterError, match="nothing to restore"):
        patch(engine, PROMPT, PROMPT)
    for call, message in (
        (lambda: patch(engine, PROMPT, PROMPT, "mlp.*"), "'mlp.*' is no point of a block"),
        (lambda: patch(engine, [PROMPT], PROMPT), "takes one prompt"),
        (lambda: ablate_heads(engine, [PROMPT]), "takes one prompt"),
        (lambda: logit_lens(engine, PROMPT, top=0), "top should be a whole number from 1 to 2048, found 0"),
        (lambda: steering_vector(engine, [], ["a"], 0), "should be lists of prompts"),
        (lambda: steering_vector(engine, "ab", "cd", 0), "should be lists of prompts"),
        (lambda: steering_vector(engine, ["a"], ["b"], 9), "layer should be from 0 to 5, found 9"),
    ):
        with pytest.raises(ParameterError) as error:
            call()
        assert message in str(error.value)


def test_a_steering_vector_leads_to_the_texts_that_it_comes_from(engine: Engine) -> None:
    vector = steering_vector(engine, ["Monday, Tuesday,"], ["Count: 3, 4,"], layer=2)
    rows = [
        engine.generate(text, max_new_tokens=1, watch=["blocks.2.residual"]).watched["blocks.2.residual"][-1]
        for text in ("Monday, Tuesday,", "Count: 3, 4,")
    ]
    np.testing.assert_allclose(vector, rows[0] - rows[1], atol=1e-5)
    days = engine.tokenizer.encode(" Wednesday")[-1:]

    def chance(scale: float) -> float:
        with engine.hooks({"blocks.2.residual": lambda array, place: array + scale * vector}):
            return float(log_softmax(engine.forward("Count: 3, 4,")[-1:], np)[0, days].sum())

    assert chance(1) > chance(0) + 1
