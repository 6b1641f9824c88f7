"""The thread that runs an engine for others, and its inbox: what `AsyncEngine` stands on.

Requests, aborts and calls are functions in the inbox, which the thread runs between two steps; while any request is
unfinished it steps, otherwise it sleeps. The events of a request wait in a queue of its own for the task that reads
them. Those of one step wake the readers of an event loop by one `call_soon_threadsafe`, whatever their number.
"""

import asyncio
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from queue import Empty, SimpleQueue
from typing import Any, Literal, NamedTuple, TypeVar

from ..decoding.strategy import Request
from ..errors import EngineStateError, ParameterError, QueueFullError, SlowReaderError, holdable, shown
from .engine import Engine
from .results import Event
from .scheduler import Load

T = TypeVar("T")

logger = logging.getLogger("minillm")


@dataclass(eq=False)
class LiveRequest:
    """A request in the engine: what its thread and its reader share."""

    call: "Submission"
    id: int
    """The engine's"""
    request: Request
    unread: deque[Event] = field(default_factory=deque)
    """Written by the engine's thread, read by the stream"""
    written: int = 0
    """Tokens written to `unread` so far; the difference to `read` are those that it holds"""
    read: int = 0
    dropped: bool = False
    """True once nobody will read"""
    overrun: bool = False
    """True once it was aborted because of its reader"""
    waiter: "asyncio.Future[None] | None" = None
    """The future that the reader awaits; belongs to the event loop's thread"""

    def fail(self, error: Exception) -> None:
        """Tell the reader that the request has ended with an error."""
        self.unread.append(Event(self.call.name, 0, "", (), finish_reason="error", error=error, request_finished=True))


@dataclass(eq=False)
class Submission:
    """A call of `submit`: its name and its requests."""

    name: str
    count: int
    """Number of its requests"""
    loop: asyncio.AbstractEventLoop
    """In which its requests are read"""
    lives: "list[LiveRequest]" = field(default_factory=list)
    """Its requests, once they are queued"""
    unfinished: int = 0
    """Number of `lives` that are not done"""
    state: Literal["arriving", "taken", "released"] = "arriving"
    """Taken once its requests are handed to the engine; released if that came to nothing"""
    aborted: bool = False
    created: float = field(default_factory=time.monotonic)
    """When it came, in seconds of `time.monotonic`"""


