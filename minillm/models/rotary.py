"""Rotary position embedding in config.json: frequencies, and their scaling for longer texts.

transformers 5 writes one table, `rope_parameters`; earlier releases wrote `rope_theta` and `rope_scaling`, with the
kind under `rope_type` or, older still, `type`.

    default   f_j = base^(-2 j / r)
    linear    positions are divided by `factor` (Chen et al., arXiv 2306.15595)
    dynamic   the base grows with the text (`reference.rotary.Stretch`)
    yarn      low frequencies are divided, high ones stay, with a ramp between (Peng et al., arXiv 2309.00071, 3.2)
    llama3    the same, with a ramp over wavelengths (Llama 3.1's published code)
    longrope  f_j divided by a factor of its own: another one in texts beyond the original length (Ding et al., arXiv
              2402.13753). Such a text is computed anew when it outgrows that length, as transformers does in Phi-3; so
              minillm runs it in that family alone
    ntk       the base times `factor`, then all frequencies divided by factor^(2 / r) (GTE's published code)
    proportional  the first share of all pairs turns, the others do not (Gemma 4)

All numbers are float32, as in transformers: at position 4,000 an angle has four digits after the decimal point.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..backends.operations import Backend
from ..config import LARGEST, Fields
from ..errors import CheckpointError, UnsupportedModelError
from ..reference.rotary import Rotation, Stretch

BASE = 10_000.0
"""Base (theta) if config.json has none."""

_MOST = 1e6
"""Upper bound on shares, numbers of turns and scales in config.json"""
_ORIGINAL = "original_max_position_embeddings"

TABLES = ("rope_parameters", "rope_scaling")
"""Fields of config.json with the kind of scaling and its numbers, the newer and the older. Where both are there they
should say the same, in whatever words"""

KINDS = ("default", "linear", "dynamic", "yarn", "llama3")
"""Kinds that a family has unless it says otherwise."""


@dataclass(frozen=True, kw_only=True)
class RotaryConfig:
    """Frequencies, scale and length limits."""

    frequencies: tuple[float, ...]
    """[r / 2], radians from one position to the next"""
    base: float = BASE
    """Theta; the frequencies are its powers"""
    scale: float = 1.0
    """Factor of cosines and sines"""
    stretch: Stretch | None = None
    longest: int
    """Longest context that the frequencies support, in tokens"""
    long_frequencies: tuple[float, ...] | None = None
    """[r / 2], of texts beyond `short` tokens; None: the same"""
    short: int | None = None

    def rotation(self, backend: Backend) -> Rotation:
        """The rotation with its frequencies on the backend's device."""
        rows = self.frequencies if self.long_frequencies is None else (self.frequencies, self.long_frequencies)
        frequencies = backend.loader.constant("rotary frequencies", np.array(rows, np.float32))
        return Rotation(frequencies=frequencies, scale=self.scale, stretch=self.stretch, short=self.short)


def read_rotary(
    fields: Fields, dim: int, max_positions: int, *, base: float = BASE, kinds: tuple[str, ...] = KINDS
) -> RotaryConfig:
    """Read rotary position embedding of r = `dim` numbers of each head.

    Args:
        fields: config.json
        dim: r
        max_positions: longest context in config.json
        base: default if neither `rope_theta` nor `rope_parameters` has one
        kinds: those that the family has

    Raises:
        CheckpointError: r is odd, a number is missing or invalid, or two tables say different rotations.
        UnsupportedModelError: a kind of scaling other than those above.
    """
    if dim < 2 or dim % 2:
        raise CheckpointError(f"config.json: rotary position embedding needs an even width of at least 2, found {dim}")
    return from_tables(fields, lambda table: _read_table(table, dim, max_positions, base, kinds))


def read_partial_rotary(
    fields: Fields, head_dim: int, max_positions: int, *, share: float, base: float = BASE
) -> RotaryConfig:
    """Rotary position embedding of the first `partial_rotary_factor` of each head.

    Args:
        fields: config.json
        head_dim: D
        max_positions: longest context in config.json
        share: the factor if config.json has none, in a table or beside it
        base: default if config.json has none

    Raises:
        As `read_rotary`.
    """

    def read(table: Fields) -> RotaryConfig:
        beside = table.number("partial_rotary_factor", share, most=1.0)
        rotated = int(head_dim * rope_table(table).number("partial_rotary_factor", beside, most=1.0))
        return read_rotary(table, rotated, max_positions, base=base)

    return from_tables(fields, read)


