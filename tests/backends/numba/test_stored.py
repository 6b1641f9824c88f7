"""Kernels out of the cache: the same as those compiled, and the compiler asleep."""

import errno
import os
import pickle
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
_enable_caching(callback, "")
callback.compile()
print(callback.ctypes(numbers.ctypes.data_as(ctypes.POINTER(ctypes.c_double)), len(numbers)))
print("compiler awake" if rtsys._init or "numba.np.arrayobj" in sys.modules else "compiler asleep")
'''


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    """An empty cache in a folder of the test's own."""
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    caplog.set_level("WARNING", "minillm.kernels")
    compiling.cache_folder.cache_clear()
    compiling._usable.cache_clear()
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


def test_with_a_numba_that_is_not_known_it_reads_kernels_itself(folder: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "KNOWN_NUMBA", ())
    assert compile_double() == (8, 0)
    assert compile_double() == (8, 1)
    assert type(compiling._KEPT[-1]._cache) is stored.StoredKernels


# --- what is damaged, exchanged or another's --------------------------------------------------------------------------


def compile_double() -> tuple[int, int]:
    """2 * 4, and whether the kernel came out of the cache."""
    result = compiling.kernel("int64(int64)")(double)(4)
    return result, sum(compiling._KEPT[-1].stats.cache_hits.values())


def entry() -> Path:
    [path] = compiling.cache_folder().glob("*.double-*")
    return path


class Planted:
    """Leaves a file where somebody unpickles it."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self):
        return Path.touch, (self.mark,)


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(path.read_bytes()[:20]),
        lambda path: path.write_bytes(path.read_bytes()[:-1]),
        lambda path: path.write_bytes(path.read_bytes().replace(b"double", b"triple")),
        lambda path: path.write_bytes(os.urandom(9000)),
        lambda path: path.unlink(),
        lambda path: (path.unlink(), path.symlink_to("/dev/zero")),
        lambda path: (path.unlink(), path.symlink_to(path.name)),
        lambda path: (path.unlink(), os.mkfifo(path)),
    ],
    ids=["empty", "cut short", "last byte", "changed", "noise", "missing", "link", "loop", "pipe"],
)
def test_a_damaged_kernel_is_compiled_again_without_a_word(damage, folder: None, caplog) -> None:
    assert compile_double() == (8, 0)
    caplog.clear()
    damage(entry())
    assert compile_double() == (8, 0)
    assert compile_double() == (8, 1)
    assert not caplog.messages


def test_a_folder_in_a_kernel_s_place_is_one_warning(folder: None, caplog) -> None:
    compile_double()
    path = entry()
    path.unlink()
    path.mkdir()
    caplog.clear()
    stored._warn.cache_clear()
    assert compile_double() == compile_double() == (8, 0)
    [line] = caplog.messages
    assert "kernels cannot be kept for the next run" in line and "Is a directory" in line


def triple(x):
    return 3 * x


def test_exchanged_kernels_are_noticed(folder: None) -> None:
    assert compile_double() == (8, 0)
    assert compiling.kernel("int64(int64)")(triple)(4) == 12
    one, other = entry(), *compiling.cache_folder().glob("*.triple-*")
    held = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(held)
    assert compile_double() == (8, 0)
    assert compiling.kernel("int64(int64)")(triple)(4) == 12


def test_a_kernel_compiled_otherwise_is_another_one(folder: None) -> None:
    compile_double()
    assert compiling.kernel("int64(int64)")(double)(4) == 8
    assert compiling.kernel("float64(float64)")(double)(0.25) == 0.5
    assert len(list(compiling.cache_folder().iterdir())) == 2


def test_a_planted_pickle_is_not_read(folder: None, tmp_path: Path) -> None:
    """Neither in a kernel's place, nor where Numba would look for an index or for data of its own."""
    compile_double()
    mark = tmp_path / "owned"
    pickled = pickle.dumps(Planted(mark))
    function_cache = numba.core.caching.FunctionCache
    before, numba.config.CACHE_DIR = numba.config.CACHE_DIR, str(compiling.cache_folder())
    try:
        files = function_cache(double)._cache_file
    finally:
        numba.config.CACHE_DIR = before
    Path(files._index_path).write_bytes(pickled)
    Path(files._data_path(files._data_name(1))).write_bytes(pickled)
    entry().write_bytes(pickled)
    assert compile_double() == (8, 0)
    assert not mark.exists()
    pickle.loads(pickled)
    assert mark.exists(), "it would have left its mark"


needs_root = pytest.mark.skipif(not hasattr(os, "getuid") or os.getuid() != 0, reason="gives folders to another user")


def give_away(path: Path) -> None:
    os.chown(path, 65534, 65534)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda folder: folder.chmod(0o777), "other users may write to"),
        (lambda folder: folder.chmod(0o720), "other users may write to"),
        (lambda folder: folder.parent.chmod(0o777), "other users may write to"),
        pytest.param(give_away, "belongs to another user", marks=needs_root),
        pytest.param(lambda folder: give_away(folder.parent), "belongs to another user", marks=needs_root),
        pytest.param(lambda folder: give_away(folder.parents[1]), "belongs to another user", marks=needs_root),
    ],
    ids=["others write", "a group writes", "others write above", "another's", "in another's", "above another's"],
)
def test_a_folder_that_others_could_write_to_is_not_used(change, reason: str, folder: None, caplog) -> None:
    compile_double()
    change(compiling.cache_folder())
    before = sorted(compiling.cache_folder().iterdir())
    caplog.clear()
    compiling._usable.cache_clear()
    assert compile_double() == compile_double() == (8, 0)
    [line] = caplog.messages
    assert reason in line and str(compiling.cache_folder().parents[1]) in line
    assert sorted(compiling.cache_folder().iterdir()) == before


@needs_root
def test_a_link_into_another_s_folder_is_not_followed_and_nothing_is_made_there(folder: None, caplog) -> None:
    theirs = Path(numba.config.CACHE_DIR, "theirs")
    theirs.mkdir()
    give_away(theirs)
    compiling.cache_folder().parent.symlink_to(theirs)
    assert compile_double() == (8, 0)
    assert "theirs belongs to another user" in caplog.text
    assert not list(theirs.iterdir())


@needs_root
def test_another_s_file_in_a_folder_of_one_s_own_is_not_read(folder: None) -> None:
    compile_double()
    give_away(entry())
    assert compile_double() == (8, 0)
    assert entry().stat().st_uid == 0


def test_folders_are_made_for_this_user_alone(folder: None) -> None:
    before = os.umask(0)
    try:
        compile_double()
    finally:
        os.umask(before)
    made = [compiling.cache_folder().parent, compiling.cache_folder(), entry()]
    assert [path.stat().st_mode & 0o777 for path in made] == [0o700, 0o700, 0o600]


def test_a_sticky_folder_above_will_do(folder: None) -> None:
    Path(numba.config.CACHE_DIR).chmod(0o1777)
    assert compile_double() == (8, 0)
    assert compile_double() == (8, 1)


def test_a_disk_without_room_is_one_warning(folder: None, caplog, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    compile_double()
    entry().unlink()
    caplog.clear()
    stored._warn.cache_clear()
    monkeypatch.setattr(stored, "replace_file", fail)
    assert compile_double() == compile_double() == (8, 0)
    [line] = [line for line in caplog.messages if "compiling kernels" not in line]
    assert "No space left on device" in line
