"""StarCoder2 (Lozhkov et al., arXiv 2402.19173).

    x = tokens[ids]
    x = x + attention(norm(x));  x = x + mlp(norm(x))      in each layer
    logits = norm(x) W_lm

The norm is layer norm and the MLP is plain, both with biases. Positions enter by rotating queries and keys, several
query heads share a key/value head, and each query may see a sliding window only.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..backends.operations import Backend
from ..config import Fields, ModelConfig
from ..layers.block import PreNorm
from ..layers.embedding import Embedding, LMHead
from ..reference.attention import AttentionSpec
from ..reference.rotary import Rotation
from .decoder import Decoder
from .parameters import Weights
from .reading import read_activation, read_grouped_heads, read_layer_types, read_shared, refuse_other_layers
from .rotary import RotaryConfig, read_rotary, refuse_partial
from .tensor_names import Names

END_OF_TEXT = 50256
"""The BOS and EOS token id if config.json has none."""

KV_HEADS = 2
"""Key/value heads if config.json has none."""


@dataclass(frozen=True, kw_only=True)
class Starcoder2Config(ModelConfig):
    """The shared fields and StarCoder2's own."""

    epsilon: float
    """Added to the variance in each layer norm"""
    activation: str
    rotary: RotaryConfig
    biases: bool
    """Projections have biases; norms always have"""


def read_config(raw: Mapping[str, Any]) -> Starcoder2Config:
    """StarCoder2's configuration from config.json; `sliding_window` null or absent means full causal attention.

    Raises:
        CheckpointError: a field is missing or invalid.
        UnsupportedModelError: an unsupported activation or kind of rotary scaling.
    """
    fields = Fields({"bos_token_id": END_OF_TEXT, "eos_token_id": END_OF_TEXT} | dict(raw))
    refuse_other_layers(fields, windows=True)
    refuse_partial(fields)
    window = None if fields.raw.get("sliding_window") is None else fields.size("sliding_window")
    read_layer_types(fields, ("full_attention" if window is None else "sliding_attention",))
    shared = read_grouped_heads(fields, KV_HEADS) | read_shared(fields, tied_head=True)
    rotary = read_rotary(fields, shared["head_dim"], fields.size("max_position_embeddings"))
    return Starcoder2Config(
        model_type="starcoder2",
        **shared,
        intermediate_size=fields.size("intermediate_size"),
        max_positions=rotary.longest,
        keys_follow_length=rotary.stretch is not None,
        epsilon=fields.number("norm_epsilon", 1e-5),
        activation=read_activation(fields, "hidden_act", "gelu_pytorch_tanh"),
        rotary=rotary,
        biases=fields.get("use_bias", True),
        windows=(window,) * shared["num_layers"],
    )


NAMES = Names(prefixes=("model.",))
"""Tensors of checkpoints: layers.0.mlp.c_fc.weight or model.layers.0..."""


def build(config: Starcoder2Config, weights: Weights, backend: Backend) -> Decoder:
    """Build the model."""
    E, V, rotation = config.hidden_size, config.vocab_size, config.rotary.rotation(backend)
    embedding = Embedding(weights.table("embed_tokens", V, E, "vocabulary"))
    lm_head = LMHead(embedding.tokens if config.tied_head else weights.table("lm_head", V, E, "vocabulary"))
    layers = tuple(_build_layer(config, weights.at(f"layers.{i}"), rotation, i) for i in range(config.num_layers))
    return Decoder(
        config.sharded(weights.ranks), embedding, layers, weights.layer_norm("norm", E, config.epsilon), lm_head
    )


def _build_layer(config: Starcoder2Config, weights: Weights, rotation: Rotation, i: int) -> PreNorm:
    E, F, bias = config.hidden_size, config.intermediate_size, config.biases
    return PreNorm(
        weights.layer_norm("input_layernorm", E, config.epsilon),
        weights.attention(
            config,
            i,
            AttentionSpec(config.head_dim**-0.5, window=config.windows[i]),
            qkv=weights.qkv_proj(config, bias=bias),
            out=weights.o_proj(config, bias=bias),
            rotation=rotation,
        ),
        weights.layer_norm("post_attention_layernorm", E, config.epsilon),
        weights.mlp("mlp.c_fc", "mlp.c_proj", E, F, config.activation, bias=bias),
    )
