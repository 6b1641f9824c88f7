"""DeBERTa v2 and v3 (He et al., arXiv 2006.03654 and 2111.09543): an encoder whose scores know relative positions.

    x = norm(tokens[ids] (+ positions[i]) (+ types[t]))
    x = norm(x + attention(x));  x = norm(x + mlp(x))      in each layer

Attention is `reference/disentangled.py`'s; by default a layer projects relative positions as it does tokens. In v2 the
first layer's result gets a convolution of what entered the layer: x = norm(x + activation(convolution(embedding))). A
classification reads the first token, [CLS]: logits = gelu(x W_pooler + b) W_out + b.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..backends.operations import Backend
from ..backends.weights import Weight
from ..config import Fields
from ..errors import UnsupportedModelError
from ..layers.attention import project_qkv
from ..layers.block import PostNorm
from ..layers.neighbours import ConvolvedPostNorm, NeighbourConvolution
from ..reference.activation import LINEAR_ACTIVATIONS
from ..reference.attention import AttentionSpec
from .disentangled import DisentangledConfig, masked_parts, read_disentangled, relative_positions
from .encoder import EncoderNames, TextEncoder, build_encoder, encoder_qkv
from .parameters import Weights
from .tensor_names import Names


@dataclass(frozen=True, kw_only=True)
class DebertaV2Config(DisentangledConfig):
    """The fields that both generations have, and v2's own."""

    shared: bool
    """Whether relative positions are projected as tokens are"""
    kernel: int
    """Tokens that the convolution reads; 0: there is none"""
    kernel_activation: str


def read_config(raw: Mapping[str, Any]) -> DebertaV2Config:
    """DeBERTa v2's and v3's configuration from config.json.

    Raises:
        CheckpointError: a field is missing or invalid.
        UnsupportedModelError: a decoder, or a feature that would change the layers.
    """
    fields, base = Fields(raw), read_disentangled(raw, "deberta-v2")
    usual = {"attention_head_size": base["head_dim"], "conv_groups": 1}
    for name, size in usual.items():
        if (value := fields.size(name, size)) != size:
            raise UnsupportedModelError(f"config.json: {name} is {value}; in this family minillm runs {size}")
    kernel = fields.get("conv_kernel_size", 0)
    if kernel and not fields.size("conv_kernel_size", most=255) % 2:
        raise UnsupportedModelError(f"config.json: conv_kernel_size is {kernel}; minillm runs odd sizes")
    buckets = fields.get("position_buckets", -1)
    norms = [word.strip() for word in fields.get("norm_rel_ebd", "none").lower().split("|")]
    return DebertaV2Config(
        **base,
        buckets=max(buckets, 0) and fields.size("position_buckets"),
        normed="layer_norm" in norms,
        shared=fields.get("share_att_key", False),
        kernel=kernel,
        kernel_activation=fields.choice("conv_act", "tanh", tuple(LINEAR_ACTIVATIONS)),
    )


NAMES = Names(
    prefixes=("deberta.",),
    left_out=("embeddings.position_ids",),
    heads=("cls.", "lm_predictions.", "mask_predictions.", "pooler.", "classifier.", "embeddings.position_embeddings."),
    masked_head="cls.predictions.transform.dense.weight",
    other_masked_head="lm_predictions.lm_head.dense.weight",
    embedding="embeddings.word_embeddings.weight",
)
"""Tensors of checkpoints: encoder.layer.0.output.dense.weight or deberta.encoder...; those of v3 may have a table of
positions that nothing reads."""

_PARTS = EncoderNames(
    query="attention.self.query_proj", key="attention.self.key_proj", value="attention.self.value_proj"
)
_PROJECTIONS = {"c2p": "attention.self.pos_key_proj", "p2c": "attention.self.pos_query_proj"}
"""Tensors of projections of positions, where they are not the tokens'"""


def build(config: DebertaV2Config, weights: Weights, backend: Backend) -> TextEncoder:
    """Build the model."""
    E, encoder = config.hidden_size, weights.at("encoder")
    table = encoder.table("rel_embeddings", config.rows, E, "positions") if config.relative else None
    norm = encoder.layer_norm("LayerNorm", E, config.epsilon) if config.normed else None
    place: dict[str, Any] = {"inputs": E, "bias": True, "split": "outputs"}

    def attention(layer: Weights) -> tuple[Weight, AttentionSpec]:
        qkv, spec = encoder_qkv(config, layer, _PARTS), AttentionSpec(config.score_scale, causal=False)
        if table is None:
            return qkv, spec
        own: dict[str, Weight] = {}
        if not config.shared:
            own = {term: layer.linear(_PROJECTIONS[term], E, **place) for term in config.terms}
        if qkv.data is None or not config.terms:  # None: another rank's layer
            return qkv, spec

        def project(x: Any) -> dict[str, Any]:
            if not config.shared:
                return {term: backend.linear(x, weight) for term, weight in own.items()}  # [R, E] -> [R, H D]
            q, k, _ = project_qkv(backend, x, qkv, 1, 1)  # [R, E] -> 3 x [R, 1, H D]
            return {term: {"c2p": k, "p2c": q}[term][:, 0] for term in config.terms}  # -> [R, H D]

        parts = table, norm, project, qkv.name, tuple(own.values())
        return qkv, replace(spec, relative=relative_positions(config, *parts, backend))

    own, names = masked_parts(config, replace(_PARTS, head_activation=config.head_activation))
    model = build_encoder(own, weights, names, attention)
    if not config.kernel:
        return model
    convolution = NeighbourConvolution(
        encoder.convolution("conv.conv", E, config.kernel, inputs=E), config.kernel, config.kernel_activation
    )
    after = encoder.layer_norm("conv.LayerNorm", E, config.epsilon)
    first, *others = model.layers
    assert isinstance(first, PostNorm)
    convolved = ConvolvedPostNorm(**vars(first), convolution=convolution, convolution_norm=after)
    return replace(model, layers=(convolved, *others))
