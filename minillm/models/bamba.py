"""Bamba (IBM and others, 2024): Llama with Mamba-2 in place of attention in most layers.

Half of each head is rotated.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

from ..backends.operations import Backend
from ..config import Fields
from ..errors import CheckpointError
from ..layers.mamba import Mamba2
from . import llama
from .decoder import Decoder
from .llama import LlamaConfig, read_kin
from .mamba import DEFAULTS, MambaConfig, build_mamba, read_mamba
from .parameters import Weights
from .reading import read_activation, read_grouped_heads, read_layers, refuse_other_layers
from .rotary import read_partial_rotary
from .tensor_names import Names

__all__ = ["NAMES", "build", "read_config"]

TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
"""Special tokens if config.json has none."""


@dataclass(frozen=True, kw_only=True)
class BambaConfig(LlamaConfig):
    """Llama's fields, and those of layers of Mamba-2."""

    mamba: MambaConfig
    mambas: tuple[bool, ...]
    """Whether each layer has Mamba-2 in place of attention"""

    def sharded(self, ranks: int) -> Self:
        """As `ModelConfig.sharded`: groups of Mamba's heads are shared too."""
        if ranks == 1:
            return self
        own = self.mamba.sharded(ranks)
        states = tuple(own.states if recurrent else () for recurrent in self.mambas)
        return replace(super().sharded(ranks), mamba=own, layer_states=states)


def read_config(raw: Mapping[str, Any]) -> BambaConfig:
    """Bamba's configuration from config.json.

    Raises:
        As `llama.read_config`; CheckpointError also if no layer has attention, or all have.
    """
    fields = Fields(TOKENS | {"num_key_value_heads": 8} | dict(raw))
    refuse_other_layers(fields, kinds=())
    layers, attend = read_layers(fields), fields.get("attn_layer_indices", [])
    if any(type(i) is not int for i in attend) or not 0 < len({*attend} & {*range(layers)}) < layers:
        raise CheckpointError(f"{fields.source}: attn_layer_indices should number some of the {layers} layers")
    mambas = tuple(i not in attend for i in range(layers))
    epsilon, bias = fields.number("rms_norm_eps", 1e-5), fields.get("attention_bias", False)
    mamba = read_mamba(
        fields,
        fields.size("mamba_expand", 2) * fields.size("hidden_size"),
        defaults=DEFAULTS,
        activation=read_activation(fields, "hidden_act", "silu"),
        epsilon=epsilon,
    )
    positions = fields.size("max_position_embeddings", 262_144)
    return read_kin(
        fields,
        "bamba",
        kind=BambaConfig,
        rotary=read_partial_rotary(fields, read_grouped_heads(fields)["head_dim"], positions, share=0.5),
        epsilon=epsilon,
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=fields.get("mlp_bias", False),
        mixed_layers=True,
        layer_states=tuple(mamba.states if recurrent else () for recurrent in mambas),
        mamba=mamba,
        mambas=mambas,
        pad_token_id=fields.token_id("pad_token_id"),
    )


NAMES = Names(
    prefixes=("model.",),
    left_out=("rotary_emb.inv_freq",),
    renamed=(
        ("pre_ff_layernorm.weight", "post_attention_layernorm.weight"),
        ("final_layernorm.weight", "norm.weight"),
        *(
            (f"feed_forward.{name}_proj.{kind}", f"mlp.{name}_proj.{kind}")
            for name in ("gate", "up", "down")
            for kind in ("weight", "bias")
        ),
    ),
)
"""Tensors of checkpoints: (model.)layers.0.feed_forward.up_proj.weight."""


def build(config: BambaConfig, weights: Weights, backend: Backend) -> Decoder:
    """Build the model."""
    return llama.build(config, weights, backend, mamba=_mamba_of_layer)


def _mamba_of_layer(config: Any, weights: Weights, i: int) -> Mamba2 | None:
    """Mamba-2 of layer i; None where it has attention."""
    return build_mamba(config.mamba, weights.at("mamba"), i, config.hidden_size) if config.mambas[i] else None
