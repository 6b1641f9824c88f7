"""Products of many rows with matrices of 8 and 4 bits by warpgroups, against float64 and beside what takes their place.

The matrix's numbers are rounded to 16 bits once, so what they are held against has them rounded too.
"""

import contextlib
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minillm.backends.cuda.backend import CudaBackend
from minillm.backends.cuda.dependent import WAITING
from minillm.backends.cuda.emulator import Emulator, LaunchError, missing
from minillm.backends.cuda.kernels import Kernels
from minillm.backends.cuda.linear import (
    INTEGER_ROWS,
    INTEGER_STEP,
    WGMMA_STEP,
    Product,
    Products,
    _shared_tiles,
    check_integer_warpgroups,
    gemm_wgmma_integers,
    shared_time,
)
from minillm.backends.cuda.rows import embed
from minillm.backends.numpy import NumpyBackend
from minillm.engine.inspect import all_logits
from minillm.errors import DeviceError
from minillm.reference.quantize import dequantize
from tests.families import CONFIGS
from tests.tiny import model_of, runner_of

from .interleaving import on_device
from .launchers import ON_GPU, exhaustive, launcher
from .planted import with_fault
from .recording import RecordingDevice
from .test_integers import KINDS, OF_BLOCKS, Case, matrix_of
from .test_linear import Rooms

Kind = tuple[int, int, int]

ZEROS, OFFSETS = (4, 64, 8), (4, 32, 16)
FIRST = [("float16", ZEROS, 256), ("float16", (8, 16, 16), 128), ("bfloat16", OFFSETS, 256)]
OTHERS = [("float16", kind, 256 >> i % 2) for i, kind in enumerate((*KINDS, *OF_BLOCKS)) if kind != ZEROS]
OTHERS += [("bfloat16", (8, 32, 0), 128), ("bfloat16", (8, 16, 16), 256)]


def run(kernels: Kernels, case: Case, tile_outs: int, blocks: int, **options: Any) -> np.ndarray:
    """A product by so many blocks, held against the formula; the counters are zeros again."""
    room = Rooms()
    product = partial(gemm_wgmma_integers, kernels, shape=(tile_outs, blocks))
    out = case.run(product, rounded=True, room=room, **options)
    assert not room.counters.any()
    return out


@pytest.mark.parametrize(("storage", "kind", "tile_outs"), [*FIRST, *(exhaustive(*each) for each in OTHERS)])
def test_products(emulator: Emulator, storage: str, kind: Kind, tile_outs: int) -> None:
    """Rows and outputs that fill no tile, `in` less than a group and more steps than stages, rows of x aligned or not;
    blocks with a tile each, and some that share tiles.
    """
    kernels = Kernels(emulator, storage)
    for rows, inputs, outputs, shift, blocks in (
        (70, 700, 300, 0, 3),
        (130, 37, 21, 1, 2),
        (5, 460, 69, 1, 1),
        (128, 328, 128, 0, 2),
    ):
        run(kernels, Case(kind, storage, rows, inputs, outputs, shift=shift), tile_outs, blocks)


def test_products_are_the_same_in_any_order_of_threads(any_emulator: Emulator) -> None:
    """Four steps for each of three blocks, the second of which ends a tile and begins another: each stage is filled
    again. With checks: no race, no product that reads what is not there, and no operand that changes under one.
    """
    case = Case(ZEROS, "float16", 70, 700, 300)
    outs = [run(Kernels(each, "float16"), case, 256, 3) for each in (any_emulator, launcher())]
    np.testing.assert_array_equal(*outs)


FAULTS = {
    "operands filled while they are multiplied": ("operands[(unit + 1) % 2], words", "operands[unit % 2], words"),
    "no wait for products": ("                wgmma_wait<0>();\n            }\n", "            }\n"),
    "a stage filled too early": ("cp_async_wait<STAGES - 3>();", "cp_async_wait<STAGES - 2>();"),
    "the zero of the group before": ("(unit * UNIT + step * 16) / GROUP", "unit * UNIT / 2 / GROUP"),
    "the outputs of the wrong neighbour": ("own_row() - odd * OWN", "own_row()"),
}
"""Lines of the kernel, and what stands there instead"""


