"""A progress bar on standard error while a model loads or is written: on a terminal, after one second."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..progress import watching

SECONDS = 1
"""Delay before the bar appears."""


@contextmanager
def loading_bar(title: str = "loading") -> Iterator[None]:
    """Show progress inside the `with` block, one bar per model."""
    from tqdm import tqdm

    bars: list[Any] = []

    def watch(done: int, total: int) -> None:
        if not bars or bars[-1].n >= bars[-1].total:
            style = {"desc": title, "unit": " parameters", "unit_scale": True, "delay": SECONDS}
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
