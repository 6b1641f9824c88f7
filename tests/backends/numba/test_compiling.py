"""Where compiled kernels are kept, and the numbers of 16 bits that all kernels share."""

import os
import signal
from pathlib import Path

import numpy as np
import pytest

numba = pytest.importorskip("numba", reason="the compiled kernels need numba: pip install 'minillm[fast]'")

from minillm.backends.numba import compiling, intrinsics  # noqa: E402


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    """An empty cache in a folder of the test's own."""
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / "cache"))
    caplog.set_level("WARNING", "minillm.kernels")
    compiling.cache_folder.cache_clear()
    compiling._announce.cache_clear()
    yield tmp_path / "cache"
    compiling.cache_folder.cache_clear()


def double(x):
    return x + x


def test_kernels_are_cached_in_a_folder_for_these_sources(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "minillm.kernels")
    assert compiling.cache_folder().is_relative_to(folder)
    assert compiling.kernel("int64(int64)")(double)(4) == 8
    assert [line.split(" in ")[0] for line in caplog.messages] == [
        "compiling kernels for this processor; this happens once and takes about 20 seconds",
        "compiled test_compiling.double",
    ]
    caplog.clear()
    compiling._announce.cache_clear()
    assert compiling.kernel("int64(int64)")(double)(4) == 8
    assert sum(compiling._KEPT[-1].stats.cache_hits.values()) == 1
    assert not caplog.messages


def test_without_a_folder_to_write_to_kernels_run_and_one_line_says_so(folder: Path, caplog) -> None:
    folder.write_text("a file where the folder should be")
    for _ in range(2):
        assert compiling.kernel("int64(int64)")(double)(4) == 8
    [line] = caplog.messages
    assert str(folder) in line and "Not a directory" in line and "NUMBA_CACHE_DIR" in line


def test_ctrl_c_while_a_kernel_is_compiled_is_not_lost(folder: Path, listening: None) -> None:
    def interrupting(x):
        return x

    compiled = numba.njit(interrupting)
    with pytest.raises(KeyboardInterrupt), compiling._compiling(interrupting, compiled, ""):
        signal.raise_signal(signal.SIGINT)
        compiled.compile("int64(int64)")  # goes on to its end
    assert compiled not in compiling._KEPT
    assert compiled(3) == 3
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_without_numbas_setting_the_user_s_cache_folder_is_taken(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numba.config, "CACHE_DIR", "")
    monkeypatch.setattr(compiling.sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "xdg"))
    assert compiling.cache_folder().parent == folder / "xdg" / "minillm"


def test_without_any_home_a_folder_of_this_user_s_is_taken(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(numba.config, "CACHE_DIR", "")
    monkeypatch.setattr(compiling.sys, "platform", "linux")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(compiling.Path, "home", fail)
    assert compiling.cache_folder().parts[-3] == f"minillm-{os.getuid()}"


def test_other_sources_have_another_folder(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    before = compiling.cache_folder()
    (tmp_path / "kernel.py").write_text("pass")
    monkeypatch.setattr(compiling, "__file__", str(tmp_path / "compiling.py"))
    compiling.cache_folder.cache_clear()
    assert compiling.cache_folder() != before


def each(convert, given: np.ndarray, dtype: type) -> np.ndarray:
    """`convert` of every element, by a kernel."""

    @numba.njit(error_model="numpy")
    def kernel(given, out):
        for i in range(given.size):
            out[i] = convert(given[i])

    out = np.empty(given.shape, dtype)
    kernel(given, out)
    return out


BITS = np.arange(1 << 16, dtype=np.uint16)


def test_numbers_of_16_bits_are_widened_exactly() -> None:
    np.testing.assert_array_equal(each(intrinsics.float16_to_float32, BITS, np.float32), BITS.view(np.float16))
    wide = each(intrinsics.bfloat16_to_float32, BITS, np.float32)
    np.testing.assert_array_equal(wide.view(np.uint32), BITS.astype(np.uint32) << 16)


def test_float32_is_rounded_to_the_nearest_bfloat16() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="the reference for bfloat16 needs ml_dtypes")
    halfway = (BITS[:-1].astype(np.uint32) << 16 | 0x8000).view(np.float32)  # between two bfloat16: to the even one
    random = np.random.default_rng(0).integers(0, 1 << 32, 20000, dtype=np.uint32).view(np.float32)
    with np.errstate(all="ignore"):
        given = np.concatenate([halfway, random, np.nextafter(halfway, np.float32(0))])
        brains = given.astype(ml_dtypes.bfloat16)
    rounded = each(intrinsics.float32_to_bfloat16, given, np.uint16).view(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(rounded.astype(np.float32), brains.astype(np.float32))
