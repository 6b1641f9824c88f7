"""Activations of the MLP, by their names in config.json.

GELU is x * Phi(x) with the normal distribution's Phi (Hendrycks and Gimpel, arXiv 1606.08415): "gelu" is the exact
form, "gelu_new" its approximation by tanh. SiLU is x * sigmoid(x) (section 2 of the same).
"""

from typing import Any

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

LINEAR_ACTIVATIONS = ACTIVATIONS | {"tanh": tanh}
"""Activation functions of any projection: also the one before a classification's labels."""
