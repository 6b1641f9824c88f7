"""gpt-oss's MXFP4: blocks of 32 numbers of 4 bits with one exponent (OCP Microscaling Formats, 2023).

    config.json     "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": [...]}
    X_blocks        uint8 [experts, outputs, in / 32, 16]; byte j has the numbers 2 j, low, and 2 j + 1, high
    X_scales        uint8 [experts, outputs, in / 32]: exponents, 127 higher than they are

A matrix is kept as the blocks of a GGUF file (`reference/blocks.py`), where byte j has the numbers j and j + 16: the
nibbles are reordered when it is read, and the weights are those that transformers dequantises, bit for bit
(`integrations/mxfp4.py`, `Mxfp4Dequantize`).
"""

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ...backends.loader import CHUNK, Tensor
from ...config import Fields, ModelConfig
from ...errors import CheckpointError
from ...reference.blocks import BLOCK_FORMATS, BlockMatrix, dequantize_blocks
from ..tensors import ComputedTensor, StoredTensor
from .minillm import check_columns

logger = logging.getLogger("minillm")

FORM = BLOCK_FORMATS["MXFP4"]
BLOCKS, SCALES = "_blocks", "_scales"
"""Endings of the names of a matrix's tensors"""
NOT_A_NUMBER = 255
"""The exponent that stands for NaN"""


@dataclass(frozen=True, eq=False)
class PackedTensor(ComputedTensor):
    """Matrices [experts, outputs, inputs], or one of them, read on demand."""

    name: str
    blocks: StoredTensor
    scales: StoredTensor
    first: int = 0
    step: int = 1
    """Every `step`-th row from `first` on, where it is one matrix"""
    dtype = FORM.name

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        """Experts, outputs, inputs; of one, outputs and inputs."""
        *stacked, rows, groups = self.scales.shape
        return *stacked, len(range(self.first, rows, self.step)), groups * FORM.numbers

    def item(self, index: int) -> "PackedTensor":
        """Expert number `index`'s matrix; the rest is not read."""
        return replace(self, blocks=self.blocks.item(index), scales=self.scales.item(index))

    def every(self, first: int, step: int) -> "PackedTensor":
        """Every `step`-th row of a matrix, from `first` on."""
        assert self.step == 1
        return replace(self, first=first, step=step)

    def part(self, axis: int, first: int, stop: int) -> "PackedTensor":
        """Rows (axis 0), or columns (axis 1) of whole blocks, `first` to `stop`; the rest is not read.

        Raises:
            ParameterError: a range of columns that begins or ends within a block.
        """
        if axis:
            check_columns(self.name, first, stop, self.shape[1], FORM.numbers)
            ends = (1, first // FORM.numbers, stop // FORM.numbers)
            return replace(self, blocks=self.blocks.part(*ends), scales=self.scales.part(*ends))
        ends = (0, self.first + first * self.step, self.first + (stop - 1) * self.step + 1)
        return replace(self, blocks=self.blocks.part(*ends), scales=self.scales.part(*ends), first=0)

    def stored(self) -> BlockMatrix:
        """The matrix as GGUF's blocks.

        Raises:
            CheckpointError: a scale is NaN.
        """
        packed, scales = (each.stored(("uint8",))[self.first :: self.step] for each in (self.blocks, self.scales))
        if scales.size and scales.max() == NOT_A_NUMBER:
            raise CheckpointError(f"tensor {self.name}{SCALES} holds {NOT_A_NUMBER}, which stands for NaN")
        blocks = np.empty((*scales.shape, FORM.bytes), np.uint8)
        blocks[..., 0] = scales
        blocks[..., 1:] = in_halves(packed)
        return BlockMatrix(blocks.reshape(len(blocks), -1), FORM)

    def chunks(self) -> Iterator[NDArray[np.float32]]:
        """The dequantised weights, in chunks of rows."""
        matrix = self.stored()
        rows = max(1, CHUNK // max(1, self.shape[1]))
        for first in range(0, self.shape[0], rows):
            yield dequantize_blocks(matrix, slice(first, first + rows))


def in_halves(packed: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Blocks whose neighbours share a byte, in GGUF's order. [..., 16] -> [..., 16]"""
    numbers = np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], 32)  # [..., 16] -> [..., 32]
    reordered: NDArray[np.uint8] = numbers[..., :16] | numbers[..., 16:] << np.uint8(4)
    return reordered


@dataclass(frozen=True)
class Mxfp4Scheme:
    """The quantization_config of a checkpoint in MXFP4."""

    left_out: tuple[str, ...]
    """Modules that are not quantised, in which * is any text"""
    title = "MXFP4"
    dtype = FORM.name
    group = FORM.numbers
    keeps_vocabulary = True
    as_built = False
    published = True

    def check_dtype(self, dtype: str) -> None:
        """Accept any dtype: the matrices can be rounded anew."""

    def join(self, stored: Mapping[str, StoredTensor], config: ModelConfig | None = None) -> dict[str, Tensor]:
        """One tensor for the blocks and the scales of each matrix; all other tensors as they are.

        Raises:
            CheckpointError: blocks or scales are missing, or have the wrong type or shape; or the configuration says
                that they are not quantised.
        """
        named = ((name, ending) for name in stored for ending in (BLOCKS, SCALES) if name.endswith(ending))
        names = dict.fromkeys(name.removesuffix(ending) for name, ending in named)
        used = {name + ending for name in names for ending in (BLOCKS, SCALES)}
        joined = dict[str, Tensor]({name: tensor for name, tensor in stored.items() if name not in used})
        return joined | {name: self._matrices(name, stored) for name in names}

    def _matrices(self, name: str, stored: Mapping[str, StoredTensor]) -> PackedTensor:
        for ending in (BLOCKS, SCALES):
            if name + ending not in stored:
                raise CheckpointError(f"the checkpoint lacks tensor {name}{ending}, which MXFP4 needs")
        blocks, scales = stored[name + BLOCKS], stored[name + SCALES]
        for tensor, shape in ((blocks, (*scales.shape, FORM.bytes - 1)), (scales, blocks.shape[:-1])):
            if tensor.dtype != "uint8" or len(scales.shape) != 3 or tensor.shape != shape:
                raise CheckpointError(
                    f"tensor {tensor.name} should be uint8 of shape [experts, outputs, blocks"
                    f"{', 16' if tensor is blocks else ''}] by MXFP4, found {tensor.dtype} of shape "
                    f"{list(tensor.shape)} beside {list((scales if tensor is blocks else blocks).shape)}"
                )
        for module in self.left_out:
            if fnmatchcase(name, module) or fnmatchcase(name, f"{module}.*"):
                raise CheckpointError(
                    f"tensor {name}{BLOCKS} belongs to {module}, which modules_to_not_convert leaves unquantised"
                )
        return PackedTensor(name, blocks, scales)

    def log(self, folder: Path, tensors: Mapping[str, Tensor]) -> None:
        """Say in one line how many matrices are in blocks."""
        count = sum(tensor.dtype == FORM.name for tensor in tensors.values())
        logger.info("%s: quantised by MXFP4; %d matrices kept exactly as MXFP4", folder, count)


def read(fields: Fields, expanded: str) -> Mxfp4Scheme:
    """The scheme of a quantization_config with quant_method "mxfp4"."""
    modules = fields.get("modules_to_not_convert", [])
    for module in modules:
        if not isinstance(module, str):
            raise CheckpointError(
                f"{fields.source}: modules_to_not_convert should be names of modules, found {module!r:.60}"
            )
    fields.get("dequantize", False)  # says what transformers does with the blocks, not what they are
    return Mxfp4Scheme(tuple(modules))
