"""Encoders: each family's tensors, attention both ways, ragged batches, heads. Needs no torch."""

import json
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from minillm.backends.cpu.backend import CpuBackend
from minillm.backends.numpy import NumpyBackend
from minillm.backends.operations import Backend
from minillm.errors import CheckpointError, UnsupportedModelError
from minillm.formats.canonical import canonical_names
from minillm.formats.load_model import load_model
from minillm.models import ENCODERS, build_model, config_of, family_named, published_config, tensor_shapes
from minillm.models.heads import without_head

from ..encoders import CONFIGS, OF_TRANSFORMERS, runner_over, sequence_of, states, texts
from ..tiny import Held, last_of_each_kind, model_of, runner_of, tiny_tensors

PARAMETERS = {
    "bert-base-uncased": 108_891_648,  # 109,482,240 with the pooler, which nothing reads here
    "all-MiniLM-L6-v2": 22_565_376,
    "bge-small-en-v1.5": 33_212_160,
    "distilbert-base-uncased": 66_362_880,
    "roberta-base": 124_055_040,
    "xlm-roberta-base": 277_453_056,
    "all-mpnet-base-v2": 108_895_872,
    "modernbert-base": 149_014_272,
    "nomic-embed-text-v1.5": 136_731_648,
    "gte-base-en-v1.5": 136_776_192,
    "jina-embeddings-v2-base-en": 136_777_728,
    "gte-multilingual-base": 305_368_320,
    "electra-small-discriminator": 13_483_008,
    "electra-base-discriminator": 108_891_648,
    "embeddinggemma-300m": 302_863_104,
    "modernbert-large": 394_781_696,
    "deberta-base": 138_601_728,
    "deberta-v3-xsmall": 70_682_112,
    "deberta-v3-base": 183_831_552,
    "deberta-v2-xlarge": 884_593_152,
}

LENGTHS = {**dict.fromkeys(("modernbert", "nomic_bert", "gte", "jina_bert_v2"), 8192), "gemma3_text": 2048}
"""The longest texts of families, if not 512 tokens"""


@pytest.fixture(params=CONFIGS)
def raw(request: pytest.FixtureRequest) -> dict[str, Any]:
    return CONFIGS[request.param]


def test_every_family_has_a_configuration() -> None:
    assert {raw["model_type"].replace("-", "_") for raw in CONFIGS.values()} == {*ENCODERS, "gemma3_text"}


@pytest.mark.parametrize("shape", PARAMETERS)
def test_published_shapes_have_their_number_of_parameters(shape: str) -> None:
    config = published_config(shape)
    assert sum(math.prod(size) for size in tensor_shapes(config).values()) == PARAMETERS[shape]
    assert config.bidirectional
    assert config.output == "states"
    assert config.max_positions == LENGTHS.get(config.model_type, 512)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("backend", [NumpyBackend, CpuBackend])
def test_a_text_has_the_same_states_in_any_company_and_each_token_sees_all_of_its_own(
    raw: dict[str, Any], backend: type[Backend]
) -> None:
    runner = runner_over(model_of(raw, backend=backend()), backend())
    ids = texts(6, seed=1)
    together = states(runner, ids)
    for each, found in zip(ids, together, strict=True):
        # a BLAS may round otherwise in other numbers of rows, which mpnet's layers make a thousand times as much of
        np.testing.assert_allclose(found, states(runner, [each])[0], rtol=0, atol=5e-4)
    changed = [*ids[0][:-1], ids[0][-1] - 1]
    assert np.abs(states(runner, [changed])[0][0] - together[0][0]).max() > 1e-3  # the first token sees the last


@pytest.mark.sampled(6)
def test_kernels_in_c_agree_with_numpy(raw: dict[str, Any]) -> None:
    ids = [*texts(4, seed=2), [5], [7, 8]]
    numpy, compiled = NumpyBackend(), CpuBackend()
    expected = states(runner_over(model_of(raw, backend=numpy), numpy), ids)
    runner = runner_over(model_of(raw, backend=compiled), compiled)
    for _ in range(3):  # small passes are recorded, and repeated
        for each, reference in zip(ids, expected, strict=True):
            np.testing.assert_allclose(states(runner, [each])[0], reference, rtol=0, atol=1e-4)
    short = [line[:5] for line in ids[:4]]
    reference = states(runner_over(model_of(raw, backend=numpy), numpy), short)
    for i in range(4):  # of one kind, with other tokens
        np.testing.assert_allclose(states(runner, [short[i]])[0], reference[i], rtol=0, atol=1e-4)


def test_layers_that_take_turns_in_one_layers_pages_give_what_pages_of_their_own_give(raw: dict[str, Any]) -> None:
    model, ids = model_of(raw), texts(3, seed=4)
    for ours, apart in zip(
        states(runner_over(model, NumpyBackend()), ids), states(runner_of(model, page_size=16), ids), strict=True
    ):
        np.testing.assert_allclose(ours, apart, rtol=0, atol=1e-4)


