"""The processes that share each layer, as a backend sees them; `distributed/` has them."""

from typing import Any, Protocol


class Group(Protocol):
    """The processes that share each layer, as a backend sees them."""

    rank: int
    size: int
    captures: bool
    """Whether `all_reduce` only launches on the device's stream, so that a CUDA graph may hold it"""

    def all_reduce(self, x: Any) -> Any:
        """Replace x by the sum over the processes, and return it."""

    def all_gather(self, value: Any) -> list[Any]:
        """A small object of each process, in their order."""

    def repeated(self, nbytes: int) -> None:
        """Count an `all_reduce` that a graph has repeated."""
