"""Components of models, and the groups of them that several families share.

`closed_form.py` has the formulas of each kind, `outlines.py` what a family is made of.
"""

from dataclasses import dataclass
from typing import ClassVar

from minillm.backends.formats import Role
from minillm.config import ModelConfig


@dataclass(frozen=True, kw_only=True)
class Embed:
    """Token embedding, plus learned position embedding if the model has one."""

    kind: ClassVar[str] = "embed"
    name: str
    width: int
    """Numbers in each vector"""
    vectors: int
    """Rows of the token table; 0: positions only"""
    positions: int = 0
    """Rows of the position table; 0: there is none"""
    computed: bool = False
    """The positions are computed, in float32, and no parameters"""
    scaled: bool = False
    """The token's vector is multiplied by a factor"""
    types: int = 0
    """Rows of the table of token types; 0: there is none"""


@dataclass(frozen=True, kw_only=True)
class Linear:
    """Product with a stored matrix [outputs, inputs]."""

    kind: ClassVar[str] = "linear"
    name: str
    inputs: int
    outputs: int
    bias: bool = False
    activation: str | None = None
    residual: bool = False
    role: Role = "projection"
    tied: bool = False
    """The matrix is the token embedding, where its parameters are counted"""
    given_back: bool = False
    """The memory of its result is free for the next one"""


@dataclass(frozen=True, kw_only=True)
class Norm:
    """Layer norm or RMS norm over rows of `width`."""

    name: str
    width: int
    rows: int = 1
    """Rows of each token: one, or its heads"""
    mean: bool = True
    """Layer norm, with gain and bias; False: RMS norm, with gain only"""
    affine: bool = True
    """Has gain (and bias)"""
    residual: bool = False
    """The residual is added; RMS norm only"""
    gains: int = 1
    """Gains of `width` numbers each: one, or one of each row"""

    @property
    def kind(self) -> str:
        """Name of the backend's operation."""
        return "layer_norm" if self.mean else "rms_norm"


@dataclass(frozen=True, kw_only=True)
class Rotate:
    """Rotary position embedding of queries and keys."""

    kind: ClassVar[str] = "rotary"
    name: str
    heads: int
    kv_heads: int
    head_dim: int
    pairs: int
    """Rotated pairs of numbers in each head"""
    key_dim: int = 0
    """Width of a key's head, if it is not a query's"""
    scaled: bool = False
    """Cosines and sines are multiplied by a factor"""
    stretched: bool = False
    """Frequencies depend on the length of the text"""


@dataclass(frozen=True, kw_only=True)
class Gate:
    """activation(gate) * up in a gated MLP."""

    kind: ClassVar[str] = "glu"
    name: str
    width: int
    """F, of the result"""
    activation: str
    rows: int = 1
    """Rows of each token: one, or one for each of its experts"""
    alone: bool = False
    """Each row is gate and up at once"""


@dataclass(frozen=True, kw_only=True)
class Sigmoids:
    """x * sigmoid(logits), a logit for each of `logits` parts of a row."""

    kind: ClassVar[str] = "gate"
    name: str
    width: int
    logits: int


@dataclass(frozen=True, kw_only=True)
class Multiply:
    """A row times another, or times a parameter of one number, or of one for each column."""

    kind: ClassVar[str] = "multiply"
    name: str
    width: int
    by_rows: bool = False
    factors: int = 1
    """Numbers of the parameter, if it is not by rows"""


@dataclass(frozen=True)
class Convolve:
    """Convolution of each channel over the last `taps` tokens, whose inputs are the state of a sequence."""

    kind: ClassVar[str] = "convolve"
    name: str
    width: int
    """C, of the result"""
    taps: int
    bias: bool
    gated: bool = True
    """Input and result have gates, which are read beside the input"""
    activation: str | None = None


@dataclass(frozen=True, kw_only=True)
class DeltaRule:
    """The gated delta rule, whose state of a sequence is a matrix of each value head."""

    kind: ClassVar[str] = "delta_rule"
    name: str
    key_heads: int
    heads: int
    """Value heads"""
    key_dim: int
    head_dim: int
    """Of a value"""


@dataclass(frozen=True, kw_only=True)
class StoreKV:
    """Write of new keys and values to the K/V cache."""

    kind: ClassVar[str] = "store_kv"
    name: str
    kv_heads: int
    head_dim: int
    joined: bool = False
    """Keys and values are one vector, of `head_dim` numbers in all"""


@dataclass(frozen=True, kw_only=True)
class HeadLinear:
    """Product of each head's last numbers with its own matrix [outputs, inputs]; those before them are copied."""

    kind: ClassVar[str] = "linear_heads"
    name: str
    heads: int
    inputs: int
    outputs: int
    copied: int = 0


@dataclass(frozen=True, kw_only=True)
class Attend:
    """Attention over the K/V cache."""

    kind: ClassVar[str] = "attend"
    name: str
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int = 0
    """Values are so many numbers of the keys; 0: they are as wide, and their own"""
    window: int | None = None
    """Sliding window: positions that a query sees, its own included; None: no window"""
    biased: bool = False
    """ALiBi"""
    capped: bool = False
    """Soft cap"""
    causal: bool = True
    """False: of all pairs of a text"""
    distances: int = 0
    """Distances that have a bias of their own; 0: none has"""
    buckets: int = 0
    """Different biases of a head that a checkpoint has for them; 0: another layer has them"""
    cross: bool = False
    """Over the source"""
    sunk: bool = False
    """A sink in each head's softmax"""


@dataclass(frozen=True, kw_only=True)
class TakeRows:
    """Selection of the rows whose logits are needed; skipped if all are."""

    kind: ClassVar[str] = "take_rows"
    name: str
    width: int