class EngineThread:
    """The thread that runs the engine, and its inbox. It knows tasks only as readers to wake.

    Public methods may be called from any thread; those with an underscore run in the engine's.
    """

    def __init__(self, engine: Engine, max_waiting: int, max_unread: int) -> None:
        self._engine = engine
        self._max_waiting = max_waiting
        self._max_unread = max_unread
        self._process = os.getpid()
        self._lock = threading.RLock()  # a garbage collection may call `stop` while this thread has it
        self._inbox: SimpleQueue[_Message | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._calls: dict[str, Submission] = {}
        """Unfinished calls by name."""
        self._arriving = 0
        """Requests of calls that the engine has not taken yet."""
        self._entering = 0
        """While it takes a call's, one by one: how many will wait in its queue"""
        self._draining = False
        self._lives: dict[int, LiveRequest] = {}
        """Unfinished requests by the engine's id."""
        self._quiet: list[Future[None]] = []
        self._stopped: Future[None] = _uncancellable()
        self._end: tuple[str, BaseException | None] | None = None
        """Why it takes no more messages."""

    # --- from any thread ---

    def post(self, function: Callable[..., T], *args: Any) -> "Future[T]":
        """Run a function between two steps. The thread is started if it is not running.

        Raises:
            EngineStateError: the thread has ended.
        """
        future: Future[T] = Future()
        self.check_process()
        with self._lock:
            self._check()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="minillm-engine", daemon=True)
                self._engine._dispatcher.owners.add(self._thread)
                self._thread.start()
            self._inbox.put(_Message(future, function, args))
        return future

    def claim(self, call: Submission) -> None:
        """Reserve a call's name and its places in the queue.

        Raises:
            EngineStateError: the thread has ended, or takes no more calls.
            ParameterError: the name is taken or not text; or the queue never has so many places.
            QueueFullError: the queue is too full.
        """
        if call.count > self._max_waiting:
            raise ParameterError(
                f"prompt: {call.count} prompts at once, and the queue takes {self._max_waiting}: send fewer, or raise "
                "max_waiting"
            )
        if not isinstance(call.name, str) or not call.name:
            raise ParameterError(f"request_id should be a text, found {shown(call.name)}")
        self.check_process()
        with self._lock:
            if self._draining:
                raise EngineStateError("the engine is draining: it takes no new requests")
            self._check()
            if call.name in self._calls:
                raise ParameterError(f"request_id={shown(call.name)} is the name of an unfinished call: choose another")
            waiting = self._waiting()
            if waiting + call.count > self._max_waiting:
                raise QueueFullError(
                    f"{waiting} requests wait and the queue takes {self._max_waiting}, too few for {call.count} more: "
                    "try again later"
                )
            self._calls[call.name] = call
            self._arriving += call.count

    def give_up(self, call: Submission) -> None:
        """Release the name and the places of a call that nobody waits for any more, or abort it."""
        with self._lock:
            if call.state == "arriving":
                self._release(call)
        self._abort_later(call)

    def abort(self, name: str) -> None:
        """Abort the call of this name, if there is one."""
        call = self._calls.get(name)
        if call is not None:
            self._abort_later(call)

    def abort_all(self) -> None:
        """Abort all calls."""
        for call in list(self._calls.values()):
            self._abort_later(call)

    def drop(self, live: LiveRequest) -> None:
        """Abort a request that nobody reads any more. Takes no lock: it may be called by the garbage collector."""
        live.dropped = True
        self._inbox.put(_Message(None, self._abort, (live,)))

    def load(self) -> Load:
        """The engine's, with those that are on their way to its queue."""
        return replace(self._engine.load(), waiting=self._waiting())

    def _waiting(self) -> int:
        """Requests that wait. All of `Engine.load` would take 0.1 ms for each request."""
        return max(self._engine.waiting, self._entering) + self._arriving

    def drain(self) -> "Future[None]":
        """Take no more calls. Done as soon as none is unfinished."""
        future = _uncancellable()
        if self._process != os.getpid():
            future.set_result(None)
            return future
        with self._lock:
            self._draining = True
            if self._calls:
                self._quiet.append(future)
            else:
                future.set_result(None)
        return future

    def check_process(self) -> None:
        """Refuse a forked child, where the thread is not, and perhaps nobody who releases the lock.

        Raises:
            EngineStateError: this is one.
        """
        if self._process != os.getpid():
            raise EngineStateError("the process was forked, and the engine's thread is in its parent: make one here")

    def stop(self) -> "Future[None]":
        """End the thread after the current step. Done once it has ended."""
        if self._process != os.getpid():  # forked: here is no thread, and perhaps nobody who releases the lock
            self._stopped = _uncancellable()
            self._stopped.set_result(None)
            return self._stopped
        with self._lock:
            started = self._thread is not None
            if not started and self._end is None:
                self._end = "the engine is closed", None
                self._stopped.set_result(None)
        self._inbox.put(None)
        return self._stopped

    def join(self) -> None:
        """Wait for the thread's end, unless this is the thread."""
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    # --- in the engine's thread, or with the lock ---

    def take(self, call: Submission, requests: Sequence[Request]) -> None:
        """Queue the requests of a call in the engine; in its thread.

        Raises:
            ParameterError, CacheFullError: as `Engine.submit`; nothing was queued.
        """
        with self._lock:
            if call.state == "released":
                return
            call.state = "taken"
            self._arriving -= call.count
            self._entering = self._engine.waiting + call.count
        for request in requests:
            request.created = call.created
        try:
            ids = self._engine.submit(requests)
        except Exception:
            with self._lock:
                self._release(call)
            raise
        finally:
            self._entering = 0
        call.lives = [LiveRequest(call, request_id, request) for request_id, request in zip(ids, requests, strict=True)]
        call.unfinished = call.count
        self._lives.update((live.id, live) for live in call.lives)
        if not requests:
            with self._lock:
                self._forget(call)
        if call.aborted:
            self._abort(*call.lives)

    def _check(self) -> None:
        if self._end is not None:
            raise _ended(self._end)

    def _release(self, call: Submission) -> None:
        """Give back what `claim` took. The lock is held."""
        self._arriving -= call.count if call.state == "arriving" else 0
        call.state = "released"
        self._forget(call)

    def _forget(self, call: Submission) -> None:
        """Remove a finished call. The lock is held."""
        if self._calls.get(call.name) is call:
            del self._calls[call.name]
        if not self._calls:
            for future in self._quiet:
                future.set_result(None)
            self._quiet.clear()

    def _abort_later(self, call: Submission) -> None:
        call.aborted = True  # `take` looks at it
        self._inbox.put(_Message(None, lambda: self._abort(*call.lives), ()))

    def _abort(self, *lives: LiveRequest) -> None:
        for live in lives:
            if live.id in self._lives:
                self._engine.abort(live.id)

    def _run(self) -> None:
        end: tuple[str, BaseException | None] = "the engine is closed", None
        try:
            while self._serve_inbox():
                if self._lives:
                    self._deliver(self._engine.step())
        except EngineStateError as error:  # somebody has closed the engine itself
            end = str(error), error
        except BaseException as error:
            logger.exception("the engine's thread failed")
            end = f"the engine's thread failed: {type(error).__name__}: {error}", error
        self._finish(end)

    def _serve_inbox(self) -> bool:
        """Run the messages that there are; waits for one if nothing is unfinished. False: the thread should end."""
        wait = not self._lives
        while True:
            try:
                message = self._inbox.get(block=wait)
            except Empty:
                return True
            if message is None:
                return False
            message.run()
            wait = False

    def _deliver(self, events: Sequence[Event]) -> None:
        """Hand the events of a step to their readers, and wake these."""
        readers: dict[LiveRequest, None] = {}
        for event in events:
            live = self._lives.get(event.request_id)  # type: ignore[arg-type]
            if live is None:
                continue  # of a request that was added to the engine behind our back
            if event.request_finished:
                self._end_of(live)
            if not (live.dropped or live.overrun):
                event.request_id = live.call.name
                live.unread.append(event)
                live.written += len(event.token_ids)
                readers[live] = None
        for live in readers:
            if live.written - live.read > self._max_unread and live.id in self._lives:
                self._overrun(live)
        for live in wake(readers):
            live.dropped = True
            self._abort(live)

    def _overrun(self, live: LiveRequest) -> None:
        """End a request whose reader is too slow."""
        live.overrun = True
        live.fail(
            SlowReaderError(
                f"{live.written - live.read} tokens of a request lay unread, and {self._max_unread} may: it was "
                "aborted; read faster, or raise max_unread"
            )
        )
        self._abort(live)

    def _end_of(self, live: LiveRequest) -> None:
        del self._lives[live.id]
        live.call.unfinished -= 1
        if not live.call.unfinished:
            with self._lock:
                self._forget(live.call)

    def _finish(self, end: tuple[str, BaseException | None]) -> None:
        """Fail all that waits, and take no more."""
        with self._lock:
            self._end = end
            self._engine._dispatcher.owners.discard(threading.current_thread())
            lives = list(self._lives.values())
            self._lives.clear()
            for call in list(self._calls.values()):
                self._forget(call)
        with suppress(Exception):  # of an engine that fails
            for live in lives:
                self._engine.abort(live.id)
        for live in lives:
            live.fail(_ended(end))
        wake(lives)
        while not self._inbox.empty():
            message = self._inbox.get()
            if message is not None:
                message.fail(_ended(end))
        self._stopped.set_result(None)


