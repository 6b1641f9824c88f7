"""BART (Lewis et al., arXiv 1910.13461), and what mBART, Pegasus and MarianMT share with it.

    x = norm(scale tokens[ids] + positions[i])
    x = norm(x + attention(x));  x = norm(x + mlp(x))                                  in each layer of the encoder
    y = norm(y + attention(y));  y = norm(y + cross(y, x));  y = norm(y + mlp(y))      of the decoder
    logits = y W_lm + b

The four are the original encoder-decoder (Vaswani et al., arXiv 1706.03762) with switches: where the norms are, whether
the embedding and the stacks' results have one, and whether positions are learned, with an offset of 2, or sinusoidal.
Encoder and decoder share the token embedding, which is the head too.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..backends.operations import Backend
from ..backends.weights import Weight
from ..config import Fields, ModelConfig
from ..errors import UnsupportedModelError
from ..layers.attention import Attention
from ..layers.block import PostNorm, PreNorm
from ..layers.cross_attention import CrossAttention, PostNormCross, PreNormCross
from ..layers.embedding import Embedding, LMHead
from ..reference.attention import AttentionSpec
from .encoder_decoder import Encoder, EncoderDecoder
from .parameters import Weights
from .reading import merge_names, read_activation, read_heads, read_layers, refuse_other_layers
from .tensor_names import Names

OTHER_NAMES = {"encoder_attention_heads": "num_attention_heads", "d_model": "hidden_size"}
"""Fields of config.json with an alternative name."""

POSITION_OFFSET = 2
"""Index of position 0 in a table of learned positions, whose first two rows served padded batches."""

NORM_EPSILON = 1e-5
"""Added to the variance in each layer norm; not in config.json."""

LOGITS_BIAS = "final_logits_bias"
"""The head's bias, [1, V]; zeros in the checkpoints that lack it, and in all but MarianMT's."""


@dataclass(frozen=True, kw_only=True)
class BartConfig(ModelConfig):
    """The shared fields, for the decoder, and fields in which the four families differ."""

    encoder_intermediate_size: int
    """F of the encoder"""
    activation: str
    embedding_scale: float
    """Factor of the tokens' vectors: sqrt E, or 1"""
    pre_norm: bool
    """True: norm before attention and MLP; False: after each residual sum"""
    embedding_norm: bool
    learned_positions: bool
    """False: sinusoidal"""
    final_norm: bool
    """Each stack has a norm of its result"""
    biased: Collection[str] = ("q_proj", "k_proj", "v_proj")
    """The projections of attention that have a bias, beside that of its result"""


