"""The components of OPT, Llama and its kin, LFM2 and T5: outlines written out by hand from `components.py`.

Nothing here looks at how minillm builds a model. Other families have no outline: what is counted of them is held
against the model of shapes alone.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from minillm.config import ModelConfig
from minillm.models import opt
from minillm.models.rotary import RotaryConfig

from .components import (
    Attend,
    Combine,
    Component,
    Convolve,
    Embed,
    ExpertLinear,
    Gate,
    Linear,
    Norm,
    Outline,
    Rotate,
    Route,
    Scan,
    Sigmoids,
    Spread,
    StoreKV,
    TakeRows,
    gated_mlp,
    head,
    mlp,
    self_attention,
)


def has_outline(config: ModelConfig) -> bool:
    """Whether the model is described here: OPT, the families built as Llama is, LFM2 and T5."""
    return config.model_type in _outlines()


def layers_with_keys(config: ModelConfig) -> int:
    """Number of layers that store keys and values."""
    if not has_outline(config):
        return config.num_layers
    return sum(any(isinstance(part, StoreKV) for part in layer) for layer in outline_of(config).layers)


def outline_of(config: ModelConfig) -> Outline:
    """The components of a model, by its family."""
    outline = _outlines()[config.model_type](config)
    if config.output == "tokens":
        return outline
    width = config.hidden_size  # the classification head has no more than its matrix
    score = Linear(name="head.weight", inputs=width, outputs=len(config.labels), role="labels")
    return replace(outline, head=(TakeRows(name="take_rows", width=width), score))


def _outlines() -> dict[str, Callable[[Any], Outline]]:
    llamas = ("llama", "mistral", "mixtral", "qwen3_moe", "olmoe", "qwen2", "qwen3", "smollm3", "granite", "phi3")
    llamas += ("qwen2_moe", "glm4_moe", "dots1", "minimax_m2", "ernie4_5_moe")
    llamas += ("granitemoe", "granitemoeshared", "granitemoehybrid", "bamba")  # the last with Mamba-2
    return {"opt": _opt, "t5": _t5, "mt5": _t5, "lfm2": _lfm2, "nemotron_h": _nemotron_h} | dict.fromkeys(
        llamas, _llama
    )


def encoder_outline_of(config: ModelConfig) -> Outline:
    """The components of an encoder-decoder's encoder, and the keys and values of cross-attention."""
    outline = _t5_encoder(config)

    def named(parts: tuple[Component, ...]) -> tuple[Component, ...]:
        own = [isinstance(each, Linear | Norm) and not each.name.startswith("cross.") for each in parts]
        pairs = zip(parts, own, strict=True)
        return tuple(replace(each, name=f"encoder.{each.name}") if is_own else each for each, is_own in pairs)

    before, *layers, after = (named(parts) for parts in (outline.before, *outline.layers, outline.after))
    return replace(outline, before=before, layers=tuple(layers), after=after)


def _cross_kv(config: ModelConfig) -> tuple[Component, ...]:
    E, K, D = config.hidden_size, config.num_kv_heads, config.head_dim
    kv = Linear(name="cross.kv", inputs=E, outputs=2 * K * D, given_back=True)
    return (kv, StoreKV(name="store_kv", kv_heads=K, head_dim=D)) * config.num_layers


def _cross(config: ModelConfig) -> tuple[Component, ...]:
    E, H, K, D = config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim
    return (
        Linear(name="cross.q", inputs=E, outputs=H * D),
        Attend(name="attend", heads=H, kv_heads=K, head_dim=D, causal=False, cross=True),
        Linear(name="cross.out", inputs=H * D, outputs=E, residual=True),
    )


def _t5_norm(config: Any, name: str) -> Norm:
    return Norm(name=f"{name}.weight", width=config.hidden_size, mean=False)


def _t5_attention(config: Any, i: int, *, causal: bool) -> tuple[Component, ...]:
    bias = {"distances": 2 * config.max_distance + 1, "buckets": 0 if i else config.buckets}
    return self_attention(config, bias=False, out_bias=False, causal=causal, **bias)


def _t5_mlp(config: Any) -> tuple[Component, ...]:
    return (gated_mlp if config.gated else mlp)(config, config.activation, bias=False)


def _t5_encoder(config: Any) -> Outline:
    embed = Embed(name="embedding.tokens", width=config.hidden_size, vectors=config.vocab_size)
    layers = (
        (
            _t5_norm(config, "attention_norm"),
            *_t5_attention(config, i, causal=False),
            _t5_norm(config, "mlp_norm"),
            *_t5_mlp(config),
        )
        for i in range(config.encoder_layers)
    )
    after = (_t5_norm(config, "final_norm"), *_cross_kv(config))
    return Outline(before=(embed,), layers=tuple(layers), after=after, head=())


