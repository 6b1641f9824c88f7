"""The gate of a gated MLP: activated first half of a projection times the second (Shazeer, "GLU variants improve
transformer", arXiv 2002.05202). With SiLU it is SwiGLU.
"""

from typing import Any

from .activation import ACTIVATIONS, FLOPS_PER_ELEMENT
from .cost import Cost


def glu(x: Any, activation: str, xp: Any, out: Any) -> Any:
    """activation(gate) * up.

    Args:
        x: [T, 2 F]: gate and up concatenated; not modified
        activation: a name in `ACTIVATIONS`
        xp: the array module
        out: [T, F], filled and returned
    """
    F = out.shape[1]
    out[...] = x[:, :F]
    return xp.multiply(ACTIVATIONS[activation](out, xp), x[:, F:], out=out)  # [T, 2 F] -> [T, F]


def cost(T: int, F: int, activation: str, number_bytes: int = 4) -> Cost:
    """The activation's FLOPs and one product for each result; 2 T F numbers read, T F written."""
    flops = T * F * (FLOPS_PER_ELEMENT[activation] + 1)
    result = number_bytes * T * F
    return Cost(flops, 2 * result, result, 2 * result)  # saved: writing and reading the activated gate