def read_config(raw: Mapping[str, Any]) -> BartConfig:
    """BART's configuration from config.json.

    Raises:
        CheckpointError: a field is missing or invalid.
        UnsupportedModelError: encoder and decoder differ in their number of heads; or an unsupported activation, or
            another arrangement of norms.
    """
    special = {"bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2}
    return read(raw, "bart", special, pre_norm=False, embedding_norm=True, learned_positions=True, final_norm=False)


def read(raw: Mapping[str, Any], model_type: str, special: Mapping[str, int], **switches: Any) -> BartConfig:
    """The configuration of one of the four families.

    Args:
        raw: config.json
        model_type: the family
        special: token ids if config.json has none
        switches: in which the families differ: fields of `BartConfig`

    Raises:
        CheckpointError, UnsupportedModelError: as `read_config`.
    """
    fields = Fields({**special, **merge_names(raw, OTHER_NAMES)})
    refuse_other_layers(fields)
    _refuse_other_kinds(fields, switches)
    heads: dict[str, Any] = read_heads(fields, "d_model", "decoder_attention_heads")
    E, length = fields.size("d_model"), fields.size("max_position_embeddings", 1024)
    return BartConfig(
        model_type=model_type,
        **heads,
        hidden_size=E,
        num_layers=read_layers(fields, "decoder_layers"),
        intermediate_size=fields.size("decoder_ffn_dim"),
        vocab_size=fields.size("vocab_size"),
        max_positions=length,
        bos_token_id=fields.token_id("bos_token_id"),
        eos_token_ids=fields.token_ids("eos_token_id"),
        tied_head=True,
        encoder_layers=read_layers(fields, "encoder_layers"),
        max_source_positions=length,
        decoder_start_token_id=fields.token_id("decoder_start_token_id"),
        encoder_intermediate_size=fields.size("encoder_ffn_dim"),
        activation=read_activation(fields, "activation_function", "gelu"),
        embedding_scale=math.sqrt(E) if fields.get("scale_embedding", False) else 1.0,
        **switches,
    )


def _refuse_other_kinds(fields: Fields, switches: Mapping[str, bool]) -> None:
    """Refuse what these families' configurations can say, and minillm does not run."""
    encoder, decoder = (fields.size(f"{name}_attention_heads") for name in ("encoder", "decoder"))
    if encoder != decoder:
        raise UnsupportedModelError(
            f"config.json: encoder_attention_heads is {encoder} and decoder_attention_heads {decoder}; minillm runs "
            "stacks with the same number of heads"
        )
    for name, known in {
        "is_encoder_decoder": True,
        "normalize_before": switches["pre_norm"],  # of older releases, which had one class for all four
        "normalize_embedding": switches["embedding_norm"],
        "add_final_layer_norm": switches["final_norm"],
        "static_position_embeddings": not switches["learned_positions"],
        "share_encoder_decoder_embeddings": True,
        "tie_word_embeddings": True,
    }.items():
        if fields.get(name, known) != known:
            raise UnsupportedModelError(
                f"config.json: {name} is {fields.raw[name]!r:.60}; in this family minillm runs {known!r}"
            )


def sinusoidal_positions(count: int, E: int) -> NDArray[np.float32]:
    """Sines in the first half of each row and cosines in the second, of position / 10000^(2 i / E). -> [count, E]

    Vaswani et al., section 3.5, where they alternate; the order is Marian's and transformers'.
    """
    angles = np.arange(count)[:, None] / 10000 ** (2 * np.arange((E + 1) // 2) / E)  # [count, E / 2, rounded up]
    return np.concatenate([np.sin(angles), np.cos(angles[:, : E // 2])], axis=1).astype(np.float32)


NAMES = Names(
    prefixes=("model.",),
    left_out=("coder.version",),
    embedding="shared.weight",
    copies=("encoder.embed_tokens.weight", "decoder.embed_tokens.weight"),
    zeros=LOGITS_BIAS,
)
"""Tensors of checkpoints: encoder.layers.0.fc1.weight or model.encoder...; with copies of the embedding, or one of them
in its place."""


def build(config: BartConfig, weights: Weights, backend: Backend) -> EncoderDecoder:
    """Build the model."""
    E, V = config.hidden_size, config.vocab_size
    tokens = weights.table("shared", V, E, "vocabulary", bias=LOGITS_BIAS)
    encoder, decoder = weights.at("encoder"), weights.at("decoder")
    return EncoderDecoder(
        config=config.sharded(weights.ranks),
        embedding=_embedding(config, tokens, decoder, backend),
        layers=tuple(decoder_layer(config, decoder.at(f"layers.{i}"), i) for i in range(config.num_layers)),
        final_norm=decoder.layer_norm("layer_norm", E, NORM_EPSILON) if config.final_norm else None,
        head=LMHead(tokens),
        encoder=Encoder(
            _embedding(config, tokens, encoder, backend),
            tuple(encoder_layer(config, encoder.at(f"layers.{i}")) for i in range(config.encoder_layers)),
            encoder.layer_norm("layer_norm", E, NORM_EPSILON) if config.final_norm else None,
        ),
    )


def _embedding(config: BartConfig, tokens: Weight, weights: Weights, backend: Backend) -> Embedding:
    """The embedding of one stack."""
    E, count = config.hidden_size, config.max_positions
    if config.learned_positions:
        positions = weights.table("embed_positions", count + POSITION_OFFSET, E, "positions").rows_from(POSITION_OFFSET)
    else:
        positions = backend.loader.computed_table("sinusoidal positions", sinusoidal_positions(count, E))
    norm = weights.layer_norm("layernorm_embedding", E, NORM_EPSILON) if config.embedding_norm else None
    return Embedding(tokens, positions, norm=norm, scale=config.embedding_scale)


def encoder_layer(config: BartConfig, weights: Weights) -> PreNorm | PostNorm:
    """A layer of the encoder."""
    E = config.hidden_size
    block = PreNorm if config.pre_norm else PostNorm
    return block(
        weights.layer_norm("self_attn_layer_norm", E, NORM_EPSILON),
        _attention(config, weights, 0, causal=False),
        weights.layer_norm("final_layer_norm", E, NORM_EPSILON),
        weights.mlp("fc1", "fc2", E, config.encoder_intermediate_size, config.activation),
    )


def decoder_layer(config: BartConfig, weights: Weights, i: int) -> PreNormCross | PostNormCross:
    """Layer number `i` of the decoder."""
    E, local = config.hidden_size, config.sharded(weights.ranks)
    block = PreNormCross if config.pre_norm else PostNormCross
    cross = weights.at("encoder_attn")
    return block(
        weights.layer_norm("self_attn_layer_norm", E, NORM_EPSILON),
        _attention(config, weights, i, causal=True),
        weights.layer_norm("encoder_attn_layer_norm", E, NORM_EPSILON),
        CrossAttention(
            layer=i,
            num_heads=local.num_heads,
            num_kv_heads=local.num_kv_heads,
            spec=AttentionSpec(config.head_dim**-0.5, causal=False, cross=True),
            q=cross.linear("q_proj", E, inputs=E, bias=True, split="outputs"),
            kv=cross.linear("kv_proj", {"k_proj": E, "v_proj": E}, inputs=E, bias=config.biased, split="outputs"),
            out=cross.linear("out_proj", E, inputs=E, bias=True, split="inputs"),
        ),
        weights.layer_norm("final_layer_norm", E, NORM_EPSILON),
        weights.mlp("fc1", "fc2", E, config.intermediate_size, config.activation),
    )


def _attention(config: BartConfig, weights: Weights, layer: int, *, causal: bool) -> Attention:
    E, own = config.hidden_size, weights.at("self_attn")
    return weights.attention(
        config,
        layer,
        AttentionSpec(config.head_dim**-0.5, causal=causal),
        qkv=own.linear("qkv", {f"{name}_proj": E for name in "qkv"}, inputs=E, bias=config.biased, split="outputs"),
        out=own.linear("out_proj", E, inputs=E, bias=True, split="inputs"),
    )