def read_rotaries(
    fields: Fields, head_dim: int, max_positions: int, *, base: float, local: str | None = None, local_base: float
) -> tuple[RotaryConfig, RotaryConfig]:
    """Rotary embedding of layers without a window, and of those with one.

    transformers 5 writes a table of each; earlier releases wrote `rope_theta` and `rope_scaling` of the former, and
    the field `local` with the base of the latter.

    Args:
        fields: config.json
        head_dim: D
        max_positions: longest context in config.json
        base: base without a window if config.json has none
        local: the field that has the base with a window
        local_base: the same if config.json has none

    Raises:
        As `read_rotary`; UnsupportedModelError also for tables of other kinds of layers.
    """
    tables, kinds = fields.get("rope_parameters", {}), ("full_attention", "sliding_attention")
    for name in tables:
        if name not in kinds:
            raise UnsupportedModelError(
                f"{fields.source}: rope_parameters has {name!r:.60}; expected a table for each of {', '.join(kinds)}"
            )
    inside = Fields(tables, f"{fields.source}, rope_parameters")
    older = {name: fields.raw.get(name) for name in ("rope_theta", "rope_scaling")}
    base_beside = local_base if local is None else fields.number(local, local_base, above=1)
    full = Fields(older | {"rope_parameters": inside.get(kinds[0], {})}, fields.source)
    windowed = Fields({"rope_parameters": inside.get(kinds[1], {})}, fields.source)
    return read_rotary(full, head_dim, max_positions, base=base), read_rotary(
        windowed, head_dim, max_positions, base=base_beside
    )


def from_tables(fields: Fields, read: Callable[[Fields], RotaryConfig]) -> RotaryConfig:
    """The result of `read` with one table of config.json, which has to be the same with the other.

    Raises:
        CheckpointError: it does not; or as `read`.
    """
    named = [name for name in TABLES if fields.get(name, {})]
    if len(named) < 2:
        return read(fields)
    alone = ({name: value for name, value in fields.raw.items() if name != left_out} for left_out in named)
    second, first = (read(Fields(raw, fields.source)) for raw in alone)
    if first != second:
        raise CheckpointError(f"{fields.source}: rope_parameters and rope_scaling differ: leave one of them out")
    return first


def _read_table(fields: Fields, dim: int, max_positions: int, base: float, kinds: tuple[str, ...]) -> RotaryConfig:
    scaling = rope_table(fields)
    kind = scaling.choice("type" if scaling.raw.get("rope_type") is None else "rope_type", "default", kinds)
    base = scaling.number("rope_theta", fields.number("rope_theta", base, above=1), above=1)
    exponents = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
    powers = (base ** exponents.astype(np.float64)).astype(np.float32)  # NumPy's own power of float32 is less exact
    plain = np.reciprocal(powers)  # [r / 2]
    return replace(_KINDS[kind](scaling, plain, base, max_positions), base=base)


def rope_table(fields: Fields) -> Fields:
    """The first of the `TABLES` of config.json that is not empty; empty if it has none.

    The original length may be outside the table; transformers 5 looks there first.

    Raises:
        CheckpointError: two original lengths that differ.
        UnsupportedModelError: separate tables for different kinds of layers.
    """
    name = next((name for name in TABLES if fields.get(name, {})), TABLES[-1])
    table, source = fields.get(name, {}), f"{fields.source}, {name}"
    for key, value in table.items():
        if isinstance(value, dict):
            raise UnsupportedModelError(f"{source}: {key!r:.60} is a table; minillm runs one for all layers")
    beside = fields.size(_ORIGINAL) if fields.raw.get(_ORIGINAL) is not None else None
    if beside is not None and table.get(_ORIGINAL, beside) != beside:
        raise CheckpointError(f"{source}: {_ORIGINAL} should be {beside}, as beside the table, or stand once")
    return Fields(table if beside is None else table | {_ORIGINAL: beside}, source)