@dataclass(frozen=True, kw_only=True)
class Route:
    """Choice of each token's experts."""

    kind: ClassVar[str] = "route"
    name: str = "route"
    experts: int
    """X"""
    chosen: int
    """k"""
    normalised: bool
    sigmoid: bool = False
    """Scores are sigmoids, not shares of a softmax"""
    biased: bool = False
    """A bias is added to each score for the choice"""
    groups: int = 1
    """Groups of experts, of which some are chosen first"""
    scaled: bool = False
    """The weights have a factor"""
    by_factors: bool = False
    """The weights have a factor of each expert"""


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Each token's row once for each of its experts."""

    kind: ClassVar[str] = "take_rows"
    name: str = "take_rows"
    width: int
    chosen: int


@dataclass(frozen=True, kw_only=True)
class ExpertLinear:
    """Product of each row with its expert's matrix [outputs, inputs]."""

    kind: ClassVar[str] = "linear_experts"
    name: str
    inputs: int
    outputs: int
    experts: int
    chosen: int
    bias: bool = False


@dataclass(frozen=True, kw_only=True)
class Combine:
    """Weighted sum of a token's rows, + residual."""

    kind: ClassVar[str] = "combine"
    name: str = "combine"
    width: int
    chosen: int
    residual: bool = True


@dataclass(frozen=True, kw_only=True)
class ScaleLogits:
    """Scale and soft cap of logits, in place."""

    kind: ClassVar[str] = "scale_logits"
    name: str
    width: int
    """V"""
    scaled: bool = False
    capped: bool = False


@dataclass(frozen=True, kw_only=True)
class Scan:
    """Mamba-2's recurrence of each head, whose state is a sequence's."""

    kind: ClassVar[str] = "selective_scan"
    name: str
    heads: int
    head_dim: int
    groups: int
    state_size: int


Component = (
    Embed | Linear | Norm | Rotate | Gate | StoreKV | Attend | TakeRows | Route | Spread | ExpertLinear | Combine
    | ScaleLogits | Sigmoids | Convolve | DeltaRule | Scan | Multiply | HeadLinear
)  # fmt: skip


@dataclass(frozen=True)
class Outline:
    """All components of a model."""

    before: tuple[Component, ...]
    """Components before the first layer"""
    layers: tuple[tuple[Component, ...], ...]
    """Components of each layer"""
    after: tuple[Component, ...]
    """Components after the last layer, run on every new token"""
    head: tuple[Component, ...]
    """Components run only on rows whose logits are needed"""
    for_pass: tuple[Component, ...] = ()
    """Components after `before` whose results stay until the pass ends"""


def self_attention(
    config: ModelConfig,
    *,
    bias: bool,
    out_bias: bool,
    between: tuple[Component, ...] = (),
    window: int | None = None,
    causal: bool = True,
    distances: int = 0,
    buckets: int = 0,
    sunk: bool = False,
    gated: bool = False,
) -> tuple[Component, ...]:
    """Components of `layers.attention.Attention`.

    Args:
        config: the model's sizes
        bias: whether the Q, K, V projection has one
        out_bias: whether the output projection has one
        between: components that transform Q and K before they are stored
        window: see `Attend.window`
        causal: see `Attend.causal`
        distances: see `Attend.distances`
        buckets: see `Attend.buckets`
        sunk: see `Attend.sunk`
        gated: whether the heads' results have gates
    """
    E, H, K, D = config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim
    return (
        Linear(name="attention.qkv", inputs=E, outputs=(H + gated * H + 2 * K) * D, bias=bias),
        *between,
        StoreKV(name="store_kv", kv_heads=K, head_dim=D),
        Attend(
            name="attend",
            heads=H,
            kv_heads=K,
            head_dim=D,
            window=window,
            causal=causal,
            distances=distances,
            buckets=buckets,
            sunk=sunk,
        ),
        *((Sigmoids(name="gate", width=H * D, logits=H * D),) if gated else ()),
        Linear(name="attention.out", inputs=H * D, outputs=E, bias=out_bias, residual=True),
    )


def mlp(config: ModelConfig, activation: str, *, bias: bool = True) -> tuple[Component, ...]:
    """Components of `layers.mlp.MLP`."""
    E, F = config.hidden_size, config.intermediate_size
    return (
        Linear(name="mlp.up", inputs=E, outputs=F, bias=bias, activation=activation),
        Linear(name="mlp.down", inputs=F, outputs=E, bias=bias, residual=True),
    )


def gated_mlp(config: ModelConfig, activation: str, *, bias: bool = False) -> tuple[Component, ...]:
    """Components of `layers.mlp.GatedMLP`."""
    E, F = config.hidden_size, config.intermediate_size
    return (
        Linear(name="mlp.gate_up", inputs=E, outputs=2 * F, bias=bias),
        Gate(name="glu", width=F, activation=activation),
        Linear(name="mlp.down", inputs=F, outputs=E, bias=bias, residual=True),
    )


def head(
    config: ModelConfig,
    *,
    tied: bool,
    width: int | None = None,
    scaled: bool = False,
) -> tuple[Component, ...]:
    """Selection of rows, and the components of `layers.embedding.LMHead`.

    Args:
        config: the model's sizes
        tied: the head is the token embedding
        width: W, if the states are projected to it first
        scaled: logits have a factor
    """
    E, V, W = config.hidden_size, config.vocab_size, width or config.hidden_size
    after = (ScaleLogits(name="scale_logits", width=V, scaled=True),) if scaled else ()
    return (
        TakeRows(name="take_rows", width=E),
        *((Linear(name="head.project_out", inputs=E, outputs=W),) if W != E else ()),
        Linear(name="head.weight", inputs=W, outputs=V, role="vocabulary", tied=tied),
        *after,
    )
