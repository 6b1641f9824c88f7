"""Gemma 4, the text model (Google, 2026; as transformers computes it).

    x = sqrt(E) tokens[ids];  p = per-layer embeddings of x and ids          E2B, E4B (`layers/per_layer.py`)
    x = x + norm(attention(norm(x)));  x = x + norm(mlp(norm(x)))            in each layer
    x = s (x + norm((gelu(x W_gate) * p[layer]) W_out))
    logits = c tanh(norm(x) W_lm / c)

The norm is RMS norm. Queries, keys and values are normed by head, the latter without a gain, and scores have no scale.
Layers without a window have wider heads, of which a quarter turns; their values may be their keys before the norm. The
last layers read the keys and values of an earlier one, and may have MLPs twice as wide. Experts may be beside each MLP.

Checkpoints that also read images and sound ("gemma4", "gemma4_unified") have the text model under names of its own
(`text_parts.py`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..backends.operations import Backend
from ..backends.pages import Pages
from ..batch import Batch
from ..config import Fields, ModelConfig
from ..errors import CheckpointError, UnsupportedModelError
from ..layers.attention import HeadNorms
from ..layers.embedding import Embedding, LMHead
from ..layers.experts import ExpertMLP, SideExperts
from ..layers.norm import RMSNorm
from ..layers.per_layer import PerLayerEmbedding, PerLayerInput, ScaledSandwich
from ..layers.shared_attention import SharedAttention
from ..reference.attention import AttentionSpec
from ..reference.rotary import Rotation
from .decoder import Decoder
from .gemma2 import TOKENS, embedding_scale, read_cap
from .mixtral import MOST_EXPERTS
from .parameters import Weights
from .reading import read_activation, read_grouped_heads, read_layer_kinds, read_shared, refuse_other_layers
from .rotary import RotaryConfig, read_rotary
from .tensor_names import Names

WINDOW, EVERY = 512, 6
"""Sliding window, and every which layer has none, if config.json has neither."""
HEADS: dict[str, int] = {"kv_heads": 4, "head_dim": 256}
GLOBAL_HEAD_DIM = 512
"""Key/value heads and head widths, of layers with a window and without, if config.json has none."""
FULL, SLIDING = "full_attention", "sliding_attention"
ROTARY: dict[str, dict[str, Any]] = {
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
    SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
}
"""Rotary embedding of both kinds of layers if config.json has none."""
ROTARY_KINDS = ("default", "linear", "proportional")
OF_LAYERS = {"head_dim", "num_key_value_heads"}
"""Fields that config.json may have of single layers, in `per_layer_config`"""
PER_LAYER_SIZE = 256
"""P if config.json has none"""


@dataclass(frozen=True, kw_only=True)
class Gemma4Config(ModelConfig):
    """The shared fields and Gemma 4's own."""

    epsilon: float
    """Added to the mean square in each norm"""
    activation: str
    bias: bool
    """Whether the projections of attention have biases"""
    rotaries: tuple[RotaryConfig, ...]
    """Rotary embedding of each layer"""
    keys_are_values: bool
    """The values of layers without a window are their keys"""
    mlp_sizes: tuple[int, ...]
    """F of each layer"""
    expert_size: int
    """F of an expert; 0: there are none"""
    logit_cap: float | None
    """Soft cap of logits"""

    @property
    def shared_expert_layers(self) -> int:
        """Layers with an MLP beside experts, as with an expert that all tokens share."""
        return self.num_layers if self.expert_size else 0

    @property
    def per_layer_size(self) -> int:
        """P; 0: there are no per-layer embeddings."""
        return self.per_layer_width // self.num_layers


