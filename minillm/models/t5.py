"""T5 (Raffel et al., arXiv 1910.10683), T5 v1.1 and flan-T5 (Chung et al., arXiv 2210.11416).

    x = x + attention(norm(x));  x = x + mlp(norm(x))                            in each layer of the encoder
    y = y + attention(norm(y));  y = y + cross(norm(y), x);  y = y + mlp(norm(y))    of the decoder
    logits = norm(y) W_lm

Positions enter by a bias of each head's scores, which depends on the distance from query to key alone, and is the same
in all layers of a stack; cross-attention has none. Scores are not scaled: the initialisation makes up for it. T5 has
the token embedding as its head, and scales the head's input by 1 / sqrt E; v1.1 and flan-T5 have a head of their own.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..backends.operations import Backend
from ..backends.weights import Weight
from ..config import Fields, ModelConfig
from ..errors import CheckpointError, UnsupportedModelError
from ..layers.attention import Attention
from ..layers.block import PreNorm
from ..layers.cross_attention import CrossAttention, PreNormCross
from ..layers.embedding import Embedding, LMHead
from ..layers.mlp import MLP, GatedMLP
from ..reference.attention import AttentionSpec
from .distance_bias import bias_by_distance
from .encoder_decoder import Encoder, EncoderDecoder
from .parameters import Weights
from .reading import merge_names, read_layers, refuse_other_layers
from .tensor_names import Names

OTHER_NAMES = {
    "d_model": "hidden_size",
    "num_heads": "num_attention_heads",
    "num_layers": "num_hidden_layers",
    "d_kv": "head_dim",
}
"""Fields of config.json with an alternative name."""

LONGEST = 4096
"""The longest source and the longest decoder text, in tokens. The model itself has no limit: distances from 128 on are
all alike. Memory is planned by it."""

ACTIVATIONS = {"relu": "relu", "gelu": "gelu", "gelu_new": "gelu_new", "silu": "silu", "swish": "silu"}
"""Activation in `feed_forward_proj` -> its name here; "gated-gelu" has gelu_new."""


@dataclass(frozen=True, kw_only=True)
class T5Config(ModelConfig):
    """The shared fields, for the decoder, and T5's own."""

    epsilon: float
    """Added to the mean square in each norm"""
    activation: str
    gated: bool
    """The MLP has a gate"""
    buckets: int
    """Different biases of a head"""
    max_distance: int
    """M: distances from here on have one bias"""
    scaled_head: bool
    """The head's input is scaled by 1 / sqrt E"""


def read_config(raw: Mapping[str, Any]) -> T5Config:
    """T5's configuration from config.json. Whether the head is tied, the tensors decide (see `NAMES`).

    Raises:
        CheckpointError: a field is missing or invalid.
        UnsupportedModelError: an unsupported activation.
    """
    return read(raw, "t5", "relu", scaled=raw.get("tie_word_embeddings") is not False)


def read(raw: Mapping[str, Any], model_type: str, feed_forward: str, *, scaled: bool) -> T5Config:
    """The configuration of T5 or mT5.

    Args:
        raw: config.json
        model_type: the family
        feed_forward: the MLP if config.json does not say
        scaled: whether the head's input is scaled if config.json does not say

    Raises:
        CheckpointError, UnsupportedModelError: as `read_config`.
    """
    raw = merge_names(raw, OTHER_NAMES)
    fields = Fields({"eos_token_id": 1, "decoder_start_token_id": 0} | raw)
    refuse_other_layers(fields)
    E, H, layers = fields.size("d_model"), fields.size("num_heads"), read_layers(fields, "num_layers")
    buckets = fields.size("relative_attention_num_buckets", 32)
    max_distance = fields.size("relative_attention_max_distance", 128, most=LONGEST)
    if buckets < 4 or max_distance <= buckets // 2:
        raise CheckpointError(
            f"config.json: relative_attention_max_distance {max_distance} should be more than half of "
            f"relative_attention_num_buckets {buckets}, of which there are at least 4"
        )
    kind = fields.get("feed_forward_proj", feed_forward)
    gate, _, activation = kind.rpartition("-")
    if gate not in ("", "gated") or activation not in ACTIVATIONS:
        known = ", ".join(repr(f"{prefix}{name}") for prefix in ("", "gated-") for name in ACTIVATIONS)
        raise UnsupportedModelError(f"config.json: feed_forward_proj is {kind!r:.60}; minillm runs {known}")
    return T5Config(
        model_type=model_type,
        hidden_size=E,
        num_layers=read_layers(Fields({"num_decoder_layers": layers} | _given(raw)), "num_decoder_layers"),
        num_heads=H,
        num_kv_heads=H,
        head_dim=fields.size("d_kv"),
        intermediate_size=fields.size("d_ff"),
        vocab_size=fields.size("vocab_size"),
        max_positions=LONGEST,
        bos_token_id=fields.token_id("bos_token_id"),
        eos_token_ids=fields.token_ids("eos_token_id"),
        tied_head=fields.get("tie_word_embeddings", True),
        encoder_layers=layers,
        max_source_positions=LONGEST,
        decoder_start_token_id=fields.token_id("decoder_start_token_id"),
        epsilon=fields.number("layer_norm_epsilon", 1e-6),
        activation="gelu_new" if kind == "gated-gelu" else ACTIVATIONS[activation],
        gated=gate == "gated",
        buckets=buckets,
        max_distance=max_distance,
        scaled_head=fields.get("scale_decoder_outputs", scaled),
    )


