"""Phi-1, Phi-1.5 and Phi-2 (Gunasekar et al., arXiv 2306.11644; Li et al., arXiv 2309.05463).

    x = tokens[ids]
    x = x + attention(norm(x)) + mlp(norm(x))              in each layer
    logits = norm(x) W_lm + b_lm

Attention and MLP read the same norm of x, a layer norm. Half of each query and key is rotated, the MLP is plain, and
all projections have biases, the head too.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..backends.operations import Backend
from ..config import Fields, ModelConfig
from ..errors import CheckpointError, UnsupportedModelError
from ..layers.block import ParallelOneNorm
from ..layers.embedding import Embedding, LMHead
from ..reference.rotary import Rotation
from .decoder import Decoder
from .parameters import Weights
from .reading import read_activation, read_grouped_heads, read_shared, refuse_other_layers
from .rotary import RotaryConfig, read_partial_rotary
from .tensor_names import Names

TOKENS = {"bos_token_id": 1, "eos_token_id": 2}
"""BOS and EOS token ids if config.json has none"""
SHARE = 0.5
"""Share of each head that is rotated if config.json does not say"""


@dataclass(frozen=True, kw_only=True)
class PhiConfig(ModelConfig):
    """The shared fields and Phi's own."""

    epsilon: float
    """Added to the variance in each layer norm"""
    activation: str
    rotary: RotaryConfig


def read_config(raw: Mapping[str, Any]) -> PhiConfig:
    """Phi's configuration from config.json.

    Raises:
        CheckpointError: a field is missing or invalid.
        UnsupportedModelError: an unsupported activation or kind of rotary scaling, or norms of queries and keys.
    """
    fields = Fields(TOKENS | dict(raw))
    refuse_other_layers(fields)
    if fields.get("qk_layernorm", False):
        raise UnsupportedModelError("config.json: qk_layernorm is true; minillm runs Phi without norms of queries")
    shared = read_grouped_heads(fields) | read_shared(fields, tied_head=False)
    if shared["num_heads"] * shared["head_dim"] != shared["hidden_size"]:
        raise CheckpointError("config.json: head_dim should be hidden_size / num_attention_heads in this family")
    rotary = read_partial_rotary(fields, shared["head_dim"], fields.size("max_position_embeddings", 2048), share=SHARE)
    return PhiConfig(
        model_type="phi",
        **shared,
        intermediate_size=fields.size("intermediate_size"),
        max_positions=rotary.longest,
        keys_follow_length=rotary.stretch is not None,
        epsilon=fields.number("layer_norm_eps", 1e-5),
        activation=read_activation(fields, "hidden_act", "gelu_new"),
        rotary=rotary,
    )


NAMES = Names(prefixes=("model.",), left_out=("rotary_emb.inv_freq",))
"""Tensors of checkpoints: (model.)layers.0.mlp.fc1.weight; lm_head.weight and lm_head.bias."""


def build(config: PhiConfig, weights: Weights, backend: Backend) -> Decoder:
    """Build the model."""
    E, V, rotation = config.hidden_size, config.vocab_size, config.rotary.rotation(backend)
    bias: dict[str, Any] = {"bias": "lm_head.bias", "published": (V,)} if config.output == "tokens" else {}
    tokens = weights.table("embed_tokens", V, E, "vocabulary", **bias if config.tied_head else {})  # `embed` adds none
    head = tokens if config.tied_head else weights.table("lm_head", V, E, "vocabulary", **bias)
    embedding = Embedding(tokens)
    layers = tuple(_build_layer(config, weights.at(f"layers.{i}"), rotation, i) for i in range(config.num_layers))
    final_norm = weights.layer_norm("final_layernorm", E, config.epsilon)
    return Decoder(config.sharded(weights.ranks), embedding, layers, final_norm, LMHead(head))


def _build_layer(config: PhiConfig, weights: Weights, rotation: Rotation, i: int) -> ParallelOneNorm:
    E, F, inputs = config.hidden_size, config.intermediate_size, config.num_heads * config.head_dim
    norm = weights.layer_norm("input_layernorm", E, config.epsilon)
    attention = weights.attention(
        config,
        i,
        qkv=weights.qkv_proj(config, bias=True),
        out=weights.linear("self_attn.dense", E, inputs=inputs, bias=True, split="inputs"),
        rotation=rotation,
    )
    return ParallelOneNorm(norm, attention, norm, weights.mlp("mlp.fc1", "mlp.fc2", E, F, config.activation))
