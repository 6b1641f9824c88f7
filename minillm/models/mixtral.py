"""Mixtral (Jiang et al., arXiv 2401.04088): Mistral with a mixture of experts in place of each MLP.

Qwen3-MoE and OLMoE differ in their attention, and in names: their files read their configurations.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..backends.operations import Backend
from ..config import Fields
from ..errors import CheckpointError, UnsupportedModelError
from ..layers.experts import ExpertMLP
from ..layers.mlp import GatedMLP
from ..reference.experts import SOFTMAX, RouterSpec
from . import llama
from .decoder import Decoder
from .llama import NAMES, TOKENS, LlamaConfig, read_kin
from .parameters import Weights
from .reading import merge_names, read_layer_types, read_layers, refuse_other_layers

__all__ = ["NAMES", "ExpertConfig", "build", "expert_mlp", "read_config", "read_experts", "read_router"]

EPSILON = 1e-5
"""Added to the mean square in each norm if config.json has none"""
ROPE_THETA = 1_000_000.0
"""Base of the rotary frequencies if config.json has none"""
MOST_GROUPS = 32
"""Upper bound on groups of experts, as kernels have it"""
MOST_EXPERTS = 4096
"""Upper bound on experts, far above any model's: each has matrices of its own."""


@dataclass(frozen=True, kw_only=True)
class ExpertConfig(LlamaConfig):
    """Llama's fields and the experts'."""

    expert_size: int
    """F of an expert; `intermediate_size` is F of layers with one MLP"""
    normalised: bool
    """The weights of a token's experts sum to one"""
    sparse: tuple[bool, ...]
    """Whether each layer has experts"""
    router: RouterSpec = SOFTMAX
    """How logits become scores, and scores a choice"""
    expert_bias: bool = False
    """The router and each expert's projections have biases (gpt-oss)"""
    corrected: bool = False
    """A bias of each expert is added to its score for the choice"""
    shared_size: int = 0
    """F of the expert that all tokens share; 0: there is none"""
    shared_gate: bool = False
    """The shared expert's result has a factor of its own (Qwen2-MoE)"""

    @property
    def shared_expert_layers(self) -> int:
        """Number of layers with an expert that all tokens share, beside those that are chosen."""
        return sum(self.sparse) if self.shared_size else 0


def read_config(raw: Mapping[str, Any]) -> ExpertConfig:
    """Mixtral's configuration from config.json.

    Raises:
        As `llama.read_config`.
    """
    raw = merge_names(raw, {"num_local_experts": "num_experts"})
    fields = Fields(TOKENS | {"rms_norm_eps": EPSILON, "rope_theta": ROPE_THETA} | dict(raw))
    refuse_other_layers(fields, windows=True)
    window = None if fields.raw.get("sliding_window") is None else fields.size("sliding_window")
    read_layer_types(fields, ("full_attention" if window is None else "sliding_attention",))
    return read_kin(
        fields,
        "mixtral",
        kind=ExpertConfig,
        windows=(window,) * read_layers(fields),
        normalised=True,
        **read_experts(fields, "num_local_experts", experts=8, chosen=2),
    )


def read_experts(
    fields: Fields,
    name: str,
    *,
    experts: int,
    chosen: int,
    width: str = "intermediate_size",
    default_width: int | None = None,
    sparse: tuple[bool, ...] | None = None,
    chosen_name: str = "num_experts_per_tok",
    shared: bool = False,
) -> dict[str, Any]:
    """The numbers of experts and their width: fields of `ExpertConfig`.

    Args:
        fields: config.json
        name: the field that has X
        experts: X if config.json has none
        chosen: k if config.json has none
        width: the field that has F
        default_width: F if config.json has none
        sparse: whether each layer has experts; None: all have
        chosen_name: the field that has k
        shared: the family reads experts that all tokens share itself

    Raises:
        CheckpointError: one is invalid, or each token has more experts than there are.
        UnsupportedModelError: some experts are shared by all tokens, in a family without.
    """
    for field in () if shared else ("n_shared_experts", "num_shared_experts", "shared_expert_intermediate_size"):
        if fields.get(field, 0) > 0:
            raise UnsupportedModelError(
                f"{fields.source}: {field} is {fields.raw[field]!r:.60}: in this family minillm runs no experts shared "
                "by all tokens"
            )
    X = fields.size(name, experts, most=MOST_EXPERTS)
    k = fields.size(chosen_name, chosen)
    if k > X:
        raise CheckpointError(f"{fields.source}: {chosen_name} {k} should be at most {name} {X}")
    sparse = sparse or (True,) * read_layers(fields)
    sizes = {"num_experts": X, "experts_per_token": k, "expert_size": fields.size(width, default_width)}
    return sizes | {"sparse": sparse, "mixed_layers": len(set(sparse)) > 1}


