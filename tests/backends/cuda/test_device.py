"""Memory on the device: what is sent there, what is taken against what was predicted, and what happens when it ends."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from minillm import Engine
from minillm.backends.cuda import device as devices
from minillm.backends.cuda import weights
from minillm.backends.cuda.attention import staged_bytes
from minillm.backends.cuda.backend import CudaBackend
from minillm.backends.cuda.device import CACHE, Device, StagingBuffer
from minillm.backends.cuda.kernels import Kernels
from minillm.backends.cuda.memory import StepScratch, StepWorkspace
from minillm.backends.cuda.weights import Uploader, number_type
from minillm.backends.formats import FORMATS
from minillm.backends.loader import RandomTensor
from minillm.backends.observe import counting
from minillm.backends.placement import Placement, choose_backend
from minillm.backends.storage import narrow
from minillm.batch import Batch, TokenSequence
from minillm.engine.footprint import footprints
from minillm.errors import DeviceError, NumericalError
from minillm.measure.accounting import Part, Step, Storage
from tests.measure.accounting.agreement import assert_agree
from tests.tiny import generate, random_prompts, runner_of, tiny_model, tiny_runner, write_checkpoint

from .launchers import launcher
from .recording import Recorder, RecordingDevice

PROMPT = random_prompts(1, seed=3)[0]


@pytest.fixture
def on_device(device: RecordingDevice, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Engine]:
    """Makes engines on the emulated GPU."""

    def choose(placement: Placement, max_batch_size: int) -> CudaBackend:
        return CudaBackend(device, device.recorder, placement.dtype, max_batch_size=max_batch_size)

    monkeypatch.setattr("minillm.engine.assembly.choose_backend", choose)
    return Engine


# --- weights ----------------------------------------------------------------------------------------------------------


class Stored(RandomTensor):
    """Random numbers as a file would have them in another type."""

    def __init__(self, storage: str) -> None:
        super().__init__("w", (7, 5), 1, 1.0)
        object.__setattr__(self, "dtype", storage)

    def stored(self) -> Any:
        return self.load() if self.dtype == "float32" else narrow(self.load(), FORMATS[self.dtype])


@pytest.mark.parametrize("storage", ["float32", "float16", "bfloat16"])
def test_several_tensors_become_one_matrix_in_pieces_of_any_size(storage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ml_dtypes", reason="bfloat16 arrays need ml_dtypes")
    monkeypatch.setattr(weights, "STAGE_BYTES", 24)
    tensors = [RandomTensor(name, (rows, 5), 0, 1.0) for name, rows in (("q", 7), ("k", 3))]
    uploader = Uploader(Device())
    matrix = uploader.matrix(tensors, Kernels(Recorder(launcher()), storage))
    expected = np.concatenate([tensor.load() for tensor in tensors]).astype(number_type(storage))
    np.testing.assert_array_equal(matrix.view(np.uint8), expected.view(np.uint8))
    np.testing.assert_array_equal(uploader.vector(tensors[:1])[:7], tensors[0].load())
    assert uploader.sent_bytes == expected.nbytes + tensors[0].load().nbytes


class Late(Device):
    """Copies happen as late as a GPU may make them: when somebody waits for them."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[Callable[[], None]] = []

    def send(self, source: Any, target: Any, offset: int = 0) -> None:
        self.asked.append(lambda: Device.send(self, source, target, offset))

    def wait(self) -> None:
        super().wait()
        self.mark()()

    def mark(self) -> Callable[[], None]:
        until = list(self.asked)

        def wait() -> None:
            for copy in until:
                if copy in self.asked:
                    self.asked.remove(copy)
                    copy()

        return wait


