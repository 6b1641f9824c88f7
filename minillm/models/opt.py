"""OPT (Zhang et al., arXiv 2205.01068), and Galactica (arXiv 2211.09085), which is OPT with another activation.

    x = tokens[ids] + positions[i + 2]
    x = x + attention(norm(x));  x = x + mlp(norm(x))      in each layer
    logits = norm(x) W_lm

opt-350m differs: post-norm instead of pre-norm, no final norm, and an embedding narrower than the model, with a
projection in and out. Galactica has GELU for ReLU, no biases, and norms without gain and bias.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..backends.operations import Backend
from ..config import Fields, ModelConfig
from ..layers.block import PostNorm, PreNorm
from ..layers.embedding import Embedding, LMHead
from ..layers.norm import LayerNorm
from .decoder import Decoder
from .parameters import Weights
from .reading import read_activation, read_heads, read_shared, refuse_other_layers
from .tensor_names import Names

POSITION_OFFSET = 2
"""Index of position 0 in the position table, whose first two rows served padded batches."""

NORM_EPSILON = 1e-5
"""Added to the variance in each layer norm; not in config.json."""


@dataclass(frozen=True, kw_only=True)
class OPTConfig(ModelConfig):
    """The shared fields and OPT's own."""

    embedding_size: int
    """W, the width of the token embedding: E except in opt-350m"""
    pre_norm: bool
    """True: norm before attention and MLP; False: after each residual sum (opt-350m)"""
    final_norm: bool
    activation: str
    biases: bool
    norm_affine: bool
    """Norms have gain and bias"""


def read_config(raw: Mapping[str, Any]) -> OPTConfig:
    """OPT's configuration from config.json.

    Raises:
        CheckpointError: a field is missing or invalid.
        UnsupportedModelError: an unsupported activation.
    """
    fields = Fields({"bos_token_id": 2, "eos_token_id": 2} | dict(raw))
    refuse_other_layers(fields)
    shared = read_heads(fields) | read_shared(fields, tied_head=True)
    pre_norm = fields.get("do_layer_norm_before", True)
    return OPTConfig(
        model_type="opt",
        **shared,
        intermediate_size=fields.size("ffn_dim"),
        max_positions=fields.size("max_position_embeddings"),
        embedding_size=fields.size("word_embed_proj_dim", shared["hidden_size"]),
        pre_norm=pre_norm,
        final_norm=pre_norm and not fields.get("_remove_final_layer_norm", False),
        activation=read_activation(fields, "activation_function", "relu"),
        biases=fields.get("enable_bias", True),
        norm_affine=fields.get("layer_norm_elementwise_affine", True),
    )


NAMES = Names(prefixes=("model.", "decoder."), left_out=("version",))
"""Tensors of checkpoints: layers.0.fc1.weight or (model.)decoder.layers.0.fc1.weight; some hold a version number."""


def build(config: OPTConfig, weights: Weights, backend: Backend) -> Decoder:
    """Build the model."""
    E, V, W = config.hidden_size, config.vocab_size, config.embedding_size
    embedding = Embedding(
        weights.table("embed_tokens", V, W, "vocabulary"),
        weights.table("embed_positions", config.max_positions + POSITION_OFFSET, E, "positions").rows_from(
            POSITION_OFFSET
        ),
        weights.linear("project_in", E, inputs=W) if W != E else None,
    )
    lm_head = LMHead(
        embedding.tokens if config.tied_head else weights.table("lm_head", V, W, "vocabulary"),
        weights.linear("project_out", W, inputs=E) if W != E else None,
    )
    layers = tuple(_build_layer(config, weights.at(f"layers.{i}"), i) for i in range(config.num_layers))
    final_norm = _norm(config, weights, "final_layer_norm") if config.final_norm else None
    return Decoder(config.sharded(weights.ranks), embedding, layers, final_norm, lm_head)


def _build_layer(config: OPTConfig, weights: Weights, i: int) -> PreNorm | PostNorm:
    E, F, bias = config.hidden_size, config.intermediate_size, config.biases
    qkv = {f"self_attn.{name}_proj": E for name in "qkv"}
    block = PreNorm if config.pre_norm else PostNorm
    return block(
        _norm(config, weights, "self_attn_layer_norm"),
        weights.attention(
            config,
            i,
            qkv=weights.linear("self_attn.qkv", qkv, inputs=E, bias=bias, split="outputs"),
            out=weights.linear("self_attn.out_proj", E, inputs=E, bias=bias, split="inputs"),
        ),
        _norm(config, weights, "final_layer_norm"),
        weights.mlp("fc1", "fc2", E, F, config.activation, bias=bias),
    )


def _norm(config: OPTConfig, weights: Weights, name: str) -> LayerNorm:
    affine = config.norm_affine
    return LayerNorm(weights.norm(name, config.hidden_size, bias=affine, gain=affine), NORM_EPSILON)
