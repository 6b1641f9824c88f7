"""config.json with a field of nonsense in it, for every family and field. Needs no torch."""

import json
from pathlib import Path
from typing import Any

import pytest

from minillm.config import ModelConfig
from minillm.errors import CheckpointError, ModelError, UnsupportedModelError
from minillm.files import read_json
from minillm.models import FAMILIES, family_of

from ..families import CONFIGS
from .test_rotary import SCALINGS

NONSENSE: dict[str, Any] = {
    "NaN": float("nan"),
    "infinity": float("inf"),
    "minus infinity": -float("inf"),
    "a word": "nonsense",
    "a table": {"a": 1},
    "lists": [[1]],
    "beyond float64": 10**400,
    "beyond memory": 10**12,
    "negative": -3,
    "a fraction": 0.3,
    "true": True,
    "nothing": 0,
}
"""No field of numbers may be any of the first six; the others some may be."""

SHARED = [
    "rope_theta",
    "rope_local_base_freq",
    "rope_scaling",
    "rope_parameters",
    "sliding_window_pattern",
    "query_pre_attn_scalar",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "use_bidirectional_attention",
    "no_rope_layers",
    "no_rope_layer_interval",
    "embedding_multiplier",
    "residual_multiplier",
    "attention_multiplier",
    "logits_scaling",
    "hidden_activation",
    "partial_rotary_factor",
    "original_max_position_embeddings",
    "sliding_window",
    "use_sliding_window",
    "max_window_layers",
    "layer_types",
    "is_causal",
    "head_dim",
    "num_key_value_heads",
    "attention_bias",
    "mlp_bias",
    "tie_word_embeddings",
    "bos_token_id",
    "eos_token_id",
    "num_experts",
    "num_local_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "norm_topk_prob",
    "decoder_sparse_step",
    "mlp_only_layers",
    "clip_qkv",
    "n_shared_experts",
    "per_layer_config",
    "attention_chunk_size",
    "hidden_act",
    "activation_function",
    "rotary_pct",
    "rotary_emb_base",
    "use_parallel_residual",
    "n_inner",
    "seq_length",
    "use_bias",
    "norm_epsilon",
    "rms_norm_eps",
    "layer_norm_eps",
    "layer_norm_epsilon",
    "scale_attn_weights",
    "scale_attn_by_inverse_layer_idx",
    "word_embed_proj_dim",
    "do_layer_norm_before",
    "enable_bias",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
]

ROPE_FIELDS = [
    "rope_type",
    "type",
    "factor",
    "original_max_position_embeddings",
    "low_freq_factor",
    "high_freq_factor",
    "beta_fast",
    "beta_slow",
    "truncate",
    "mscale",
    "mscale_all_dim",
    "attention_factor",
    "rope_theta",
    "partial_rotary_factor",
    "full_attention",
]


WINDOWED = ("mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "starcoder2")
WINDOWED += ("gemma2", "gemma3_text", "smollm3", "phi3", "olmo3", "exaone4", "ministral3", "cohere2")
WINDOWED += ("qwen2_moe", "dots1", "gpt_oss", "gemma4_text")
"""Families that read `sliding_window`"""
RECURRENT = ("granitemoehybrid", "nemotron_h")
"""Families with layers that transformers calls `linear_attention`"""


def read(raw: dict[str, Any]) -> ModelConfig | None:
    """The configuration; None where it is refused in one line."""
    try:
        config: ModelConfig = family_of(raw).read_config(raw)
    except ModelError as error:
        message = str(error)
        assert "\n" not in message and len(message) < 300 and "config.json" in message
        return None
    hash(config)
    return config


def without(raw: dict[str, Any], field: str) -> dict[str, Any]:
    return {name: value for name, value in raw.items() if name != field}


ROTARY = [family for family, configs in CONFIGS.items() if hasattr(read(next(iter(configs.values()))), "rotary")]
ROTARY.remove("phi3")  # which has LongRoPE in place of these kinds
ROTARY.remove("mistral4")  # which has YaRN alone
ROTARY.remove("olmo3")  # which has a table for each kind of layers


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", list(NONSENSE))
@pytest.mark.slow
@pytest.mark.sampled(1, slow=2)
def test_nonsense_in_a_field_is_refused_in_a_line_or_has_no_effect(family: str, kind: str) -> None:
    raw = next(iter(CONFIGS[family].values()))
    for field in {*raw, *SHARED} - {"model_type"}:
        config = read(raw | {field: NONSENSE[kind]})
        if config is not None and list(NONSENSE).index(kind) < 6:
            assert config in (read(without(raw, field)), read(raw)), field


@pytest.mark.parametrize("family", ROTARY)
@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize("table", ["rope_parameters", "rope_scaling"])
@pytest.mark.slow
@pytest.mark.sampled(1, slow=2)
def test_nonsense_in_a_rotary_table_likewise(family: str, name: str, table: str) -> None:
    raw = without(without(next(iter(CONFIGS[family].values())), "rope_parameters"), "rope_scaling")
    plain = read(raw | {table: SCALINGS[name]})
    assert plain is not None
    for field in ROPE_FIELDS:
        for i, value in enumerate(NONSENSE.values()):
            config = read(raw | {table: SCALINGS[name] | {field: value}})
            if config is not None and i < 6:
                assert config in (plain, read(raw | {table: without(SCALINGS[name], field)})), (field, value)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"is_causal": False}, "is_causal is False; minillm runs causal attention"),
        ({"per_layer_config": {"0": {"num_attention_heads": 1}}}, "per_layer_config; minillm runs layers of one shape"),
        ({"attention_chunk_size": 8}, "attention_chunk_size is 8"),
        ({"layer_types": ["chunked_attention", "full_attention"]}, "layer_types has 'chunked_attention'; minillm runs"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_transformers_reads_in_every_family_is_refused(family: str, change: dict[str, Any], message: str) -> None:
    if "layer_types" in change and family in RECURRENT:
        pytest.skip("it has such layers")
    raw = next(iter(CONFIGS[family].values()))
    with pytest.raises(UnsupportedModelError, match=message):
        family_of(raw).read_config(raw | change)


@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in WINDOWED])
def test_a_window_in_a_family_without_is_refused(family: str) -> None:
    """transformers' cache then forgets what its mask would still let a query see."""
    raw = next(iter(CONFIGS[family].values()))
    for change in ({"sliding_window": 7}, {"layer_types": ["sliding_attention", "full_attention"]}):
        with pytest.raises(UnsupportedModelError, match=next(iter(change))):
            family_of(raw).read_config(raw | change)


@pytest.mark.parametrize("text", ["", "[1]", "{", "[" * 100_000, '{"a": 1' + "0" * 5000 + "}", '{"a": "\ud800'])
def test_a_file_that_is_not_json_is_named(text: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(CheckpointError, match=r"config\.json: expected a JSON"):
        read_json(path)


@pytest.mark.parametrize("family", ["gpt2", "bloom"])
def test_either_name_of_a_size_is_read_and_two_that_differ_are_refused(family: str) -> None:
    raw = dict(next(iter(CONFIGS[family].values())))

    name, other = "n_head", "num_attention_heads"
    read_config = family_of(raw).read_config
    expected = read_config(raw)
    assert read_config(without(raw, name) | {other: raw[name]}) == expected
    assert read_config(raw | {other: raw[name]}) == expected
    assert read_config(json.loads(json.dumps(raw | {other: None}))) == expected
    with pytest.raises(CheckpointError, match="its other name"):
        read_config(raw | {other: 2})
