"""The products of kernels/cuda/gemv.cu and gemm.cu against x W^T in float64, for every storage type.

Around every array that a kernel reads lie NaNs, and around every result lies a number that must still be there: a sum
that reaches too far becomes NaN, a store that does is seen.
"""

import math
import re
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pytest

from minillm import reference
from minillm.backends.cuda.emulator import Emulator
from minillm.backends.cuda.kernels import Kernels, kernel_folder
from minillm.backends.cuda.linear import (
    ACTIVATIONS,
    MOST_ROWS,
    SPLITS,
    TILES,
    Product,
    Room,
    _shared_tiles,
    _splits,
    finish_product,
    gemm,
    gemm_wgmma,
    gemv,
    linear,
    powers_of_two,
    shared_time,
)

from .activations import EXACT
from .launchers import exhaustive, launcher
from .recording import Recorder

ml_dtypes = pytest.importorskip("ml_dtypes", reason="bfloat16 in NumPy needs ml_dtypes")

STORAGE = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
UNIT = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
UNTOUCHED = -77.0

FEW = [
    (1, 1, 1),
    (1, 100, 37),
    (2, 264, 21),
    (3, 7, 300),
    (4, 1032, 33),
    (5, 64, 48),
    (8, 72, 50),
    (9, 513, 19),
    (16, 136, 70),
]
"""Rows, in, out: at and below ROWS; `in` odd, a multiple of 4 and of 8, longer than one round of the block's loads."""

MORE = [(17, 72, 50), (32, 1032, 21), (33, 513, 19), (64, 136, 70)]
"""Rows that 16-bit storage has on two and on four tiles of a warp."""

MANY = [(1, 8, 3), (33, 40, 69), (65, 100, 133), (67, 513, 33), (130, 328, 64), (140, 31, 150)]
"""Rows, in, out: less than a tile and more; rows of `out` that are aligned (69, 133 with their gaps) and not."""


@dataclass
class Problem:
    """One product: its arrays with guards around them, and what should come out."""

    x: Any
    weight: Any
    bias: Any
    residual: Any
    out: Any
    around: Any
    activation: str | None

    def product(self, room: Room | None = None) -> Product:
        return Product(self.x, self.weight, self.bias, self.out, self.activation, self.residual, room)

    def finish(self, sums: Any) -> Any:
        """The epilogue of x W^T, in float64."""
        y = sums.astype(np.float64) + (0 if self.bias is None else self.bias)
        y = EXACT[self.activation](y)
        return y if self.residual is None else y + self.residual.astype(np.float64)

    def check(self) -> None:
        """The error is at most twice that of float sums, k after k, rounded to the type; nothing else was written."""
        expected = self.finish(self.x.astype(np.float64) @ self.weight.astype(np.float64).T)
        plain = np.zeros(expected.shape, np.float32)
        for k in range(self.x.shape[1]):
            plain += self.x[:, k, None].astype(np.float32) * self.weight[:, k].astype(np.float32)
        plain = self.finish(plain).astype(self.out.dtype).astype(np.float64)
        allowed = 2 * np.abs(plain - expected).max() + UNIT[self.out.dtype.name] * np.abs(expected).max()
        error = np.abs(self.out.astype(np.float64) - expected)
        assert error.max() <= allowed, (
            f"{error.max():.3g}, allowed {allowed:.3g}, at {np.argmax(error)} of {error.shape}"
        )
        inside = np.zeros(self.around.shape, bool)
        inside[2:-2, 8:-3] = True
        assert (self.around[~inside].astype(np.float32) == UNTOUCHED).all(), "written outside the result"


def problem(
    storage: str,
    rows: int,
    inputs: int,
    outputs: int,
    *,
    activation: str | None = "relu",
    bias: bool = True,
    residual: bool = True,
    float_out: bool = False,
    shift: int = 0,
) -> Problem:
    """A product of random numbers. Rows of x lie 8 numbers apart, those of out and residual 11; W begins at `shift`."""
    rng = np.random.default_rng((rows, inputs, outputs))
    dtype = STORAGE[storage]
    x = np.full((rows + 1, inputs + 8), np.nan, dtype)[:rows, :inputs]
    x[:] = rng.standard_normal((rows, inputs))
    stored = np.full(shift + outputs * inputs + 64, np.nan, dtype)
    weight = stored[shift:][: outputs * inputs].reshape(outputs, inputs)
    weight[:] = rng.standard_normal((outputs, inputs)) / math.sqrt(inputs)
    others = np.full((rows, outputs + 11), np.nan, dtype)[:, :outputs]
    others[:] = rng.standard_normal((rows, outputs))
    gains = rng.standard_normal(outputs).astype(np.float32)
    around = np.full((rows + 4, outputs + 11), UNTOUCHED, np.float32 if float_out else dtype)
    out = around[2:-2, 8:-3]
    return Problem(x, weight, gains if bias else None, others if residual else None, out, around, activation)


