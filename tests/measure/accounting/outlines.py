"""The components of OPT, Llama and its kin, LFM2, Qwen3-Next, Gemma 4 and T5: outlines by hand from `components.py`.

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
    DeltaRule,
    Embed,
    ExpertLinear,
    Gate,
    HeadLinear,
    Linear,
    Multiply,
    Norm,
    Outline,
    Rotate,
    Route,
    ScaleLogits,
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
    """Whether the model is described here: OPT, families built as Llama is, LFM2, Qwen3-Next, Gemma 4 and T5."""
    return config.model_type in _outlines()


def layers_with_keys(config: ModelConfig) -> list[int]:
    """The layers that store keys and values."""
    if not has_outline(config):
        return list(range(config.num_layers))
    layers = enumerate(outline_of(config).layers)
    return [i for i, layer in layers if any(isinstance(part, StoreKV) for part in layer)]


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
    llamas += ("qwen2_moe", "glm4_moe", "dots1", "minimax_m2", "ernie4_5_moe", "gpt_oss")
    llamas += ("granitemoe", "granitemoeshared", "granitemoehybrid", "bamba")  # the last two with Mamba-2
    latents = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "youtu", "minicpm3", "mistral4")
    nets = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
    others = {
        "opt": _opt,
        "t5": _t5,
        "mt5": _t5,
        "lfm2": _lfm2,
        "lfm2_moe": _lfm2,
        "gemma4_text": _gemma4,
        "nemotron_h": _nemotron_h,
    }
    others["falcon_h1"] = _falcon_h1
    others |= dict.fromkeys(latents, _latent) | dict.fromkeys(nets, _qwen3_next)
    return others | dict.fromkeys(llamas, _llama)


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


def _latent(config: Any) -> Outline:
    E = config.hidden_size
    return replace(
        _llama(config),
        layers=tuple(
            (
                Norm(name="attention_norm.weight", width=E, mean=False),
                *_latent_attention(config),
                *_mlp_of_llama(config, i),
            )
            for i in range(config.num_layers)
        ),
    )


def _latent_attention(config: Any) -> tuple[Component, ...]:
    E, H, C, Q = config.hidden_size, config.num_heads, config.value_dim, config.query_rank
    r, n, V, b = config.rope_dim, config.nope_dim, config.expanded_dim, config.qkv_bias
    q: tuple[Component, ...] = (Linear(name="attention.qkv", inputs=Q or E, outputs=H * (r + n)),)
    if Q:
        low = Linear(name="attention.q_down", inputs=E, outputs=Q, bias=b)
        q = (low, Norm(name="attention.q_norm.weight", width=Q, mean=False), *q)
    rotation = replace(_rotation(config, config.rotary), kv_heads=1, head_dim=r + n, key_dim=r)
    return (
        Linear(name="attention.kv", inputs=E, outputs=r + C, bias=b),
        Norm(name="attention.kv_norm.weight", width=C, mean=False),
        *q,
        rotation,
        StoreKV(name="store_kv", kv_heads=1, head_dim=r + C, joined=True),
        HeadLinear(name="attention.keys", heads=H, inputs=n, outputs=C, copied=r),
        Attend(name="attend", heads=H, kv_heads=1, head_dim=r + C, value_dim=C),
        HeadLinear(name="attention.values", heads=H, inputs=C, outputs=V),
        Linear(name="attention.out", inputs=H * V, outputs=E, bias=config.out_bias, residual=True),
    )


def _llama_layer(config: Any, i: int) -> tuple[Component, ...]:
    E = config.hidden_size
    between: tuple[Component, ...] = (_rotation(config, config.rotary),) if config.rotated[i] else ()
    if config.head_norms:
        between = (*_head_norms(config), *between)
    elif config.projection_norms:
        between = (*_projection_norms(config), *between)
    if getattr(config, "mambas", None) and config.mambas[i]:
        norm = Norm(name="mamba_norm.weight", width=E, mean=False)
        return norm, *_mamba(config, config.mamba), *_mlp_of_llama(config, i)
    return (
        Norm(name="attention_norm.weight", width=E, mean=False),
        *self_attention(
            config,
            bias=config.qkv_bias,
            out_bias=config.out_bias,
            between=between,
            window=config.windows[i],
            sunk=config.sinks,
        ),
        *_mlp_of_llama(config, i),
    )


def _mlp_of_llama(config: Any, i: int) -> tuple[Component, ...]:
    dense = not (config.num_experts and config.sparse[i])
    return (
        Norm(name="mlp_norm.weight", width=config.hidden_size, mean=False),
        *(gated_mlp(config, config.activation, bias=config.mlp_bias) if dense else _experts(config)),
    )


def _mamba(config: Any, mamba: Any) -> tuple[Component, ...]:
    E, H, P, G, N, b = config.hidden_size, mamba.num_heads, mamba.head_dim, mamba.groups, mamba.state_size, mamba.bias
    inner, channels = H * P, H * P + 2 * G * N
    norm = Norm(name="mamba.norm.weight", width=inner // G, rows=G, mean=False, gains=G)
    before, after = ((norm,) if mamba.normed and first == mamba.norm_first else () for first in (True, False))
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
        *before,
        Sigmoids(name="gate", width=inner, logits=inner),
        *after,
        Linear(name="mamba.out", inputs=inner, outputs=E, bias=mamba.out_bias, residual=True),
    )


def _falcon_h1(config: Any) -> Outline:
    parts: tuple[Component, ...] = (
        *_llama_layer(config, 0)[: -len(_mlp_of_llama(config, 0))],
        *_mamba(config, config.mamba),
        *_mlp_of_llama(config, 0),
    )
    factors = {
        "attention.qkv": config.qkv_factors,
        "mamba.projection": config.mamba_factors,
        "mlp.gate_up": config.mlp_factors,
    }
    layer: list[Component] = []
    for part in parts:
        layer.append(part)
        if isinstance(part, Linear) and {*factors.get(part.name, ())} - {1}:
            layer.append(Multiply(name="multiply", width=part.outputs, factors=part.outputs))
    return replace(_llama(config), layers=(tuple(layer),) * config.num_layers)


def _nemotron_h(config: Any) -> Outline:
    E = config.hidden_size

    def parts(kind: str) -> tuple[Component, ...]:
        own = self_attention(config, bias=False, out_bias=False)
        if kind == "mamba":
            own = _mamba(config, config.mamba)
        elif kind == "mlp":
            own = mlp(config, config.activation, bias=config.mlp_bias)
        elif kind == "moe":
            own = _ungated_experts(config)
        return tuple(replace(each, name=each.name.replace(f"{kind}.", "part.")) for each in own)

    return Outline(
        before=(Embed(name="embedding.tokens", width=E, vectors=config.vocab_size),),
        layers=tuple((Norm(name="norm.weight", width=E, mean=False), *parts(kind)) for kind in config.kinds),
        after=(Norm(name="final_norm.weight", width=E, mean=False),),
        head=head(config, tied=False),
    )


def _ungated_experts(config: Any) -> tuple[Component, ...]:
    E, F, S, bias = config.hidden_size, config.expert_size, config.shared_size, config.mlp_bias
    X, k, router = config.num_experts, config.experts_per_token, config.router
    switches: dict[str, Any] = {"normalised": config.normalised, "groups": router.groups, "scaled": router.scale != 1}
    return (
        Linear(name="moe.router", inputs=E, outputs=X, role="router"),
        Route(experts=X, chosen=k, sigmoid=True, biased=True, **switches),
        Linear(name="moe.shared.up", inputs=E, outputs=S, bias=bias, activation=config.activation),
        Linear(name="moe.shared.down", inputs=S, outputs=E, bias=bias, residual=True),
        Spread(width=E, chosen=k),
        ExpertLinear(name="moe.gate_up", inputs=E, outputs=F, experts=X, chosen=k),
        Gate(name="glu", width=F, activation="relu", rows=k, alone=True),
        ExpertLinear(name="moe.down", inputs=F, outputs=E, experts=X, chosen=k),
        Combine(width=E, chosen=k),
    )


def _lfm2(config: Any) -> Outline:
    E = config.hidden_size
    return Outline(
        before=(Embed(name="embedding.tokens", width=E, vectors=config.vocab_size),),
        layers=tuple(_lfm2_layer(config, i) for i in range(config.num_layers)),
        after=(Norm(name="final_norm.weight", width=E, mean=False),),
        head=head(config, tied=config.tied_head),
    )


def _lfm2_layer(config: Any, i: int) -> tuple[Component, ...]:
    convolves, sparse = config.convolves[i], bool(config.num_experts) and config.sparse[i]
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
        *(_experts(config) if sparse else gated_mlp(config, "silu")),
    )


def _qwen3_next(config: Any) -> Outline:
    E = config.hidden_size
    return Outline(
        before=(Embed(name="embedding.tokens", width=E, vectors=config.vocab_size),),
        layers=tuple(_qwen3_next_layer(config, i) for i in range(config.num_layers)),
        after=(Norm(name="final_norm.weight", width=E, mean=False),),
        head=head(config, tied=config.tied_head),
    )


def _qwen3_next_layer(config: Any, i: int) -> tuple[Component, ...]:
    E, (K, dk), (V, dv) = config.hidden_size, config.keys, config.values
    mixed, values, kind = 2 * K * dk + V * dv, V * dv, "delta_net" if config.linear[i] else "attention"
    operator: tuple[Component, ...] = (
        Linear(name="delta_net.projection", inputs=E, outputs=mixed + values + 2 * V),
        Convolve(
            name="delta_net.taps",
            width=mixed,
            taps=config.taps,
            bias=False,
            gated=False,
            activation=config.activation,
        ),
        DeltaRule(name="delta_net.decay", key_heads=K, heads=V, key_dim=dk, head_dim=dv),
        Norm(name="delta_net.norm.weight", width=dv, rows=V, mean=False),
        Sigmoids(name="gate", width=values, logits=values),
        Linear(name="delta_net.out", inputs=values, outputs=E, residual=True),
    )
    if not config.linear[i]:
        bias, between = config.qkv_bias, (*_head_norms(config), _rotation(config, config.rotary))
        operator = self_attention(config, bias=bias, out_bias=bias, between=between, gated=True)
    dense = not (config.num_experts and config.sparse[i])
    return (
        Norm(name=f"{kind}_norm.weight", width=E, mean=False),
        *operator,
        Norm(name="mlp_norm.weight", width=E, mean=False),
        *(gated_mlp(config, config.activation) if dense else _experts(config)),
    )


def _gemma4(config: Any) -> Outline:
    E, V, L, P = config.hidden_size, config.vocab_size, config.num_layers, config.per_layer_width // config.num_layers
    per_layer = (
        Embed(name="per_layer.table", width=L * P, vectors=V, scaled=True),
        Linear(name="per_layer.projection", inputs=E, outputs=L * P),
        Norm(name="per_layer.norm.weight", width=P, rows=L, mean=False, residual=True),
    )
    ends = head(config, tied=config.tied_head)
    if config.logit_cap is not None:
        ends = (*ends, ScaleLogits(name="scale_logits", width=V, capped=True))
    return Outline(
        before=(Embed(name="embedding.tokens", width=E, vectors=V, scaled=True),),
        for_pass=per_layer if P else (),
        layers=tuple(_gemma4_layer(config, i) for i in range(L)),
        after=(Norm(name="final_norm.weight", width=E, mean=False),),
        head=ends,
    )


def _gemma4_layer(config: Any, i: int) -> tuple[Component, ...]:
    E, P, activation = config.hidden_size, config.per_layer_width // config.num_layers, config.activation

    def norm(name: str, *, residual: bool = False) -> Norm:
        return Norm(name=f"{name}.weight", width=E, mean=False, residual=residual)

    per_layer = (
        Linear(name="per_layer.gate", inputs=E, outputs=P, activation=activation),
        Multiply(name="multiply", width=P, by_rows=True),
        Linear(name="per_layer.out", inputs=P, outputs=E),
        norm("per_layer.norm", residual=True),
    )
    F = config.mlp_sizes[i]
    return (
        norm("attention_norm"),
        *_gemma4_attention(config, i),
        norm("attention_out_norm", residual=True),
        norm("mlp_norm"),
        Linear(name="mlp.gate_up", inputs=E, outputs=2 * F),
        Gate(name="glu", width=F, activation=activation),
        Linear(name="mlp.down", inputs=F, outputs=E),
        *(_side_experts(config) if config.expert_size else ()),
        norm("mlp_out_norm", residual=True),
        *(per_layer if P else ()),
        Multiply(name="multiply", width=E),
    )


def _gemma4_attention(config: Any, i: int) -> tuple[Component, ...]:
    E, H, (K, D) = config.hidden_size, config.num_heads, config.kv_shapes[i]
    reads, merged = config.kv_sources[i] != i, config.keys_are_values and config.windows[i] is None
    stored = 0 if reads else K if merged else 2 * K
    own_norms = (
        Norm(name="attention.value_norm", width=D, rows=K, mean=False, affine=False),
        Norm(name="attention.head_norms.q", width=D, rows=H, mean=False),
        Norm(name="attention.head_norms.k", width=D, rows=K, mean=False),
    )
    return (
        Linear(name="attention.qkv", inputs=E, outputs=(H + stored) * D, bias=config.bias),
        *(own_norms[1:2] if reads else own_norms),
        Rotate(name="rotary", heads=H, kv_heads=1 if reads else K, head_dim=D, pairs=D // 2),
        *(() if reads else (StoreKV(name="store_kv", kv_heads=K, head_dim=D),)),
        Attend(name="attend", heads=H, kv_heads=K, head_dim=D, window=config.windows[i]),
        Linear(name="attention.out", inputs=H * D, outputs=E, bias=config.bias),
    )


def _side_experts(config: Any) -> tuple[Component, ...]:
    E, F, X, k = config.hidden_size, config.expert_size, config.num_experts, config.experts_per_token

    def norm(name: str, *, residual: bool = False) -> Norm:
        return Norm(name=f"experts.{name}.weight", width=E, mean=False, residual=residual)

    return (
        norm("mlp_out_norm"),
        norm("norm"),
        norm("router_norm"),
        Linear(name="experts.experts.router", inputs=E, outputs=X, role="router"),
        Route(experts=X, chosen=k, normalised=True, by_factors=True),
        Spread(width=E, chosen=k),
        ExpertLinear(name="experts.experts.gate_up", inputs=E, outputs=2 * F, experts=X, chosen=k),
        Gate(name="glu", width=F, activation=config.activation, rows=k),
        ExpertLinear(name="experts.experts.down", inputs=F, outputs=E, experts=X, chosen=k),
        Combine(width=E, chosen=k, residual=False),
        norm("out_norm", residual=True),
    )


def _experts(config: Any) -> tuple[Component, ...]:
    E, F, X, k = config.hidden_size, config.expert_size, config.num_experts, config.experts_per_token
    bias = config.expert_bias
    return (
        Linear(name="mlp.router", inputs=E, outputs=X, role="router", bias=bias),
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
        ExpertLinear(name="mlp.gate_up", inputs=E, outputs=2 * F, experts=X, chosen=k, bias=bias),
        Gate(name="glu", width=F, activation=config.activation, rows=k),
        ExpertLinear(name="mlp.down", inputs=F, outputs=E, experts=X, chosen=k, bias=bias),
        Combine(width=E, chosen=k),
    )


def _shared(config: Any) -> tuple[Component, ...]:
    """The expert that all tokens share, if there is one."""
    E, F = config.hidden_size, config.shared_size
    if not F:
        return ()
    bias = config.mlp_bias
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
