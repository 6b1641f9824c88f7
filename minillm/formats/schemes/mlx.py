"""MLX's quantisation (mlx.core.quantize), as mlx-lm writes it.

    config.json  "quantization": {"group_size": 64, "bits": 4, MODULE: {"group_size": ..., "bits": ...} or false, ...}
    X.weight     uint32 [out, in bits / 32]    integers q from 0 on, of a row one after the other, lowest bits first
    X.scales     float [out, in / group]
    X.biases     float [out, in / group]

    weight = scale x q + bias,   q of 2, 3, 4, 5, 6 or 8 bits

    "mode": "mxfp4" or "nvfp4"   q is E2M1, scales are uint8: exponents of groups of 32, or float8 E4M3 of groups of 16

Projections and embeddings are quantised, also the LM head. Definition: mlx `python/src/ops.cpp` (`quantize`,
`dequantize`), mlx-lm `utils.py` (`quantize_model`), `models/switch_layers.py`. Names and order of the tensors are those
of transformers, except where mlx-lm rearranges a family's. Experts that it stacks are read,

    X.switch_mlp.gate_proj.weight [experts, out, ...] -> X.experts.3.gate_proj.weight, Mixtral's w1, w3 and w2 likewise

and convolutions are refused.
"""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...config import Fields
from ...errors import CheckpointError, UnsupportedModelError
from ..tensors import FLOATS, StoredTensor, values_of_bytes
from .codebooks import e2m1_matrix
from .matrix import Matrix, Module, Scheme, common_group, read_bits, rows_of

BITS = (2, 3, 4, 5, 6, 8)
GROUPS = {"mxfp4": 32, "nvfp4": 16}
"""Modes of E2M1 -> numbers in a group"""
SETTINGS = ("group_size", "bits", "mode", "quant_method", "file")
"""Fields that are not names of modules"""
STACKED = re.compile(r"(.*)\.(switch_mlp|experts)\.(\w+)\.(weight|scales|biases|bias|global_scale)")
"""Names of tensors that may hold all experts of a layer"""
MIXTRAL = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
"""Names of experts' projections in layers that are called block_sparse_moe"""


class Settings(NamedTuple):
    """How a module is quantised."""

    bits: int
    size: int
    """Numbers in a group"""
    mode: str


def read(fields: Fields, expanded: str) -> Scheme:
    """The scheme of config.json's `quantization`; matrices that are not exact in 4 bits become `expanded`."""
    default = read_settings(fields)
    bits, size, mode = default
    modules = {name: value for name, value in fields.raw.items() if name not in SETTINGS}
    settings = {name: read_module_settings(name, value, fields.source) for name, value in modules.items()}
    sizes = [own.size for own in (default, *settings.values()) if own is not None and own.mode == "affine"]
    affine = expanded if bits > 4 or size % 32 else "int4 with offsets"
    return Scheme(
        title=f"MLX, {mode}" if mode in GROUPS else f"MLX, {bits} bits, groups of {size}",
        dtype=mode.upper() if mode in GROUPS else affine,
        group=common_group(sizes),
        expanded=expanded,
        markers=("scales", "biases"),
        matrix=lambda module: read_module(module, settings, default),
        apart=experts_apart,
    )


def read_settings(fields: Fields) -> Settings:
    """The settings of all modules, or of one."""
    mode = fields.choice("mode", "affine", ("affine", *GROUPS))
    if mode == "affine":
        return Settings(read_bits(fields, known=BITS), fields.size("group_size", 64), mode)
    bits, size = fields.size("bits", 4), fields.size("group_size", GROUPS[mode])
    if (bits, size) != (4, GROUPS[mode]):
        raise UnsupportedModelError(
            f"{fields.source}: {mode} has 4 bits in groups of {GROUPS[mode]}, found {bits} bits in groups of {size}"
        )
    return Settings(bits, size, mode)


