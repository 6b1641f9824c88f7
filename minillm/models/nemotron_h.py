"""Nemotron-H and Nemotron Nano 2 (NVIDIA, arXiv 2504.03624, 2508.14444): layers of one part each.

    x = tokens[ids]
    x = x + part(norm(x))      in each layer; part: Mamba-2, attention, or an MLP with the square of ReLU
    logits = norm(x) W_lm

Attention has no positions. Layers with experts (Nemotron 3) are refused.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

from ..backends.operations import Backend
from ..config import Fields, ModelConfig
from ..errors import CheckpointError, UnsupportedModelError
from ..layers.block import Sublayer
from ..layers.embedding import Embedding
from ..layers.head import LMHead
from ..reference.selective_scan import UNLIMITED
from .decoder import Decoder
from .mamba import FieldNames, MambaConfig, build_mamba, read_mamba
from .parameters import Names, Weights
from .reading import merge_names, read_activation, read_grouped_heads, read_shared, refuse_other_layers

TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
"""Special tokens if config.json has none."""
KINDS = {"M": "mamba", "*": "attention", "-": "mlp", "linear_attention": "mamba", "full_attention": "attention"}
KINDS |= {kind: kind for kind in ("mamba", "attention", "mlp")}
"""Letters of `hybrid_override_pattern`, words of `layers_block_type` -> kinds of layers"""
FIELDS = FieldNames(
    "mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size", "conv_kernel", "use_conv_bias", "use_bias",
    "use_bias",
)  # fmt: skip
OTHER_NAMES = {"n_groups": "mamba_n_groups", "conv_kernel": "mamba_d_conv", "use_conv_bias": "mamba_conv_bias"}
OTHER_NAMES |= {"time_step_min": "mamba_dt_min", "time_step_limit": "mamba_dt_limit"}
"""Alternative names of fields"""
DEFAULTS = {"mamba_num_heads": 128, "mamba_head_dim": 64, "n_groups": 8, "ssm_state_size": 128, "conv_kernel": 4}
"""Sizes if config.json has none"""


@dataclass(frozen=True, kw_only=True)
class NemotronHConfig(ModelConfig):
    """The shared fields and Nemotron-H's own."""

    epsilon: float
    """Added to the mean square in each norm"""
    activation: str
    """Between the two products of an MLP"""
    mlp_bias: bool
    kinds: tuple[str, ...]
    """Each layer's kind: "mamba", "attention" or "mlp" """
    mamba: MambaConfig

    @property
    def layer_parts(self) -> int:
        """One, of which each layer consists."""
        return 1

    def sharded(self, ranks: int) -> Self:
        """As `ModelConfig.sharded`: groups of Mamba's heads are shared too."""
        if ranks == 1 or "mamba" not in self.kinds:
            return super().sharded(ranks)
        own = self.mamba.sharded(ranks)
        return replace(super().sharded(ranks), mamba=own, layer_states=_states(own, self.kinds))


