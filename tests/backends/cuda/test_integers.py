"""Matrices of 8 and 4 bits on the GPU: products and table rows against float64, and whole engines.

Around what a kernel reads lie NaNs (of floats), and around every result lies a number that must still be there.
"""

import itertools
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from minillm import Engine
from minillm.backends.cuda import linear as products
from minillm.backends.cuda.backend import CudaBackend
from minillm.backends.cuda.device import Device
from minillm.backends.cuda.emulator import Emulator
from minillm.backends.cuda.integers import IntegerShape, expand, integer_constants, integer_shape, interleave
from minillm.backends.cuda.kernels import Kernels
from minillm.backends.cuda.linear import INTEGER_ROWS, Product, Products, Room, integer_gemv, linear
from minillm.backends.cuda.random import fill_bits
from minillm.backends.cuda.weights import number_type, storage_of
from minillm.backends.formats import BFLOAT16, FLOAT16, FLOAT32, FORMATS, INT8
from minillm.backends.loader import RandomTensor
from minillm.backends.numpy import NumpyBackend
from minillm.backends.placement import Placement
from minillm.backends.storage import format_of, narrow
from minillm.engine.footprint import footprints
from minillm.engine.inspect import all_logits
from minillm.reference.quantize import Quantized, dequantize, quantize
from tests.families import CONFIGS
from tests.tiny import generate, logits_of, model_of, random_prompts, runner_of

from .interleaving import on_device
from .launchers import exhaustive, launcher
from .recording import Recorder, RecordingDevice

ml_dtypes = pytest.importorskip("ml_dtypes", reason="bfloat16 in NumPy needs ml_dtypes")

STORAGE = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
UNIT = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24}
UNTOUCHED = -77.0
KINDS = [(8, 32, 0), (8, 64, 0), (4, 32, 0), (4, 64, 0), (4, 32, 8), (4, 64, 8), (4, 32, 16), (4, 64, 16)]
"""Bits, group, bits of offsets"""
OF_BLOCKS = [(8, 16, 0), (8, 32, 16), (8, 16, 16)]
"""The same, as they become of GGUF's blocks"""
QUICK_KINDS = [KINDS[5], KINDS[0], KINDS[7], *(exhaustive(kind) for kind in (*KINDS[1:5], KINDS[6]))]
LINE = np.random.default_rng(2).integers(3, 96, 20).tolist()


