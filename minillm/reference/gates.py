"""Gates and factors: rows times activated rows, logits or factors; the scale and soft cap of logits.

A gated linear unit (GLU) multiplies the activated first half of a projection by the second (Shazeer, "GLU variants
improve transformer", arXiv 2002.05202). With SiLU it is SwiGLU. gpt-oss's, "swiglu_oai" as llama.cpp calls it, clamps
both halves and adds 1 to the second: min(g, 7) sigmoid(1.702 min(g, 7)) (clamp(u, -7, 7) + 1) (OpenAI, arXiv
2508.10925, section 2).
"""

from typing import Any

from .activation import ACTIVATIONS, FLOPS_PER_ELEMENT
from .cost import Cost

CLAMPED = "swiglu_oai"
"""gpt-oss's gate, whose other half changes too"""
CLAMPED_SLOPE, CLAMPED_LIMIT = 1.702, 7.0
"""Its factor in the sigmoid, and its bound on both halves, as kernels have them too"""
GATES = (*ACTIVATIONS, CLAMPED)
"""Names of the gates of a gated MLP."""


def glu(x: Any, activation: str, xp: Any, out: Any) -> Any:
    """activation(gate) * up.

    Args:
        x: [T, 2 F]: gate and up concatenated; or [T, F]: both at once, activation(x) * x, which is the square of ReLU
            for "relu"; not modified
        activation: a name in `GATES`
        xp: the array module
        out: [T, F], filled and returned
    """
    F = out.shape[1]
    if activation == CLAMPED:
        return _clamped_glu(x[:, :F], x[:, -F:], xp, out)
    out[...] = x[:, :F]
    return xp.multiply(ACTIVATIONS[activation](out, xp), x[:, -F:], out=out)  # [T, 2 F] -> [T, F]


def _clamped_glu(gate: Any, up: Any, xp: Any, out: Any) -> Any:
    """min(g, 7) sigmoid(1.702 min(g, 7)) (clamp(u, -7, 7) + 1). 2 x [T, F] -> [T, F]"""
    xp.minimum(gate, CLAMPED_LIMIT, out=out)
    y = xp.exp(out * -CLAMPED_SLOPE)
    y += 1
    out /= y
    y = xp.maximum(xp.minimum(up, CLAMPED_LIMIT), -CLAMPED_LIMIT)
    y += 1
    return xp.multiply(out, y, out=out)


def glu_cost(T: int, F: int, activation: str, number_bytes: int = 4, *, alone: bool = False) -> Cost:
    """The activation's FLOPs and one product for each result; 2 T F numbers read, or T F of rows alone, T F written."""
    flops = T * F * (FLOPS_PER_ELEMENT[activation] + 1)
    result = number_bytes * T * F
    return Cost(
        flops, result if alone else 2 * result, result, 2 * result
    )  # saved: writing and reading the activated gate


def scale_logits(logits: Any, scale: float, cap: float | None, xp: Any) -> Any:
    """cap * tanh(scale * logits / cap), or scale * logits without a soft cap, in place. [R, V] -> [R, V]

    The soft cap is Gemma 2's (Gemma Team, arXiv 2408.00118, section 2).
    """
    if scale != 1:
        logits *= scale
    if cap is not None:
        logits /= cap
        xp.tanh(logits, out=logits)
        logits *= cap
    return logits


def scale_logits_cost(R: int, V: int, *, scaled: bool, capped: bool) -> Cost:
    """A product for the scale; a division, a hyperbolic tangent and a product for the cap. Logits are float32."""
    numbers, steps = 4 * R * V, scaled + capped
    return Cost((scaled + 3 * capped) * R * V, numbers, numbers, (steps - 1) * 2 * numbers)


def gate(x: Any, logits: Any, xp: Any, out: Any, *, silu: bool = False) -> Any:
    """x * sigmoid(logits), each of n equal parts of a row by a logit of its own. [T, F], [T, n] -> [T, F]

    Of a whole row: the shared expert of Qwen2-MoE (arXiv 2407.10671, section 2.2.2). With `silu` the factor is
    logits * sigmoid(logits) (Gated DeltaNet: Yang et al., arXiv 2412.06464, section 3.4).
    """
    T, F = x.shape
    parts = x.reshape(T, logits.shape[1], -1)  # [T, F] -> [T, n, F / n]
    factors = ((logits if silu else 1) / (1 + xp.exp(-logits)))[:, :, None]
    return xp.multiply(parts, factors, out=out.reshape(parts.shape)).reshape(T, F)


def gate_cost(T: int, F: int, n: int, number_bytes: int = 4) -> Cost:
    """Three FLOPs for each sigmoid or SiLU (exponential, sum, division), and a product for each number."""
    numbers = number_bytes * T * F
    return Cost(3 * T * n + T * F, numbers + number_bytes * T * n, numbers)


def multiply(x: Any, others: Any | None, factor: Any | None, xp: Any, out: Any) -> Any:
    """x * others * factor, of which one or both are there.

    The product of gated embeddings of single layers (Gemma 3n and 4), the scalar of each layer (Gemma 4, as in
    transformers; Touvron et al., arXiv 2103.17239, section 2 have a factor of each channel), and the multipliers of
    parts of a projection (Falcon-H1, arXiv 2507.22448).

    Args:
        x: [T, F], not modified
        others: [T, F] or None
        factor: one number [1], one of each column [F], or None
        xp: the array module
        out: [T, F], filled and returned
    """
    xp.multiply(x, factor if others is None else others, out=out)
    return out if others is None or factor is None else xp.multiply(out, factor, out=out)


def multiply_cost(T: int, F: int, *, by_others: bool, factors: int, number_bytes: int = 4) -> Cost:
    """A product for each number by another, and by one of so many factors, which are float32."""
    numbers, products = number_bytes * T * F, by_others + bool(factors)
    saved = (products - 1) * 2 * numbers
    return Cost(products * T * F, numbers * (1 + by_others) + 4 * factors, numbers, saved)
