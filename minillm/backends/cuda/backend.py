"""The CUDA backend: runs every operation by a kernel of `kernels/`, and decode steps as CUDA graphs.

The device and the launcher of kernels are arguments: CuPy's on a GPU, the host and an emulator without one. Weights,
results and K/V cache have one storage type; sums and logits are float32. Attention over a tree of guesses, or with
heads of an unsupported width, has no kernel: it runs as in the reference, on the device's array module.
"""

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakSet

import numpy as np
from numpy.typing import NDArray

from ...batch import Batch
from ...reference.philox import Keys
from ...reference.rotary import Rotation
from ...reference.sampling import Draw
from ..base import Backend, Result, Role
from ..memory import MemoryUse
from ..numpy import NumpyBackend
from ..pages import Pages
from ..random import RandomTensor
from ..weights import Tensor, Weight
from . import attention, rows
from .batches import Bucket, DeviceBatch, bucket_of
from .choosing import Chooser
from .kernels import Kernels, Launcher
from .linear import Products
from .memory import WORKSPACE, Device
from .pages import CudaPages
from .random import DrawnTensor
from .steps import DecodeStep, Steps, StepWorkspace, cut
from .weights import DeviceWeight, Uploader, number_type, storage_of

AUTO = "auto"


class CudaBackend(Backend):
    """Runs on a GPU, or on an emulator of one."""

    name = "cuda"
    page_size = 16

    def __init__(
        self, device: Device, launcher: Launcher, storage: str = AUTO, *, max_batch_size: int = 16, debug: bool = False
    ) -> None:
        """Set the device and the launcher of its kernels.

        Args:
            device: memory, copies and recording of steps
            launcher: compiles and launches
            storage: "float32", "float16" or "bfloat16"; or "auto": by the first matrix that is loaded (`storage_of`)
            max_batch_size: decode steps of more sequences are not recorded
            debug: check indices on the device
        """
        super().__init__(device.xp, weights=storage)
        self.device = device
        self.clock = device.clock
        self.max_batch_size = max_batch_size
        self._launcher, self._debug = launcher, debug
        self._uploader = Uploader(device)
        self._caches: WeakSet[CudaPages] = WeakSet()
        self._step: DecodeStep[Any] | None = None  # the one that runs
        self._largest = (0, 0)  # tokens and rows of a pass
        if storage != AUTO:
            self._settle(storage)

    def _settle(self, storage: str) -> None:
        """Set the storage type, and create everything that depends on it."""
        self.weights = storage
        self.dtype = number_type(storage)
        self.kernels = Kernels(self._launcher, storage, debug=self._debug)
        self._products = Products(self.kernels, self.xp, self.device.timer)
        self._plain = StepWorkspace(self.device, self.dtype)
        self._steps = Steps(self.device, self.dtype)
        self._chooser = Chooser(self.device, self.kernels)

    # --- weights and cache ----------------------------------------------------------------------------------------

    def prepare_weight(
        self, name: str, tensors: Sequence[Tensor], biases: Sequence[Tensor] = (), role: Role = "projection"
    ) -> Weight:
        """Round to the storage type and send to the device. Vectors (biases, gains) stay float32.

        Raises:
            DeviceError: the device lacks the memory.
        """
        self.device.activate()
        bias = self._uploader.vector(biases) if biases else None
        if len(tensors[0].shape) == 1:
            return DeviceWeight(name, self._uploader.vector(tensors), bias, role)
        if self.weights == AUTO:
            self._settle(storage_of(tensors[0].dtype))
        return DeviceWeight(name, self._uploader.matrix(tensors, self.kernels), bias, role)

    def constant(self, name: str, values: NDArray[np.float32]) -> Weight:
        """A vector on the device."""
        self.device.activate()
        return super().constant(name, values)

    def random_tensor(self, name: str, shape: tuple[int, ...], seed: int, std: float) -> Tensor:
        """Random numbers: matrices are drawn on the device, with other values than on the host; vectors on the host."""
        return DrawnTensor(name, shape, seed, std) if len(shape) == 2 else RandomTensor(name, shape, seed, std)

    def format_of(self, role: Role) -> str:
        """The one storage type."""
        return self.weights

    def position_bytes(self, K: int, D: int) -> int:
        """Bytes that one position's keys and values take in one layer of the cache."""
        return 2 * K * D * int(self.dtype.itemsize)

    def new_pages(self, shape: tuple[int, int, int, int, int]) -> Pages:
        """A K/V cache on the device.

        Raises:
            DeviceError: the device lacks the memory.
        """
        assert shape[3] == self.page_size, "slots are numbered by this backend's page size"
        self.device.activate()
        pages = CudaPages(self.device, self.kernels, shape, self.dtype)
        self._caches.add(pages)
        return pages

    def free_memory(self) -> int:
        """Free bytes of the device's memory."""
        return self.device.free_bytes()

    def memory_use(self) -> MemoryUse:
        """Memory in use on the device."""
        return MemoryUse(
            self._uploader.sent_bytes,
            sum(pages.nbytes for pages in self._caches),
            self._plain.nbytes + self._steps.nbytes + self._chooser.nbytes,
            int(self.dtype.itemsize),
            *self._largest,
        )

    # --- a forward pass -------------------------------------------------------------------------------------------

    def upload(self, batch: Batch, rows: Any) -> tuple[Batch, Any]:
        """Send a batch without padding."""
        self._largest = max(self._largest[0], batch.num_tokens), max(self._largest[1], len(rows))
        return self._begin(None, batch, rows)

    def _begin(
        self, step: DecodeStep[Any] | None, batch: Batch, rows: Any, bucket: Bucket | None = None
    ) -> tuple[Batch, Any]:
        """Send a batch to the workspace of a step, or to that of all unrecorded passes if `step` is None."""
        self.device.activate()
        self._chooser.forget()
        self._step = step
        self._workspace = self._plain if step is None else step.workspace
        self.arena = self._workspace.arena
        self.arena.restart()
        return self._workspace.batch.fill(batch, rows, self.page_size, bucket)

    def run(
        self,
        owner: object,
        batch: Batch,
        rows: Any,
        compute: Callable[[Batch, Any], Result],
        draws: Sequence[Draw | None] = (),
    ) -> Result:
        """Run a decode step padded and recorded, or any other pass as it is; then choose tokens.

        Raises:
            DeviceError: the device lacks the memory. Only this pass is lost.
        """

        def launch() -> Result:
            result = compute(*arrays)
            self._workspace.choice.take_likeliest(self.kernels, result[0])
            return result

        with self.device.out_of_memory(WORKSPACE):
            bucket = bucket_of(batch, rows, self.max_batch_size)
            if bucket is None:
                arrays = self.upload(batch, rows)
                result = launch()
            else:
                step: DecodeStep[Result] = self._steps.of(owner, bucket)
                arrays = self._begin(step, batch, rows, bucket)
                with self._products.only_ours():
                    result = cut(step.run(launch), len(rows), bucket.sequences)
            self._chooser.follow(self._workspace.choice, draws)
            return result

    # --- operations -----------------------------------------------------------------------------------------------

    def embed(self, ids: Any, table: Weight, positions: Any = None, position_table: Weight | None = None) -> Any:
        """One launch. [T], [T] -> [T, E]"""
        out = self.arena.take((len(ids), table.shape[1]))
        learned = None if position_table is None else position_table.data
        rows.embed(self.kernels, table.data, ids, out, position_table=learned, positions=positions)
        return out

    def linear(self, x: Any, weight: Weight, *, activation: str | None = None, residual: Any | None = None) -> Any:
        """One launch, or the library's product and one launch. Logits are float32. [T, in] -> [T, out]"""
        is_head = isinstance(weight, DeviceWeight) and weight.role == "vocabulary"
        out = self.arena.take((len(x), weight.shape[0]), np.float32 if is_head else None)
        return self._products.linear(x, weight.data, weight.bias, out, activation=activation, residual=residual)

    def layer_norm(self, x: Any, weight: Weight, epsilon: float) -> Any:
        """One launch. [T, E] -> [T, E]"""
        out = self.arena.take(x.shape)
        rows.layer_norm(self.kernels, x, weight.data, weight.bias, epsilon, out)
        return out

    def rms_norm(self, x: Any, weight: Weight, epsilon: float) -> Any:
        """One launch. [T, E] -> [T, E], or [T, heads, D] -> [T, heads, D]"""
        out = self.arena.take(x.shape)
        rows.rms_norm(self.kernels, x, weight.data, epsilon, out)
        return out

    def rotary(self, q: Any, k: Any, batch: Batch, rotation: Rotation) -> tuple[Any, Any]:
        """One launch. [T, H, D], [T, K, D] -> [T, H, D], [T, K, D]"""
        assert isinstance(batch, DeviceBatch)
        q_out, k_out = self.arena.take(q.shape), self.arena.take(k.shape)
        rows.rotary(self.kernels, q, k, batch, rotation, q_out, k_out)
        return q_out, k_out

    def glu(self, x: Any, activation: str) -> Any:
        """One launch. [T, 2 F] -> [T, F]"""
        out = self.arena.take((len(x), x.shape[1] // 2))
        rows.glu(self.kernels, x, activation, out)
        return out

    def store_kv(self, k: Any, v: Any, cache: Pages, layer: int, batch: Batch) -> None:
        """One launch. k, v: [T, K, D]"""
        assert isinstance(batch, DeviceBatch)
        attention.store_kv(self.kernels, k, v, *cache.layer(layer), batch.slots)

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
        """One launch for all sequences. [T, H, D] -> [T, H, D]"""
        assert isinstance(batch, DeviceBatch)
        out = self.arena.take(q.shape)
        keys, values = cache.layer(layer)
        _, H, D = q.shape
        bias = None if slopes is None else slopes.data
        if batch.has_tree or not attention.has_kernel(self.weights, D):
            if self._step is not None:
                self._step.plain = True  # it launches what cannot be recorded
            return attention.attend_by_reference(q, keys, values, batch, scale, self.xp, out, window, bias)
        N, B = batch.block_table.shape
        seen = attention.reach(window, B * self.page_size)
        room = self._workspace.attention(N if batch.max_queries == 1 else 0, H, D, seen)
        sight: dict[str, Any] = {"scale": scale, "window": window, "slopes": bias}
        attention.attend(self.kernels, q, keys, values, batch, out, room, max_queries=batch.max_queries, **sight)
        return out

    def take_rows(self, x: Any, wanted: Any) -> Any:
        """One launch. [T, E], [R] -> [R, E]"""
        out = self.arena.take((len(wanted), x.shape[1]))
        rows.take_rows(self.kernels, x, wanted, out)
        return out

    # --- logits ---------------------------------------------------------------------------------------------------

    @property
    def host(self) -> Backend:
        """The NumPy backend."""
        return _HOST

    def to_host(self, array: Any) -> Any:
        """A copy on the host, as float32."""
        return self.device.copy_of(array).astype(np.float32, copy=False)

    def finite(self, logits: Any) -> bool:
        """Whether no logit is NaN or plus infinity. The chosen tokens arrive in the same copy. [R, V]"""
        return not len(logits) or not self._chooser.likeliest(logits)[1].any()

    def argmax(self, logits: Any) -> Any:
        """The most likely token of each row, on the host; already known for the last pass's logits. [R, V] -> [R]"""
        return self._chooser.likeliest(logits)[0]

    def sample(self, logits: Any, keys: Keys, *, temperature: float, top_k: int, top_p: float, min_p: float) -> Any:
        """Sample one token per row, returned on the host; already known if in the `draws` of `run`. [R, V] -> [R]"""
        assert keys.purpose == 0, "the kernel draws tokens; other draws are made on the host"
        columns = keys.seeds.tolist(), keys.sequences.tolist(), keys.positions.tolist()
        return self._chooser.drawn(
            logits, [Draw(temperature, top_k, top_p, min_p, *key) for key in zip(*columns, strict=True)]
        )


_HOST = NumpyBackend()