def matrix_of(bits: int, group: int, offset_bits: int, outputs: int, inputs: int) -> Quantized:
    """Normal random numbers, rounded; with offsets or zero points that are drawn."""
    rng = np.random.default_rng((bits, group, offset_bits, outputs))
    numbers = rng.standard_normal((outputs, inputs)).astype(np.float32) / math.sqrt(inputs)
    symmetric = quantize(numbers, bits, max(group, 32))
    if group == 16:
        factors = rng.uniform(0.5, 1.5, (outputs, 2 * symmetric.scales.shape[1]))
        scales = (np.repeat(symmetric.scales, 2, axis=1) * factors).astype(np.float16)
        groups = -(-inputs // 16)
        symmetric = Quantized(symmetric.values[:, : groups * 16], scales[:, :groups], inputs).each(np.ascontiguousarray)
    offsets: Any = None
    if offset_bits == 8:
        offsets = rng.integers(0, 16, symmetric.scales.shape).astype(np.uint8)
    elif offset_bits == 16:
        offsets = (rng.standard_normal(symmetric.scales.shape) / math.sqrt(inputs)).astype(np.float16)
    return Quantized(symmetric.values, symmetric.scales, inputs, offsets)


class Case:
    """A product, and what should come out."""

    def __init__(
        self, kind: tuple[int, int, int], storage: str, rows: int, inputs: int, outputs: int, *, shift: int = 0
    ):
        """Rows of x lie `shift` numbers further apart than a multiple of 8."""
        rng, dtype = np.random.default_rng((rows, inputs)), STORAGE[storage]
        self.matrix = matrix_of(*kind, outputs, inputs)
        stride = -(-inputs // 8) * 8 + 8 + shift
        self.x = np.full((rows + 1, stride), np.nan, dtype)[:rows, :inputs]
        self.x[:] = rng.standard_normal((rows, inputs))
        self.bias = rng.standard_normal(outputs).astype(np.float32)
        self.residual = rng.standard_normal((rows, outputs)).astype(dtype)
        self.storage = storage

    def run(
        self,
        product: Callable[[Product], None],
        float_out: bool = False,
        *,
        rounded: bool = False,
        room: Room | None = None,
    ) -> np.ndarray:
        """The error is that of one rounding of the result, and of sums in float.

        `rounded`: the matrix's numbers are rounded to x's type before they are multiplied; `room`: for `Product`.
        """
        rows, outputs = self.residual.shape
        around = np.full((rows + 4, outputs + 11), UNTOUCHED, np.float32 if float_out else self.x.dtype)
        out = around[2:-2, 8:-3]
        product(Product(self.x, on_device(self.matrix), self.bias, out, "relu", self.residual, room))
        numbers = dequantize(self.matrix)
        weight, x = (numbers.astype(self.x.dtype) if rounded else numbers).astype(np.float64), self.x.astype(np.float64)
        expected = np.maximum(x @ weight.T + self.bias, 0) + self.residual.astype(np.float64)
        sums = np.abs(x) @ np.abs(weight).T  # bounds what float sums of these may be off, in units
        allowed = UNIT[out.dtype.name] * np.abs(expected) + 64 * UNIT["float32"] * sums + 1e-7
        error = np.abs(out.astype(np.float64) - expected)
        assert (error <= allowed).all(), f"{(error / allowed).max():.3g} times what is allowed"
        inside = np.zeros(around.shape, bool)
        inside[2:-2, 8:-3] = True
        assert (around[~inside].astype(np.float32) == UNTOUCHED).all(), "written outside the result"
        return out


def kernels(storage: str, schedule: str = "forward") -> Kernels:
    return Kernels(launcher(schedule), storage)


@pytest.fixture(autouse=True)
def _needs_the_emulator(emulator: Emulator) -> None:
    """Skips where kernels cannot be emulated."""


# ---- products -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [*QUICK_KINDS, OF_BLOCKS[2], *map(exhaustive, OF_BLOCKS[:2])])
@pytest.mark.parametrize("storage", [pytest.param("bfloat16", marks=pytest.mark.slow), "float16"])
def test_few_rows(kind: tuple[int, int, int], storage: str) -> None:
    """`in`: less than a group, padded, longer than one round of all warps; rows of x aligned and not."""
    run = kernels(storage)
    for rows, inputs, outputs, shift in [(1, 1100, 21, 0), (3, 37, 9, 0), (4, 1096, 17, 0), (7, 200, 8, 1)]:
        Case(kind, storage, rows, inputs, outputs, shift=shift).run(partial(linear, run))


@pytest.mark.parametrize("kind", QUICK_KINDS)
@pytest.mark.parametrize("inputs", [1200, 37])
def test_the_order_of_bytes_on_the_device(kind: tuple[int, int, int], inputs: int) -> None:
    """Whole chunks and a shorter last one."""
    matrix = matrix_of(*kind, 7, inputs)
    sent = matrix.each(np.copy)
    interleave(kernels("float16"), sent)
    np.testing.assert_array_equal(sent.values, on_device(matrix).values)
    np.testing.assert_array_equal(on_device(sent, back=True).values, matrix.values)


SHAPES = [
    IntegerShape(4, 16, 4, 2),
    IntegerShape(8, 32, 8, 3),
    IntegerShape(16, 64, 2, 4),
    IntegerShape(64, 128, 2, 2),
    IntegerShape(32, 64, 1, 3),
]
SLOW_SHAPES = [
    *zip((KINDS[0], KINDS[5], KINDS[7], KINDS[2], OF_BLOCKS[0]), SHAPES, strict=True),
    (OF_BLOCKS[1], SHAPES[0]),
]


@pytest.mark.slow
@pytest.mark.parametrize("storage", STORAGE)
@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        (pytest.param if (kind, shape) in SLOW_SHAPES else exhaustive)(kind, shape)
        for kind in [*KINDS, *OF_BLOCKS]
        for shape in SHAPES
    ],
)
def test_shapes(kind: tuple[int, int, int], storage: str, shape: IntegerShape) -> None:
    """More chunks than all stages have and less than one; rows of x aligned and not; more rows than a block takes."""
    run = kernels(storage)
    for rows, inputs, outputs, shift in [(shape.ROWS, 1704, 69, 0), (3, 72, 33, 1), (shape.ROWS + 1, 1024, 130, 0)]:
        Case(kind, storage, rows, inputs, outputs, shift=shift).run(partial(integer_gemv, run, shape=shape))


