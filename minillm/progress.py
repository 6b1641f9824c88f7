"""Progress of long work: what tells it, and who is told.

Whatever may take long is done inside `work`, and tells there how far it is; it prints nothing. A bar appears after a
second (`progress_bar.py`), on standard error if that is a terminal, or in a notebook. Only calls of the main thread
have one, so a server or an `AsyncEngine` shows none while it runs. It vanishes if the work fails or is interrupted.

Public calls take `progress=False` for none (`showing`); `watching` hands the reports to a function instead.
"""

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from .progress_bar import Bar

PROMPT = "prompt"
"""Title of work in which a stream reports how much of its prompt is computed."""


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
        return self._watch.due if isinstance(self._watch, Bar) else self._watch is not None

    def advance(self, count: int = 1) -> None:
        """Report that so much more is done."""
        self.done += count
        if self._watch is not None:
            self._watch(self)


Watch = Callable[[Work], None]
"""Called with each report."""

_watch: ContextVar[Watch | None] = ContextVar("watch", default=None)
_outermost: ContextVar[Work | None] = ContextVar("outermost", default=None)


@contextmanager
def work(title: str, total: int | None, unit: str) -> Iterator[Work]:
    """Work that may take long, done inside the `with` block; arguments as of `Work`.

    Of nested work only the outermost is shown; what has its title adds to it.
    """
    outer = _outermost.get()
    if outer is not None:
        yield outer if outer.title == title else Work(title, total, unit)
        return
    watch = Bar() if bars_shown() else _watch.get()
    doing = Work(title, total, unit, watch)
    token = _outermost.set(doing)
    ended: Work | None = None
    try:
        yield doing
        ended = doing
    finally:
        _outermost.reset(token)
        if isinstance(watch, Bar):
            watch.close(ended)


def tick() -> None:
    """Report that time passes, from inside a long piece of the work around, if there is any."""
    doing = _outermost.get()
    if doing is not None and isinstance(doing._watch, Bar):
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
