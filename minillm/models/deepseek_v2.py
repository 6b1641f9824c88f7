"""DeepSeek-V2 and V2-Lite (DeepSeek-AI, arXiv 2405.04434): Llama with latent attention, and experts chosen by softmax.

The first layers have one MLP each, and all tokens share some experts. DeepSeek-V3, GLM-4.7-Flash and Youtu differ in
their routers and switches: their files only read their configurations.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..backends.operations import Backend
from ..config import Fields
from ..errors import CheckpointError, UnsupportedModelError
from ..layers.block import PreNorm
from ..layers.embedding import Embedding, LMHead
from ..layers.latent_attention import LatentAttention
from ..layers.norm import RMSNorm
from ..reference.attention import AttentionSpec
from ..reference.rotary import Rotation
from .decoder import Decoder
from .glm4_moe import read_shared_experts
from .llama import NAMES, TOKENS, read_kin
from .mixtral import ExpertConfig
from .parameters import HeadOrder, Weights
from .qwen3_moe import named_mlp
from .reading import merge_names, read_layers, refuse_other_layers
from .rotary import KINDS, read_rotary, refuse_partial, score_factor

__all__ = ["NAMES", "LatentConfig", "build", "read_config", "read_latent", "refuse_other_experts"]

LATENT_EPSILON = 1e-6
"""Added to the mean square in the norms of latents, whatever `rms_norm_eps` is"""
SIZES = {"qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "kv_lora_rank": 512, "q_lora_rank": 1536}
"""Widths of latent attention if config.json has none"""
DEFAULTS = TOKENS | {"max_position_embeddings": 2048, "n_shared_experts": 2}
"""Fields that config.json may lack"""


@dataclass(frozen=True, kw_only=True)
class LatentConfig(ExpertConfig):
    """The fields of a mixture of experts and of latent attention.

    The cache keeps one key of r + C numbers for all heads: `num_kv_heads` is 1, `head_dim` r + C, `value_dim` C.
    """

    query_rank: int
    """Q, width of the queries' latent; 0: they have none"""
    nope_dim: int
    """n: numbers of a query or key that are not rotated, before absorption"""
    expanded_dim: int
    """V: width of a head's values after expansion"""

    @property
    def expanded_widths(self) -> tuple[int, ...]:
        """r + n and V."""
        return self.rope_dim + self.nope_dim, self.expanded_dim

    @property
    def rope_dim(self) -> int:
        """r: rotated numbers of a query or key."""
        return self.head_dim - self.value_dim


def read_config(raw: Mapping[str, Any]) -> LatentConfig:
    """DeepSeek-V2's configuration from config.json.

    Raises:
        As `llama.read_config`.
    """
    named = merge_names(raw, {"n_routed_experts": "num_experts"})
    fields = Fields(DEFAULTS | {name: value for name, value in named.items() if value is not None})
    refuse_other_experts(fields, "softmax")
    method = fields.choice("topk_method", "greedy", ("greedy", "group_limited_greedy"))
    if fields.get("norm_topk_prob", False):
        raise UnsupportedModelError(f"{fields.source}: norm_topk_prob is true; in this family minillm runs false")
    if method == "greedy":
        fields = Fields({**fields.raw, "n_group": 1, "topk_group": 1})
    fields.size("num_experts_per_tok")
    experts = read_shared_experts(fields, experts=64, default_width=1407)
    router = replace(experts.pop("router"), sigmoid=False, group_best=1)
    return read_latent(
        raw,
        fields,
        "deepseek_v2",
        mlp_bias=fields.get("mlp_bias", False),
        normalised=False,
        **experts | {"router": router, "corrected": False},
    )


def refuse_other_experts(fields: Fields, scores: str) -> None:
    """Refuse experts in some of the later layers, and another function of the router's logits.

    Raises:
        UnsupportedModelError: config.json asks for either.
    """
    if fields.get("moe_layer_freq", 1) != 1:
        raise UnsupportedModelError(
            f"{fields.source}: moe_layer_freq is {fields.raw['moe_layer_freq']!r:.60}; in this family minillm runs 1"
        )
    fields.choice("scoring_func", scores, (scores,))


