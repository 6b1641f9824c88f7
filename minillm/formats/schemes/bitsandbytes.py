"""bitsandbytes: NF4 and FP4 (Dettmers et al., QLoRA, arXiv 2305.14314), and LLM.int8() (arXiv 2208.07339).

4 bits. The matrix is one line of numbers, cut into blocks:

    X.weight                   uint8 [out in / 2, 1]    two indices a byte, the first in the high bits; or the same
                                                        bytes as numbers of another type (bnb_4bit_quant_storage)
    X.weight.quant_map         float32 [16]             the value of each index
    X.weight.absmax            float32 [blocks]         the scale of each block
    X.weight.quant_state.bitsandbytes__nf4 or __fp4     uint8: JSON with the shape and the size of a block

With double quantisation absmax is uint8, an index into X.weight.nested_quant_map [256], in blocks of its own with the
scales X.weight.nested_absmax, plus nested_offset.

8 bits: X.weight int8 [out, in], X.SCB float32 [out] (of a row the largest magnitude, for 127), X.weight_format 0.

Definition: bitsandbytes `functional.py` (`QuantState`, `dequantize_4bit`), `nn/modules.py` (`Linear8bitLt`).
"""

import numpy as np
from numpy.typing import NDArray

from ...config import Fields
from ...errors import CheckpointError, UnsupportedModelError
from ...files import parse_json
from ..tensors import StoredTensor
from .codebooks import code_book_matrix
from .fp8 import NOTE
from .matrix import Matrix, Module, Rows, Scheme

LONGEST = 1 << 16
"""Bytes of a quant_state at most"""
STORAGES = {"uint8": 1, "int8": 1, "float16": 2, "bfloat16": 2, "float32": 4}
"""Types of the packed bytes (bnb_4bit_quant_storage), with their size"""
BLOCKS = (32, 64, 128, 256, 512, 1024, 2048, 4096)
"""Sizes of a block in 4 bits"""


def read(fields: Fields, expanded: str) -> Scheme:
    """The scheme of a quantization_config; matrices that no format has exactly become `expanded`."""
    four = fields.get("load_in_4bit", fields.get("_load_in_4bit", False))
    eight = fields.get("load_in_8bit", fields.get("_load_in_8bit", False))
    if four == eight:
        raise CheckpointError(f"{fields.source}: one of load_in_4bit and load_in_8bit should be true, found {four}")
    if eight:
        return Scheme(
            title="bitsandbytes, int8 rows",
            dtype=expanded,
            group=64,
            expanded=expanded,
            note=NOTE,
            markers=("SCB",),
            matrix=read_8_bits,
        )
    fields.choice("bnb_4bit_quant_storage", "uint8", tuple(STORAGES))
    kind = fields.choice("bnb_4bit_quant_type", "fp4", ("nf4", "fp4"))
    nested = fields.get("bnb_4bit_use_double_quant", False)
    return Scheme(
        title=f"bitsandbytes, {kind}{', double quantisation' if nested else ''}",
        dtype=kind.upper(),
        expanded=expanded,
        markers=("weight.absmax", "weight.quant_map"),
        matrix=read_4_bits,
    )


def read_8_bits(module: Module) -> Matrix:
    """The matrix of a module in 8 bits."""
    weight = module.take("weight", ("int8",), None, None)
    outputs, inputs = weight.shape
    largest = module.take("SCB", ("float32",), outputs)
    if "weight_format" in module:
        layout = module.take("weight_format", ("uint8",))
        if layout.stored(("uint8",)) != 0:
            raise UnsupportedModelError(f"tensor {layout.name} is {layout.stored(('uint8',))}; minillm reads 0, rows")

    def scales(first: int, stop: int) -> NDArray[np.float32]:
        with np.errstate(all="ignore"):  # damaged ones are infinite or NaN
            return largest.part(0, first, stop).load()[:, None] * np.float32(1 / 127)

    return Matrix(
        name=weight.name,
        shape=(outputs, inputs),
        numbers=lambda first, stop: weight.part(0, first, stop).stored(("int8",)),
        scales=scales,
        size=inputs,
        bits=8,
    )


