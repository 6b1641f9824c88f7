"""Granite 4 (IBM, 2025): Granite with Mamba-2 in place of attention in most layers, or in none.

Each layer has an MLP that computes every token; models named "tiny" and "small" have experts beside it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

from ..backends.operations import Backend
from ..config import Fields
from ..errors import CheckpointError
from ..layers.mamba import Mamba2
from . import llama
from .decoder import Decoder
from .granite import read_factors
from .granitemoe import NAMES, mlp_of_layer
from .llama import TOKENS, read_kin
from .mamba import DEFAULTS, MambaConfig, build_mamba, read_mamba
from .mixtral import ExpertConfig, read_experts
from .parameters import Weights
from .reading import read_activation, read_layer_types, read_layers, refuse_other_layers

__all__ = ["NAMES", "build", "read_config"]

KINDS = {"attention": False, "full_attention": False, "mamba": True, "linear_attention": True}
"""Kinds of layers in config.json's `layer_types` or `layers_block_type`, and whether they are Mamba's"""
SHARED_SIZE, EXPERTS = 1024, 8
"""F of the MLP, and X, if config.json has none"""


@dataclass(frozen=True, kw_only=True)
class GraniteHybridConfig(ExpertConfig):
    """Granite's fields, and those of its layers of Mamba-2."""

    mamba: MambaConfig | None
    """None: all layers have attention"""
    mambas: tuple[bool, ...]
    """Whether each layer has Mamba-2 in place of attention"""
    mlp_apart: bool
    """Gate and up of the MLP of each token are two tensors, as in GGUF files, which say so in `shared_mlp_apart`"""

    def sharded(self, ranks: int) -> Self:
        """As `ModelConfig.sharded`: groups of Mamba's heads are shared too."""
        if ranks == 1 or self.mamba is None:
            return super().sharded(ranks)
        own = self.mamba.sharded(ranks)
        return replace(super().sharded(ranks), mamba=own, layer_states=states_of(own, self.mambas))


def states_of(mamba: MambaConfig, mambas: tuple[bool, ...]) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """`ModelConfig.layer_states` of a model with such layers."""
    return tuple(mamba.states if recurrent else () for recurrent in mambas)


def read_config(raw: Mapping[str, Any]) -> GraniteHybridConfig:
    """The configuration from config.json.

    Raises:
        As `llama.read_config`; CheckpointError also if no layer has attention.
    """
    fields = Fields(TOKENS | dict(raw))
    refuse_other_layers(fields, kinds=tuple(KINDS))
    layers, bias = read_layers(fields), fields.get("attention_bias", False)
    mambas, mamba = _read_mambas(fields), None
    if all(mambas):
        raise CheckpointError(f"{fields.source}: layer_types should have attention in one layer at least")
    if any(mambas):
        inner = fields.size("mamba_expand", 2) * fields.size("hidden_size")
        activation, epsilon = read_activation(fields, "hidden_act", "silu"), fields.number("rms_norm_eps", 1e-6)
        mamba = read_mamba(fields, inner, defaults=DEFAULTS, activation=activation, epsilon=epsilon)
    shared = fields.size("shared_intermediate_size", SHARED_SIZE)
    mixture: dict[str, Any] = {"expert_size": 0, "sparse": (False,) * layers}
    if fields.get("num_local_experts", EXPERTS):
        mixture = read_experts(fields, "num_local_experts", experts=EXPERTS, chosen=2, shared=True)
    else:  # `intermediate_size` is that of experts, which no layer has
        fields = Fields({**fields.raw, "intermediate_size": shared}, fields.source)
    mixture |= {"mixed_layers": True, "layer_states": states_of(mamba, mambas)} if mamba else {}
    return read_kin(
        fields,
        "granitemoehybrid",
        kind=GraniteHybridConfig,
        mamba=mamba,
        mambas=mambas,
        mlp_apart=fields.get("shared_mlp_apart", False),
        rotated=(_is_rotated(fields),) * layers,
        qkv_bias=bias,
        out_bias=bias,
        normalised=True,
        shared_size=shared,
        **mixture,
        **read_factors(fields),
    )


def build(config: GraniteHybridConfig, weights: Weights, backend: Backend) -> Decoder:
    """Build the model."""
    mlp = partial(mlp_of_layer, apart=config.mlp_apart)
    return llama.build(config, weights, backend, mlp=mlp, mamba=_mamba_of_layer)


def _mamba_of_layer(config: Any, weights: Weights, i: int) -> Mamba2 | None:
    """Mamba-2 of layer i; None where it has attention."""
    return build_mamba(config.mamba, weights.at("mamba"), i, config.hidden_size) if config.mambas[i] else None


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
