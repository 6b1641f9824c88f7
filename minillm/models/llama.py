"""Llama (Touvron et al., arXiv 2302.13971; Llama 2, arXiv 2307.09288; Llama 3, arXiv 2407.21783) and its derivatives.

    x = tokens[ids]
    x = x + attention(norm(x));  x = x + mlp(norm(x))      in each layer
    logits = norm(x) W_lm

The norm is RMS norm, positions enter by rotating queries and keys, several query heads may share a key/value head, and
the MLP is gated. Mistral, Qwen2, Qwen3, SmolLM3, Granite and Phi-3 differ in some switches: their files only read their
configurations.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from ..backends.operations import Backend
from ..config import Fields, ModelConfig
from ..layers.block import PreNorm, Sandwich
from ..layers.embedding import Embedding, LMHead
from ..layers.experts import ExpertMLP
from ..layers.mamba import Mamba2, MambaBlock
from ..layers.mlp import GatedMLP
from ..layers.norm import RMSNorm
from ..reference.attention import AttentionSpec
from ..reference.rotary import Rotation
from .decoder import Decoder
from .parameters import Weights
from .reading import read_activation, read_grouped_heads, read_shared, refuse_experts, refuse_other_layers
from .rotary import BASE, RotaryConfig, read_rotary, refuse_partial
from .tensor_names import Names

C = TypeVar("C", bound="LlamaConfig")

TOKENS = {"bos_token_id": 1, "eos_token_id": 2}
"""BOS and EOS token ids if config.json has none."""


@dataclass(frozen=True, kw_only=True)
class LlamaConfig(ModelConfig):
    """The shared fields, Llama's own and the switches of its derivatives."""

    epsilon: float
    """Added to the mean square in each norm"""
    activation: str
    rotary: RotaryConfig
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    head_norms: bool = False
    """RMS norm of each query and key head (Qwen3)"""
    projection_norms: bool = False
    """RMS norm of all queries of a token together, and of its keys (OLMoE)"""
    rotated: tuple[bool, ...]
    """Whether each layer rotates queries and keys (SmolLM3 leaves some out)"""
    embedding_scale: float = 1.0
    """Factor of the embedding (Granite)"""
    given_scale: float = 1.0
    """Factor of vectors in its place (`Embedding.given_scale`)"""
    score_scale: float | None = None
    """Factor of attention scores (Granite); None: 1 / sqrt D"""
    logit_scale: float = 1.0
    """Factor of logits (Granite)"""
    fused: bool = False
    """Checkpoints have Q, K and V as one tensor, gate and up as another (Phi-3)"""
    fused_mlp: bool = False
    """Checkpoints have gate and up as one tensor (GLM-4)"""
    paired: bool = False
    """Checkpoints have the numbers of each rotated pair side by side (GLM-4, ERNIE 4.5, Helium)"""
    output_norms: bool = False
    """Norms after attention and MLP too, before the sums (GLM-4-0414)"""
    sinks: bool = False
    """Each head has a sink (gpt-oss)"""
    norms_follow_rotation: bool = False
    """Queries and keys are rotated before the norms of each head (Hunyuan)"""


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
    fields: Fields,
    model_type: str,
    *,
    kind: type[C] = LlamaConfig,  # type: ignore[assignment]
    windows: tuple[int | None, ...] | None = None,
    rotated: tuple[bool, ...] | None = None,
    head_dim: int | None = None,
    tied_head: bool = False,
    base: float = BASE,
    rotary: RotaryConfig | None = None,
    **switches: Any,
) -> C:
    """Read the fields that Llama and its derivatives share.

    Args:
        fields: config.json
        model_type: the family's name
        kind: the family's configuration, if it has one of its own
        windows: sliding window of each layer; None: no layer has one
        rotated: whether each layer rotates queries and keys; None: all do
        head_dim: D if config.json has none; None: E / H
        tied_head: whether the head is tied if config.json does not say
        base: the rotary embedding's if config.json has none
        rotary: rotary embedding if the family reads it itself
        **switches: fields of `kind` in which the family differs from Llama

    Raises:
        As `read_config`.
    """
    shared = read_grouped_heads(fields, head_dim=head_dim) | read_shared(fields, tied_head=tied_head)
    if not switches.get("num_experts"):
        refuse_experts(fields)
    if rotary is None:
        refuse_partial(fields)
        rotary = read_rotary(fields, shared["head_dim"], fields.size("max_position_embeddings"), base=base)
    return kind(
        model_type=model_type,
        **shared,
        intermediate_size=fields.size("intermediate_size"),
        max_positions=rotary.longest,
        keys_follow_length=rotary.stretch is not None or rotary.short is not None,
        keys_change_beyond=rotary.short,
        activation=read_activation(fields, "hidden_act", "silu"),
        rotary=rotary,
        windows=windows or (None,) * shared["num_layers"],
        rotated=rotated or (True,) * shared["num_layers"],
        **{"epsilon": fields.number("rms_norm_eps", 1e-6)} | switches,
    )


