"""compressed-tensors, the formats that llm-compressor writes: dense integers, packed integers, float8, float4.

    X.weight             int8 or float8 [out, in]         int-quantized, naive-quantized, float-quantized
    X.weight_packed      int32 [out, in bits / 32]        pack-quantized: lowest bits first, 2**(bits - 1) added
    X.weight_shape       int64 [2]                        out and in of a packed weight
    X.weight_scale       one number, [out, 1], [out, G] or [out / rows, in / columns], by the strategy
    X.weight_zero_point  of its shape, int8; for packed weights int32 [out bits / 32, G], packed down the columns
    X.weight_g_idx       int32 [in]                       the group of each input, if they are no neighbours (actorder)
    X.input_scale, ...   of activations, which are not rounded here

    X.weight_packed        uint8 [out, in / 2]: E2M1, low nibbles first   nvfp4-pack-quantized, mxfp4-pack-quantized
    X.weight_scale         float8 E4M3 [out, in / 16], or uint8 exponents [out, in / 32], 127 higher than they are
    X.weight_global_scale  float32 [1], which divides the scales of nvfp4

Definition: the package compressed-tensors, `compressors/` and `quantization/quant_args.py`.
"""

import re
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...config import Fields
from ...errors import CheckpointError, UnsupportedModelError
from ..tensors import StoredTensor
from .codebooks import e2m1_matrix, low_first
from .fp8 import NOTE, float8_matrix, notes, read_block, take_scales
from .matrix import (
    Matrix,
    Module,
    Rows,
    Scheme,
    common_group,
    integers_dtype,
    read_bits,
    read_group_size,
    rows_of,
    unpack_words,
)

FLOATS_4 = {"nvfp4-pack-quantized": 16, "mxfp4-pack-quantized": 32}
"""Formats of E2M1 -> neighbours that share a scale"""
FORMATS = ("int-quantized", "naive-quantized", "float-quantized", "pack-quantized", *FLOATS_4)
OTHERS = ("input_scale", "input_zero_point", "output_scale", "output_zero_point", "input_global_scale")
"""Tensors of activations"""


@dataclass(frozen=True)
class Group:
    """One of config_groups: the modules it is for, and how their weights are stored."""

    targets: tuple[str, ...]
    bits: int
    integers: bool
    symmetric: bool
    size: int
    """Neighbours in a row that share a scale; 0: all, or blocks"""
    layout: str
    """One of FORMATS"""
    block: tuple[int, int] | None
    rounds_activations: bool

    @property
    def kept(self) -> str:
        """The block format of its matrices, if it is of E2M1."""
        return self.layout.partition("-")[0].upper() if self.layout in FLOATS_4 else ""

    @property
    def title(self) -> str:
        """For people."""
        shared = f"blocks of {self.block[0]} x {self.block[1]}" if self.block else f"groups of {self.size}"
        kind = self.kept or f"{'int' if self.integers else 'float'}{self.bits}"
        return f"{kind} {shared if self.block or self.size else 'rows'}"


def read(fields: Fields, expanded: str) -> Scheme:
    """The scheme of a quantization_config; matrices that are not exact in 8 or 4 bits become `expanded`."""
    layout = fields.choice("format", fields.get("format", ""), (*FORMATS, "mixed-precision"))
    sparsity = Fields(fields.get("sparsity_config", {}), f"{fields.source}: sparsity_config")
    sparsity.choice("format", "dense", ("dense",))
    if fields.get("transform_config", {}):
        raise UnsupportedModelError(f"{fields.source}: transform_config rotates activations, which minillm does not do")
    fields.choice("quantization_status", "compressed", ("compressed", "frozen"))  # the latter by its first releases
    groups = [_read_group(fields, name, layout) for name in fields.get("config_groups", {})]
    if not groups:
        raise CheckpointError(f"{fields.source}: config_groups should describe the weights, found none")
    ignored = tuple(_texts(fields, "ignore", fields.get("ignore", [])))
    first, sizes = groups[0], [group.size for group in groups if group.integers]
    exact = first.integers and (first.symmetric or first.bits == 4) and not first.block and first.size % 32 == 0
    return Scheme(
        title=f"compressed-tensors, {', '.join(dict.fromkeys(group.title for group in groups))}",
        dtype=first.kept or (integers_dtype(first.bits, symmetric=first.symmetric) if exact else expanded),
        group=common_group(sizes),
        expanded=expanded,
        note=notes(fields, NOTE if any(group.rounds_activations for group in groups) else ""),
        markers=("weight_scale", "weight_packed"),
        matrix=lambda module: read_module(module, _group_of(module, groups, ignored)),
    )


