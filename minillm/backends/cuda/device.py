"""The device apart from its kernels: memory, ordered copies, and recording of steps.

`Device` defines the interface and implements it with host memory and NumPy, so that the whole engine runs without a
GPU, its kernels through an emulator. `CupyDevice` is a real GPU.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import DeviceError
from ..clock import Clock, HostClock
from ..memory_use import free_memory
from . import library
from .compiling import import_cupy
from .dependent import COOPERATIVE, Driver, begins_early
from .kernels import COOPERATIVE_KERNELS, Launch, type_name
from .library import SUMS_IN_32_BITS

Wait = Callable[[], None]


@dataclass(frozen=True)
class Purpose:
    """The use of an allocation, and the advice given when it fails."""

    what: str
    remedy: str


WEIGHTS = Purpose("the weights", "choose dtype 'float16' or 'bfloat16', or a smaller model")
CACHE = Purpose("the K/V cache", "lower cache_bytes or max_batch_size")
WORKSPACE = Purpose("the results of a step", "lower max_batch_size, or cache_bytes to leave more")

_LIBRARY_TYPES = {"float32": "CUDA_R_32F", "float16": "CUDA_R_16F", "bfloat16": "CUDA_R_16BF"}
"""Name of a dtype -> cuBLAS's, in `cupy.cuda.runtime`"""