NAMES = Names(prefixes=("model.",), left_out=("rotary_emb.inv_freq",))
"""Tensors of checkpoints: (model.)layers.0.mlp.up_proj.weight; some hold the rotary frequencies."""


def gated_mlp(config: LlamaConfig, weights: Weights, i: int) -> GatedMLP:
    """The MLP of layer i."""
    E, F = config.hidden_size, config.intermediate_size
    return weights.gated_mlp(E, F, config.activation, bias=config.mlp_bias, fused=config.fused or config.fused_mlp)


def build(
    config: LlamaConfig,
    weights: Weights,
    backend: Backend,
    *,
    mlp: Callable[[Any, Weights, int], GatedMLP | ExpertMLP] = gated_mlp,
    mamba: Callable[[Any, Weights, int], Mamba2 | None] = lambda config, weights, i: None,
) -> Decoder:
    """Build the model.

    `mlp` builds a layer's MLP from its weights and its number, `mamba` what a layer has in place of attention.
    """
    E, V, rotation = config.hidden_size, config.vocab_size, config.rotary.rotation(backend)
    embedding = Embedding(
        weights.table("embed_tokens", V, E, "vocabulary"), scale=config.embedding_scale, given_scale=config.given_scale
    )
    head = embedding.tokens if config.tied_head else weights.table("lm_head", V, E, "vocabulary")
    lm_head = LMHead(head, scale=config.logit_scale)
    layers = tuple(
        _build_layer(config, weights.at(f"layers.{i}"), rotation, i, mlp, mamba) for i in range(config.num_layers)
    )
    return Decoder(
        config.sharded(weights.ranks), embedding, layers, weights.rms_norm("norm", E, config.epsilon), lm_head
    )


def _build_layer(
    config: LlamaConfig,
    weights: Weights,
    rotation: Rotation,
    i: int,
    mlp: Callable[..., GatedMLP | ExpertMLP],
    mamba: Callable[..., Mamba2 | None],
) -> PreNorm | Sandwich | MambaBlock:
    E, D = config.hidden_size, config.head_dim

    def norm(name: str) -> RMSNorm:
        return weights.rms_norm(name, E, config.epsilon)

    scale = D**-0.5 if config.score_scale is None else config.score_scale
    attention_norm = norm("input_layernorm")
    recurrence = mamba(config, weights, i)
    if recurrence is not None:
        return MambaBlock(attention_norm, recurrence, norm("post_attention_layernorm"), mlp(config, weights, i))
    sinks = weights.vector("self_attn.sinks", config.num_heads, split="outputs") if config.sinks else None
    attention = weights.attention(
        config,
        i,
        AttentionSpec(scale, window=config.windows[i], sinks=sinks),
        qkv=weights.qkv_proj(
            config,
            bias=config.qkv_bias,
            split=None if config.projection_norms else "outputs",  # each rank has all that is normalised together
            fused=config.fused,
            pairs=len(config.rotary.frequencies) if config.paired else None,
        ),
        out=weights.o_proj(config, bias=config.out_bias),
        rotation=rotation if config.rotated[i] else None,
        head_norms=weights.head_norms(config, config.epsilon) if config.head_norms else None,
        norms_follow_rotation=config.norms_follow_rotation,
        projection_norms=weights.projection_norms(config, config.epsilon) if config.projection_norms else None,
    )
    if config.output_norms:
        attention_out_norm, mlp_norm = norm("post_self_attn_layernorm"), norm("post_attention_layernorm")
        dense = gated_mlp(config, weights, i)
        return Sandwich(attention_norm, attention, attention_out_norm, mlp_norm, dense, norm("post_mlp_layernorm"))
    return PreNorm(attention_norm, attention, norm("post_attention_layernorm"), mlp(config, weights, i))
