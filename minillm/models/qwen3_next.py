"""Qwen3-Next (Qwen Team, 2025): Gated DeltaNet in three of four layers, gated attention in the others, many experts.

    x = tokens[ids]
    x = x + operator(norm(x));  x = x + experts(norm(x))      in each layer; operator: delta net or attention
    logits = norm(x) W_lm

Attention is Qwen3's with sigmoid gates of the heads' results, and a quarter of each head rotated. A delta net keeps a
state in place of keys and values (`layers/delta_net.py`). Qwen3.5 differs in names of tensors and fields: its files
read its configurations.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

from ..backends.operations import Backend
from ..config import Fields
from ..errors import CheckpointError, ParameterError, UnsupportedModelError
from ..layers.attention import Attention
from ..layers.block import PreNorm
from ..layers.delta_net import DeltaNetBlock, GatedDeltaNet
from ..layers.embedding import Embedding, LMHead
from ..layers.experts import ExpertMLP
from ..layers.mlp import GatedMLP
from ..reference.rotary import Rotation
from .decoder import Decoder
from .llama import NAMES, gated_mlp, read_kin
from .mixtral import ExpertConfig, expert_mlp, read_experts
from .parameters import Weights
from .qwen3_moe import sparse_layers
from .reading import merge_names, read_layer_types, read_layers, refuse_other_layers
from .rotary import read_partial_rotary

__all__ = ["NAMES", "DeltaNetConfig", "build", "read_config", "read_delta_nets"]

KINDS = "full_attention", "linear_attention"
"""Kinds of layers in config.json's `layer_types`"""
INTERVAL = 4
"""Every so many layers one has attention, if config.json does not say"""
DEFAULTS = {
    "head_dim": 256,
    "intermediate_size": 5632,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32_768,
    "shared_expert_intermediate_size": 512,
}
"""Fields that config.json may lack"""
SHARE = 0.25
"""Share of each head that is rotated if config.json does not say"""
HEADS = {"linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128}
HEADS |= {"linear_value_head_dim": 128}
"""Heads of a delta net and their widths, if config.json has none"""
MOST_TAPS = 64
"""Upper bound on a convolution's width in config.json"""
GAIN = 1.0
"""Published gains of norms, but a delta net's own, are less this"""


@dataclass(frozen=True, kw_only=True)
class DeltaNetConfig(ExpertConfig):
    """Llama's fields, the experts' and the delta nets'."""

    linear: tuple[bool, ...]
    """Whether each layer has a delta net in place of attention"""
    keys: tuple[int, int]
    """Key heads of a delta net, and dk"""
    values: tuple[int, int]
    """Value heads of a delta net, and dv"""
    taps: int
    """Inputs of its convolution, a token's own included"""
    fused_projection: bool = False
    """Checkpoints have its projections as two tensors, key head by key head (Qwen3-Next); GGUF files have four, and
    say so in the field `projections_apart`"""

    def sharded(self, ranks: int) -> Self:
        """As `ModelConfig.sharded`: heads of the delta nets are shared too."""
        if self.keys[0] % ranks:
            raise ParameterError(
                f"tensor_parallel {ranks} should divide the model's linear_num_key_heads {self.keys[0]}"
            )
        keys, values = ((heads // ranks, width) for heads, width in (self.keys, self.values))
        states = _states(self.linear, keys, values, self.taps)
        return replace(super().sharded(ranks), keys=keys, values=values, layer_states=states)


def read_config(raw: Mapping[str, Any]) -> DeltaNetConfig:
    """Qwen3-Next's configuration from config.json.

    Raises:
        As `llama.read_config`.
    """
    named = merge_names(raw, {"num_experts": "num_local_experts"})
    fields = Fields(DEFAULTS | {name: value for name, value in named.items() if value is not None})
    experts = read_experts(
        fields,
        "num_experts",
        experts=512,
        chosen=10,
        width="moe_intermediate_size",
        default_width=512,
        sparse=sparse_layers(fields, read_layers(fields)),
        shared=True,
    )
    return read_delta_nets(
        fields,
        "qwen3_next",
        fused_projection=not fields.get("projections_apart", False),
        normalised=fields.get("norm_topk_prob", True),
        shared_size=fields.size("shared_expert_intermediate_size"),
        shared_gate=True,
        **experts,
    )


def read_delta_nets(fields: Fields, model_type: str, **experts: Any) -> DeltaNetConfig:
    """Read the fields that Qwen3-Next and Qwen3.5 share; `experts` are those of `DeltaNetConfig` that are known.

    Raises:
        As `llama.read_config`; CheckpointError also for heads that cannot be grouped, or without attention.
    """
    refuse_other_layers(fields, kinds=KINDS)
    if not fields.get("attn_output_gate", True):
        raise UnsupportedModelError(f"{fields.source}: attn_output_gate is false; minillm runs gated attention here")
    linear = _linear_layers(fields)
    sizes = {name: fields.size(name, usual) for name, usual in HEADS.items()}
    key_heads, value_heads, dk, dv = sizes.values()
    if value_heads % key_heads:
        raise CheckpointError(
            f"{fields.source}: linear_num_value_heads {value_heads} should be a multiple of linear_num_key_heads "
            f"{key_heads}"
        )
    taps = fields.size("linear_conv_kernel_dim", 4, most=MOST_TAPS)
    if taps < 2:
        raise CheckpointError(f"{fields.source}: linear_conv_kernel_dim should be at least 2, found {taps}")
    keys, values, bias = (key_heads, dk), (value_heads, dv), fields.get("attention_bias", False)
    rotary = read_partial_rotary(fields, fields.size("head_dim"), fields.size("max_position_embeddings"), share=SHARE)
    return read_kin(
        fields,
        model_type,
        kind=DeltaNetConfig,
        rotary=rotary,
        qkv_bias=bias,
        out_bias=bias,
        head_norms=True,
        layer_states=_states(linear, keys, values, taps),
        linear=linear,
        keys=keys,
        values=values,
        taps=taps,
        pad_token_id=fields.token_id("pad_token_id"),
        **experts | {"mixed_layers": True},
    )


def _linear_layers(fields: Fields) -> tuple[bool, ...]:
    """Whether each layer has a delta net: by `layer_types`, or all but each `full_attention_interval`-th."""
    layers, kinds = read_layers(fields), read_layer_types(fields, KINDS)
    if kinds and len(kinds) != layers:
        raise CheckpointError(f"{fields.source}: layer_types should have num_hidden_layers {layers} entries")
    every = fields.size("full_attention_interval", INTERVAL)
    linear = tuple(kind == KINDS[1] for kind in kinds) or tuple((i + 1) % every > 0 for i in range(layers))
    if all(linear):
        raise CheckpointError(f"{fields.source}: layer_types should have full_attention in one layer at least")
    return linear


def _states(
    linear: tuple[bool, ...], keys: tuple[int, int], values: tuple[int, int], taps: int
) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """`ModelConfig.layer_states`: the convolution's last inputs, and the matrix of each value head."""
    (key_heads, dk), (value_heads, dv) = keys, values
    shapes = (taps - 1, 2 * key_heads * dk + value_heads * dv), (value_heads, dk, dv)
    return tuple(shapes if delta_net else () for delta_net in linear) if any(linear) else ()


def build(config: DeltaNetConfig, weights: Weights, backend: Backend) -> Decoder:
    """Build the model."""
    E, V, rotation = config.hidden_size, config.vocab_size, config.rotary.rotation(backend)
    embedding = Embedding(weights.table("embed_tokens", V, E, "vocabulary"))
    head = embedding.tokens if config.tied_head else weights.table("lm_head", V, E, "vocabulary")
    layers = tuple(_build_layer(config, weights.at(f"layers.{i}"), rotation, i) for i in range(config.num_layers))
    final_norm = weights.rms_norm("norm", E, config.epsilon, offset=GAIN)
    return Decoder(config.sharded(weights.ranks), embedding, layers, final_norm, LMHead(head))


def _build_layer(config: DeltaNetConfig, weights: Weights, rotation: Rotation, i: int) -> PreNorm | DeltaNetBlock:
    E = config.hidden_size
    norm = weights.rms_norm("input_layernorm", E, config.epsilon, offset=GAIN)
    operator = (
        _delta_net(config, weights.at("linear_attn"), i)
        if config.linear[i]
        else _attention(config, weights, rotation, i)
    )
    mlp_norm = weights.rms_norm("post_attention_layernorm", E, config.epsilon, offset=GAIN)
    mlp = _mlp(config, weights, i)
    if isinstance(operator, GatedDeltaNet):
        return DeltaNetBlock(norm, operator, mlp_norm, mlp)
    return PreNorm(norm, operator, mlp_norm, mlp)


def _attention(config: DeltaNetConfig, weights: Weights, rotation: Rotation, i: int) -> Attention:
    H, K, D = config.num_heads, config.num_kv_heads, config.head_dim
    gated = "self_attn.q_proj"  # each head's queries, then its gate
    qkv = weights.linear(
        "self_attn.qkv",
        {gated: 2 * H * D, "self_attn.k_proj": K * D, "self_attn.v_proj": K * D},
        inputs=config.hidden_size,
        bias=config.qkv_bias,
        split="outputs",
        units=(H, K, K),
        blocks={gated: 2},
        heads={gated: H},
    )
    return weights.attention(
        config,
        i,
        qkv=qkv,
        out=weights.o_proj(config, bias=config.out_bias),
        rotation=rotation,
        head_norms=weights.head_norms(config, config.epsilon, offset=GAIN),
        gated=True,
    )


def _delta_net(config: DeltaNetConfig, weights: Weights, i: int) -> GatedDeltaNet:
    (K, dk), (V, dv), E = config.keys, config.values, config.hidden_size
    keys, values = K * dk, V * dv
    rank = config.sharded(weights.ranks)
    outputs = {"in_proj_qkv": 2 * keys + values, "in_proj_z": values, "in_proj_b": V, "in_proj_a": V}
    place: dict[str, Any] = {"blocks": {"in_proj_qkv": (keys, keys, values)}}
    if config.fused_projection:
        outputs = {"in_proj_qkvz": 2 * keys + 2 * values, "in_proj_ba": 2 * V}
        place = {"blocks": {"in_proj_qkvz": (keys, keys, values, values), "in_proj_ba": (V, V)}}
        place["heads"] = dict.fromkeys(outputs, K)
    return GatedDeltaNet(
        i,
        rank.keys,
        rank.values[0],
        projection=weights.linear("in_proj", outputs, inputs=E, split="outputs", **place),
        taps=weights.taps("conv1d", 2 * keys + values, config.taps, blocks=(keys, keys, values)),
        decay=weights.vector("A_log", V, beside="dt_bias", split="outputs"),
        norm=weights.rms_norm("norm", dv, config.epsilon),
        out=weights.linear("out_proj", E, inputs=values, split="inputs"),
        activation=config.activation,
    )


def _mlp(config: DeltaNetConfig, weights: Weights, i: int) -> GatedMLP | ExpertMLP:
    if not config.num_experts or not config.sparse[i]:
        return gated_mlp(config, weights, i)
    names: dict[str, Any] = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj", "shared": "shared_expert"}
    return expert_mlp(config, weights.at("mlp"), **names)