def _texts(fields: Fields, name: str, values: list[Any]) -> list[str]:
    if not all(isinstance(value, str) for value in values):
        raise CheckpointError(f"{fields.source}: {name} should be names of modules, found {values!r:.80}")
    return values


def _read_group(fields: Fields, name: str, layout: str) -> Group:
    """One of config_groups."""
    groups = Fields(fields.get("config_groups", {}), f"{fields.source}: config_groups")
    group = Fields(groups.get(name, {}), f"{groups.source}: {name:.80}")
    layout = group.choice("format", "pack-quantized" if layout == "mixed-precision" else layout, FORMATS)
    weights = Fields(group.get("weights", {}), f"{group.source}: weights")
    integers = weights.choice("type", "int", ("int", "float")) == "int"
    bits = read_bits(weights, "num_bits", (4, 8) if integers else (4,) if layout in FLOATS_4 else (8,))
    known = ("tensor", "channel", "group", "block", *(["tensor_group"] if layout in FLOATS_4 else []))
    implied = "group" if (weights.raw.get("group_size") or -1) != -1 else "tensor"
    strategy = weights.choice("strategy", implied, known)
    block = read_block(weights, "block_structure") if strategy == "block" else None
    if strategy == "block" and block is None:
        raise CheckpointError(f"{weights.source}: block_structure is missing")
    size = read_group_size(weights) if strategy in ("group", "tensor_group") else 0
    if layout in FLOATS_4 and (integers or size != FLOATS_4[layout] or not weights.get("symmetric", True)):
        raise UnsupportedModelError(
            f"{weights.source}: minillm reads {layout} of symmetric floats in groups of {FLOATS_4[layout]}"
        )
    for field in ("input_activations", "output_activations"):
        group.get(field, {})
    return Group(
        targets=tuple(_texts(group, "targets", group.get("targets", []))),
        bits=bits,
        integers=integers,
        symmetric=weights.get("symmetric", True),
        size=size,
        layout=layout,
        block=block,
        rounds_activations=any(group.raw.get(field) for field in ("input_activations", "output_activations")),
    )


def _group_of(module: Module, groups: list[Group], ignored: tuple[str, ...]) -> Group:
    """The first group that is for a module."""
    if any(_matches(target, module.name) for target in ignored):
        raise CheckpointError(
            f"tensor {module.name}.weight_scale belongs to a module that config.json leaves unquantised"
        )
    for group in groups:
        if any(target in ("Linear", "Embedding") or _matches(target, module.name) for target in group.targets):
            return group
    raise CheckpointError(f"tensor {module.name}.weight_scale belongs to a module that is in none of config_groups")


def _matches(target: str, name: str) -> bool:
    """True if a target, a name or "re:" and a regular expression for the beginning of names, means a module."""
    if not target.startswith("re:"):
        return target == name
    try:
        return re.match(target[3:], name) is not None
    except re.error:
        raise CheckpointError(f"config.json: {target!r:.80} is no regular expression") from None