def _t5(config: Any) -> Outline:
    embed = Embed(name="embedding.tokens", width=config.hidden_size, vectors=config.vocab_size)
    layers = (
        (
            _t5_norm(config, "attention_norm"),
            *_t5_attention(config, i, causal=True),
            _t5_norm(config, "cross_norm"),
            *_cross(config),
            _t5_norm(config, "mlp_norm"),
            *_t5_mlp(config),
        )
        for i in range(config.num_layers)
    )
    return Outline(
        before=(embed,),
        layers=tuple(layers),
        after=(_t5_norm(config, "final_norm"),),
        head=head(config, tied=config.tied_head, scaled=config.scaled_head),
    )


def _opt(config: Any) -> Outline:
    E, V, W, b = config.hidden_size, config.vocab_size, config.embedding_size, config.biases
    positions = config.max_positions + opt.POSITION_OFFSET
    before: tuple[Component, ...] = (Embed(name="embedding.tokens", width=E, vectors=V, positions=positions),)
    if W != E:
        before = (
            Embed(name="embedding.positions", width=E, vectors=0, positions=positions),
            Embed(name="embedding.tokens", width=W, vectors=V),
            Linear(name="embedding.project_in", inputs=W, outputs=E, residual=True),
        )
    attention = self_attention(config, bias=b, out_bias=b)
    ffn = mlp(config, config.activation, bias=b)
    affine, names = config.norm_affine, ("attention", "mlp", "final")
    norms = [Norm(name=f"{name}_norm.weight", width=E, affine=affine) for name in names]
    layer = (norms[0], *attention, norms[1], *ffn) if config.pre_norm else (*attention, norms[0], *ffn, norms[1])
    return Outline(
        before=before,
        layers=(layer,) * config.num_layers,
        after=(norms[2],) if config.final_norm else (),
        head=head(config, tied=config.tied_head, width=W),
    )


def _llama(config: Any) -> Outline:
    E = config.hidden_size
    return Outline(
        before=(
            Embed(name="embedding.tokens", width=E, vectors=config.vocab_size, scaled=config.embedding_scale != 1),
        ),
        layers=tuple(_llama_layer(config, i) for i in range(config.num_layers)),
        after=(Norm(name="final_norm.weight", width=E, mean=False),),
        head=head(config, tied=config.tied_head, scaled=config.logit_scale != 1),
    )


def _llama_layer(config: Any, i: int) -> tuple[Component, ...]:
    E = config.hidden_size
    between: tuple[Component, ...] = (_rotation(config, config.rotary),) if config.rotated[i] else ()
    if config.head_norms:
        between = (*_head_norms(config), *between)
    elif config.projection_norms:
        between = (*_projection_norms(config), *between)
    dense = not (config.num_experts and config.sparse[i])
    if getattr(config, "mambas", None) and config.mambas[i]:
        return (
            Norm(name="mamba_norm.weight", width=E, mean=False),
            *_mamba(config, config.mamba),
            Norm(name="mlp_norm.weight", width=E, mean=False),
            *(gated_mlp(config, config.activation, bias=config.mlp_bias) if dense else _experts(config)),
        )
    return (
        Norm(name="attention_norm.weight", width=E, mean=False),
        *self_attention(
            config, bias=config.qkv_bias, out_bias=config.out_bias, between=between, window=config.windows[i]
        ),
        Norm(name="mlp_norm.weight", width=E, mean=False),
        *(gated_mlp(config, config.activation, bias=config.mlp_bias) if dense else _experts(config)),
    )


