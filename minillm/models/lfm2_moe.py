"""LFM2's mixtures of experts (Liquid AI, LFM2-8B-A1B, arXiv 2511.23404): LFM2 with experts in place of most MLPs.

The first layers have one MLP each. Experts are chosen by sigmoids and a bias. transformers adds 1e-6 to the sum by
which their weights are divided, and minillm 1e-20 as in all families: a relative difference of 1e-6 over that sum.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..backends.operations import Backend
from ..errors import CheckpointError
from ..layers.experts import ExpertMLP
from ..layers.mlp import GatedMLP
from ..reference.experts import RouterSpec
from . import lfm2
from .decoder import Decoder
from .lfm2 import NAMES, Lfm2Config, gated_mlp, read_fields, read_kin
from .mixtral import expert_mlp, read_experts
from .parameters import Weights
from .reading import read_layers

__all__ = ["NAMES", "build", "read_config"]

DENSE_LAYERS = 2
"""Number of the first layers, with one MLP, if config.json does not say"""
MLP_SIZE, EXPERT_SIZE = 7168, 1792
"""F of an MLP and of an expert if config.json has none"""


@dataclass(frozen=True, kw_only=True)
class Lfm2MoeConfig(Lfm2Config):
    """LFM2's fields and the experts'; `intermediate_size` is F of layers with one MLP."""

    expert_size: int
    """F of an expert"""
    normalised: bool
    """The weights of a token's experts sum to one"""
    sparse: tuple[bool, ...]
    """Whether each layer has experts"""
    router: RouterSpec
    """How logits become scores, and scores a choice"""
    corrected: bool
    """A bias of each expert is added to its score for the choice"""
    activation: str = "silu"
    expert_bias: bool = False
    shared_size: int = 0
    shared_gate: bool = False


def read_config(raw: Mapping[str, Any]) -> Lfm2MoeConfig:
    """The configuration from config.json.

    Raises:
        As `lfm2.read_kin` and `mixtral.read_experts`; CheckpointError also if no layer has experts.
    """
    fields = read_fields(raw)
    layers, dense = read_layers(fields), fields.get("num_dense_layers", DENSE_LAYERS)
    if not 0 <= dense < layers:
        raise CheckpointError(
            f"{fields.source}: num_dense_layers should be from 0 to num_hidden_layers {layers} - 1, found {dense!s:.60}"
        )
    sizes: dict[str, Any] = {"experts": 32, "chosen": 4, "width": "moe_intermediate_size"}
    sparse = tuple(i >= dense for i in range(layers))
    experts = read_experts(fields, "num_experts", default_width=EXPERT_SIZE, sparse=sparse, **sizes)
    return read_kin(
        fields,
        "lfm2_moe",
        Lfm2MoeConfig,
        intermediate_size=fields.size("intermediate_size", MLP_SIZE),
        normalised=fields.get("norm_topk_prob", True),
        router=RouterSpec(sigmoid=True, scale=fields.number("routed_scaling_factor", 1.0, most=1e6)),
        corrected=fields.get("use_expert_bias", True),
        **{name: size for name, size in experts.items() if name != "mixed_layers"},
    )


def build(config: Lfm2MoeConfig, weights: Weights, backend: Backend) -> Decoder:
    """Build the model."""
    return lfm2.build(config, weights, backend, mlp=_mlp)


def _mlp(config: Any, weights: Weights, i: int) -> GatedMLP | ExpertMLP:
    if not config.sparse[i]:
        return gated_mlp(config, weights, i)
    return expert_mlp(config, weights, gate="w1", up="w3", down="w2", correction="expert_bias", shared=None)
