"""Attention of prompts by warpgroups, against the reference in float64 and against the kernel of other GPUs."""

from typing import Any

import numpy as np
import pytest

from minillm.backends.cuda import attention
from minillm.backends.cuda.attention import WARPGROUP_KEYS, WARPGROUP_QUERIES, has_warpgroups, warpgroup_bytes
from minillm.backends.cuda.emulator import Emulator, LaunchError
from minillm.backends.cuda.kernels import Kernels
from minillm.reference.attention import AttentionSpec

from .attention_cases import PADDED, Case, Lengths
from .launchers import ON_GPU, exhaustive, launcher
from .recording import Recorder
from .test_attention import MASKS

LENGTHS: dict[str, Lengths] = {
    "one tile": [(0, 128)],
    "several tiles": [(0, 300)],
    "chunked, padded": [(70, 130), PADDED, (250, 5), (1, 129)],
}


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("storage", ["float16", "bfloat16"])
def test_attention_by_warpgroups_is_the_reference(emulator: Emulator, storage: str, lengths: str) -> None:
    recorder = Recorder(emulator)
    case = Case(storage, LENGTHS[lengths], K=1)
    case.check(case.run(recorder))
    assert [launch.name for launch in recorder.launches] == ["attention_wgmma"]


@pytest.mark.parametrize(("D", "H", "K"), [(128, 4, 2), exhaustive(256, 2, 1), exhaustive(64, 11, 1)])
def test_heads_of_each_width(emulator: Emulator, D: int, H: int, K: int) -> None:
    case = Case("float16", [(3, 197)], D=D, H=H, K=K)
    case.check(case.run(emulator))


@pytest.mark.parametrize(
    "mask", ["window and sinks", *map(exhaustive, ("window", "slopes", "both", "cap", "window and cap", "sinks"))]
)
def test_masks_are_the_reference(emulator: Emulator, mask: str) -> None:
    case = Case("float16", [(0, 150), PADDED, (300, 140)], rows=1, **MASKS[mask])
    case.check(case.run(emulator))


def test_the_order_of_threads_is_nothing(any_emulator: Emulator) -> None:
    """Nor is what is read before it is there: four tiles, so that each place of two is filled again."""
    case = Case("float16", [(260, 128)], H=1, K=1)
    out = case.run(any_emulator, debug=True)
    case.check(out)
    assert (out == case.run(launcher(), debug=True)).all()


@pytest.mark.parametrize("P", [1, exhaustive(256)])
def test_any_size_of_page(emulator: Emulator, P: int) -> None:
    case = Case("float16", [(20, 140)], H=1, K=1, P=P)
    case.check(case.run(emulator))


def test_pages_before_the_window_are_not_looked_at(emulator: Emulator) -> None:
    case = Case("float16", [(600, 130)], H=1, K=1, window=70)
    expected, first = case.run(emulator), (601 - 70) // 128 * 128 // 16
    case.block_table[0, :first] = -5
    assert (case.run(emulator, debug=True) == expected).all()


@pytest.mark.skipif(ON_GPU, reason="ends the process on a GPU")
def test_a_debug_build_refuses_a_page_that_is_not_there(emulator: Emulator) -> None:
    case = Case("float16", [(0, 150)], H=1, K=1)
    case.block_table[0, 1] = len(case.keys)
    with pytest.raises(LaunchError, match=r"paged\.cuh:\d+: page is \d+, should be from 0 to below"):
        case.run(emulator, debug=True)


def test_queries_at_any_address(emulator: Emulator) -> None:
    """Rows of queries need not be aligned to 16 bytes: they come 4 at a time."""
    case = Case("float16", [(0, 130)], H=1, K=1)
    T, H, D = case.q.shape
    moved = np.zeros((T, H * D + 6), np.float16)[:, 2:][:, : H * D].reshape(T, H, D)
    moved[:] = case.q
    expected, case.q = case.run(emulator), moved
    assert (case.run(emulator) == expected).all()


def test_rows_beyond_the_last_sequence_are_left_alone(emulator: Emulator) -> None:
    case = Case("float16", [(0, 140), (2, 3)], H=1, K=1)
    case.query_starts[-1] -= 2
    case.context_lens[-1] -= 2
    out = case.run(emulator)
    assert np.isnan(out[-2:]).all() and np.isfinite(out[:-2]).all()


@pytest.mark.parametrize(
    ("architecture", "options", "new", "kernel"),
    [
        ("90", {}, 128, "attention_wgmma"),
        ("90", {}, 127, "attention_prefill"),
        ("80", {}, 128, "attention_prefill"),
        ("90", {"D": 16}, 128, "attention_prefill"),
        ("90", {"D": 64, "V": 48}, 128, "attention_prefill"),
    ],
)
def test_what_warpgroups_do_not_take_is_left_to_the_other_kernel(
    emulator: Emulator, architecture: str, options: dict[str, Any], new: int, kernel: str
) -> None:
    recorder = Recorder(emulator)
    recorder.architecture = architecture
    case = Case("float16", [(0, new)], H=1, K=1, **options)
    case.check(case.run(recorder))
    assert [launch.name for launch in recorder.launches] == [kernel]


def test_float32_has_no_warpgroups(emulator: Emulator) -> None:
    for storage, there in ("float16", True), ("bfloat16", True), ("float32", False):
        assert has_warpgroups(Kernels(emulator, storage), 64, 64, AttentionSpec(1.0)) == there


def test_a_block_fits_into_a_hopper() -> None:
    assert [warpgroup_bytes(D) // 1024 for D in WARPGROUP_KEYS] == [80, 160, 192]


@pytest.mark.slow
@pytest.mark.parametrize("lengths", [exhaustive([(0, 700)]), [(600, 300)]])
def test_contexts_as_in_use(emulator: Emulator, lengths: Lengths, monkeypatch: pytest.MonkeyPatch) -> None:
    """And as near to the kernel of other GPUs as to the reference."""
    case = Case("float16", lengths, H=2, K=1, D=128)
    out = case.run(emulator)
    case.check(out)
    monkeypatch.setattr(attention, "WARPGROUP_QUERIES", WARPGROUP_QUERIES * 100)
    other = case.run(emulator)
    case.check(other)
    assert np.abs(out.astype(np.float64) - other).max() < 4e-3
