"""Llama (Touvron et al., arXiv 2302.13971; Llama 2, arXiv 2307.09288; Llama 3, arXiv 2407.21783) and its derivatives.

    x = tokens[ids]
    x = x + attention(norm(x));  x = x + mlp(norm(x))      in each layer
    logits = norm(x) W_lm

The norm is RMS norm, positions enter by rotating queries and keys, several query heads may share a key/value head, and
the MLP is gated. Mistral, Qwen2 and Qwen3 differ in one switch each: their files only read their configurations.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..backends.operations import Backend
from ..backends.weights import Tensor
from ..config import Fields, ModelConfig
from ..errors import CheckpointError
from ..layers.attention import Attention, HeadNorms
from ..layers.block import PreNorm
from ..layers.embedding import Embedding
from ..layers.head import LMHead
from ..layers.mlp import GatedMLP
from ..layers.norm import RMSNorm
from ..reference.rotary import Rotation
from .base import Shapes, Tensors, linear_tensors, shorten, without_tied_head
from .decoder import Decoder
from .outline import Component, Embed, Gate, Linear, Norm, Outline, head, self_attention
from .reading import read_activation, read_heads, read_layers, refuse_experts, refuse_other_layers
from .rotary import RotaryConfig, read_rotary, refuse_partial

TOKENS = {"bos_token_id": 1, "eos_token_id": 2}
"""BOS and EOS token ids if config.json has none."""


@dataclass(frozen=True, kw_only=True)
class LlamaConfig(ModelConfig):
    """The shared fields, Llama's own and the switches of its derivatives."""

    epsilon: float
    """Added to the mean square in each norm"""
    activation: str
    rotary: RotaryConfig
    tied_head: bool
    """The LM head is the token embedding"""
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    head_norms: bool = False
    """RMS norm of each query and key head (Qwen3)"""
    windows: tuple[int | None, ...]
    """Sliding window of each layer: positions that a query sees, its own included; None: no window"""


def read_config(raw: Mapping[str, Any]) -> LlamaConfig:
    """Llama's configuration from config.json.

    Raises:
        CheckpointError: a field is missing or invalid.
        UnsupportedModelError: an unsupported activation or kind of rotary scaling.
    """
    fields = Fields(TOKENS | dict(raw))
    refuse_other_layers(fields)
    bias = fields.get("attention_bias", False)
    return read_kin(fields, "llama", qkv_bias=bias, out_bias=bias, mlp_bias=fields.get("mlp_bias", False))


def read_kin(
    fields: Fields, model_type: str, *, windows: tuple[int | None, ...] | None = None, **switches: Any
) -> LlamaConfig:
    """Read the fields that Llama and its derivatives share.

    Args:
        fields: config.json
        model_type: the family's name
        windows: sliding window of each layer; None: no layer has one
        **switches: fields of `LlamaConfig` in which the family differs from Llama

    Raises:
        As `read_config`.
    """
    hidden_size, heads = fields.size("hidden_size"), fields.size("num_attention_heads")
    kv_heads = fields.size("num_key_value_heads", heads)
    if heads % kv_heads:
        raise CheckpointError(
            f"config.json: num_attention_heads {heads} should be a multiple of num_key_value_heads {kv_heads}"
        )
    head_dim = switches.pop("head_dim", None)
    if head_dim is None:
        head_dim = fields.size("head_dim") if fields.raw.get("head_dim") is not None else read_heads(fields)[2]
    refuse_partial(fields)
    refuse_experts(fields)
    layers = read_layers(fields)
    rotary = read_rotary(fields, head_dim, fields.size("max_position_embeddings"))
    return LlamaConfig(
        model_type=model_type,
        hidden_size=hidden_size,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=fields.size("intermediate_size"),
        vocab_size=fields.size("vocab_size"),
        max_positions=rotary.longest,
        bos_token_id=fields.token_id("bos_token_id"),
        eos_token_ids=fields.token_ids("eos_token_id"),
        keys_follow_length=rotary.stretch is not None,
        epsilon=fields.number("rms_norm_eps", 1e-6),
        activation=read_activation(fields, "hidden_act", "silu"),
        rotary=rotary,
        tied_head=fields.get("tie_word_embeddings", False),
        windows=windows or (None,) * layers,
        **switches,
    )


def tensor_table(config: LlamaConfig) -> Shapes:
    """Name (without `model.`) and shape of every tensor."""
    E, F, V, D = config.hidden_size, config.intermediate_size, config.vocab_size, config.head_dim
    Q, KV = config.num_heads * D, config.num_kv_heads * D
    linears = {
        "self_attn.q_proj": (Q, E, config.qkv_bias),
        "self_attn.k_proj": (KV, E, config.qkv_bias),
        "self_attn.v_proj": (KV, E, config.qkv_bias),
        "self_attn.o_proj": (E, Q, config.out_bias),
        "mlp.gate_proj": (F, E, config.mlp_bias),
        "mlp.up_proj": (F, E, config.mlp_bias),
        "mlp.down_proj": (E, F, config.mlp_bias),
    }
    table: Shapes = {"embed_tokens.weight": (V, E), "norm.weight": (E,)}
    for i in range(config.num_layers):
        for name, (outputs, inputs, bias) in linears.items():
            table |= linear_tensors(f"layers.{i}.{name}", outputs, inputs, bias)
        for name in ("input_layernorm", "post_attention_layernorm"):
            table[f"layers.{i}.{name}.weight"] = (E,)
        if config.head_norms:
            table |= {f"layers.{i}.self_attn.{name}_norm.weight": (D,) for name in "qk"}
    if not config.tied_head:
        table["lm_head.weight"] = (V, E)
    return table


