"""Compiles the kernels of this package, and caches them between runs.

Compiling one takes 0.3 to 1 s, loading it some milliseconds. They are stored (`stored.py`) in the user's own cache
folder, never in one that others may write to, since loading a kernel runs its code.
"""

import hashlib
import logging
import os
import sys
import tempfile
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

from ...turns import interrupts
from ..cpu.compiling import why_unusable
from .stored import SUFFIX, QuickKernels, StoredKernels

_LOGGER = logging.getLogger("minillm.kernels")

FASTMATH = {"contract", "reassoc", "nsz", "arcp"}
"""Sums may be reordered and products fused. NaN and infinity are honoured ("nnan" and "ninf" are absent): the engine
checks logits for them."""

KNOWN_NUMBA = ((0, 68),)
"""Versions whose internals `stored.py` relies on; with others Numba loads kernels in its own way."""


def kernel(signature: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Compile a function with Numba, or load it from the cache, to be called from Python without the GIL.

    Use it inside a function that is called when the kernel is first needed. The compiled entry point does not compare
    the types of its arguments with `signature`. Numba's dispatcher would, in 3 us a call, and imports NumPy's masked
    arrays for it (1.3 MB).

    Args:
        signature: types of the arguments in Numba's notation
    """

    def compile_it(function: Callable[..., Any]) -> Callable[..., Any]:
        compiled = numba.njit(fastmath=FASTMATH, error_model="numpy", nogil=True)(function)
        with _compiling(function, compiled, ""):
            compiled.compile(signature)
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
        options = {"fastmath": FASTMATH, "error_model": "numpy"}
        compiled = CFunc(function, normalize_signature(signature), {}, options)
        with _compiling(function, compiled, "shared"):
            compiled.compile()
        return int(compiled.address or 0)

    return compile_it


_KEPT: list[Any] = []
"""Compiled kernels, kept alive for their addresses and entry points."""


@contextmanager
def _compiling(function: Callable[..., Any], compiled: Any, options: str) -> Iterator[None]:
    """Context of compiling a kernel: enables the cache, and logs if the kernel was not in it."""
    folder = cache_folder()
    usable = _usable(folder)
    if usable:
        _announce(folder)
        _enable_caching(compiled, options)
    began = time.perf_counter()
    with interrupts.deferred():  # raised inside, KeyboardInterrupt is lost in callbacks of LLVM
        yield
    _KEPT.append(compiled)
    hits = compiled.stats.cache_hits if hasattr(compiled, "stats") else compiled.cache_hits
    if not hits:
        name = f"{function.__module__.rpartition('.')[2]}.{function.__name__}"
        _LOGGER.info("compiled %s in %.1f s", name, time.perf_counter() - began)


@cache
def cache_folder() -> Path:
    """The folder of compiled kernels: in NUMBA_CACHE_DIR if it is set, else in the user's cache folder.

    Each version of these sources has its own, since a kernel depends on the sources of the functions that it calls.
    """
    digest = hashlib.sha256()
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    base = Path(numba.config.CACHE_DIR) if numba.config.CACHE_DIR else _user_cache_folder()
    return base.absolute() / "minillm" / f"numba-{digest.hexdigest()[:16]}"


_threads: int | None = None


def set_threads(threads: int) -> None:
    """Set the number of threads for kernels, at most as many as when Numba was imported."""
    global _threads
    _threads = min(threads, numba.config.NUMBA_NUM_THREADS)


def num_threads() -> int:
    """Number of threads that kernels run on."""
    most: int = numba.config.NUMBA_NUM_THREADS
    return _threads or most


@cache
def _usable(folder: Path) -> bool:
    """Whether kernels may be stored in a folder; logs once why not."""
    why = why_unusable(folder)
    if why is not None:
        _LOGGER.warning(
            "kernels are compiled in every run, in about 20 seconds, since none are kept: %s; "
            "NUMBA_CACHE_DIR names another folder",
            why,
        )
    return why is None


@cache
def _announce(folder: Path) -> None:
    """Log once that this run compiles, if the cache is empty."""
    if next(folder.glob(f"*{SUFFIX}"), None) is None:
        _LOGGER.warning("compiling kernels for this processor; this happens once and takes about 20 seconds")


def _user_cache_folder() -> Path:
    """The operating system's folder for caches of this user."""
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches"
    if named := os.environ.get("XDG_CACHE_HOME"):
        return Path(named)
    try:
        return Path.home() / ".cache"
    except RuntimeError:  # neither HOME nor an entry for this user
        return Path(tempfile.gettempdir()) / f"minillm-{os.getuid()}"


def _enable_caching(compiled: Any, options: str) -> None:
    """Give a kernel (or a C callback) our cache."""
    kind = QuickKernels if numba.version_info.short in KNOWN_NUMBA else StoredKernels
    compiled._cache = kind(compiled.__wrapped__, options, cache_folder())
