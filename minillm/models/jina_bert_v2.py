"""jina-bert-v2 (Günther et al., "Jina Embeddings 2", arXiv 2310.19923): BERT with ALiBi both ways and gated MLPs.

    x = norm(tokens[ids] + types[t])
    x = norm(x + attention(x));  x = norm(x + (gelu(x W_gate) * (x W_up)) W_down + b)      in each layer

A score loses its head's slope times the distance between query and key, whichever comes first. Published configurations
call the family "bert", with position_embedding_type "alibi".
"""

from collections.abc import Mapping
from typing import Any

from ..backends.operations import Backend
from ..config import Fields
from ..layers.mlp import GatedMLP
from ..reference.attention import AttentionSpec
from .bloom import alibi_slopes
from .encoder import EncoderConfig, EncoderNames, TextEncoder, build_encoder, encoder_qkv, read_encoder
from .parameters import Weights
from .tensor_names import Names

GATES = {"geglu": "gelu", "reglu": "relu"}
"""`feed_forward_type` -> activation of the gate"""


def read_config(raw: Mapping[str, Any]) -> EncoderConfig:
    """jina-bert-v2's configuration from config.json.

    Raises:
        CheckpointError: a field is missing or invalid.
        UnsupportedModelError: a decoder, other positions, or MLPs without a gate.
    """
    fields = Fields(raw)
    fields.choice("position_embedding_type", "alibi", ("alibi",))
    gate = GATES[fields.choice("feed_forward_type", "geglu", tuple(GATES))]
    usual = {"position_embedding_type": "absolute", "hidden_act": gate}
    return read_encoder({"max_position_embeddings": 8192, **raw, **usual}, "jina_bert_v2", has_position_table=False)


NAMES = Names(
    prefixes=("bert.",),
    left_out=("embeddings.position_ids",),
    heads=("cls.", "pooler.", "classifier.", "qa_outputs."),
    masked_head="cls.predictions.transform.dense.weight",
    expert_tensors={"mlp.gated_layers.weight": ("mlp.gated_layers_w.weight", "mlp.gated_layers_v.weight")},
    embedding="embeddings.word_embeddings.weight",
)
"""Tensors of checkpoints: encoder.layer.0.mlp.gated_layers.weight, the gate and the other projection"""

_PARTS = EncoderNames(mlp_norm="mlp.layernorm", masked_activation="gelu")


def build(config: EncoderConfig, weights: Weights, backend: Backend) -> TextEncoder:
    """Build the model."""
    E, F, H = config.hidden_size, config.intermediate_size, config.num_heads
    slopes = backend.loader.constant("ALiBi", alibi_slopes(H)[weights.share(H)])
    spec = AttentionSpec(config.head_dim**-0.5, causal=False, slopes=slopes)

    def mlp(layer: Weights) -> GatedMLP:
        gates = {"mlp.gated_layers_w": F, "mlp.gated_layers_v": F}
        return GatedMLP(
            layer.linear("mlp.gate_up", gates, inputs=E, split="outputs"),
            layer.linear("mlp.wo", E, inputs=F, bias=True, split="inputs"),
            config.activation,
        )

    return build_encoder(config, weights, _PARTS, lambda layer: (encoder_qkv(config, layer, _PARTS), spec), mlp)
