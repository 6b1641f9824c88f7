"""LFM2 (Liquid AI, arXiv 2511.23404): short gated convolutions in most layers, grouped-query attention in the others.

    x = tokens[ids]
    x = x + operator(norm(x));  x = x + mlp(norm(x))      in each layer; operator: convolution or attention
    logits = norm(x) W_lm

Attention is Llama's with norms of each query and key. A convolution keeps a state of its last inputs in place of keys
and values (`layers/convolution.py`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Self, TypeVar

from ..backends.operations import Backend
from ..config import Fields, ModelConfig
from ..errors import CheckpointError, ParameterError
from ..layers.attention import HeadNorms
from ..layers.block import PreNorm
from ..layers.convolution import ConvolutionBlock, ShortConvolution
from ..layers.embedding import Embedding, LMHead
from ..layers.experts import ExpertMLP
from ..layers.mlp import GatedMLP
from ..reference.rotary import Rotation
from .decoder import Decoder
from .parameters import Weights
from .reading import (
    merge_names,
    read_grouped_heads,
    read_layer_types,
    read_layers,
    read_shared,
    refuse_experts,
    refuse_other_layers,
)
from .rotary import RotaryConfig, read_rotary, refuse_partial
from .tensor_names import Names

C = TypeVar("C", bound="Lfm2Config")

TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
"""Special tokens if config.json has none."""
BASE, MAX_POSITIONS = 1_000_000.0, 128_000
"""Base of rotary embedding, and longest context, if config.json has none."""
KINDS = "full_attention", "conv"
"""Kinds of layers in config.json's `layer_types`"""
MOST_TAPS = 64
"""Upper bound on a convolution's width in config.json"""