def refuse_partial(fields: Fields) -> None:
    """Refuse partial rotation, in a family that rotates whole heads.

    Raises:
        UnsupportedModelError: `partial_rotary_factor` is not 1.
    """
    for table in (fields, *(Fields(fields.get(name, {}), f"{fields.source}, {name}") for name in TABLES)):
        if (share := table.get("partial_rotary_factor", 1.0)) != 1:
            raise UnsupportedModelError(
                f"{table.source}: partial_rotary_factor is {share}; in this family minillm runs 1"
            )


def _default(_: Fields, plain: NDArray[np.float32], __: float, max_positions: int) -> RotaryConfig:
    return RotaryConfig(frequencies=_numbers(plain), longest=max_positions)


def _linear(scaling: Fields, plain: NDArray[np.float32], _: float, max_positions: int) -> RotaryConfig:
    factor = _factor(scaling)
    return RotaryConfig(
        frequencies=_numbers(plain / np.float32(factor)), longest=_longest(scaling, factor, max_positions)
    )


def _dynamic(scaling: Fields, plain: NDArray[np.float32], _: float, max_positions: int) -> RotaryConfig:
    factor = _factor(scaling)
    stretch = Stretch(factor=factor, original=max_positions)
    return RotaryConfig(frequencies=_numbers(plain), stretch=stretch, longest=_longest(scaling, factor, max_positions))


def _ntk(scaling: Fields, plain: NDArray[np.float32], _: float, max_positions: int) -> RotaryConfig:
    """Divide f_j by factor^(2 (j + 1) / r).

    Raises:
        UnsupportedModelError: the division has another exponent (`mixed_b`).
    """
    factor = _factor(scaling)
    if scaling.raw.get("mixed_b") is not None:
        raise UnsupportedModelError(
            f"{scaling.source}: mixed_b is {scaling.raw['mixed_b']!r:.40}; minillm runs ntk without"
        )
    divisors = factor ** (np.arange(1, len(plain) + 1) / len(plain))
    return RotaryConfig(frequencies=_numbers(plain / divisors), longest=max_positions)


def _llama3(scaling: Fields, plain: NDArray[np.float32], _: float, max_positions: int) -> RotaryConfig:
    """Divide frequencies of wavelengths over original / low by the factor; keep those under original / high."""
    factor, original = _factor(scaling), scaling.size(_ORIGINAL, max_positions)
    low, high = (scaling.number(name, above=1e-6, most=_MOST) for name in ("low_freq_factor", "high_freq_factor"))
    if high <= low:
        raise CheckpointError(f"{scaling.source}: high_freq_factor {high} should be above low_freq_factor {low}")
    wavelengths = 2 * math.pi / plain
    share = (original / wavelengths - low) / (high - low)  # of the plain frequency, from 0 to 1 on the ramp
    ramp = (1 - share) * plain / factor + share * plain
    divided = np.where(wavelengths > original / low, plain / factor, ramp)
    return RotaryConfig(
        frequencies=_numbers(np.where(wavelengths < original / high, plain, divided)), longest=max_positions
    )


