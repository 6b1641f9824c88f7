"""Dependent launches: what the driver is given, what of a step is launched so, and that every kernel waits in time."""

import ctypes
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from minillm.backends.cuda import device as devices
from minillm.backends.cuda import low_rank
from minillm.backends.cuda.attention import store_kv
from minillm.backends.cuda.backend import CudaBackend
from minillm.backends.cuda.deferring import defer
from minillm.backends.cuda.dependent import (
    COOPERATIVE,
    PROGRAMMATIC,
    WAITING,
    Driver,
    begins_early,
    check_architecture,
    has_dependent_launches,
)
from minillm.backends.cuda.device import CupyDevice
from minillm.backends.cuda.emulator import Emulator
from minillm.backends.cuda.emulator.toolkit import compiler, cuda_headers, missing
from minillm.backends.cuda.kernels import NULL, Kernels, Launch
from minillm.backends.cuda.linear import Product, gemm, gemv
from minillm.backends.cuda.rows import embed, glu, layer_norm, rms_norm, scale_logits
from minillm.batch import TokenSequence
from minillm.errors import DeviceError
from tests.families import CONFIGS
from tests.tiny import model_of, runner_of

from .launchers import ON_GPU, exhaustive
from .recording import Recorder, RecordingDevice

DRIVER = """
#include <cuda.h>
#include <string.h>
long long seen[16];
int answer;
CUresult cuLaunchKernelEx(const CUlaunchConfig* c, CUfunction f, void** p, void** extra) {
    unsigned bits;
    memcpy(&bits, p[2], 4);
    long long now[] = {c->gridDimX, c->gridDimY, c->gridDimZ, c->blockDimX, c->blockDimY, c->blockDimZ,
        c->sharedMemBytes, (long long)c->hStream, c->numAttrs,
        c->attrs[0].id == CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            ? 1 : c->attrs[0].id == CU_LAUNCH_ATTRIBUTE_COOPERATIVE ? 2 : 0,
        c->attrs[0].id == CU_LAUNCH_ATTRIBUTE_COOPERATIVE ? c->attrs[0].value.cooperative
            : c->attrs[0].value.programmaticStreamSerializationAllowed, (long long)f,
        *(long long*)p[0], *(int*)p[1], bits, *(long long*)p[3]};
    memcpy(seen, now, sizeof now);
    return (CUresult)answer;
}
"""
"""A driver that notes a launch, by NVIDIA's own declarations."""


@pytest.fixture
def driver(tmp_path: Path) -> Any:
    if reason := missing():
        pytest.skip(reason)
    if not (cuda_headers() / "cuda.h").is_file():
        pytest.skip("cuda.h is not installed")
    (tmp_path / "driver.c").write_text(DRIVER)
    target = tmp_path / "driver.so"
    command = [str(compiler()), "-x", "c", "-shared", "-fPIC", f"-I{cuda_headers()}", str(tmp_path / "driver.c")]
    subprocess.run([*command, "-o", str(target)], check=True)
    return ctypes.CDLL(str(target))


def launch_of(name: str, *args: Any, pointer: int = 0) -> Launch:
    kernel: Any = SimpleNamespace(kernel=SimpleNamespace(ptr=pointer))
    return Launch(name, {}, kernel, (7, 8), (128,), args, 4096)


def test_the_driver_is_given_grid_block_stream_attribute_and_arguments(driver: Any) -> None:
    array = np.zeros((2, 3), np.float16)
    args = array, np.int32(-5), np.float32(1.5), NULL
    address = 0x7000_1234_5678
    Driver(lambda one: address if one is array else 0, driver).launch(launch_of("embed", *args, pointer=99), 0x55)
    seen = (ctypes.c_longlong * 16).in_dll(driver, "seen")
    assert list(seen) == [7, 8, 1, 128, 1, 1, 4096, 0x55, 1, 1, 1, 99, address, -5, 0x3FC00000, 0]
    Driver(lambda one: address, driver).launch(launch_of("step", *args, pointer=99), 0x55, COOPERATIVE)
    assert list(seen)[8:12] == [1, 2, 1, 99]
    ctypes.c_int.in_dll(driver, "answer").value = 701
    with pytest.raises(DeviceError, match=r"^the driver refuses to launch embed early \(CUresult 701\): set "):
        Driver(lambda _: 0, driver).launch(launch_of("embed", *args), 0)
    with pytest.raises(DeviceError, match=r"^the driver refuses to launch step cooperatively .*PERSISTENT=0$"):
        Driver(lambda _: 0, driver).launch(launch_of("step", *args), 0, COOPERATIVE)


