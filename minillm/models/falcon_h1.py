"""Falcon-H1 (TII, arXiv 2507.22448): Llama with Mamba-2 beside attention in each layer, and many multipliers.

    x = e tokens[ids]
    y = norm(x)
    x = x + a attention(i y) + s mamba(j y);  x = x + d mlp(norm(x))      in each layer
    logits = norm(x) W_lm l

The keys, the parts of Mamba's first projection and the gate of the MLP have factors too. Factors are not folded into
weights, which stay in the format of their file. With x / s in place of x, as granite.py has it, s takes no operation.
The others before a product are factors of the columns of the projection before it: j and the five of the parts of
Mamba's; i of q, k and v, with the keys' own, and a / s with that of v; that of the gate, and d / s of `up`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np

from ..backends.operations import Backend
from ..backends.weights import Weight
from ..config import Fields
from ..errors import CheckpointError, UnsupportedModelError
from ..layers.embedding import Embedding, LMHead
from ..layers.mamba import ParallelMamba
from .bamba import NAMES
from .decoder import Decoder
from .granite import MOST
from .llama import LlamaConfig, read_kin
from .mamba import DEFAULTS, FieldNames, MambaConfig, build_mamba, read_mamba
from .parameters import Weights
from .reading import read_activation, read_layers, refuse_other_layers

__all__ = ["NAMES", "build", "read_config"]

TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
"""Special tokens if config.json has none."""
USUAL = {"num_key_value_heads": 8, "max_position_embeddings": 8192}
"""Fields that config.json may lack"""
INNER = 1024
"""Channels of Mamba if config.json does not say"""
FIELDS = FieldNames(out_bias="projectors_bias")


@dataclass(frozen=True, kw_only=True)
class FalconH1Config(LlamaConfig):
    """Llama's fields, those of Mamba-2, and factors of parts of projections."""

    mamba: MambaConfig
    qkv_factors: tuple[float, float, float]
    """Factors of queries, keys and values"""
    mamba_factors: tuple[float, float, float, float, float]
    """Factors of z, x, B, C and dt"""
    mlp_factors: tuple[float, float]
    """Factors of gate and up"""

    @property
    def layer_parts(self) -> int:
        """Attention, Mamba-2 and MLP."""
        return 3

    def sharded(self, ranks: int) -> Self:
        """As `ModelConfig.sharded`: groups of Mamba's heads are shared too."""
        if ranks == 1:
            return self
        own = self.mamba.sharded(ranks)
        return replace(super().sharded(ranks), mamba=own, layer_states=(own.states,) * self.num_layers)


def read_config(raw: Mapping[str, Any]) -> FalconH1Config:
    """Falcon-H1's configuration from config.json.

    Raises:
        As `llama.read_config`; UnsupportedModelError also for layers without attention or MLP, and for biases with some
        factors.
    """
    fields = Fields(TOKENS | USUAL | dict(raw))
    refuse_other_layers(fields, kinds=("hybrid",))
    layers = read_layers(fields)
    _refuse_other_parts(fields, layers)

    def factor(name: str) -> float:
        return fields.number(name, 1.0, above=1 / MOST, most=MOST)

    stream, inner = factor("ssm_out_multiplier"), factor("ssm_in_multiplier")
    attention_in, attention_out = factor("attention_in_multiplier"), factor("attention_out_multiplier")
    gate, down = _read_factors(fields, "mlp_multipliers", 2)
    sections = _read_factors(fields, "ssm_multipliers", 5)
    bias, mlp_bias = fields.get("attention_bias", False), fields.get("mlp_bias", False)
    _refuse_bias(fields, "attention_bias", {"attention_in_multiplier": (attention_in, 1)})
    _refuse_bias(fields, "attention_bias", {"attention_out_multiplier": (attention_out, stream)})
    _refuse_bias(fields, "mamba_proj_bias", {"ssm_in_multiplier": (inner, 1)})
    _refuse_bias(fields, "mlp_bias", {"mlp_multipliers": (down, stream)})
    epsilon = fields.number("rms_norm_eps", 1e-5)
    wide = "mamba_d_ssm" in raw and raw["mamba_d_ssm"] is None
    mamba = read_mamba(
        fields,
        fields.size("mamba_expand", 2) * fields.size("hidden_size") if wide else fields.size("mamba_d_ssm", INNER),
        defaults=DEFAULTS,
        names=FIELDS,
        activation=read_activation(fields, "hidden_act", "silu"),
        epsilon=epsilon,
        normed=fields.get("mamba_rms_norm", False),
        norm_first=fields.get("mamba_norm_before_gate", True),
    )
    return read_kin(
        fields,
        "falcon_h1",
        kind=FalconH1Config,
        epsilon=epsilon / stream**2,
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=mlp_bias,
        embedding_scale=factor("embedding_multiplier") / stream,
        given_scale=1 / stream,
        logit_scale=factor("lm_head_multiplier"),
        layer_states=(mamba.states,) * layers,
        attends=(True,) * layers,
        mamba=mamba,
        qkv_factors=(attention_in, attention_in * factor("key_multiplier"), attention_in * attention_out / stream),
        mamba_factors=tuple(inner * section for section in sections),
        mlp_factors=(gate, down / stream),
        pad_token_id=fields.token_id("pad_token_id"),
    )