def read_4_bits(module: Module) -> Matrix:
    """The matrix of a module in 4 bits."""
    kinds = [kind for kind in ("nf4", "fp4") if f"weight.quant_state.bitsandbytes__{kind}" in module]
    described = module.take(f"weight.quant_state.bitsandbytes__{(kinds or ['nf4'])[0]}", ("uint8",), None)
    if described.shape[0] > LONGEST:
        raise CheckpointError(
            f"tensor {described.name} should have at most {LONGEST} bytes, found {described.shape[0]}"
        )
    fields = Fields(parse_json(described.stored(("uint8",)).tobytes(), f"tensor {described.name}"), described.name)
    shape, block = fields.get("shape", []), fields.size("blocksize")
    if block not in BLOCKS or len(shape) != 2 or not all(type(n) is int and 0 < n < 2**24 for n in shape):
        raise CheckpointError(
            f"tensor {described.name} should give the shape of a matrix and a block of {BLOCKS[0]} to {BLOCKS[-1]}, "
            f"found {shape!r:.60} and {block}"
        )
    outputs, inputs = shape
    count = -(-outputs * inputs // block)
    storage = module.take("weight", tuple(STORAGES), None, 1).dtype
    packed = module.take("weight", (storage,), -(-outputs * inputs // (2 * STORAGES[storage])), 1).as_bytes()
    values = module.take("weight.quant_map", ("float32",), 16)
    nested = "weight.nested_absmax" in module
    absmax = module.take("weight.absmax", ("uint8" if nested else "float32",), count)
    scales = _nested_scales(module, fields, absmax) if nested else None

    def codes(first: int, stop: int) -> NDArray[np.uint8]:
        begin, end = first * inputs, stop * inputs
        pairs = packed.part(0, begin // 2, -(-end // 2)).stored(("uint8",)).reshape(-1)
        indices = np.stack([pairs >> 4, pairs & 15], axis=-1).reshape(-1)[begin % 2 :][: end - begin]
        return indices.reshape(stop - first, inputs)

    def shared_scales(start: int, last: int) -> NDArray[np.float32]:
        return scales(start, last) if scales is not None else absmax.part(0, start, last).load()

    def numbers(first: int, stop: int) -> NDArray[np.float32]:
        begin, end = first * inputs, stop * inputs
        start, last = begin // block, -(-end // block)
        with np.errstate(all="ignore"):  # damaged scales are infinite or NaN
            spread = np.repeat(shared_scales(start, last), block)[begin - start * block :][: end - begin]
            weights: NDArray[np.float32] = values.load()[codes(first, stop)] * spread.reshape(stop - first, inputs)
        return weights

    in_blocks = code_book_matrix(packed.name, (outputs, inputs), codes, shared_scales, values.load(), block)
    if in_blocks is not None:
        return in_blocks
    return Matrix(name=packed.name, shape=(outputs, inputs), numbers=numbers)


def _nested_scales(module: Module, fields: Fields, absmax: StoredTensor) -> Rows:
    """Double quantisation: (first, stop) -> the scales of these blocks, as float32."""
    block, offset = fields.size("nested_blocksize"), fields.number("nested_offset", above=-1e30)
    scales = module.take("weight.nested_absmax", ("float32",), -(-absmax.shape[0] // block))
    values = module.take("weight.nested_quant_map", ("float32",), 256)

    def rows(first: int, stop: int) -> NDArray[np.float32]:
        indices = absmax.part(0, first, stop).stored(("uint8",))
        with np.errstate(all="ignore"):
            spread = scales.load()[np.arange(first, stop) // block]
            absolute: NDArray[np.float32] = values.load()[indices] * spread + np.float32(offset)
        return absolute

    return rows