def test_the_shape_of_a_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """OPT's matrices: 1 to 4 rows as they were fastest on an H100, more rows by what a processor is sent."""

    def shape(inputs: int, outputs: int, bits: int, rows: int, architecture: int = 90) -> tuple[int, ...]:
        values = np.empty((1, inputs * bits // 8), np.int8 if bits == 8 else np.uint8)
        matrix = Quantized(values, np.empty((1, inputs // 32), np.float16), inputs)
        run = kernels("float16")
        monkeypatch.setattr(Kernels, "processors", 132)
        monkeypatch.setattr(Kernels, "architecture", architecture)
        chosen = integer_shape(run, matrix, rows, outputs)
        shared = (96 if architecture == 120 else 160) << 10
        assert chosen.shared(matrix) <= shared
        assert chosen.shared(matrix) >= 4 * chosen.SPLITS * chosen.ROWS * chosen.OUTS
        return chosen

    assert [shape(2048, 6144, bits, 1)[:3] for bits in (8, 4)] == [(4, 16, 4)] * 2
    assert [shape(2048, 2048, bits, 2)[:3] for bits in (8, 4)] == [(4, 16, 8)] * 2
    assert shape(8192, 2048, 8, 4)[:3] == (4, 16, 16)
    assert shape(16384, 4096, 4, 1)[:3] == (4, 16, 8)
    assert shape(2048, 50272, 8, 3)[:3] == (4, 16, 4)
    assert shape(4096, 16384, 4, 32)[:3] == (32, 128, 2)
    assert shape(4096, 12288, 4, 32)[:3] == (32, 128, 2)
    assert shape(4096, 4096, 4, 8)[:3] == (8, 32, 8)
    assert shape(32, 4096, 4, 8)[2] == 1
    for inputs, outputs, bits, rows in itertools.product((37, 4096), (9, 4096, 50272), (8, 4), (1, 7, 16, 20, 64)):
        for architecture in 80, 120:
            shape(inputs, outputs, bits, rows, architecture)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("storage", "kind", "processors"),
    [
        ("float16", KINDS[5], 1),
        ("float16", KINDS[0], 132),
        *(exhaustive("float16", kind, 1) for kind in KINDS if kind != KINDS[5]),
        *(exhaustive("float16", kind, 132) for kind in KINDS[1:]),
        *(exhaustive("bfloat16", kind, processors) for kind in KINDS[::5] for processors in (1, 132)),
    ],
)
def test_every_build(
    kind: tuple[int, int, int], storage: str, processors: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each number of row tiles, few rows, twice as many as one block takes, and 8 or more outputs a block."""
    monkeypatch.setattr(Kernels, "processors", processors)
    run = kernels(storage)
    for rows in 2, 8, 13, 31, 59, 64, 100, 128, 150:
        Case(kind, storage, rows, 328, 69).run(partial(linear, run))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [(8, 32, 0), (4, 32, 8), (4, 64, 16)])
def test_any_order_of_threads(kind: tuple[int, int, int], any_emulator: Emulator) -> None:
    """With checks: no access outside an argument, no race. The sums are those of any other order."""
    results = []
    for each in any_emulator, launcher():
        run = Kernels(each, "float16")
        found = [Case(kind, "float16", rows, 300, 21).run(partial(linear, run)) for rows in (2, 70)]
        side_by_side = partial(integer_gemv, run, shape=IntegerShape(8, 64, 2, 3))  # two warps, which share x
        found.append(Case(kind, "float16", 7, 1500, 69).run(side_by_side)[:, :21])
        results.append(np.concatenate(found))
    np.testing.assert_array_equal(*results)


def test_logits_are_float() -> None:
    run = kernels("float16")
    Case((8, 32, 0), "float16", 3, 136, 69).run(partial(linear, run), float_out=True)


def test_a_nan_stays_in_its_row() -> None:
    case = Case((4, 32, 8), "float16", 4, 96, 9)
    case.x[2, 40] = np.nan
    out = np.empty((4, 9), np.float16)
    linear(kernels("float16"), Product(case.x, on_device(case.matrix), None, out))
    assert np.isnan(out[2]).all()
    assert not np.isnan(out[[0, 1, 3]]).any()


@pytest.mark.slow
@pytest.mark.parametrize("kind", [(8, 32, 0), (4, 32, 16)])
def test_more_rows_are_multiplied_with_16_bits_some_rows_of_the_matrix_at_a_time(
    kind: tuple[int, int, int], emulator: Emulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Expanded numbers are rounded once."""
    monkeypatch.setattr(products, "EXPANDED", 40 * 72)
    recorder = Recorder(emulator)
    taken: list[int] = []

    def empty(numbers: int) -> Any:
        taken.append(numbers)
        return np.full(numbers, np.nan, np.float16)

    both = Products(Kernels(recorder, "float16"), None, empty)
    case = Case(kind, "float16", INTEGER_ROWS + 1, 72, 90)
    for _ in range(2):
        out = np.full((INTEGER_ROWS + 1, 90), np.nan, np.float16)
        both.linear(Product(case.x, on_device(case.matrix), case.bias, out, "relu", case.residual))
    weight = dequantize(case.matrix).astype(np.float16).astype(np.float64)
    expected = np.maximum(case.x.astype(np.float64) @ weight.T + case.bias, 0) + case.residual
    np.testing.assert_allclose(out, expected, rtol=2e-3, atol=2e-3)
    assert [launch.name for launch in recorder.launches] == ["expand", "gemm_wgmma"] * 6
    assert taken == [40 * 72], "memory is taken once: recorded steps hold its address"
    assert both.nbytes == 2 * 40 * 72


# ---- tables ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [*QUICK_KINDS, *OF_BLOCKS[:2], exhaustive(OF_BLOCKS[2])])
@pytest.mark.parametrize("E", [72, 37])
def test_rows_are_the_dequantised_ones(kind: tuple[int, int, int], E: int) -> None:
    table, rng = matrix_of(*kind, 50, E), np.random.default_rng(0)
    ids, positions = np.array([3, 49, 3, 0], np.int32), np.array([1, 0, 4, 2], np.int32)
    learned = rng.standard_normal((5, E)).astype(np.float16)
    out = np.full((5, E), UNTOUCHED, np.float16)
    there = on_device(table)
    expand(kernels("float16"), there, out[:4], ids=ids, position_table=learned, positions=positions, scale=2.0)
    values = dequantize(table).astype(np.float64)
    np.testing.assert_allclose(out[:4], 2 * values[ids] + learned[positions], rtol=1e-3, atol=1e-6)
    expand(kernels("float16"), there, out[:4])
    np.testing.assert_allclose(out[:4], values[:4], rtol=1e-3, atol=1e-6)
    assert (out[4] == UNTOUCHED).all()


def test_random_bits_do_not_depend_on_the_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []
    for blocks in 4096, 1:
        monkeypatch.setattr("minillm.backends.cuda.random.BLOCKS", blocks)
        drawn.append(np.zeros((48, 500), np.uint8))
        fill_bits(kernels("float16"), drawn[-1], 7)
    np.testing.assert_array_equal(*drawn)
    counts = np.bincount(drawn[0].reshape(-1), minlength=256)
    assert abs(((counts - 24000 / 256) ** 2).sum() / (24000 / 256) - 255) < 5 * math.sqrt(2 * 255)  # chi-squared


# ---- what is loaded, and in which type it is computed ---------------------------------------------------------------


class Stored(RandomTensor):
    """Random numbers as a file would have them in another type."""

    def __init__(self, dtype: str) -> None:
        super().__init__("w", (7, 40), 1, 1.0)
        object.__setattr__(self, "dtype", dtype)

    def stored(self) -> Any:
        form = FORMATS[self.dtype]
        if form.scale_bits:
            return quantize(self.load(), form.bits)
        return self.load() if form == FLOAT32 else narrow(self.load(), form)


@pytest.mark.parametrize(
    ("stored", "dtype", "storage", "data"),
    [
        ("float32", "int4", "float16", "int4"),
        ("bfloat16", "int8", "bfloat16", "int8"),
        ("int8", "auto", "float16", "int8"),
        ("int4", "auto", "float16", "int4"),
        ("int8", "float16", "float16", "float16"),
        ("int4", "bfloat16", "bfloat16", "bfloat16"),
        ("float32", "auto", "float32", "float32"),
    ],
)
def test_formats(stored: str, dtype: str, storage: str, data: str) -> None:
    backend = CudaBackend(Device(), launcher(), dtype)
    weight = backend.loader.prepare("w", [Stored(stored), Stored(stored)])
    assert (backend.memory.cache.name, format_of(weight.data).name) == (storage, data)
    assert backend.loader.prepare("p", [Stored("float32")], role="positions").data.dtype == number_type(storage)
    both = np.concatenate([Stored(stored).stored() if stored == "float32" else Stored(stored).load()] * 2)
    loaded = (
        dequantize(on_device(weight.data, back=True))
        if isinstance(weight.data, Quantized)
        else weight.data.astype(np.float32)
    )
    np.testing.assert_allclose(loaded, both, atol=0.5 if "int4" in (stored, dtype) else 0.05)


def test_the_type_of_activations() -> None:
    assert [storage_of(form) for form in (FLOAT32, BFLOAT16, FLOAT16, INT8, None)] == [
        FLOAT32, BFLOAT16, FLOAT16, FLOAT16, FLOAT16,
    ]  # fmt: skip
    assert [storage_of(form, rounded=True) for form in (FLOAT32, BFLOAT16, FLOAT16)] == [FLOAT16, BFLOAT16, FLOAT16]


# ---- whole models ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        ("llama", "int4"),
        ("opt", "int8"),
        ("mixtral", "int4"),
        ("gemma2", "int8"),
        *(exhaustive(*case) for case in (("opt", "int4"), ("gemma2", "int4"), ("llama", "int8"), ("mixtral", "int8"))),
    ],
)
def test_logits_are_those_of_the_same_integers_in_numpy(family: str, dtype: str, device: RecordingDevice) -> None:
    """Only activations are rounded otherwise: to 16 bits here, in float32 there."""
    raw, prompts = next(iter(CONFIGS[family].values())), random_prompts(3, seed=3)
    backend, host = CudaBackend(device, device.recorder, dtype, max_batch_size=4), NumpyBackend(weights=dtype)
    ours, reference = (runner_of(model_of(raw, seed=2, backend=each), backend=each) for each in (backend, host))
    found, expected = all_logits(ours, LINE), all_logits(reference, LINE)
    assert np.linalg.norm(found - expected) < 0.01 * np.linalg.norm(expected)
    for prompt, tokens in zip(prompts, generate(ours, prompts, max_new_tokens=6), strict=True):
        said = logits_of(reference, [*prompt, *tokens])[len(prompt) - 1 : -1]  # [6, V]
        best = said.max(axis=1) - said[np.arange(len(tokens)), tokens]
        assert (best < 0.05 * said.std()).all(), "a token that is not the likeliest, or as good as that"
    names = {launch.name for record in device.records for launch in record}
    assert {"expand", "gemv_mma"} <= {launch.name for launch in device.recorder.launches}
    if family in ("opt", "llama"):
        assert {"expand", "fused_mma"} <= names, "decode steps are recorded, and their launches joined"
    taken = {kind: (taken, predicted) for kind, taken, predicted in footprints([ours])}
    assert taken["weights"][0] == taken["weights"][1]
    assert taken["cache"][0] == taken["cache"][1]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["int4", exhaustive("int8")])
def test_the_demo_model(dtype: str, device: RecordingDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """`Engine(device="cuda", dtype="int4")`, as a user has it."""

    def choose(placement: Placement, max_batch_size: int) -> CudaBackend:
        return CudaBackend(device, device.recorder, placement.dtype, max_batch_size=max_batch_size)

    with monkeypatch.context() as patch:
        patch.setattr("minillm.engine.assembly.choose_backend", choose)
        engine = Engine(device="cuda", dtype=dtype, max_batch_size=4)
    with engine, Engine(backend="numpy", dtype=dtype, max_batch_size=4) as host:
        prompt = "A list of colors: red,"
        ours, theirs = (each.generate(prompt, max_new_tokens=4).text for each in (engine, host))
        assert ours == theirs
        assert device.replays > 0
        ids = engine.tokenizer.encode(prompt)
        near = [all_logits(each.runner, ids) for each in (engine, host)]
    assert np.linalg.norm(near[0] - near[1]) < 0.01 * np.linalg.norm(near[1])


def test_random_weights_are_drawn_on_the_device(device: RecordingDevice) -> None:
    """As benchmarks have them: integers that are all as likely, with scales for the spread that is asked for."""
    backend = CudaBackend(device, device.recorder, "int4")
    tensors = [backend.loader.random(name, (200, 96), 0, std) for name, std in (("q", 0.02), ("k", 0.1))]
    weight = backend.loader.prepare("w", tensors)
    assert {launch.name for launch in device.recorder.launches} == {"fill_bits"}
    values = dequantize(weight.data)
    np.testing.assert_allclose([values[:200].std(), values[200:].std()], [0.02, 0.1], rtol=0.02)
    assert backend.memory.use().weights == weight.nbytes


def test_constants_name_what_a_matrix_is() -> None:
    for bits, group, offset_bits in KINDS:
        expected = {"BITS": bits, "GROUP": group, "OFFSETS": offset_bits}
        assert integer_constants(matrix_of(bits, group, offset_bits, 3, 70)) == expected
