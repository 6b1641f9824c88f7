"""The weighted mean of the hidden states between layers, by which some encoders embed texts.

    x = sum_i w_i x_i / sum_i w_i        x_0 after the embedding, x_i after layer i, the last after the final norm

A weight of 0 leaves a state out.

Source: sentence-transformers 6.2, `WeightedLayerPooling`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..backends.observe import WrappedBackend
from ..backends.operations import Backend


class LayerMean:
    """The mean for some rows of one forward pass, in the place of early exits."""

    def __init__(self, weights: Sequence[float]) -> None:
        """`weights`: of each state, as many as there are layers and one more."""
        self._weights = weights
        self._sum: Any = 0.0

    @property
    def finite(self) -> bool:
        """Whether the sum is."""
        return bool(np.isfinite(self._sum).all())

    def around(
        self, inner: Backend, model: Any, backend_of: Callable[[Sequence[int]], Backend], rows: Any
    ) -> "LayerMeanBackend":
        """A backend that adds up the states of some rows between the layers of a pass; arguments as of `EarlyExits`."""
        self._sum = 0.0  # a pass that was not finite is computed once more
        return LayerMeanBackend(inner, self, rows)

    def counts(self, layer: int) -> bool:
        """Whether the state before a layer is added up; the last one is the pass's result."""
        return layer < len(self._weights) - 1 and self._weights[layer] != 0

    def add(self, layer: int, states: NDArray[np.float32]) -> None:
        """Add the states before a layer. [R, E]"""
        self._sum = self._sum + np.float32(self._weights[layer]) * states

    def of(self, last: NDArray[np.float32]) -> NDArray[np.float32]:
        """The mean, from the results of the pass, which are the last states. [R, E] -> [R, E]"""
        total = self._sum + np.float32(self._weights[-1]) * last  # [R, E]
        return np.asarray(total / np.float32(sum(self._weights)), np.float32)


class LayerMeanBackend(WrappedBackend):
    """Adds up hidden states between two layers; all else is the wrapped backend's."""

    only_looks = True

    def __init__(self, inner: Backend, mean: LayerMean, rows: Any) -> None:
        super().__init__(inner)
        self._mean, self._rows = mean, rows

    def enter_layer(self, layer: int, x: Any = None) -> None:
        """As the wrapped backend, then the sum."""
        super().enter_layer(layer, x)
        if self._mean.counts(layer):
            rows = self.inner.take_rows(x, self._rows)  # [T, E] -> [R, E]
            self._mean.add(layer, np.array(self.sampler.to_host(rows), np.float32))
