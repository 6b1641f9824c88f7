"""Progress of long work: what tells it, and the bar that shows it.

Whatever may take long is done inside `work`, and tells there how far it is; it prints nothing. A bar appears after
`BAR_DELAY` seconds, on standard error if that is a terminal, or in a notebook. Only calls of the main thread have one,
so a server or an `AsyncEngine` shows none while it runs. It vanishes if the work fails or is interrupted.

Public calls take `progress=False` for none (`showing`); `watching` hands the reports to a function instead.
"""

import contextlib
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from .output_files import undone_by_signals

BAR_DELAY = 1.0
"""Seconds before a bar appears."""
INTERVAL = 0.1
"""Seconds between two reports that a bar shows."""
PROMPT = "prompt"
"""Title of work in which a stream reports how much of its prompt is computed."""
FORMAT = "{l_bar}{bar}| {n_fmt}/{total_fmt}{unit} [{elapsed}<{remaining}, {rate_noinv_fmt}{postfix}]"


class Work:
    """Long work: its title, how much of it is done, and how much there is."""

    def __init__(self, title: str, total: int | None, unit: str, watch: "Watch | None" = None) -> None:
        """Args:
        title: the verb, such as "loading"
        total: all that is to be done; None if nobody knows
        unit: what is counted, in the plural
        watch: called with each report
        """
        self.title, self.total, self.unit = title, total, unit
        self.done = 0
        self.note = ""
        """Shown after the numbers"""
        self._watch = watch

    @property
    def due(self) -> bool:
        """Whether a report would be shown now; for those to whom counting is work itself."""
        return self._watch.due if isinstance(self._watch, _Bar) else self._watch is not None

    def advance(self, count: int = 1) -> None:
        """Report that so much more is done."""
        self.done += count
        if self._watch is not None:
            self._watch(self)


Watch = Callable[[Work], None]
"""Called with each report."""

_watch: ContextVar[Watch | None] = ContextVar("watch", default=None)
_outermost: ContextVar[Work | None] = ContextVar("outermost", default=None)
_stay: ContextVar[bool] = ContextVar("stay", default=True)


@contextmanager
def work(title: str, total: int | None, unit: str) -> Iterator[Work]:
    """Work that may take long, done inside the `with` block; arguments as of `Work`.

    Of nested work only the outermost is shown; what has its title adds to it.
    """
    outer = _outermost.get()
    if outer is not None:
        yield outer if outer.title == title else Work(title, total, unit)
        return
    watch = _Bar() if bars_shown() else _watch.get()
    doing = Work(title, total, unit, watch)
    token = _outermost.set(doing)
    ended: Work | None = None
    try:
        yield doing
        ended = doing
    finally:
        _outermost.reset(token)
        if isinstance(watch, _Bar):
            watch.close(ended)


def tick() -> None:
    """Report that time passes, from inside a long piece of the work around, if there is any."""
    doing = _outermost.get()
    if doing is not None and isinstance(doing._watch, _Bar):
        doing.advance(0)


def underway(title: str) -> Work | None:
    """The work of this title around, if there is any: for those who do a part of it."""
    doing = _outermost.get()
    return doing if doing is not None and doing.title == title else None


@contextmanager
def watching(watch: Watch) -> Iterator[None]:
    """Pass the reports inside the `with` block to `watch`, in place of a bar."""
    token = _watch.set(watch)
    try:
        yield
    finally:
        _watch.reset(token)


def showing(progress: bool) -> contextlib.AbstractContextManager[None]:
    """A `with` block whose work shows bars only if `progress`."""
    return contextlib.nullcontext() if progress else watching(_ignore)


@contextmanager
def vanishing() -> Iterator[None]:
    """Clear bars also when their work is done, as commands do: what they print stays without gaps."""
    token = _stay.set(False)
    try:
        yield
    finally:
        _stay.reset(token)


def bars_shown() -> bool:
    """Whether work done here has a bar; for libraries that draw their own."""
    return _watch.get() is None and threading.current_thread() is threading.main_thread() and _attached()


def _ignore(work: Work) -> None:
    pass


def _attached() -> bool:
    """True if somebody can see a bar: standard error is a terminal, or Python runs in a notebook."""
    if "ipykernel.zmqshell" in sys.modules:  # as tqdm finds out
        return True
    try:
        return sys.stderr.isatty()
    except (AttributeError, ValueError):  # there is none, or it is closed
        return False


class _Bar:
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

    def __call__(self, work: Work) -> None:
        """Draw, if it is time."""
        if self.due:
            self._next = time.monotonic() + INTERVAL
            self._draw(work)

    def _draw(self, work: Work) -> None:
        if self._bar is None:
            self._bar = self._open(work)
        if work.note:
            self._bar.set_postfix_str(work.note, refresh=False)
        self._bar.total = work.total
        self._bar.update(work.done - self._bar.n)

    def _open(self, work: Work) -> Any:
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

    def close(self, work: Work | None) -> None:
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
