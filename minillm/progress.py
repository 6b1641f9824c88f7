"""Progress reports of model loading, for callers to display. The library itself prints nothing."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

Watch = Callable[[int, int], None]
"""Callback: (parameters loaded, parameters in total)."""

_watch: ContextVar[Watch | None] = ContextVar("watch", default=None)


@contextmanager
def watching(watch: Watch) -> Iterator[None]:
    """Report loading inside the `with` block to `watch`."""
    token = _watch.set(watch)
    try:
        yield
    finally:
        _watch.reset(token)


def report(done: int, total: int) -> None:
    """Report that `done` of `total` parameters are loaded."""
    watch = _watch.get()
    if watch is not None:
        watch(done, total)
