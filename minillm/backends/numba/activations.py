"""Vectorised activations, and the epilogue of a product on a row: bias, activation, residual."""

from typing import Any

import numpy as np

from .elementary import exp, fused, inner

ACTIVATION_CODES = {None: 0, "relu": 1, "gelu": 2, "gelu_new": 3, "silu": 4}
"""Codes of the activations that `activate` computes. The reference runs others."""

_ZERO, _HALF, _ONE = np.float32(0), np.float32(0.5), np.float32(1)
_ROOT_HALF = np.float32(0.7071067811865476)
_TWICE_ROOT_2_BY_PI = np.float32(1.5957691216057308)
_LEAST = np.float32(-87)  # `exp` ends at 88


@inner
def activate(y: Any, code: int) -> None:
    """Apply the activation with this code of `ACTIVATION_CODES`, in place. [n]"""
    if code == 1:
        for i in range(len(y)):
            y[i] = _ZERO if y[i] < _ZERO else y[i]  # NaN stays
    elif code == 2:
        for i in range(len(y)):
            y[i] = _gelu(y[i])
    elif code == 3:
        for i in range(len(y)):
            y[i] = _gelu_new(y[i])
    elif code == 4:
        for i in range(len(y)):
            y[i] = _logistic(y[i], y[i])


@fused
def _gelu(x: Any) -> Any:
    """As `reference.activation.gelu`: Abramowitz and Stegun, 7.1.26."""
    z = abs(x) * _ROOT_HALF
    t = _ONE / (_ONE + np.float32(0.3275911) * z)
    series = np.float32(1.061405429) * t + np.float32(-1.453152027)
    series = (series * t + np.float32(1.421413741)) * t + np.float32(-0.284496736)
    rest = (series * t + np.float32(0.254829592)) * t * exp(-z * z)  # 1 - erf(z)
    return x * _HALF * (rest if x < _ZERO else _ONE + (_ONE - rest))


@fused
def _gelu_new(x: Any) -> Any:
    """As `reference.activation.gelu_new`, by (1 + tanh u) / 2 = 1 / (1 + e**-2u)."""
    return _logistic(x, _TWICE_ROOT_2_BY_PI * x * (_ONE + np.float32(0.044715) * x * x))


@fused
def _logistic(x: Any, z: Any) -> Any:
    """x / (1 + e**-z)"""
    return x * _ZERO if z < _LEAST else x / (_ONE + exp(-z))


@inner
def finish_row(y: Any, bias: Any, activation: int, residual: Any) -> None:
    """activation(y + bias) + residual in place. y [n]; bias [n], or nothing; residual [1, n], or nothing"""
    if len(bias):
        for i in range(len(y)):
            y[i] += bias[i]
    activate(y, activation)
    if len(residual):
        before = residual[0]
        for i in range(len(y)):
            y[i] += before[i]
