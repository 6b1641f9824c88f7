"""Granite 3's mixtures of experts (IBM, 2024; PowerMoE): Granite with experts in place of each MLP.

Checkpoints have the matrices of all experts of a layer in one tensor.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ..backends.operations import Backend
from ..config import Fields
from ..errors import CheckpointError
from ..layers.experts import ExpertMLP
from ..layers.mlp import GatedMLP
from . import llama
from .decoder import Decoder
from .granite import read_factors
from .llama import TOKENS, read_kin
from .mixtral import ExpertConfig, expert_mlp, read_experts
from .parameters import Weights
from .reading import refuse_other_layers
from .tensor_names import Names

__all__ = ["NAMES", "GraniteMoeConfig", "build", "mlp_of_layer", "read_config", "read_mixture"]

NAMES = Names(
    prefixes=("model.",),
    left_out=("rotary_emb.inv_freq",),
    renamed=(("block_sparse_moe.router.layer.weight", "block_sparse_moe.gate.weight"),),
    expert_tensors={
        "block_sparse_moe.input_linear.weight": (
            "block_sparse_moe.experts.*.gate_proj.weight",
            "block_sparse_moe.experts.*.up_proj.weight",
        ),
        "block_sparse_moe.output_linear.weight": ("block_sparse_moe.experts.*.down_proj.weight",),
    },
)
"""Tensors of checkpoints: (model.)layers.0.block_sparse_moe.input_linear.weight, [X, 2 F, E]."""


@dataclass(frozen=True, kw_only=True)
class GraniteMoeConfig(ExpertConfig):
    """The fields of a mixture, and how its checkpoint has the shared MLP."""

    mlp_apart: bool = False
    """Gate and up of the shared MLP are two tensors, as in GGUF files, which say so in `shared_mlp_apart`"""


def read_config(raw: Mapping[str, Any]) -> GraniteMoeConfig:
    """The configuration from config.json.

    Raises:
        As `llama.read_config`.
    """
    return read_mixture(Fields(TOKENS | dict(raw)), "granitemoe", shared=False)


def read_mixture(fields: Fields, model_type: str, *, shared: bool) -> GraniteMoeConfig:
    """The fields that both of Granite 3's mixtures have; `shared`: an MLP may compute every token beside the experts.

    Raises:
        As `llama.read_config`.
    """
    refuse_other_layers(fields)
    bias = fields.get("attention_bias", False)
    return read_kin(
        fields,
        model_type,
        kind=GraniteMoeConfig,
        mlp_apart=fields.get("shared_mlp_apart", False),
        qkv_bias=bias,
        out_bias=bias,
        normalised=True,
        shared_size=_shared_size(fields) if shared else 0,
        **read_experts(fields, "num_local_experts", experts=8, chosen=2, shared=True),
        **read_factors(fields),
    )


def _shared_size(fields: Fields) -> int:
    """F of the MLP that computes every token; 0: there is none."""
    size = fields.get("shared_intermediate_size", 0)
    if size < 0:
        raise CheckpointError(f"{fields.source}: shared_intermediate_size should be 0 or more, found {size!s:.60}")
    return size and fields.size("shared_intermediate_size")


def build(config: GraniteMoeConfig, weights: Weights, backend: Backend) -> Decoder:
    """Build the model."""
    return llama.build(config, weights, backend, mlp=partial(mlp_of_layer, apart=config.mlp_apart))


def mlp_of_layer(config: Any, weights: Weights, i: int, *, apart: bool = False) -> GatedMLP | ExpertMLP:
    """A layer's experts, with the MLP that all tokens share if there is one; or that MLP alone.

    `apart`: its gate and up are two tensors, as in GGUF files.
    """
    E, F = config.hidden_size, config.shared_size or config.intermediate_size
    shared = None
    if config.shared_size:
        mlp = weights.at("shared_mlp")
        outputs, blocks = ({"gate_proj": F, "up_proj": F}, 1) if apart else ({"input_linear": 2 * F}, 2)
        gate_up = mlp.linear("input_linear", outputs, inputs=E, split="outputs", blocks=blocks)
        shared = GatedMLP(gate_up, mlp.linear("output_linear", E, inputs=F, split="inputs"), config.activation)
        if not config.sparse[i]:
            return shared
    names: dict[str, Any] = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj", "shared": None}
    return replace(expert_mlp(config, weights.at("block_sparse_moe"), **names), shared=shared)