def test_a_driver_without_such_launches_is_one_line() -> None:
    with pytest.raises(
        DeviceError, match=r"^MINILLM_CUDA_DEPENDENT=1 and [^\n]* need a driver with cuLaunchKernelEx [^\n]*$"
    ):
        Driver(lambda _: 0, SimpleNamespace())


def test_gpus_before_hopper_are_refused() -> None:
    for architecture in "90", "100", "120":
        check_architecture(architecture)
    with pytest.raises(DeviceError, match=r"needs a GPU of compute capability 9\.0 or later; this one has 8\.9: "):
        check_architecture("89")


def test_the_first_launch_and_kernels_that_do_not_wait_begin_when_all_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []

    class Noting:
        def __init__(self, address: Any) -> None: ...

        def launch(self, launch: Launch, stream: int, attribute: int = PROGRAMMATIC) -> None:
            how = {PROGRAMMATIC: "early", COOPERATIVE: "cooperatively"}[attribute]
            ran.append(f"{launch.name} {how}, in stream {stream}")

    monkeypatch.setattr(devices, "Driver", Noting)
    device: Any = SimpleNamespace(stream=SimpleNamespace(ptr=5), address=None)
    launches = [launch_of(name) for name in ("embed", "layer_norm", "draw", "embed")]
    plain = [each._replace(kernel=lambda *_, n=each.name, **__: ran.append(n)) for each in launches]
    CupyDevice.launch_all(device, plain, dependent=True)
    assert ran == ["embed", "layer_norm early, in stream 5", "draw", "embed early, in stream 5"]
    ran.clear()
    CupyDevice.launch_all(device, plain)
    assert ran == ["embed", "layer_norm", "draw", "embed"]
    for dependent in False, True:
        ran.clear()
        CupyDevice.launch_all(device, [plain[0], plain[0]._replace(name="step"), plain[0]], dependent=dependent)
        assert ran == ["embed", "step cooperatively, in stream 5", "embed"]


def test_attention_what_follows_it_and_large_products_begin_when_all_is_done() -> None:
    def product(outputs: int) -> Launch:
        return launch_of("gemv_fma", None, None, np.empty((outputs, 4096), np.float16))

    launches = [launch_of("embed"), launch_of("attention_decode"), product(8), product(4096), product(4097)]
    launches += [launch_of("layer_norm"), launch_of("glu")]
    assert [begins_early(launches, i) for i in range(7)] == [False, False, False, True, False, False, True]


def test_where_there_is_no_driver_there_are_no_such_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minillm.backends.cuda.dependent.DRIVER", "libcuda.so.missing")
    assert not has_dependent_launches("90")

    def driver(version: int) -> Any:
        def get_version(to: Any) -> None:
            to._obj.value = version

        return lambda _: SimpleNamespace(cuDriverGetVersion=get_version)

    monkeypatch.setattr("minillm.backends.cuda.dependent.ctypes.CDLL", driver(12030))
    assert [has_dependent_launches(architecture) for architecture in ("80", "90", "120")] == [False, True, True]
    monkeypatch.setattr("minillm.backends.cuda.dependent.ctypes.CDLL", driver(12020))
    assert not has_dependent_launches("90")


class InOrder(RecordingDevice):
    """Its replays are held to the order of dependent launches."""

    def __init__(self, emulator: Emulator) -> None:
        super().__init__(Recorder(emulator))
        self.emulator, self.names = emulator, set[str]()

    def record(self, launch: Any) -> Any:
        replay = super().record(launch)
        self.names |= {each.name for each in self.records[-1]}

        def checked() -> None:
            self.emulator.results = []
            try:
                replay()
            finally:
                self.emulator.results = None

        return checked


needs_emulator = pytest.mark.skipif(ON_GPU or missing() is not None, reason="is checked by the emulator")


