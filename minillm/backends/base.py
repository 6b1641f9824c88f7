"""The operations of the model, by default those of `reference/` on an array module.

A backend overrides the operations it has a faster implementation of; the others run as in the reference, so a missing
kernel never blocks a feature. Layers and models call these methods, never an array library.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from .. import reference
from ..batch import Batch
from ..reference.philox import Keys
from ..reference.rotary import Rotation
from ..reference.sampling import Draw
from .arena import Arena
from .clock import Clock, HostClock
from .memory import MemoryUse, free_memory
from .pages import Pages
from .random import RandomTensor
from .weights import FORMATS, Tensor, Weight, expand, gather, join

Result = TypeVar("Result", bound=tuple[Any, ...])
Role = Literal["projection", "vocabulary", "positions"]
"""The use of a matrix: projection; token embeddings and LM head; position embeddings."""
QUANTIZED = ("int8", "int4")


class Backend:
    """Runs every operation as `reference/` defines it, on the array module `xp`.

    Results are allocated from an arena: each is valid until the next layer begins, a layer's last one until the next
    layer has ended (see `Arena`).
    """

    name = "reference"
    page_size = 256
    """P, positions in a page; large on a CPU, where each page costs a call."""
    kept: Collection[str] = FORMATS
    """The formats of a checkpoint that "auto" keeps; others become float32."""
    clock: Clock = HostClock()
    """Used by `observe.py` to time operations; a device that runs asynchronously has another."""

    def __init__(self, xp: Any = np, *, weights: str = "float32", weight_order: Literal["C", "F"] = "C") -> None:
        """Set the array module and the format of the weights.

        Args:
            xp: NumPy, or a module with its interface
            weights: a format of `weights.FORMATS`, or "auto" for that of the checkpoint where it is one of `kept`
            weight_order: of float32 projections [out, in] in memory. "C" is that of checkpoints, so files are mapped
                and not copied. "F" copies at load; a product with several rows of activations then runs faster.
        """
        self.xp = xp
        self.weights = weights
        self.weight_order = weight_order
        self.arena = Arena(xp)

    def prepare_weight(
        self, name: str, tensors: Sequence[Tensor], biases: Sequence[Tensor] = (), role: Role = "projection"
    ) -> Weight:
        """Convert a parameter to this backend's layout, once, at load.

        Several tensors [out_i, in] become one weight [sum of out_i, in], such as a fused Q/K/V projection. A single one
        whose format and layout stay is mapped and not copied. Vectors are copied, as float32.
        """
        bias = join(biases) if biases else None
        if len(tensors[0].shape) == 1:
            return Weight(name, join(tensors), bias)
        return Weight(name, gather(tensors, self.format_of(role), self.weight_order, kept=self.kept), bias)

    def constant(self, name: str, values: NDArray[np.float32]) -> Weight:
        """A weight of given values, which are in no checkpoint. [n]"""
        return Weight(name, self.xp.asarray(values))

    def random_tensor(self, name: str, shape: tuple[int, ...], seed: int, std: float) -> Tensor:
        """A tensor of normal random numbers, the same for the same backend, seed and name."""
        return RandomTensor(name, shape, seed, std)

    def format_of(self, role: Role) -> str:
        """The format of a matrix. With int4 the vocabulary is int8; position embeddings are not quantised."""
        if role == "positions" and self.weights in QUANTIZED:
            return "auto"
        return "int8" if role == "vocabulary" and self.weights == "int4" else self.weights

    # --- the cache, and a forward pass ----------------------------------------------------------------------------

    def position_bytes(self, K: int, D: int) -> int:
        """Bytes that one position's keys and values take in one layer of the cache."""
        return 2 * K * D * 4

    def new_pages(self, shape: tuple[int, int, int, int, int]) -> Pages:
        """Memory for a K/V cache [L, pages, K, P, D]."""
        return Pages(self.xp, shape, self.xp.float32)

    def free_memory(self) -> int:
        """Bytes that this backend could still reserve."""
        return free_memory()

    def memory_use(self) -> MemoryUse | None:
        """Memory in use on a device; None where it is the host's."""
        return None

    def upload(self, batch: Batch, rows: Any) -> tuple[Batch, Any]:
        """Begin a forward pass. Returns the batch and the rows [R] whose logits are wanted, as operations take them."""
        self.arena.restart()
        return batch, np.asarray(rows, np.int64)

    def run(
        self,
        owner: object,
        batch: Batch,
        rows: Any,
        compute: Callable[[Batch, Any], Result],
        draws: Sequence[Draw | None] = (),
    ) -> Result:
        """Run one forward pass: call `compute` with the batch and rows as operations take them.

        A backend may record what `compute` launches and replay it on the next call with the same owner (a model with
        its cache). So `compute` must depend on its arguments alone and compute by operations only. Its result is a
        tuple of arrays with one row for each of `rows`, the logits first.

        `draws`, one for each of `rows` or none at all, are the calls of `sample` that will follow, where they are
        known. They change no result; a backend may sample within the pass, so that the host waits once.
        """
        return compute(*self.upload(batch, rows))

    # --- operations -----------------------------------------------------------------------------------------------

    def enter_layer(self, layer: int) -> None:
        """Announce the beginning of layer number `layer`; L stands for what follows the last one."""
        self.arena.turn()

    def embed(self, ids: Any, table: Weight, positions: Any = None, position_table: Weight | None = None) -> Any:
        """table[ids], plus position_table[positions]. [T], [T] -> [T, E]"""
        out = self.arena.take((len(ids), table.shape[1]))
        looked_up = expand(table.data, ids)  # converts only the rows that are looked up
        learned = None if position_table is None else expand(position_table.data, positions)
        return reference.embed(looked_up, self.xp.arange(len(ids)), self.xp, out, self.xp.arange(len(ids)), learned)

    def linear(self, x: Any, weight: Weight, *, activation: str | None = None, residual: Any | None = None) -> Any:
        """activation(x W^T + b) + residual. [T, in] -> [T, out]"""
        out = self.arena.take((len(x), weight.shape[0]))
        return reference.linear(
            x, expand(weight.data), weight.bias, self.xp, out, activation=activation, residual=residual
        )

    def layer_norm(self, x: Any, weight: Weight, epsilon: float) -> Any:
        """Normalise rows to mean 0 and variance 1, then apply gain and bias. [T, E] -> [T, E]"""
        return reference.layer_norm(x, weight.data, weight.bias, epsilon, self.xp, self.arena.take(x.shape))

    def rms_norm(self, x: Any, weight: Weight, epsilon: float) -> Any:
        """Normalise rows to mean square 1, then apply gain. [T, E] -> [T, E], by head [T, heads, D] -> [T, heads, D]"""
        return reference.rms_norm(x, weight.data, epsilon, self.xp, self.arena.take(x.shape))

    def rotary(self, q: Any, k: Any, batch: Batch, rotation: Rotation) -> tuple[Any, Any]:
        """Rotate queries and keys by their positions. [T, H, D], [T, K, D] -> [T, H, D], [T, K, D]"""
        frequencies, growth = rotation.frequencies.data, rotation.growth(batch)
        turns = reference.cosines_and_sines(
            batch.positions, frequencies, growth, rotation.scale, self.xp
        )  # 2 x [T, r / 2]
        turned = [reference.rotary(x, *turns, self.xp, self.arena.take(x.shape)) for x in (q, k)]
        return turned[0], turned[1]

    def glu(self, x: Any, activation: str) -> Any:
        """activation(gate) * up, of the two halves of each row. [T, 2 F] -> [T, F]"""
        return reference.glu(x, activation, self.xp, self.arena.take((len(x), x.shape[1] // 2)))

    def store_kv(self, k: Any, v: Any, cache: Pages, layer: int, batch: Batch) -> None:
        """Write the new tokens' keys and values to their slots of the cache. k, v: [T, K, D]"""
        reference.store_kv(k, v, *cache.layer(layer), batch)

    def attend(
        self,
        q: Any,
        cache: Pages,
        layer: int,
        batch: Batch,
        *,
        scale: float,
        window: int | None = None,
        slopes: Weight | None = None,
    ) -> Any:
        """Causal attention over the cache, sequence by sequence. [T, H, D] -> [T, H, D]

        A `window` limits how many positions each query sees; `slopes` [H] are ALiBi's.
        """
        out, bias = self.arena.take(q.shape), None if slopes is None else slopes.data
        return reference.attend(q, *cache.layer(layer), batch, scale, self.xp, out, window=window, slopes=bias)

    def take_rows(self, x: Any, rows: Any) -> Any:
        """The rows whose logits are wanted. [T, E], [R] -> [R, E]"""
        return self.xp.take(x, rows, axis=0, out=self.arena.take((len(rows), x.shape[1])), mode="clip")

    # --- logits ---------------------------------------------------------------------------------------------------

    @property
    def host(self) -> "Backend":
        """The backend for decoding strategies that process logits on the host."""
        return self

    def to_host(self, array: Any) -> Any:
        """A result as a host array, for operations of `host`; valid as long as the result is."""
        return array

    def finite(self, logits: Any) -> bool:
        """Whether no logit is NaN or plus infinity. [R, V]"""
        with np.errstate(all="ignore"):
            return bool(self.xp.isfinite(logits.max(initial=0.0)))

    def argmax(self, logits: Any) -> Any:
        """The most likely token of each row, as an array or a list; the smallest id among equals. [R, V] -> [R]"""
        return logits.argmax(axis=-1)

    def sample(self, logits: Any, keys: Keys, *, temperature: float, top_k: int, top_p: float, min_p: float) -> Any:
        """Sample one token per row from its filtered distribution, with the uniform number of its key. [R, V] -> [R]"""
        filters: dict[str, Any] = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
        return reference.sample(logits, keys.uniforms(), **filters, xp=self.xp)