def read_config(raw: Mapping[str, Any]) -> Gemma4Config:
    """Gemma 4's configuration from config.json.

    Raises:
        CheckpointError: a field is missing or invalid.
        UnsupportedModelError: an unsupported activation, kind of layer or of rotary scaling, or attention both ways.
    """
    fields = Fields(TOKENS | {"sliding_window": WINDOW} | dict(raw))
    refuse_other_layers(Fields({name: raw[name] for name in raw if name != "per_layer_config"}), windows=True)
    if fields.raw.get("use_bidirectional_attention") not in (None, False, "vision"):  # in images alone
        raise UnsupportedModelError(
            f"{fields.source}: use_bidirectional_attention is {fields.raw['use_bidirectional_attention']!r:.60}; "
            "minillm runs causal attention"
        )
    slides = [*read_layer_kinds(fields, lambda i: (i + 1) % EVERY > 0)]
    slides[-1] = False  # in transformers too, whatever config.json says
    window, L = fields.size("sliding_window") if any(slides) else None, len(slides)
    shared = read_grouped_heads(fields, **HEADS) | read_shared(fields, tied_head=True)
    sources = _sources(fields, slides)
    shapes = _shapes(fields, slides, sources)
    positions = fields.size("max_position_embeddings", 131_072)
    widths = {SLIDING if slide else FULL: D for slide, (_, D) in zip(slides, shapes, strict=True)}
    rotaries = {kind: _rotary(fields, kind, D, positions) for kind, D in widths.items()}
    F = fields.size("intermediate_size")
    doubled = fields.get("use_double_wide_mlp", False)
    return Gemma4Config(
        model_type="gemma4_text",
        **shared | _experts(fields),
        intermediate_size=F,
        max_positions=positions,
        windows=tuple(window if slide else None for slide in slides),
        kv_shapes=shapes,
        kv_sources=sources,
        mixed_layers=True,
        per_layer_width=L * _per_layer_size(fields),
        pad_token_id=fields.token_id("pad_token_id"),
        epsilon=fields.number("rms_norm_eps", 1e-6),
        activation=read_activation(fields, "hidden_activation", "gelu_pytorch_tanh"),
        bias=fields.get("attention_bias", False),
        rotaries=tuple(rotaries[SLIDING if slide else FULL] for slide in slides),
        keys_are_values=fields.get("attention_k_eq_v", False),
        mlp_sizes=tuple(F * (2 if doubled and source != i else 1) for i, source in enumerate(sources)),
        logit_cap=read_cap(fields, "final_logit_softcapping"),
    )


def _sources(fields: Fields, slides: list[bool]) -> tuple[int, ...]:
    """The layer whose keys and values each layer reads: the last `num_kv_shared_layers`, the last of their kind before.

    Raises:
        CheckpointError: there is none.
    """
    reading = fields.get("num_kv_shared_layers", 0)
    own = len(slides) - reading
    if not 0 < own <= len(slides) or {*slides[:own]} != {*slides}:
        raise CheckpointError(
            f"{fields.source}: num_kv_shared_layers should leave a layer of each kind with keys and values of its own, "
            f"found {reading!s:.60}"
        )
    last = {slide: i for i, slide in enumerate(slides[:own])}
    return tuple(i if i < own else last[slide] for i, slide in enumerate(slides))