def test_a_chunk_of_a_prompt_waits_only_for_the_copy_of_the_one_before_the_last() -> None:
    """Each has a place of its own on the host and on the device for two passes; recorded steps have one."""
    device = Late()
    scratch = StepScratch(device, np.float32)
    plain, recorded = StepWorkspace(device, scratch, parcels=2), StepWorkspace(device, scratch)
    sequence = TokenSequence(list(range(60)), 0, [0, 1, 2, 3])
    filled = []
    for under_way in 1, 2, 2, 2:
        batch = Batch.of([sequence], [10], 16)
        filled.append(plain.next_batch().fill(batch, np.zeros(0, np.int64), 16)[0])
        assert len(device.asked) == under_way, "copies that nobody has waited for"
        if len(filled) > 2:
            assert filled[-3].token_ids.tolist() == list(range(sequence.cached - 20, sequence.cached - 10))
        sequence.cached += 10
    assert device.waits == 0
    device.wait()
    assert [each.token_ids[0] for each in filled[-2:]] == [20, 30]
    assert recorded.next_batch() is recorded.next_batch()


def test_a_stage_is_not_filled_before_its_last_copy_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "STAGE_BYTES", 16)
    device = Late()
    tensor = RandomTensor("w", (9, 5), 0, 1.0)
    matrix = Uploader(device).matrix([tensor], Kernels(Recorder(launcher()), "float32"))
    device.wait()
    np.testing.assert_array_equal(matrix, tensor.load())
    staging = StagingBuffer(device)
    for number in (1, 2):
        staging.lay_out(a=((3,), np.int32), b=((2,), np.float64))
        staging.host["a"][:], staging.host["b"][:] = number, -number
        staging.send()
        if number == 1:
            staging.lay_out(a=((3,), np.int32), b=((2,), np.float64))
            assert staging.there["a"].tolist() == [1, 1, 1], "laying it out for what comes next waits for the copy"
    device.wait()
    assert staging.there["a"].tolist() == [2, 2, 2]
    assert staging.there["b"].tolist() == [-2, -2]


@pytest.mark.parametrize(
    ("stored", "storage"),
    [("float16", "float16"), ("bfloat16", "bfloat16"), ("float32", "float32")],
)
def test_auto_keeps_the_type_that_weights_are_stored_in(stored: str, storage: str) -> None:
    pytest.importorskip("ml_dtypes", reason="bfloat16 arrays need ml_dtypes")
    backend = CudaBackend(Device(), launcher())
    weight = backend.loader.prepare("w", [Stored(stored)], [RandomTensor("b", (7,), 0, 1.0)])
    assert (backend.memory.cache.name, weight.data.dtype.name, weight.bias.dtype.name) == (storage, storage, "float32")
    assert backend.loader.prepare("v", [RandomTensor("v", (7, 5), 0, 1.0)]).data.dtype.name == storage
    assert backend.memory.position_bytes(K=2, D=8) == 2 * 2 * 8 * number_type(storage).itemsize


# --- how much there is ------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 20])
def test_memory_is_what_the_shape_predicts(rows: int, device: RecordingDevice) -> None:
    backend = CudaBackend(device, device.recorder, "float16", max_batch_size=2)
    model = tiny_model(seed=2, backend=backend)
    runner = runner_of(model, backend=backend, pages=8)
    sent = backend.memory.use().weights
    runner.forward([TokenSequence(list(range(3, 50)))], [47], rows=range(rows))
    taken = {kind: (taken, predicted) for kind, taken, predicted in footprints([runner])}
    assert taken["weights"] == (sent, sent)
    assert taken["cache"] == (2 * 2 * 8 * 16 * 32 * 2,) * 2
    assert backend.memory._plain.scratch.arena.nbytes == taken["workspace"][1]
    assert taken["workspace"][0] >= taken["workspace"][1]
    assert footprints([tiny_runner()]) == []


def test_counted_bytes_are_those_of_the_closed_form(device: RecordingDevice) -> None:
    """Weights, results and cache in 16 bits; biases, norms and logits in 32."""
    backend = CudaBackend(device, device.recorder, "float16", max_batch_size=2)
    runner = runner_of(tiny_model("post-norm", seed=2, backend=backend), backend=backend, pages=8)
    with counting(runner) as counted:
        runner.prefill(TokenSequence([3, 4, 5]))
    assert_agree(runner.model.config, [Step((Part(3, 3),), 1)], counted, Storage.all_in("float16"))


