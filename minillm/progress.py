"""How far the loading of a model has come, for whoever wants to show it. The library itself prints nothing."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

Watch = Callable[[int, int], None]
"""Called with how many parameters are loaded, and how many there are in all."""

_watch: ContextVar[Watch | None] = ContextVar("watch", default=None)


@contextmanager
def watching(watch: Watch) -> Iterator[None]:
    """Have `watch` told of what is loaded inside the `with` block."""
    token = _watch.set(watch)
    try:
        yield
    finally:
        _watch.reset(token)


def report(done: int, total: int) -> None:
    """Tell that `done` of `total` parameters are loaded."""
    watch = _watch.get()
    if watch is not None:
        watch(done, total)