def _read_factors(fields: Fields, name: str, count: int) -> tuple[float, ...]:
    """A list of factors, by default 1.

    Raises:
        CheckpointError: it is none, or one is invalid.
    """
    factors = fields.get(name, [1.0] * count)
    if len(factors) != count:
        raise CheckpointError(f"{fields.source}: {name} should be {count} numbers, found {factors!r:.60}")
    by_place = Fields({f"{name}[{i}]": factor for i, factor in enumerate(factors)}, fields.source)
    return tuple(by_place.number(place, above=1 / MOST, most=MOST) for place in by_place.raw)


def _refuse_other_parts(fields: Fields, layers: int) -> None:
    """Refuse layers that lack a part; transformers' class has all parts in all layers.

    Raises:
        UnsupportedModelError: such a layer is asked for.
    """
    if not fields.get("mamba_use_mlp", True):
        raise UnsupportedModelError(f"{fields.source}: mamba_use_mlp is false; minillm runs layers with an MLP")
    attend = fields.get("attn_layer_indices", [*range(layers)])
    if attend != [*range(layers)]:
        raise UnsupportedModelError(
            f"{fields.source}: attn_layer_indices is {attend!r:.60}; minillm runs attention in all {layers} layers"
        )


def _refuse_bias(fields: Fields, name: str, factors: Mapping[str, tuple[float, float]]) -> None:
    """Refuse a bias beside a factor that would change it.

    Args:
        fields: config.json
        name: the field that says whether there is a bias
        factors: the name of a factor's field -> the factor, and the one that changes nothing

    Raises:
        UnsupportedModelError: there are both.
    """
    for other, (factor, neutral) in factors.items():
        if fields.get(name, False) and factor != neutral:
            raise UnsupportedModelError(
                f"{fields.source}: {name} is true and {other} is {factor:g}; minillm runs such biases where it is "
                f"{neutral:g}"
            )


def build(config: FalconH1Config, weights: Weights, backend: Backend) -> Decoder:
    """Build the model."""
    E, V = config.hidden_size, config.vocab_size
    table = weights.table("embed_tokens", V, E, "vocabulary")
    embedding = Embedding(table, scale=config.embedding_scale, given_scale=config.given_scale)
    head = embedding.tokens if config.tied_head else weights.table("lm_head", V, E, "vocabulary")
    own = config.sharded(weights.ranks)
    D, F, wide = config.head_dim, config.intermediate_size // weights.ranks, own.mamba.groups * own.mamba.state_size
    widths = own.mamba.inner, own.mamba.inner, wide, wide, own.mamba.num_heads
    parts: dict[str, Any] = {
        "rotation": config.rotary.rotation(backend),
        "qkv": _columns(backend, config.qkv_factors, (own.num_heads * D, own.num_kv_heads * D, own.num_kv_heads * D)),
        "mamba": _columns(backend, config.mamba_factors, widths),
        "mlp": _columns(backend, config.mlp_factors, (F, F)),
    }
    layers = tuple(_build_layer(config, weights.at(f"layers.{i}"), i, **parts) for i in range(config.num_layers))
    final_norm = weights.rms_norm("norm", E, config.epsilon)
    return Decoder(own, embedding, layers, final_norm, LMHead(head, scale=config.logit_scale))


def _columns(backend: Backend, factors: tuple[float, ...], widths: tuple[int, ...]) -> Weight | None:
    """A factor of each column of parts with these widths; None if all are 1."""
    if all(factor == 1 for factor in factors):
        return None
    return backend.loader.constant("factors", np.repeat(np.array(factors, np.float32), widths))


def _build_layer(
    config: FalconH1Config, weights: Weights, i: int, *, rotation: Any, qkv: Any, mamba: Any, mlp: Any
) -> ParallelMamba:
    E, F = config.hidden_size, config.intermediate_size
    norm = weights.rms_norm("input_layernorm", E, config.epsilon)
    attention = weights.attention(
        config,
        i,
        qkv=weights.qkv_proj(config, bias=config.qkv_bias),
        out=weights.o_proj(config, bias=config.out_bias),
        rotation=rotation,
        factors=qkv,
    )
    beside = build_mamba(config.mamba, weights.at("mamba"), i, E, factors=mamba)
    mlp_norm = weights.rms_norm("post_attention_layernorm", E, config.epsilon)
    dense = weights.gated_mlp(E, F, config.activation, bias=config.mlp_bias, factors=mlp)
    return ParallelMamba(norm, attention, beside, mlp_norm, dense)
