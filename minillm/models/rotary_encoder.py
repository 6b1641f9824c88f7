"""Encoders with rotary positions and gated MLPs in BERT's post-norm layers: nomic-bert and GTE.

    x = norm(tokens[ids] + types[t])
    x = norm(x + attention(x));  x = norm(x + mlp(x))      in each layer

Queries and keys are rotated. The families differ in names and in biases. A classification reads the first token, [CLS]:
logits = tanh(x W_pooler + b) W_out + b.
"""

from dataclasses import dataclass, replace

from ..config import Fields, ModelConfig
from ..errors import UnsupportedModelError
from ..layers.block import PostNorm
from ..layers.embedding import Embedding
from ..layers.encoder_head import ClassificationHead
from ..layers.mlp import GatedMLP
from ..reference.attention import AttentionSpec
from ..reference.rotary import Rotation
from .encoder import TextEncoder
from .encoder_heads import MaskedNames, encoder_head, masked_head, token_table
from .parameters import Weights
from .reading import read_activation, read_encoder_sizes, read_grouped_heads, refuse_other_layers
from .rotary import KINDS, RotaryConfig, read_rotary, refuse_partial


@dataclass(frozen=True, kw_only=True)
class RotaryEncoderConfig(ModelConfig):
    """The shared fields and these encoders' own."""

    activation: str
    epsilon: float
    """Added to the variance in each norm"""
    rotary: RotaryConfig
    attention_bias: bool
    """Biases of the projections of attention"""
    down_bias: bool
    """Bias of the MLP's second projection"""


@dataclass(frozen=True, kw_only=True)
class RotaryEncoderNames:
    """Names of the parts in a family's checkpoints."""

    embedding_norm: str
    layer: str
    qkv: str
    attention_out: str
    attention_norm: str
    up: str
    gate: str
    down: str
    mlp_norm: str
    masked: MaskedNames
    masked_activation: str = ""
    """Activation in the head of masked tokens; "": the layers' """


def read_rotary_encoder(
    fields: Fields,
    model_type: str,
    *,
    base: float,
    activation: str,
    token_types: int,
    bias: bool,
    original: int = 0,
    kinds: tuple[str, ...] = KINDS,
) -> RotaryEncoderConfig:
    """The configuration of a family, by transformers' names of its fields.

    Args:
        fields: config.json
        model_type: the family
        base: base of rotary embedding if config.json has none
        activation: of the gate, if config.json has none
        token_types: their number, if config.json has none; it may say 0
        bias: whether attention and the second projection of the MLP have biases
        original: length up to which dynamic scaling leaves frequencies as they are; 0: `max_position_embeddings`
        kinds: of rotary scaling that the family has

    Raises:
        CheckpointError: a field is missing or invalid.
        UnsupportedModelError: a decoder, attention to another text, or an unsupported kind of rotary scaling.
    """
    for name in ("is_decoder", "add_cross_attention"):
        if fields.get(name, False):
            raise UnsupportedModelError(f"config.json: {name} is true; in this family minillm runs encoders")
    refuse_other_layers(fields)
    refuse_partial(fields)
    heads = read_grouped_heads(Fields(dict(fields.raw) | {"num_key_value_heads": None}))  # which the families ignore
    positions = fields.size("max_position_embeddings")
    types = fields.get("type_vocab_size", token_types)
    rotary = read_rotary(fields, heads["head_dim"], original or positions, base=base, kinds=kinds)
    if original:
        rotary = replace(rotary, longest=positions)
    return RotaryEncoderConfig(
        model_type=model_type,
        **read_encoder_sizes(fields, heads),
        max_positions=rotary.longest,
        keys_follow_length=rotary.stretch is not None,
        token_types=types and fields.size("type_vocab_size", types),
        activation=read_activation(fields, "hidden_act", activation),
        epsilon=fields.number("layer_norm_eps", 1e-12),
        rotary=rotary,
        attention_bias=bias,
        down_bias=bias,
        bidirectional=True,
    )


def build_rotary_encoder(
    config: RotaryEncoderConfig, weights: Weights, names: RotaryEncoderNames, rotation: Rotation
) -> TextEncoder:
    """Build the model of a family."""
    E = config.hidden_size
    types = "embeddings.token_type_embeddings"
    tokens = token_table(config, weights, "embeddings.word_embeddings", E, names.masked.bias)
    embedding = Embedding(
        tokens,
        types=weights.table(types, config.token_types, E, "positions") if config.token_types else None,
        norm=weights.layer_norm(names.embedding_norm, E, config.epsilon),
    )
    layers = tuple(
        _build_layer(config, weights.at(f"{names.layer}.{i}"), names, rotation, i) for i in range(config.num_layers)
    )
    head = encoder_head(
        config,
        weights,
        lambda: ClassificationHead(
            dense=weights.linear("pooler.dense", E, inputs=E, bias=True),
            activation="tanh",
            weight=weights.linear("classifier", len(config.labels), inputs=E, bias=True, role="labels"),
        ),
        lambda: masked_head(
            config,
            weights,
            tokens,
            names.masked,
            width=E,
            activation=names.masked_activation or config.activation,
            norm=lambda name, width: weights.layer_norm(name, width, config.epsilon),
        ),
    )
    return TextEncoder(config.sharded(weights.ranks), embedding, layers, None, head)


def _build_layer(
    config: RotaryEncoderConfig, weights: Weights, names: RotaryEncoderNames, rotation: Rotation, i: int
) -> PostNorm:
    E, F, Q = config.hidden_size, config.intermediate_size, config.num_heads * config.head_dim
    return PostNorm(
        weights.layer_norm(names.attention_norm, E, config.epsilon),
        weights.attention(
            config,
            i,
            AttentionSpec(config.head_dim**-0.5, causal=False),
            qkv=weights.linear(names.qkv, 3 * Q, inputs=E, bias=config.attention_bias, split="outputs", blocks=3),
            out=weights.linear(names.attention_out, E, inputs=Q, bias=config.attention_bias, split="inputs"),
            rotation=rotation,
        ),
        weights.layer_norm(names.mlp_norm, E, config.epsilon),
        GatedMLP(
            weights.linear("mlp.gate_up", {names.gate: F, names.up: F}, inputs=E, split="outputs"),
            weights.linear(names.down, E, inputs=F, bias=config.down_bias, split="inputs"),
            config.activation,
        ),
    )
