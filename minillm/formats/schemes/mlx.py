"""MLX's affine quantisation (mlx.core.quantize), as mlx-lm writes it.

    config.json  "quantization": {"group_size": 64, "bits": 4, MODULE: {"group_size": ..., "bits": ...} or false, ...}
    X.weight     uint32 [out, in bits / 32]    integers q from 0 on, of a row one after the other, lowest bits first
    X.scales     float [out, in / group]
    X.biases     float [out, in / group]

    weight = scale x q + bias,   q of 2, 3, 4, 5, 6 or 8 bits

Projections and embeddings are quantised, also the LM head. Definition: mlx `python/src/ops.cpp` (`quantize`,
`dequantize`), mlx-lm `utils.py` (`quantize_model`). Names and order of the tensors are those of transformers, except
where mlx-lm rearranges a family's: experts and convolutions, which are refused.
"""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from ...config import Fields
from ...errors import CheckpointError, UnsupportedModelError
from ..tensors import FLOATS
from .matrix import Matrix, Module, Scheme, common_group, read_bits, rows_of

BITS = (2, 3, 4, 5, 6, 8)
SETTINGS = ("group_size", "bits", "mode", "quant_method", "file")
"""Fields that are not names of modules"""


def read(fields: Fields, expanded: str) -> Scheme:
    """The scheme of config.json's `quantization`; matrices that are not exact in 4 bits become `expanded`."""
    bits, size = read_settings(fields)
    modules = {name: value for name, value in fields.raw.items() if name not in SETTINGS}
    settings = {name: read_module_settings(name, value, fields.source) for name, value in modules.items()}
    sizes = [size, *(own[1] for own in settings.values() if own is not None)]
    return Scheme(
        title=f"MLX, {bits} bits, groups of {size}",
        dtype=expanded if bits > 4 or size % 32 else "int4 with offsets",
        group=common_group(sizes),
        expanded=expanded,
        markers=("scales", "biases"),
        matrix=lambda module: read_module(module, settings, (bits, size)),
    )


def read_settings(fields: Fields) -> tuple[int, int]:
    """Bits of a number, and numbers in a group."""
    fields.choice("mode", "affine", ("affine",))
    return read_bits(fields, known=BITS), fields.size("group_size", 64)


def read_module_settings(name: str, value: object, source: str) -> tuple[int, int] | None:
    """Bits and group size of one module; None: it is not quantised."""
    if value is False:
        return None
    if not isinstance(value, dict):
        raise CheckpointError(
            f"{source}: the settings of {name:.80} should be group_size and bits, or false, found {value!r:.60}"
        )
    return read_settings(Fields(value, f"{source}: {name:.80}"))


def read_module(module: Module, settings: Mapping[str, tuple[int, int] | None], default: tuple[int, int]) -> Matrix:
    """The matrix of a module, by its own settings where it has some."""
    own = settings.get(module.name, default)
    if own is None:
        raise CheckpointError(f"tensors of {module.name} are quantised, but config.json says that it is not")
    bits, size = own
    if len(module.shape_of("weight") or ()) > 2:
        raise UnsupportedModelError(
            f"{module.name} holds the matrices of all experts in one tensor, as MLX stacks them; minillm reads "
            "published experts: take the checkpoint that this one was made from"
        )
    weight = module.take("weight", ("uint32",), None, None)
    outputs, inputs = weight.shape[0], weight.shape[1] * 32 // bits
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


def unpack_bits(words: NDArray[np.uint32], bits: int) -> NDArray[np.uint8]:
    """Integers of a row of words that lie one after the other, lowest bits first. [n, w] -> [n, 32 w // bits]"""
    packed = np.ascontiguousarray(words, "<u4").view(np.uint8)
    if bits == 8:
        return packed
    stream = np.unpackbits(packed, axis=1, bitorder="little")
    count = stream.shape[1] // bits
    by_number = stream[:, : count * bits].reshape(len(stream), count, bits)  # [n, 32 w] -> [n, numbers, bits]
    return np.packbits(by_number, axis=2, bitorder="little")[:, :, 0]