class Device:
    """The host as a substitute for a GPU: copies are synchronous, and no step is recorded."""

    def __init__(self, xp: Any = np) -> None:
        """`xp` is the array module."""
        self.xp = xp
        self.waits = 0
        """Number of times the host has waited for the device."""
        self.has_library = False
        """Whether products of many rows are `multiply`'s"""
        self.clock: Clock = HostClock()
        """Times the work of the device."""

    def activate(self) -> None:
        """Make this thread's calls of `xp` part of this device's stream."""

    def empty(self, shape: tuple[int, ...], dtype: Any, purpose: Purpose) -> Any:
        """An uninitialised array on the device.

        Raises:
            DeviceError: there is not enough memory; the message says what to lower.
        """
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        with self.out_of_memory(purpose, size):
            try:
                return self.xp.empty(shape, dtype)
            except MemoryError:
                self.release_unused()
                return self.xp.empty(shape, dtype)

    @contextlib.contextmanager
    def out_of_memory(self, purpose: Purpose, size: int | None = None) -> Iterator[None]:
        """Turn a MemoryError into a `DeviceError`: what was requested, what is free, and what to lower."""
        try:
            yield
        except MemoryError:
            asked = "" if size is None else f" {_mib(size)} were asked for,"
            raise DeviceError(
                f"out of device memory for {purpose.what}:{asked} {_mib(self.free_bytes())} are free: {purpose.remedy}"
            ) from None

    def release_unused(self) -> None:
        """Free the memory that the array module caches."""

    def free_bytes(self) -> int:
        """Bytes that can still be allocated."""
        return free_memory()

    def pinned(self, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
        """An uninitialised host array that the device can copy from and to asynchronously."""
        return np.empty(shape, dtype)

    def send(self, source: NDArray[Any], target: Any, offset: int = 0) -> None:
        """Copy a pinned, contiguous host array into a contiguous device array, `offset` bytes after its beginning."""
        flat = target.reshape(-1).view(np.uint8)
        flat[offset : offset + source.nbytes] = source.reshape(-1).view(np.uint8)

    def fetch(self, source: Any, target: NDArray[Any]) -> None:
        """Copy a contiguous device array to a pinned host array, which is complete after `wait`."""
        target[...] = source

    def copy_of(self, array: Any) -> NDArray[Any]:
        """Copy a device array to the host, and wait for it."""
        self.activate()
        copy = self.pinned(array.shape, array.dtype)
        if array.size:
            contiguous = self.xp.ascontiguousarray(array)  # kept alive until the copy is done
            self.fetch(contiguous, copy)
            self.wait()
        return copy

    def wait(self) -> None:
        """Wait until all work queued so far is done."""
        self.waits += 1

    def mark(self) -> Wait:
        """Returns a function that waits for all work queued so far."""
        return lambda: None

    def multiply(self, x: Any, weight: Any, out: Any) -> None:
        """out = x W^T by the array library. [T, in], [out, in] -> [T, out]"""
        self.xp.matmul(x, weight.T, out=out)

    def address(self, array: Any) -> int:
        """The address of an array's first element."""
        return int(array.__array_interface__["data"][0])

    def launch_all(self, launches: Sequence[Launch], *, dependent: bool = False) -> None:
        """Launch kernels in order; `dependent`: each may begin before the one before it has ended, if it can wait."""
        for launch in launches:
            launch()

    def record(self, launch: Callable[[], object]) -> Callable[[], object] | None:
        """Record what `launch` launches, without running it. Returns a function that replays it, or None."""
        return None


class CupyDevice(Device):
    """The GPU that CuPy uses, with a stream of its own."""

    def __init__(self, *, own_library: bool = False) -> None:
        """`own_library`: the library's products are such that `record` may hold them (`library.py`).

        Raises:
            DeviceError: there is no library for that, or it refuses.
        """
        cupy = import_cupy()
        super().__init__(cupy)
        self._gpu = cupy.cuda.Device()  # of the thread's current one; other threads begin with number 0
        self.stream = cupy.cuda.Stream(non_blocking=True)
        self.has_library = True
        self._factors = np.array([1, 0], np.float32)  # of a product, and of what `out` held before
        self._one, self._zero = (self._factors.ctypes.data + offset for offset in (0, 4))
        self.clock = EventClock(cupy.cuda, self.stream)
        self._library = self._own_library() if own_library else None

    def _own_library(self) -> library.OwnHandle:
        self.activate()
        blas = self.xp.cuda.cublas
        version = blas.getVersion(self.xp.cuda.get_cublas_handle()) // 10_000  # which loads it
        try:
            functions = library.load(version)
        except OSError as error:
            raise DeviceError(f"MINILLM_CUDA_PROMPTS=1 needs cuBLAS ({error}): leave it unset") from None
        self._workspace = self.empty((library.WORKSPACE_BYTES,), np.uint8, WORKSPACE)
        size = int(self._workspace.nbytes)
        return library.OwnHandle(functions, self.stream.ptr, self.address(self._workspace), size)

    def activate(self) -> None:
        """Make our GPU and stream the thread's current ones; CuPy's own calls between two steps use them too."""
        self._gpu.use()
        self.stream.use()

    def release_unused(self) -> None:
        """Empty CuPy's pool."""
        self.stream.synchronize()
        self.xp.get_default_memory_pool().free_all_blocks()

    def free_bytes(self) -> int:
        """Free bytes of the driver, and unused bytes of CuPy's pool."""
        self.activate()
        free, _ = self.xp.cuda.runtime.memGetInfo()
        return int(free) + int(self.xp.get_default_memory_pool().free_bytes())

    def pinned(self, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
        """Page-locked memory, from CuPy's pool."""
        import cupyx

        array: NDArray[Any] = cupyx.empty_pinned(shape, dtype)
        return array

    def send(self, source: NDArray[Any], target: Any, offset: int = 0) -> None:
        """Copy asynchronously, in stream order: `source` must not change until the copy is done."""
        (target.data + offset).copy_from_host_async(source.ctypes.data, source.nbytes, self.stream)

    def fetch(self, source: Any, target: NDArray[Any]) -> None:
        """Copy asynchronously, in stream order."""
        source.data.copy_to_host_async(target.ctypes.data, target.nbytes, self.stream)

    def wait(self) -> None:
        """Wait until all work queued so far is done."""
        super().wait()
        self.stream.synchronize()

    def mark(self) -> Wait:
        """Record an event. Returns a function that waits for it."""
        wait: Wait = self.stream.record().synchronize
        return wait

    def multiply(self, x: Any, weight: Any, out: Any) -> None:
        """As `Device.multiply`, by cuBLAS. The rows of x and out may be parts of longer ones.

        It is the call that CuPy's matmul makes, but matmul takes much longer than a launch to get there. cuBLAS stores
        columns one after the other: to it, x is [in, T], W is [in, out], and out = W^T x is [out, T].
        """
        if self._library is not None:
            self._library.multiply(x, weight, out, self.address)
            return
        cuda = self.xp.cuda
        blas, kind = cuda.cublas, getattr(cuda.runtime, _LIBRARY_TYPES[type_name(x.dtype)])
        handle = cuda.get_cublas_handle()
        blas.setMathMode(handle, SUMS_IN_32_BITS)  # each thread has a handle of its own
        (rows, inputs), outputs, size = x.shape, len(weight), x.dtype.itemsize
        blas.gemmEx(
            handle,
            *(blas.CUBLAS_OP_T, blas.CUBLAS_OP_N, outputs, rows, inputs),
            *(self._one, weight.data.ptr, kind, inputs, x.data.ptr, kind, x.strides[0] // size),
            *(self._zero, out.data.ptr, kind, out.strides[0] // size),
            *(blas.CUBLAS_COMPUTE_32F, blas.CUBLAS_GEMM_DEFAULT_TENSOR_OP),
        )

    def address(self, array: Any) -> int:
        """The address of an array's first element."""
        return int(array.data.ptr)

    def launch_all(self, launches: Sequence[Launch], *, dependent: bool = False) -> None:
        """As `Device.launch_all`.

        Raises:
            DeviceError: the driver has no such launches, or refuses one.
        """
        together = [launch.name in COOPERATIVE_KERNELS for launch in launches]
        driver = Driver(self.address) if dependent or any(together) else None
        for i, launch in enumerate(launches):
            if driver is not None and together[i]:
                driver.launch(launch, self.stream.ptr, COOPERATIVE)
            elif driver is not None and dependent and begins_early(launches, i) and not together[i - 1]:
                driver.launch(launch, self.stream.ptr)
            else:
                launch()

    def record(self, launch: Callable[[], object]) -> Callable[[], object]:
        """Capture a CUDA graph."""
        self.stream.begin_capture()
        try:
            launch()
        except BaseException:
            with contextlib.suppress(Exception):  # a capture that is broken ends with an error of its own
                self.stream.end_capture()
            raise
        return partial(self.stream.end_capture().launch, self.stream)


class EventClock:
    """The clock of a device: marks are events in its stream, recorded without waiting."""

    def __init__(self, cuda: Any, stream: Any) -> None:
        """`cuda` is `cupy.cuda`."""
        self._cuda = cuda
        self._stream = stream

    def mark(self) -> Any:
        """Record an event after all work queued so far."""
        return self._stream.record()

    def seconds(self, began: Any, ended: Any) -> float:
        """Seconds on the device from one event to another; waits for the later one."""
        ended.synchronize()
        return float(1e-3 * self._cuda.get_elapsed_time(began, ended))


class StagingBuffer:
    """Arrays of several shapes and types that go to the device in one copy; the memory is reused."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._host: NDArray[np.uint8] | None = None
        self._there: Any = None
        self._layout: tuple[Any, ...] = ()
        self._used = 0
        self._waits = -1
        self._sent: Wait = lambda: None
        self.host: dict[str, NDArray[Any]] = {}
        """Host arrays by name, to be filled before `send`."""
        self.there: dict[str, Any] = {}
        """The same arrays on the device."""

    @property
    def nbytes(self) -> int:
        """Bytes held on the device."""
        return 0 if self._there is None else int(self._there.nbytes)

    def lay_out(self, **fields: tuple[tuple[int, ...], Any]) -> None:
        """Set names, shapes and types; memory grows by doubling, and an unchanged layout keeps its addresses."""
        self._before_writing()
        layout = tuple(fields.items())
        if layout == self._layout:
            return
        offsets, used = [], 0
        for shape, dtype in fields.values():
            offsets.append(used)
            used += -(-int(np.prod(shape)) * np.dtype(dtype).itemsize // 16) * 16
        if self._host is None or self._host.size < used:
            size = max(256, 1 << (used - 1).bit_length())
            self._there = self._device.empty((size,), np.uint8, WORKSPACE)
            self._host = self._device.pinned((size,), np.uint8)
        for (name, (shape, dtype)), offset in zip(fields.items(), offsets, strict=True):
            stop = offset + int(np.prod(shape)) * np.dtype(dtype).itemsize
            self.host[name] = self._host[offset:stop].view(dtype).reshape(shape)
            self.there[name] = self._there[offset:stop].view(dtype).reshape(shape)
        self._layout, self._used = layout, used

    def send(self) -> None:
        """Copy all arrays to the device."""
        assert self._host is not None
        self._device.send(self._host[: self._used], self._there)
        self._sent = self._device.mark()
        self._waits = self._device.waits

    def _before_writing(self) -> None:
        """Wait for the last copy, not for what was queued after it, unless the host has waited since."""
        if self._waits == self._device.waits:
            self._sent()


def _mib(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB"
