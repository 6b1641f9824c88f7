"""A device whose steps are recorded as on a GPU: launches are noted in place of being run, and repeated on replay."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from minillm.backends.cuda.device import Device
from minillm.backends.cuda.kernels import Kernel, Launcher, Module


class Launch(NamedTuple):
    """One call of a kernel."""

    name: str
    kernel: Kernel
    grid: tuple[int, ...]
    block: tuple[int, ...]
    args: tuple[Any, ...]
    shared_mem: int


class Recorder:
    """A launcher that passes everything on, notes it, and can hold it back."""

    def __init__(self, inner: Launcher) -> None:
        self.inner = inner
        self.architecture, self.processors = inner.architecture, inner.processors
        self.launches: list[Launch] = []
        """All that ran since the beginning or the last `clear`"""
        self.recording: list[Launch] | None = None
        self.compiled: list[tuple[str, ...]] = []
        """File, constants and name of each kernel that was asked for"""

    def module(self, path: Path, options: tuple[str, ...]) -> Module:
        return _Module(self, self.inner.module(path, options), (path.name, *options))

    def run(self, launch: Launch) -> None:
        self.launches.append(launch)
        launch.kernel(launch.grid, launch.block, launch.args, shared_mem=launch.shared_mem)


class _Module:
    def __init__(self, recorder: Recorder, inner: Module, build: tuple[str, ...]) -> None:
        self.recorder, self.inner, self.build = recorder, inner, build

    def get_function(self, name: str) -> Kernel:
        self.recorder.compiled.append((*self.build, name))
        assert self.recorder.recording is None, f"{name} is first compiled while a step is recorded"
        return _Kernel(self.recorder, name, self.inner.get_function(name))


class _Kernel:
    def __init__(self, recorder: Recorder, name: str, inner: Kernel) -> None:
        self.recorder, self.name, self.inner = recorder, name, inner

    @property
    def max_dynamic_shared_size_bytes(self) -> int:
        return self.inner.max_dynamic_shared_size_bytes

    @max_dynamic_shared_size_bytes.setter
    def max_dynamic_shared_size_bytes(self, value: int) -> None:
        self.inner.max_dynamic_shared_size_bytes = value

    def __call__(self, grid: Any, block: Any, args: Any, *, shared_mem: int = 0) -> None:
        launch = Launch(self.name, self.inner, grid, block, tuple(args), shared_mem)
        if self.recorder.recording is None:
            self.recorder.run(launch)
        else:
            self.recorder.recording.append(launch)


class RecordingDevice(Device):
    """The host's memory, with graphs. What a recorded step does beside launches does not happen in its replay."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder
        self.records: list[list[Launch]] = []
        self.replays = 0
        self.reserved: list[int] = []
        """Bytes of each array that was asked for"""
        self.fetched: list[int] = []
        """Bytes of each copy to the host"""

    def fetch(self, source: Any, target: Any) -> None:
        self._refuse("a copy to the host")
        super().fetch(source, target)
        self.fetched.append(target.nbytes)

    def send(self, source: Any, target: Any, offset: int = 0) -> None:
        self._refuse("a copy from the host")
        super().send(source, target, offset)

    def wait(self) -> None:
        self._refuse("to wait")
        super().wait()

    def _refuse(self, what: str) -> None:
        assert self.recorder.recording is None, f"{what} while a step is recorded"

    def empty(self, shape: Any, dtype: Any, purpose: Any) -> Any:
        assert self.recorder.recording is None, f"{shape} is reserved while a step is recorded"
        array = super().empty(shape, dtype, purpose)
        array.view("uint8")[...] = 0xFF  # NaN, and no index: what nobody wrote shows
        self.reserved.append(array.nbytes)
        return array

    def record(self, launch: Callable[[], object]) -> Callable[[], object]:
        self.recorder.recording = recorded = []
        try:
            launch()
        finally:
            self.recorder.recording = None
        self.records.append(recorded)

        def replay() -> None:
            self.replays += 1
            for one in recorded:
                self.recorder.run(one)

        return replay
