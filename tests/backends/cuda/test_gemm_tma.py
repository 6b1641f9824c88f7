"""The product of kernels/cuda/gemm_tma.cu on emulated clusters: right numbers, gemm_wgmma's bits, planted faults."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minillm.backends.cuda.backend import CudaBackend
from minillm.backends.cuda.batches import TOKENS
from minillm.backends.cuda.emulator import Emulator, LaunchError
from minillm.backends.cuda.emulator.tensor_map import encode
from minillm.backends.cuda.kernels import Kernels
from minillm.backends.cuda.linear import (
    CLUSTER,
    SPLIT_ROWS,
    Product,
    Products,
    TmaShape,
    gemm_tma,
    gemm_wgmma,
    tma_shape,
    tma_time,
)
from minillm.backends.cuda.tensor_maps import TensorMaps
from minillm.batch import TokenSequence
from tests.tiny import runner_of, tiny_model

from .launchers import exhaustive, launcher
from .planted import with_fault
from .recording import Recorder, RecordingDevice

pytest.importorskip("ml_dtypes", reason="bfloat16 in NumPy needs ml_dtypes")

from .test_linear import Problem, problem  # which needs ml_dtypes

MAPS = TensorMaps(lambda array: int(array.__array_interface__["data"][0]), encode)


@pytest.fixture(autouse=True)
def _two_clusters_of_an_emulator(emulator: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Skips where kernels cannot be emulated. Two clusters then take several groups of tiles each."""
    monkeypatch.setattr(Kernels, "processors", 2 * CLUSTER)


