"""Cooperative launches and bulk copies on the emulated GPU: right without a fault, and each planted fault is found."""

from typing import Any

import numpy as np
import pytest

from minillm.backends.cuda.emulator import SCHEDULES, Emulator, LaunchError, missing
from minillm.backends.cuda.kernels import COOPERATIVE_OPTION

from .launchers import ON_GPU
from .planted import NONE, kernel, plant, random

pytestmark = [
    pytest.mark.skipif(missing() is not None, reason=str(missing())),
    pytest.mark.skipif(ON_GPU, reason="is about the emulator; faults planted in kernels end the process on a GPU"),
    pytest.mark.slow,
]


def neighbours(
    emulator: Emulator, fault: Any = NONE, *options: str, blocks: int = 3, times: int = 1
) -> tuple[Any, Any]:
    """The result of the kernel `neighbours` as it is launched, and as it should be."""
    x = random(blocks, 64)
    out, between = np.zeros_like(x), np.full_like(x, np.nan)
    counter = np.zeros(1, np.uint64)
    run = kernel(emulator, "neighbours", "float32", *(options or (COOPERATIVE_OPTION,)))
    for _ in range(times):
        counter[:] = 0
        run((blocks,), (64,), (out, between, x, counter, fault))
    return out, 2 * (np.roll(x, -1, 0) + 1)


def ring(emulator: Emulator, fault: Any = NONE, pieces: int = 7) -> tuple[Any, Any]:
    """The same of the kernel `ring`."""
    x = random(pieces, 128)
    out = np.zeros(128, np.float32)
    kernel(emulator, "ring")((1,), (32,), (out, x, np.int32(pieces), fault), shared_mem=1040)
    return out, sum(x[1:], x[0])


def test_blocks_that_wait_for_each_other(any_emulator: Emulator) -> None:
    """Also again after a launch, and their __shared__ variables are not one another's."""
    result, expected = neighbours(any_emulator, times=2)
    np.testing.assert_array_equal(result, expected)


def test_bulk_copies_through_a_ring(any_emulator: Emulator) -> None:
    result, expected = ring(any_emulator)
    np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_block_that_does_not_wait_reads_too_early(schedule: str) -> None:
    result, expected = neighbours(Emulator(schedule), plant("NO_WAIT_FOR_BLOCKS"))
    assert np.isnan(result).any()
    assert (result == expected)[~np.isnan(result)].all()


def test_a_block_that_is_not_counted_ends_by_the_watchdog() -> None:
    """And the next launch is right."""
    with pytest.raises(LaunchError, match=r"cooperative\.cuh:\d+: the kernel stopped itself by __trap"):
        neighbours(Emulator(), plant("BLOCK_NOT_COUNTED"))
    result, expected = neighbours(Emulator())
    np.testing.assert_array_equal(result, expected)


def test_blocks_one_after_another_cannot_wait_for_each_other() -> None:
    with pytest.raises(LaunchError, match="__trap"):
        neighbours(Emulator(), NONE, "-DMINILLM_STORAGE=32")


def test_more_blocks_than_run_together() -> None:
    with pytest.raises(LaunchError, match="at most 8 blocks"):
        neighbours(Emulator(), blocks=9)


def test_a_copy_that_nobody_waits_for_has_not_landed() -> None:
    assert np.isnan(ring(Emulator(), plant("NO_WAIT_FOR_COPY"))[0]).any()
    with pytest.raises(LaunchError, match="is still writing"):
        ring(Emulator(checks=True), plant("NO_WAIT_FOR_COPY"))


def test_a_copy_that_is_under_way_when_the_block_ends() -> None:
    with pytest.raises(LaunchError, match="the block ends with this bulk copy never waited for"):
        ring(Emulator(), plant("COPY_NEVER_AWAITED"))


def test_a_slot_that_is_filled_before_it_has_been_read() -> None:
    assert np.isnan(ring(Emulator(), plant("SLOT_TAKEN_TOO_EARLY"))[0]).any()


def test_a_copy_of_odd_bytes() -> None:
    with pytest.raises(LaunchError, match=r":\d+: a bulk copy is of 16 bytes and multiples.*520 bytes"):
        ring(Emulator(), plant("MORE_BYTES_THAN_EXPECTED"))