def _given(raw: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in raw.items() if value is not None}


NAMES = Names(
    prefixes=("transformer.",),
    left_out=("coder.embed_tokens.weight", "EncDecAttention.relative_attention_bias.weight"),
    embedding="shared.weight",
    head_decides=True,
)
"""Tensors of checkpoints: encoder.block.0..., in classifiers transformer.encoder...; copies of the embedding in each
stack, and a table that no released version reads, are left out."""


def build(config: T5Config, weights: Weights, backend: Backend) -> EncoderDecoder:
    """Build the model."""
    E, V = config.hidden_size, config.vocab_size
    embedding = Embedding(weights.table("shared", V, E, "vocabulary"))
    at = "block.0.layer.0.SelfAttention"
    encoder, decoder = weights.at("encoder"), weights.at("decoder")
    shape = (config.num_heads, config.buckets, config.max_distance)
    both_ways = bias_by_distance(encoder.at(at), backend, *shape, both=True)
    causal = bias_by_distance(decoder.at(at), backend, *shape, both=False)
    return EncoderDecoder(
        config=config.sharded(weights.ranks),
        embedding=embedding,
        layers=tuple(_decoder_layer(config, decoder.at(f"block.{i}"), i, causal) for i in range(config.num_layers)),
        final_norm=decoder.rms_norm("final_layer_norm", E, config.epsilon),
        head=LMHead(
            embedding.tokens if config.tied_head else weights.table("lm_head", V, E, "vocabulary"),
            scale=E**-0.5 if config.scaled_head else 1.0,
        ),
        encoder=Encoder(
            embedding,
            tuple(_encoder_layer(config, encoder.at(f"block.{i}"), both_ways) for i in range(config.encoder_layers)),
            encoder.rms_norm("final_layer_norm", E, config.epsilon),
        ),
    )


def _encoder_layer(config: T5Config, weights: Weights, bias: Weight) -> PreNorm:
    E = config.hidden_size
    return PreNorm(
        weights.rms_norm("layer.0.layer_norm", E, config.epsilon),
        _attention(config, weights.at("layer.0.SelfAttention"), 0, bias, causal=False),
        weights.rms_norm("layer.1.layer_norm", E, config.epsilon),
        _mlp(config, weights.at("layer.1.DenseReluDense")),
    )


def _decoder_layer(config: T5Config, weights: Weights, i: int, bias: Weight) -> PreNormCross:
    E, H, width = config.hidden_size, config.sharded(weights.ranks).num_heads, config.num_heads * config.head_dim
    cross = weights.at("layer.1.EncDecAttention")
    return PreNormCross(
        weights.rms_norm("layer.0.layer_norm", E, config.epsilon),
        _attention(config, weights.at("layer.0.SelfAttention"), i, bias, causal=True),
        weights.rms_norm("layer.1.layer_norm", E, config.epsilon),
        CrossAttention(
            layer=i,
            num_heads=H,
            num_kv_heads=H,
            spec=AttentionSpec(1.0, causal=False, cross=True),
            q=cross.linear("q", width, inputs=E, split="outputs"),
            kv=cross.linear("kv", {"k": width, "v": width}, inputs=E, split="outputs"),
            out=cross.linear("o", E, inputs=width, split="inputs"),
        ),
        weights.rms_norm("layer.2.layer_norm", E, config.epsilon),
        _mlp(config, weights.at("layer.2.DenseReluDense")),
    )


def _attention(config: T5Config, weights: Weights, layer: int, bias: Weight, *, causal: bool) -> Attention:
    E, width = config.hidden_size, config.num_heads * config.head_dim
    return weights.attention(
        config,
        layer,
        AttentionSpec(1.0, causal=causal, bias=bias),
        qkv=weights.linear("qkv", dict.fromkeys("qkv", width), inputs=E, split="outputs"),
        out=weights.linear("o", E, inputs=width, split="inputs"),
    )


def _mlp(config: T5Config, weights: Weights) -> MLP | GatedMLP:
    E, F = config.hidden_size, config.intermediate_size
    down = weights.linear("wo", E, inputs=F, split="inputs")
    if config.gated:
        gate_up = weights.linear("wi_gated", {"wi_0": F, "wi_1": F}, inputs=E, split="outputs")
        return GatedMLP(gate_up, down, config.activation)
    return MLP(weights.linear("wi", F, inputs=E, split="outputs"), down, config.activation)
