"""StableLM (Stability AI, 2023; StableLM 2: Bellagente et al., arXiv 2402.17834): Llama with layer norms.

A quarter of each query and key is rotated. Some models compute attention and MLP side by side, from one norm of x.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..backends.operations import Backend
from ..config import Fields, ModelConfig
from ..errors import UnsupportedModelError
from ..layers.block import ParallelOneNorm, PreNorm
from ..layers.embedding import Embedding, LMHead
from ..reference.rotary import Rotation
from .decoder import Decoder
from .llama import NAMES
from .parameters import Weights
from .reading import read_activation, read_grouped_heads, read_shared, refuse_other_layers
from .rotary import RotaryConfig, read_partial_rotary

__all__ = ["NAMES", "StableLmConfig", "build", "read_config"]

DEFAULTS = {"bos_token_id": 0, "eos_token_id": 0, "num_key_value_heads": 32}
"""Fields that config.json may lack"""
SHARE = 0.25
"""Share of each head that is rotated if config.json does not say"""


@dataclass(frozen=True, kw_only=True)
class StableLmConfig(ModelConfig):
    """The shared fields and StableLM's own."""

    epsilon: float
    """Added to the variance in each layer norm"""
    activation: str
    rotary: RotaryConfig
    qkv_bias: bool
    parallel: bool
    """True: attention and MLP read one norm of x; False: the MLP reads a norm of x + attention"""


def read_config(raw: Mapping[str, Any]) -> StableLmConfig:
    """StableLM's configuration from config.json.

    Raises:
        CheckpointError: a field is missing or invalid.
        UnsupportedModelError: an unsupported activation or kind of rotary scaling, or norms of queries and keys.
    """
    fields = Fields(DEFAULTS | dict(raw))
    refuse_other_layers(fields)
    if fields.get("qk_layernorm", False):
        raise UnsupportedModelError(
            "config.json: qk_layernorm is true; minillm runs StableLM without norms of queries and keys"
        )
    raw_heads = Fields({name: value for name, value in fields.raw.items() if name != "head_dim"})
    shared = read_grouped_heads(raw_heads) | read_shared(fields, tied_head=False)
    positions = fields.size("max_position_embeddings", 4096)
    rotary = read_partial_rotary(fields, shared["head_dim"], positions, share=SHARE)
    return StableLmConfig(
        model_type="stablelm",
        **shared,
        intermediate_size=fields.size("intermediate_size"),
        max_positions=rotary.longest,
        keys_follow_length=rotary.stretch is not None,
        epsilon=fields.number("layer_norm_eps", 1e-5),
        activation=read_activation(fields, "hidden_act", "silu"),
        rotary=rotary,
        qkv_bias=fields.get("use_qkv_bias", False),
        parallel=fields.get("use_parallel_residual", False),
    )


def build(config: StableLmConfig, weights: Weights, backend: Backend) -> Decoder:
    """Build the model."""
    E, V, rotation = config.hidden_size, config.vocab_size, config.rotary.rotation(backend)
    embedding = Embedding(weights.table("embed_tokens", V, E, "vocabulary"))
    lm_head = LMHead(embedding.tokens if config.tied_head else weights.table("lm_head", V, E, "vocabulary"))
    layers = tuple(_build_layer(config, weights.at(f"layers.{i}"), rotation, i) for i in range(config.num_layers))
    norm = weights.layer_norm("norm", E, config.epsilon)
    return Decoder(config.sharded(weights.ranks), embedding, layers, norm, lm_head)


def _build_layer(config: StableLmConfig, weights: Weights, rotation: Rotation, i: int) -> ParallelOneNorm | PreNorm:
    E, F = config.hidden_size, config.intermediate_size
    norm = weights.layer_norm("input_layernorm", E, config.epsilon)
    attention = weights.attention(
        config,
        i,
        qkv=weights.qkv_proj(config, bias=config.qkv_bias),
        out=weights.o_proj(config),
        rotation=rotation,
    )
    if config.parallel:
        return ParallelOneNorm(norm, attention, norm, weights.gated_mlp(E, F, config.activation))
    mlp_norm = weights.layer_norm("post_attention_layernorm", E, config.epsilon)
    return PreNorm(norm, attention, mlp_norm, weights.gated_mlp(E, F, config.activation))
