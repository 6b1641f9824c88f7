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
from . import llama
from .decoder import Decoder
from .llama import NAMES, TOKENS, LlamaConfig, read_kin
from .parameters import Weights
from .reading import merge_names, read_layer_types, read_layers, refuse_other_layers

__all__ = ["NAMES", "ExpertConfig", "build", "expert_mlp", "read_config", "read_experts"]

EPSILON = 1e-5
"""Added to the mean square in each norm if config.json has none"""
ROPE_THETA = 1_000_000.0
"""Base of the rotary frequencies if config.json has none"""
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

    Raises:
        CheckpointError: one is invalid, or each token has more experts than there are.
        UnsupportedModelError: some experts are shared by all tokens.
    """
    for shared in ("n_shared_experts", "num_shared_experts", "shared_expert_intermediate_size"):
        if fields.get(shared, 0) > 0:
            raise UnsupportedModelError(
                f"{fields.source}: {shared} is {fields.raw[shared]!r:.60}: minillm runs no experts shared by all tokens"
            )
    X = fields.size(name, experts, most=MOST_EXPERTS)
    k = fields.size("num_experts_per_tok", chosen)
    if k > X:
        raise CheckpointError(f"{fields.source}: num_experts_per_tok {k} should be at most {name} {X}")
    sparse = sparse or (True,) * read_layers(fields)
    sizes = {"num_experts": X, "experts_per_token": k, "expert_size": fields.size(width, default_width)}
    return sizes | {"sparse": sparse, "mixed_layers": len(set(sparse)) > 1}


def build(config: ExpertConfig, weights: Weights, backend: Backend) -> Decoder:
    """Build the model."""
    return llama.build(config, weights, backend, mlp=_mlp)


def _mlp(config: Any, weights: Weights, i: int) -> ExpertMLP:
    return expert_mlp(config, weights.at("block_sparse_moe"), gate="w1", up="w3", down="w2")


def expert_mlp(config: ExpertConfig, weights: Weights, *, gate: str, up: str, down: str) -> ExpertMLP:
    """A layer's experts: "gate.weight" of the router, and of each expert "experts.3.NAME.weight" of these names."""
    E, F, X = config.hidden_size, config.expert_size, config.num_experts
    gate_up = {f"experts.*.{gate}": F, f"experts.*.{up}": F}
    return ExpertMLP(
        router=weights.table("gate", X, E, "router"),
        gate_up=weights.experts("experts.gate_up", gate_up, inputs=E, count=X, split="outputs"),
        down=weights.experts("experts.down", {f"experts.*.{down}": E}, inputs=F, count=X, split="inputs"),
        top_k=config.experts_per_token,
        normalised=config.normalised,
        activation=config.activation,
    )
