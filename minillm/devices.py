"""From words such as device="cpu", dtype="bfloat16" to a back end."""

import logging
import os
from dataclasses import dataclass
from importlib.util import find_spec

from .backends.base import Backend
from .backends.numpy import NumpyBackend
from .backends.weights import FORMATS
from .errors import DeviceError, ParameterError

_LOGGER = logging.getLogger("minillm")

CACHE_DTYPES = ("float32", "bfloat16", "int8")


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Where a model runs, and how its numbers are kept. `Engine` says what each word means."""

    device: str = "cpu"
    dtype: str = "auto"
    backend: str = "auto"
    cache_dtype: str = "auto"
    threads: int | None = None


def choose_backend(placement: Placement, max_batch_size: int) -> Backend:
    """The back end that does what is asked for.

    Raises:
        DeviceError: a word is unknown, or what it asks for is not offered here.
        ParameterError: the number of threads is impossible.
    """
    if placement.device == "cuda":
        raise DeviceError("device 'cuda' is not offered by this version of minillm, which runs on 'cpu'")
    _one_of("device", placement.device, ("cpu", "cuda"))
    _one_of("dtype", placement.dtype, ("auto", *FORMATS))
    _one_of("backend", placement.backend, ("auto", "numpy", "numba"))
    _one_of("cache_dtype", placement.cache_dtype, ("auto", *CACHE_DTYPES))
    if placement.threads is not None:
        set_blas_threads(placement.threads)
    return _numpy(placement, max_batch_size)


def _numpy(placement: Placement, max_batch_size: int) -> Backend:
    """The reference. It computes in float32; "auto" keeps what is quantised, and makes float32 of the rest.

    Weights stay as their file has them when a single sequence runs: they are mapped, and one row's product is bound by
    memory in any layout. For several rows their columns are laid out: at 8 rows 1.0 to 1.35 times as fast by shape,
    each product timed alone; no gain of a whole step has been shown.
    """
    if placement.cache_dtype not in ("auto", "float32"):
        raise DeviceError(
            f"cache_dtype {placement.cache_dtype!r} needs the numba back end: pip install 'minillm[fast]'"
        )
    return NumpyBackend(weights=placement.dtype, weight_order="C" if max_batch_size == 1 else "F")


def set_blas_threads(threads: int) -> None:
    """Have NumPy's products, in all of this process, run on so many threads. More than there are cores is a warning.

    Raises:
        ParameterError: it is no number of threads.
    """
    if not isinstance(threads, int) or isinstance(threads, bool) or threads < 1:
        raise ParameterError(f"threads should be a whole number of at least 1, found {threads!r}")
    from threadpoolctl import threadpool_limits

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if threads > cores:
        _LOGGER.warning("threads=%d is more than the %d cores there are: it will be slower", threads, cores)
    threadpool_limits(threads, user_api="blas")


def has_numba() -> bool:
    """Whether the extra "fast" is installed."""
    return find_spec("numba") is not None


def _one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise DeviceError(f"{name} {value!r} is not known: expected {', '.join(map(repr, known))}")
