"""From the words device="cpu", dtype="float32" to a back end."""

from .backends.base import Backend
from .backends.numpy import NumpyBackend
from .errors import DeviceError

DTYPES = ("auto", "float32")
LATER_DTYPES = ("float16", "bfloat16", "int8", "int4")
"""Known words that this version does not do yet."""


def choose_backend(device: str, dtype: str, max_batch_size: int) -> Backend:
    """The back end for a device, if it can store weights as `dtype`.

    On a CPU weights stay as their file has them when a single sequence runs: they are mapped, and one row's product
    is bound by memory in any layout. For several rows their columns are laid out: at 8
    rows 1.0 to 1.35 times as fast by shape, each product timed alone; no gain of a whole step has been shown.

    Raises:
        DeviceError: the device or dtype is unknown or not offered.
    """
    if device == "cuda":
        raise DeviceError("device 'cuda' is not offered by this version of minillm, which runs on 'cpu'")
    if device != "cpu":
        raise DeviceError(f"device {device!r} is not known: expected 'cpu'")
    if dtype in LATER_DTYPES:
        raise DeviceError(f"dtype {dtype!r} is not offered by this version of minillm: use 'float32'")
    if dtype not in DTYPES:
        raise DeviceError(f"dtype {dtype!r} is not known: expected 'auto' or 'float32'")
    return NumpyBackend(weight_order="C" if max_batch_size == 1 else "F")