def _shapes(fields: Fields, slides: list[bool], sources: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """K and D of each layer: by `per_layer_config`, or those of layers without a window by fields of their own.

    Raises:
        CheckpointError: a field is invalid, or layers of one kind have heads of several widths.
        UnsupportedModelError: single layers differ in something else.
    """
    H, K, D = fields.size("num_attention_heads"), *_two(read_grouped_heads(fields, **HEADS))
    own = fields.get("per_layer_config", {})
    wide: dict[str, Any] = {"head_dim": fields.raw.get("global_head_dim", GLOBAL_HEAD_DIM)}
    if fields.get("attention_k_eq_v", False):
        wide["num_key_value_heads"] = fields.raw.get("num_global_key_value_heads")
    shapes = []
    for i, slide in enumerate(slides):
        layer = own.get(str(i), {}) if own else {} if slide else wide
        own_fields = Fields(layer if isinstance(layer, dict) else {"": layer}, f"{fields.source}, layer {i}")
        shapes.append((own_fields.size("num_key_value_heads", K), own_fields.size("head_dim", D)))
    unknown = {name for layer in own.values() for name in (layer if isinstance(layer, dict) else [layer])} - OF_LAYERS
    if unknown or not own.keys() <= {str(i) for i in range(len(slides))}:
        raise UnsupportedModelError(
            f"{fields.source}: per_layer_config; minillm runs layers of one shape but for {' and '.join(OF_LAYERS)}"
        )
    for i, (heads, width) in enumerate(shapes):
        same_kind = [w for (_, w), slide in zip(shapes, slides, strict=True) if slide == slides[i]]
        if H % heads or width not in same_kind or len({*same_kind}) > 1 or shapes[sources[i]] != shapes[i]:
            raise CheckpointError(
                f"{fields.source}: layer {i} has {heads} key/value heads of {width}: their number should divide "
                f"num_attention_heads {H}, and layers of one kind should have heads of one width"
            )
    return tuple(shapes)


def _two(heads: dict[str, int]) -> tuple[int, int]:
    return heads["num_kv_heads"], heads["head_dim"]


def _rotary(fields: Fields, kind: str, head_dim: int, positions: int) -> RotaryConfig:
    """Rotary embedding of layers of one kind."""
    tables = fields.get("rope_parameters", {}) or ROTARY
    for name in tables:
        if name not in ROTARY:
            raise UnsupportedModelError(
                f"{fields.source}: rope_parameters has {name!r:.60}; expected a table for each of {', '.join(ROTARY)}"
            )
    source = f"{fields.source}, rope_parameters"
    table = Fields(Fields(tables, source).get(kind, {}), f"{source}.{kind}")
    table.number("rope_theta", above=1)
    return read_rotary(Fields({"rope_parameters": table.raw}, fields.source), head_dim, positions, kinds=ROTARY_KINDS)


def _per_layer_size(fields: Fields) -> int:
    """P; 0: there are no per-layer embeddings.

    Raises:
        UnsupportedModelError: some tokens have none.
    """
    if fields.raw.get("hidden_size_per_layer_input", PER_LAYER_SIZE) == 0:
        return 0
    V, size = fields.size("vocab_size"), fields.size("vocab_size_per_layer_input", 262_144)
    if size != V:
        raise UnsupportedModelError(
            f"{fields.source}: vocab_size_per_layer_input is {size}; minillm runs as many as vocab_size, {V}"
        )
    return fields.size("hidden_size_per_layer_input", PER_LAYER_SIZE)


def _experts(fields: Fields) -> dict[str, int]:
    """Numbers and width of the experts beside each MLP: fields of `Gemma4Config`.

    Raises:
        CheckpointError: a field is missing or invalid.
    """
    if not fields.get("enable_moe_block", False):
        return {"expert_size": 0}
    X, k = fields.size("num_experts", most=MOST_EXPERTS), fields.size("top_k_experts")
    if k > X:
        raise CheckpointError(f"{fields.source}: top_k_experts {k} should be at most num_experts {X}")
    return {"num_experts": X, "experts_per_token": k, "expert_size": fields.size("moe_intermediate_size")}


NAMES = Names(
    prefixes=("model.",),
    left_out=("rotary_emb.inv_freq",),
    renamed=(
        (".layer_scalar", ".layer_scalar.weight"),
        (".router.scale", ".router.norm.weight"),
        (".router.per_expert_scale", ".router.per_expert_scale.weight"),
    ),
    expert_tensors={
        ".experts.gate_up_proj": (".experts.*.gate_up_proj.weight",),
        ".experts.down_proj": (".experts.*.down_proj.weight",),
    },
)
"""Tensors of checkpoints: (model.)layers.0.mlp.up_proj.weight."""


@dataclass(frozen=True, eq=False)
class Gemma4Decoder(Decoder):
    """A decoder whose layers have vectors of their own of each token."""

    per_layer: PerLayerEmbedding | None = None

    def forward(
        self, backend: Backend, batch: Batch, cache: Pages, *, layers: range | None = None, x: Any = None
    ) -> Any:
        """As `Decoder.forward`; not in stages, to which the layers' vectors would have to be sent. [T] -> [T, E]"""
        if self.per_layer is None:
            return super().forward(backend, batch, cache, layers=layers, x=x)
        assert x is None and layers in (None, range(len(self.layers)))
        x = self.embedding(backend, batch)  # [T] -> [T, E]
        vectors = self.per_layer(backend, x, batch)  # [T, E] -> [T, L, P]
        for i, layer in enumerate(self.layers):
            assert isinstance(layer, ScaledSandwich)
            backend.enter_layer(i, x)
            x = layer(backend, x, cache, batch, vectors[:, i])  # [T, E], [T, P] -> [T, E]
        backend.enter_layer(len(self.layers), x)
        return x if self.final_norm is None else self.final_norm(backend, x)


def build(config: Gemma4Config, weights: Weights, backend: Backend) -> Decoder:
    """Build the model."""
    E, V = config.hidden_size, config.vocab_size
    tokens = weights.table("embed_tokens", V, E, "vocabulary")
    embedding = Embedding(tokens, scale=embedding_scale(E, backend.memory.activations))
    head = tokens if config.tied_head else weights.table("lm_head", V, E, "vocabulary")
    per_layer = _per_layer(config, weights) if config.per_layer_width else None
    rotations = {rotary: rotary.rotation(backend) for rotary in config.rotaries}  # the same angles are computed once
    layers = tuple(
        _build_layer(config, weights.at(f"layers.{i}"), rotations[rotary], i)
        for i, rotary in enumerate(config.rotaries)
    )
    norm = weights.rms_norm("norm", E, config.epsilon)
    head_layer = LMHead(head, cap=config.logit_cap)
    return Gemma4Decoder(config.sharded(weights.ranks), embedding, layers, norm, head_layer, per_layer)


def _per_layer(config: Gemma4Config, weights: Weights) -> PerLayerEmbedding:
    E, width, P = config.hidden_size, config.per_layer_width, config.per_layer_size
    return PerLayerEmbedding(
        weights.table("embed_tokens_per_layer", config.vocab_size, width, "vocabulary"),
        P**0.5,
        weights.linear("per_layer_model_projection", width, inputs=E),
        weights.rms_norm("per_layer_projection_norm", P, config.epsilon * E),  # of what is divided by sqrt E
        config.num_layers,
    )


def _build_layer(config: Gemma4Config, weights: Weights, rotation: Rotation, i: int) -> ScaledSandwich:
    E, P = config.hidden_size, config.per_layer_size

    def norm(name: str, times: float = 1.0) -> RMSNorm:
        return weights.rms_norm(name, E, config.epsilon * times)

    per_layer = None
    if P:
        per_layer = PerLayerInput(
            weights.linear("per_layer_input_gate", P, inputs=E),
            weights.linear("per_layer_projection", E, inputs=P),
            norm("post_per_layer_input_norm", 2),  # of what is divided by sqrt 2
            config.activation,
        )
    return ScaledSandwich(
        attention_norm=norm("input_layernorm"),
        attention=_attention(config, weights, rotation, i),
        attention_out_norm=norm("post_attention_layernorm"),
        mlp_norm=norm("pre_feedforward_layernorm"),
        mlp=weights.gated_mlp(E, config.mlp_sizes[i], config.activation),
        mlp_out_norm=norm("post_feedforward_layernorm"),
        factor=weights.norm("layer_scalar", 1),
        experts=_side_experts(config, weights) if config.expert_size else None,
        per_layer=per_layer,
    )


def _attention(config: Gemma4Config, weights: Weights, rotation: Rotation, i: int) -> SharedAttention:
    E, H, (K, D) = config.hidden_size, config.num_heads, config.kv_shape(i)
    reads = config.kv_source(i) != i
    merged = config.keys_are_values and config.windows[i] is None
    rows = {"self_attn.q_proj": H * D} | ({} if reads else {"self_attn.k_proj": K * D})
    rows |= {} if reads or merged else {"self_attn.v_proj": K * D}
    units = (H, K, K)[: len(rows)]
    norms = [weights.norm(f"self_attn.{name}_norm", D) for name in ("q" if reads else "qk")]
    attention = weights.attention(
        config,
        i,
        AttentionSpec(1.0, window=config.windows[i]),
        qkv=weights.linear("self_attn.qkv", rows, inputs=E, bias=config.bias, split="outputs", units=units),
        out=weights.linear("self_attn.o_proj", E, inputs=H * D, bias=config.bias, split="inputs"),
        kind=SharedAttention,
        rotation=rotation,
        head_norms=HeadNorms(norms[0], norms[-1], config.epsilon),
        only_reads=reads,
        keys_are_values=merged and not reads,
        value_norm=weights.norm("self_attn.v_norm", D, gain=False),
    )
    assert isinstance(attention, SharedAttention)
    return attention


def _side_experts(config: Gemma4Config, weights: Weights) -> SideExperts:
    E, F, X = config.hidden_size, config.expert_size, config.num_experts
    gate_up = {"experts.*.gate_up_proj": 2 * F}
    experts = ExpertMLP(
        router=weights.table("router.proj", X, E, "router"),
        gate_up=weights.experts("experts.gate_up", gate_up, inputs=E, count=X, split="outputs", blocks=2),
        down=weights.experts("experts.down", {"experts.*.down_proj": E}, inputs=F, count=X, split="inputs"),
        top_k=config.experts_per_token,
        normalised=True,
        activation=config.activation,
        factors=weights.norm("router.per_expert_scale", X),
    )

    def norm(name: str) -> RMSNorm:
        return weights.rms_norm(name, E, config.epsilon)

    return SideExperts(
        experts,
        RMSNorm(weights.norm("router.norm", E, factor=E**-0.5), config.epsilon),
        norm("pre_feedforward_layernorm_2"),
        norm("post_feedforward_layernorm_2"),
        norm("post_feedforward_layernorm_1"),
    )
