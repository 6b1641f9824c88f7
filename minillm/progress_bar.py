"""The bar that shows the progress of long work, drawn by tqdm, which is imported when a bar appears."""

import contextlib
import os
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

from .output_files import undone_by_signals


class Shown(Protocol):
    """The attributes of work that a bar shows: `progress.Work` has them."""

    title: str
    total: int | None
    unit: str
    done: int
    note: str


BAR_DELAY = 1.0
"""Seconds before a bar appears."""

INTERVAL = 0.1
"""Seconds between two reports that a bar shows."""

FORMAT = "{l_bar}{bar}| {n_fmt}/{total_fmt}{unit} [{elapsed}<{remaining}, {rate_noinv_fmt}{postfix}]"

_stay: ContextVar[bool] = ContextVar("stay", default=True)


@contextmanager
def vanishing() -> Iterator[None]:
    """Clear bars also when their work is done, as commands do: what they print stays without gaps."""
    token = _stay.set(False)
    try:
        yield
    finally:
        _stay.reset(token)


class Bar:
    """The bar of one piece of work, drawn by tqdm, which is imported when the bar appears."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._next = self._began + BAR_DELAY
        self._bar: Any = None
        self._undo = contextlib.ExitStack()

    @property
    def due(self) -> bool:
        """Whether it is time to draw."""
        return time.monotonic() >= self._next

    def __call__(self, work: Shown) -> None:
        """Draw, if it is time."""
        if self.due:
            self._next = time.monotonic() + INTERVAL
            self._draw(work)

    def _draw(self, work: Shown) -> None:
        if self._bar is None:
            self._bar = self._open(work)
        if work.note:
            self._bar.set_postfix_str(work.note, refresh=False)
        self._bar.total = work.total
        self._bar.update(work.done - self._bar.n)

    def _open(self, work: Shown) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a notebook without ipywidgets gets a bar of text
            from tqdm.auto import tqdm
        bar = tqdm(
            total=work.total,
            desc=work.title,
            unit=f" {work.unit}",
            bar_format=FORMAT,
            unit_scale=(work.total or 0) >= 100_000,
            dynamic_ncols=True,
            miniters=0,
            mininterval=0,
            smoothing=0,  # the average: some reports say only that time passes
            delay=1e-9,  # draws nothing before the first numbers
        )
        bar.start_t = bar.last_print_t = time.time() - (time.monotonic() - self._began)
        self._undo.enter_context(undone_by_signals(_clear_line))
        return bar

    def close(self, work: Shown | None) -> None:
        """Draw the end of the work and leave it; None: the work has failed, and its bar vanishes."""
        if self._bar is not None:
            if work is not None:
                work.total = work.done  # what was to be done at most
                self._draw(work)
            self._bar.leave = work is not None and _stay.get()
            self._bar.close()
        self._undo.close()


def _clear_line() -> None:
    os.write(2, b"\r\x1b[K")


@contextmanager
def bars_aside() -> Iterator[None]:
    """Clear the bars on standard error for the time of the `with` block, so that it can print a line."""
    drawn = sys.modules.get("tqdm.std")
    if drawn is None:
        yield
    else:
        with drawn.tqdm.external_write_mode(file=sys.stderr):
            yield
