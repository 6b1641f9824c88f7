"""Command R (Cohere, 2024).

    x = tokens[ids]
    x = x + attention(norm(x)) + mlp(norm(x))              in each layer
    logits = s norm(x) W_lm

Attention and MLP read the same norm of x, a layer norm without bias, and the MLP is gated. Checkpoints have rotated
pairs side by side. Command R7B and later ones (`cohere2`) differ in some switches: their file only reads their
configuration.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..backends.operations import Backend
from ..config import Fields, ModelConfig
from ..errors import UnsupportedModelError
from ..layers.block import ParallelOneNorm
from ..layers.embedding import Embedding, LMHead
from ..layers.norm import LayerNorm
from ..reference.attention import AttentionSpec
from ..reference.rotary import Rotation
from .decoder import Decoder
from .llama import NAMES
from .parameters import Weights
from .reading import read_activation, read_grouped_heads, read_layers, read_shared, refuse_other_layers
from .rotary import RotaryConfig, read_rotary, refuse_partial

__all__ = ["NAMES", "CohereConfig", "build", "read_cohere", "read_config"]

TOKENS = {"bos_token_id": 5, "eos_token_id": 255_001}
"""BOS and EOS token ids if config.json has none"""
BASE = 500_000.0
"""Base of rotary embedding if config.json has none"""


@dataclass(frozen=True, kw_only=True)
class CohereConfig(ModelConfig):
    """The shared fields, Command R's own and the switches of later models."""

    epsilon: float
    """Added to the variance in each layer norm"""
    activation: str
    rotary: RotaryConfig
    bias: bool
    """Whether the four projections of attention have biases"""
    logit_scale: float
    """Factor of logits"""
    windows: tuple[int | None, ...]
    """Sliding window of each layer: positions that a query sees, its own included; None: no window"""
    rotated: tuple[bool, ...]
    """Whether each layer rotates queries and keys"""


def read_config(raw: Mapping[str, Any]) -> CohereConfig:
    """Command R's configuration from config.json.

    Raises:
        CheckpointError: a field is missing or invalid.
        UnsupportedModelError: an unsupported activation or kind of rotary scaling, or norms of queries and keys.
    """
    fields = Fields(TOKENS | dict(raw))
    refuse_other_layers(fields)
    if fields.get("use_qk_norm", False):
        raise UnsupportedModelError(
            "config.json: use_qk_norm is true; minillm runs Command R without norms of queries and keys"
        )
    layers = read_layers(fields)
    return read_cohere(fields, "cohere", base=BASE, windows=(None,) * layers, rotated=(True,) * layers)


def read_cohere(fields: Fields, model_type: str, *, base: float, **own: Any) -> CohereConfig:
    """Read the fields that all versions share; `own` are fields of `CohereConfig` that each reads itself.

    Raises:
        As `read_config`.
    """
    refuse_partial(fields)
    shared = read_grouped_heads(fields) | read_shared(fields, tied_head=True)
    rotary = read_rotary(fields, shared["head_dim"], fields.size("max_position_embeddings", 8192), base=base)
    return CohereConfig(
        model_type=model_type,
        **shared,
        intermediate_size=fields.size("intermediate_size"),
        max_positions=rotary.longest,
        keys_follow_length=rotary.stretch is not None,
        epsilon=fields.number("layer_norm_eps", 1e-5),
        activation=read_activation(fields, "hidden_act", "silu"),
        rotary=rotary,
        bias=fields.get("attention_bias", False),
        logit_scale=fields.number("logit_scale", 0.0625),
        **own,
    )


def build(config: CohereConfig, weights: Weights, backend: Backend) -> Decoder:
    """Build the model."""
    E, V, rotation = config.hidden_size, config.vocab_size, config.rotary.rotation(backend)
    embedding = Embedding(weights.table("embed_tokens", V, E, "vocabulary"))
    head = embedding.tokens if config.tied_head else weights.table("lm_head", V, E, "vocabulary")
    layers = tuple(_build_layer(config, weights.at(f"layers.{i}"), rotation, i) for i in range(config.num_layers))
    norm, lm_head = LayerNorm(weights.norm("norm", E), config.epsilon), LMHead(head, scale=config.logit_scale)
    return Decoder(config.sharded(weights.ranks), embedding, layers, norm, lm_head)


def _build_layer(config: CohereConfig, weights: Weights, rotation: Rotation, i: int) -> ParallelOneNorm:
    E, F, pairs = config.hidden_size, config.intermediate_size, len(config.rotary.frequencies)
    norm = LayerNorm(weights.norm("input_layernorm", E), config.epsilon)
    attention = weights.attention(
        config,
        i,
        AttentionSpec(config.head_dim**-0.5, window=config.windows[i]),
        qkv=weights.qkv_proj(config, bias=config.bias, pairs=pairs),
        out=weights.o_proj(config, bias=config.bias),
        rotation=rotation if config.rotated[i] else None,
    )
    return ParallelOneNorm(norm, attention, norm, weights.gated_mlp(E, F, config.activation))