@pytest.mark.sampled(8)
@pytest.mark.parametrize(
    "which", [last_of_each_kind, pytest.param(list, marks=pytest.mark.exhaustive)], ids=["last", "all"]
)
def test_every_weight_has_a_say(raw: dict[str, Any], which: Callable[[Iterable[str]], list[str]]) -> None:
    tensors, config = {name: Held(tensor.load()) for name, tensor in tiny_tensors(raw).items()}, config_of(raw)
    [plain] = states(runner_over(model_of(raw), NumpyBackend()), texts(1, seed=3))
    for name in which(tensor_shapes(config)):
        changed = tensors | {name: Held(tensors[name].values * np.float32(1.1))}
        runner = runner_over(build_model(config, changed, NumpyBackend()), NumpyBackend())
        [found] = states(runner, texts(1, seed=3))
        said = np.abs(found - plain).max() > 0
        assert said or any(part in name for part in ("key.bias", "k_lin.bias")), name  # softmax takes no notice


def test_dropping_the_head_leaves_the_hidden_states() -> None:
    raw = CONFIGS["bert, pairs"]
    model, bare = model_of(raw), model_of(raw | {"architectures": ["BertModel"]})
    ids = texts(2)
    for ours, expected in zip(
        states(runner_over(without_head(model), NumpyBackend()), ids),
        states(runner_over(bare, NumpyBackend()), ids),
        strict=True,
    ):
        assert ours.shape[1] == 32
        np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-4)


def test_names_of_published_checkpoints() -> None:
    """A prefix, norms with gamma and beta, and heads that are not run."""
    raw = CONFIGS["bert"] | {"architectures": ["BertForPreTraining"]}
    tensors, config = tiny_tensors(raw), config_of(raw)
    stored = {
        "bert." + name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): each
        for name, each in tensors.items()
    }
    zeros = Held(np.zeros((32, 32), np.float32))
    heads = {
        "cls.predictions.transform.dense.weight": zeros,
        "bert.pooler.dense.weight": zeros,
        "bert.embeddings.position_ids": zeros,
    }
    assert set(canonical_names(stored | heads, config)) == set(tensors)
    with pytest.raises(CheckpointError, match=r"holds tensor encoder.layer.0.more"):
        build_model(config, tensors | {"encoder.layer.0.more": zeros}, NumpyBackend())


