"""minillm's own scheme: 8- or 4-bit matrices, as `write_checkpoint.py` writes them.

    config.json      "quantization_config": {"quant_method": "minillm", "bits": 4, "group_size": 32}
    X.weight         int8 [out, in'], or uint8 [out, in' / 2]; in' is `in` padded to a multiple of the group
    X.weight_scale   float16 [out, in' / group_size]

`reference/quantize.py` defines the format. `bits` is the projections'; the vocabulary may have 8 with 4-bit
projections, and tensors that are not quantised are stored as usual. Names and shapes as in the tensor table.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...backends.formats import FORMATS
from ...backends.loader import CHUNK, Tensor
from ...config import ModelConfig
from ...errors import CheckpointError, ParameterError
from ...models import tensor_shapes
from ...models.building import Shapes
from ...reference.quantize import GROUPS, Quantized, dequantize
from ..tensors import ComputedTensor, StoredTensor

METHOD = "minillm"
"""minillm's quant_method."""
SCALE = "_scale"
"""Suffix of the tensor that holds a matrix's scales."""


@dataclass(frozen=True, eq=False)
class QuantizedTensor(ComputedTensor):
    """An 8- or 4-bit matrix [out, in] in a file, read on demand."""

    values: StoredTensor
    scales: StoredTensor
    shape: tuple[int, int]

    @property
    def dtype(self) -> str:
        """Its name in `formats.FORMATS`."""
        return "int8" if self.values.dtype == "int8" else "int4"

    def stored(self) -> Quantized:
        """The stored integers and scales, memory-mapped if possible."""
        values, scales = self.values.stored((self.values.dtype,)), self.scales.stored()
        return Quantized(values, scales, self.shape[1])

    def copied(self, empty: Callable[..., NDArray[Any]] = np.empty) -> Quantized:
        """As `stored`: nothing is mapped; `empty` makes the arrays, by shape and dtype."""
        parts = []
        for tensor in (self.values, self.scales):
            parts.append(empty(tensor.shape, np.dtype(tensor.dtype)))
            tensor.read_into(parts[-1])
        return Quantized(parts[0], parts[1], self.shape[1])

    def merged_with(self, other: Any) -> "QuantizedTensor | None":
        """Both as one matrix if their values and their scales are adjacent in the file, else None."""
        if not isinstance(other, QuantizedTensor) or other.shape[1] != self.shape[1]:
            return None
        values, scales = self.values.merged_with(other.values), self.scales.merged_with(other.scales)
        if values is None or scales is None:
            return None
        return QuantizedTensor(values, scales, (self.shape[0] + other.shape[0], self.shape[1]))

    def part(self, axis: int, first: int, stop: int) -> "QuantizedTensor":
        """Rows (axis 0), or columns (axis 1) of whole groups, `first` to `stop`; the rest is not read.

        Raises:
            ParameterError: a range of columns that begins or ends within a group.
        """
        if axis == 0:
            shape = stop - first, self.shape[1]
            return QuantizedTensor(self.values.part(0, first, stop), self.scales.part(0, first, stop), shape)
        group = self.values.shape[1] * (1 if self.dtype == "int8" else 2) // self.scales.shape[1]
        check_columns(self.values.name, first, stop, self.shape[1], group)
        groups = slice(first // group, -(-stop // group))
        width = self.values.shape[1] // self.scales.shape[1]  # bytes of a group
        return QuantizedTensor(
            self.values.part(1, groups.start * width, groups.stop * width),
            self.scales.part(1, groups.start, groups.stop),
            (self.shape[0], stop - first),
        )

    def chunks(self) -> Iterator[NDArray[np.float32]]:
        """The dequantised values in chunks of rows."""
        stored = self.stored()
        rows = max(1, CHUNK // max(1, self.shape[1]))
        for first in range(0, self.shape[0], rows):
            yield dequantize(stored, slice(first, first + rows))


def check_columns(name: str, first: int, stop: int, width: int, group: int) -> None:
    """Refuse columns `first` to `stop` of `width` that begin or end within a group.

    Raises:
        ParameterError: they do.
    """
    if first % group or (stop % group and stop < width):
        raise ParameterError(
            f"tensor {name}: columns {first} to {stop} of {width} are not whole groups of {group} weights: share the "
            "model among fewer ranks"
        )


@dataclass(frozen=True)
class MinillmScheme:
    """The quantization_config of a checkpoint that minillm has written."""

    bits: int
    """Bits of projections: 8 or 4"""
    group: int
    """Weights that share a scale"""
    keeps_vocabulary = False
    """The embedding has 8 bits"""
    as_built = True
    """Tensors have the names and the order with which the model is built"""
    published = False

    @property
    def title(self) -> str:
        """For people."""
        return self.dtype

    @property
    def dtype(self) -> str:
        """The equivalent dtype of an engine."""
        return f"int{self.bits}"

    def check_dtype(self, dtype: str) -> None:
        """Refuse to quantise a second time.

        Raises:
            ParameterError: the dtype that a user asks for is another quantised one.
        """
        form = FORMATS.get(dtype)
        if form is not None and form.scale_bits and form.bits != self.bits:
            raise ParameterError(
                f"the checkpoint is already quantised to {self.dtype}: dtype should be 'auto', which keeps that, or "
                f"another than {dtype!r}; or quantise the checkpoint that it was made from"
            )

    def log(self, folder: Path, tensors: Mapping[str, Tensor]) -> None:
        """Say nothing: the matrices are what they are in the files."""

    def join(self, stored: Mapping[str, StoredTensor], config: ModelConfig) -> dict[str, Tensor]:
        """Combine each matrix and its scales into one tensor; the head may be one, whatever `config` says of ties.

        Raises:
            CheckpointError: values or scales of a matrix have the wrong type or shape.
        """
        return self.join_matrices(stored, tensor_shapes(replace(config, tied_head=False)))

    def join_matrices(self, stored: Mapping[str, StoredTensor], shapes: Shapes) -> dict[str, Tensor]:
        """As `join`, for tensors of these shapes."""
        matrices = [n for n, shape in shapes.items() if len(shape) == 2 and n in stored and n + SCALE in stored]
        joined: dict[str, Tensor] = {n: self._matrix(stored[n], stored[n + SCALE], shapes[n]) for n in matrices}
        scales = {name + SCALE for name in matrices}
        return {name: joined.get(name, tensor) for name, tensor in stored.items() if name not in scales}

    def _matrix(self, values: StoredTensor, scales: StoredTensor, shape: tuple[int, ...]) -> QuantizedTensor:
        outputs, inputs = shape
        groups = -(-inputs // self.group)
        bits = 8 if values.dtype == "int8" else 4
        _check(values, "int8" if bits == 8 else "uint8", (outputs, groups * self.group * bits // 8))
        _check(scales, "float16", (outputs, groups))
        return QuantizedTensor(values, scales, (outputs, inputs))


def _check(tensor: StoredTensor, dtype: str, shape: tuple[int, ...]) -> None:
    if (tensor.dtype, tensor.shape) != (dtype, shape):
        raise CheckpointError(
            f"tensor {tensor.name} should be {dtype} of shape {list(shape)} by config.json, "
            f"found {tensor.dtype} of shape {list(tensor.shape)}"
        )


def read(raw: Mapping[str, Any]) -> MinillmScheme:
    """Read a quantization_config with minillm's method.

    Raises:
        CheckpointError: it has invalid numbers.
    """
    bits, group = raw.get("bits"), raw.get("group_size")
    if bits not in (8, 4) or group not in GROUPS:
        raise CheckpointError(
            f"config.json: quantization_config should have bits 8 or 4 and group_size 32 or 64, found {bits!r:.60} and "
            f"{group!r:.60}"
        )
    return MinillmScheme(int(bits), int(group))
