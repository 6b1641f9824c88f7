"""From words such as device="cpu", dtype="bfloat16" to a backend."""

import logging
import os
from dataclasses import dataclass
from importlib.util import find_spec

from .backends.base import QUANTIZED, Backend
from .backends.numpy import NumpyBackend
from .backends.weights import FORMATS
from .errors import DeviceError, shown

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
    """The backend that does what is asked for.

    Raises:
        DeviceError: a word is unknown, or what it asks for is not offered here.
    """
    _one_of("device", placement.device, ("cpu", "cuda"))
    check_dtype(placement.dtype)
    _one_of("backend", placement.backend, ("auto", "numpy", "numba"))
    _one_of("cache_dtype", placement.cache_dtype, ("auto", *CACHE_DTYPES))
    if placement.threads is not None:
        _set_threads(placement.threads)
    if placement.device == "cuda":
        return _cuda(placement, max_batch_size)
    if placement.backend == "numba" and not has_numba():
        raise DeviceError("backend 'numba' is not installed: pip install 'minillm[fast]'")
    if placement.backend == "numpy" or not has_numba():
        return _numpy(placement, max_batch_size)
    return _numba(placement)


def _numpy(placement: Placement, max_batch_size: int) -> Backend:
    """The reference. It computes in float32; "auto" keeps what is quantised, and makes float32 of the rest.

    Weights stay as their file has them when a single sequence runs: they are mapped, and one row's product is bound by
    memory in any layout. For several rows their columns are laid out: at 8 rows 1.0 to 1.35 times as fast by shape,
    each product timed alone; no gain of a whole step has been shown.
    """
    if placement.cache_dtype not in ("auto", "float32"):
        raise DeviceError(f"cache_dtype {placement.cache_dtype!r} needs the numba backend: pip install 'minillm[fast]'")
    return NumpyBackend(weights=placement.dtype, weight_order="C" if max_batch_size == 1 else "F")


def _numba(placement: Placement) -> Backend:
    """Kernels of our own. Weights and cache are kept as they are stored, or as is asked for."""
    from .backends.numba.backend import NumbaBackend
    from .backends.numba.compiling import set_threads

    if placement.threads is not None:
        set_threads(placement.threads)
    cache_dtype = "float32" if placement.cache_dtype == "auto" else placement.cache_dtype
    return NumbaBackend(weights=placement.dtype, cache_dtype=cache_dtype)


def _cuda(placement: Placement, max_batch_size: int) -> Backend:
    """CuPy and our kernels. "auto" keeps weights as they are stored, and so computes in float16 or bfloat16 where the
    checkpoint does, but never rounds float32 unasked; those stored in 8 or 4 bits become float16.

    With MINILLM_CUDA_DEBUG=1 in the environment the kernels hold indices against their bounds.
    """
    if placement.backend != "auto":
        raise DeviceError(f"backend {placement.backend!r} computes on a CPU: leave it out with device 'cuda'")
    if placement.cache_dtype != "auto":
        raise DeviceError(
            f"cache_dtype {placement.cache_dtype!r} is for a CPU: on 'cuda' the K/V cache has the type of the weights, "
            "which dtype says"
        )
    if placement.dtype in QUANTIZED:
        raise DeviceError(
            f"dtype {placement.dtype!r} is not offered on 'cuda': expected 'auto', 'float32', 'float16' or 'bfloat16'"
        )
    from .backends.cuda.backend import CudaBackend
    from .backends.cuda.compiling import CupyLauncher
    from .backends.cuda.memory import CupyDevice

    launcher = CupyLauncher()  # sees first whether there is a GPU
    debug = os.environ.get("MINILLM_CUDA_DEBUG") == "1"
    return CudaBackend(CupyDevice(), launcher, placement.dtype, max_batch_size=max_batch_size, debug=debug)


def _set_threads(threads: int) -> None:
    """Have NumPy's products, in all of this process, run on so many threads. More than there are cores is a warning."""
    from threadpoolctl import threadpool_limits

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if threads > cores:
        _LOGGER.warning("threads=%d is more than the %d cores there are: it will be slower", threads, cores)
    threadpool_limits(threads, user_api="blas")


def check_dtype(dtype: str) -> None:
    """Refuse what is no dtype.

    Raises:
        DeviceError: it is unknown; the message lists those known.
    """
    _one_of("dtype", dtype, ("auto", *FORMATS))


def has_numba() -> bool:
    """Whether the extra "fast" is installed."""
    return find_spec("numba") is not None


def _one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    if not isinstance(value, str) or value not in known:
        raise DeviceError(f"{name} {shown(value)} is not known: expected {', '.join(map(repr, known))}")