def read_module(module: Module, group: Group) -> Matrix:
    """The matrix of a module."""
    module.leave(*OTHERS)
    if group.symmetric:
        module.leave("weight_zero_point")  # zeros
    if group.layout in FLOATS_4:
        return _float4_matrix(module, group.size)
    if not group.integers:
        return float8_matrix(module, "weight_scale", group.block, group.size)
    packed = "weight_packed" in module
    weight, shape = _packed(module, group.bits) if packed else _dense(module)
    outputs, inputs = shape
    scale, height = take_scales(module, "weight_scale", shape, group.block, group.size)
    order = module.take("weight_g_idx", ("int32",), inputs) if "weight_g_idx" in module else None

    def numbers(first: int, stop: int) -> NDArray[Any]:
        stored = weight.part(0, first, stop).stored((weight.dtype,))
        return unpack_words(stored, group.bits)[:, :inputs] if packed else stored

    return Matrix(
        name=f"{module.name}.weight",
        shape=(outputs, inputs),
        numbers=numbers,
        scales=rows_of(scale, height),
        zeros=_zero_points(module, group, shape, scale.shape[-1]) if not group.symmetric else None,
        size=group.block[1] if group.block else group.size or inputs,
        columns=None if order is None else lambda: order.stored(("int32",)),
        bits=group.bits if packed else 8,
    )


def _float4_matrix(module: Module, size: int) -> Matrix:
    """The matrix of a module in E2M1."""
    packed = module.take("weight_packed", ("uint8",), None, None)
    outputs, inputs = packed.shape[0], 2 * packed.shape[1]
    types = ("float8_e4m3fn",) if size == 16 else ("uint8",)
    stored = module.take("weight_scale", types, outputs, -(-inputs // size))
    divisor = module.take("weight_global_scale", ("float32",), 1) if size == 16 else None

    def scales(first: int, stop: int) -> NDArray[Any]:
        rows = stored.part(0, first, stop)
        if divisor is None:
            return rows.stored(("uint8",))
        with np.errstate(all="ignore"):  # damaged scales are infinite or NaN
            divided: NDArray[Any] = rows.load() / divisor.load()
        return divided

    def codes(first: int, stop: int) -> NDArray[Any]:
        return low_first(packed.part(0, first, stop).stored(("uint8",)))

    return e2m1_matrix(f"{module.name}.weight", (outputs, inputs), codes, scales, size)


def _zero_points(module: Module, group: Group, shape: tuple[int, int], groups: int) -> Rows:
    """The zero points of a matrix, which has so many groups in a row."""
    if "weight_packed" not in module:
        return rows_of(*take_scales(module, "weight_zero_point", shape, group.block, group.size, ("int8",)))
    per = 32 // group.bits
    packed = module.take("weight_zero_point", ("int32",), -(-shape[0] // per), groups)

    def rows(first: int, stop: int) -> NDArray[Any]:
        start = first // per
        words = packed.part(0, start, -(-stop // per)).stored(("int32",))
        return unpack_words(words.T, group.bits)[:, first - start * per : stop - start * per].T  # [w, G] -> [n, G]

    return rows


def _dense(module: Module) -> tuple[StoredTensor, tuple[int, int]]:
    weight = module.take("weight", ("int8",), None, None)
    return weight, (weight.shape[0], weight.shape[1])


def _packed(module: Module, bits: int) -> tuple[StoredTensor, tuple[int, int]]:
    """Packed integers, and the shape of the matrix."""
    weight = module.take("weight_packed", ("int32",), None, None)
    told = module.take("weight_shape", ("int64", "int32"), 2)
    outputs, inputs = (int(size) for size in told.stored((told.dtype,)))
    if not 0 <= inputs < 2**32 or weight.shape != (outputs, -(-inputs * bits // 32)):
        raise CheckpointError(
            f"tensor {weight.name} should hold a matrix of shape [{outputs}, {inputs}] by {told.name}, found "
            f"{list(weight.shape)}"
        )
    return weight, (outputs, inputs)
