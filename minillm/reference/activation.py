"""Activations of the MLP, by their names in config.json; gates and factors of rows; the scale and soft cap of logits.

GELU is x * Phi(x) with the normal distribution's Phi (Hendrycks and Gimpel, arXiv 1606.08415): "gelu" is the exact
form, "gelu_new" its approximation by tanh. SiLU is x * sigmoid(x) (section 2 of the same).

A gated linear unit (GLU) multiplies the activated first half of a projection by the second (Shazeer, "GLU variants
improve transformer", arXiv 2002.05202). With SiLU it is SwiGLU. gpt-oss's, "swiglu_oai" as llama.cpp calls it, clamps
both halves and adds 1 to the second: min(g, 7) sigmoid(1.702 min(g, 7)) (clamp(u, -7, 7) + 1) (OpenAI, arXiv
2508.10925, section 2).
"""

from typing import Any

from .cost import Cost

FLOPS_PER_ELEMENT = {"relu": 1, "gelu": 20, "gelu_new": 9, "silu": 3, "tanh": 1, "swiglu_oai": 8, "relu2": 2}
"""ReLU is one comparison; its square ("relu2") takes a product more. GELU as computed here is 20: a scaling; in erf 3
for t, 9 for the polynomial, 3 for the exponential (a square, exp, a product) and the subtraction from 1; then the
addition of 1 and two products. Its approximation is 9: two products and a sum for 1 + c x^2, two products for the
argument, tanh, the addition of 1 and two products. SiLU is 3: an exponential, a sum and a division. tanh alone counts
as one. gpt-oss's gate is 8 beside its last product: three comparisons, a product, SiLU's 3 and a sum."""

ALIASES = {"swish": "silu", "gelu_pytorch_tanh": "gelu_new", "gelu_fast": "gelu_new"}
"""Alternative names in config.json."""


def relu(x: Any, xp: Any) -> Any:
    """max(x, 0), in place. [T, F] -> [T, F]"""
    return xp.maximum(x, 0, out=x)


def relu2(x: Any, xp: Any) -> Any:
    """max(x, 0)^2, in place (So et al., arXiv 2109.08668, section 3.1). [T, F] -> [T, F]"""
    xp.maximum(x, 0, out=x)
    return xp.multiply(x, x, out=x)


def gelu(x: Any, xp: Any) -> Any:
    """x * (1 + erf(x / sqrt 2)) / 2, in place. [T, F] -> [T, F]"""
    y = erf(x * 0.7071067811865476, xp)
    y += 1
    y *= 0.5
    return xp.multiply(x, y, out=x)


def gelu_new(x: Any, xp: Any) -> Any:
    """x * (1 + tanh(sqrt(2 / pi) x (1 + 0.044715 x^2))) / 2, in place. [T, F] -> [T, F]"""
    y = x * x
    y *= 0.044715
    y += 1
    y *= x
    y *= 0.7978845608028654
    y = xp.tanh(y)
    y += 1
    y *= x
    return xp.multiply(y, 0.5, out=x)


def silu(x: Any, xp: Any) -> Any:
    """x / (1 + exp(-x)), in place. [T, F] -> [T, F]"""
    y = xp.exp(-x)
    y += 1
    return xp.divide(x, y, out=x)


def tanh(x: Any, xp: Any) -> Any:
    """The hyperbolic tangent, in place. [T, F] -> [T, F]"""
    return xp.tanh(x, out=x)


def erf(x: Any, xp: Any) -> Any:
    """The error function to an absolute error of 1.5e-7 (Abramowitz and Stegun, 7.1.26); NumPy has none."""
    z = xp.abs(x)
    t = 1 / (1 + 0.3275911 * z)
    y = 1.061405429 * t
    for coefficient in (-1.453152027, 1.421413741, -0.284496736, 0.254829592):
        y += coefficient
        y *= t
    y *= xp.exp(-z * z)
    return xp.copysign(1 - y, x)


ACTIVATIONS = {"relu": relu, "gelu": gelu, "gelu_new": gelu_new, "silu": silu, "relu2": relu2}
"""Activation functions of an MLP by name."""

CLAMPED = "swiglu_oai"
"""gpt-oss's gate, whose other half changes too"""
CLAMPED_SLOPE, CLAMPED_LIMIT = 1.702, 7.0
"""Its factor in the sigmoid, and its bound on both halves, as kernels have them too"""
GATES = (*ACTIVATIONS, CLAMPED)
"""Names of the gates of a gated MLP."""

LINEAR_ACTIVATIONS = ACTIVATIONS | {"tanh": tanh}
"""Activation functions of any projection: also the one before a classification's labels."""


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
