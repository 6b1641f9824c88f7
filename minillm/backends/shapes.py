"""A backend of shapes alone: its arrays hold no numbers and take no memory, whatever the size of the model.

Under `observe.CountingBackend` a pass on it gives a model's FLOPs and bytes, and its arena the size of the results.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..batch import Batch
from ..reference.quantize import Quantized
from ..reference.rotary import Rotation
from .arena import Arena
from .base import QUANTIZED, Backend, Role
from .weights import Tensor, Weight

DTYPES: dict[str, Any] = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16, "int8": np.int8}
"""Format -> NumPy type of its numbers; bfloat16 is held as its bits"""
_NOTHING = bytes(8)


def without_numbers(shape: tuple[int, ...], dtype: Any = np.float32) -> NDArray[Any]:
    """A read-only array of this shape, all of whose elements are the same zero."""
    return np.ndarray(shape, dtype, _NOTHING, strides=(0,) * len(shape))


@dataclass(frozen=True)
class _Buffer:
    """What an arena asks of a flat buffer of `nbytes` bytes."""

    nbytes: int
    dtype: Any

    @property
    def size(self) -> int:
        return self.nbytes

    def __getitem__(self, part: slice) -> "_Buffer":
        return self

    def view(self, dtype: Any) -> "_Buffer":
        return _Buffer(self.nbytes, dtype)

    def reshape(self, shape: tuple[int, ...]) -> NDArray[Any]:
        return without_numbers(shape, self.dtype)


class ShapeBackend(Backend):
    """Returns results of the right shape and dtype, without numbers."""

    name = "shapes"

    def __init__(
        self,
        *,
        weights: str = "float32",
        cache: str = "float32",
        activations: str = "float32",
        checkpoint: str = "float32",
        group: int = 32,
    ) -> None:
        """Set the formats, as in `accounting.Storage`.

        Args:
            weights: of matrices, one of `weights.FORMATS`
            cache: of keys and values, a key of `DTYPES`
            activations: of results but logits, which are float32: a floating-point key of `DTYPES`
            checkpoint: of the position table where weights have 8 or 4 bits
            group: weights that share a scale
        """
        super().__init__(weights=weights)
        self.arena = Arena(np, DTYPES[activations], lambda shape, dtype: _Buffer(shape[0], dtype))
        self.prepared: dict[str, Weight] = {}
        """Every parameter, by its name"""
        self._vocabulary: set[str] = set()
        self._cache, self._checkpoint, self._group = cache, checkpoint, group

    def prepare_weight(
        self, name: str, tensors: Sequence[Tensor], biases: Sequence[Tensor] = (), role: Role = "projection"
    ) -> Weight:
        """A weight of the tensors' shape; they are not read."""
        shape = (sum(tensor.shape[0] for tensor in tensors), *tensors[0].shape[1:])
        bias = without_numbers((sum(tensor.shape[0] for tensor in biases),)) if biases else None
        data = without_numbers(shape) if len(shape) == 1 else self._matrix(shape[0], shape[1], role)
        self.prepared[name] = Weight(name, data, bias)
        if role == "vocabulary":
            self._vocabulary.add(name)
        return self.prepared[name]

    def _matrix(self, rows: int, columns: int, role: Role) -> Any:
        form = self.format_of(role)
        if form not in QUANTIZED:
            return without_numbers((rows, columns), DTYPES[self._checkpoint if form == "auto" else form])
        groups = -(-columns // self._group)
        padded = groups * self._group
        values = without_numbers(*(((rows, padded), np.int8) if form == "int8" else ((rows, padded // 2), np.uint8)))
        return Quantized(values, without_numbers((rows, groups), np.float16), columns)

    def position_bytes(self, K: int, D: int) -> int:
        """Bytes that one position's keys and values take in one layer; int8 has a float32 scale for each vector."""
        number_bytes: int = np.dtype(DTYPES[self._cache]).itemsize
        return 2 * K * (D * number_bytes + (4 if self._cache == "int8" else 0))

    def embed(self, ids: Any, table: Weight, positions: Any = None, position_table: Weight | None = None) -> Any:
        """[T], [T] -> [T, E]"""
        return self.arena.take((len(ids), table.shape[1]))

    def linear(self, x: Any, weight: Weight, *, activation: str | None = None, residual: Any | None = None) -> Any:
        """[T, in] -> [T, out]"""
        dtype = np.float32 if weight.name in self._vocabulary else None
        return self.arena.take((len(x), weight.shape[0]), dtype)

    def layer_norm(self, x: Any, weight: Weight, epsilon: float) -> Any:
        """[T, E] -> [T, E]"""
        return self.arena.take(x.shape)

    def rms_norm(self, x: Any, weight: Weight, epsilon: float) -> Any:
        """[T, E] -> [T, E], by head [T, heads, D] -> [T, heads, D]"""
        return self.arena.take(x.shape)

    def rotary(self, q: Any, k: Any, batch: Batch, rotation: Rotation) -> tuple[Any, Any]:
        """[T, H, D], [T, K, D] -> [T, H, D], [T, K, D]"""
        return self.arena.take(q.shape), self.arena.take(k.shape)

    def glu(self, x: Any, activation: str) -> Any:
        """[T, 2 F] -> [T, F]"""
        return self.arena.take((len(x), x.shape[1] // 2))

    def store_kv(self, k: Any, v: Any, cache: Any, layer: int, batch: Batch) -> None:
        """Nothing to store. k, v: [T, K, D]"""

    def attend(self, q: Any, cache: Any, layer: int, batch: Batch, **options: Any) -> Any:
        """[T, H, D] -> [T, H, D]"""
        return self.arena.take(q.shape)

    def take_rows(self, x: Any, rows: Any) -> Any:
        """[T, E], [R] -> [R, E]"""
        return self.arena.take((len(rows), x.shape[1]))
