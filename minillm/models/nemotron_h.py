"""Nemotron-H, Nemotron Nano 2 and 3 (NVIDIA, arXiv 2504.03624, 2508.14444, 2512.20848): layers of one part each.

    x = tokens[ids]
    x = x + part(norm(x))      in each layer; part: Mamba-2, attention, an MLP with the square of ReLU, or
                               experts that are such MLPs
    logits = norm(x) W_lm

Attention has no positions. Experts without a gate are chosen by sigmoids, a bias and groups, beside one that all tokens
share. Those of latents (Nemotron 3 Super) are refused.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

from ..backends.operations import Backend
from ..config import Fields, ModelConfig
from ..errors import CheckpointError, UnsupportedModelError
from ..layers.block import Sublayer
from ..layers.embedding import Embedding, LMHead
from ..layers.experts import ExpertMLP
from ..reference.experts import SOFTMAX, RouterSpec
from ..reference.selective_scan import UNLIMITED
from .decoder import Decoder
from .mamba import FieldNames, MambaConfig, build_mamba, read_mamba
from .mixtral import read_experts, read_router
from .parameters import Weights
from .reading import merge_names, read_activation, read_grouped_heads, read_shared, refuse_other_layers
from .tensor_names import Names

TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
"""Special tokens if config.json has none."""
KINDS = {
    "M": "mamba",
    "*": "attention",
    "-": "mlp",
    "E": "moe",
    "linear_attention": "mamba",
    "full_attention": "attention",
}
KINDS |= {kind: kind for kind in ("mamba", "attention", "mlp", "moe")}
"""Letters of `hybrid_override_pattern`, words of `layers_block_type` -> kinds of layers"""
FIELDS = FieldNames(
    "mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size", "conv_kernel", "use_conv_bias", "use_bias",
    "use_bias",
)  # fmt: skip
OTHER_NAMES = {"n_groups": "mamba_n_groups", "conv_kernel": "mamba_d_conv", "use_conv_bias": "mamba_conv_bias"}
OTHER_NAMES |= {"n_routed_experts": "num_local_experts"}
OTHER_NAMES |= {"time_step_min": "mamba_dt_min", "time_step_limit": "mamba_dt_limit"}
"""Alternative names of fields"""
DEFAULTS = {"mamba_num_heads": 128, "mamba_head_dim": 64, "n_groups": 8, "ssm_state_size": 128, "conv_kernel": 4}
EXPERTS: dict[str, Any] = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_shared_expert_intermediate_size": 7688}
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
    """Each layer's kind: "mamba", "attention", "mlp" or "moe" """
    mamba: MambaConfig
    expert_size: int = 0
    """F of an expert"""
    shared_size: int = 0
    """F of the expert that all tokens share"""
    normalised: bool = True
    """The weights of a token's experts sum to one"""
    router: RouterSpec = SOFTMAX
    """How logits become scores, and scores a choice"""

    @property
    def layer_parts(self) -> int:
        """One, of which each layer consists."""
        return 1

    @property
    def shared_expert_layers(self) -> int:
        """As `ModelConfig.shared_expert_layers`: all with experts."""
        return self.kinds.count("moe")

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
        UnsupportedModelError: experts of latents, or what transformers' classes do not compute.
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
    activation = read_activation(fields, "mlp_hidden_act", "relu2")
    return NemotronHConfig(
        model_type="nemotron_h",
        **shared,
        **(_read_mixture(fields, activation) if "moe" in kinds else {}),
        intermediate_size=fields.size("intermediate_size", 21504),
        max_positions=fields.size("max_position_embeddings", 4096),
        mixed_layers=True,
        layer_states=_states(mamba, kinds) if "mamba" in kinds else (),
        attends=tuple(kind == "attention" for kind in kinds),
        epsilon=epsilon,
        activation=activation,
        mlp_bias=fields.get("mlp_bias", False),
        kinds=kinds,
        mamba=mamba,
        pad_token_id=fields.token_id("pad_token_id"),
    )