@cache
def kernels(storage: str, schedule: str = "forward") -> Kernels:
    return Kernels(launcher(schedule), storage)


def run(product: Any, kernels_: Kernels, case: Problem, room: Room | None = None, **options: Any) -> None:
    """Run a product and hold its result against the formula."""
    product(kernels_, case.product(room), **options)
    case.check()


@pytest.fixture(autouse=True)
def _needs_the_emulator(emulator: Emulator) -> None:
    """Skips where kernels cannot be emulated."""


# ---- few rows ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rows", "inputs", "outputs"), FEW)
def test_few_rows_float(rows: int, inputs: int, outputs: int) -> None:
    run(gemv, kernels("float32"), problem("float32", rows, inputs, outputs))


@pytest.mark.parametrize(
    ("rows", "inputs", "outputs"),
    [FEW[1], FEW[-1], MORE[-1], *FEW[3:-1], *MORE[:-1]],
)
def test_few_rows_half(rows: int, inputs: int, outputs: int) -> None:
    run(gemv, kernels("float16"), problem("float16", rows, inputs, outputs))


@pytest.mark.parametrize(("rows", "inputs", "outputs"), [FEW[1], FEW[-1], MORE[0], MORE[-1]])
def test_few_rows_bfloat16(rows: int, inputs: int, outputs: int) -> None:
    run(gemv, kernels("bfloat16"), problem("bfloat16", rows, inputs, outputs))


