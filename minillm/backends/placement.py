"""The place where a model is computed: device, backend, dtypes and threads, chosen by name."""

import logging
import os
from dataclasses import dataclass
from typing import Any

from ..errors import DeviceError, shown
from .formats import CACHE_FORMATS, COMPUTE_FORMATS, WEIGHT_FORMATS
from .numpy import NumpyBackend
from .operations import Backend

logger = logging.getLogger("minillm")
BACKENDS = ("auto", "cpu", "numpy")
"""Backends of device "cpu": kernels in C, and NumPy"""
AS_WEIGHTS = "weights"
"""The `cache_dtype` that is `NARROW_CACHE` beside weights of at most 16 bits on the kernels in C, else as "auto\""""
NARROW_CACHE = "bfloat16"
"""The 16-bit format of the K/V cache, whatever the weights' is. bfloat16 has float32's range, so no key or value
overflows (float16 ends at 65,504), and reading it is a shift, which every processor has. It rounds to 8 bits where
float16 has 11: with SmolLM2 in Q4_1 that changes the perplexity by less than 0.03 %"""


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Device, backend, dtypes and threads of a model, as documented in `Engine`."""

    device: str = "cpu"
    dtype: str = "auto"
    backend: str = "auto"
    cache_dtype: str = "auto"
    compute_dtype: str = "float32"
    threads: int | None = None
    deterministic: bool = False


def choose_backend(placement: Placement, max_batch_size: int) -> Backend:
    """Make the backend for a placement.

    Raises:
        DeviceError: a value is unknown or not available here.
    """
    _one_of("device", placement.device, ("cpu", "cuda"))
    check_dtype(placement.dtype)
    _one_of("backend", placement.backend, BACKENDS)
    _one_of("cache_dtype", placement.cache_dtype, ("auto", AS_WEIGHTS, *CACHE_FORMATS))
    _one_of("compute_dtype", placement.compute_dtype, tuple(COMPUTE_FORMATS))
    if placement.threads is not None:
        _set_threads(placement.threads)
    if placement.device == "cuda":
        return _cuda(placement, max_batch_size)
    name = _default_backend() if placement.backend == "auto" else placement.backend
    return _cpu(placement) if name == "cpu" else _numpy(placement, max_batch_size)


def _default_backend() -> str:
    """The backend that "auto" stands for: MINILLM_BACKEND's, else the kernels in C, else NumPy.

    A warning says why the kernels cannot run, which includes how to get a compiler.
    """
    if named := os.environ.get("MINILLM_BACKEND"):
        _one_of("MINILLM_BACKEND", named, BACKENDS[1:])
        return named
    from .cpu.compiling import load

    try:
        load()
    except DeviceError as error:
        logger.warning("%s; minillm computes with NumPy, which is slower", error)
        return "numpy"
    return "cpu"


def _numpy(placement: Placement, max_batch_size: int) -> Backend:
    """The NumPy backend. It computes in float32; "auto" keeps quantised weights, and converts the rest to float32.

    For a single sequence, weights stay as stored: they are mapped, and one row's product is bound by memory in any
    layout. For several rows they are column-major: at 8 rows 1.0 to 1.35 times as fast by shape, each product timed
    alone; no gain of a whole step has been shown.
    """
    if placement.cache_dtype not in ("auto", AS_WEIGHTS, "float32"):
        raise DeviceError(f"cache_dtype {placement.cache_dtype!r} needs backend 'cpu', that is, a C compiler")
    if placement.compute_dtype != "float32":
        raise DeviceError(f"compute_dtype {placement.compute_dtype!r} needs backend 'cpu', that is, a C compiler")
    if placement.deterministic:
        raise DeviceError(
            "deterministic=True needs backend 'cpu', that is, a C compiler: a row of NumPy's products has other bits "
            "with other rows beside it"
        )
    return NumpyBackend(weights=placement.dtype, weight_order="C" if max_batch_size == 1 else "F")


def _cpu(placement: Placement) -> Backend:
    """The backend of kernels in C. Weights and cache keep their stored type unless another is set."""
    from .cpu.backend import CpuBackend
    from .cpu.launching import set_threads

    if placement.threads is not None:
        set_threads(placement.threads)
    cache_dtype = "float32" if placement.cache_dtype in ("auto", AS_WEIGHTS) else placement.cache_dtype
    return CpuBackend(
        weights=placement.dtype,
        cache=cache_dtype,
        compute=placement.compute_dtype,
        deterministic=placement.deterministic,
    )


def _cuda(placement: Placement, max_batch_size: int) -> Backend:
    """The CUDA backend on CuPy. "auto" keeps the stored type of weights and computes in it (float16, bfloat16 or
    float32), so it never rounds float32. With weights in 8 or 4 bits it computes in bfloat16 if the checkpoint is
    stored in it, else in float16.

    The environment has switches, MINILLM_CUDA_NAME; no GPU has run those from PROMPTS on yet:

        DEBUG=1           kernels check indices against their bounds
        DEPENDENT=0, =1   launches of a recorded step do not begin early; do, in steps of any number of sequences
        CARVEOUT=PERCENT  shared memory of all kernels, to measure (`CupyLauncher`)
        PROMPTS=1         passes of prompts, and of guesses to verify, are recorded too
        RANKS=1           decode steps of several ranks are recorded
        PERSISTENT=1      the layers of a step of 1 to 4 sequences are one kernel
        DEFERRED=1        the products of such a step take on the RMS norms before them
        TMA=1             products of many rows are our own kernel's on Hopper, in the library's place
        INTEGER_WGMMA=1   matrices of 8 and 4 bits are not expanded for more than 64 rows on Hopper

    Raises:
        DeviceError: there is no GPU, or it lacks what the arguments or the environment ask for.
    """
    _check_cuda(placement)
    from .cuda.backend import CudaBackend
    from .cuda.batches import TOKENS
    from .cuda.compiling import CupyLauncher
    from .cuda.dependent import MOST_ROWS, check_architecture, has_dependent_launches
    from .cuda.device import CupyDevice
    from .cuda.linear import check_integer_warpgroups
    from .cuda.persistent import check_architecture as persists
    from .cuda.tensor_maps import TensorMaps
    from .cuda.tensor_maps import check_architecture as has_maps

    carveout = os.environ.get("MINILLM_CUDA_CARVEOUT", "")
    if carveout and not (carveout.isdecimal() and int(carveout) <= 100):
        raise DeviceError(f"MINILLM_CUDA_CARVEOUT should be a percentage, 0 to 100, found {carveout!r}")
    launcher = CupyLauncher(int(carveout) if carveout else None)  # checks first for a GPU
    names = "DEBUG", "PROMPTS", "RANKS", "PERSISTENT", "DEFERRED", "TMA", "INTEGER_WGMMA"
    on = {name: os.environ.get(f"MINILLM_CUDA_{name}") == "1" for name in names}
    dependent = os.environ.get("MINILLM_CUDA_DEPENDENT", "")
    if on["INTEGER_WGMMA"]:
        check_integer_warpgroups(launcher.architecture)
    if on["PERSISTENT"] and on["DEFERRED"]:
        raise DeviceError(
            "MINILLM_CUDA_DEFERRED=1 is for launches that MINILLM_CUDA_PERSISTENT=1 makes one kernel: set one of them"
        )
    if on["PERSISTENT"]:
        persists(launcher.architecture)
    if on["TMA"]:
        has_maps(launcher.architecture)
    if dependent == "1":
        check_architecture(launcher.architecture)
    early = dependent == "1" or (dependent != "0" and has_dependent_launches(launcher.architecture))
    switches: dict[str, Any] = {"debug": on["DEBUG"], "dependent": early, "records_ranks": on["RANKS"]}
    rows, device = None if dependent == "1" else MOST_ROWS, CupyDevice(own_library=on["PROMPTS"])
    switches |= {"max_batch_size": max_batch_size, "prompt_tokens": TOKENS[-1] if on["PROMPTS"] else 0}
    switches |= {"persistent": on["PERSISTENT"], "deferred": on["DEFERRED"], "integer_warpgroups": on["INTEGER_WGMMA"]}
    switches["tensor_maps"] = TensorMaps(device.address) if on["TMA"] else None
    return CudaBackend(device, launcher, placement.dtype, dependent_rows=rows, **switches)


def _check_cuda(placement: Placement) -> None:
    """Refuse what is for a CPU alone."""
    if placement.backend != "auto":
        raise DeviceError(f"backend {placement.backend!r} computes on a CPU: leave it out with device 'cuda'")
    if placement.cache_dtype not in ("auto", AS_WEIGHTS):
        raise DeviceError(
            f"cache_dtype {placement.cache_dtype!r} is for a CPU: on 'cuda' the K/V cache has the type of activations, "
            "which dtype says"
        )
    if placement.compute_dtype != "float32":
        raise DeviceError(
            f"compute_dtype {placement.compute_dtype!r} is for a CPU: on 'cuda' dtype is the type of activations too"
        )
    if placement.deterministic:
        raise DeviceError(
            "deterministic=True is for a CPU: on 'cuda' few and many rows have kernels that sum in different orders"
        )


def _set_threads(threads: int) -> None:
    """Set the number of BLAS threads of this process. Warns if it exceeds the number of cores."""
    from threadpoolctl import threadpool_limits

    cores = available_cores()
    if threads > cores:
        logger.warning("threads=%d is more than the %d cores there are: it will be slower", threads, cores)
    threadpool_limits(threads, user_api="blas")


def available_cores() -> int:
    """Number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def check_dtype(dtype: str) -> None:
    """Refuse an unknown dtype.

    Raises:
        DeviceError: it is unknown; the message lists the known ones.
    """
    _one_of("dtype", dtype, tuple(WEIGHT_FORMATS))


def _one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    if not isinstance(value, str) or value not in known:
        raise DeviceError(f"{name} {shown(value)} is not known: expected {', '.join(map(repr, known))}")
