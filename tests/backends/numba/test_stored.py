"""Kernels out of the cache: the same as those compiled, and the compiler asleep."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

numba = pytest.importorskip("numba", reason="the compiled kernels need numba: pip install 'minillm[fast]'")

from minillm.backends.numba import compiling, stored  # noqa: E402

SCRIPT = '''
"""Kernels of each kind: with a function inlined, raising, with memory of their own, called from C."""

import ctypes
import sys

import numba
import numpy as np
from numba.core.ccallback import CFunc
from numba.core.runtime import rtsys

from minillm.backends.numba.compiling import _enable_caching, kernel


@numba.njit(no_cpython_wrapper=True, no_cfunc_wrapper=True)
def root(x):
    if x < 0:
        raise ValueError("no root", x)
    return np.sqrt(x)


def roots(given, out):
    own = np.empty(len(given))
    for i in range(len(given)):
        own[i] = root(given[i])
    out[:] = own


def total(numbers, count):
    result = 0.0
    for x in numba.carray(numbers, (count,)):  # a function out of Numba's module for arrays
        result += x
    return result


def root_of_first(given):
    return root(given[0])


numbers = np.arange(4.0)
run = kernel("void(float64[::1], float64[::1])")(roots)
run(numbers ** 2, numbers)
print(numbers.tolist())
try:
    kernel("float64(float64[::1])")(root_of_first)(-numbers[1:])
except ValueError as error:
    print(error.args)
callback = CFunc(total, ((numba.types.CPointer(numba.float64), numba.int64), numba.float64), {}, {})
_enable_caching(callback)
callback.compile()
print(callback.ctypes(numbers.ctypes.data_as(ctypes.POINTER(ctypes.c_double)), len(numbers)))
print("compiler awake" if rtsys._init or "numba.np.arrayobj" in sys.modules else "compiler asleep")
'''


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """An empty cache in a folder of the test's own."""
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    compiling.cache_folder.cache_clear()
    yield
    compiling.cache_folder.cache_clear()


def double(x):
    return x + x


def test_a_run_out_of_the_cache_does_the_same_and_leaves_the_compiler_asleep(tmp_path: Path) -> None:
    script = tmp_path / "kernels.py"
    script.write_text(SCRIPT)
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path / "cache")}
    first, second = (
        subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, check=True)
        for _ in range(2)
    )
    results = ["[0.0, 1.0, 2.0, 3.0]", "('no root', -1.0)", "6.0"]
    assert first.stdout.splitlines() == [*results, "compiler awake"]
    assert second.stdout.splitlines() == [*results, "compiler asleep"]


def test_with_a_numba_that_is_not_known_its_own_cache_is_used(folder: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "KNOWN_NUMBA", ())
    assert compiling.kernel("int64(int64)")(double)(4) == 8
    assert compiling.kernel("int64(int64)")(double)(4) == 8
    again = compiling._KEPT[-1]
    assert not isinstance(again._cache, stored.KernelCache)
    assert sum(again.stats.cache_hits.values()) == 1