@pytest.mark.parametrize(
    ("name", "change", "error", "message"),
    [
        ("bert", {"is_decoder": True}, UnsupportedModelError, "is_decoder is true; in this family"),
        ("bert", {"add_cross_attention": True}, UnsupportedModelError, "add_cross_attention is true"),
        ("bert", {"position_embedding_type": "relative_key"}, UnsupportedModelError, "minillm runs 'absolute'"),
        ("bert", {"hidden_act": "mish"}, UnsupportedModelError, "hidden_act is 'mish'"),
        ("bert", {"hidden_size": 33}, CheckpointError, "33 should be a multiple of num_attention_heads 4"),
        ("bert", {"vocab_size": None}, CheckpointError, "vocab_size is missing"),
        ("bert", {"architectures": ["BertForMultipleChoice"]}, UnsupportedModelError, "'BertForMultipleChoice'"),
        ("bert", {"architectures": ["BertForQuestionAnswering"], "num_labels": 3}, CheckpointError, "found 3"),
        ("bert, pairs", {"id2label": {"0": "a", "2": "b"}}, CheckpointError, "should name the labels 0 to 1"),
        ("bert, pairs", {"problem_type": "ranking"}, UnsupportedModelError, "problem_type is 'ranking'"),
        ("bert, pairs", {"sbert_ce_default_activation_function": "Cube"}, UnsupportedModelError, "'Cube'"),
        ("roberta", {"max_position_embeddings": 2}, CheckpointError, "positions are numbered from 2"),
        ("distilbert", {"n_heads": 5}, CheckpointError, "dim 32 should be a multiple of n_heads 5"),
    ],
)
def test_what_is_not_run_is_refused_by_name(
    name: str, change: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        config_of(CONFIGS[name] | change)


@pytest.mark.parametrize(
    ("fields", "labels", "function"),
    [
        ({}, ("LABEL_0", "LABEL_1"), "softmax"),
        ({"num_labels": 1}, ("LABEL_0",), "sigmoid"),
        ({"id2label": {"1": "b", "0": "a"}}, ("a", "b"), "softmax"),
        ({"num_labels": 1, "problem_type": "regression"}, ("LABEL_0",), "none"),
        ({"problem_type": "multi_label_classification"}, ("LABEL_0", "LABEL_1"), "sigmoid"),
        (
            {"num_labels": 1, "sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}},
            ("LABEL_0",),
            "none",
        ),
    ],
)
def test_labels_and_the_function_of_their_logits(
    fields: dict[str, Any], labels: tuple[str, ...], function: str
) -> None:
    for raw in (CONFIGS["bert"], {"model_type": "gpt2", "vocab_size": 96, "n_embd": 32, "n_layer": 1, "n_head": 2}):
        name = {"bert": "BertForSequenceClassification", "gpt2": "GPT2ForSequenceClassification"}[raw["model_type"]]
        config = config_of(raw | {"n_positions": 64, "architectures": [name]} | fields)
        assert (config.output, config.labels, config.score_function) == ("labels", labels, function)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("mpnet", {"relative_attention_num_buckets": 16}, "relative_attention_num_buckets is 16; minillm runs 32"),
        (
            "modernbert, labels",
            {"classifier_pooling": "max"},
            "classifier_pooling is 'max'; minillm runs 'cls', 'mean'",
        ),
        ("modernbert", {"layer_types": ["chunked_attention"] * 4}, "chunked_attention"),
        (
            "gemma3_text",
            {"architectures": ["Gemma3TextForSequenceClassification"]},
            "use_bidirectional_attention is true",
        ),
        ("modernbert", {"hidden_activation": "mish"}, "hidden_activation is 'mish'"),
        ("nomic_bert", {"prenorm": True}, "prenorm is True; in this family minillm runs False"),
        ("nomic_bert", {"num_experts": 8}, "num_experts is 8"),
        ("nomic_bert", {"qkv_proj_bias": True}, "qkv_proj_bias is True"),
        ("nomic_bert", {"rotary_emb_fraction": 0.5}, "rotary_emb_fraction is 0.5"),
        ("nomic_bert", {"n_embd": 32, "activation_function": "gelu"}, "activation_function is 'gelu'"),
        ("gte", {"logn_attention_scale": True}, "logn_attention_scale is true"),
        ("gte", {"pack_qkv": False}, "pack_qkv is false"),
        ("gte", {"layer_norm_type": "rms_norm"}, "layer_norm_type is 'rms_norm'"),
        ("gte", {"model_type": "new", "position_embedding_type": "absolute"}, "position_embedding_type is 'absolute'"),
        ("gte", {"rope_parameters": {"rope_type": "ntk", "factor": 2.0}}, "'ntk'"),
        ("deberta", {"talking_head": True}, "talking_head is true; in this family minillm runs heads apart"),
        ("deberta", {"relative_attention": False}, "relative_attention is false or pos_att_type empty"),
        ("deberta-v2", {"pos_att_type": "p2p|c2p"}, "pos_att_type is 'p2p|c2p'; minillm runs c2p and p2c"),
        ("deberta-v2", {"embedding_size": 8}, "embedding_size is 8; in this family minillm runs hidden_size, 16"),
        ("deberta-v2", {"pooler_hidden_size": 8}, "pooler_hidden_size is 8"),
        ("deberta-v2", {"attention_head_size": 8}, "attention_head_size is 8; in this family minillm runs 4"),
        ("deberta-v2", {"conv_kernel_size": 3, "conv_groups": 2}, "conv_groups is 2; in this family minillm runs 1"),
        ("deberta-v2", {"conv_kernel_size": 4}, "conv_kernel_size is 4; minillm runs odd sizes"),
        ("deberta-v2", {"conv_kernel_size": 3, "conv_act": "mish"}, "conv_act is 'mish'"),
    ],
)
def test_what_would_change_the_results_is_refused(name: str, change: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        config_of(CONFIGS[name] | change)


def test_half_of_embeddinggemmas_window_is_on_either_side() -> None:
    raw = CONFIGS["gemma3_text"] | {"sliding_window": 512, "max_position_embeddings": 2048}
    assert config_of(raw).windows == (257, None, 257)


def test_families_are_named_as_in_config_json() -> None:
    for raw in CONFIGS.values():
        assert config_of(raw).model_type == raw["model_type"]
        assert family_named(raw["model_type"]).NAMES.embedding in tensor_shapes(config_of(raw))


@pytest.mark.parametrize("name", OF_TRANSFORMERS)
def test_what_transformers_computed_once(name: str) -> None:
    """The golden files of scripts/make_golden_encoders.py."""
    folder = Path(__file__).parents[1] / "golden_encoders" / name.replace(", ", "-")
    expected = json.loads((folder / "expected.json").read_text(encoding="utf-8"))
    arrays, backend = load_file(folder / "expected.safetensors"), NumpyBackend()
    model = load_model(folder, backend)
    whole, bare = runner_over(model, backend), runner_over(without_head(model), backend)
    for i, ids in enumerate(expected["texts"]):
        assert list(sequence_of(model, ids).types) == expected["types"][i] or max(sequence_of(model, ids).types) == 0
        np.testing.assert_allclose(states(bare, [ids])[0], arrays[f"hidden.{i}"], rtol=0, atol=1e-4)
        if model.config.output == "labels":
            np.testing.assert_allclose(states(whole, [ids])[0][0], arrays[f"logits.{i}"], rtol=0, atol=1e-4)
