"""Layers of Mamba-2, which several families have: their sizes in config.json, and their construction."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from ..backends.weights import Weight
from ..config import Fields
from ..errors import CheckpointError, ParameterError
from ..layers.mamba import Mamba2
from ..layers.norm import RMSNorm
from ..reference.selective_scan import UNLIMITED
from .parameters import Weights

MOST_TAPS = 64
"""Upper bound on a convolution's width in config.json"""


class FieldNames(NamedTuple):
    """The names of a family's fields in config.json."""

    heads: str = "mamba_n_heads"
    head_dim: str = "mamba_d_head"
    groups: str = "mamba_n_groups"
    state_size: str = "mamba_d_state"
    taps: str = "mamba_d_conv"
    conv_bias: str = "mamba_conv_bias"
    bias: str = "mamba_proj_bias"
    out_bias: str = "mamba_proj_bias"


DEFAULTS = {"mamba_n_heads": 128, "mamba_n_groups": 1, "mamba_d_state": 256, "mamba_d_conv": 4}
"""Sizes if config.json has none, by these names"""


@dataclass(frozen=True, kw_only=True)
class MambaConfig:
    """The sizes of a model's layers of Mamba-2."""

    num_heads: int
    """H"""
    head_dim: int
    """P"""
    groups: int
    """G"""
    state_size: int
    """N"""
    taps: int
    """k: the inputs of a convolution, a token's own included"""
    conv_bias: bool
    bias: bool
    """The first projection has one"""
    out_bias: bool
    """The last has one"""
    activation: str
    """After the convolution"""
    epsilon: float
    """Added to the mean square in the norm"""
    limits: tuple[float, float] = UNLIMITED
    """The least and the largest step"""
    normed: bool = True
    norm_first: bool = False
    """The norm comes before the gate"""

    @property
    def inner(self) -> int:
        """H P"""
        return self.num_heads * self.head_dim

    @property
    def channels(self) -> int:
        """Channels of the convolution, H P + 2 G N."""
        return self.inner + 2 * self.groups * self.state_size

    @property
    def states(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of what a layer keeps of a sequence: the last inputs of its convolution, and its heads' states."""
        return (self.taps - 1, self.channels), (self.num_heads, self.head_dim, self.state_size)

    def sharded(self, ranks: int) -> "MambaConfig":
        """The configuration of one of `ranks` that share each layer: its groups of the whole.

        Raises:
            ParameterError: the groups cannot be shared equally.
        """
        if self.groups % ranks:
            raise ParameterError(
                f"tensor_parallel {ranks} should divide the model's {self.groups} groups of Mamba heads, each of which "
                "has one norm"
            )
        return replace(self, num_heads=self.num_heads // ranks, groups=self.groups // ranks)


def read_mamba(
    fields: Fields, inner: int | None, *, defaults: Mapping[str, int], names: FieldNames | None = None, **others: Any
) -> MambaConfig:
    """The sizes in config.json.

    Args:
        fields: config.json
        inner: H P; None: whatever H and P are
        defaults: sizes that config.json may lack
        names: of the fields
        **others: fields of the result that the family reads itself

    Raises:
        CheckpointError: a field is missing or invalid, or sizes do not fit one another.
    """
    names = names or FieldNames()
    H, G, N, k = (
        fields.size(name, defaults.get(name)) for name in (names.heads, names.groups, names.state_size, names.taps)
    )
    if not 2 <= k <= MOST_TAPS:
        raise CheckpointError(f"{fields.source}: {names.taps} should be from 2 to {MOST_TAPS}, found {k}")
    if inner is not None and inner % H:
        raise CheckpointError(f"{fields.source}: {names.heads} {H} should divide the {inner} channels of Mamba")
    P = inner // H if inner is not None else defaults.get(names.head_dim)
    if fields.raw.get(names.head_dim) != "auto":
        P = fields.size(names.head_dim, P)
    if P is None or (inner is not None and inner != P * H):
        raise CheckpointError(
            f"{fields.source}: {names.heads} {H} times {names.head_dim} {P} should be the {inner} channels of Mamba"
        )
    if H % G:
        raise CheckpointError(f"{fields.source}: {names.groups} {G} should divide {names.heads} {H}")
    sizes = {"num_heads": H, "head_dim": P, "groups": G, "state_size": N, "taps": k}
    biases = {name: fields.get(getattr(names, name), name == "conv_bias") for name in ("conv_bias", "bias", "out_bias")}
    return MambaConfig(**{**sizes, **biases, "limits": _read_limits(fields), **others})


def _read_limits(fields: Fields) -> tuple[float, float]:
    """The least and the largest step; transformers writes infinity as a table."""
    limits = [
        float(limit["__float__"]) if isinstance(limit, dict) and limit.get("__float__") == "Infinity" else limit
        for limit in fields.get("time_step_limit", [*UNLIMITED])
    ]
    numbers = all(isinstance(limit, int | float) and not isinstance(limit, bool) for limit in limits)
    if not numbers or len(limits) != 2 or limits[0] < 0 or limits[0] > limits[1]:
        raise CheckpointError(
            f"{fields.source}: time_step_limit should be the least and the largest step, found {limits!r:.60}"
        )
    return float(limits[0]), float(limits[1])


def build_mamba(config: MambaConfig, weights: Weights, layer: int, E: int, *, factors: Weight | None = None) -> Mamba2:
    """This rank's groups of one layer, whose tensors have the names of Mamba-2's own checkpoints.

    `factors` are those of the columns of this rank's first projection.
    """
    own, wide = config.sharded(weights.ranks), config.groups * config.state_size
    blocks = config.inner, wide, wide
    rows = config.inner + config.channels + config.num_heads
    parts: dict[str, Any] = {"split": "outputs", "blocks": (config.inner, *blocks, config.num_heads)}
    return Mamba2(
        layer,
        own.num_heads,
        own.head_dim,
        own.groups,
        own.state_size,
        own.limits,
        own.activation,
        weights.linear("in_proj", rows, inputs=E, bias=config.bias, **parts),
        weights.taps("conv1d", config.channels, config.taps, bias=config.conv_bias, blocks=blocks),
        weights.rates(config.num_heads),
        RMSNorm(weights.norm("norm", config.inner, split="outputs"), config.epsilon) if config.normed else None,
        weights.linear("out_proj", E, inputs=config.inner, bias=config.out_bias, split="inputs"),
        own.norm_first,
        factors,
    )
