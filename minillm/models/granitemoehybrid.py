"""Granite 4 (IBM, 2025): Granite with Mamba-2 in place of attention in most layers, or in none.

Each layer has an MLP that computes every token; models named "tiny" and "small" have experts beside it.
"""

from collections.abc import Mapping
from typing import Any

from ..config import Fields
from ..errors import CheckpointError, UnsupportedModelError
from .granite import read_factors
from .granitemoe import NAMES, build
from .llama import TOKENS, read_kin
from .mixtral import ExpertConfig, read_experts
from .reading import read_layer_types, read_layers, refuse_other_layers

__all__ = ["NAMES", "build", "read_config"]

KINDS = {"attention": False, "full_attention": False, "mamba": True, "linear_attention": True}
"""Kinds of layers in config.json's `layer_types` or `layers_block_type`, and whether they are Mamba's"""
SHARED_SIZE, EXPERTS = 1024, 8
"""F of the MLP, and X, if config.json has none"""


def read_config(raw: Mapping[str, Any]) -> ExpertConfig:
    """The configuration from config.json.

    Raises:
        As `llama.read_config`; UnsupportedModelError also for layers of Mamba.
    """
    fields = Fields(TOKENS | dict(raw))
    refuse_other_layers(fields, kinds=tuple(KINDS))
    layers, bias = read_layers(fields), fields.get("attention_bias", False)
    if any(_read_mambas(fields)):
        raise UnsupportedModelError(f"{fields.source}: layer_types has 'mamba'; minillm runs 'attention' here")
    shared = fields.size("shared_intermediate_size", SHARED_SIZE)
    mixture: dict[str, Any] = {"expert_size": 0, "sparse": (False,) * layers}
    if fields.get("num_local_experts", EXPERTS):
        mixture = read_experts(fields, "num_local_experts", experts=EXPERTS, chosen=2, shared=True)
    else:  # `intermediate_size` is that of experts, which no layer has
        fields = Fields({**fields.raw, "intermediate_size": shared}, fields.source)
    return read_kin(
        fields,
        "granitemoehybrid",
        kind=ExpertConfig,
        rotated=(_is_rotated(fields),) * layers,
        qkv_bias=bias,
        out_bias=bias,
        normalised=True,
        shared_size=shared,
        **mixture,
        **read_factors(fields),
    )


def _is_rotated(fields: Fields) -> bool:
    """Whether queries and keys are rotated: by default no positions enter.

    Raises:
        UnsupportedModelError: another kind of position embedding.
    """
    return fields.choice("position_embedding_type", "nope", ("rope", "nope")) == "rope"


def _read_mambas(fields: Fields) -> tuple[bool, ...]:
    """Whether each layer is Mamba's; all are, if config.json does not say."""
    layers = read_layers(fields)
    name = "layer_types" if fields.raw.get("layer_types") is not None else "layers_block_type"
    kinds = read_layer_types(Fields({"layer_types": fields.get(name, ["mamba"] * layers)}, fields.source), tuple(KINDS))
    if len(kinds) != layers:
        raise CheckpointError(f"{fields.source}: {name} should have num_hidden_layers {layers} entries")
    return tuple(KINDS[kind] for kind in kinds)
