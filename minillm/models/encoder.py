"""The encoder that BERT and its relatives build: embeddings with a norm, and post-norm blocks that see both ways.

    x = norm(tokens[ids] + positions[i] + types[t])
    x = norm(x + attention(x));  x = norm(x + mlp(x))      in each layer

A classification reads the first token's hidden state: logits = activation(x W_dense + b) W_out + b. The families
differ in names of tensors and fields, in the numbering of positions and in the projection before the labels.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..backends.weights import Weight
from ..config import Fields, ModelConfig
from ..errors import CheckpointError, UnsupportedModelError
from ..layers.block import PostNorm
from ..layers.embedding import Embedding
from ..layers.encoder_head import ClassificationHead
from ..layers.mlp import GatedMLP
from ..reference.attention import AttentionSpec
from .decoder import Decoder
from .encoder_heads import BERT_MASKED, MaskedNames, encoder_head, masked_head, token_table
from .parameters import Weights
from .reading import read_activation, read_encoder_sizes, read_heads


@dataclass(frozen=True, kw_only=True)
class EncoderConfig(ModelConfig):
    """The shared fields and an encoder's own."""

    activation: str
    epsilon: float
    first_position: int = 0
    """Row of the position table that position 0 has"""
    embedding_width: int = 0
    """Width of the embeddings, which are projected to E; 0: they have E"""
    has_position_table: bool = True
    """Whether positions are embedded, each by a vector that is added to a token's"""


class TextEncoder(Decoder):
    """A complete encoder: the stack of `Decoder`, whose attention is not causal. It has no LM head and no final norm.

    All layers may use the same pages of the cache: a text is computed in one pass, and each layer reads what it has
    just written (`Pages.shared`).
    """


@dataclass(frozen=True, kw_only=True)
class EncoderNames:
    """Names of an encoder's parts in a family's checkpoints."""

    tokens: str = "embeddings.word_embeddings"
    positions: str = "embeddings.position_embeddings"
    types: str = "embeddings.token_type_embeddings"
    embedding_norm: str = "embeddings.LayerNorm"
    embedding_projection: str = "embeddings_project"
    layer: str = "encoder.layer"
    query: str = "attention.self.query"
    key: str = "attention.self.key"
    value: str = "attention.self.value"
    attention_out: str = "attention.output.dense"
    attention_norm: str = "attention.output.LayerNorm"
    up: str = "intermediate.dense"
    down: str = "output.dense"
    mlp_norm: str = "output.LayerNorm"
    head_dense: str = "pooler.dense"
    """The projection before the labels"""
    head_out: str = "classifier"
    head_activation: str = "tanh"
    masked: MaskedNames = BERT_MASKED
    masked_activation: str = ""
    """Activation in the head of masked tokens; "": the layers' """


def read_encoder(
    raw: Mapping[str, Any], model_type: str, *, padded_positions: bool = False, has_position_table: bool = True
) -> EncoderConfig:
    """The configuration of a family with BERT's field names.

    Args:
        raw: config.json
        model_type: the family
        padded_positions: positions are numbered from pad_token_id + 1
        has_position_table: as in `EncoderConfig`

    Raises:
        CheckpointError: a field is missing or invalid.
        UnsupportedModelError: a decoder, attention to another text, or positions that are not learned.
    """
    fields = Fields(raw)
    for name in ("is_decoder", "add_cross_attention"):
        if fields.get(name, False):
            raise UnsupportedModelError(f"config.json: {name} is true; in this family minillm runs encoders")
    fields.choice("position_embedding_type", "absolute", ("absolute",))
    positions, first = fields.size("max_position_embeddings", 512), 0
    if padded_positions:
        padding = fields.token_id("pad_token_id")
        first = 1 + (1 if padding is None else padding)
        if positions <= first:
            raise CheckpointError(
                f"config.json: max_position_embeddings is {positions}, and positions are numbered from {first}"
            )
    heads = read_heads(fields)
    return EncoderConfig(
        model_type=model_type,
        **read_encoder_sizes(fields, heads),
        max_positions=positions - first,
        first_position=first,
        token_types=fields.size("type_vocab_size", 2),
        activation=read_activation(fields, "hidden_act", "gelu"),
        epsilon=fields.number("layer_norm_eps", 1e-12),
        has_position_table=has_position_table,
        bidirectional=True,
    )


def build_encoder(
    config: EncoderConfig,
    weights: Weights,
    names: EncoderNames,
    attention: Callable[[Weights], tuple[Weight, AttentionSpec]] | None = None,
    mlp: Callable[[Weights], GatedMLP] | None = None,
) -> TextEncoder:
    """Build the model of a family.

    Args:
        config: its configuration
        weights: its parameters
        names: of its parts
        attention: gives a layer's Q, K, V and variant, from its parameters; None: as in BERT
        mlp: likewise its MLP
    """
    E = config.hidden_size
    W, positions = config.embedding_width or E, None
    if config.has_position_table:
        positions = weights.table(names.positions, config.max_positions + config.first_position, W, "positions")
    tokens = token_table(config, weights, names.tokens, W, names.masked.bias)
    embedding = Embedding(
        tokens,
        positions.rows_from(config.first_position) if positions and config.first_position else positions,
        types=weights.table(names.types, config.token_types, W, "positions") if config.token_types else None,
        norm=weights.layer_norm(names.embedding_norm, W, config.epsilon),
        project_normed=None if W == E else weights.linear(names.embedding_projection, E, inputs=W, bias=True),
    )
    layers = tuple(
        _build_layer(config, weights.at(f"{names.layer}.{i}"), names, i, attention, mlp)
        for i in range(config.num_layers)
    )
    head = encoder_head(
        config,
        weights,
        lambda: ClassificationHead(
            dense=weights.linear(names.head_dense, E, inputs=E, bias=True),
            activation=names.head_activation,
            weight=weights.linear(names.head_out, len(config.labels), inputs=E, bias=True, role="labels"),
        ),
        lambda: masked_head(
            config,
            weights,
            tokens,
            names.masked,
            width=W,
            activation=names.masked_activation or config.activation,
            norm=lambda name, width: weights.layer_norm(name, width, config.epsilon),
        ),
    )
    return TextEncoder(config.sharded(weights.ranks), embedding, layers, None, head)


def encoder_qkv(config: EncoderConfig, weights: Weights, names: EncoderNames) -> Weight:
    """Queries, keys and values of a layer, which checkpoints have apart. [3 H D, E]"""
    projections = dict.fromkeys((names.query, names.key, names.value), config.hidden_size)
    return weights.linear("attention.qkv", projections, inputs=config.hidden_size, bias=True, split="outputs")


def _build_layer(
    config: EncoderConfig,
    weights: Weights,
    names: EncoderNames,
    i: int,
    attention: Callable[[Weights], tuple[Weight, AttentionSpec]] | None,
    mlp: Callable[[Weights], GatedMLP] | None,
) -> PostNorm:
    E, F = config.hidden_size, config.intermediate_size
    if attention is None:
        qkv, spec = encoder_qkv(config, weights, names), AttentionSpec(config.head_dim**-0.5, causal=False)
    else:
        qkv, spec = attention(weights)
    return PostNorm(
        weights.layer_norm(names.attention_norm, E, config.epsilon),
        weights.attention(
            config,
            i,
            spec,
            qkv=qkv,
            out=weights.linear(names.attention_out, E, inputs=E, bias=True, split="inputs"),
        ),
        weights.layer_norm(names.mlp_norm, E, config.epsilon),
        weights.mlp(names.up, names.down, E, F, config.activation) if mlp is None else mlp(weights),
    )
