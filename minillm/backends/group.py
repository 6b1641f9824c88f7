"""The processes that share each layer, as a backend sees them; `distributed/` has them."""

from typing import Any, Protocol


class Group(Protocol):
    """The processes that share each layer, as a backend sees them."""

    rank: int
    size: int

    def all_reduce(self, x: Any) -> Any:
        """Replace x by the sum over the processes, and return it."""
