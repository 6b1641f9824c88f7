"""Gemma 2 (Gemma Team, arXiv 2408.00118).

    x = sqrt(E) tokens[ids]
    x = x + norm(attention(norm(x)));  x = x + norm(mlp(norm(x)))      in each layer
    logits = c tanh(norm(x) W_lm / c)

The norm is RMS norm, its gain stored less 1. Scores of queries and keys have a soft cap as well, and their own scale;
every other layer has a sliding window. Positions enter by rotating queries and keys, heads have a width of their own,
and the MLP is gated by GELU. Gemma 1 and 3 differ in their switches: their files only read their configurations.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..backends.formats import FLOAT32, Format
from ..backends.operations import Backend
from ..backends.storage import expand, narrow
from ..config import Fields, ModelConfig
from ..errors import UnsupportedModelError
from ..layers.block import PreNorm, Sandwich
from ..layers.embedding import Embedding, LMHead
from ..layers.norm import RMSNorm
from ..reference.attention import AttentionSpec
from ..reference.rotary import Rotation
from .decoder import Decoder
from .parameters import Weights
from .reading import read_activation, read_grouped_heads, read_layer_kinds, read_shared, refuse_other_layers
from .rotary import RotaryConfig, read_rotary, refuse_partial
from .tensor_names import Names

TOKENS = {"bos_token_id": 2, "eos_token_id": 1}
"""BOS and EOS token ids if config.json has none."""

HEADS: dict[str, int] = {"kv_heads": 4, "head_dim": 256}
"""Key/value heads and head width if config.json has none."""

WINDOW, SCORE_CAP, LOGIT_CAP = 4096, 50.0, 30.0
"""Sliding window and soft caps if config.json has none; null stands for no cap."""

GAIN_OFFSET = 1.0
"""A norm's gain less what checkpoints store."""


@dataclass(frozen=True, kw_only=True)
class GemmaConfig(ModelConfig):
    """The shared fields, Gemma 2's own and the switches of Gemma 1 and 3."""

    epsilon: float
    """Added to the mean square in each norm"""
    activation: str
    bias: bool
    """Whether the four projections of attention have biases"""
    query_scalar: float
    """Scores are divided by its square root"""
    rotaries: tuple[RotaryConfig, ...]
    """Rotary embedding of each layer"""
    output_norms: bool = True
    """Norms after attention and MLP too, before the sums (not in Gemma 1)"""
    head_norms: bool = False
    """RMS norm of each query and key head (Gemma 3)"""
    score_cap: float | None = None
    """Soft cap of attention scores"""
    logit_cap: float | None = None
    """Soft cap of logits"""


def read_config(raw: Mapping[str, Any]) -> GemmaConfig:
    """Gemma 2's configuration from config.json.

    Raises:
        CheckpointError: a field is missing or invalid.
        UnsupportedModelError: an unsupported activation or kind of rotary scaling, or attention that is not causal.
    """
    caps = {"attn_logit_softcapping": SCORE_CAP, "final_logit_softcapping": LOGIT_CAP}
    fields = Fields(TOKENS | caps | {"sliding_window": WINDOW} | dict(raw))
    layers = layer_windows(fields, every=2)
    refuse_bidirectional(fields)
    refuse_partial(fields)
    head_dim = read_grouped_heads(fields, **HEADS)["head_dim"]
    rotary = read_rotary(fields, head_dim, fields.size("max_position_embeddings", 8192))
    return read_gemma(
        fields,
        "gemma2",
        max_positions=rotary.longest,
        keys_follow_length=rotary.stretch is not None,
        rotaries=(rotary,) * len(layers),
        windows=layers,
        score_cap=read_cap(fields, "attn_logit_softcapping"),
    )


def read_gemma(fields: Fields, model_type: str, **own: Any) -> GemmaConfig:
    """Read the fields that all versions share; `own` are the fields of `GemmaConfig` that each reads itself.

    Raises:
        As `read_config`.
    """
    shared: dict[str, Any] = read_grouped_heads(fields, **HEADS) | read_shared(fields, tied_head=True)
    shared |= {
        "intermediate_size": fields.size("intermediate_size"),
        "epsilon": fields.number("rms_norm_eps", 1e-6),
        "bias": fields.get("attention_bias", False),
    }
    if not own.get("output_norms", True):
        return GemmaConfig(model_type=model_type, **shared, **own)
    return GemmaConfig(
        model_type=model_type,
        **shared,
        activation=read_activation(fields, "hidden_activation", "gelu_pytorch_tanh"),
        query_scalar=fields.number("query_pre_attn_scalar", 256.0),
        logit_cap=read_cap(fields, "final_logit_softcapping"),
        **own,
    )