def _yarn(scaling: Fields, plain: NDArray[np.float32], base: float, max_positions: int) -> RotaryConfig:
    """Keep pairs that turn over `beta_fast` times in the original length; divide those under `beta_slow` turns."""
    original = scaling.size(_ORIGINAL, max_positions)
    factor = _factor(scaling, max_positions / original)
    dim = 2 * len(plain)

    def pair_of(turns: float) -> float:
        """Fractional index of the pair that makes `turns` turns in the original length."""
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))

    betas = (
        scaling.number(name, usual, above=1e-6, most=_MOST) for name, usual in (("beta_fast", 32.0), ("beta_slow", 1.0))
    )
    first, last = map(pair_of, betas)
    if scaling.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    last += 0.001 * (first == last)
    ramp = np.clip((np.arange(dim // 2, dtype=np.float32) - first) / (last - first), 0, 1)
    return RotaryConfig(
        frequencies=_numbers(plain / factor * ramp + plain * (1 - ramp)),
        scale=_attention_factor(scaling, factor),
        longest=max(max_positions, _longest(scaling, factor, original)),
    )


def _longrope(scaling: Fields, plain: NDArray[np.float32], base: float, max_positions: int) -> RotaryConfig:
    """Divide each frequency by its own factor, one for texts up to the original length and one for longer texts."""
    original, dim = scaling.size(_ORIGINAL, max_positions), 2 * len(plain)
    factor = scaling.number("factor", max_positions / original, most=LARGEST)
    usual = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 and original > 1 else 1.0
    exponents = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
    powers = (base ** exponents.astype(np.float64)).astype(np.float32)  # rounded once less than 1 / plain
    short, long = (_numbers(np.float32(1) / (_factors(scaling, name, len(plain)) * powers)) for name in _FACTORS)
    return RotaryConfig(
        frequencies=short,
        long_frequencies=long,
        short=original,
        scale=scaling.number("attention_factor", usual, most=_MOST),
        longest=max_positions,
    )


def _proportional(scaling: Fields, plain: NDArray[np.float32], _: float, max_positions: int) -> RotaryConfig:
    """Only the first share of all pairs turns, at the frequencies that whole heads have; others stay as they are."""
    share = scaling.number("partial_rotary_factor", 1.0, most=1.0)
    turning = int(share * 2 * len(plain) // 2)
    factor = _factor(scaling, 1.0)
    frequencies = np.where(np.arange(len(plain)) < turning, plain, np.float32(0)) / np.float32(factor)
    return RotaryConfig(frequencies=_numbers(frequencies), longest=max_positions)


_FACTORS = ("short_factor", "long_factor")


def _factors(scaling: Fields, name: str, count: int) -> NDArray[np.float32]:
    """A list of `count` positive numbers."""
    listed = scaling.get(name, [])
    numbers = [number for number in listed if isinstance(number, int | float) and not isinstance(number, bool)]
    if len(numbers) != count or len(listed) != count or not all(1 / _MOST < number < _MOST for number in numbers):
        raise CheckpointError(
            f"{scaling.source}: {name} should be {count} numbers above 0, one for each pair of rotated numbers, "
            f"found {len(listed)}: {listed!s:.40}"
        )
    return np.array(numbers, np.float32)


def yarn_scale(factor: float, weight: float = 1.0) -> float:
    """YaRN's scale of cosines and sines for a context `factor` times as long: 0.1 ln(factor) + 1."""
    return 0.1 * weight * math.log(factor) + 1 if factor > 1 else 1.0


def score_factor(fields: Fields, max_positions: int) -> float:
    """The factor of attention scores by which latent attention makes up for longer texts: YaRN's, squared.

    `mscale_all_dim` of the table is its weight (DeepSeek-AI, arXiv 2405.04434, section 3.1.4); without one it is 1.
    """
    scaling = rope_table(fields)
    weight = _weight(scaling, "mscale_all_dim")
    if (
        not weight
        or scaling.get("type" if scaling.raw.get("rope_type") is None else "rope_type", "default") == "default"
    ):
        return 1.0
    return yarn_scale(_factor(scaling, max_positions / scaling.size(_ORIGINAL, max_positions)), weight) ** 2


def _attention_factor(scaling: Fields, factor: float) -> float:
    """YaRN's scale, unless config.json overrides it."""
    mscale, all_dim = (_weight(scaling, name) for name in ("mscale", "mscale_all_dim"))
    usual = yarn_scale(factor, mscale) / yarn_scale(factor, all_dim) if mscale and all_dim else yarn_scale(factor)
    return scaling.number("attention_factor", usual, most=_MOST)


def _weight(scaling: Fields, name: str) -> float:
    """A non-negative number; 0 if absent."""
    return scaling.number(name, most=_MOST) if scaling.get(name, 0.0) else 0.0


_KINDS: dict[str, Callable[[Fields, NDArray[np.float32], float, int], RotaryConfig]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "ntk": _ntk,
    "yarn": _yarn,
    "llama3": _llama3,
    "longrope": _longrope,
    "proportional": _proportional,
}


def _factor(scaling: Fields, default: float | None = None) -> float:
    factor = scaling.number("factor", default, most=LARGEST)
    if factor < 1:
        raise CheckpointError(f"{scaling.source}: factor should be at least 1, found {factor}")
    return factor


def _longest(scaling: Fields, factor: float, positions: int) -> int:
    """The longest context in tokens: `factor` times the positions."""
    longest = int(factor * positions)
    if longest > LARGEST:
        raise CheckpointError(
            f"{scaling.source}: factor {factor:g} times {positions} positions is {longest}; expected {LARGEST} at most"
        )
    return longest


def _numbers(frequencies: NDArray[Any]) -> tuple[float, ...]:
    return tuple(frequencies.astype(np.float32).tolist())
