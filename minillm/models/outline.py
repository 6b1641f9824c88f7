"""A model's outline: kind and sizes of each component in execution order, for `accounting`.

Each family defines its own (`outline` in `models/opt.py`). `accounting/formulas.py` has the cost of each kind, once for
all families. A component runs as one operation of a backend.
"""

from dataclasses import dataclass
from typing import ClassVar

from ..backends.formats import Role
from ..config import ModelConfig


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


@dataclass(frozen=True, kw_only=True)
class StoreKV:
    """Write of new keys and values to the K/V cache."""

    kind: ClassVar[str] = "store_kv"
    name: str
    kv_heads: int
    head_dim: int


@dataclass(frozen=True, kw_only=True)
class Attend:
    """Causal attention over the K/V cache."""

    kind: ClassVar[str] = "attend"
    name: str
    heads: int
    kv_heads: int
    head_dim: int
    window: int | None = None
    """Sliding window: positions that a query sees, its own included; None: no window"""
    biased: bool = False
    """ALiBi"""


@dataclass(frozen=True, kw_only=True)
class TakeRows:
    """Selection of the rows whose logits are needed; skipped if all are."""

    kind: ClassVar[str] = "take_rows"
    name: str
    width: int


Component = Embed | Linear | Norm | Rotate | Gate | StoreKV | Attend | TakeRows


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


def self_attention(
    config: ModelConfig,
    *,
    bias: bool,
    out_bias: bool,
    between: tuple[Component, ...] = (),
    window: int | None = None,
    biased: bool = False,
) -> tuple[Component, ...]:
    """Components of `layers.attention.Attention`.

    Args:
        config: the model's sizes
        bias: whether the Q, K, V projection has one
        out_bias: whether the output projection has one
        between: components that transform Q and K before they are stored
        window: see `Attend.window`
        biased: see `Attend.biased`
    """
    E, H, K, D = config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim
    return (
        Linear(name="project Q, K, V", inputs=E, outputs=(H + 2 * K) * D, bias=bias),
        *between,
        StoreKV(name="store K, V", kv_heads=K, head_dim=D),
        Attend(name="attention", heads=H, kv_heads=K, head_dim=D, window=window, biased=biased),
        Linear(name="attention out", inputs=H * D, outputs=E, bias=out_bias, residual=True),
    )


def mlp(config: ModelConfig, activation: str, *, bias: bool = True) -> tuple[Component, ...]:
    """Components of `layers.mlp.MLP`."""
    E, F = config.hidden_size, config.intermediate_size
    return (
        Linear(name="MLP up", inputs=E, outputs=F, bias=bias, activation=activation),
        Linear(name="MLP down", inputs=F, outputs=E, bias=bias, residual=True),
    )


def head(config: ModelConfig, *, tied: bool, width: int | None = None) -> tuple[Component, ...]:
    """Selection of rows, and the components of `layers.head.LMHead`.

    Args:
        config: the model's sizes
        tied: the head is the token embedding
        width: W, if the states are projected to it first
    """
    E, W = config.hidden_size, width or config.hidden_size
    return (
        TakeRows(name="take rows", width=E),
        *((Linear(name="project out", inputs=E, outputs=W),) if W != E else ()),
        Linear(name="LM head", inputs=W, outputs=config.vocab_size, role="vocabulary", tied=tied),
    )
