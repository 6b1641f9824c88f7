"""A backend of shapes alone: its arrays hold no numbers and take no memory, whatever the size of the model.

Under `observe.CountingBackend` a pass on it gives a model's FLOPs and bytes, and its arena the size of the results.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..batch import Batch
from ..reference.attention import AttentionSpec
from ..reference.blocks import BLOCK_FORMATS, BlockMatrix
from ..reference.experts import Routing, expected_experts
from ..reference.quantize import Quantized
from ..reference.rotary import Rotation
from .formats import FLOAT32, WEIGHT_FORMATS, Format, Role, WeightFormats
from .loader import Loader, Tensor
from .memory import Arena, Memory
from .operations import Backend
from .storage import Experts
from .weights import Weight

_NOTHING = bytes(8)


def without_numbers(shape: tuple[int, ...], dtype: Any = np.float32) -> NDArray[Any]:
    """A read-only array of this shape, all of whose elements are the same zero."""
    return np.ndarray(shape, dtype, _NOTHING, strides=(0,) * len(shape))


@dataclass(frozen=True)
class _Buffer:
    """As much of a flat buffer as an arena asks for."""

    nbytes: int
    dtype: Any

    @property
    def size(self) -> int:
        return self.nbytes

    def __getitem__(self, index: slice) -> "_Buffer":
        return self

    def view(self, dtype: Any) -> "_Buffer":
        return _Buffer(self.nbytes, dtype)

    def reshape(self, shape: tuple[int, ...]) -> NDArray[Any]:
        return without_numbers(shape, self.dtype)


class ShapeLoader(Loader):
    """Makes weights of the tensors' shapes; the tensors are not read."""

    def __init__(self, weights: WeightFormats, checkpoint: Format) -> None:
        """Set the formats; `checkpoint` is the format of matrices for which `weights` has none."""
        super().__init__(weights)
        self.checkpoint = checkpoint
        self.prepared: dict[str, Weight] = {}
        """Every parameter, by its name"""

    def prepare(
        self, name: str, tensors: Sequence[Tensor], biases: Sequence[Tensor] = (), role: Role = "projection"
    ) -> Weight:
        """A weight without numbers, whose arrays have the shapes and types of the format."""
        shape = (sum(tensor.shape[0] for tensor in tensors), *tensors[0].shape[1:])
        bias = without_numbers((sum(tensor.shape[0] for tensor in biases),)) if biases else None
        data = without_numbers(shape) if len(shape) == 1 else self._matrix(shape[0], shape[1], role)
        self.prepared[name] = Weight(name, data, bias, role)
        return self.prepared[name]

    def prepare_experts(
        self, name: str, experts: Sequence[Sequence[Tensor]], biases: Sequence[Sequence[Tensor]] = ()
    ) -> Weight:
        """The same matrix without numbers for each expert."""
        rows = sum(tensor.shape[0] for tensor in experts[0])
        matrix = self._matrix(rows, experts[0][0].shape[1], "projection")
        bias = without_numbers((len(biases), rows)) if biases else None
        self.prepared[name] = Weight(name, Experts((matrix,) * len(experts)), bias)
        return self.prepared[name]

    def copied(self, name: str, array: Any) -> Weight:
        """A weight without numbers."""
        return Weight(name, without_numbers(array.shape, array.dtype))

    def _matrix(self, rows: int, columns: int, role: Role) -> Any:
        form = self.formats.of(role) or self.checkpoint
        if not form.scale_bits:
            return without_numbers((rows, columns), form.dtype)
        if form.block:
            blocks = without_numbers((rows, form.row_bytes(columns)), np.uint8)
            return BlockMatrix(blocks, BLOCK_FORMATS[form.block], columns)
        groups = -(-columns // form.group)
        values = without_numbers((rows, groups * form.group * form.bits // 8), form.dtype)
        offsets = without_numbers((rows, groups), form.offset_dtype) if form.offset_bits else None
        return Quantized(values, without_numbers((rows, groups), np.float16), columns, offsets)


class ExpectedRouting(Routing):
    """A routing with known shapes only."""

    @property
    def used(self) -> float:
        """The expected number of experts that the tokens use, if they choose at random."""
        return expected_experts(len(self.weights), len(self.starts) - 1, self.weights.shape[1])


class ShapeBackend(Backend):
    """Returns results of the right shape and dtype, without numbers."""

    name = "shapes"
    loader: ShapeLoader

    def __init__(
        self,
        weights: WeightFormats = WEIGHT_FORMATS["float32"],
        *,
        cache: Format = FLOAT32,
        activations: Format = FLOAT32,
        checkpoint: Format = FLOAT32,
    ) -> None:
        """Set the formats of matrices, keys and values, results but logits, and the checkpoint's matrices."""
        memory = Memory(np, activations=activations, cache=cache)
        memory.arena = Arena(np, activations.dtype, lambda shape, dtype: _Buffer(shape[0], dtype))
        super().__init__(ShapeLoader(weights, checkpoint), memory)

    def embed(self, ids: Any, table: Weight, *rows: Any, **others: Any) -> Any:
        """[T] -> [T, E]"""
        return self.memory.arena.take((len(ids), table.shape[1]))

    def linear(self, x: Any, weight: Weight, *, activation: str | None = None, residual: Any | None = None) -> Any:
        """[T, in] -> [T, out]"""
        dtype = np.float32 if weight.makes_logits else None
        return self.memory.arena.take((len(x), weight.shape[0]), dtype)

    def linear_heads(self, x: Any, weight: Weight) -> Any:
        """[T, H, r + in] -> [T, H, r + out]"""
        (T, H, D), (rows, inputs) = x.shape, weight.shape
        return self.memory.arena.take((T, H, D - inputs + rows // H))

    def add_low_rank(self, y: Any, x: Any, parts: Any, **variant: Any) -> Any:
        """[T, out] -> [T, out]"""
        return y

    def layer_norm(self, x: Any, weight: Weight, epsilon: float) -> Any:
        """[T, E] -> [T, E]"""
        return self.memory.arena.take(x.shape)

    def rms_norm(self, x: Any, weight: Weight, epsilon: float, *, residual: Any | None = None) -> Any:
        """[T, E] -> [T, E], by head [T, heads, D] -> [T, heads, D]"""
        return self.memory.arena.take(x.shape)

    def rotary(self, q: Any, k: Any, batch: Batch, rotation: Rotation) -> tuple[Any, Any]:
        """[T, H, D], [T, K, D] -> [T, H, D], [T, K, D]"""
        return self.memory.arena.take(q.shape), self.memory.arena.take(k.shape)

    def glu(self, x: Any, activation: str, *, alone: bool = False) -> Any:
        """[T, 2 F] -> [T, F], or [T, F] -> [T, F]"""
        return self.memory.arena.take(x.shape if alone else (len(x), x.shape[1] // 2))

    def gate(self, x: Any, logits: Any, *, silu: bool = False) -> Any:
        """[T, F], [T, n] -> [T, F]"""
        return self.memory.arena.take(x.shape)

    def multiply(self, x: Any, others: Any = None, *, factor: Weight | None = None) -> Any:
        """[T, F] -> [T, F]"""
        return self.memory.arena.take(x.shape)

    def route(self, logits: Any, k: int, **variant: Any) -> Routing:
        """[T, X] -> [T, k]"""
        T, X = logits.shape
        sizes = ((T, k), np.int64), ((T, k), np.float32), ((T, k), np.int64), ((T * k,), np.int64), ((X + 1,), np.int64)
        return ExpectedRouting(*(without_numbers(shape, dtype) for shape, dtype in sizes))

    def linear_experts(self, x: Any, weight: Weight, routing: Routing) -> Any:
        """[T k, in] -> [T k, out]"""
        return self.memory.arena.take((len(x), weight.shape[1]))

    def combine(self, y: Any, routing: Routing, residual: Any | None = None) -> Any:
        """[T k, E] -> [T, E]"""
        return self.memory.arena.take((len(routing.weights), y.shape[1]))

    def convolve(self, x: Any, weight: Weight, cache: Any, layer: int, batch: Batch, **variant: Any) -> Any:
        """[T, C] -> [T, C], gated [T, 3 C] -> [T, C]"""
        return self.memory.arena.take((len(x), x.shape[1] // (3 if variant.get("gated") else 1)))

    def unfold(self, x: Any, width: int, batch: Batch, *, stride: int = 1) -> Any:
        """[R, E] -> [R / stride, width E]"""
        return self.memory.arena.take((len(x) // stride, width * x.shape[1]))

    def delta_rule(
        self, x: Any, gates: Any, weight: Weight, cache: Any, layer: int, batch: Batch, *, keys: tuple[int, int]
    ) -> Any:
        """[T, 2 K dk + V dv] -> [T, V dv]"""
        return self.memory.arena.take((len(x), x.shape[1] - 2 * keys[0] * keys[1]))

    def selective_scan(
        self,
        x: Any,
        steps: Any,
        weight: Weight,
        cache: Any,
        layer: int,
        batch: Batch,
        *,
        groups: tuple[int, int],
        **variant: Any,
    ) -> Any:
        """[T, H P + 2 G N] -> [T, H P]"""
        return self.memory.arena.take((len(x), x.shape[1] - 2 * groups[0] * groups[1]))

    def store_kv(self, k: Any, v: Any, cache: Any, layer: int, batch: Batch) -> None:
        """Nothing to store. k, v: [T, K, D]"""

    def attend(self, q: Any, cache: Any, layer: int, batch: Batch, spec: AttentionSpec) -> Any:
        """[T, H, D] -> [T, H, V]"""
        return self.memory.arena.take((*q.shape[:2], cache.value_dim or q.shape[2]))

    def take_rows(self, x: Any, rows: Any) -> Any:
        """[T, E], [R] -> [R, E]"""
        return self.memory.arena.take((len(rows), x.shape[1]))

    def scale_logits(self, logits: Any, scale: float, cap: float | None) -> Any:
        """[R, V] -> [R, V]"""
        return logits