def run(kernels: Kernels, case: Problem, tile_outs: int, shared_x: int) -> None:
    """Run a product and hold its result against the formula."""
    down, across = -(-len(case.x) // 128), -(-len(case.weight) // tile_outs)
    groups = down * -(-across // CLUSTER) if shared_x else -(-down // CLUSTER) * across
    assert gemm_tma(kernels, case.product(), MAPS, TmaShape(tile_outs, shared_x, groups))
    case.check()


@pytest.mark.parametrize(
    ("storage", "rows", "inputs", "outputs", "tile_outs", "shared_x"),
    [
        ("float16", 130, 328, 64, 256, 0),  # a part of a tile of outputs, of the second row tile and of the last step
        ("bfloat16", 260, 64, 520, 128, 0),  # the second group has one row tile; five columns of tiles
        ("float16", 300, 136, 264, 128, 1),  # columns of 128, 128 and 8 outputs, and a fourth that is not there
        ("float16", 70, 8, 600, 256, 1),
    ],
)
def test_many_rows(storage: str, rows: int, inputs: int, outputs: int, tile_outs: int, shared_x: int) -> None:
    run(Kernels(launcher(), storage), problem(storage, rows, inputs, outputs), tile_outs, shared_x)


@pytest.mark.parametrize("shared_x", [0, exhaustive(1)])
def test_in_any_order_of_threads(any_emulator: Any, shared_x: int) -> None:
    """Four groups or five of three steps for two clusters: each of four stages is filled again, from the next tile."""
    case = problem("float16", 129, 184, (5 - shared_x) * 256)
    run(Kernels(any_emulator, "float16"), case, 256, shared_x)


def test_the_bits_of_gemm_wgmma() -> None:
    kernels, case = Kernels(launcher(), "float16"), problem("float16", 150, 584, 136)
    run(kernels, case, 128, 0)
    bits = case.out.copy()
    case.out[...] = np.nan
    gemm_wgmma(kernels, case.product(), shape=(128, 4))
    np.testing.assert_array_equal(case.out, bits)


def test_blocks_that_share_nothing() -> None:
    case = problem("float16", 260, 200, 136)
    assert gemm_tma(Kernels(launcher(), "float16"), case.product(), MAPS, TmaShape(128, 0, 6, CLUSTER=1))
    case.check()


def test_float_logits_and_no_addends() -> None:
    case = problem("float16", 140, 72, 136, float_out=True, bias=False, residual=False, activation=None)
    run(Kernels(launcher(), "float16"), case, 128, 0)


# ---- which products it has --------------------------------------------------------------------------------------


def names(recorder: Recorder, products: Products, case: Problem, product: Product | None = None) -> list[str]:
    """The kernels of a product, of which the library's has no name."""
    recorder.launches.clear()
    products.linear(product or case.product())
    case.check()
    return [launch.name for launch in recorder.launches]


def library(x: Any, weight: Any, out: Any) -> None:
    np.matmul(x.astype(np.float32), weight.T.astype(np.float32), out=out, casting="unsafe")


def test_the_library_has_what_it_cannot_read_and_no_more(emulator: Any) -> None:
    recorder = Recorder(emulator)
    products = Products(Kernels(recorder, "float16"), library, maps=MAPS)
    assert names(recorder, products, problem("float16", 129, 64, 72)) == ["gemm_tma"]
    assert names(recorder, products, problem("float16", 129, 64, 72, float_out=True)) == ["gemm_tma"]
    assert names(recorder, products, problem("float16", 129, 60, 72)) == ["finish_product"], "rows end within 16 bytes"
    assert names(recorder, products, problem("float16", 129, 64, 69)) == ["finish_product"], "outputs are no eights"
    assert names(recorder, products, problem("float16", 129, 64, 72, shift=1)) == ["finish_product"]
    assert names(recorder, products, problem("float16", 64, 64, 72)) == ["gemv_mma"]
    with products.only_ours():
        assert names(recorder, products, problem("float16", 129, 64, 72)) == ["gemm_tma"]


def test_without_maps_and_without_a_hopper_nothing_changes(emulator: Any) -> None:
    recorder, case = Recorder(emulator), problem("float16", 129, 64, 72)
    assert names(recorder, Products(Kernels(recorder, "float16"), library), case) == ["finish_product"]
    recorder.architecture = "100"
    assert names(recorder, Products(Kernels(recorder, "float16"), library, maps=MAPS), case) == ["finish_product"]


def test_few_rows_are_its_own_where_its_tiles_fill_the_processors() -> None:
    """By the model of times: of 65 to 128 rows gemm_wgmma shares tiles out where there are few."""
    recorder = Recorder(launcher())
    products = Products(Kernels(recorder, "float16"), None, maps=MAPS)
    assert names(recorder, products, problem("float16", 100, 1024, 1024)) == ["gemm_tma"]
    case = problem("float16", 100, 1024, 72)
    room = lambda size, counters: (np.zeros(size, np.float32), np.zeros(counters, np.int32))  # noqa: E731
    assert names(recorder, products, case, case.product(room)) == ["gemm_wgmma"]


def test_shapes_on_132_processors() -> None:
    """Llama-3.1-8B's MLP with an even and an odd number of row tiles; narrow tiles where there are few."""
    mlp, square = (28672, 4096), (2048, 2048)
    shapes = [tma_shape(rows, *sizes, 132) for rows, sizes in ((2000, mlp), (300, mlp), (512, square), (128, mlp))]
    assert [shape[:3] for shape in shapes] == [(256, 0, 896), (256, 1, 168), (128, 0, 32), (256, 1, 56)]
    assert tma_time(shapes[0], 4096, 132) < tma_time(TmaShape(128, 0, 2 * 896), 4096, 132)


# ---- whole passes -----------------------------------------------------------------------------------------------


def test_a_recorded_prompt(emulator: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its maps are in the recording: a replay has the same bits, and logits are those without the kernel."""
    monkeypatch.setattr(Kernels, "processors", 1)
    logits: dict[bool, list[Any]] = {}
    for with_maps in (False, True):
        device = RecordingDevice(Recorder(emulator))
        maps = TensorMaps(device.address, encode) if with_maps else None
        backend = CudaBackend(device, device.recorder, "float16", prompt_tokens=TOKENS[-1], tensor_maps=maps)
        runner = runner_of(tiny_model(backend=backend, max_position_embeddings=160), backend=backend, pages=64)
        for _ in range(3):
            sequence = TokenSequence([i % 90 for i in range(SPLIT_ROWS + 5)])
            passed = runner.forward([sequence], [len(sequence.token_ids)]).logits
            logits.setdefault(with_maps, []).append(np.array(backend.sampler.to_host(passed)))
            runner.cache.free(sequence)
        used = {launch.name for launch in device.recorder.launches}
        assert device.replays and ("gemm_tma" in used) == with_maps and ("gemm_wgmma" in used) == (not with_maps)
    for ours in logits[True]:
        np.testing.assert_array_equal(ours, logits[True][0])
        np.testing.assert_allclose(ours, logits[False][0], atol=2e-2)


# ---- planted faults ---------------------------------------------------------------------------------------------

FAULTS = {
    "a stage is filled while products read it": ("wgmma_wait<1>();", ""),
    "a stage is filled before anybody has read it": (
        "ring.parity ^ 1)) watchdog.look();\n            mbarrier_t* full", "false)) {}\n            mbarrier_t* full",
    ),
    "the other block's warps are not waited for": ("CLUSTER * CONSUMERS / WARP", "CONSUMERS / WARP"),
    "only this block is told of a free stage": ("if (lane < CLUSTER) mbarrier_arrive(ring.empty + stage, lane);",
                                               "if (lane == 0) mbarrier_arrive(ring.empty + stage, cluster_rank());"),
    "blocks begin before all barriers are there": ("cluster_sync();  // all of its barriers are there",
                                                   "__syncthreads();"),
    "a block ends while another reaches into it": ("cluster_sync();  // nobody reaches into a block that", "//"),
    "the bytes of another's share are not waited for": ("mbarrier_expect(full, STAGE);",
                                                        "mbarrier_expect(full, STAGE - 2 * PART * ROW);"),
    "products read a step that has not come": ("wait(ring.full + ring.stage, ring.parity);", ""),
}  # fmt: skip
"""Lines of gemm_tma.cu, and what stands there instead"""


@pytest.mark.slow
@pytest.mark.parametrize("fault", [name if i < 2 else exhaustive(name) for i, name in enumerate(FAULTS)])
def test_a_planted_fault_is_found(
    fault: str, tmp_path: Path, checking_emulator: Emulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_fault("gemm_tma.cu", *FAULTS[fault], tmp_path, monkeypatch)
    if fault.startswith("a block ends"):  # which the copying thread's last waits prevent as well
        faulty = tmp_path / "cuda" / "gemm_tma.cu"
        source = faulty.read_text()
        assert source.count("i < STAGES; ++i, ring.advance()") == 1
        faulty.write_text(source.replace("i < STAGES; ++i, ring.advance()", "i < 0; ++i, ring.advance()"))
    with pytest.raises((AssertionError, LaunchError)):
        run(Kernels(checking_emulator, "float16"), problem("float16", 200, 648, 256), 256, 0)


@pytest.mark.slow
def test_it_waits_for_the_kernels_before_it(checking_emulator: Emulator) -> None:
    """Launched dependently, after a product that writes its x."""
    kernels, first, second = (
        Kernels(checking_emulator, "float16", dependent=True),
        *(problem("float16", 130, 64, 64, residual=False) for _ in range(2)),
    )
    checking_emulator.results = []
    x = np.zeros((130, 64), np.float16)
    gemm_wgmma(kernels, Product(first.x, first.weight, None, x), shape=(64, 2))
    assert gemm_tma(kernels, Product(x, second.weight, None, second.out), MAPS)
    expected = x.astype(np.float32) @ second.weight.T.astype(np.float32)
    np.testing.assert_allclose(second.out.astype(np.float32), expected, atol=2e-2)
