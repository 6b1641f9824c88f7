"""GPT-2 (Radford et al., "Language Models are Unsupervised Multitask Learners", 2019).

    x = tokens[ids] + positions[i]
    x = x + attention(norm(x));  x = x + mlp(norm(x))      in each layer
    logits = norm(x) W_lm

Q, K and V are stored as one projection, and the head is the token embedding. Checkpoints store projections as
[in, out], other families as [out, in].
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..backends.operations import Backend
from ..backends.weights import Weight
from ..config import Fields, ModelConfig
from ..errors import UnsupportedModelError
from ..layers.block import PreNorm
from ..layers.embedding import Embedding, LMHead
from ..layers.mlp import MLP
from ..reference.attention import AttentionSpec
from .decoder import Decoder
from .parameters import Split, Weights
from .reading import merge_names, read_activation, read_heads, read_shared, refuse_other_layers
from .tensor_names import Names

END_OF_TEXT = 50256
"""The BOS and EOS token id if config.json has none."""

OTHER_NAMES = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_positions": "max_position_embeddings",
}
"""Names of the sizes in other families; transformers accepts either."""


@dataclass(frozen=True, kw_only=True)
class GPT2Config(ModelConfig):
    """The shared fields and GPT-2's own."""

    epsilon: float
    """Added to the variance in each layer norm"""
    activation: str
    scales: tuple[float, ...]
    """Factor of each layer's attention scores: 1 / sqrt D, unless config.json switches it off or divides it by the
    layer's number"""


def read_config(raw: Mapping[str, Any]) -> GPT2Config:
    """GPT-2's configuration from config.json.

    `reorder_and_upcast_attn` asks for attention scores in float32, which they always are here.

    Raises:
        CheckpointError: a field is missing or invalid.
        UnsupportedModelError: cross-attention, or an unsupported activation.
    """
    fields = Fields({"bos_token_id": END_OF_TEXT, "eos_token_id": END_OF_TEXT} | merge_names(raw, OTHER_NAMES))
    if fields.get("add_cross_attention", False):
        raise UnsupportedModelError("config.json: add_cross_attention is true; minillm runs decoders by themselves")
    refuse_other_layers(fields)
    heads = read_heads(fields, "n_embd", "n_head")
    shared = heads | read_shared(fields, width="n_embd", layers="n_layer", tied_head=True)
    scale = shared["head_dim"] ** -0.5 if fields.get("scale_attn_weights", True) else 1.0
    by_layer = fields.get("scale_attn_by_inverse_layer_idx", False)
    return GPT2Config(
        model_type="gpt2",
        **shared,
        intermediate_size=fields.size("n_inner", 4 * shared["hidden_size"]),
        max_positions=fields.size("n_positions"),
        epsilon=fields.number("layer_norm_epsilon", 1e-5),
        activation=read_activation(fields, "activation_function", "gelu_new"),
        scales=tuple(scale / (i + 1) if by_layer else scale for i in range(shared["num_layers"])),
    )


NAMES = Names(prefixes=("transformer.",), left_out=(".attn.bias", ".attn.masked_bias"), embedding="wte.weight")
"""Tensors of checkpoints: h.0.attn.c_attn.weight or transformer.h.0..., and stored causal masks."""


def build(config: GPT2Config, weights: Weights, backend: Backend) -> Decoder:
    """Build the model."""
    E, V = config.hidden_size, config.vocab_size
    embedding = Embedding(
        weights.table("wte", V, E, "vocabulary"), weights.table("wpe", config.max_positions, E, "positions")
    )
    lm_head = LMHead(embedding.tokens if config.tied_head else weights.table("lm_head", V, E, "vocabulary"))
    layers = tuple(_build_layer(config, weights.at(f"h.{i}"), i) for i in range(config.num_layers))
    return Decoder(
        config.sharded(weights.ranks), embedding, layers, weights.layer_norm("ln_f", E, config.epsilon), lm_head
    )


def _build_layer(config: GPT2Config, weights: Weights, i: int) -> PreNorm:
    E, F = config.hidden_size, config.intermediate_size

    def linear(name: str, outputs: int, inputs: int, split: Split, blocks: int = 1) -> Weight:
        return weights.linear(name, outputs, inputs=inputs, bias=True, split=split, blocks=blocks, transposed=True)

    return PreNorm(
        weights.layer_norm("ln_1", E, config.epsilon),
        weights.attention(
            config,
            i,
            AttentionSpec(config.scales[i]),
            qkv=linear("attn.c_attn", 3 * E, E, "outputs", blocks=3),
            out=linear("attn.c_proj", E, E, "inputs"),
        ),
        weights.layer_norm("ln_2", E, config.epsilon),
        MLP(linear("mlp.c_fc", F, E, "outputs"), linear("mlp.c_proj", E, F, "inputs"), config.activation),
    )
