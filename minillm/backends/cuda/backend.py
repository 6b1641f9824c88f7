"""The CUDA back end: every operation by a kernel of `kernels/`, and decode steps as recorded graphs.

The device and the launcher of kernels are arguments: CuPy's on a GPU, the host and an emulator where there is none.
Numbers are kept in one storage type (weights, results, K/V cache), sums are taken in float32, and logits are float32.
What has no kernel (attention over a tree of guesses, or with heads of an odd width) runs as the reference says, on the
device's array module.
"""

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import numpy as np
from numpy.typing import NDArray

from ...batch import Batch
from ...ops.philox import Keys
from ...ops.rotary import Rotation
from ..base import Backend, Result, Role
from ..memory import MemoryUse
from ..numpy import NumpyBackend
from ..pages import Pages
from ..random import RandomTensor
from ..weights import Tensor, Weight
from . import attention, kv, rotary, rows
from .batches import Bucket, DeviceBatch, bucket_of
from .choosing import Choice, Sampler
from .kernels import Kernels, Launcher
from .linear_choice import Products
from .memory import WORKSPACE, Device
from .pages import CudaPages
from .random import DrawnTensor, draw
from .reference import attend_by_reference
from .steps import DecodeStep, StepWorkspace, cut
from .weights import DeviceWeight, Uploader, number_type, storage_of

AUTO = "auto"


