"""DeBERTa (He et al., arXiv 2006.03654): an encoder whose scores know relative positions.

    x = norm(tokens[ids] (+ positions[i]) (+ types[t]))
    x = norm(x + attention(x));  x = norm(x + mlp(x))      in each layer

Attention is `reference/disentangled.py`'s, with projections of relative positions of its own; keys have no bias. A
classification reads the first token, [CLS]: logits = gelu(x W_pooler + b) W_out + b.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..backends.operations import Backend
from ..backends.weights import Weight
from ..config import Fields
from ..errors import UnsupportedModelError
from ..reference.attention import AttentionSpec
from .disentangled import DisentangledConfig, masked_parts, read_disentangled, relative_positions
from .encoder import EncoderNames, TextEncoder, build_encoder
from .parameters import Weights
from .tensor_names import Names


def read_config(raw: Mapping[str, Any]) -> DisentangledConfig:
    """DeBERTa's configuration from config.json.

    Raises:
        CheckpointError: a field is missing or invalid.
        UnsupportedModelError: a decoder, no relative positions, or scores that heads exchange.
    """
    fields = Fields(raw)
    if fields.get("talking_head", False):
        raise UnsupportedModelError("config.json: talking_head is true; in this family minillm runs heads apart, false")
    config = DisentangledConfig(**read_disentangled(raw, "deberta"))
    if not (config.relative and config.terms):
        raise UnsupportedModelError(
            "config.json: relative_attention is false or pos_att_type empty; in this family minillm runs relative "
            "positions, by c2p or p2c"
        )
    return config


NAMES = Names(
    prefixes=("deberta.",),
    left_out=("embeddings.position_ids",),
    heads=("cls.", "lm_predictions.", "pooler.", "classifier.", "embeddings.position_embeddings."),
    masked_head="cls.predictions.transform.dense.weight",
    other_masked_head="lm_predictions.lm_head.dense.weight",
    embedding="embeddings.word_embeddings.weight",
)
"""Tensors of checkpoints: encoder.layer.0.output.dense.weight or deberta.encoder...; they may have a table of positions
that nothing reads."""

_PROJECTIONS = {"c2p": "attention.self.pos_proj", "p2c": "attention.self.pos_q_proj"}
"""Tensors of projections of positions, of which the latter has a bias"""


def build(config: DisentangledConfig, weights: Weights, backend: Backend) -> TextEncoder:
    """Build the model."""
    E, xp = config.hidden_size, backend.xp
    table = weights.table("encoder.rel_embeddings", config.rows, E, "positions")

    def attention(layer: Weights) -> tuple[Weight, AttentionSpec]:
        qkv = layer.linear("attention.self.in_proj", 3 * E, inputs=E, split="outputs", blocks=3, heads=config.num_heads)
        q, v = (layer.vector(f"attention.self.{name}_bias", E, split="outputs") for name in "qv")
        own = {
            term: layer.linear(_PROJECTIONS[term], E, inputs=E, bias=term == "p2c", split="outputs")
            for term in config.terms
        }
        spec = AttentionSpec(config.score_scale, causal=False)
        if qkv.data is None:  # another rank's layer
            return qkv, spec

        def project(x: Any) -> dict[str, Any]:
            return {term: backend.linear(x, weight) for term, weight in own.items()}  # [R, E] -> [R, H D]

        biases = xp.concatenate([q.data, xp.zeros_like(q.data), v.data])  # 3 x [H D] -> [3 H D]
        parts = table, None, project, qkv.name, (q, v, *own.values())
        relative = relative_positions(config, *parts, backend)
        return replace(qkv, bias=biases), replace(spec, relative=relative)

    config, names = masked_parts(config, EncoderNames(head_activation=config.head_activation))
    return build_encoder(config, weights, names, attention)
