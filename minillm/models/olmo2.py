"""OLMo 2 (Team OLMo, arXiv 2501.00656).

    x = tokens[ids]
    x = x + norm(attention(x));  x = x + norm(mlp(x))      in each layer
    logits = norm(x) W_lm

Llama whose norms come after attention and MLP, before the sums; and with norms of all of a token's queries together,
and of its keys. OLMo 3 and EXAONE 4 differ in some switches: their files only read their configurations.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..backends.operations import Backend
from ..config import Fields, ModelConfig
from ..layers.block import OutputNorm
from ..layers.embedding import Embedding, LMHead
from ..reference.attention import AttentionSpec
from ..reference.rotary import Rotation
from .decoder import Decoder
from .llama import NAMES
from .parameters import Weights
from .reading import read_activation, read_grouped_heads, read_layers, read_shared, refuse_other_layers
from .rotary import RotaryConfig, read_rotary, refuse_partial

__all__ = ["NAMES", "Olmo2Config", "build", "read_config", "read_olmo"]

END_OF_TEXT = 50279
"""The EOS token id if config.json has none."""


@dataclass(frozen=True, kw_only=True)
class Olmo2Config(ModelConfig):
    """The shared fields, OLMo 2's own and the switches of OLMo 3 and EXAONE 4."""

    epsilon: float
    """Added to the mean square in each norm"""
    activation: str
    bias: bool
    """Whether the four projections of attention have biases"""
    rotary: RotaryConfig
    """Rotary embedding of layers without a window"""
    local: RotaryConfig | None = None
    """Rotary embedding of layers with a window, if it is another (OLMo 3)"""
    windows: tuple[int | None, ...] = ()
    """Sliding window of each layer: positions that a query sees, its own included; None: no window"""
    rotated: tuple[bool, ...] = ()
    """Whether each layer rotates queries and keys"""
    head_norms: bool = False
    """RMS norm of each query and key head, in place of those of all together (EXAONE 4)"""


def read_config(raw: Mapping[str, Any]) -> Olmo2Config:
    """OLMo 2's configuration from config.json.

    Raises:
        CheckpointError: a field is missing or invalid.
        UnsupportedModelError: an unsupported activation or kind of rotary scaling.
    """
    fields = Fields({"eos_token_id": END_OF_TEXT} | dict(raw))
    refuse_other_layers(fields)
    refuse_partial(fields)
    head_dim = read_grouped_heads(fields)["head_dim"]
    rotary = read_rotary(fields, head_dim, fields.size("max_position_embeddings", 2048))
    layers = read_layers(fields)
    return read_olmo(fields, "olmo2", rotary, windows=(None,) * layers, rotated=(True,) * layers)


def read_olmo(fields: Fields, model_type: str, rotary: RotaryConfig, **own: Any) -> Olmo2Config:
    """Read the fields that OLMo 2 and its derivatives share; `own` are fields of `Olmo2Config` that each reads itself.

    Raises:
        As `read_config`.
    """
    shared = read_grouped_heads(fields) | read_shared(fields, tied_head=False)
    return Olmo2Config(
        model_type=model_type,
        **shared,
        intermediate_size=fields.size("intermediate_size"),
        max_positions=rotary.longest,
        keys_follow_length=rotary.stretch is not None,
        epsilon=fields.number("rms_norm_eps", 1e-5),
        activation=read_activation(fields, "hidden_act", "silu"),
        bias=fields.get("attention_bias", False),
        rotary=rotary,
        **own,
    )


def build(config: Olmo2Config, weights: Weights, backend: Backend) -> Decoder:
    """Build the model."""
    E, V, rotation = config.hidden_size, config.vocab_size, config.rotary.rotation(backend)
    embedding = Embedding(weights.table("embed_tokens", V, E, "vocabulary"))
    lm_head = LMHead(embedding.tokens if config.tied_head else weights.table("lm_head", V, E, "vocabulary"))
    local = rotation if config.local is None else config.local.rotation(backend)
    rotations = [rotation if window is None else local for window in config.windows]
    layers = tuple(_build_layer(config, weights.at(f"layers.{i}"), rotations[i], i) for i in range(config.num_layers))
    norm = weights.rms_norm("norm", E, config.epsilon)
    return Decoder(config.sharded(weights.ranks), embedding, layers, norm, lm_head)


def _build_layer(config: Olmo2Config, weights: Weights, rotation: Rotation, i: int) -> OutputNorm:
    E, F = config.hidden_size, config.intermediate_size
    return OutputNorm(
        weights.attention(
            config,
            i,
            AttentionSpec(config.head_dim**-0.5, window=config.windows[i]),
            # Each rank has all that is normalised together.
            qkv=weights.qkv_proj(config, bias=config.bias, split="outputs" if config.head_norms else None),
            out=weights.o_proj(config, bias=config.bias),
            rotation=rotation if config.rotated[i] else None,
            head_norms=weights.head_norms(config, config.epsilon) if config.head_norms else None,
            projection_norms=None if config.head_norms else weights.projection_norms(config, config.epsilon),
        ),
        weights.rms_norm("post_attention_layernorm", E, config.epsilon),
        weights.gated_mlp(E, F, config.activation),
        weights.rms_norm("post_feedforward_layernorm", E, config.epsilon),
    )
