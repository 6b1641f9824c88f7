"""The emulated GPU itself: what it computes is right, and faults planted in kernels are found, with their lines."""

import re
from typing import Any

import numpy as np
import pytest

from minillm.backends.cuda.emulator import SCHEDULES, Emulator, LaunchError, missing

from .launchers import ON_GPU
from .planted import DTYPES, NONE, kernel, line_of, plant, random

pytestmark = [
    pytest.mark.skipif(missing() is not None, reason=str(missing())),
    pytest.mark.skipif(ON_GPU, reason="is about the emulator; faults planted in kernels end the process on a GPU"),
]


def warpgroup(storage: str = "float16") -> tuple[Any, Any, Any]:
    """The matrices of the kernel `warpgroup`: a [64, 64], b [128, 64] and d [64, 128]."""
    a, b = random(64, 64, dtype=DTYPES[storage]), random(128, 64, seed=1, dtype=DTYPES[storage])
    return a, b, np.zeros((64, 128), np.float32)


class TestRight:
    """Kernels without a fault, under every schedule, plain and with checks."""

    def test_shared_memory_and_barriers(self, any_emulator: Emulator) -> None:
        x = random(3 * 64)
        out = np.zeros_like(x)
        kernel(any_emulator, "reverse_twice")((3,), (64,), (out, x, NONE))
        np.testing.assert_array_equal(out, x)

    def test_a_warp_barrier_orders_memory(self, any_emulator: Emulator) -> None:
        x = random(32)
        out = np.zeros_like(x)
        kernel(any_emulator, "reverse_warp")((1,), (32,), (out, x, NONE))
        np.testing.assert_array_equal(out, x[::-1])

    def test_sum_over_a_block(self, any_emulator: Emulator) -> None:
        x = random(128)
        out = np.zeros_like(x)
        kernel(any_emulator, "sum")((1,), (128,), (out, x, NONE))
        assert len(set(out.tolist())) == 1
        assert out[0] == pytest.approx(x.sum(dtype=np.float64), abs=1e-5)

    @pytest.mark.parametrize("storage", ["float16", "bfloat16"])
    def test_asynchronous_copy(self, any_emulator: Emulator, storage: str) -> None:
        x = random(8 * 64, dtype=DTYPES[storage])
        out = np.zeros_like(x)
        kernel(any_emulator, "copy_async", storage)((1,), (64,), (out, x, NONE), shared_mem=16 * 64)
        np.testing.assert_array_equal(out.reshape(64, 8), x.reshape(64, 8)[::-1])

    @pytest.mark.parametrize("storage", ["float16", "bfloat16"])
    @pytest.mark.parametrize("transposed", [0, 1])
    def test_tensor_core_tile(self, any_emulator: Emulator, storage: str, transposed: int) -> None:
        a, b = random(16, 16, dtype=DTYPES[storage]), random(8, 16, seed=1, dtype=DTYPES[storage])
        d = np.zeros((16, 8), np.float32)
        kernel(any_emulator, "tile", storage)((1,), (32,), (d, a, b, np.int32(transposed)))
        np.testing.assert_allclose(d, 1 + a.astype(np.float64) @ b.astype(np.float64).T, atol=1e-5)

    @pytest.mark.parametrize("storage", ["float16", "bfloat16"])
    def test_products_of_a_warpgroup(self, any_emulator: Emulator, storage: str) -> None:
        a, b, d = warpgroup(storage)
        kernel(any_emulator, "warpgroup", storage)((1,), (128,), (d, a, b, NONE), shared_mem=192 * 128)
        np.testing.assert_allclose(d, 1 + a.astype(np.float64) @ b.astype(np.float64).T, atol=1e-4)

    def test_atomics_over_blocks(self, any_emulator: Emulator) -> None:
        total = np.zeros(1, np.int32)
        kernel(any_emulator, "count")((5, 2, 3), (8, 4, 2), (total, NONE))
        assert total[0] == 5 * 2 * 3 * 64

    def test_warp_operations(self, any_emulator: Emulator) -> None:
        x = np.random.default_rng(0).permutation(1000)[:32].astype(np.int32)
        out = np.zeros((10, 32), np.int32)
        kernel(any_emulator, "warp_operations")((1,), (32,), (out, x))
        lanes = np.arange(32)
        expected = [
            x[lanes * 7 % 32],
            x[lanes ^ 5],
            x[np.where(lanes < 3, lanes, lanes - 3)],
            x[np.where(lanes > 28, lanes, lanes + 3)],
            x[lanes // 8 * 8 + 3],
            x[np.where(lanes % 8 > 4, lanes, lanes + 3)],
            np.full(32, ((x & 1).astype(np.uint64) << lanes.astype(np.uint64)).sum().astype(np.uint32).view(np.int32)),
            np.full(32, 2),
            np.full(32, x.sum()),
            x[np.where(lanes < 16, lanes ^ 1, lanes ^ 2)],
        ]
        np.testing.assert_array_equal(out, expected)

    def test_views_with_strides(self, any_emulator: Emulator) -> None:
        x, out = random(3, 40), np.zeros((3, 40), np.float32)
        kernel(any_emulator, "twice")((3,), (32,), (out[:, 2:7], x[:, 1:6], np.int32(5), np.int32(40), NONE))
        np.testing.assert_array_equal(out[:, 2:7], 2 * x[:, 1:6])
        assert not out[:, :2].any()
        assert not out[:, 7:].any()

    def test_arrays_that_overlap_stay_together(self, any_emulator: Emulator) -> None:
        both = random(2, 64)
        before = both.copy()
        kernel(any_emulator, "twice")((2,), (32,), (both[:, 32:], both[:, :32], np.int32(32), np.int32(64), NONE))
        np.testing.assert_array_equal(both[:, 32:], 2 * before[:, :32])
        np.testing.assert_array_equal(both[:, :32], before[:, :32])


class TestRaces:
    """A missing barrier: the checks find it under any schedule, and without them some schedule gives wrong numbers."""

    @pytest.mark.parametrize("schedule", SCHEDULES)
    @pytest.mark.parametrize(
        ("fault", "at", "other"),
        [
            ("MISSING_BARRIER", "buffer[here] = x[first + here];", "float once = buffer[there];"),
            ("MISSING_SECOND_BARRIER", "buffer[here] = once;", "float once = buffer[there];"),
        ],
    )
    def test_missing_barrier_of_a_block(self, schedule: str, fault: str, at: str, other: str) -> None:
        x = random(64)
        with pytest.raises(LaunchError, match="race on shared memory") as error:
            kernel(Emulator(schedule, checks=True), "reverse_twice")((1,), (64,), (np.zeros_like(x), x, plant(fault)))
        assert set(re.findall(r"planted\.cu:(\d+)", str(error.value))) == {str(line_of(at)), str(line_of(other))}

    @pytest.mark.parametrize("fault", ["MISSING_BARRIER", "MISSING_SECOND_BARRIER"])
    def test_schedules_without_checks_find_it_too(self, fault: str) -> None:
        x = random(64)
        wrong = []
        for schedule in SCHEDULES:
            out = np.zeros_like(x)
            kernel(Emulator(schedule), "reverse_twice")((1,), (64,), (out, x, plant(fault)))
            if not np.array_equal(out, x):
                wrong.append(schedule)
        assert wrong

    def test_a_shuffle_is_no_barrier_for_memory(self, checking_emulator: Emulator) -> None:
        x = random(32)
        with pytest.raises(LaunchError, match="race on shared memory"):
            kernel(checking_emulator, "reverse_warp")((1,), (32,), (np.zeros_like(x), x, plant("MISSING_WARP_BARRIER")))

    def test_blocks_race_for_global_memory(self, checking_emulator: Emulator) -> None:
        with pytest.raises(LaunchError, match=r"race on global memory.*another block"):
            kernel(checking_emulator, "count")((4,), (32,), (np.zeros(1, np.int32), plant("PLAIN_ADD")))

    @pytest.mark.parametrize(
        ("fault", "message"),
        [
            ("NOT_WAITED_FOR", "that a cp.async is still writing"),
            ("NEVER_WAITED_FOR", "that a cp.async is still writing"),
            ("NO_BARRIER_AFTER_WAIT", "race on shared memory|that a cp.async is still writing"),
        ],
    )
    def test_asynchronous_copies(self, checking_emulator: Emulator, fault: str, message: str) -> None:
        x = random(8 * 64, dtype=np.float16)
        with pytest.raises(LaunchError, match=message):
            run = kernel(checking_emulator, "copy_async", "float16")
            run((1,), (64,), (np.zeros_like(x), x, plant(fault)), shared_mem=16 * 64)

    def test_asynchronous_copies_without_checks(self) -> None:
        x = random(8 * 64, dtype=np.float16)
        out = np.zeros_like(x)
        run = kernel(Emulator(), "copy_async", "float16")
        run((1,), (64,), (out, x, plant("NOT_WAITED_FOR")), shared_mem=16 * 64)
        assert np.isnan(out).any()
        with pytest.raises(LaunchError, match="never waited for"):
            run((1,), (64,), (out, x, plant("NEVER_WAITED_FOR")), shared_mem=16 * 64)


class TestProductsOfAWarpgroup:
    """wgmma: what its operands and its registers want, and by what the checks see that it is missing."""

    @pytest.mark.parametrize(
        ("fault", "message"),
        [
            ("NO_REGISTER_FENCE", r"wgmma\.cuh:\d+: wgmma without wgmma\.fence"),
            ("PRODUCT_NEVER_WAITED_FOR", "a thread ended with this wgmma never waited for"),
            ("OTHER_PRODUCTS", "warp 3 issued other products than the first of its warpgroup"),
            ("BETWEEN_TILES", "begins at a multiple of 1024"),
        ],
    )
    def test_found_in_any_case(self, any_emulator: Emulator, fault: str, message: str) -> None:
        a, b, d = warpgroup()
        with pytest.raises(LaunchError, match=message):
            kernel(any_emulator, "warpgroup", "float16")((1,), (128,), (d, a, b, plant(fault)), shared_mem=192 * 128)

    @pytest.mark.parametrize(
        ("fault", "message"),
        [
            ("NO_PROXY_FENCE", r"wgmma reads what thread \d+ wrote without a fence\.proxy\.async since"),
            ("WRITES_WHAT_A_PRODUCT_READS", "writes to shared memory that a wgmma is still reading"),
        ],
    )
    def test_found_by_the_checks(self, checking_emulator: Emulator, fault: str, message: str) -> None:
        a, b, d = warpgroup()
        run = kernel(checking_emulator, "warpgroup", "float16")
        with pytest.raises(LaunchError, match=message):
            run((1,), (128,), (d, a, b, plant(fault)), shared_mem=192 * 128)

    @pytest.mark.parametrize("fault", ["NOT_SWIZZLED", "PRODUCT_NOT_WAITED_FOR", "WRITES_WHAT_A_PRODUCT_READS"])
    def test_wrong_numbers(self, emulator: Emulator, fault: str) -> None:
        a, b, d = warpgroup()
        kernel(emulator, "warpgroup", "float16")((1,), (128,), (d, a, b, plant(fault)), shared_mem=192 * 128)
        assert np.isnan(d).all() == (fault == "PRODUCT_NOT_WAITED_FOR")
        assert not np.allclose(d, 1 + a.astype(np.float64) @ b.astype(np.float64).T, atol=1e-2)

    @pytest.mark.parametrize("storage", ["float16", "bfloat16"])
    def test_registers_and_columns(self, any_emulator: Emulator, storage: str) -> None:
        a, b = random(64, 16, dtype=DTYPES[storage]), random(16, 128, seed=1, dtype=DTYPES[storage])
        d = np.zeros((64, 128), np.float32)
        run = kernel(any_emulator, "warpgroup_registers", storage)
        run((1,), (128,), (d, a, b, NONE), shared_mem=4096)
        np.testing.assert_allclose(d, a.astype(np.float64) @ b.astype(np.float64), atol=1e-4)
        with pytest.raises(LaunchError, match="registers of A changed while this wgmma was under way"):
            run((1,), (128,), (d, a, b, plant("CHANGES_REGISTERS")), shared_mem=4096)

    @pytest.mark.parametrize("fault", ["NOT_SWIZZLED", "WRONG_INDEX"])
    def test_wrong_columns(self, emulator: Emulator, fault: str) -> None:
        a, b, d = random(64, 16, dtype=np.float16), random(16, 128, seed=1, dtype=np.float16), random(64, 128)
        kernel(emulator, "warpgroup_registers", "float16")((1,), (128,), (d, a, b, plant(fault)), shared_mem=4096)
        assert not np.allclose(d, a.astype(np.float64) @ b.astype(np.float64), atol=1e-2)

    def test_columns_without_a_fence(self, checking_emulator: Emulator) -> None:
        a, b, d = random(64, 16, dtype=np.float16), random(16, 128, seed=1, dtype=np.float16), random(64, 128)
        run = kernel(checking_emulator, "warpgroup_registers", "float16")
        with pytest.raises(LaunchError, match=r"without a fence\.proxy\.async since"):
            run((1,), (128,), (d, a, b, plant("NO_PROXY_FENCE")), shared_mem=4096)


class TestMemory:
    @pytest.mark.parametrize(
        ("fault", "message"),
        [
            ("BEYOND_THE_END", r"the kernel writes to memory beyond the end of argument 0 \(1 bytes away\)"),
            ("READ_BEYOND_THE_END", r"the kernel reads memory beyond the end of argument 1 \(1 bytes away\)"),
        ],
    )
    def test_outside_an_argument(self, checking_emulator: Emulator, fault: str, message: str) -> None:
        x, out = random(2, 20), np.zeros((2, 20), np.float32)
        with pytest.raises(LaunchError, match=message) as error:
            kernel(checking_emulator, "twice")((2,), (32,), (out, x, np.int32(20), np.int32(20), plant(fault)))
        assert f" planted.cu:{line_of('to[min(i')}: " in str(error.value)

    def test_between_the_rows_of_a_view(self, checking_emulator: Emulator) -> None:
        x, out = random(2, 30), np.zeros((2, 30), np.float32)
        with pytest.raises(LaunchError, match="writes to argument 0 where it may not"):
            kernel(checking_emulator, "twice")(
                (2,), (32,), (out[:, :20], x, np.int32(20), np.int32(30), plant("BETWEEN_ROWS"))
            )

    def test_through_a_null_pointer(self, emulator: Emulator) -> None:
        x, out = random(2, 20), np.zeros((2, 20), np.float32)
        with pytest.raises(LaunchError, match=r"planted\.cu:\d+: the kernel reads .*block \(0, 0, 0\)"):
            kernel(emulator, "twice")((2,), (32,), (out, x, np.int32(20), np.int32(20), plant("THROUGH_NULL")))
        kernel(emulator, "twice")(
            (2,), (32,), (out, x, np.int32(20), np.int32(20), NONE)
        )  # and goes on as if nothing was
        np.testing.assert_array_equal(out, 2 * x)

    def test_beyond_dynamic_shared_memory(self, emulator: Emulator) -> None:
        x = random(64)
        with pytest.raises(LaunchError, match="wrote byte 256 of dynamic shared memory; the launch gave it 256 bytes"):
            run = kernel(emulator, "through_shared")
            run((1,), (32,), (np.zeros_like(x), x, np.int32(64), plant("TOO_MUCH_SHARED")), shared_mem=256)

    def test_outside_a_shared_array(self, checking_emulator: Emulator) -> None:
        x = random(64)
        with pytest.raises(LaunchError, match=f"planted.cu:{line_of('last[numbers] = 1')}: index 64 is outside"):
            run = kernel(checking_emulator, "through_shared")
            run((1,), (32,), (np.zeros_like(x), x, np.int32(64), plant("OUTSIDE_SHARED_ARRAY")), shared_mem=256)

    def test_misaligned_load(self, checking_emulator: Emulator) -> None:
        x = random(128)
        with pytest.raises(LaunchError, match="byte 12 of argument 1 is not aligned to 16 bytes"):
            kernel(checking_emulator, "copy_wide")((1,), (32,), (np.zeros_like(x), x, plant("MISALIGNED")))

    def test_shared_memory_begins_as_nan(self, emulator: Emulator) -> None:
        x = random(32)
        out = np.zeros_like(x)
        kernel(emulator, "sum")((1,), (32,), (out, x, plant("NEVER_WRITTEN")))
        assert np.isnan(out).all()

    def test_index_checks_of_a_debug_build(self, emulator: Emulator) -> None:
        x = random(64)
        arguments = (np.zeros_like(x), x, np.int32(64), plant("WRONG_INDEX"))
        run = kernel(emulator, "through_shared", "float32", "-DMINILLM_CUDA_DEBUG")
        with pytest.raises(LaunchError, match=r"planted\.cu:\d+: numbers is 64, should be from 0 to below 32"):
            run((1,), (32,), arguments, shared_mem=256)
        kernel(emulator, "through_shared")((1,), (32,), arguments, shared_mem=256)  # not in another


class TestDependentLaunches:
    """A kernel that begins before the one before it has ended may not touch results, or what that one still reads."""

    def follow(self, fault: str, *, dependent: bool = True) -> Any:
        checking = Emulator(checks=True)
        x, y, weight, out = random(32), np.zeros(32, np.float32), np.full(1, 3, np.float32), np.zeros(32, np.float32)
        checking.results = [] if dependent else None
        kernel(checking, "twice")((1,), (32,), (y, x, np.int32(32), np.int32(32), NONE))
        run = kernel(checking, "follows", "float32", "-DDEPENDENT=1")
        run((1,), (32,), (out, y, weight, plant(fault)), shared_mem=512)
        return out, 6 * x

    def test_a_parameter_may_be_read_early(self) -> None:
        np.testing.assert_array_equal(*self.follow("NONE"))

    @pytest.mark.parametrize(
        ("fault", "message"),
        [
            ("READ_BEFORE_THE_WAIT", r"planted\.cu:\d+: .*reads a result of a kernel before this one"),
            ("COPIED_BEFORE_THE_WAIT", "reads a result of a kernel before this one"),
            ("WRITTEN_BEFORE_THE_WAIT", "writes before it has waited for the kernels before this one"),
            ("ONE_THREAD_WAITS", "reads a result of a kernel before this one"),
            ("NO_WAIT_FOR_RESULTS", "no thread waits for the kernels before this one"),
        ],
    )
    def test_what_comes_too_early(self, fault: str, message: str) -> None:
        with pytest.raises(LaunchError, match=message):
            self.follow(fault)
        if fault != "COPIED_BEFORE_THE_WAIT":
            self.follow(fault, dependent=False)


class TestWaiting:
    @pytest.mark.parametrize(
        ("fault", "message"),
        [
            ("DIVERGENT_BARRIER", r"different barriers: here, and at planted\.cu:\d+"),
            (
                "ENDLESS_BARRIER",
                r"waits for ever: 2 threads in __syncthreads \(planted\.cu:\d+\), 62 threads for lanes",
            ),
            ("MISSING_LANE", "lanes of one warp meet in different operations"),
            ("TWO_PLACES", "lanes of one warp meet in different operations"),
        ],
    )
    def test_threads_that_do_not_meet(self, any_emulator: Emulator, fault: str, message: str) -> None:
        x = random(64)
        with pytest.raises(LaunchError, match=message):
            kernel(any_emulator, "sum")((1,), (64,), (np.zeros_like(x), x, plant(fault)))