@needs_emulator
@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "batch", "dtype"),
    [
        ("opt", 1, "float16"),
        exhaustive("llama", 1, "float16"),
        ("mixtral", 6, "float16"),
        ("llama", 3, "int4"),
        exhaustive("qwen3", 6, "float16"),
        exhaustive("gemma3_text", 1, "float16"),
        exhaustive("opt", 1, "int8"),
        exhaustive("mixtral", 2, "int4"),
    ],
)
def test_no_kernel_of_a_recorded_step_touches_a_result_too_early(family: str, batch: int, dtype: str) -> None:
    device = InOrder(Emulator(checks=True))
    backend = CudaBackend(device, device.recorder, dtype, max_batch_size=8, dependent=True)
    raw = next(iter(CONFIGS[family].values())) | ({"head_dim": 16} if family in ("qwen3", "gemma3_text") else {})
    runner = runner_of(model_of(raw, seed=2, backend=backend), backend=backend)
    sequences = [TokenSequence([5 + i, 9, 11, 30 + i]) for i in range(batch)]
    runner.forward(sequences, [sequence.pending for sequence in sequences])
    for _ in range(3):
        for sequence in sequences:
            sequence.token_ids.append(7)
        runner.decode(sequences)
    assert device.replays > 0
    assert device.names <= WAITING


@needs_emulator
@pytest.mark.slow
def test_other_kernels_of_larger_steps_wait_too() -> None:
    """Each after a kernel that writes all that it reads but for the weights."""
    rng, emulator = np.random.default_rng(0), Emulator(checks=True)
    kernels = {storage: Kernels(emulator, storage, dependent=True) for storage in ("float32", "float16")}

    def random(*shape: int, dtype: Any = np.float16) -> Any:
        return rng.standard_normal(shape).astype(dtype)

    table, ids, gain = random(50, 24), np.arange(40, dtype=np.int32), random(24, dtype=np.float32)
    x, y, weight, out = random(40, 24), random(40, 24), random(24, 24), random(40, 24)
    keys, values, slots = random(4, 3, 16, 8), random(4, 3, 16, 8), np.arange(40, dtype=np.int32)

    def room(size: int, counters: int) -> tuple[Any, Any]:
        return np.zeros(size, np.float32), np.zeros(counters, np.int32)

    wide, logits = random(40, 48), random(40, 24, dtype=np.float32)
    single = {name: array.astype(np.float32) for name, array in (("x", x), ("weight", weight), ("out", out))}
    emulator.results = []
    half = kernels["float16"]
    embed(half, table, ids, x)
    layer_norm(half, x, gain, gain, 1e-5, y)
    rms_norm(half, y, gain, 1e-5, x, y)
    gemv(half, Product(x[:3], weight, gain, y[:3], residual=out[:3]))

    def after_a_norm() -> None:
        rms_norm(half, y[:3], gain, 1e-5, out[:3])
        gemv(half, Product(out[:3], weight, gain, x[:3]))

    (deferred,) = defer(half, half.collect(after_a_norm), (), lambda array: int(array.__array_interface__["data"][0]))
    deferred()
    gemv(half, Product(x[:30], weight, gain, y[:30], residual=out[:30]))
    gemm(half, Product(y, weight, gain, out, room=room))
    store_kv(half, out.reshape(40, 3, 8), y.reshape(40, 3, 8), keys, values, slots)
    glu(half, wide, "silu", out)
    scale_logits(half, logits, 2.0, 3.0)
    stack = low_rank.Stack(*(random(2, 3, 24, dtype=np.float32) for _ in range(2)), np.array([3, 2], np.int32))
    low_rank.add_low_rank(half, out, y, stack, ids % 2, np.empty((40, 3), np.float32), x)
    embed(kernels["float32"], table.astype(np.float32), ids, single["x"])
    gemm(kernels["float32"], Product(single["x"], single["weight"], gain, single["out"]))


def test_what_begins_early_is_told_by_its_name() -> None:
    launches = [launch_of("embed"), launch_of("embed"), launch_of("take_rows")]
    assert [begins_early(launches, i) for i in range(3)] == [False, True, False]
