"""Progress of loading or writing a model: reports for callers to display, and a bar on a terminal.

The library itself prints nothing.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

Watch = Callable[[int, int], None]
"""Callback: (parameters done, parameters in total)."""

_watch: ContextVar[Watch | None] = ContextVar("watch", default=None)

BAR_DELAY = 1
"""Seconds before the bar appears."""


def report(done: int, total: int) -> None:
    """Report that `done` of `total` parameters are loaded or written."""
    watch = _watch.get()
    if watch is not None:
        watch(done, total)


@contextmanager
def watching(watch: Watch) -> Iterator[None]:
    """Pass the reports inside the `with` block to `watch`."""
    token = _watch.set(watch)
    try:
        yield
    finally:
        _watch.reset(token)


@contextmanager
def loading_bar(title: str = "loading") -> Iterator[None]:
    """Show the reports inside the `with` block on standard error, if it is a terminal: one bar per model."""
    from tqdm import tqdm

    bars: list[Any] = []

    def watch(done: int, total: int) -> None:
        if not bars or bars[-1].n >= bars[-1].total:
            style = {"desc": title, "unit": " parameters", "unit_scale": True, "delay": BAR_DELAY}
            bars.append(tqdm(total=total, disable=None, **style))  # None: on a terminal only
        bars[-1].update(done - bars[-1].n)
        if done == total:
            bars[-1].close()

    try:
        with watching(watch):
            yield
    finally:
        for bar in bars:
            bar.close()
