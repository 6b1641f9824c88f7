"""Finding where NaN or infinity begins."""

from typing import Any

from ..errors import NumericalError
from .base import Weight
from .wrapping import WrappedBackend


class CheckingBackend(WrappedBackend):
    """Holds every result against infinity; the first that is not finite is named with its layer."""

    def observe(self, operation: str, weight: Weight | None, result: Any, **arguments: Any) -> None:
        """Raise `NumericalError` where a number is not finite."""
        if self.xp.isfinite(result).all():
            return
        where = "before the first layer" if self.layer is None else f"in layer {self.layer}"
        what = f"{operation} with {weight.name}" if weight is not None else operation
        raise NumericalError(
            f"NaN or infinity {where}, made by {what}: the weights hold such a value or their numbers outgrow float32"
        )
