"""What warps ask of memory: counted from a log, and from a kernel's loads on the emulator."""

from pathlib import Path

import numpy as np
import pytest

from minillm.backends.cuda.emulator import Emulator, LaunchError, Traffic, count_traffic, missing
from minillm.backends.cuda.emulator.traffic import ACCESS, COUNTED, AccessLog

KERNEL = """
extern "C" __global__ void copy(const float4* from, float* to, const float* unread, int step) {
    __shared__ float4 own[64];
    own[threadIdx.x] = from[threadIdx.x * step];
    to[blockIdx.x * 64 + threadIdx.x] = own[threadIdx.x].y;
}
"""


def log_of(*loads: tuple[int, int, int, int]) -> AccessLog:
    """Loads of (instruction, thread, offset, bytes), in the order of their doing."""
    log = np.zeros(len(loads), ACCESS)
    for name, column in zip(("instruction", "thread", "offset", "bytes"), zip(*loads, strict=True), strict=True):
        log[name] = column
    return log


def test_loads_of_a_warp_by_one_instruction_are_one_request() -> None:
    assert count_traffic(log_of(*((7, lane, 4 * lane, 4) for lane in range(32)))) == Traffic(1, 4, 1, 128)
    assert count_traffic(log_of(*((7, lane, 512 * lane, 4) for lane in range(32)))) == Traffic(1, 32, 32, 128)
    assert count_traffic(log_of(*((7, lane, 4 * lane, 4) for lane in range(64)))) == Traffic(2, 8, 2, 256)


def test_a_loop_makes_a_request_each_time_round_whoever_runs_first() -> None:
    rounds = [(7, lane, 128 * k + 4 * lane, 4) for k in range(3) for lane in range(32)]
    by_thread = sorted(rounds, key=lambda load: load[1])
    assert count_traffic(log_of(*rounds)) == count_traffic(log_of(*by_thread)) == Traffic(3, 12, 3, 384)


def test_a_load_across_a_border_takes_two_sectors_and_the_same_bytes_count_once() -> None:
    assert count_traffic(log_of((7, 0, 24, 16))) == Traffic(1, 2, 1, 16)
    assert count_traffic(log_of((7, 0, 0, 4), (7, 1, 0, 4))) == Traffic(1, 1, 1, 4)
    assert count_traffic(log_of((7, 0, 0, 4), (8, 0, 0, 4))) == Traffic(2, 2, 2, 8)
    assert count_traffic(log_of((7, 0, 0, 4))[:0]) == Traffic(0, 0, 0, 0)


@pytest.mark.slow
@pytest.mark.parametrize(("step", "sectors", "lines"), [(1, 32, 8), (2, 64, 16), (8, 64, 64)])
def test_a_kernels_loads_and_stores_are_counted_by_argument(
    step: int, sectors: int, lines: int, tmp_path: Path
) -> None:
    if reason := missing():
        pytest.skip(reason)
    path = tmp_path / "copy.cu"
    path.write_text(KERNEL)
    emulator = Emulator("random", checks=True)
    kernel = emulator.module(path, COUNTED).get_function("copy")
    from_, to = np.arange(2048, dtype="f").reshape(512, 4), np.zeros(128, "f")
    emulator.log_capacity = 64
    with pytest.raises(LaunchError, match="256 accesses to log, expected 64"):
        kernel((2,), (64,), (from_, to, from_[:0].copy(), np.int32(step)))
    emulator.log_capacity = 1024
    kernel((2,), (64,), (from_, to, np.zeros(3, "f"), np.int32(step)))
    assert count_traffic(emulator.accesses[0]) == Traffic(4, 2 * sectors, 2 * lines, 2048)
    assert count_traffic(emulator.accesses[1]) == Traffic(4, 16, 4, 512)
    assert emulator.accesses[1]["is_write"].all() and not len(emulator.accesses[2])
    assert (to[:64] == from_[::step, 1][:64]).all()
