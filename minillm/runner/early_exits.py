"""Early exits: logits from the hidden states between layers, of rows whose feeds ask for them (`Feed.exits`).

As in transformers' DoLa, a hidden state is multiplied by the language model head as it is: without the final norm, and
without what scales or caps the model's own logits.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..backends.observe import WrappedBackend
from ..backends.operations import Backend
from ..backends.weights import Weight
from ..reference.experts import Routing


class EarlyExits:
    """Rows of a forward pass that take early exits, and after the pass their logits."""

    def __init__(self, layers: Mapping[int, tuple[int, ...]]) -> None:
        """`layers`: row of the batch -> after how many layers each its logits are wanted; 0 is the embedding."""
        self._layers = layers
        self._logits: dict[int, NDArray[np.float32]] = {}

    @property
    def finite(self) -> bool:
        """Whether all logits are."""
        return all(bool(np.isfinite(logits).all()) for logits in self._logits.values())

    def of_row(self, row: int) -> NDArray[np.float32] | None:
        """The logits of a row, in the order of its layers [exits, V]; None if it takes no early exit."""
        if row not in self._layers:
            return None
        return np.stack([self._logits[layer][self.rows_at(layer).index(row)] for layer in self._layers[row]])

    def rows_at(self, layer: int) -> list[int]:
        """The rows that exit before a layer, ascending."""
        return [row for row, layers in sorted(self._layers.items()) if layer in layers]

    def around(
        self, inner: Backend, model: Any, backend_of: Callable[[Sequence[int]], Backend], others: Any
    ) -> "ExitingBackend":
        """A backend that computes the logits between the layers of a pass.

        Args:
            inner: that runs the layers
            model: whose head is applied
            backend_of: the backend that runs the head for some rows of the batch
            others: rows as operations take them
        """
        return ExitingBackend(inner, self, model.head, backend_of, getattr(others, "dtype", None))

    def keep(self, layer: int, logits: NDArray[np.float32]) -> None:
        """Keep the logits of the rows of a layer. [R, V]"""
        self._logits[layer] = logits


class ExitingBackend(WrappedBackend):
    """Computes the logits of early exits between two layers; all else is the wrapped backend's."""

    only_looks = True

    def __init__(
        self, inner: Backend, exits: EarlyExits, head: Any, backend_of: Callable[[Sequence[int]], Backend], dtype: Any
    ) -> None:
        """Set what `EarlyExits.around` says, and the dtype of rows."""
        super().__init__(inner)
        self._exits, self._head, self._backend_of, self._dtype = exits, head, backend_of, dtype

    def enter_layer(self, layer: int, x: Any = None) -> None:
        """As the wrapped backend, then the exits before this layer."""
        super().enter_layer(layer, x)
        if at := self._exits.rows_at(layer):
            backend = self._backend_of(at)
            states = backend.take_rows(x, self.xp.asarray(at, self._dtype))  # [T, E] -> [R, E]
            states = self._head.states(backend, states)  # [R, E] -> [R, W]
            logits = backend.linear(states, self._head.weight)  # [R, W] -> [R, V]
            self._exits.keep(layer, np.array(self.sampler.to_host(logits), np.float32))

    def linear_reduced(self, x: Any, weight: Weight, residual: Any | None) -> Any:
        """As the wrapped backend, which hooks may look at."""
        return self.inner.linear_reduced(x, weight, residual)

    def combine_reduced(self, y: Any, routing: Routing, residual: Any) -> Any:
        """As the wrapped backend, which hooks may look at."""
        return self.inner.combine_reduced(y, routing, residual)