@pytest.mark.slow
@pytest.mark.parametrize("fault", [name if i < 2 else exhaustive(name) for i, name in enumerate(FAULTS)])
def test_a_planted_fault_is_found(
    fault: str, emulator: Emulator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_fault("gemm_wgmma_integers.cu", *FAULTS[fault], tmp_path, monkeypatch)
    with pytest.raises((AssertionError, LaunchError)) as error:
        run(Kernels(emulator, "float16"), Case(ZEROS, "float16", 70, 700, 300), 256, 3)
    if fault.startswith("operands"):
        assert "registers of A changed while this wgmma was under way" in str(error.value)


@pytest.mark.slow
@pytest.mark.skipif(ON_GPU or missing() is not None, reason="is checked by the emulator")
@pytest.mark.parametrize("waits", [True, exhaustive(False)])
def test_a_product_waits_for_the_kernel_that_writes_x(
    waits: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The product begins before that one has ended; one that does not wait is found."""
    if not waits:
        with_fault("gemm_wgmma_integers.cu", "    follow();\n", "", tmp_path, monkeypatch)
    emulator, case = Emulator(checks=True), Case(ZEROS, "float16", 70, 136, 24)
    kernels, out = Kernels(emulator, "float16", dependent=True), np.zeros((70, 24), np.float16)
    x, table = np.zeros((70, 136), np.float16), case.x[:70].copy()
    emulator.results = []
    embed(kernels, table, np.arange(70, dtype=np.int32), x)
    product = Product(x, on_device(case.matrix), None, out, room=Rooms())
    with contextlib.nullcontext() if waits else pytest.raises(LaunchError, match="has not waited for it"):
        gemm_wgmma_integers(kernels, product, (256, 2))
        np.testing.assert_allclose(out, table.astype(np.float32) @ dequantize(case.matrix).T, 2e-3, 2e-3)
    assert "gemm_wgmma_integers" in WAITING


@pytest.mark.exhaustive
def test_logits_are_float(emulator: Emulator) -> None:
    run(Kernels(emulator, "float16"), Case((8, 32, 0), "float16", 66, 136, 69), 256, 1, float_out=True)


class Uncompiled:
    """A launcher of kernels that are only asked for."""

    processors, max_dynamic_shared_size_bytes = 132, 0

    def __init__(self, architecture: str) -> None:
        self.architecture = architecture

    def module(self, path: Path, options: tuple[str, ...]) -> Any:
        return self

    def get_function(self, name: str) -> Any:
        return self


@pytest.mark.parametrize(
    ("architecture", "rows", "asked", "names"),
    [
        ("90", INTEGER_ROWS + 1, True, ["gemm_wgmma_integers"]),
        ("90", INTEGER_ROWS + 1, False, ["expand", "gemm_wgmma"]),
        ("80", INTEGER_ROWS + 1, True, ["expand", "gemm_mma"]),
        ("90", INTEGER_ROWS, True, ["gemv_mma"]),
    ],
)
def test_which_rows_go_to_warpgroups(architecture: str, rows: int, asked: bool, names: list[str]) -> None:
    kernels = Kernels(Uncompiled(architecture), "float16")
    both = Products(kernels, None, partial(np.empty, dtype=np.float16), integer_warpgroups=asked)
    x, matrix, out = np.zeros((rows, 72), np.float16), matrix_of(*ZEROS, 24, 72), np.zeros((rows, 24), np.float16)
    launches = kernels.collect(lambda: both.linear(Product(x, matrix, None, out, room=Rooms())))
    assert [launch.name for launch in launches] == names
    assert (both.nbytes == 0) == ("expand" not in names), "where nothing is expanded no memory is taken for it"


def test_the_switch_needs_a_hopper() -> None:
    check_integer_warpgroups("90")
    for architecture, words in ("89", "has 8.9"), ("120", "has 12.0"):
        with pytest.raises(DeviceError, match=rf"^MINILLM_CUDA_INTEGER_WGMMA=1 needs .* {words}: leave it unset$"):
            check_integer_warpgroups(architecture)


SHAPES = [(4096, 12288), (4096, 4096), (4096, 16384), (16384, 4096)]
"""In and out of OPT-6.7B's products"""


def test_the_shape_of_a_product() -> None:
    """For 128 rows; and by the model fewer bits take less time than 16, whatever the rows."""
    assert [_shared_tiles(128, outputs, inputs, 132, 4) for inputs, outputs in SHAPES] == [
        (128, 132), (128, 128), (128, 128), (128, 128)
    ]  # fmt: skip
    for rows in (65, 128, 129, 256, 2000):
        times = []
        for bits, steps in (16, WGMMA_STEP), (8, INTEGER_STEP[8]), (4, INTEGER_STEP[4]):
            times.append(0.0)
            for inputs, outputs in SHAPES:
                tile_outs, blocks = _shared_tiles(rows, outputs, inputs, 132, bits)
                tiles, depth = -(-rows // 128) * -(-outputs // tile_outs), 64 if bits == 16 else 512 // bits
                times[-1] += shared_time(tiles, -(-inputs // depth), blocks, tile_outs, 132, steps[tile_outs])
        assert times == sorted(times, reverse=True)


@pytest.mark.slow
def test_a_prompt_has_the_logits_of_the_same_integers_in_numpy(device: RecordingDevice) -> None:
    raw, line = next(iter(CONFIGS["llama"].values())), np.random.default_rng(2).integers(3, 96, 70).tolist()
    backend = CudaBackend(device, device.recorder, "int4", integer_warpgroups=True)
    host = NumpyBackend(weights="int4")
    ours, reference = (runner_of(model_of(raw, seed=2, backend=each), backend=each) for each in (backend, host))
    found, expected = all_logits(ours, line), all_logits(reference, line)
    assert np.linalg.norm(found - expected) < 0.01 * np.linalg.norm(expected)
    names = {launch.name for launch in device.recorder.launches}
    assert "gemm_wgmma_integers" in names and "gemm_wgmma" not in names
