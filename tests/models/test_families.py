"""Properties of every family: different paths through the engine give the same results. Needs no torch."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest

from minillm.backends.numpy import NumpyBackend
from minillm.batch import TokenSequence
from minillm.engine.inspect import masked_attention_maps
from minillm.errors import CheckpointError
from minillm.formats.canonical import canonical_names
from minillm.models import build_model, family_of, published, published_config, tensor_shapes

from ..comparing import assert_same_tokens
from ..families import CASES, CONFIGS, PARAMETERS, each_of
from ..tiny import (
    Held,
    chunks,
    generate,
    last_of_each_kind,
    logits_of,
    model_of,
    random_prompts,
    runner_of,
    tiny_tensors,
)

LINE = np.random.default_rng(5).integers(3, 96, 60).tolist()


@pytest.fixture(params=each_of(CASES))
def raw(request: pytest.FixtureRequest) -> dict[str, Any]:
    family, name = request.param
    return CONFIGS[family][name]


@pytest.mark.sampled(8)
@pytest.mark.parametrize(
    ("chunk", "page_size"),
    [
        pytest.param(chunk, page_size, marks=() if (chunk, page_size) in ((11, 7), (1, 64)) else pytest.mark.exhaustive)
        for chunk in (60, 11, 1)
        for page_size in (1, 7, 64)
    ],
)
def test_chunks_and_pages_of_any_size_give_the_logits_of_one_pass(
    raw: dict[str, Any], chunk: int, page_size: int
) -> None:
    model = model_of(raw)
    runner = runner_of(model, pages=64, page_size=page_size)
    np.testing.assert_allclose(chunks(runner, LINE, chunk), logits_of(runner_of(model), LINE), rtol=0, atol=1e-4)


@pytest.mark.sampled(8, slow=2)
def test_cached_naive_and_single_tokens_are_the_same(raw: dict[str, Any]) -> None:
    """Tokens, whose logits are those of one pass by the test above, in every configuration."""
    runner, prompts = runner_of(model_of(raw), pages=128, page_size=16), random_prompts(3, seed=3)
    batch = generate(runner, prompts, max_new_tokens=14)
    naive = generate(runner, prompts, max_new_tokens=14, use_cache=False)
    single = [generate(runner, [prompt], max_new_tokens=14)[0] for prompt in prompts]
    for prompt, expected, *others in zip(prompts, single, batch, naive, strict=True):
        for ours in others:
            assert_same_tokens(ours, expected, lambda tokens, p=prompt: logits_of(runner, p + tokens)[-1])


@pytest.mark.sampled(4)
def test_a_tree_of_guesses_gives_the_logits_of_its_branches(raw: dict[str, Any]) -> None:
    """Guesses 4-9, 4-8 and 5 after a line: each sees its own ancestors, at its own position."""
    runner, line = runner_of(model_of(raw), page_size=16), LINE[:30]
    sequence = TokenSequence([*line, 4, 9, 8, 5], tree=(-1, 0, 0, -1))
    rows = runner.forward([sequence], [sequence.pending], rows=range(30, 34)).logits.copy()
    for row, branch in zip(rows, ([4], [4, 9], [4, 8], [5]), strict=True):
        np.testing.assert_allclose(row, logits_of(runner, line + branch)[-1], rtol=0, atol=1e-4)


@pytest.mark.sampled(4)
def test_attention_maps_have_rows_that_sum_to_one_or_less_with_sinks_and_look_back_only(raw: dict[str, Any]) -> None:
    maps, masked = masked_attention_maps(runner_of(model_of(raw)), LINE, layer=1)
    assert maps.shape == (raw["num_attention_heads" if "num_attention_heads" in raw else "n_head"], 60, 60)
    total = maps.sum(axis=-1)
    if raw["model_type"] == "gpt_oss":
        assert (total > 0).all() and (total < 1).any() and (total < 1 + 1e-5).all()
    else:
        np.testing.assert_allclose(total, 1, atol=1e-5)
    assert not np.triu(maps, 1).any()
    np.testing.assert_array_equal(masked, (maps == 0).all(axis=0))  # also outside of windows; these weights are not 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "which", [last_of_each_kind, pytest.param(list, marks=pytest.mark.exhaustive)], ids=["last", "all"]
)
def test_every_weight_has_a_say(raw: dict[str, Any], which: Callable[[Iterable[str]], list[str]]) -> None:
    """Each tensor of the table, changed alone, changes the logits: none is loaded and left out."""
    family, tensors = family_of(raw), {name: Held(tensor.load()) for name, tensor in tiny_tensors(raw).items()}
    config = family.read_config(raw)
    line = LINE if config.num_experts else LINE[:12]  # some tokens for each expert
    plain = logits_of(runner_of(model_of(raw)), line)
    for name in which(tensor_shapes(config)):
        changed = tensors | {name: Held(tensors[name].values * np.float32(1.1))}
        logits = logits_of(runner_of(build_model(config, changed, NumpyBackend())), line)
        has_a_say = np.abs(logits - plain).max() > 0
        assert has_a_say or "k_proj.bias" in name, name  # softmax takes no notice of a key's bias


def test_a_copy_of_a_tied_head_is_left_out_or_taken_and_another_is_refused(raw: dict[str, Any]) -> None:
    raw = raw | {"tie_word_embeddings": True}
    family, tensors = family_of(raw), tiny_tensors(raw)
    config = family.read_config(raw)
    embedding = next(iter(tensor_shapes(config)))
    values = tensors[embedding].load()
    head = "lm_head.weight"
    expected = set(canonical_names(tensors, config))
    assert set(canonical_names({**tensors, head: Held(values)}, config)) == expected
    alone = {name: tensor for name, tensor in tensors.items() if name != embedding} | {head: Held(values)}
    assert set(canonical_names(alone, config)) == expected
    for other in (values + 1, values[:-1]):
        with pytest.raises(CheckpointError, match=f"tie_word_embeddings says .* and {embedding} differ"):
            canonical_names({**tensors, head: Held(other)}, config)


def test_a_tensor_under_two_names_is_refused(raw: dict[str, Any]) -> None:
    family, tensors = family_of(raw), tiny_tensors(raw)
    name = list(tensors)[-1]
    prefix = {"opt": "decoder.", "gpt_neox": "gpt_neox.", "gpt2": "transformer.", "bloom": "transformer."}
    twice = {**tensors, prefix.get(raw["model_type"], "model.") + name: tensors[name]}
    with pytest.raises(CheckpointError, match=f"holds tensor {name} twice"):
        canonical_names(twice, family.read_config(raw))


@pytest.mark.sampled(8)
@pytest.mark.parametrize("shape", PARAMETERS)
def test_published_shapes_have_their_number_of_parameters(shape: str) -> None:
    config = published_config(shape)
    assert sum(math.prod(size) for size in tensor_shapes(config).values()) == PARAMETERS[shape]


@pytest.mark.parametrize("shape", published())
def test_published_shapes_can_be_read(shape: str) -> None:
    config = published_config(shape)
    assert config.num_heads % config.num_kv_heads == 0
    assert config.max_positions >= 448