@pytest.mark.parametrize(
    ("storage", "rows", "outputs"),
    [
        ("float32", 4, 50),
        ("float16", 1, 39),
        ("float16", 14, 77),
        ("float16", 31, 77),
        ("float16", 59, 77),
    ],
)
def test_few_rows_and_many_outputs(storage: str, rows: int, outputs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A warp then has several outputs: 4, or 32 with tensor cores. So has it here, on a GPU of one processor."""
    monkeypatch.setattr(Kernels, "processors", 1)
    run(gemv, kernels(storage), problem(storage, rows, 200, outputs))


@pytest.mark.parametrize(("storage", "rows"), [("float32", 2), ("float16", 1), ("float16", 9), ("float16", 21)])
def test_few_rows_in_any_order_of_threads(storage: str, rows: int, any_emulator: Emulator) -> None:
    run(gemv, Kernels(any_emulator, storage), problem(storage, rows, 776, 21))


def test_64_rows_in_any_order_of_threads(any_emulator: Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    """With 32 outputs shared memory holds half of the warps' sums at a time."""
    monkeypatch.setattr(Kernels, "processors", 1)
    run(gemv, Kernels(any_emulator, "float16"), problem("float16", 60, 776, 37))


@pytest.mark.parametrize(
    ("storage", "rows", "kernel"),
    [
        ("float32", 16, "gemv_fma"),
        ("float32", 17, "gemm_tiled"),
        ("float16", 4, "gemv_fma"),
        ("float16", 5, "gemv_mma"),
        ("float16", 64, "gemv_mma"),
        ("float16", 65, "gemm_wgmma"),
    ],
)
def test_the_kernel_is_chosen_by_type_and_rows(emulator: Emulator, storage: str, rows: int, kernel: str) -> None:
    recorder = Recorder(emulator)
    run(linear, Kernels(recorder, storage), problem(storage, rows, 8, 3))
    assert [launch.name for launch in recorder.launches] == [kernel]


@pytest.mark.parametrize(
    ("architecture", "rows", "kernel"),
    [("80", 64, "gemv_mma"), ("80", 65, "gemm_mma"), ("90", 64, "gemv_mma"), ("90", 65, "gemm_wgmma")],
)
def test_more_than_64_rows_go_to_warpgroups_where_there_are_any(
    emulator: Emulator, architecture: str, rows: int, kernel: str
) -> None:
    recorder = Recorder(emulator)
    recorder.architecture = architecture
    run(linear, Kernels(recorder, "float16"), problem("float16", rows, 8, 24), room=Rooms())
    assert [launch.name for launch in recorder.launches] == [kernel]


# ---- many rows --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rows", "inputs", "outputs"), MANY)
@pytest.mark.parametrize(
    ("storage", "version", "tile"),
    [
        ("float32", "tiled", TILES[0]),
        ("float32", "tiled", TILES[1]),
        ("float16", "tiled", TILES[0]),
        ("float16", "mma", TILES[0]),
        ("bfloat16", "mma", TILES[1]),
    ],
)
def test_many_rows(storage: str, version: str, tile: tuple[int, int], rows: int, inputs: int, outputs: int) -> None:
    run(gemm, kernels(storage), problem(storage, rows, inputs, outputs), version=version, tile=tile)


@pytest.mark.parametrize(("rows", "inputs", "outputs"), MANY)
@pytest.mark.parametrize(("storage", "tile_outs"), [("float16", 128), ("bfloat16", 64)])
def test_many_rows_by_warpgroups(storage: str, tile_outs: int, rows: int, inputs: int, outputs: int) -> None:
    """A block for each tile."""
    tiles = -(-rows // 128) * -(-outputs // tile_outs)
    case = problem(storage, rows, inputs, outputs)
    run(gemm_wgmma, kernels(storage), case, shape=(tile_outs, tiles))


@pytest.mark.parametrize(("storage", "version"), [("float32", "tiled"), ("float16", "mma")])
def test_many_rows_in_any_order_of_threads(storage: str, version: str, any_emulator: Emulator) -> None:
    """Seven steps of 32, so that each of the four stages of gemm_mma is filled again while it may still be read."""
    run(gemm, Kernels(any_emulator, storage), problem(storage, 40, 224, 69), version=version, tile=TILES[1])


@pytest.mark.parametrize("inputs", [64, 584])
def test_warpgroups_in_any_order_of_threads(inputs: int, any_emulator: Emulator) -> None:
    """One step, and ten of 64: each of the six stages is filled again while products may still read it."""
    case = problem("float16", 70, inputs, 69)
    run(gemm_wgmma, Kernels(any_emulator, "float16"), case, shape=(128, 1))


def test_warpgroups_need_a_hopper(emulator: Emulator) -> None:
    for architecture, there in ("80", False), ("90", True), ("120", False):
        emulator.architecture = architecture
        assert Kernels(emulator).has("gemm_wgmma") == there
        assert Kernels(emulator).has("gemm")


# ---- several blocks for a tile --------------------------------------------------------------------------------------


class Rooms:
    """Scratch memory as a step has it: NaNs, and zeros that must be there again after each launch."""

    def __init__(self) -> None:
        self.sizes: list[tuple[int, int]] = []
        self.counters = np.zeros(0, np.int32)

    def __call__(self, size: int, counters: int) -> tuple[np.ndarray, np.ndarray]:
        self.sizes.append((size, counters))
        self.counters = np.zeros(counters, np.int32)
        return np.full(size, np.nan, np.float32), self.counters


@pytest.mark.parametrize(
    ("rows", "inputs", "outputs", "splits"),
    [
        (70, 552, 69, 4),
        (90, 260, 130, 2),
        (65, 256, 21, 2),
        (80, 1026, 64, 8),
        (128, 512, 33, 4),
    ],
)
@pytest.mark.parametrize("storage", ["float16", "bfloat16"])
def test_blocks_that_share_a_tile(storage: str, rows: int, inputs: int, outputs: int, splits: int) -> None:
    """`in` is a whole number of steps for each block or not; float32 sums of 16-bit products."""
    room, case = Rooms(), problem(storage, rows, inputs, outputs)
    run(gemm, kernels(storage), case, version="mma", splits=splits, room=room)
    tiles = -(-rows // 64) * -(-outputs // 64)
    assert room.sizes == [(tiles * splits * 64 * 64, tiles)]
    assert not room.counters.any()


@pytest.mark.parametrize(
    ("storage", "rows", "inputs", "outputs", "tile_outs", "blocks"),
    [
        ("float16", 70, 552, 69, 64, 8),  # 2 tiles of 9 steps: four blocks for each, one of which has 3 steps
        ("float16", 90, 260, 130, 64, 4),  # 3 of 5: a block has the end of a tile and the beginning of the next
        ("bfloat16", 80, 130, 320, 64, 2),  # 5 of 3: two whole tiles and a part of one
        ("float16", 65, 330, 21, 128, 6),  # a step for each block
        ("float16", 128, 200, 300, 128, 5),
        ("bfloat16", 140, 100, 130, 64, 5),  # tiles below one another: 6 of 2
    ],
)
def test_blocks_that_take_equal_shares_of_all_tiles(
    storage: str, rows: int, inputs: int, outputs: int, tile_outs: int, blocks: int
) -> None:
    room, case = Rooms(), problem(storage, rows, inputs, outputs)
    run(gemm_wgmma, kernels(storage), case, shape=(tile_outs, blocks), room=room)
    assert room.sizes == [(2 * blocks * 128 * tile_outs, -(-rows // 128) * -(-outputs // tile_outs))]
    assert not room.counters.any()


@pytest.mark.parametrize("shift", [0, 1])
def test_shares_have_the_same_bits_in_any_order_of_threads(any_emulator: Emulator, shift: int) -> None:
    """Ten steps for each of three blocks, the second of which ends a tile and begins another that it shares:
    every stage is filled again, also from the next tile.
    """
    case = problem("float16", 70, 900, 100, shift=shift)
    run(gemm_wgmma, Kernels(any_emulator, "float16"), case, shape=(64, 3), room=Rooms())
    bits = case.out.copy()
    run(gemm_wgmma, kernels("float16"), case, shape=(64, 3), room=Rooms())
    assert (case.out == bits).all()


def test_blocks_that_share_a_tile_in_any_order_of_threads(any_emulator: Emulator) -> None:
    case = problem("float16", 70, 512, 69)
    run(gemm, Kernels(any_emulator, "float16"), case, version="mma", room=Rooms())
    bits = case.out.copy()
    run(gemm, kernels("float16"), case, version="mma", room=Rooms())
    assert (case.out == bits).all()


def test_as_many_blocks_share_a_tile_as_processors_want() -> None:
    """OPT's products of many sequences: of 125m, 1.3b, 6.7b and 13b, from the residual's width and from the MLP's."""
    widths = [(768, 768), (3072, 768), (2048, 2048), (8192, 2048), (4096, 4096), (16384, 4096), (20480, 5120)]
    most, least = SPLITS[0] * 132, SPLITS[1]
    blocks = [outputs // 64 * _splits(outputs // 64, inputs, most, least) for inputs, outputs in widths]
    assert blocks == [48, 192, 256, 256, 256, 256, 320]


SHARED = [
    (768, 768), (2048, 2048), (8192, 2048), (5120, 5120), (5120, 20480), (20480, 5120), (4096, 28672), (1536, 17920)
]  # fmt: skip


def test_shares_take_no_longer_by_the_model_than_powers_of_two() -> None:
    for processors in (132, 114, 78):
        for inputs, outputs in SHARED:
            times = [
                shared_time(-(-outputs // tile_outs), inputs // 64, blocks, tile_outs, processors)
                for tile_outs, blocks in (
                    _shared_tiles(128, outputs, inputs, processors),
                    powers_of_two(outputs, inputs, processors),
                )
            ]
            assert times[0] <= times[1]


def test_the_shape_of_shares_on_132_processors() -> None:
    shapes = [_shared_tiles(128, outputs, inputs, 132) for inputs, outputs in SHARED]
    assert shapes == [(64, 36), (64, 128), (64, 128), (128, 120), (128, 132), (128, 132), (128, 132), (128, 132)]


# ---- what both can do -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 9, 35])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_epilogue(rows: int, bias: bool, residual: bool, activation: str | None) -> None:
    case = problem("float16", rows, 48, 37, activation=activation, bias=bias, residual=residual)
    run(linear, kernels("float16"), case)


@pytest.mark.parametrize("activation", [name for name in ACTIVATIONS if name])
@pytest.mark.parametrize("rows", [2, 40])
def test_activations_in_float32(rows: int, activation: str) -> None:
    run(linear, kernels("float32"), problem("float32", rows, 48, 37, activation=activation, residual=False))


def test_every_activation_has_an_epilogue_or_is_a_gate_of_a_row_with_itself() -> None:
    """So no MLP needs the reference, and every decode step can be recorded."""
    assert {*ACTIVATIONS, "relu2"} == {None, *reference.activation.ACTIVATIONS} == set(EXACT)
    source = (kernel_folder() / "activation.cuh").read_text()
    for name, number in ACTIVATIONS.items():
        assert name is None or re.search(rf"\b{name.upper()} = {number}\b", source)


@pytest.mark.parametrize("rows", [1, 40, 70])
def test_logits_are_float(rows: int) -> None:
    """Products of 16-bit numbers are exact in float, so nearly all of float's precision must be left."""
    run(linear, kernels("float16"), problem("float16", rows, 136, 69, float_out=True))


@pytest.mark.parametrize(
    ("storage", "rows"),
    [("float32", 4), ("float32", 40), ("float16", 1), ("float16", 16), ("float16", 40), ("float16", 70)],
)
def test_weights_at_an_odd_address(storage: str, rows: int) -> None:
    """16 bytes cannot be loaded at once, though all sizes are multiples of 8."""
    run(linear, kernels(storage), problem(storage, rows, 64, 72, shift=1))


@pytest.mark.parametrize("rows", [1, 16, 40, 70])
def test_a_nan_is_not_hidden_by_relu(rows: int) -> None:
    case = problem("float16", rows, 48, 37, residual=False)
    case.x[rows - 1, 5] = np.nan
    linear(kernels("float16"), case.product())
    assert np.isnan(case.out[rows - 1]).all()
    assert not np.isnan(case.out[: rows - 1]).any()


@pytest.mark.parametrize("rows", [4, 40])
def test_equal_input_gives_equal_bits(rows: int) -> None:
    results = []
    for schedule in "forward", "random":
        case = problem("float32", rows, 1032, 33)
        run(linear, kernels("float32", schedule), case)
        results.append(case.out.copy())
    assert (results[0] == results[1]).all()


def test_no_rows() -> None:
    case = problem("float32", 0, 8, 5)
    linear(kernels("float32"), case.product())
    assert (case.around == UNTOUCHED).all()


@pytest.mark.parametrize("storage", ["float32", "float16"])
@pytest.mark.parametrize(("bias", "residual"), [(True, True), (True, False), (False, True)])
def test_finish_product(any_emulator: Emulator, storage: str, bias: bool, residual: bool) -> None:
    """The epilogue of a library's product."""
    case = problem(storage, 5, 1, 1037, activation="gelu", bias=bias, residual=residual)
    case.out[:] = case.x.astype(np.float32) @ case.weight.astype(np.float32).T
    expected = case.finish(case.out)
    finish_product(Kernels(any_emulator, storage), case.product())
    np.testing.assert_allclose(case.out.astype(np.float64), expected, rtol=2 * UNIT[storage], atol=4 * UNIT["float32"])
    case.around[2:-2, 8:-3] = UNTOUCHED
    assert (case.around == UNTOUCHED).all()


# ---- slow: the shapes of OPT-125m, and every build ---------------------------------------------------------------

OPT = [(768, 768), (768, 2304), (768, 3072), (3072, 768)]


@pytest.mark.slow
@pytest.mark.parametrize("storage", [exhaustive("float32"), "float16", exhaustive("bfloat16")])
@pytest.mark.parametrize(("inputs", "outputs"), [exhaustive(*OPT[0]), OPT[1], exhaustive(*OPT[2]), OPT[3]])
@pytest.mark.parametrize("rows", [1, exhaustive(4), 16, exhaustive(32), exhaustive(64), 100])
def test_opt_125m(storage: str, inputs: int, outputs: int, rows: int) -> None:
    run(linear, kernels(storage), problem(storage, rows, inputs, outputs))


ROWS = [1, 2, 4, 8, 16, 32, 64]


@pytest.mark.slow
@pytest.mark.parametrize("storage", list(STORAGE))
@pytest.mark.parametrize("processors", [1, exhaustive(4), exhaustive(132)])
@pytest.mark.parametrize(
    ("rows", "float_out"),
    [*((rows, False) for rows in ROWS), *((exhaustive, pytest.param)[rows in (4, 64)](rows, True) for rows in ROWS)],
)
def test_every_build_for_few_rows(
    storage: str, processors: int, rows: int, float_out: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if rows > MOST_ROWS[storage]:
        pytest.skip("gemm takes them")
    monkeypatch.setattr(Kernels, "processors", processors)
    run(gemv, kernels(storage), problem(storage, rows, 520, 69, float_out=float_out))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("storage", "version"),
    [
        (storage, version)
        for storage in STORAGE
        for version in ("tiled", "mma")
        if (storage, version) != ("float32", "mma")
    ],
)
@pytest.mark.parametrize(
    ("tile", "float_out"),
    [*((tile, False) for tile in TILES), (TILES[0], True), exhaustive(TILES[1], True)],
)
@pytest.mark.parametrize(
    ("rows", "inputs", "outputs"), [(pytest.param if sizes == MANY[4] else exhaustive)(*sizes) for sizes in MANY]
)
def test_every_build_for_many_rows(
    storage: str, version: str, tile: tuple[int, int], float_out: bool, rows: int, inputs: int, outputs: int
) -> None:
    case = problem(storage, rows, inputs, outputs, float_out=float_out)
    run(gemm, kernels(storage), case, version=version, tile=tile)