def test_stats_report_the_device(
    on_device: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from minillm.cli.main import run

    monkeypatch.setattr("minillm.engine.engine.Engine", on_device)
    where = ["--device", "cuda", "--dtype", "float32"]
    assert run(["generate", "--prompt", "A list", "--max-new-tokens", "1", "--stats", *where]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert [line.split()[0] for line in lines[-3:]] == ["weights", "cache", "workspace"]
    assert lines[-3] == "weights         12.1 MiB on the device; predicted 12.1"


class Small(RecordingDevice):
    """A device that lacks memory when it is told to."""

    largest = 1 << 40

    def __init__(self, recorder: Recorder) -> None:
        super().__init__(recorder)
        self.asked: list[int] = []
        self.xp = SimpleNamespace(**{name: getattr(np, name) for name in dir(np) if not name.startswith("_")})
        self.xp.empty = self.take

    def take(self, shape: Any, dtype: Any) -> Any:
        self.asked.append(int(np.prod(shape)) * np.dtype(dtype).itemsize)
        if self.asked[-1] > self.largest:
            raise MemoryError
        return np.empty(shape, dtype)

    def free_bytes(self) -> int:
        return 3 << 20


def test_out_of_memory_says_what_to_lower_and_leaves_the_engine_usable(
    device: RecordingDevice, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    small = Small(device.recorder)
    monkeypatch.setattr(
        "minillm.engine.assembly.choose_backend",
        lambda placement, n: CudaBackend(small, device.recorder, "float32", max_batch_size=n),
    )
    folder = write_checkpoint(tmp_path / "model", seed=2)
    with Engine(folder, max_batch_size=2) as engine:
        before = engine.generate(PROMPT[:2], max_new_tokens=3).token_ids
        small.largest = 4000
        needed = r"out of device memory for the results of a step: 0\.\d MiB were asked for, 3\.0 MiB are free: lower "
        with pytest.raises(DeviceError, match=needed + "max_batch_size, or cache_bytes to leave more"):
            engine.generate(list(range(3, 60)), max_new_tokens=3)
        assert not engine.busy
        assert engine.runner.cache.free_pages == engine.runner.cache.num_pages
        assert engine.generate(PROMPT[:2], max_new_tokens=3).token_ids == before
        small.largest = 1 << 40
        assert len(engine.generate(list(range(3, 60)), max_new_tokens=3).token_ids) == 3
    small.largest = 4000
    with pytest.raises(DeviceError, match=r"for the weights: .* choose dtype 'float16' or 'bfloat16', or a smaller"):
        Engine(folder)
    small.largest = 100_000
    with pytest.raises(DeviceError, match=r"for the K/V cache: .* lower cache_bytes or max_batch_size"):
        Engine(folder, max_batch_size=64)


def test_memory_that_is_kept_for_later_is_given_back_before_giving_up() -> None:
    class Hoarding(Small):
        def release_unused(self) -> None:
            self.largest = 1 << 40

    device = Hoarding(Recorder(launcher()))
    device.largest = 10
    assert device.empty((100,), np.float32, CACHE).shape == (100,)
    assert device.asked == [400, 400]


def test_a_library_call_that_runs_out_of_memory_is_told_as_well(
    device: RecordingDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = CudaBackend(device, device.recorder, "float32")
    runner = runner_of(tiny_model(backend=backend), backend=backend)

    def compute(*_: Any, **__: Any) -> Any:
        raise MemoryError

    monkeypatch.setattr(type(runner.model), "forward", compute)
    with pytest.raises(DeviceError, match=r"out of device memory for the results of a step: .* are free"):
        generate(runner, [PROMPT], max_new_tokens=2)


# --- numbers, indices -------------------------------------------------------------------------------------------------


def test_nan_is_named_as_on_a_cpu(on_device: Callable[..., Engine], tmp_path: Path) -> None:
    def spoil(tensors: dict[str, np.ndarray]) -> None:
        tensors["layers.1.fc1.weight"][3, 4] = np.nan

    folder = write_checkpoint(tmp_path / "model", seed=2, change=spoil)
    with on_device(folder, max_batch_size=2) as engine:
        with pytest.raises(NumericalError, match=r"NaN or infinity in layer 1, made by linear with layers\.1\.fc1"):
            engine.generate(PROMPT, max_new_tokens=2)
        assert not engine.busy


def test_builds_are_asked_for_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    built: dict[str, Any] = {}
    launcher = SimpleNamespace(architecture="90")
    monkeypatch.setattr("minillm.backends.cuda.compiling.CupyLauncher", lambda carveout: launcher)
    monkeypatch.setattr("minillm.backends.cuda.dependent.has_dependent_launches", lambda architecture: True)
    own: list[bool] = []
    device = SimpleNamespace(address=id)
    monkeypatch.setattr(devices, "CupyDevice", lambda own_library: own.append(own_library) or device)

    def note(*_: Any, **options: Any) -> None:
        built.update(options)

    monkeypatch.setattr("minillm.backends.cuda.backend.CudaBackend", note)
    for value, expected in (("1", True), ("0", False), ("", False)):
        monkeypatch.setenv("MINILLM_CUDA_DEBUG", value)
        choose_backend(Placement(device="cuda"), 1)
        assert built["debug"] is expected
    for value, expected in (("1", True), ("0", False), ("", True)):
        monkeypatch.setenv("MINILLM_CUDA_DEPENDENT", value)
        choose_backend(Placement(device="cuda"), 1)
        assert built["dependent"] is expected
        assert built["dependent_rows"] == (None if value == "1" else 16)
    for value, expected in (("1", True), ("0", False), ("", False)):
        monkeypatch.setenv("MINILLM_CUDA_PROMPTS", value)
        choose_backend(Placement(device="cuda"), 1)
        assert (own[-1], built["prompt_tokens"] > 0) == (expected, expected)
    for value, expected in (("1", True), ("0", False), ("", False)):
        monkeypatch.setenv("MINILLM_CUDA_TMA", value)
        choose_backend(Placement(device="cuda"), 1)
        assert (built["tensor_maps"] is not None) is expected
    launcher.architecture = "89"
    monkeypatch.setenv("MINILLM_CUDA_TMA", "1")
    with pytest.raises(DeviceError, match=r"^MINILLM_CUDA_TMA=1 needs a GPU of compute capability 9\.0 .* has 8\.9"):
        choose_backend(Placement(device="cuda"), 1)
    monkeypatch.setenv("MINILLM_CUDA_TMA", "0")
    monkeypatch.setenv("MINILLM_CUDA_DEPENDENT", "1")
    with pytest.raises(DeviceError, match=r"^MINILLM_CUDA_DEPENDENT=1 needs a GPU of compute capability 9\.0"):
        choose_backend(Placement(device="cuda"), 1)
    options: list[tuple[str, ...]] = []

    class Noting:
        def module(self, path: Path, given: tuple[str, ...]) -> Any:
            options.append(given)
            return SimpleNamespace(get_function=lambda name: SimpleNamespace(max_dynamic_shared_size_bytes=0))

    Kernels(Noting(), "float32", debug=True).get("kv", "store_kv")
    assert "-DMINILLM_CUDA_DEBUG" in options[0]


def test_shared_memory_is_asked_for_where_a_launch_has_48_kib_beside_what_its_kernel_has() -> None:
    """The decode kernel of latents of 576 numbers has exactly so much, and a KiB statically: together too much unless
    the driver was asked, which says of such a kernel that it allows 48 KiB.
    """
    asked: list[int] = []

    class Function:
        max_dynamic_shared_size_bytes = property(lambda self: 48 << 10, lambda self, value: asked.append(value))

    launcher: Any = SimpleNamespace(module=lambda *_: SimpleNamespace(get_function=lambda name: Function()))
    kernels, shared = Kernels(launcher, "float16"), staged_bytes(576, 2)
    assert shared == 48 << 10
    for _ in range(2):
        kernels.get("attention_decode", "attention_decode", shared_mem=shared)
    kernels.get("kv", "store_kv")
    assert asked == [48 << 10]
