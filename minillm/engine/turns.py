"""A fair lock that serialises calls of several threads, and defers Ctrl-C to the end of a step.

Python raises KeyboardInterrupt between any two instructions of the main thread. In the middle of a step this would
leak pages and leave requests unfinished. So while an engine works the signal is only recorded, and raised in a
consistent state: after a step, or when the call returns. A second Ctrl-C is raised at once where an engine computes
(`Interrupts.exposed`), which its caller is prepared for; the few instructions between, as those that queue a request or
pass the lock on, are not interrupted.
"""

import _signal  # type: ignore[import-not-found]
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from ..errors import EngineStateError

POLL_SECONDS = 0.05
"""Interval at which the main thread, while waiting for its turn, checks for Ctrl-C."""

_set_handler: Callable[[int, Any], Any] = _signal.signal
"""`signal.signal` without the conversion to enums, which takes ten times as long as the call."""


class Interrupts:
    """Deferred handling of Ctrl-C in the main thread. Other threads never receive it."""

    def __init__(self) -> None:
        self._depth = 0
        self._pending = 0
        self._exposed = False
        self._handler: Callable[[int, FrameType | None], Any] | None = None

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Defer Ctrl-C until the block ends, or until `check` is called in it. Blocks may be nested."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        if self._depth == 0:
            self._pending, self._exposed = 0, False
            handler = signal.getsignal(signal.SIGINT)
            self._handler = handler if callable(handler) and not getattr(handler, "ends_process", False) else None
            if self._handler is not None:  # not ignored, nor a handler that ends the process
                _set_handler(signal.SIGINT, self._note)
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if self._depth == 0 and self._handler is not None:
                _set_handler(signal.SIGINT, self._handler)
                self._raise()

    @contextmanager
    def exposed(self) -> Iterator[None]:
        """Raise a second Ctrl-C at once inside the block, whose caller restores what it may leave half done."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = self._exposed
        try:
            self._exposed = True
            if self._pending > 1:
                self._raise()
            yield
        finally:
            self._exposed = before

    def check(self) -> None:
        """Raise KeyboardInterrupt (or call the program's own handler) if Ctrl-C was deferred."""
        if threading.current_thread() is threading.main_thread():
            self._raise()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._pending += 1
        if self._pending > 1 and self._exposed:
            self._raise()

    def _raise(self) -> None:
        if self._pending and self._handler is not None:
            self._pending = 0
            self._handler(signal.SIGINT, None)


interrupts = Interrupts()
"""The only instance: signals belong to the process, not to an engine."""


class Turns:
    """A fair lock, granted in order of arrival, so that a thread in a loop cannot starve the others."""

    def __init__(self) -> None:
        self._process = os.getpid()
        self._guard = threading.Lock()
        self._owner: int | None = None
        self._queue: deque[tuple[int, threading.Event]] = deque()

    @contextmanager
    def take(self) -> Iterator[None]:
        """Hold the lock inside the block. Ctrl-C is deferred inside.

        Raises:
            EngineStateError: this thread has the turn already, or a thread had it that this forked process lacks.
        """
        with interrupts.deferred():
            self._acquire(threading.get_ident())
            try:
                yield
            finally:
                self._release()

    def check(self) -> None:
        """Refuse a call from inside a step.

        Raises:
            EngineStateError: this thread has the turn.
        """
        if self._owner == threading.get_ident():
            raise EngineStateError(
                "the engine is called from inside one of its own steps (by a logits processor or another function "
                "given to it): call another engine there, or call this one after the step"
            )

    def _acquire(self, thread: int) -> None:
        if self._process != os.getpid():
            self._begin_anew(thread)
        with self._guard:
            if self._owner is None:
                self._owner = thread
                return
            self.check()
            mine = threading.Event()
            self._queue.append((thread, mine))
        while not mine.wait(POLL_SECONDS):
            try:
                interrupts.check()
            except BaseException:
                self._give_up(thread, mine)
                raise

    def _begin_anew(self, thread: int) -> None:
        """Reset the lock in a forked child, which has none of the waiting or working threads."""
        if self._owner not in (None, thread):
            raise EngineStateError(
                "the process was forked while another thread used this engine, so its state is unknown here: "
                "make an engine in the child, or fork while none is in use"
            )
        self._process, self._guard = os.getpid(), threading.Lock()
        self._queue.clear()

    def _give_up(self, thread: int, mine: threading.Event) -> None:
        with self._guard:
            if not mine.is_set():
                self._queue.remove((thread, mine))
                return
        self._release()

    def _release(self) -> None:
        with self._guard:
            self._owner = None
            if self._queue:
                self._owner, following = self._queue.popleft()
                following.set()
