"""Checks of the emulated GPU at a launch: arguments, sizes, names, sources."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minillm.backends.cuda.emulator import BuildError, Emulator, LaunchError

from .launchers import ON_GPU
from .planted import NONE, kernel, random

pytestmark = pytest.mark.skipif(ON_GPU, reason="is about the emulator")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 1, 2), "takes 5 arguments, 4 were given"),
        ((0, 1, np.int32(1), 5), r"argument 3 \(i4\): a Python int was given; CuPy passes it as 8 bytes"),
        ((0, 1, np.int32(1), np.int64(5)), r"argument 3 \(i4\): a number of type int64"),
        ((0, 1, np.int32(1), np.float32(5)), r"argument 3 \(i4\): a number of type float32"),
        ((0, 1, 0, np.int32(5)), r"argument 2 \(i4\): an array was given for a number"),
        ((0, np.zeros(8), np.int32(1), np.int32(1)), r"argument 1 \(const \*f4\): an array of float64"),
        ((0, np.zeros(8, np.float16), np.int32(1), np.int32(1)), r"argument 1 \(const \*f4\): an array of float16"),
        ((0, np.uintp(8), np.int32(1), np.int32(1)), "a pointer is an array, or np.uintp"),
    ],
)
def test_arguments_are_held_to_the_signature(emulator: Emulator, arguments: tuple[Any, ...], message: str) -> None:
    arrays = [np.zeros(8, np.float32), np.zeros(8, np.float32), np.zeros(8, np.float32)]
    given = tuple(arrays[a] if isinstance(a, int) and a < 3 else a for a in arguments)
    with pytest.raises(TypeError, match=message):
        kernel(emulator, "twice")((1,), (32,), (*given, NONE))


def test_an_array_that_must_not_be_written(emulator: Emulator) -> None:
    x = random(32)
    out = np.zeros_like(x)
    out.flags.writeable = x.flags.writeable = False
    with pytest.raises(TypeError, match=r"argument 0.*must not be written"):
        kernel(emulator, "reverse_warp")((1,), (32,), (out, x, NONE))


@pytest.mark.parametrize(
    ("grid", "block", "shared", "message"),
    [
        ((0,), (32,), 0, "the grid must be"),
        ((1, 70000), (32,), 0, "the grid must be"),
        ((1,), (2048,), 0, "from 1 to 1024 threads"),
        ((1,), (33,), 0, "multiple of 32"),
        ((1,), (32,), 50000, "allowed are 49152"),
    ],
)
def test_impossible_launches(emulator: Emulator, grid: Any, block: Any, shared: int, message: str) -> None:
    x = random(32)
    with pytest.raises(LaunchError, match=message):
        kernel(emulator, "reverse_warp")(grid, block, (np.zeros_like(x), x, NONE), shared_mem=shared)


def test_more_shared_memory_when_told(emulator: Emulator) -> None:
    x = random(20000)
    out = np.zeros_like(x)
    run = kernel(emulator, "through_shared")
    assert run.max_dynamic_shared_size_bytes == 48 * 1024
    run.max_dynamic_shared_size_bytes = 80000
    run((1,), (1024,), (out, x, np.int32(x.size), NONE), shared_mem=80000)
    np.testing.assert_array_equal(out, x)
    with pytest.raises(LaunchError, match="at most 232448"):
        run.max_dynamic_shared_size_bytes = 300000


def test_names(emulator: Emulator, tmp_path: Path) -> None:
    with pytest.raises(AttributeError, match="has no kernel tile; it has reverse_twice"):
        kernel(emulator, "tile")
    (tmp_path / "broken.cu").write_text('extern "C" __global__ void broken(float* x) {\n    x[0] = y;\n}\n')
    with pytest.raises(BuildError, match=r"broken\.cu:2:\d+: error"):
        emulator.module(tmp_path / "broken.cu")


@pytest.mark.slow
def test_an_edited_header_is_noticed(emulator: Emulator, tmp_path: Path) -> None:
    (tmp_path / "answer.cu").write_text(
        '#include "answer.cuh"\nextern "C" __global__ void answer(int* x) { if (threadIdx.x == 0) *x = ANSWER; }\n'
    )
    for answer in (1, 2):
        (tmp_path / "answer.cuh").write_text(f"#define ANSWER {answer}\n")
        x = np.zeros(1, np.int32)
        emulator.module(tmp_path / "answer.cu").get_function("answer")((1,), (32,), (x,))
        assert x[0] == answer