def _mamba(config: Any, mamba: Any) -> tuple[Component, ...]:
    E, H, P, G, N, b = config.hidden_size, mamba.num_heads, mamba.head_dim, mamba.groups, mamba.state_size, mamba.bias
    inner, channels = H * P, H * P + 2 * G * N
    norm = Norm(name="mamba.norm.weight", width=inner // G, rows=G, mean=False, gains=G)
    return (
        Linear(name="mamba.projection", inputs=E, outputs=inner + channels + H, bias=b),
        Convolve(
            name="mamba.taps",
            width=channels,
            taps=mamba.taps,
            bias=mamba.conv_bias,
            gated=False,
            activation=mamba.activation,
        ),
        Scan(name="mamba.rates", heads=H, head_dim=P, groups=G, state_size=N),
        Sigmoids(name="gate", width=inner, logits=inner),
        *((norm,) if mamba.normed else ()),
        Linear(name="mamba.out", inputs=inner, outputs=E, bias=b, residual=True),
    )


def _nemotron_h(config: Any) -> Outline:
    E = config.hidden_size

    def parts(kind: str) -> tuple[Component, ...]:
        if kind == "mamba":
            return _mamba(config, config.mamba)
        if kind == "mlp":
            return mlp(config, config.activation, bias=config.mlp_bias)
        return self_attention(config, bias=False, out_bias=False)

    return Outline(
        before=(Embed(name="embedding.tokens", width=E, vectors=config.vocab_size),),
        layers=tuple((Norm(name="norm.weight", width=E, mean=False), *parts(kind)) for kind in config.kinds),
        after=(Norm(name="final_norm.weight", width=E, mean=False),),
        head=head(config, tied=False),
    )


def _lfm2(config: Any) -> Outline:
    E = config.hidden_size
    return Outline(
        before=(Embed(name="embedding.tokens", width=E, vectors=config.vocab_size),),
        layers=tuple(_lfm2_layer(config, convolves) for convolves in config.convolves),
        after=(Norm(name="final_norm.weight", width=E, mean=False),),
        head=head(config, tied=config.tied_head),
    )


def _lfm2_layer(config: Any, convolves: bool) -> tuple[Component, ...]:
    E, b, kind = config.hidden_size, config.conv_bias, "convolution" if convolves else "attention"
    operator: tuple[Component, ...] = (
        Linear(name="convolution.projection", inputs=E, outputs=3 * E, bias=b),
        Convolve(name="convolution.taps", width=E, taps=config.taps, bias=b),
        Linear(name="convolution.out", inputs=E, outputs=E, bias=b, residual=True),
    )
    if not convolves:
        between = (*_head_norms(config), _rotation(config, config.rotary))
        operator = self_attention(config, bias=False, out_bias=False, between=between)
    return (
        Norm(name=f"{kind}_norm.weight", width=E, mean=False),
        *operator,
        Norm(name="mlp_norm.weight", width=E, mean=False),
        *gated_mlp(config, "silu"),
    )


def _experts(config: Any) -> tuple[Component, ...]:
    E, F, X, k = config.hidden_size, config.expert_size, config.num_experts, config.experts_per_token
    return (
        Linear(name="mlp.router", inputs=E, outputs=X, role="router"),
        Route(
            experts=X,
            chosen=k,
            normalised=config.normalised,
            sigmoid=config.router.sigmoid,
            biased=config.corrected,
            groups=config.router.groups,
            scaled=config.router.scale != 1,
        ),
        *_shared(config),
        Spread(width=E, chosen=k),
        ExpertLinear(name="mlp.gate_up", inputs=E, outputs=2 * F, experts=X, chosen=k),
        Gate(name="glu", width=F, activation=config.activation, rows=k),
        ExpertLinear(name="mlp.down", inputs=F, outputs=E, experts=X, chosen=k),
        Combine(width=E, chosen=k),
    )


def _shared(config: Any) -> tuple[Component, ...]:
    """The expert that all tokens share, if there is one."""
    E, F, bias = config.hidden_size, config.shared_size, config.mlp_bias
    if not F:
        return ()
    gate = (
        Linear(name="mlp.shared_gate", inputs=E, outputs=1),
        Sigmoids(name="gate", width=F, logits=1),
    )
    return (
        Linear(name="mlp.shared.gate_up", inputs=E, outputs=2 * F, bias=bias),
        Gate(name="glu", width=F, activation=config.activation),
        *(gate if config.shared_gate else ()),
        Linear(name="mlp.shared.down", inputs=F, outputs=E, bias=bias, residual=True),
    )


def _head_norms(config: ModelConfig) -> tuple[Component, ...]:
    rows = {"attention.head_norms.q": config.num_heads, "attention.head_norms.k": config.num_kv_heads}
    return tuple(Norm(name=name, width=config.head_dim, rows=heads, mean=False) for name, heads in rows.items())


def _projection_norms(config: ModelConfig) -> tuple[Component, ...]:
    heads = {"q": config.num_heads, "k": config.num_kv_heads}
    names = {name: f"attention.projection_norms.{name}" for name in heads}
    return tuple(Norm(name=names[x], width=heads[x] * config.head_dim, mean=False) for x in heads)


def _rotation(config: ModelConfig, rotary: RotaryConfig) -> Rotate:
    return Rotate(
        name="rotary",
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        pairs=len(rotary.frequencies),
        scaled=rotary.scale != 1,
        stretched=rotary.stretch is not None,
    )
