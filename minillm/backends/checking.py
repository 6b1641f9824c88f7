"""Finding where NaN or infinity begins."""

from typing import Any

import numpy as np

from ..errors import NumericalError
from .weights import Weight
from .wrapping import WrappedBackend


class CheckingBackend(WrappedBackend):
    """Holds every result against infinity; the first that is not finite is named with its layer."""

    def observe(self, operation: str, weight: Weight | None, result: Any, **arguments: Any) -> None:
        """Raise `NumericalError` where a number is not finite."""
        if np.isfinite(self.to_host(result)).all():
            return
        where = "before the first layer" if self.layer is None else f"in layer {self.layer}"
        weights = [w.name for w in (weight, *arguments.values()) if isinstance(w, Weight)]
        what = f"{operation} with {' and '.join(weights)}" if weights else operation
        raise NumericalError(
            f"NaN or infinity {where}, made by {what}: the weights hold such a value or their numbers outgrow float32"
        )
