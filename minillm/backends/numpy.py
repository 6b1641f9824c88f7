"""The NumPy back end: the reference, as it stands. It is the definition of every operation and always works."""

from .base import QUANTIZED, Backend


class NumpyBackend(Backend):
    """Runs on a CPU through NumPy and its BLAS."""

    name = "numpy"
    kept = QUANTIZED
    """NumPy computes in float32: 16 bits that stayed as they are would be expanded again at each product. 8 and 4 bits
    are too, and stay all the same: who has quantised a checkpoint wants it small."""