def read_latent(
    raw: Mapping[str, Any],
    fields: Fields,
    model_type: str,
    *,
    sizes: Mapping[str, int] = SIZES,
    interleaved: bool = True,
    kinds: tuple[str, ...] = KINDS,
    **switches: Any,
) -> LatentConfig:
    """Read the fields of latent attention, and those of Llama.

    Args:
        raw: config.json, where a `q_lora_rank` of null says that queries have full rank
        fields: the same, with defaults
        model_type: the family's name
        sizes: widths if config.json has none
        interleaved: whether checkpoints have the numbers of each rotated pair side by side
        kinds: of rotary scaling
        **switches: fields of `LatentConfig`; without experts all layers have one MLP

    Raises:
        As `llama.read_config`.
    """
    refuse_other_layers(fields)
    refuse_partial(fields)
    H = fields.size("num_attention_heads")
    if (K := fields.size("num_key_value_heads", H)) != H:
        raise CheckpointError(
            f"{fields.source}: num_key_value_heads {K} should be num_attention_heads {H}, for latent attention"
        )
    r, n, V, C = (
        fields.size(name, sizes[name])
        for name in ("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "kv_lora_rank")
    )
    full_rank = "q_lora_rank" in raw and raw["q_lora_rank"] is None
    positions, bias = fields.size("max_position_embeddings"), fields.get("attention_bias", False)
    without: dict[str, Any] = {
        "num_experts": 0,
        "expert_size": 0,
        "normalised": False,
        "sparse": (False,) * read_layers(fields),
    }
    options: dict[str, Any] = {} if "num_experts" in switches else without
    return read_kin(
        Fields({**fields.raw, "num_key_value_heads": 1, "head_dim": r + C}, fields.source),
        model_type,
        kind=LatentConfig,
        rotary=read_rotary(fields, r, positions, kinds=kinds),
        score_scale=(r + n) ** -0.5 * score_factor(fields, positions),
        query_rank=0 if full_rank else fields.size("q_lora_rank", sizes["q_lora_rank"]),
        nope_dim=n,
        expanded_dim=V,
        value_dim=C,
        paired=interleaved,
        qkv_bias=bias,
        out_bias=bias,
        **options | switches,
    )


def build(config: LatentConfig, weights: Weights, backend: Backend) -> Decoder:
    """Build the model."""
    E, V, rotation = config.hidden_size, config.vocab_size, config.rotary.rotation(backend)
    table = weights.table("embed_tokens", V, E, "vocabulary")
    embedding = Embedding(table, scale=config.embedding_scale, given_scale=config.given_scale)
    head = embedding.tokens if config.tied_head else weights.table("lm_head", V, E, "vocabulary")
    layers = tuple(_build_layer(config, weights.at(f"layers.{i}"), rotation, i) for i in range(config.num_layers))
    final_norm, lm_head = weights.rms_norm("norm", E, config.epsilon), LMHead(head, scale=config.logit_scale)
    return Decoder(config.sharded(weights.ranks), embedding, layers, final_norm, lm_head)


def _build_layer(config: LatentConfig, weights: Weights, rotation: Rotation, i: int) -> PreNorm:
    def norm(name: str) -> RMSNorm:
        return weights.rms_norm(name, config.hidden_size, config.epsilon)

    attention_norm, attention = norm("input_layernorm"), _build_attention(config, weights, rotation, i)
    return PreNorm(attention_norm, attention, norm("post_attention_layernorm"), named_mlp(config, weights, i))


def _build_attention(config: LatentConfig, weights: Weights, rotation: Rotation, i: int) -> LatentAttention:
    E, H, C, Q = config.hidden_size, config.num_heads, config.value_dim, config.query_rank
    r, n, V, bias = config.rope_dim, config.nope_dim, config.expanded_dim, config.qkv_bias
    own: dict[str, Any] = {}
    q = "self_attn.q_proj"
    if Q:
        q, down = "self_attn.q_b_proj", weights.linear("self_attn.q_a_proj", Q, inputs=E, bias=bias)
        own = {"q_down": down, "q_norm": weights.rms_norm("self_attn.q_a_layernorm", Q, LATENT_EPSILON)}
    order = {q: HeadOrder(r + n, r, last=True, paired=config.paired)}
    queries = weights.linear(q, H * (r + n), inputs=Q or E, split="outputs", units=(H,), orders=order)
    kv_a, kv_b = "self_attn.kv_a_proj_with_mqa", "self_attn.kv_b_proj"
    kv_order = {kv_a: HeadOrder(C + r, r, last=True, paired=config.paired)}
    place: dict[str, Any] = {"of": n + V, "inputs": C}
    return weights.attention(
        config,
        i,
        AttentionSpec(config.score_scale or config.head_dim**-0.5),
        kind=LatentAttention,
        qkv=queries,
        rotation=rotation,
        kv=weights.linear(kv_a, C + r, inputs=E, bias=bias, orders=kv_order),
        kv_norm=weights.rms_norm("self_attn.kv_a_layernorm", C, LATENT_EPSILON),
        keys=weights.by_head("self_attn.k_b_proj", kv_b, H, range(n), transposed=True, **place),
        values=weights.by_head("self_attn.v_b_proj", kv_b, H, range(n, n + V), **place),
        out=weights.linear("self_attn.o_proj", E, inputs=H * V, bias=config.out_bias, split="inputs"),
        **own,
    )  # type: ignore[return-value]