def layer_windows(fields: Fields, every: int) -> tuple[int | None, ...]:
    """Sliding window of each layer; None for layers without.

    They are those in `layer_types`, or all but each `every`-th.

    Raises:
        CheckpointError: the list does not have one entry for each layer, or the window's size is missing.
        UnsupportedModelError: another kind of attention.
    """
    refuse_other_layers(fields, windows=True)
    kinds = read_layer_kinds(fields, lambda i: (i + 1) % every > 0)
    window = fields.size("sliding_window") if any(kinds) else None
    return tuple(window if sliding else None for sliding in kinds)


def refuse_bidirectional(fields: Fields) -> None:
    """Refuse attention both ways.

    Raises:
        UnsupportedModelError: config.json asks for it.
    """
    if fields.get("use_bidirectional_attention", False):
        raise UnsupportedModelError(
            f"{fields.source}: use_bidirectional_attention is true; minillm runs causal attention"
        )


def read_cap(fields: Fields, name: str) -> float | None:
    """A soft cap; None if the field is absent or null."""
    return None if fields.raw.get(name) is None else fields.number(name)


NAMES = Names(prefixes=("model.",), left_out=("rotary_emb.inv_freq",))
"""Tensors of checkpoints: (model.)layers.0.mlp.up_proj.weight."""


def build(config: GemmaConfig, weights: Weights, backend: Backend) -> Decoder:
    """Build the model."""
    E, V = config.hidden_size, config.vocab_size
    tokens = weights.table("embed_tokens", V, E, "vocabulary")
    embedding = Embedding(tokens, scale=embedding_scale(E, backend.memory.activations))
    head = tokens if config.tied_head else weights.table("lm_head", V, E, "vocabulary")
    rotations = {rotary: rotary.rotation(backend) for rotary in config.rotaries}  # the same angles are computed once
    layers = tuple(
        _build_layer(config, weights.at(f"layers.{i}"), rotations[config.rotaries[i]], i)
        for i in range(config.num_layers)
    )
    norm = weights.rms_norm("norm", E, config.epsilon, offset=GAIN_OFFSET)
    return Decoder(config.sharded(weights.ranks), embedding, layers, norm, LMHead(head, cap=config.logit_cap))


def embedding_scale(width: int, form: Format) -> float:
    """sqrt(E), rounded to the format of activations as in transformers: 25.25 in bfloat16 for E = 640."""
    exact = np.array([width**0.5], np.float32)
    return float(exact[0] if form == FLOAT32 else expand(narrow(exact, form))[0])


def _build_layer(config: GemmaConfig, weights: Weights, rotation: Rotation, i: int) -> Sandwich | PreNorm:
    E, F = config.hidden_size, config.intermediate_size

    def norm(name: str) -> RMSNorm:
        return weights.rms_norm(name, E, config.epsilon, offset=GAIN_OFFSET)

    attention_norm = norm("input_layernorm")
    attention = weights.attention(
        config,
        i,
        AttentionSpec(
            config.query_scalar**-0.5,
            causal=not config.bidirectional,
            window=config.windows[i],
            softcap=config.score_cap,
        ),
        qkv=weights.qkv_proj(config, bias=config.bias),
        out=weights.o_proj(config, bias=config.bias),
        rotation=rotation,
        head_norms=weights.head_norms(config, config.epsilon, offset=GAIN_OFFSET) if config.head_norms else None,
    )
    if not config.output_norms:
        mlp_norm = norm("post_attention_layernorm")
        return PreNorm(attention_norm, attention, mlp_norm, weights.gated_mlp(E, F, config.activation))
    return Sandwich(
        attention_norm=attention_norm,
        attention=attention,
        attention_out_norm=norm("post_attention_layernorm"),
        mlp_norm=norm("pre_feedforward_layernorm"),
        mlp=weights.gated_mlp(E, F, config.activation),
        mlp_out_norm=norm("post_feedforward_layernorm"),
    )