def canonical_names(stored: Mapping[str, Tensor], config: LlamaConfig) -> dict[str, Tensor]:
    """Tensors by canonical name, without the prefix `model.`, copies of a tied head and stored frequencies."""
    tensors = shorten(stored, "model.", left_out=("rotary_emb.inv_freq",))
    return without_tied_head(tensors, "embed_tokens.weight") if config.tied_head else tensors


def build(config: LlamaConfig, stored: Mapping[str, Tensor], backend: Backend) -> Decoder:
    """Build the model from tensors under canonical names.

    Raises:
        CheckpointError: a tensor is missing, unexpected or of the wrong shape.
    """
    tensors, rotation = Tensors(stored, tensor_table(config), backend), config.rotary.rotation(backend)
    embedding = Embedding(tensors.table("embed_tokens", "vocabulary"))
    lm_head = LMHead(embedding.tokens if config.tied_head else tensors.table("lm_head", "vocabulary"))
    layers = tuple(_build_layer(config, tensors, rotation, i) for i in range(config.num_layers))
    return Decoder(config, embedding, layers, RMSNorm(tensors.norm("norm"), config.epsilon), lm_head)


def _build_layer(config: LlamaConfig, tensors: Tensors, rotation: Rotation, i: int) -> PreNorm:
    attention, mlp = f"layers.{i}.self_attn", f"layers.{i}.mlp"
    norms = None
    if config.head_norms:
        norms = HeadNorms(tensors.norm(f"{attention}.q_norm"), tensors.norm(f"{attention}.k_norm"), config.epsilon)
    return PreNorm(
        RMSNorm(tensors.norm(f"layers.{i}.input_layernorm"), config.epsilon),
        Attention(
            layer=i,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            scale=config.head_dim**-0.5,
            qkv=tensors.linear(f"{attention}.qkv", *(f"{attention}.{name}_proj" for name in "qkv")),
            out=tensors.linear(f"{attention}.o_proj"),
            rotation=rotation,
            head_norms=norms,
            window=config.windows[i],
        ),
        RMSNorm(tensors.norm(f"layers.{i}.post_attention_layernorm"), config.epsilon),
        GatedMLP(
            tensors.linear(f"{mlp}.gate_up", f"{mlp}.gate_proj", f"{mlp}.up_proj"),
            tensors.linear(f"{mlp}.down_proj"),
            config.activation,
        ),
    )


def outline(config: LlamaConfig) -> Outline:
    """The components in execution order, for `accounting`."""
    E = config.hidden_size
    return Outline(
        before=(Embed(name="embedding", width=E, vectors=config.vocab_size),),
        layers=tuple(_outline_of_layer(config, window) for window in config.windows),
        after=(Norm(name="final norm", width=E, mean=False),),
        head=head(config, tied=config.tied_head),
    )


def _outline_of_layer(config: LlamaConfig, window: int | None) -> tuple[Component, ...]:
    E, F, D = config.hidden_size, config.intermediate_size, config.head_dim
    between: tuple[Component, ...] = (config.rotary.outline(config),)
    if config.head_norms:
        rows = {"Q norm": config.num_heads, "K norm": config.num_kv_heads}
        between = (*(Norm(name=name, width=D, rows=heads, mean=False) for name, heads in rows.items()), *between)
    return (
        Norm(name="attention norm", width=E, mean=False),
        *self_attention(config, bias=config.qkv_bias, out_bias=config.out_bias, between=between, window=window),
        Norm(name="MLP norm", width=E, mean=False),
        Linear(name="MLP gate and up", inputs=E, outputs=2 * F, bias=config.mlp_bias),
        Gate(name="gate", width=F, activation=config.activation),
        Linear(name="MLP down", inputs=F, outputs=E, bias=config.mlp_bias, residual=True),
    )


def _shape(E: int, L: int, H: int, K: int, F: int, **more: Any) -> dict[str, Any]:
    sizes = {"hidden_size": E, "num_hidden_layers": L, "num_attention_heads": H, "num_key_value_heads": K}
    return {"model_type": "llama", "vocab_size": 32000, "intermediate_size": F, **sizes, **more}


_LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_LLAMA3_TEXT: dict[str, Any] = {
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "rms_norm_eps": 1e-5,
}

SHAPES: dict[str, dict[str, Any]] = {
    "tinyllama-1.1b": _shape(2048, 22, 32, 4, 5632, max_position_embeddings=2048),
    "smollm2-135m": _shape(
        576,
        30,
        9,
        3,
        1536,
        vocab_size=49152,
        max_position_embeddings=8192,
        rope_theta=100000.0,
        tie_word_embeddings=True,
    ),
    "llama-2-7b": _shape(4096, 32, 32, 32, 11008, max_position_embeddings=4096),
    "llama-2-13b": _shape(5120, 40, 40, 40, 13824, max_position_embeddings=4096),
    "llama-2-70b": _shape(8192, 80, 64, 8, 28672, max_position_embeddings=4096),
    "llama-3.2-1b": _shape(
        2048,
        16,
        32,
        8,
        8192,
        **_LLAMA3_TEXT,
        head_dim=64,
        tie_word_embeddings=True,
        rope_scaling=_LLAMA3 | {"factor": 32.0, "original_max_position_embeddings": 8192},
    ),
    "llama-3.1-8b": _shape(
        4096,
        32,
        32,
        8,
        14336,
        **_LLAMA3_TEXT,
        rope_scaling=_LLAMA3 | {"factor": 8.0, "original_max_position_embeddings": 8192},
    ),
}
"""Published sizes, with the values of their config.json."""