def experts_apart(stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Tensors by their names in transformers, those of all experts apart."""
    apart: dict[str, StoredTensor] = {}
    for name, tensor in stored.items():
        place = STACKED.fullmatch(name)
        if place is None or len(tensor.shape) != (2 if place[4] == "bias" else 1 if place[4] == "global_scale" else 3):
            apart[name] = tensor
            continue
        projection = MIXTRAL.get(place[3], place[3]) if place[1].endswith("block_sparse_moe") else place[3]
        for expert in range(tensor.shape[0]):
            apart[f"{place[1]}.experts.{expert}.{projection}.{place[4]}"] = tensor.item(expert)
    return apart


def stacked_name(name: str) -> tuple[str, ...]:
    """The names that a module has in config.json: its own, and that of all experts of its layer."""
    layer, place, rest = name.partition(".experts.")
    projection = rest.partition(".")[2]
    projection = {ours: theirs for theirs, ours in MIXTRAL.items()}.get(projection, projection)
    return (name, f"{layer}.switch_mlp.{projection}", f"{layer}.experts.{projection}") if place else (name,)


def read_module_settings(name: str, value: object, source: str) -> Settings | None:
    """The settings of one module; None: it is not quantised."""
    if value is False:
        return None
    if not isinstance(value, dict):
        raise CheckpointError(
            f"{source}: the settings of {name:.80} should be group_size and bits, or false, found {value!r:.60}"
        )
    return read_settings(Fields(value, f"{source}: {name:.80}"))


def read_module(module: Module, settings: Mapping[str, Settings | None], default: Settings) -> Matrix:
    """The matrix of a module, by its own settings where it has some."""
    named = [name for name in stacked_name(module.name) if name in settings]
    own = settings[named[0]] if named else default
    if own is None:
        raise CheckpointError(f"tensors of {module.name} are quantised, but config.json says that it is not")
    bits, size, mode = own
    if "global_scale" in module:
        raise UnsupportedModelError(f"tensor {module.name}.global_scale: minillm reads MLX's nvfp4 without one")
    weight = module.take("weight", ("uint32",), None, None)
    outputs, inputs = weight.shape[0], weight.shape[1] * 32 // bits
    if mode in GROUPS:
        return _e2m1_module(module, weight, inputs, mode)
    scales = module.take("scales", FLOATS, outputs, -(-inputs // size))
    biases = module.take("biases", FLOATS, outputs, -(-inputs // size))
    wide = 8 if bits > 4 else 4

    def numbers(first: int, stop: int) -> NDArray[np.int8]:
        words = weight.part(0, first, stop).stored(("uint32",))
        return (unpack_bits(words, bits)[:, :inputs] - np.int16(2 ** (wide - 1))).astype(np.int8)

    return Matrix(
        name=f"{module.name}.weight",
        shape=(outputs, inputs),
        numbers=numbers,
        scales=rows_of(scales),
        offsets=rows_of(biases),
        size=size,
        bits=wide,
    )


def _e2m1_module(module: Module, weight: StoredTensor, inputs: int, mode: str) -> Matrix:
    """The matrix of a module in mxfp4 or nvfp4."""
    size = GROUPS[mode]
    stored = module.take("scales", ("uint8",), weight.shape[0], -(-inputs // size))

    def scales(first: int, stop: int) -> NDArray[Any]:
        rows = stored.part(0, first, stop).stored(("uint8",))
        return rows if mode == "mxfp4" else values_of_bytes("float8_e4m3fn")[rows]

    def codes(first: int, stop: int) -> NDArray[np.uint8]:
        return unpack_bits(weight.part(0, first, stop).stored(("uint32",)), 4)[:, :inputs]

    return e2m1_matrix(f"{module.name}.weight", (weight.shape[0], inputs), codes, scales, size)


def unpack_bits(words: NDArray[np.uint32], bits: int) -> NDArray[np.uint8]:
    """Integers of a row of words that lie one after the other, lowest bits first. [n, w] -> [n, 32 w // bits]"""
    packed = np.ascontiguousarray(words, "<u4").view(np.uint8)
    if bits == 8:
        return packed
    stream = np.unpackbits(packed, axis=1, bitorder="little")
    count = stream.shape[1] // bits
    by_number = stream[:, : count * bits].reshape(len(stream), count, bits)  # [n, 32 w] -> [n, numbers, bits]
    return np.packbits(by_number, axis=2, bitorder="little")[:, :, 0]
