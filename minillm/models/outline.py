"""A model as a table of its parts, for who counts or predicts: each part's kind and sizes, in the order they run.

A family writes its table beside its model (`outline` in `models/opt.py`). What a part of each kind costs is said in
`accounting/formulas.py`, once for all families. A part runs as one operation of a backend.
"""

from dataclasses import dataclass
from typing import ClassVar

from ..backends.base import Role
from ..config import ModelConfig


@dataclass(frozen=True, kw_only=True)
class Embed:
    """A look-up in a table of vectors, and one of positions where there are learned ones to add."""

    kind: ClassVar[str] = "embed"
    name: str
    width: int
    """Of each vector"""
    vectors: int
    """How many the table holds; 0: none of its own"""
    positions: int = 0
    """Vectors in the table of positions; 0: there is none"""


@dataclass(frozen=True, kw_only=True)
class Linear:
    """A product with a stored matrix [outputs, inputs]."""

    kind: ClassVar[str] = "linear"
    name: str
    inputs: int
    outputs: int
    bias: bool = False
    activation: str | None = None
    residual: bool = False
    role: Role = "projection"
    tied: bool = False
    """The matrix is another part's, which holds the parameters"""


@dataclass(frozen=True, kw_only=True)
class Norm:
    """A norm over rows of `width`: layer norm, or RMS norm where no mean is taken."""

    name: str
    width: int
    rows: int = 1
    """Of each token: one, or its heads"""
    mean: bool = True
    """Layer norm: the mean goes, and beside the gain there is a bias"""
    affine: bool = True
    """It has gain (and bias)"""

    @property
    def kind(self) -> str:
        """The operation's name."""
        return "layer_norm" if self.mean else "rms_norm"


@dataclass(frozen=True, kw_only=True)
class Rotate:
    """Queries and keys turned by their positions."""

    kind: ClassVar[str] = "rotary"
    name: str
    heads: int
    kv_heads: int
    head_dim: int
    pairs: int
    """Of numbers that turn, in each head"""
    scaled: bool = False
    """Cosines and sines are multiplied by a number"""
    stretched: bool = False
    """Frequencies follow the length of the text"""


@dataclass(frozen=True, kw_only=True)
class Gate:
    """activation(gate) * up in a gated MLP."""

    kind: ClassVar[str] = "glu"
    name: str
    width: int
    """Of the result: F"""
    activation: str


@dataclass(frozen=True, kw_only=True)
class StoreKV:
    """New keys and values into the cache."""

    kind: ClassVar[str] = "store_kv"
    name: str
    kv_heads: int
    head_dim: int


@dataclass(frozen=True, kw_only=True)
class Attend:
    """Causal attention over the cache."""

    kind: ClassVar[str] = "attend"
    name: str
    heads: int
    kv_heads: int
    head_dim: int
    window: int | None = None
    """How many positions a query sees, its own included; None: all before it"""
    biased: bool = False
    """ALiBi: a key loses by its distance"""


@dataclass(frozen=True, kw_only=True)
class TakeRows:
    """The rows whose logits are wanted; left out where all are."""

    kind: ClassVar[str] = "take_rows"
    name: str
    width: int


Component = Embed | Linear | Norm | Rotate | Gate | StoreKV | Attend | TakeRows


@dataclass(frozen=True)
class Outline:
    """A whole model."""

    before: tuple[Component, ...]
    """What comes before the first layer"""
    layers: tuple[tuple[Component, ...], ...]
    """Each layer's"""
    after: tuple[Component, ...]
    """What comes after the last, for each new token"""
    head: tuple[Component, ...]
    """What comes then, only for rows whose logits are wanted"""


def self_attention(
    config: ModelConfig,
    *,
    bias: bool,
    out_bias: bool,
    between: tuple[Component, ...] = (),
    window: int | None = None,
    biased: bool = False,
) -> tuple[Component, ...]:
    """The parts of `layers.attention.Attention`.

    Args:
        config: the model's sizes
        bias: of the projection to Q, K, V
        out_bias: of the projection out
        between: what happens to Q and K before they meet
        window: as `Attend.window`
        biased: as `Attend.biased`
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
    """The parts of `layers.mlp.MLP`."""
    E, F = config.hidden_size, config.intermediate_size
    return (
        Linear(name="MLP up", inputs=E, outputs=F, bias=bias, activation=activation),
        Linear(name="MLP down", inputs=F, outputs=E, bias=bias, residual=True),
    )


def head(config: ModelConfig, *, tied: bool, width: int | None = None) -> tuple[Component, ...]:
    """The rows that are wanted, and the parts of `layers.head.LMHead`.

    Args:
        config: the model's sizes
        tied: the head is the token embedding
        width: W, where the states are projected to it first
    """
    E, W = config.hidden_size, width or config.hidden_size
    return (
        TakeRows(name="take rows", width=E),
        *((Linear(name="project out", inputs=E, outputs=W),) if W != E else ()),
        Linear(name="LM head", inputs=W, outputs=config.vocab_size, role="vocabulary", tied=tied),
    )
