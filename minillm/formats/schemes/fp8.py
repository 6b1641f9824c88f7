"""Weights in float8 with scales: DeepSeek's and Qwen3's blocks, one scale for each row or for the matrix; and NVFP4.

    X.weight            float8_e4m3fn or float8_e5m2 [out, in]
    X.weight_scale_inv  float32 or bfloat16 [out / 128, in / 128], rounded up; despite its name it multiplies
    X.weight_scale      one number, [out] or [out, 1]                       (vLLM's fp8, NVIDIA's modelopt)
    X.input_scale       of activations in float8, which are not rounded here

modelopt's NVFP4:

    X.weight            uint8 [out, in / 2]: E2M1, low nibbles first
    X.weight_scale      float8_e4m3fn [out, in / 16]
    X.weight_scale_2    float32, which multiplies these

Definition: transformers `integrations/finegrained_fp8.py` (`Fp8Dequantize`); modelopt `torch/export` (FP8).
"""

import math

import numpy as np
from numpy.typing import NDArray

from ...config import Fields
from ...errors import CheckpointError, UnsupportedModelError
from ..tensors import VALUES, StoredTensor
from .codebooks import e2m1_matrix, low_first
from .matrix import Matrix, Module, Scheme, rows_of

FLOATS = ("float8_e4m3fn", "float8_e5m2")
NVFP4_GROUP = 16
"""Neighbours that share a scale in NVFP4"""
NOTE = "activations are not rounded to 8 bits as in the original, so results differ by that rounding"


def read(fields: Fields, expanded: str) -> Scheme:
    """The scheme of a quantization_config with quant_method "fp8"."""
    fields.choice("fmt", "e4m3", ("e4m3", "e5m2", "float8_e4m3fn", "float8_e5m2"))
    fields.choice("activation_scheme", "dynamic", ("dynamic", "static"))
    fields.choice("scale_fmt", "float", ("float", "ue8m0"))
    fields.choice("expert_dtype", "fp8", ("fp8",))
    block = read_block(fields, "weight_block_size")
    title = f"FP8, {'one scale each' if block is None else f'blocks of {block[0]} x {block[1]}'}"
    return scheme_of(title, expanded, block, notes(fields, NOTE))


def read_modelopt(fields: Fields, expanded: str) -> Scheme:
    """The scheme of a quantization_config with quant_method "modelopt"."""
    known = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "NVFP4")
    algorithm = fields.choice("quant_algo", fields.get("quant_algo", ""), known)
    if algorithm == "NVFP4":
        if fields.size("group_size", NVFP4_GROUP) != NVFP4_GROUP:
            raise UnsupportedModelError(f"{fields.source}: minillm reads NVFP4 in groups of {NVFP4_GROUP}")
        return Scheme(
            title="modelopt NVFP4",
            dtype="NVFP4",
            expanded=expanded,
            note=notes(fields, NOTE.replace("8 bits", "4 bits")),
            markers=("weight_scale_2",),
            matrix=read_nvfp4_module,
        )
    return scheme_of(f"modelopt {algorithm}", expanded, None, notes(fields, NOTE))


def scheme_of(title: str, expanded: str, block: tuple[int, int] | None, note: str) -> Scheme:
    """The scheme of matrices in float8."""
    return Scheme(
        title=title,
        dtype=expanded,
        expanded=expanded,
        note=note,
        markers=("weight_scale_inv", "weight_scale"),
        matrix=lambda module: read_module(module, block),
    )


def read_module(module: Module, block: tuple[int, int] | None) -> Matrix:
    """The matrix of a module; blocks as of `float8_matrix`."""
    name = "weight_scale_inv" if "weight_scale_inv" in module else "weight_scale"
    module.leave("input_scale", "activation_scale")
    return float8_matrix(module, name, block)


def read_nvfp4_module(module: Module) -> Matrix:
    """The matrix of a module in modelopt's NVFP4."""
    module.leave("input_scale")
    packed = module.take("weight", ("uint8",), None, None)
    outputs, inputs = packed.shape[0], 2 * packed.shape[1]
    stored = module.take("weight_scale", ("float8_e4m3fn",), outputs, -(-inputs // NVFP4_GROUP))
    shape = module.shape_of("weight_scale_2")
    factor = module.take("weight_scale_2", ("float32",), *(shape if shape in ((), (1,)) else (1,)))

    def scales(first: int, stop: int) -> NDArray[np.float32]:
        with np.errstate(all="ignore"):  # damaged scales are infinite or NaN
            product: NDArray[np.float32] = stored.part(0, first, stop).load() * factor.load().reshape(1, 1)
        return product

    def codes(first: int, stop: int) -> NDArray[np.uint8]:
        return low_first(packed.part(0, first, stop).stored(("uint8",)))

    return e2m1_matrix(packed.name, (outputs, inputs), codes, scales, NVFP4_GROUP)


def float8_matrix(module: Module, scale_name: str, block: tuple[int, int] | None, group: int = 0) -> Matrix:
    """A matrix in float8 and its scales.

    Args:
        module: its tensors
        scale_name: the part of the name that scales have
        block: rows and columns that share a scale; None: the shape of the scales says
        group: without blocks, columns of a row that share a scale; 0: all
    """
    weight = module.take("weight", FLOATS, None, None)
    outputs, inputs = weight.shape
    scale, height = take_scales(module, scale_name, weight.shape, block, group)
    return Matrix(
        name=weight.name,
        shape=(outputs, inputs),
        numbers=lambda first, stop: weight.part(0, first, stop).load(),
        scales=rows_of(scale, height),
        size=block[1] if block else group or inputs,
    )


def take_scales(
    module: Module,
    name: str,
    shape: tuple[int, ...],
    block: tuple[int, int] | None,
    group: int = 0,
    types: tuple[str, ...] = VALUES,
) -> tuple[StoredTensor, int]:
    """The scales, or zero points, of a matrix of this shape, and for how many rows each of theirs stands."""
    outputs, inputs = shape
    if block is not None:
        return module.take(name, types, -(-outputs // block[0]), -(-inputs // block[1])), block[0]
    if group:
        return module.take(name, types, outputs, -(-inputs // group)), 1
    actual = module.shape_of(name)
    if actual is not None and math.prod(actual) == 1 and len(actual) <= 2:
        return module.take(name, types, *actual), outputs
    return module.take(name, types, *((outputs,) if actual is not None and len(actual) == 1 else (outputs, 1))), 1


def read_block(fields: Fields, name: str) -> tuple[int, int] | None:
    """Rows and columns of a block; None if there are no blocks."""
    block = fields.raw.get(name)
    if block is None:
        return None
    if not (isinstance(block, list) and len(block) == 2 and all(type(n) is int and 0 < n < 2**24 for n in block)):
        raise CheckpointError(f"{fields.source}: {name} should be two sizes, found {block!r:.60}")
    return block[0], block[1]


def notes(fields: Fields, note: str) -> str:
    """The note of a scheme, and that the checkpoint's K/V cache in 8 bits is none here, if it names one."""
    named = [name for name in ("kv_cache_quant_algo", "kv_cache_scheme") if fields.raw.get(name) is not None]
    cache = [f"{name} has no effect: cache_dtype says how the K/V cache is rounded" for name in named[:1]]
    return "; ".join([*filter(None, [note]), *cache])
