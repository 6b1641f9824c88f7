"""How the kernels of this package are compiled, and where they are kept between runs.

Compiling one takes 0.3 to 1 s, loading it from its cache some milliseconds. The cache lies in the user's own cache
folder, since loading it runs its code: never in a folder that others may write to.
"""

import hashlib
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numba
from numba import types
from numba.core.ccallback import CFunc
from numba.core.sigutils import normalize_signature

_LOGGER = logging.getLogger("minillm.kernels")

FASTMATH = {"contract", "reassoc", "nsz", "arcp"}
"""Sums may be reordered and products fused. NaN and infinity keep their meaning ("nnan" and "ninf" are not here):
the engine finds them in logits."""

KNOWN_NUMBA = ((0, 68),)
"""Versions whose inner workings are those that `stored.py` leans on; others use Numba's own cache."""


def kernel(signature: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Compile a function by Numba, or load it out of the cache, to be called from Python without its lock.

    Write this inside a function that is called when the kernel is first needed. What it gives takes the arguments for
    what `signature` says: nobody compares types. Numba's dispatcher would, in 3 us a call, and imports NumPy's masked
    arrays for it (1.3 MB).

    Args:
        signature: types of the arguments in Numba's notation
    """

    def compile_it(function: Callable[..., Any]) -> Callable[..., Any]:
        _announce()
        began = time.perf_counter()
        with _cache_in(cache_folder()) as cached:
            compiled = numba.njit(fastmath=FASTMATH, error_model="numpy", nogil=True)(function)
            if cached:
                _enable_caching(compiled)
            compiled.compile(signature)
        if compiled.stats.cache_misses:
            _report(function, began)
        _KEPT.append(compiled)
        [result] = compiled.overloads.values()
        entry: Callable[..., Any] = result.entry_point
        return entry

    return compile_it


def shared_kernel(element: Any) -> Callable[[Callable[..., None]], int]:
    """Compile a function of `(arguments, data, share, shares, worker)` for `launching.launch`. -> its address

    Args:
        element: the type of the numbers in `data`, in Numba's notation
    """
    signature = types.void(types.CPointer(types.int64), types.CPointer(element), types.int64, types.int64, types.int64)

    def compile_it(function: Callable[..., None]) -> int:
        _announce()
        began = time.perf_counter()
        with _cache_in(cache_folder()) as cached:
            compiled = CFunc(
                function, normalize_signature(signature), {}, {"fastmath": FASTMATH, "error_model": "numpy"}
            )
            if cached:
                _enable_caching(compiled)
            compiled.compile()
        if not compiled.cache_hits:
            _report(function, began)
        _KEPT.append(compiled)
        return int(compiled.address or 0)

    return compile_it


_KEPT: list[Any] = []
"""What addresses and entries point into."""


def _report(function: Callable[..., Any], began: float) -> None:
    name = f"{function.__module__.rpartition('.')[2]}.{function.__name__}"
    _LOGGER.info("compiled %s in %.1f s", name, time.perf_counter() - began)


@cache
def cache_folder() -> Path:
    """Where compiled kernels are kept: NUMBA_CACHE_DIR where it is set, else in the user's cache folder.

    One folder for each state of these sources: Numba looks at the file of a kernel, not at those that it calls.
    """
    digest = hashlib.sha256()
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    base = Path(numba.config.CACHE_DIR) if numba.config.CACHE_DIR else _user_cache_folder()
    return base / "minillm" / f"numba-{digest.hexdigest()[:16]}"


_threads: int | None = None


def set_threads(threads: int) -> None:
    """Run kernels on so many threads, but on no more than were there when Numba was imported."""
    global _threads
    _threads = min(threads, numba.config.NUMBA_NUM_THREADS)


def num_threads() -> int:
    """How many threads kernels run on."""
    most: int = numba.config.NUMBA_NUM_THREADS
    return _threads or most


@cache
def _announce() -> None:
    """Say once that this run compiles, where nothing is in the cache yet."""
    if next(cache_folder().rglob("*.nbc"), None) is None:
        _LOGGER.warning("compiling kernels for this processor; this happens once and takes about 20 seconds")


def _user_cache_folder() -> Path:
    """Where programs keep what they can make again."""
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")


def _enable_caching(kernel: Any) -> None:
    """Have what is compiled of a kernel (or a C callback) kept, in the folder that Numba's settings name now."""
    kernel.enable_caching()
    if numba.version_info.short in KNOWN_NUMBA:
        from .stored import KernelCache

        kernel._cache = KernelCache(kernel.__wrapped__)


@contextmanager
def _cache_in(folder: Path) -> Iterator[bool]:
    """Let Numba cache what is decorated meanwhile in `folder`; yield False where it cannot be written to.

    Numba reads the setting when a function is decorated, so other packages' functions keep their own place.
    """
    before = numba.config.CACHE_DIR
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        writable = os.access(folder, os.W_OK)
    except OSError:
        writable = False
    numba.config.CACHE_DIR = str(folder)
    try:
        yield writable
    finally:
        numba.config.CACHE_DIR = before