def read_config(raw: Mapping[str, Any]) -> NemotronHConfig:
    """Nemotron-H's configuration from config.json.

    Raises:
        CheckpointError: a field is missing or invalid.
        UnsupportedModelError: layers with experts, or what transformers' classes do not compute.
    """
    raw = merge_names(raw, OTHER_NAMES)
    kinds = _read_kinds(Fields(raw))
    fields = Fields(TOKENS | raw | {"num_hidden_layers": len(kinds)})
    refuse_other_layers(fields, kinds=tuple(KINDS))
    for name in ("attention_bias", "mamba_proj_bias"):
        if fields.get(name, False):
            raise UnsupportedModelError(f"{fields.source}: {name} is true; minillm runs this family without")
    shared = read_grouped_heads(fields, kv_heads=8, head_dim=128) | read_shared(fields, tied_head=False)
    epsilon = fields.number("layer_norm_epsilon", 1e-5)
    mamba = read_mamba(
        fields,
        None,
        defaults=DEFAULTS,
        names=FIELDS,
        activation=read_activation(fields, "mamba_hidden_act", "silu"),
        epsilon=epsilon,
    )
    if mamba.limits != UNLIMITED:
        raise UnsupportedModelError(
            f"{fields.source}: time_step_limit is {[*mamba.limits]}; minillm runs steps of time_step_min and more"
        )
    least = fields.number("time_step_min", 0.001)
    mamba = replace(mamba, limits=(least, UNLIMITED[1]))
    return NemotronHConfig(
        model_type="nemotron_h",
        **shared,
        intermediate_size=fields.size("intermediate_size", 21504),
        max_positions=fields.size("max_position_embeddings", 4096),
        mixed_layers=True,
        layer_states=_states(mamba, kinds) if "mamba" in kinds else (),
        attends=tuple(kind == "attention" for kind in kinds),
        epsilon=epsilon,
        activation=read_activation(fields, "mlp_hidden_act", "relu2"),
        mlp_bias=fields.get("mlp_bias", False),
        kinds=kinds,
        mamba=mamba,
        pad_token_id=fields.token_id("pad_token_id"),
    )


def _read_kinds(fields: Fields) -> tuple[str, ...]:
    """The kind of each layer."""
    name = next((name for name in ("layers_block_type", "layer_types") if fields.raw.get(name) is not None), None)
    kinds = list(fields.get("hybrid_override_pattern", "")) if name is None else fields.get(name, [])
    name = name or "hybrid_override_pattern"
    for kind in kinds:
        if not isinstance(kind, str) or kind not in KINDS:
            raise UnsupportedModelError(
                f"{fields.source}: {name} has {kind!r:.60}; minillm runs 'mamba', 'attention' and 'mlp' here"
            )
    layers = tuple(KINDS[kind] for kind in kinds)
    if "attention" not in layers:
        raise CheckpointError(f"{fields.source}: {name} should have attention in one layer at least")
    return layers


def _states(mamba: MambaConfig, kinds: tuple[str, ...]) -> tuple[tuple[tuple[int, ...], ...], ...]:
    return tuple(mamba.states if kind == "mamba" else () for kind in kinds)


NAMES = Names(prefixes=("backbone.", "model."), embedding="embeddings.weight")
"""Tensors of checkpoints: backbone.layers.0.mixer.in_proj.weight."""


def build(config: NemotronHConfig, weights: Weights, backend: Backend) -> Decoder:
    """Build the model."""
    E, V = config.hidden_size, config.vocab_size
    embedding = Embedding(weights.table("embeddings", V, E, "vocabulary"))
    layers = tuple(_build_layer(config, weights.at(f"layers.{i}"), i) for i in range(config.num_layers))
    final_norm = weights.rms_norm("norm_f", E, config.epsilon)
    head = embedding.tokens if config.tied_head else weights.table("lm_head", V, E, "vocabulary")
    return Decoder(config.sharded(weights.ranks), embedding, layers, final_norm, LMHead(head))


def _build_layer(config: NemotronHConfig, weights: Weights, i: int) -> Sublayer:
    E, F, D, H, K = (
        config.hidden_size, config.intermediate_size, config.head_dim, config.num_heads, config.num_kv_heads
    )  # fmt: skip
    norm, mixer = weights.rms_norm("norm", E, config.epsilon), weights.at("mixer")
    if config.kinds[i] == "mamba":
        return Sublayer(norm, build_mamba(config.mamba, mixer, i, E))
    if config.kinds[i] == "mlp":
        return Sublayer(norm, mixer.mlp("up_proj", "down_proj", E, F, config.activation, bias=config.mlp_bias))
    rows = {f"{name}_proj": heads * D for name, heads in zip("qkv", (H, K, K), strict=True)}
    qkv = mixer.linear("qkv", rows, inputs=E, split="outputs", units=(H, K, K))
    out = mixer.linear("o_proj", E, inputs=H * D, split="inputs")
    return Sublayer(norm, mixer.attention(config, i, qkv=qkv, out=out))
