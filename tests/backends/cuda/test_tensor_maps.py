"""Tensor maps, and copies of boxes to the blocks of a cluster on the emulated GPU: each planted fault is found."""

import ctypes
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from minillm.backends.cuda import tensor_maps
from minillm.backends.cuda.emulator import SCHEDULES, Emulator, LaunchError, missing
from minillm.backends.cuda.emulator.tensor_map import encode
from minillm.backends.cuda.kernels import STORAGE
from minillm.backends.cuda.tensor_maps import Tensor, TensorMaps
from minillm.errors import DeviceError

from .launchers import ON_GPU
from .planted import NONE, SOURCE, plant

needs_emulator = pytest.mark.skipif(missing() is not None or ON_GPU, reason="is about the emulator")


def address(array: Any) -> int:
    return int(array.__array_interface__["data"][0])


MAPS = TensorMaps(address, encode)


def boxes(emulator: Emulator, fault: Any = NONE, x: int = 8, y: int = 3, clusters: int = 2) -> tuple[Any, Any]:
    """What the kernel `boxes` of planted.cu writes, and what it should."""
    matrix = np.arange(20 * 104, dtype=np.uint16).reshape(20, 104)[:17, :100]
    module = emulator.module(SOURCE, (f"-DMINILLM_STORAGE={STORAGE['float32']}",))
    module.cluster = 2
    out = np.zeros((2 * clusters, 16, 64), np.uint16)
    numbers = np.int32(x), np.int32(y), fault
    arguments = out, encode(Tensor(address(matrix), (100, 17), (208,), (64, 8))), *numbers
    module.get_function("boxes")((2 * clusters,), (32,), arguments, shared_mem=4112)
    padded = np.zeros((64, 256), np.uint16)
    padded[:17, :100] = matrix
    return out, np.broadcast_to(padded[y : y + 16, x : x + 64], out.shape)


@needs_emulator
@pytest.mark.parametrize(("x", "y"), [(0, 0), (8, 3), (56, 9)])
def test_boxes_for_both_blocks_of_a_cluster(x: int, y: int, any_emulator: Emulator) -> None:
    """Zeros beyond the matrix's last row, and beyond its last column within 16 bytes."""
    result, expected = boxes(any_emulator, x=x, y=y)
    np.testing.assert_array_equal(result, expected)


@needs_emulator
@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("NO_BARRIER_BEFORE", r"there is no mbarrier here: block \d has not initialised it"),
        ("NO_BARRIER_AFTER", r"reaches into the shared memory of block \d of the cluster, which has ended"),
        ("BOX_TO_ONE_BLOCK", "waits for ever: a thread looks again and again"),
        ("FEWER_BYTES_EXPECTED", "waits for ever: a thread looks again and again"),
        ("BOX_AT_AN_ODD_PLACE", "from a multiple of 1024 bytes of shared memory on"),
    ],
)
def test_faults_of_clusters_are_found(fault: str, message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        for schedule in SCHEDULES:
            boxes(Emulator(schedule), plant(fault))
    result, expected = boxes(Emulator())
    np.testing.assert_array_equal(result, expected)


@needs_emulator
@pytest.mark.slow
def test_a_grid_that_is_no_whole_number_of_clusters() -> None:
    module = Emulator().module(SOURCE, (f"-DMINILLM_STORAGE={STORAGE['float32']}",))
    module.cluster = 2
    matrix = np.zeros((8, 64), np.uint16)
    arguments = matrix, MAPS.of_rows(matrix, 8), np.int32(0), np.int32(0), NONE
    with pytest.raises(LaunchError, match="whole clusters"):
        module.get_function("boxes")((3,), (32,), arguments, shared_mem=4112)


# ---- which maps there are ---------------------------------------------------------------------------------------


def test_a_matrix_whose_rows_are_not_pieces_of_16_bytes_has_no_map() -> None:
    whole = np.zeros((24, 72), np.uint16)
    assert MAPS.of_rows(whole, 8) is not None and MAPS.of_rows(whole[:, :60], 8) is not None
    assert MAPS.of_rows(whole[:, 4:], 8) is None, "begins between two pieces"
    assert MAPS.of_rows(np.zeros((24, 60), np.uint16), 8) is None, "rows end between two"
    assert MAPS.of_outputs(whole, 64) is not None
    assert MAPS.of_outputs(whole[:21], 64) is None, "outputs that are no eights"


def test_what_the_driver_would_refuse() -> None:
    good = Tensor(0x1000, (64, 8, 4), (128, 1024), (64, 8, 1))
    encode(good)
    for bad in (
        good._replace(address=0x1008),
        good._replace(strides=(100, 1024)),
        good._replace(strides=(1024, 128)),
        good._replace(box=(64, 8, 0)),
        good._replace(box=(64, 8)),
        good._replace(sizes=(64, 8, 4, 2, 2)),
    ):
        with pytest.raises(ValueError, match="Tensor"):
            encode(bad)


def test_a_map_is_made_once_for_each_place() -> None:
    made: list[Tensor] = []

    def note(tensor: Tensor) -> Any:
        made.append(tensor)
        return encode(tensor)

    maps, x = TensorMaps(address, note), np.zeros((16, 64), np.uint16)
    assert maps.of_rows(x, 8) is maps.of_rows(x[:], 8)
    assert maps.of_rows(x[8:], 8) is not maps.of_rows(x, 16)
    assert [tensor.box for tensor in made] == [(64, 8), (64, 8), (64, 16)]


def test_the_driver_is_given_sizes_strides_and_box(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}

    def tiled(place: Any, kind: Any, rank: Any, at: Any, sizes: Any, strides: Any, box: Any, *more: Any) -> int:
        ones, *how = more
        given.update(place=place.value % 64, kind=kind.value, rank=rank.value, at=at.value, sizes=[*sizes])
        given.update(strides=[*strides], box=[*box], ones=[*ones], how=[one.value for one in how])
        ctypes.memset(place.value, 7, 128)
        return status

    monkeypatch.setattr(tensor_maps.ctypes, "CDLL", lambda name: SimpleNamespace(cuTensorMapEncodeTiled=tiled))
    status = 0
    made = tensor_maps.encode_by_driver(Tensor(0x1000, (100, 2, 4, 3), (208, 416, 1664), (64, 2, 1, 16)))
    assert made.shape == () and made.tobytes() == b"\7" * 128
    # CU_TENSOR_MAP_DATA_TYPE_UINT16, no interleave, _SWIZZLE_128B, _L2_PROMOTION_L2_256B, zeros beyond the end
    named = ["place", "kind", "rank", "at", "sizes", "strides", "box", "ones", "how"]
    values = 0, 1, 4, 0x1000, [100, 2, 4, 3], [208, 416, 1664], [64, 2, 1, 16], [1, 1, 1, 1], [0, 3, 3, 0]
    assert given == dict(zip(named, values, strict=True))
    status = 1
    with pytest.raises(DeviceError, match=r"refuses .* \(CUresult 1\): leave MINILLM_CUDA_TMA unset"):
        tensor_maps.encode_by_driver(Tensor(0x1000, (100, 17), (208,), (64, 8)))


def test_a_driver_without_maps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_maps.ctypes, "CDLL", lambda name: SimpleNamespace())
    with pytest.raises(DeviceError, match=r"^MINILLM_CUDA_TMA=1 needs a driver with cuTensorMapEncodeTiled [^\n]*$"):
        tensor_maps.encode_by_driver(Tensor(0x1000, (100, 17), (208,), (64, 8)))
