"""Norms that products take on: the formulas, the launches that they replace, and faults planted in the kernel."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from minillm.backends.cuda.backend import CudaBackend
from minillm.backends.cuda.deferring import defer
from minillm.backends.cuda.emulator import Emulator
from minillm.backends.cuda.fusing import fuse
from minillm.backends.cuda.kernels import Kernels, Launch, Launcher, Module, kernel_folder
from minillm.backends.cuda.linear import Product, linear
from minillm.backends.cuda.rows import layer_norm, rms_norm
from minillm.batch import TokenSequence
from tests.families import CONFIGS
from tests.tiny import model_of, runner_of

from .launchers import ON_GPU, exhaustive, launcher
from .recording import Recorder, RecordingDevice
from .test_fusing import ROTATIONS, UNTOUCHED, Step, address

DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
ROUNDING = {"float32": 2.0**-20, "float16": 2.0**-11, "bfloat16": 2.0**-8}
EPSILON = 1e-3
DEFERRED = ["deferred_fma"]


class Case:
    """A norm, and a product with all that a kernel without fused operations adds to it; and what they should give."""

    def __init__(self, storage: str, rows: int, inputs: int, outputs: int = 21, size: float = 3.0) -> None:
        rng = np.random.default_rng((rows, inputs))
        dtype = DTYPES[storage]
        self.storage, self.out = storage, np.full((rows, outputs), 77.0, dtype)
        wide = (size * rng.standard_normal((rows, inputs + 8))).astype(dtype)
        self.x = wide[:, :inputs]
        self.gain, self.bias = (rng.standard_normal(n).astype(np.float32) for n in (inputs, outputs))
        self.weight = (rng.standard_normal((outputs, inputs)) / np.sqrt(inputs)).astype(dtype)
        self.residual, self.normed = rng.standard_normal((rows, outputs)).astype(dtype), np.empty((rows, inputs), dtype)
        x = self.x.astype(np.float64)
        normed = x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + EPSILON) * self.gain
        y = normed @ self.weight.T.astype(np.float64) + self.bias
        self.expected = np.maximum(y, 0) + self.residual.astype(np.float64)

    def launches(self, kernels: Kernels) -> list[Launch]:
        def run() -> None:
            rms_norm(kernels, self.x, self.gain, EPSILON, self.normed)
            linear(kernels, Product(self.normed, self.weight, self.bias, self.out, "relu", self.residual))

        return defer(kernels, kernels.collect(run), (), address)

    def error(self, emulator: Launcher) -> float:
        """The largest error of the kernel, in roundings of the storage type."""
        launches = self.launches(Kernels(emulator, self.storage))
        assert [launch.name for launch in launches] == DEFERRED
        launches[0]()
        size = np.abs(self.expected) + np.sqrt((self.expected**2).mean())
        return float((np.abs(self.out.astype(np.float64) - self.expected) / size).max() / ROUNDING[self.storage])


@pytest.mark.parametrize(
    ("storage", "rows", "inputs", "processors"),
    [
        ("float32", 3, 37, 1),
        ("float16", 1, 1100, 132),
        ("float16", 4, 1104, 4),
        ("bfloat16", 2, 40, 132),
        *(exhaustive(storage, rows, 1104, n) for storage in DTYPES for rows in (1, 2, 4) for n in (1, 4, 132)),
    ],
)
def test_a_product_with_its_norm_is_the_formulas(
    storage: str, rows: int, inputs: int, processors: int, any_emulator: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that are aligned and not, of one warp and of several, rounded once."""
    monkeypatch.setattr(Kernels, "processors", processors)
    assert Case(storage, rows, inputs).error(any_emulator) <= 1


@pytest.mark.parametrize("size", [2e4, 1e-6])
def test_squares_that_16_bits_do_not_hold(size: float, emulator: Launcher) -> None:
    assert Case("float16", 3, 40, size=size).error(emulator) <= 1


@pytest.mark.parametrize(
    ("storage", "rows", "E"), [exhaustive("float32", 2, 37), ("float16", 1, 1100), exhaustive("float16", 4, 40)]
)
@pytest.mark.parametrize(
    ("run", "args"), [(Step.gate, ()), (Step.store, ROTATIONS[1:2]), exhaustive(Step.store, [None])]
)
def test_fused_products_with_their_norms_are_those_of_two_launches(
    run: Callable[..., None], args: list[Any], storage: str, rows: int, E: int, emulator: Launcher
) -> None:
    kernels, plain, ours = Kernels(emulator, storage), Step(storage, rows, E), Step(storage, rows, E)
    run(plain, kernels, *args)
    launches = fuse(kernels, kernels.collect(lambda: run(ours, kernels, *args)), (), address)
    launches = defer(kernels, launches, (), address)
    assert [launch.name for launch in launches] == DEFERRED
    launches[0]()
    for found, expected in zip(ours.results(), plain.results(), strict=True):
        result, truth = found.astype(np.float32), expected.astype(np.float32)
        np.testing.assert_array_equal(result == UNTOUCHED, truth == UNTOUCHED)
        np.testing.assert_allclose(result, truth, rtol=8 * ROUNDING[storage], atol=16 * ROUNDING[storage])