def build(config: ExpertConfig, weights: Weights, backend: Backend) -> Decoder:
    """Build the model."""
    return llama.build(config, weights, backend, mlp=_mlp)


def _mlp(config: Any, weights: Weights, i: int) -> ExpertMLP:
    return expert_mlp(config, weights.at("block_sparse_moe"), gate="w1", up="w3", down="w2")


def read_router(fields: Fields, experts: int) -> RouterSpec:
    """A router of sigmoids, from the fields of DeepSeek-V3, which GLM-4.5 and dots.llm1 share.

    Raises:
        CheckpointError: a field is invalid, or the experts cannot be divided into groups.
    """
    groups, best = fields.size("n_group", 1, most=MOST_GROUPS), fields.size("topk_group", 1)
    if experts % groups or (groups > 1 and experts // groups < 2):
        raise CheckpointError(
            f"{fields.source}: n_group {groups} should divide {experts} experts into groups of several"
        )
    k = fields.size("num_experts_per_tok", 8)
    if best > groups or k > experts // groups * best:
        raise CheckpointError(
            f"{fields.source}: topk_group should be at most n_group {groups}, with num_experts_per_tok {k} experts, "
            f"found {best}"
        )
    scale = fields.number("routed_scaling_factor", 1.0, most=1e6)
    return RouterSpec(sigmoid=True, groups=groups, chosen_groups=best, scale=scale)


def expert_mlp(
    config: ExpertConfig,
    weights: Weights,
    *,
    router: str = "gate",
    gate: str,
    up: str,
    down: str,
    correction: str = "gate.e_score_correction_bias",
    published: tuple[int, ...] | None = None,
    shared: str | None = "shared_experts",
) -> ExpertMLP:
    """A layer's experts: the router, and of each expert "experts.3.NAME.weight" of these names.

    Args:
        config: the model's
        weights: of the layer's experts
        router: its name
        gate: of an expert, its name
        up: another
        down: another
        correction: name of the bias of the choice
        published: its shape in checkpoints, if it is not [X]
        shared: name of the expert that all tokens share, whose tensors have Llama's names; None: the family adds it
    """
    E, F, X = config.hidden_size, config.expert_size, config.num_experts
    gate_up, bias = {f"experts.*.{gate}": F, f"experts.*.{up}": F}, config.expert_bias
    stacked: dict[str, Any] = {"count": X, "bias": bias}
    return ExpertMLP(
        router=weights.table(router, X, E, "router", bias=f"{router}.bias" if bias else None, published=(X,)),
        gate_up=weights.experts("experts.gate_up", gate_up, inputs=E, split="outputs", **stacked),
        down=weights.experts("experts.down", {f"experts.*.{down}": E}, inputs=F, split="inputs", **stacked),
        top_k=config.experts_per_token,
        normalised=config.normalised,
        activation=config.activation,
        spec=config.router,
        correction=weights.vector(correction, X, published=published) if config.corrected else None,
        shared=_shared_mlp(config, weights.at(shared)) if shared and config.shared_size else None,
        shared_gate=weights.linear("shared_expert_gate", 1, inputs=E) if config.shared_gate else None,
    )


def _shared_mlp(config: ExpertConfig, weights: Weights) -> GatedMLP:
    E, F, bias = config.hidden_size, config.shared_size, config.mlp_bias
    return GatedMLP(
        weights.linear("gate_up", {"gate_proj": F, "up_proj": F}, inputs=E, bias=bias, split="outputs"),
        weights.linear("down_proj", E, inputs=F, bias=bias, split="inputs"),
        config.activation,
    )
