"""Launches kernels of a recorded step dependently: each may begin while the one before it still runs.

`kernels/cuda/dependent.cuh` says what a kernel has to do for it. The attribute is one of the driver's cuLaunchKernelEx,
which CuPy does not bind, so it is called through ctypes, and only while a step is recorded: the graph repeats it.

Not every launch gains. On an H100, steps at batch 1, 8 and 32, in us, plainly and with early launches of

                     none               all waiting kernels     none beside attention
    OPT-125m       314  378   521        294  359     -          280  333   476
    OPT-1.3B      1368 1540  2116       1453 1996  3398         1313 1463  2098
    OPT-6.7B      5063 5648  7006       5500    - 13369         5269 5658  7574

Attention takes the shared memory that is the L1 cache of the product before it, where all blocks read the same x. What
waits in the place of attention's blocks costs more than it gains. And a product of a large matrix takes so long that
its beginning does not count, while what waits beside it does: such are left out too.
"""

import contextlib
import ctypes
from collections.abc import Callable, Sequence
from typing import Any

from ...errors import DeviceError
from .kernels import ALL_REDUCE, Launch
from .linear import LIBRARY_PRODUCT
from .tensor_maps import DRIVER

LEAST_ARCHITECTURE = 90
LEAST_DRIVER = 12030
"""CUDA 12.3, whose graphs keep such launches as they are"""
PROGRAMMATIC, COOPERATIVE = 6, 2
"""CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION and CU_LAUNCH_ATTRIBUTE_COOPERATIVE of cuda.h"""

WAITING = frozenset({
    "embed", "expand", "layer_norm", "rms_norm", "rotary", "glu", "gate", "multiply", "store_kv", "scale_logits",
    "gemv_fma", "gemv_mma", "fused_fma", "fused_mma", "gemm_tiled", "gemm_mma", "gemm_wgmma", "gemm_wgmma_integers",
    "gemm_tma", "attention_decode", "best_of_chunks", "take_best", "low_rank_down", "low_rank_up", "route", "sort_rows",
    "combine", "experts_fma", "experts_mma", "move_heads", "norm_rotate_store", "deferred_fma",
})  # fmt: skip
"""Kernels that wait for the results of those before them; any other begins when these have ended"""


class Attribute(ctypes.Structure):
    """CUlaunchAttribute of cuda.h."""

    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_char * 4), ("value", ctypes.c_int * 16))


class Config(ctypes.Structure):
    """CUlaunchConfig of cuda.h."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(Attribute)),
        ("attribute_count", ctypes.c_uint),
    )


ATTENTION = "attention_decode"
PRODUCTS = frozenset(name for name in WAITING if name.startswith(("gemv", "gemm", "fused", "experts", "deferred")))
"""Kernels whose third argument is a matrix"""

EARLY_BYTES = 32 << 20
"""The largest matrix whose product begins early, and lets the next kernel do so."""


MOST_ROWS = 16
"""The most sequences of a step whose kernels begin early, unless MINILLM_CUDA_DEPENDENT=1 asks for all. Of 32 the table
above says gains for small models and losses for large ones, of 128 nothing."""


OTHERS = frozenset({LIBRARY_PRODUCT, ALL_REDUCE})
"""Launches of other libraries, which nothing begins before the end of"""


def begins_early(launches: Sequence[Launch], i: int) -> bool:
    """Whether launch i begins before the one before it has ended."""
    if i == 0 or launches[i].name not in WAITING or launches[i - 1].name in OTHERS:
        return False
    both = launches[i - 1], launches[i]
    return not any(each.name == ATTENTION or _is_large(each) for each in both)


def _is_large(launch: Launch) -> bool:
    """Whether it is the product of a large matrix."""
    return launch.name in PRODUCTS and bool(launch.args[2].nbytes > EARLY_BYTES)


def has_dependent_launches(architecture: str) -> bool:
    """Whether GPU and driver have them, in recorded steps."""
    version = ctypes.c_int(0)
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(DRIVER).cuDriverGetVersion(ctypes.byref(version))
    return int(architecture) >= LEAST_ARCHITECTURE and version.value >= LEAST_DRIVER


def check_architecture(architecture: str) -> None:
    """Refuse a GPU without such launches.

    Raises:
        DeviceError: its compute capability is below 9.0.
    """
    if int(architecture) < LEAST_ARCHITECTURE:
        raise DeviceError(
            f"MINILLM_CUDA_DEPENDENT=1 needs a GPU of compute capability 9.0 or later; this one has "
            f"{architecture[:-1]}.{architecture[-1]}: leave it unset"
        )


class Driver:
    """The driver's launch with attributes."""

    def __init__(self, address: Callable[[Any], int], library: Any = None) -> None:
        """`address` gives that of an array's first element; `library` is the driver's.

        Raises:
            DeviceError: the driver has no such launch.
        """
        try:
            self._launch = (library or ctypes.CDLL(DRIVER)).cuLaunchKernelEx
        except (OSError, AttributeError) as error:
            raise DeviceError(
                "MINILLM_CUDA_DEPENDENT=1 and MINILLM_CUDA_PERSISTENT=1 need a driver with cuLaunchKernelEx "
                f"({error}): leave them unset"
            ) from None
        self._address = address

    def launch(self, launch: Launch, stream: int, attribute_id: int = PROGRAMMATIC) -> None:
        """Launch a kernel of CuPy's in a stream, such that it may begin before what is before it there has ended.

        With COOPERATIVE it begins when that has ended, and all its blocks are on the device at once, or it is refused.
        CuPy's own cooperative launch compiles and links for what our kernels do not use.

        Raises:
            DeviceError: the driver refuses it.
        """
        values = [self._value(argument) for argument in launch.args]
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        attribute = Attribute(attribute_id)
        attribute.value[0] = 1
        config = Config(
            _three(launch.grid),
            _three(launch.block),
            launch.shared_mem,
            stream,
            ctypes.pointer(attribute),
            1,
        )
        function = ctypes.c_void_p(launch.kernel.kernel.ptr)  # type: ignore[attr-defined]  # of a RawKernel
        if code := self._launch(ctypes.byref(config), function, pointers, None):
            how, switch = ("early", "DEPENDENT") if attribute_id == PROGRAMMATIC else ("cooperatively", "PERSISTENT")
            raise DeviceError(
                f"the driver refuses to launch {launch.name} {how} (CUresult {code}): set MINILLM_CUDA_{switch}=0"
            )

    def _value(self, argument: Any) -> Any:
        """An argument in memory: an array's address, or the bytes of a NumPy scalar."""
        if hasattr(argument, "nbytes") and argument.shape:
            return ctypes.c_void_p(self._address(argument))
        data = argument.tobytes()
        return (ctypes.c_char * len(data)).from_buffer_copy(data)


def _three(sizes: tuple[int, ...]) -> Any:
    return (ctypes.c_uint * 3)(*sizes, *(1,) * (3 - len(sizes)))
