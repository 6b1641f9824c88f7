"""Activations in float64, by their names in config.json: what the kernels are held against."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

erf = np.vectorize(math.erf, otypes=[np.float64])


def _sigmoid(x: Any) -> Any:
    return 1 / (1 + np.exp(-x))


EXACT: dict[str | None, Callable[[Any], Any]] = {
    None: lambda x: x,
    "relu": lambda x: np.maximum(x, 0),
    "relu2": lambda x: np.maximum(x, 0) ** 2,
    "gelu": lambda x: x * (1 + erf(x / math.sqrt(2))) / 2,
    "gelu_new": lambda x: x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2,
    "silu": lambda x: x * _sigmoid(x),
}


def exact_gate(activation: str, gate: Any, up: Any) -> Any:
    """activation(gate) * up, or gpt-oss's gate, in float64."""
    if activation != "swiglu_oai":
        return EXACT[activation](gate) * up
    gate = np.minimum(gate, 7)
    return gate * _sigmoid(1.702 * gate) * (np.clip(up, -7, 7) + 1)
