"""The NumPy back end: the reference, as it stands. It is the definition of every operation and always works."""

from .base import Backend


class NumpyBackend(Backend):
    """Runs on a CPU through NumPy and its BLAS."""

    name = "numpy"
