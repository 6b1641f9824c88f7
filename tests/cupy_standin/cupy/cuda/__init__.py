"""Streams, events and graphs of a device that is not there: all is done when it is asked for, or recorded."""

import threading
import time
from collections.abc import Callable
from types import MappingProxyType, SimpleNamespace

from . import compiler, cublas, nccl

_current = threading.local()


def getdevice() -> int:
    """The thread's current device, 0 until it takes another."""
    return getattr(_current, "number", 0)


_recording: list[Callable[[], None]] | None = None


def launch(kernel: Callable[[], None]) -> None:
    """Run a kernel, or record it."""
    if _recording is None:
        kernel()
    else:
        _recording.append(kernel)


def refuse_in_capture(what: str) -> None:
    """CuPy refuses library calls and synchronous copies then, and gives memory that the replay will find reused."""
    if _recording is not None:
        raise NotImplementedError(f"{what} while a stream is captured")


def set_allocator(allocator: None) -> None:
    """Do without the pool: there is none."""


class Graph:
    """A recorded step."""

    def __init__(self, kernels: list[Callable[[], None]]) -> None:
        self.kernels = kernels

    def launch(self, stream: "Stream") -> None:
        """Run it."""
        for kernel in self.kernels:
            kernel()


class Stream:
    """An order of work."""

    ptr = 0

    def __init__(self, non_blocking: bool = False) -> None:
        self.non_blocking, self.device_id = non_blocking, getdevice()

    def use(self) -> "Stream":
        """Make it the current one."""
        assert self.device_id == getdevice(), "a stream of another device"
        return self

    def synchronize(self) -> None:
        """Wait."""
        refuse_in_capture("to wait")

    def record(self, event: "Event | None" = None) -> "Event":
        """Note that the work so far is done."""
        event = event or Event()
        event.record(self)
        return event

    def begin_capture(self) -> None:
        """Record from here on."""
        global _recording
        assert _recording is None
        _recording = []

    def end_capture(self) -> Graph:
        """Stop recording."""
        global _recording
        assert _recording is not None
        kernels, _recording = _recording, None
        return Graph(kernels)


class Event:
    """A moment."""

    def __init__(self) -> None:
        self.at: float | None = None

    def record(self, stream: Stream | None = None) -> None:
        """Now."""
        self.at = time.perf_counter()

    def synchronize(self) -> None:
        """Wait for it."""
        assert self.at is not None


class Device:
    """The only one, of the architecture of an H100."""

    compute_capability = "90"
    attributes = MappingProxyType({"MultiProcessorCount": 132})

    def __init__(self, number: int | None = None) -> None:
        """The thread's current one unless it is given."""
        self.id = getdevice() if number is None else number

    def use(self) -> None:
        """Make it the thread's current one."""
        _current.number = self.id


def get_current_stream() -> Stream:
    """A stream: there is no more than one order of work."""
    return Stream()


def get_elapsed_time(start: Event, stop: Event) -> float:
    """Milliseconds."""
    assert start.at is not None
    assert stop.at is not None
    return 1e3 * (stop.at - start.at)


def get_cublas_handle() -> int:
    """There is none."""
    return 0


LIBRARY_TYPES = {0: "float32", 2: "float16", 14: "bfloat16"}

runtime = SimpleNamespace(
    CUDA_R_32F=0,
    CUDA_R_16F=2,
    CUDA_R_16BF=14,
    getDeviceCount=lambda: 1,
    getDevice=getdevice,
    deviceGetPCIBusId=lambda number: f"0000:{number:02x}:00.0",
    memGetInfo=lambda: (4 << 30, 8 << 30),
    getDeviceProperties=lambda device: {"name": b"no GPU: emulated", "totalGlobalMem": 8 << 30},
    driverGetVersion=lambda: 0,
    runtimeGetVersion=lambda: 0,
    profilerStart=lambda: None,
    profilerStop=lambda: None,
)

__all__ = [
    "Device",
    "Event",
    "Graph",
    "Stream",
    "compiler",
    "cublas",
    "get_cublas_handle",
    "get_current_stream",
    "get_elapsed_time",
    "launch",
    "nccl",
    "refuse_in_capture",
    "runtime",
    "set_allocator",
]
