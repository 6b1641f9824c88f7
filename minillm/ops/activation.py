"""The activations of the MLP: ReLU and GELU.

GELU is x * Phi(x) with the normal distribution's Phi (Hendrycks and Gimpel, arXiv 1606.08415), the exact form that
transformers calls "gelu", not its tanh approximation.
"""

from typing import Any

FLOPS_PER_ELEMENT = {"relu": 1, "gelu": 20}
"""ReLU is one comparison. GELU as computed here is 20: a scaling; in erf 3 for t, 9 for the polynomial, 3 for the
exponential (a square, exp, a product) and the subtraction from 1; then the addition of 1 and two products."""


def relu(x: Any, xp: Any) -> Any:
    """max(x, 0), in place. [T, F] -> [T, F]"""
    return xp.maximum(x, 0, out=x)


def gelu(x: Any, xp: Any) -> Any:
    """x * (1 + erf(x / sqrt 2)) / 2, in place. [T, F] -> [T, F]"""
    y = erf(x * 0.7071067811865476, xp)
    y += 1
    y *= 0.5
    return xp.multiply(x, y, out=x)


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


ACTIVATIONS = {"relu": relu, "gelu": gelu}
"""Activation by its name in config.json."""