def _read_mixture(fields: Fields, activation: str) -> dict[str, Any]:
    """Fields of `NemotronHConfig` for layers with experts."""
    fields = Fields(EXPERTS | dict(fields.raw), fields.source)
    latent, shared = fields.raw.get("moe_latent_size"), fields.get("n_shared_experts", 1)
    if latent is not None:
        raise UnsupportedModelError(
            f"{fields.source}: moe_latent_size is {latent!r:.60}; minillm runs experts of the whole width, null"
        )
    if shared != 1:
        raise UnsupportedModelError(f"{fields.source}: n_shared_experts is {shared!s:.60}; minillm runs 1 here")
    if activation != "relu2":
        raise UnsupportedModelError(
            f"{fields.source}: mlp_hidden_act is {activation!r}; minillm runs experts without a gate with 'relu2'"
        )
    width: dict[str, Any] = {"width": "moe_intermediate_size", "default_width": 7688, "sparse": (True,), "shared": True}
    sizes = read_experts(fields, "n_routed_experts", experts=8, chosen=2, **width)
    names = "num_experts", "experts_per_token", "expert_size"
    return {name: sizes[name] for name in names} | {
        "shared_size": fields.size("moe_shared_expert_intermediate_size"),
        "normalised": fields.get("norm_topk_prob", True),
        "router": read_router(fields, sizes["num_experts"]),
    }


def _read_kinds(fields: Fields) -> tuple[str, ...]:
    """The kind of each layer."""
    name = next((name for name in ("layers_block_type", "layer_types") if fields.raw.get(name) is not None), None)
    kinds = list(fields.get("hybrid_override_pattern", "")) if name is None else fields.get(name, [])
    name = name or "hybrid_override_pattern"
    for kind in kinds:
        if not isinstance(kind, str) or kind not in KINDS:
            raise UnsupportedModelError(
                f"{fields.source}: {name} has {kind!r:.60}; minillm runs 'mamba', 'attention', 'mlp' and 'moe' here"
            )
    layers = tuple(KINDS[kind] for kind in kinds)
    if "attention" not in layers:
        raise CheckpointError(f"{fields.source}: {name} should have attention in one layer at least")
    return layers


def _states(mamba: MambaConfig, kinds: tuple[str, ...]) -> tuple[tuple[tuple[int, ...], ...], ...]:
    return tuple(mamba.states if kind == "mamba" else () for kind in kinds)


NAMES = Names(
    prefixes=("backbone.", "model."),
    embedding="embeddings.weight",
    expert_tensors={f"mixer.experts.{name}_proj": (f"mixer.experts.*.{name}_proj.weight",) for name in ("up", "down")},
)
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
    if config.kinds[i] == "moe":
        return Sublayer(norm, _build_experts(config, mixer))
    rows = {f"{name}_proj": heads * D for name, heads in zip("qkv", (H, K, K), strict=True)}
    qkv = mixer.linear("qkv", rows, inputs=E, split="outputs", units=(H, K, K))
    out = mixer.linear("o_proj", E, inputs=H * D, split="inputs")
    return Sublayer(norm, mixer.attention(config, i, qkv=qkv, out=out))


def _build_experts(config: NemotronHConfig, weights: Weights) -> ExpertMLP:
    E, F, X, shared = config.hidden_size, config.expert_size, config.num_experts, weights.at("shared_experts")
    return ExpertMLP(
        router=weights.table("gate", X, E, "router", published=(X,)),
        gate_up=weights.experts("experts.up", {"experts.*.up_proj": F}, inputs=E, count=X, split="outputs"),
        down=weights.experts("experts.down", {"experts.*.down_proj": E}, inputs=F, count=X, split="inputs"),
        top_k=config.experts_per_token,
        normalised=config.normalised,
        activation=config.activation,
        spec=config.router,
        correction=weights.vector("gate.e_score_correction_bias", X),
        shared=shared.mlp("up_proj", "down_proj", E, config.shared_size, config.activation, bias=config.mlp_bias),
        gated=False,
    )
