"""ModernBERT (Warner et al., arXiv 2412.13663): an encoder with the parts of today's decoders.

    x = norm(tokens[ids])
    x = x + attention(norm(x));  x = x + mlp(norm(x))      in each layer; the first one's attention reads x itself

Queries and keys are rotated, with one base in layers that see the whole text, every third, and another in those whose
tokens see as many on each side. MLPs are gated by GELU. A classification reads the first token, [CLS], or the mean of
all tokens: logits = norm(gelu(x W_dense)) W_out + b; so do heads of each token.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..backends.operations import Backend
from ..backends.weights import Weight
from ..config import Fields, ModelConfig
from ..layers.block import PreNorm
from ..layers.embedding import Embedding
from ..layers.encoder_head import ClassificationHead, Head, NoHead
from ..layers.mlp import GatedMLP
from ..layers.norm import LayerNorm
from ..reference.attention import AttentionSpec
from ..reference.rotary import Rotation
from .encoder import TextEncoder
from .encoder_heads import MaskedNames, masked_head, token_table
from .parameters import Weights
from .reading import read_activation, read_encoder_sizes, read_heads, read_layer_kinds, refuse_other_layers
from .rotary import RotaryConfig, read_rotaries
from .tensor_names import Names

GLOBAL_BASE, LOCAL_BASE = 160_000.0, 10_000.0
"""Bases of rotary embedding if config.json has none: without a window, and with one"""
EVERY = 3
"""Every which layer has no window, from the first on, if config.json does not say"""


@dataclass(frozen=True, kw_only=True)
class ModernBertConfig(ModelConfig):
    """The shared fields and ModernBERT's own."""

    activation: str
    epsilon: float
    """Added to the variance in each norm"""
    rotaries: tuple[RotaryConfig, ...]
    """Rotary embedding of each layer"""
    attention_bias: bool
    mlp_bias: bool
    norm_bias: bool
    head_bias: bool
    """Whether the projection before the labels has a bias"""
    head_activation: str
    masked_bias: bool
    """Whether the logits of masked tokens have a bias"""


def read_config(raw: Mapping[str, Any]) -> ModernBertConfig:
    """ModernBERT's configuration from config.json.

    Raises:
        CheckpointError: a field is missing or invalid.
        UnsupportedModelError: an unsupported activation or kind of rotary scaling.
    """
    fields = Fields(dict(raw) | {"rope_theta": raw.get("global_rope_theta", raw.get("rope_theta"))})
    refuse_other_layers(fields, windows=True)
    heads, positions = read_heads(fields), fields.size("max_position_embeddings", 8192)
    every = fields.size("global_attn_every_n_layers", EVERY)
    windowed = read_layer_kinds(fields, lambda i: i % every > 0)
    full, local = read_rotaries(
        fields,
        heads["head_dim"],
        positions,
        base=GLOBAL_BASE,
        local="local_rope_theta",
        local_base=LOCAL_BASE,
    )
    window = fields.size("local_attention", 128) // 2 + 1
    return ModernBertConfig(
        model_type="modernbert",
        **read_encoder_sizes(fields, heads),
        max_positions=positions,
        windows=tuple(window if sliding else None for sliding in windowed),
        rotaries=tuple(local if sliding else full for sliding in windowed),
        activation=read_activation(fields, "hidden_activation", "gelu"),
        epsilon=fields.number("norm_eps", 1e-5),
        attention_bias=fields.get("attention_bias", False),
        mlp_bias=fields.get("mlp_bias", False),
        norm_bias=fields.get("norm_bias", False),
        head_bias=fields.get("classifier_bias", False),
        head_activation=read_activation(fields, "classifier_activation", "gelu"),
        masked_bias=fields.get("decoder_bias", True),
        labels_of_mean=fields.choice("classifier_pooling", "cls", ("cls", "mean")) == "mean",
        mixed_layers=True,
        bidirectional=True,
    )


NAMES = Names(
    prefixes=("model.",),
    heads=("head.", "decoder.", "classifier.", "qa_outputs."),
    masked_head="head.dense.weight",
    embedding="embeddings.tok_embeddings.weight",
)
"""Tensors of checkpoints: (model.)layers.0.attn.Wqkv.weight."""

_MASKED = MaskedNames("head.dense", "head.norm", "decoder", "decoder.bias")


def build(config: ModernBertConfig, weights: Weights, backend: Backend) -> TextEncoder:
    """Build the model."""
    E = config.hidden_size

    def norm(at: Weights, name: str) -> LayerNorm:
        return LayerNorm(at.norm(name, E, bias=config.norm_bias), config.epsilon)

    bias = _MASKED.bias if config.masked_bias else None
    tokens = token_table(config, weights, "embeddings.tok_embeddings", E, bias)
    embedding = Embedding(tokens, norm=norm(weights, "embeddings.norm"))
    rotations = {rotary: rotary.rotation(backend) for rotary in config.rotaries}  # the same angles are computed once
    layers = tuple(
        _build_layer(config, weights.at(f"layers.{i}"), rotations[config.rotaries[i]], i)
        for i in range(config.num_layers)
    )
    head = _build_head(config, weights, tokens)
    return TextEncoder(config.sharded(weights.ranks), embedding, layers, norm(weights, "final_norm"), head)


def _build_head(config: ModernBertConfig, weights: Weights, tokens: Weight) -> Head:
    """The head: a projection and a norm before the labels, of a text or of its tokens, and before masked tokens."""
    E = config.hidden_size

    def norm(name: str, width: int) -> LayerNorm:
        return LayerNorm(weights.norm(name, width, bias=config.norm_bias), config.epsilon)

    if config.output != "states":
        return ClassificationHead(
            dense=weights.linear(_MASKED.dense, E, inputs=E, bias=config.head_bias),
            activation=config.head_activation,
            norm=norm(_MASKED.norm, E),
            weight=weights.linear("classifier", len(config.labels), inputs=E, bias=True, role="labels"),
        )
    if not config.fills_masks:
        return NoHead()
    return masked_head(
        config,
        weights,
        tokens,
        _MASKED,
        width=E,
        activation=config.head_activation,
        norm=norm,
        dense_bias=config.head_bias,
        out_bias=config.masked_bias,
    )


def _build_layer(config: ModernBertConfig, weights: Weights, rotation: Rotation, i: int) -> PreNorm:
    E, F = config.hidden_size, config.intermediate_size

    def norm(name: str) -> LayerNorm:
        return LayerNorm(weights.norm(name, E, bias=config.norm_bias), config.epsilon)

    return PreNorm(
        norm("attn_norm") if i else None,
        weights.attention(
            config,
            i,
            AttentionSpec(config.head_dim**-0.5, window=config.windows[i], causal=False),
            qkv=weights.linear("attn.Wqkv", 3 * E, inputs=E, bias=config.attention_bias, split="outputs", blocks=3),
            out=weights.linear("attn.Wo", E, inputs=E, bias=config.attention_bias, split="inputs"),
            rotation=rotation,
        ),
        norm("mlp_norm"),
        GatedMLP(
            weights.linear("mlp.Wi", 2 * F, inputs=E, bias=config.mlp_bias, split="outputs", blocks=2),
            weights.linear("mlp.Wo", E, inputs=F, bias=config.mlp_bias, split="inputs"),
            config.activation,
        ),
    )