@dataclass(frozen=True, kw_only=True)
class Lfm2Config(ModelConfig):
    """The shared fields and LFM2's own."""

    epsilon: float
    """Added to the mean square in each norm"""
    rotary: RotaryConfig
    convolves: tuple[bool, ...]
    """Whether each layer has a convolution in place of attention"""
    taps: int
    """k: the inputs of a convolution, a token's own included"""
    conv_bias: bool = False
    """Whether convolutions and their projections have biases"""

    def sharded(self, ranks: int) -> Self:
        """As `ModelConfig.sharded`: channels of the convolutions are shared too."""
        E = self.hidden_size
        if E % ranks:
            raise ParameterError(f"tensor_parallel {ranks} should divide the model's hidden_size {E}")
        return replace(super().sharded(ranks), layer_states=_states(self.convolves, self.taps, E // ranks))


def read_config(raw: Mapping[str, Any]) -> Lfm2Config:
    """LFM2's configuration from config.json.

    Raises:
        As `read_kin`; UnsupportedModelError also for experts.
    """
    fields = read_fields(raw)
    refuse_experts(fields)
    return read_kin(fields, "lfm2", Lfm2Config, intermediate_size=_mlp_width(fields))


def read_fields(raw: Mapping[str, Any]) -> Fields:
    """The fields of config.json by their canonical names.

    Raises:
        CheckpointError: a field has two values.
    """
    merged = merge_names(raw, {"intermediate_size": "block_ff_dim"})
    if merged.get("tie_embedding") is not None:  # transformers lets it win
        merged["tie_word_embeddings"] = merged["tie_embedding"]
    return Fields(TOKENS | merged)


def read_kin(fields: Fields, model_type: str, kind: type[C], **others: Any) -> C:
    """Read the fields that LFM2 and its mixture share.

    Args:
        fields: config.json
        model_type: the family's name
        kind: its configuration
        **others: fields of `kind` that the family reads itself

    Raises:
        CheckpointError: a field is missing or invalid.
        UnsupportedModelError: an unsupported kind of layer or of rotary scaling.
    """
    refuse_partial(fields)
    refuse_other_layers(fields, kinds=KINDS)
    shared = read_grouped_heads(fields, kv_heads=8) | read_shared(fields, tied_head=True)
    convolves, taps = _convolutions(fields), fields.size("conv_L_cache", 3, most=MOST_TAPS)
    if taps < 2:
        raise CheckpointError(f"{fields.source}: conv_L_cache should be at least 2, found {taps}")
    positions = fields.size("max_position_embeddings", MAX_POSITIONS)
    rotary = read_rotary(fields, shared["head_dim"], positions, base=BASE)
    return kind(
        model_type=model_type,
        **shared,
        max_positions=rotary.longest,
        keys_follow_length=rotary.stretch is not None,
        mixed_layers=True,
        layer_states=_states(convolves, taps, shared["hidden_size"]),
        epsilon=fields.number("norm_eps", 1e-5),
        rotary=rotary,
        convolves=convolves,
        taps=taps,
        conv_bias=fields.get("conv_bias", False),
        pad_token_id=fields.token_id("pad_token_id"),
        **others,
    )


def _convolutions(fields: Fields) -> tuple[bool, ...]:
    """Whether each layer has a convolution: by `layer_types`, or those that are not in `full_attn_idxs`."""
    layers = read_layers(fields)
    kinds = read_layer_types(fields, KINDS)
    if kinds and len(kinds) != layers:
        raise CheckpointError(f"{fields.source}: layer_types should have num_hidden_layers {layers} entries")
    attend = fields.get("full_attn_idxs", [*range(layers)])
    convolves = tuple(kind == "conv" for kind in kinds) or tuple(i not in attend for i in range(layers))
    if all(convolves):
        raise CheckpointError(f"{fields.source}: layer_types should have full_attention in one layer at least")
    return convolves


def _mlp_width(fields: Fields) -> int:
    """F: two thirds of `intermediate_size`, times a factor, rounded up to a multiple; or that size itself."""
    F = fields.size("intermediate_size")
    if not fields.get("block_auto_adjust_ff_dim", True):
        return F
    F, multiple = int(2 * F / 3), fields.size("block_multiple_of", 256)
    F = int(fields.number("block_ffn_dim_multiplier", 1.0) * F)
    if F < 1:
        raise CheckpointError(f"{fields.source}: block_ffn_dim_multiplier leaves the MLP a width of {F}")
    return -(-F // multiple) * multiple


def _states(convolves: tuple[bool, ...], taps: int, channels: int) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """`ModelConfig.layer_states`: the last k - 1 inputs of each convolution; empty if there is none."""
    return tuple(((taps - 1, channels),) if convolution else () for convolution in convolves) if any(convolves) else ()


NAMES = Names(prefixes=("model.",), left_out=("rotary_emb.inv_freq",))
"""Tensors of checkpoints: (model.)layers.0.conv.in_proj.weight."""


def gated_mlp(config: Any, weights: Weights, i: int) -> GatedMLP:
    """The MLP of layer i, from the weights of its `feed_forward`."""
    E, F = config.hidden_size, config.intermediate_size
    return GatedMLP(
        weights.linear("gate_up", {"w1": F, "w3": F}, inputs=E, split="outputs"),
        weights.linear("w2", E, inputs=F, split="inputs"),
        "silu",
    )


def build(
    config: Lfm2Config,
    weights: Weights,
    backend: Backend,
    *,
    mlp: Callable[[Any, Weights, int], GatedMLP | ExpertMLP] = gated_mlp,
) -> Decoder:
    """Build the model; `mlp` builds a layer's MLP from its weights and its number."""
    E, V, rotation = config.hidden_size, config.vocab_size, config.rotary.rotation(backend)
    embedding = Embedding(weights.table("embed_tokens", V, E, "vocabulary"))
    head = embedding.tokens if config.tied_head else weights.table("lm_head", V, E, "vocabulary")
    layers = tuple(_build_layer(config, weights.at(f"layers.{i}"), rotation, i, mlp) for i in range(config.num_layers))
    final_norm = weights.rms_norm("embedding_norm", E, config.epsilon)
    return Decoder(config.sharded(weights.ranks), embedding, layers, final_norm, LMHead(head))


def _build_layer(
    config: Lfm2Config, weights: Weights, rotation: Rotation, i: int, mlp: Callable[..., GatedMLP | ExpertMLP]
) -> PreNorm | ConvolutionBlock:
    E, D, bias = config.hidden_size, config.head_dim, config.conv_bias
    norm = weights.rms_norm("operator_norm", E, config.epsilon)
    if config.convolves[i]:
        convolution = ShortConvolution(
            i,
            weights.linear("conv.in_proj", 3 * E, inputs=E, bias=bias, split="outputs", blocks=3),
            weights.taps("conv.conv", E, config.taps, bias=bias),
            weights.linear("conv.out_proj", E, inputs=E, bias=bias, split="inputs"),
        )
    else:
        q, k = (weights.norm(f"self_attn.{name}_layernorm", D) for name in "qk")
        attention = weights.attention(
            config,
            i,
            qkv=weights.qkv_proj(config),
            out=weights.linear("self_attn.out_proj", E, inputs=config.num_heads * D, split="inputs"),
            rotation=rotation,
            head_norms=HeadNorms(q, k, config.epsilon),
        )
    mlp_norm = weights.rms_norm("ffn_norm", E, config.epsilon)
    last = mlp(config, weights.at("feed_forward"), i)
    if config.convolves[i]:
        return ConvolutionBlock(norm, convolution, mlp_norm, last)
    return PreNorm(norm, attention, mlp_norm, last)