class CudaBackend(Backend):
    """Runs on a GPU, or on what stands in for one."""

    name = "cuda"
    page_size = 16

    def __init__(
        self,
        device: Device,
        launcher: Launcher,
        storage: str = AUTO,
        *,
        max_batch_size: int = 16,
        debug: bool = False,
    ) -> None:
        """Take a device and what compiles its kernels.

        Args:
            device: memory and order of work
            launcher: compiles and launches
            storage: "float32", "float16" or "bfloat16"; or "auto": by the first matrix that is loaded (`storage_of`)
            max_batch_size: decode steps of more sequences are not recorded
            debug: have indices checked on the device
        """
        super().__init__(device.xp, weights=storage)
        self.device = device
        self.clock = device.clock
        self.max_batch_size = max_batch_size
        self._launcher, self._debug = launcher, debug
        self._uploader = Uploader(device)
        self._caches: WeakSet[CudaPages] = WeakSet()
        self._steps: WeakKeyDictionary[object, dict[Bucket, DecodeStep[Any]]] = WeakKeyDictionary()
        self._step: DecodeStep[Any] | None = None  # the one that runs
        self._chosen: Choice | None = None  # made with the last logits
        self._largest = (0, 0)  # tokens and rows of a pass
        if storage != AUTO:
            self._settle(storage)

    def _settle(self, storage: str) -> None:
        """Begin to work in a storage type."""
        self.weights = storage
        self.dtype = number_type(storage)
        self.kernels = Kernels(self._launcher, storage, debug=self._debug)
        self._products = Products(self.kernels, self.xp, self.device.timer)
        self._plain = self._workspace = StepWorkspace(self.device, self.dtype)
        self._other_choice, self._sampler = Choice(self.device), Sampler(self.device)
        self._use(self._plain)

    def _use(self, workspace: StepWorkspace) -> None:
        self._workspace, self.arena = workspace, workspace.arena
        self.arena.restart()

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
        return DeviceWeight(name, self._matrix(tensors), bias, role)

    def _matrix(self, tensors: Sequence[Tensor]) -> Any:
        """All tensors [out_i, in] in one, in the storage type: sent, or drawn where they are."""
        drawn = [tensor for tensor in tensors if isinstance(tensor, DrawnTensor)]
        if len(drawn) < len(tensors):
            return self._uploader.matrix(tensors, self.weights)
        out = self._uploader.empty((sum(tensor.shape[0] for tensor in drawn), *drawn[0].shape[1:]), self.dtype)
        draw(self.kernels, drawn, out)
        return out

    def constant(self, name: str, values: NDArray[np.float32]) -> Weight:
        """A vector on the device."""
        self.device.activate()
        return super().constant(name, values)

    def random_tensor(self, name: str, shape: tuple[int, ...], seed: int, std: float) -> Tensor:
        """Matrices are drawn on the device, which has other random numbers than the host; vectors on the host."""
        return DrawnTensor(name, shape, seed, std) if len(shape) == 2 else RandomTensor(name, shape, seed, std)

    def format_of(self, role: Role) -> str:
        """One storage type for all."""
        return self.weights

    def position_bytes(self, K: int, D: int) -> int:
        """Keys and values in the storage type."""
        return 2 * K * D * int(self.dtype.itemsize)

    def new_pages(self, shape: tuple[int, int, int, int, int]) -> Pages:
        """A K/V cache on the device.

        Raises:
            DeviceError: the device lacks the memory.
        """
        assert shape[3] == self.page_size, "slots are numbered by this back end's page size"
        self.device.activate()
        pages = CudaPages(self.device, self.kernels, shape, self.dtype)
        self._caches.add(pages)
        return pages

    def free_memory(self) -> int:
        """Bytes of the device's memory."""
        return self.device.free_bytes()

    def memory_use(self) -> MemoryUse:
        """What is on the device now."""
        steps = (step for steps in self._steps.values() for step in steps.values())
        workspaces: tuple[Any, ...] = (
            self._plain,
            self._other_choice,
            self._sampler,
            *(step.workspace for step in steps),
        )
        return MemoryUse(
            self._uploader.sent_bytes,
            sum(pages.nbytes for pages in self._caches),
            sum(workspace.nbytes for workspace in workspaces),
            int(self.dtype.itemsize),
            *self._largest,
        )

    # --- a forward pass -------------------------------------------------------------------------------------------

    def upload(self, batch: Batch, rows: Any) -> tuple[Batch, Any]:
        """Send a batch as it is."""
        self.device.activate()
        self._chosen, self._step = None, None
        self._use(self._plain)
        self._largest = max(self._largest[0], batch.num_tokens), max(self._largest[1], len(rows))
        return self._plain.batch.fill(batch, rows, self.page_size)

    def run(self, owner: object, batch: Batch, rows: Any, compute: Callable[[Batch, Any], Result]) -> Result:
        """A decode step padded and recorded, any other pass as it is.

        Raises:
            DeviceError: the device lacks the memory. Nothing is lost but this pass.
        """
        with self.device.out_of_memory(WORKSPACE):
            bucket = bucket_of(batch, rows, self.max_batch_size)
            if bucket is None:
                result = compute(*self.upload(batch, rows))
                self._choose(result[0])
                return result
            return self._run_step(owner, bucket, batch, rows, compute)

    def _run_step(
        self, owner: object, bucket: Bucket, batch: Batch, rows: Any, compute: Callable[[Batch, Any], Result]
    ) -> Result:
        self.device.activate()
        steps = self._steps.setdefault(owner, {})
        if bucket not in steps:
            steps[bucket] = DecodeStep(self.device, self.dtype)
        step = self._step = steps[bucket]
        self._chosen = None
        self._use(step.workspace)
        arrays = step.workspace.batch.fill(batch, rows, self.page_size, bucket)

        def launch() -> Result:
            result = compute(*arrays)
            self._choose(result[0])
            return result

        with self._products.only_ours():
            result: Result = step.run(launch)
        self._chosen = step.workspace.choice
        return cut(result, len(batch.spans), bucket.sequences)

    def _choose(self, logits: Any) -> None:
        """Launch the choice of the likeliest tokens, whose flags `finite` asks for."""
        if len(logits):
            self._chosen = self._workspace.choice
            self._chosen.take_likeliest(self.kernels, logits)

    def _fall_back(self) -> None:
        """Tell that the step launches something that cannot be recorded."""
        if self._step is not None:
            self._step.plain = True

    # --- operations -----------------------------------------------------------------------------------------------

    def embed(self, ids: Any, table: Weight, positions: Any = None, position_table: Weight | None = None) -> Any:
        """One launch. [T], [T] -> [T, E]"""
        out = self.arena.take((len(ids), table.shape[1]))
        learned = None if position_table is None else position_table.data
        rows.embed(self.kernels, table.data, ids, out, position_table=learned, positions=positions)
        return out

    def linear(self, x: Any, weight: Weight, *, activation: str | None = None, residual: Any | None = None) -> Any:
        """One launch, or a product of the library's and one. Logits are float32. [T, in] -> [T, out]"""
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
        q_out, k_out = self.arena.take(q.shape), self.arena.take(k.shape)
        rotary.rotary(self.kernels, q, k, batch, rotation, q_out, k_out)
        return q_out, k_out

    def glu(self, x: Any, activation: str) -> Any:
        """One launch. [T, 2 F] -> [T, F]"""
        out = self.arena.take((len(x), x.shape[1] // 2))
        rows.glu(self.kernels, x, activation, out)
        return out

    def store_kv(self, k: Any, v: Any, cache: Pages, layer: int, batch: Batch) -> None:
        """One launch. k, v: [T, K, D]"""
        assert isinstance(batch, DeviceBatch)
        kv.store_kv(self.kernels, k, v, *cache.layer(layer), batch.slots)

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
            self._fall_back()
            return attend_by_reference(q, keys, values, batch, scale, self.xp, out, window, bias)
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
        """NumPy."""
        return _HOST

    def to_host(self, array: Any) -> Any:
        """A copy on the host, as float32."""
        if not array.size:
            return np.empty(array.shape, np.float32)
        self.device.activate()
        array = self.xp.ascontiguousarray(array)
        copy = self.device.pinned(array.shape, array.dtype)
        self.device.fetch(array, copy)
        self.device.wait()
        return copy.astype(np.float32, copy=False)

    def finite(self, logits: Any) -> bool:
        """Whether no logit is NaN or plus infinity. The ids of the likeliest tokens come in the same copy. [R, V]"""
        return not len(logits) or not self._likeliest(logits)[1].any()

    def argmax(self, logits: Any) -> Any:
        """The likeliest token of each row, on the host; known already of the last step's logits. [R, V] -> [R]"""
        return self._likeliest(logits)[0]

    def sample(self, logits: Any, keys: Keys, *, temperature: float, top_k: int, top_p: float, min_p: float) -> Any:
        """One draw for each row, on the host. [R, V] -> [R]"""
        assert keys.purpose == 0, "the kernel draws tokens; other draws are made on the host"
        self.device.activate()
        filters: dict[str, Any] = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
        return self._sampler.sample(self.kernels, logits, keys, **filters)

    def _likeliest(self, logits: Any) -> tuple[Any, Any]:
        """Ids, and whether a row is not finite."""
        self.device.activate()
        chosen, part = self._chosen, None
        if chosen is not None:
            part = chosen.rows_of(logits)
        if chosen is None or part is None:
            chosen, part = self._other_choice, slice(None)
            chosen.take_likeliest(self.kernels, logits)
        ids, flags = chosen.fetch()
        return ids[part], flags[part]


_HOST = NumpyBackend()
