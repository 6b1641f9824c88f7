"""BLOOM (BigScience, arXiv 2211.05100).

    x = norm(tokens[ids])
    x = x + attention(norm(x));  x = x + mlp(norm(x))      in each layer
    logits = norm(x) W_lm

Positions enter by ALiBi: each head subtracts its slope times the distance between query and key from a score. So there
is no position table, and a text may be longer than in training.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..backends.operations import Backend
from ..backends.weights import Weight
from ..config import Fields, ModelConfig
from ..errors import UnsupportedModelError
from ..layers.block import PreNorm
from ..layers.embedding import Embedding, LMHead
from ..reference.attention import AttentionSpec
from .decoder import Decoder
from .parameters import Weights
from .reading import merge_names, read_heads, read_shared, refuse_other_layers
from .tensor_names import Names

ACTIVATION = "gelu_new"
"""The MLP's activation, which config.json does not name."""

OTHER_NAMES = {"hidden_size": "n_embed", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head"}
"""Names of the sizes in older config.json files."""

TRAINED_LENGTH = 2048
"""The longest context if config.json has no `seq_length`."""


@dataclass(frozen=True, kw_only=True)
class BloomConfig(ModelConfig):
    """The shared fields and BLOOM's own."""

    epsilon: float
    """Added to the variance in each layer norm"""


def read_config(raw: Mapping[str, Any]) -> BloomConfig:
    """BLOOM's configuration from config.json, with the sizes under their newer or older names.

    `slow_but_exact` and `pretraining_tp`, the order of sums across devices, have no effect here.

    Raises:
        CheckpointError: a field is missing or invalid.
        UnsupportedModelError: `apply_residual_connection_post_layernorm`, which no published model sets, or another
            kind of attention.
    """
    fields = Fields({"bos_token_id": 1, "eos_token_id": 2} | merge_names(raw, OTHER_NAMES))
    refuse_other_layers(fields)
    if fields.get("apply_residual_connection_post_layernorm", False):
        raise UnsupportedModelError(
            "config.json: apply_residual_connection_post_layernorm is true; minillm adds to what the norm reads"
        )
    shared = read_heads(fields) | read_shared(fields, tied_head=True)
    return BloomConfig(
        model_type="bloom",
        **shared,
        intermediate_size=4 * shared["hidden_size"],
        max_positions=fields.size("seq_length", TRAINED_LENGTH),
        epsilon=fields.number("layer_norm_epsilon", 1e-5),
    )


def alibi_slopes(H: int) -> NDArray[np.float32]:
    """ALiBi's slope for each of H heads (Press et al., arXiv 2108.12409, section 3). -> [H]

    For a power of two 2^(-8 / H), 2^(-16 / H), ...; otherwise the slopes of the next lower power of two, then every
    second slope of the next higher one.
    """
    below = 2 ** math.floor(math.log2(H))
    slopes = [2 ** (-8 * i / below) for i in range(1, below + 1)]
    slopes += [2 ** (-8 * i / (2 * below)) for i in range(1, 2 * (H - below), 2)]
    return np.array(slopes, np.float32)


NAMES = Names(prefixes=("transformer.",), embedding="word_embeddings.weight")
"""Tensors of checkpoints: h.0.mlp.dense_h_to_4h.weight or transformer.h.0..."""


def build(config: BloomConfig, weights: Weights, backend: Backend) -> Decoder:
    """Build the model."""
    E, V = config.hidden_size, config.vocab_size
    slopes = backend.loader.constant("ALiBi", alibi_slopes(config.num_heads)[weights.share(config.num_heads)])
    embedding = Embedding(
        weights.table("word_embeddings", V, E, "vocabulary"),
        norm=weights.layer_norm("word_embeddings_layernorm", E, config.epsilon),
    )
    lm_head = LMHead(embedding.tokens if config.tied_head else weights.table("lm_head", V, E, "vocabulary"))
    layers = tuple(_build_layer(config, weights.at(f"h.{i}"), slopes, i) for i in range(config.num_layers))
    return Decoder(
        config.sharded(weights.ranks), embedding, layers, weights.layer_norm("ln_f", E, config.epsilon), lm_head
    )


def _build_layer(config: BloomConfig, weights: Weights, slopes: Weight, i: int) -> PreNorm:
    E, F, H = config.hidden_size, config.intermediate_size, config.num_heads
    return PreNorm(
        weights.layer_norm("input_layernorm", E, config.epsilon),
        weights.attention(
            config,
            i,
            AttentionSpec(config.head_dim**-0.5, slopes=slopes),
            qkv=weights.linear(
                "self_attention.query_key_value", 3 * E, inputs=E, bias=True, split="outputs", blocks=3, heads=H
            ),
            out=weights.linear("self_attention.dense", E, inputs=E, bias=True, split="inputs"),
        ),
        weights.layer_norm("post_attention_layernorm", E, config.epsilon),
        weights.mlp("mlp.dense_h_to_4h", "mlp.dense_4h_to_h", E, F, ACTIVATION),
    )
