"""Every variant of OPT, several seeds and every way of storing it, against transformers as it runs."""

import json
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the reference extra")
pytest.importorskip("transformers", reason="needs the reference extra")

from safetensors.torch import load_file, save_file  # noqa: E402

from minillm.backends.numpy import NumpyBackend  # noqa: E402
from minillm.batch import TokenSequence  # noqa: E402
from minillm.errors import CheckpointError  # noqa: E402
from minillm.formats.load_model import load_model  # noqa: E402
from minillm.runner.runner import Runner  # noqa: E402

from .. import huggingface  # noqa: E402
from ..comparing import assert_same_tokens  # noqa: E402
from ..tiny import VARIANTS, generate, logits_of, random_prompts, runner_of  # noqa: E402

pytestmark = pytest.mark.reference

IDS = np.random.default_rng(3).integers(0, 96, 50).tolist()
MIXTURES = {
    "untied and narrow": ("untied", {"word_embed_proj_dim": 16}),
    "post-norm at full width": ("post-norm", {"word_embed_proj_dim": 32}),
    "narrow pre-norm": ("pre-norm", {"word_embed_proj_dim": 8}),
    "gelu with everything": ("pre-norm", {"activation_function": "gelu"}),
    "post-norm without biases": ("post-norm", {"enable_bias": False, "layer_norm_elementwise_affine": False}),
    "one head, one layer": ("pre-norm", {"num_attention_heads": 1, "num_hidden_layers": 1}),
}


def load(folder: Path) -> Runner:
    return runner_of(load_model(folder, NumpyBackend()), pages=128, page_size=16)


def assert_equal_logits(folder: Path, model) -> None:
    runner = load(folder)
    output = runner.forward([TokenSequence(IDS)], [len(IDS)], rows=range(len(IDS)))
    np.testing.assert_allclose(output.logits, huggingface.logits(model, IDS), rtol=0, atol=1e-4)
    np.testing.assert_allclose(output.hidden, huggingface.hidden(model, IDS), rtol=0, atol=1e-4)


@pytest.mark.parametrize("seed", [11, *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in (12, 13))])
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_hidden_states_and_greedy_tokens(variant: str, seed: int, tmp_path: Path) -> None:
    model = huggingface.build(variant, seed)
    huggingface.save(model, tmp_path)
    assert_equal_logits(tmp_path, model)
    runner, prompts = load(tmp_path), random_prompts(5, seed=seed)
    expected = [huggingface.generate(model, prompt, max_new_tokens=30)[0][0] for prompt in prompts]
    assert min(len(set(line)) for line in expected) >= 8
    for use_cache in (True, False):
        outputs = generate(runner, prompts, max_new_tokens=30, use_cache=use_cache)
        for prompt, ours, theirs in zip(prompts, outputs, expected, strict=True):
            assert_same_tokens(ours, theirs, lambda tokens, p=prompt: huggingface.logits(model, p + tokens)[-1])


@pytest.mark.parametrize("name", MIXTURES)
def test_mixtures_of_the_variants(name: str, tmp_path: Path) -> None:
    variant, fields = MIXTURES[name]
    model = huggingface.build(variant, 5, **fields)
    huggingface.save(model, tmp_path)
    assert_equal_logits(tmp_path, model)


@pytest.mark.parametrize("sharded", [False, True], ids=["one file", "sharded"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_stored_types_and_shards(dtype: str, sharded: bool, tmp_path: Path) -> None:
    model = huggingface.build("post-norm", 4).to(getattr(torch, dtype))
    huggingface.save(model, tmp_path, **({"max_shard_size": "12KB"} if sharded else {}))
    assert (len(list(tmp_path.glob("*.safetensors"))) > 3) == sharded
    assert_equal_logits(tmp_path, model.float())  # the values that 16 bits have kept, computed with in 32


@pytest.mark.parametrize("prefix", ["", "decoder.", "model.decoder."])
def test_published_names(prefix: str, tmp_path: Path) -> None:
    model = huggingface.build("pre-norm", 6)
    huggingface.save(model, tmp_path)
    rename(tmp_path, lambda name: prefix + name.removeprefix("model.decoder."))
    assert_equal_logits(tmp_path, model)


@pytest.mark.parametrize("extra", ["lm_head.weight", "decoder.version", "model.decoder.version"])
def test_a_copy_of_the_tied_head_and_a_version_are_passed_over(extra: str, tmp_path: Path) -> None:
    model = huggingface.build("pre-norm", 6)
    huggingface.save(model, tmp_path)
    head = model.lm_head.weight.detach().clone()
    rename(tmp_path, lambda name: name, **{extra: head if "head" in extra else torch.tensor([3.0])})
    assert_equal_logits(tmp_path, model)


def rename(folder: Path, name_of, **extra) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file({name_of(name): tensor for name, tensor in tensors.items()} | extra, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ffn_dim": 41}, r"layers\.0\.fc1\.weight should have shape \[41, 32\] by config\.json, found \[40, 32\]"),
        ({"num_hidden_layers": 3}, r"lacks tensors layers\.2\.\S+, \S+, \S+ and 13 more tensors"),
        ({"num_hidden_layers": 1}, r"holds tensors layers\.1\.\S+, \S+, \S+ and 13 more tensors"),
        ({"tie_word_embeddings": False}, r"lacks tensor lm_head\.weight"),
        ({"enable_bias": False}, r"holds tensors layers\.0\.\S+bias"),
        ({"max_position_embeddings": 63}, r"embed_positions\.weight should have shape \[65, 32\]"),
    ],
)
def test_a_configuration_that_does_not_fit_is_named(change: dict, message: str, tmp_path: Path) -> None:
    huggingface.save(huggingface.build("pre-norm", 6), tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | change))
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path)


def test_the_comparison_can_fail(tmp_path: Path) -> None:
    model = huggingface.build("pre-norm", 6)
    huggingface.save(model, tmp_path)
    with torch.no_grad():
        model.model.decoder.layers[1].fc1.bias[3] += 0.01
    with pytest.raises(AssertionError):
        assert_equal_logits(tmp_path, model)


def test_logits_of_one_pass_are_those_of_our_own_short_cut(tmp_path: Path) -> None:
    model = huggingface.build("untied", 7)
    huggingface.save(model, tmp_path)
    np.testing.assert_allclose(logits_of(load(tmp_path), IDS), huggingface.logits(model, IDS), rtol=0, atol=1e-4)