class _Message(NamedTuple):
    """A function to run in the engine's thread, and what receives its result."""

    future: "Future[Any] | None"
    function: Callable[..., Any]
    arguments: tuple[Any, ...]

    def run(self) -> None:
        """Run it, if its result is still wanted."""
        if self.future is None:
            self.function(*self.arguments)
        elif self.future.set_running_or_notify_cancel():
            try:
                self.future.set_result(self.function(*self.arguments))
            except BaseException as error:
                self.future.set_exception(holdable(error))

    def fail(self, error: Exception) -> None:
        """Answer with an error."""
        if self.future is not None and self.future.set_running_or_notify_cancel():
            self.future.set_exception(error)


def _ended(end: tuple[str, BaseException | None]) -> EngineStateError:
    error = EngineStateError(end[0])
    error.__cause__ = end[1]
    return error


def _uncancellable() -> "Future[None]":
    """A future that a cancelled task cannot cancel for the others that wait for it."""
    future: Future[None] = Future()
    future.set_running_or_notify_cancel()
    return future


def wake(lives: Iterable[LiveRequest]) -> list[LiveRequest]:
    """Wake the readers of requests, those of an event loop by one callback. Returns those whose loop is closed."""
    loops: dict[asyncio.AbstractEventLoop, list[LiveRequest]] = {}
    for live in lives:
        loops.setdefault(live.call.loop, []).append(live)
    lost: list[LiveRequest] = []
    for loop, readers in loops.items():
        try:
            loop.call_soon_threadsafe(_wake_here, readers)
        except RuntimeError:
            lost += readers
    return lost


def _wake_here(lives: Sequence[LiveRequest]) -> None:
    for live in lives:
        waiter, live.waiter = live.waiter, None
        if waiter is not None and not waiter.done():  # it may be that of several requests, or cancelled
            waiter.set_result(None)
