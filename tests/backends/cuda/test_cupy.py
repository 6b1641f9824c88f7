"""Machines without a GPU, and as much of CuPy as they can show."""

import re
import subprocess
import sys
from importlib import import_module
from threading import Thread
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from minillm import Engine
from minillm.backends.cuda.compiling import CupyLauncher
from minillm.backends.cuda.device import CupyDevice
from minillm.backends.cuda.kernels import NULL, Kernels
from minillm.backends.cuda.rows import GluArguments
from minillm.backends.cuda.weights import number_type
from minillm.backends.placement import Placement, choose_backend
from minillm.errors import DeviceError, install


@pytest.mark.longer
def test_a_machine_without_cupy_or_gpu_gets_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(DeviceError, match=f"device 'cuda' needs CuPy .*: {re.escape(install('cuda13'))}"):
        Engine(device="cuda")
    monkeypatch.undo()
    cupy = pytest.importorskip("cupy", reason="the other half needs CuPy")
    if cupy.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(DeviceError, match="device 'cuda' needs an NVIDIA GPU") as error:
        Engine(device="cuda")
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.slow
def test_a_cpu_needs_nothing_of_cuda() -> None:
    code = """
import sys
for name in ("cupy", "cupyx", "ml_dtypes", "cupy_backends"):
    sys.modules[name] = None
import minillm
print(minillm.Engine().generate("A list of colors: red,", max_new_tokens=2).text)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == " orange,\n"


# --- CuPy's side, as far as it can be seen without a GPU --------------------------------------------------------------


@pytest.mark.longer
def test_cupy_has_what_the_device_asks_for() -> None:
    cupy = pytest.importorskip("cupy", reason="looks at CuPy's names")
    import cupyx

    stream = cupy.cuda.Stream
    for owner, names in (
        (stream, ("use", "record", "synchronize", "begin_capture", "end_capture")),
        (cupy.cuda.Event, ("record", "synchronize")),
        (cupy.cuda.graph.Graph, ("launch",)),
        (cupy.cuda.MemoryPointer, ("copy_from_host_async", "copy_to_host_async", "__add__", "ptr")),
        (cupy.cuda.MemoryPool, ("free_bytes", "free_all_blocks")),
        (cupy.cuda, ("get_elapsed_time", "get_cublas_handle")),
        (cupy.cuda.runtime, ("memGetInfo", "CUDA_R_32F", "CUDA_R_16F", "CUDA_R_16BF")),
        (cupyx, ("empty_pinned",)),
        (cupy, ("ascontiguousarray", "concatenate", "take", "get_default_memory_pool", "isfinite")),
    ):
        for name in names:
            assert hasattr(owner, name), f"{owner} has no {name}"
    assert issubclass(cupy.cuda.memory.OutOfMemoryError, MemoryError)


@pytest.mark.parametrize("storage", ["float32", "float16", "bfloat16"])
def test_the_library_multiplies_parts_of_rows(storage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the stand-in: cuBLAS's order of matrices, and strides in numbers. What is beside `out` stays."""
    if storage == "bfloat16":
        pytest.importorskip("ml_dtypes", reason="has bfloat16")
    cupy: Any = import_module("tests.cupy_standin.cupy")
    monkeypatch.setattr("minillm.backends.cuda.device.import_cupy", lambda: cupy)
    numbers, dtype = np.random.default_rng(0).integers(-4, 5, (13, 20)).astype("f"), number_type(storage)
    x, weight = cupy.asarray(numbers[:5], dtype)[:, 3:11], cupy.asarray(numbers[7:, 12:], dtype)
    out = cupy.zeros((5, 9), dtype)
    CupyDevice().multiply(x, weight, out[:, 2:8])
    assert (out[:, 2:8].astype("f") == numbers[:5, 3:11] @ numbers[7:, 12:].T).all()
    assert not out[:, :2].any() and not out[:, 8:].any()


def test_each_thread_computes_on_the_gpu_that_the_engine_was_made_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """To CUDA the current device is the thread's, and a new thread begins with the first one."""
    cupy: Any = import_module("tests.cupy_standin.cupy")
    monkeypatch.setattr("minillm.backends.cuda.device.import_cupy", lambda: cupy)
    in_thread: list[int] = []

    def compute() -> None:
        in_thread.append(cupy.cuda.getdevice())
        device.activate()  # the stand-in refuses a stream of another device
        in_thread.append(cupy.cuda.getdevice())

    cupy.cuda.Device(1).use()
    try:
        device = CupyDevice()
        thread = Thread(target=compute)
        thread.start()
        thread.join()
    finally:
        cupy.cuda.Device(0).use()
    assert in_thread == [0, 1]


