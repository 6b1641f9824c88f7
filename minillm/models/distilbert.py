"""DistilBERT (Sanh et al., arXiv 1910.01108): BERT with half of the layers, and without token types and pooler.

A classification reads the first token, [CLS]: logits = relu(x W_pre + b) W_out + b.
"""

from collections.abc import Mapping
from typing import Any

from ..backends.operations import Backend
from ..config import Fields
from .encoder import EncoderConfig, EncoderNames, TextEncoder, build_encoder
from .encoder_heads import MaskedNames
from .parameters import Weights
from .reading import read_activation, read_heads, read_layers
from .tensor_names import Names

NORM_EPSILON = 1e-12
"""Added to the variance in each layer norm; not in config.json."""


def read_config(raw: Mapping[str, Any]) -> EncoderConfig:
    """DistilBERT's configuration from config.json.

    Raises:
        CheckpointError: a field is missing or invalid.
        UnsupportedModelError: an unsupported activation.
    """
    fields = Fields(raw)
    heads = read_heads(fields, "dim", "n_heads")
    return EncoderConfig(
        model_type="distilbert",
        num_heads=heads["num_heads"],
        num_kv_heads=heads["num_kv_heads"],
        head_dim=heads["head_dim"],
        hidden_size=fields.size("dim"),
        num_layers=read_layers(fields, "n_layers"),
        vocab_size=fields.size("vocab_size"),
        intermediate_size=fields.size("hidden_dim"),
        max_positions=fields.size("max_position_embeddings", 512),
        activation=read_activation(fields, "activation", "gelu"),
        epsilon=NORM_EPSILON,
        bidirectional=True,
    )


NAMES = Names(
    prefixes=("distilbert.",),
    left_out=("embeddings.position_ids",),
    heads=(
        *("vocab_transform.", "vocab_layer_norm.", "vocab_projector.", "pre_classifier.", "classifier."),
        "qa_outputs.",
    ),
    masked_head="vocab_transform.weight",
    embedding="embeddings.word_embeddings.weight",
)
"""Tensors of checkpoints: transformer.layer.0.ffn.lin1.weight or distilbert.transformer..."""

_PARTS = EncoderNames(
    layer="transformer.layer",
    query="attention.q_lin",
    key="attention.k_lin",
    value="attention.v_lin",
    attention_out="attention.out_lin",
    attention_norm="sa_layer_norm",
    up="ffn.lin1",
    down="ffn.lin2",
    mlp_norm="output_layer_norm",
    head_dense="pre_classifier",
    head_activation="relu",
    masked=MaskedNames("vocab_transform", "vocab_layer_norm", "vocab_projector", "vocab_projector.bias"),
)


def build(config: EncoderConfig, weights: Weights, backend: Backend) -> TextEncoder:
    """Build the model."""
    return build_encoder(config, weights, _PARTS)
