"""BLOOM (BigScience, arXiv 2211.05100).

    x = norm(tokens[ids])
    x = x + attention(norm(x));  x = x + mlp(norm(x))      in each layer
    logits = norm(x) W_lm

Positions enter by ALiBi: each head subtracts its slope times the distance between query and key from a score. So there
is no position table, and a text may be longer than those of training.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..backends.operations import Backend
from ..backends.weights import Tensor, Weight
from ..config import Fields, ModelConfig
from ..errors import UnsupportedModelError
from ..layers.attention import Attention
from ..layers.block import PreNorm
from ..layers.embedding import Embedding
from ..layers.head import LMHead
from ..layers.mlp import MLP
from ..layers.norm import LayerNorm
from .base import Shapes, Tensors, linear_tensors, norm_tensors, shorten, without_tied_head
from .decoder import Decoder
from .outline import Embed, Norm, Outline, head, mlp, self_attention
from .reading import merge_names, read_heads, read_layers, refuse_other_layers
from .rearranged import with_qkv_apart

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
    tied_head: bool
    """The LM head is the token embedding"""


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
    hidden_size, heads, head_dim = read_heads(fields)
    return BloomConfig(
        model_type="bloom",
        hidden_size=hidden_size,
        num_layers=read_layers(fields),
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=head_dim,
        intermediate_size=4 * hidden_size,
        vocab_size=fields.size("vocab_size"),
        max_positions=fields.size("seq_length", TRAINED_LENGTH),
        bos_token_id=fields.token_id("bos_token_id"),
        eos_token_ids=fields.token_ids("eos_token_id"),
        epsilon=fields.number("layer_norm_epsilon", 1e-5),
        tied_head=fields.get("tie_word_embeddings", True),
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


def tensor_table(config: BloomConfig) -> Shapes:
    """Name (without `transformer.`) and shape of every tensor."""
    E, F, V = config.hidden_size, config.intermediate_size, config.vocab_size
    table: Shapes = {"word_embeddings.weight": (V, E), **norm_tensors("word_embeddings_layernorm", E)}
    for i in range(config.num_layers):
        part = f"h.{i}"
        table |= norm_tensors(f"{part}.input_layernorm", E) | norm_tensors(f"{part}.post_attention_layernorm", E)
        table |= linear_tensors(f"{part}.self_attention.query_key_value", 3 * E, E)
        table |= linear_tensors(f"{part}.self_attention.dense", E, E)
        table |= linear_tensors(f"{part}.mlp.dense_h_to_4h", F, E) | linear_tensors(f"{part}.mlp.dense_4h_to_h", E, F)
    table |= norm_tensors("ln_f", E)
    if not config.tied_head:
        table["lm_head.weight"] = (V, E)
    return table


def canonical_names(stored: Mapping[str, Tensor], config: BloomConfig) -> dict[str, Tensor]:
    """Tensors by canonical name: some checkpoints use the prefix `transformer.`, some store a tied head twice.

    The rows of Q, K and V are reordered: Q of all heads, then K, then V, as in `layers.attention`.
    """
    tensors = shorten(stored, "transformer.")
    if config.tied_head:
        tensors = without_tied_head(tensors, "word_embeddings.weight")
    return with_qkv_apart(tensors, config.num_heads)


def build(config: BloomConfig, stored: Mapping[str, Tensor], backend: Backend) -> Decoder:
    """Build the model from tensors under canonical names.

    Raises:
        CheckpointError: a tensor is missing, unexpected or of the wrong shape.
    """
    tensors, slopes = (
        Tensors(stored, tensor_table(config), backend),
        backend.loader.constant("ALiBi", alibi_slopes(config.num_heads)),
    )

    def norm(name: str) -> LayerNorm:
        return LayerNorm(tensors.norm(name), config.epsilon)

    embedding = Embedding(tensors.table("word_embeddings", "vocabulary"), norm=norm("word_embeddings_layernorm"))
    lm_head = LMHead(embedding.tokens if config.tied_head else tensors.table("lm_head", "vocabulary"))
    layers = tuple(
        PreNorm(
            norm(f"h.{i}.input_layernorm"),
            _build_attention(config, tensors, slopes, i),
            norm(f"h.{i}.post_attention_layernorm"),
            MLP(tensors.linear(f"h.{i}.mlp.dense_h_to_4h"), tensors.linear(f"h.{i}.mlp.dense_4h_to_h"), ACTIVATION),
        )
        for i in range(config.num_layers)
    )
    return Decoder(config, embedding, layers, norm("ln_f"), lm_head)


def _build_attention(config: BloomConfig, tensors: Tensors, slopes: Weight, i: int) -> Attention:
    return Attention(
        layer=i,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        scale=config.head_dim**-0.5,
        qkv=tensors.linear(f"h.{i}.self_attention.query_key_value"),
        out=tensors.linear(f"h.{i}.self_attention.dense"),
        slopes=slopes,
    )


def outline(config: BloomConfig) -> Outline:
    """The components in execution order, for `accounting`."""
    E = config.hidden_size
    layer = (
        Norm(name="attention norm", width=E),
        *self_attention(config, bias=True, out_bias=True, biased=True),
        Norm(name="MLP norm", width=E),
        *mlp(config, ACTIVATION),
    )
    return Outline(
        before=(Embed(name="embedding", width=E, vectors=config.vocab_size), Norm(name="embedding norm", width=E)),
        layers=(layer,) * config.num_layers,
        after=(Norm(name="final norm", width=E),),
        head=head(config, tied=config.tied_head),
    )


def _shape(E: int, L: int, H: int) -> dict[str, Any]:
    sizes = {"hidden_size": E, "n_layer": L, "num_attention_heads": H}
    return {"model_type": "bloom", "vocab_size": 250880, "bos_token_id": 1, "eos_token_id": 2, **sizes}


SHAPES: dict[str, dict[str, Any]] = {
    "bloom-560m": _shape(1024, 24, 16),
    "bloom-1b1": _shape(1536, 24, 16),
    "bloom-1b7": _shape(2048, 24, 16),
    "bloom-3b": _shape(2560, 30, 32),
    "bloom-7b1": _shape(4096, 30, 32),
    "bloom": _shape(14336, 70, 112),
}
"""The published sizes (paper, table 3), with the values of their config.json."""