def test_a_launch_takes_arguments_that_have_names() -> None:
    """`fusing` reads them so. CuPy looks at the class of grid and block alone, before it asks for the driver."""
    cupy = pytest.importorskip("cupy", reason="launches by CuPy's own call")
    if cupy.cuda.is_available():
        pytest.skip("there is a GPU, on which every test launches so")
    function = cupy.cuda.function.Function.__new__(cupy.cuda.function.Function)  # of no module
    arguments = GluArguments(NULL, NULL, *map(np.int32, range(4)))
    for given in (arguments, tuple(arguments)):
        with pytest.raises(cupy.cuda.runtime.CUDARuntimeError):
            function((1, 1), (32,), given, shared_mem=0)
    with pytest.raises(TypeError, match="Argument 'grid' has incorrect type"):
        function(SimpleNamespace(), (32,), arguments)


def gpu_of(architecture: str, processors: int = 132) -> Any:
    """CuPy on a machine with one GPU."""
    attributes = {"MultiProcessorCount": processors}
    device = SimpleNamespace(compute_capability=architecture, attributes=attributes, id=0)
    runtime = SimpleNamespace(getDeviceCount=lambda: 1)
    return SimpleNamespace(cuda=SimpleNamespace(runtime=runtime, Device=lambda: device))


def test_a_gpu_that_is_too_old_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    for architecture, dotted in (("75", "7.5"), ("70", "7.0")):
        monkeypatch.setattr("minillm.backends.cuda.compiling.import_cupy", lambda a=architecture: gpu_of(a))
        with pytest.raises(DeviceError, match=rf"needs a GPU of compute capability 8\.0 .* has {dotted}") as error:
            CupyLauncher()
        assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize(("architecture", "processors"), [("80", 108), ("89", 58), ("90", 132), ("120", 170)])
def test_the_number_of_processors_is_the_devices(
    architecture: str, processors: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("minillm.backends.cuda.compiling.import_cupy", lambda: gpu_of(architecture, processors))
    launcher = CupyLauncher()
    assert (launcher.architecture, Kernels(launcher).processors) == (architecture, processors)


def test_all_kernels_have_the_same_share_of_the_cache_as_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy.cuda.compiler", SimpleNamespace(CompileException=ZeroDivisionError))
    kernels: list[Any] = []

    def module(code: str, options: Any) -> Any:
        return SimpleNamespace(get_function=lambda name: kernels.append(SimpleNamespace(name=name)) or kernels[-1])

    cupy = gpu_of("90")
    cupy.RawModule = module
    monkeypatch.setattr("minillm.backends.cuda.compiling.import_cupy", lambda: cupy)
    for carveout in (44, None):
        source = Kernels(CupyLauncher(carveout))
        source.get("norm", "rms_norm")
        source.get("kv", "store_kv", HEAD_DIM=8, PAGE_SIZE=16)
    assert [vars(kernel).get("preferred_shared_memory_carveout") for kernel in kernels] == [44, 44, None, None]
    for wrong in ("101", "-1", "all"):
        monkeypatch.setenv("MINILLM_CUDA_CARVEOUT", wrong)
        with pytest.raises(DeviceError, match="MINILLM_CUDA_CARVEOUT should be a percentage, 0 to 100, found"):
            choose_backend(Placement(device="cuda"), 1)


class FakeStream:
    """Notes what is asked of it."""

    def __init__(self, non_blocking: bool = False) -> None:
        assert non_blocking, "the default stream would wait for every other"
        self.calls: list[str] = []

    def use(self) -> None:
        self.calls.append("use")

    def begin_capture(self) -> None:
        self.calls.append("begin")

    def end_capture(self) -> Any:
        self.calls.append("end")
        return SimpleNamespace(launch=lambda stream: self.calls.append("launch"))

    def synchronize(self) -> None:
        self.calls.append("synchronize")


def test_a_step_is_captured_on_our_stream_and_a_capture_that_fails_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "minillm.backends.cuda.device.import_cupy",
        lambda: SimpleNamespace(cuda=SimpleNamespace(Stream=FakeStream, Device=lambda: SimpleNamespace(use=int))),
    )
    device = CupyDevice()
    calls = device.stream.calls
    device.activate()
    replay = device.record(lambda: calls.append("kernel"))
    replay()
    replay()
    device.wait()
    assert calls == ["use", "begin", "kernel", "end", "launch", "launch", "synchronize"]
    assert device.waits == 1
    calls.clear()
    with pytest.raises(ZeroDivisionError):
        device.record(lambda: 1 // 0)
    assert calls == ["begin", "end"]