class TestLaunchedAsItIs:
    """Each case but for one thing as above."""

    def names(self, run: Callable[[Kernels], None], storage: str = "float16", read: Any = ()) -> list[str]:
        kernels = Kernels(launcher(), storage)
        return [launch.name for launch in defer(kernels, kernels.collect(lambda: run(kernels)), read, address)]

    def test_a_norm_that_others_read(self, emulator: Launcher) -> None:
        step = Step("float16", 2)
        assert self.names(step.gate) == ["deferred_fma", "glu"]
        assert self.names(step.gate, read=[step.normed]) == ["rms_norm", "gemv_fma", "glu"]

        def twice(kernels: Kernels) -> None:
            step.gate(kernels)
            linear(kernels, Product(step.normed, step.qkv, None, step.y))

        assert self.names(twice) == ["rms_norm", "gemv_fma", "glu", "gemv_fma"]

    def test_a_norm_that_is_added_to_its_product(self, emulator: Launcher) -> None:
        step, square = Step("float16", 2), np.zeros((40, 40), np.float16)

        def run(kernels: Kernels) -> None:
            rms_norm(kernels, step.x, step.gain, 1e-5, step.normed)
            linear(kernels, Product(step.normed, square, None, np.empty_like(step.x), residual=step.normed))

        assert self.names(run) == ["rms_norm", "gemv_fma"]

    def test_a_product_over_what_the_norm_reads(self, emulator: Launcher) -> None:
        step, square = Step("float16", 2), np.zeros((40, 40), np.float16)

        def run(kernels: Kernels) -> None:
            rms_norm(kernels, step.x, step.gain, 1e-5, step.normed)
            linear(kernels, Product(step.normed, square, None, step.x))

        assert self.names(run) == ["rms_norm", "gemv_fma"]

    def test_other_norms_and_more_rows(self, emulator: Launcher) -> None:
        step = Step("float16", 2)

        def with_residual(kernels: Kernels) -> None:
            rms_norm(kernels, step.x, step.gain, 1e-5, step.normed, step.x.copy())
            linear(kernels, Product(step.normed, step.qkv, None, step.y))

        def of_layers(kernels: Kernels) -> None:
            layer_norm(kernels, step.x, step.gain, step.shift, 1e-5, step.normed)
            linear(kernels, Product(step.normed, step.qkv, None, step.y))

        assert self.names(with_residual) == ["rms_norm", "gemv_fma"]
        assert self.names(of_layers) == ["layer_norm", "gemv_fma"]
        assert self.names(Step("float16", 5).gate) == ["rms_norm", "gemv_mma", "glu"]
        assert self.names(Step("float32", 5).gate, "float32") == ["rms_norm", "gemv_fma", "glu"]
        assert self.names(Step("float16", 2, bits=8).gate) == ["rms_norm", "gemv_mma", "glu"]


class Faulty:
    """A launcher of sources of which one has been changed."""

    def __init__(self, inner: Launcher, folder: Path, name: str, old: str, new: str) -> None:
        self._inner, self._folder = inner, folder / "cuda"
        self.architecture, self.processors = inner.architecture, inner.processors
        shutil.copytree(kernel_folder(), self._folder)
        source = (self._folder / name).read_text()
        assert source.count(old) == 1, old
        (self._folder / name).write_text(source.replace(old, new))

    def module(self, path: Path, options: tuple[str, ...]) -> Module:
        return self._inner.module(self._folder / path.name, options)


FAULTS = {
    "a block that does not wait for its warps": ("    __syncthreads();\n    if (finishes)", "    if (finishes)"),
    "squares of one warp of those that share a row": (
        "split < part.splits; ++split) squares",
        "split < 1; ++split) squares",
    ),
    "squares of what the gain has changed": (
        "squares[r] = fmaf(xi, xi, squares[r]);\n                        xi *= gains[i];",
        "xi *= gains[i];\n                        squares[r] = fmaf(xi, xi, squares[r]);",
    ),
}


@pytest.mark.slow
@pytest.mark.skipif(ON_GPU, reason="is about the emulator, which sees what is not waited for")
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Kernels, "processors", 132)  # where four warps share a row
    case = Case("float16", 2, 1100)
    faulty = Faulty(Emulator("forward"), tmp_path, "gemv_fma.cuh", *FAULTS[fault])
    assert not case.error(faulty) <= 1  # nor is NaN


def decode(raw: dict[str, Any], batch: int, *, deferred: bool) -> tuple[Any, list[str]]:
    """Logits of some decode steps, and the names of the launches of the last one."""
    device = RecordingDevice(Recorder(launcher()))
    backend = CudaBackend(device, device.recorder, "float32", max_batch_size=4, deferred=deferred)
    runner = runner_of(model_of(raw, seed=2, backend=backend), backend=backend)
    sequences = [TokenSequence([5 + i, 9, 11, 30 + i]) for i in range(batch)]
    runner.forward(sequences, [sequence.pending for sequence in sequences])
    logits = []
    for step in range(3):
        for sequence in sequences:
            sequence.token_ids.append(7 + step)
        logits.append(runner.decode(sequences).logits.copy())
    return np.array(logits), [launch.name for launch in device.records[-1]]


LAYERS = {
    "llama": "deferred_fma attention_decode gemv_fma deferred_fma gemv_fma",
    "qwen3": "deferred_fma norm_rotate_store attention_decode gemv_fma deferred_fma gemv_fma",
}


@pytest.mark.parametrize(("family", "batch"), [("llama", 3), exhaustive("llama", 1), exhaustive("qwen3", 2)])
def test_whole_decode_steps_without_launches_of_norms(
    family: str, batch: int, emulator: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Kernels, "processors", 1)
    raw = next(iter(CONFIGS[family].values())) | ({"head_dim": 16} if family == "qwen3" else {})
    (plain, _), (ours, names) = (decode(raw, batch, deferred=deferred) for deferred in (False, True))
    last = ["rms_norm", "gemv_fma", "best_of_chunks", "take_best"]  # hidden states are read, too
    assert names == ["embed", *LAYERS[family].split() * 2, *last]
    np.testing.assert_allclose(ours, plain, rtol=1e-4, atol=1e-5)
    assert (ours != plain).any(), "by other kernels"
