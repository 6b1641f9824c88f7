"""The thread that runs steps for the tasks of an `AsyncEngine`: one more caller of the engine's driver.

Requests are queued by the threads that make them, each with a mailbox of its own for the task that reads it. While any
is unfinished the thread runs steps, otherwise it sleeps. The events of one step wake the readers of an event loop by
one `call_soon_threadsafe`, whatever their number.
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
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple, TypeVar

from ..decoding.event import Event
from ..decoding.strategy import Request
from ..errors import EngineStateError, ParameterError, QueueFullError, SlowReaderError, holdable, shown
from .driver import Driver
from .load import Load

T = TypeVar("T")

logger = logging.getLogger("minillm")

IDLE_SECONDS = 10.0
"""Interval at which a thread without requests looks whether the engine has been used. After one in which it was not,
memory that nothing uses is given back to the system"""


@dataclass(eq=False)
class LiveRequest:
    """A request in the engine: what its reader and the threads that run steps share."""

    call: "Submission"
    id: int
    """The engine's"""
    request: Request
    unread: deque[Event] = field(default_factory=deque)
    """Written by the thread that runs a step, read by the stream"""
    written: int = 0
    """Tokens written to `unread` so far; the difference to `read` are those that it holds"""
    read: int = 0
    dropped: bool = False
    """True once nobody will read"""
    overrun: bool = False
    """True once it was aborted because of its reader"""
    waiter: "asyncio.Future[None] | None" = None
    """The future that the reader awaits; belongs to the event loop's thread"""
    listener: Callable[[], None] | None = None
    """Called in the event loop when there are new events, in place of a task that waits; likewise"""

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
    arriving: bool = False
    """True while it has places in the queue, and its requests are not there yet"""
    aborted: bool = False
    created: float = field(default_factory=time.monotonic)
    """When it came, in seconds of `time.monotonic`"""


class EngineThread:
    """The thread that runs steps, the calls whose requests it waits for, and functions to run between two steps.

    Public methods may be called from any thread. It knows tasks only as readers to wake.
    """

    def __init__(self, driver: Driver, max_waiting: int, max_unread: int, trim: Callable[[], None]) -> None:
        """`trim` gives memory that nothing uses back to the system."""
        self._driver = driver
        self._trim = trim
        self._turns_seen = self._turns_trimmed = -1
        """The driver's, when the thread was last idle, and when memory was last given back"""
        self._max_waiting = max_waiting
        self._max_unread = max_unread
        self._process = os.getpid()
        self._lock = threading.RLock()  # a garbage collection may call `stop` while this thread has it
        self._inbox: SimpleQueue[_Message | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._calls: dict[str, Submission] = {}
        """Unfinished calls by name."""
        self._arriving = 0
        """Requests of calls that are arriving"""
        self._draining = False
        self._lives: dict[int, LiveRequest] = {}
        """Unfinished requests by the engine's id."""
        self._mailed: deque[LiveRequest] = deque()
        """Requests with events since their readers were last woken."""
        self._quiet: list[Future[None]] = []
        self._stopped: Future[None] = _uncancellable()
        self._end: tuple[str, BaseException | None] | None = None
        """Why it takes no more calls."""

    # --- calls ---------------------------------------------------------------------------------------------------

    def post(self, function: Callable[..., T], *args: Any) -> "Future[T]":
        """Run a function between two steps. The thread is started if it is not running.

        Raises:
            EngineStateError: the thread has ended.
        """
        future: Future[T] = Future()
        self.check_process()
        with self._lock:
            self._check()
            self.start()
            self._inbox.put(_Message(future, function, args))
        return future

    def start(self) -> None:
        """Start the thread, unless it was started, or ended before."""
        with self._lock:
            if self._thread is None and self._end is None:
                self._thread = threading.Thread(target=self._run, name="minillm-engine", daemon=True)
                self._thread.start()

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
            waiting = self._driver.waiting + self._arriving
            if waiting + call.count > self._max_waiting:
                raise QueueFullError(
                    f"{waiting} requests wait and the queue takes {self._max_waiting}, too few for {call.count} more: "
                    "try again later"
                )
            self._calls[call.name] = call
            self._arriving += call.count
            call.arriving = True

    def take(self, call: Submission, make: Callable[[], Sequence[Request]]) -> None:
        """Make the requests of a claimed call and queue them, unless it was given up meanwhile.

        Raises:
            Exception: as `make`.
            ParameterError, CacheFullError: as `Driver.number`.
            EngineStateError: the engine is closed, or the thread has ended.
        """
        requests = [replace(request, created=call.created) for request in make()]
        ids = self._driver.number(requests)
        lives = [LiveRequest(call, request_id, request) for request_id, request in zip(ids, requests, strict=True)]
        with self._lock:
            self._check()
            if not call.arriving:
                return
            call.lives, call.unfinished = lives, len(lives)
            self._lives.update(zip(ids, lives, strict=True))
            self._driver.queue(ids, requests, [partial(self._deliver, live) for live in lives])
            self._arrived(call)
            self.post(lambda: None)  # wakes the thread, which sees them then
            if not lives:
                self._forget(call)
        if call.aborted:
            self._abort(lives)

    def give_up(self, call: Submission) -> None:
        """Release the name and the places of a call that nobody waits for any more, or abort it."""
        with self._lock:
            if call.arriving:
                self._arrived(call)
                self._forget(call)
        self._abort(call.lives)

    def abort(self, name: str) -> None:
        """Abort the call of this name, if there is one."""
        call = self._calls.get(name)
        if call is not None:
            call.aborted = True  # `take` looks at it
            self._abort(call.lives)

    def abort_all(self) -> None:
        """Abort all calls."""
        for name in list(self._calls):
            self.abort(name)

    def drop(self, live: LiveRequest) -> None:
        """Abort a request that nobody reads any more. Takes no lock: it may be called by the garbage collector."""
        live.dropped = True
        self._abort([live])

    def load(self) -> Load:
        """The engine's, with those that are on their way to its queue."""
        load = self._driver.load()
        return replace(load, waiting=load.waiting + self._arriving)

    def _abort(self, lives: Iterable[LiveRequest]) -> None:
        for live in lives:
            if live.id in self._lives:
                self._driver.abort_soon(live.id)

    def _arrived(self, call: Submission) -> None:
        """Give back the places of a call. The lock is held."""
        call.arriving = False
        self._arriving -= call.count

    def _forget(self, call: Submission) -> None:
        """Remove a finished call. The lock is held."""
        if self._calls.get(call.name) is call:
            del self._calls[call.name]
        if not self._calls:
            for future in self._quiet:
                future.set_result(None)
            self._quiet.clear()

    def _check(self) -> None:
        if self._end is not None:
            raise _ended(self._end)

    # --- the end -------------------------------------------------------------------------------------------------

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

    # --- steps ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        end: tuple[str, BaseException | None] = "the engine is closed", None
        try:
            while self._serve_inbox():
                if self._lives:
                    self._driver.pump([*self._lives])
                self._wake_readers()
        except EngineStateError as error:  # somebody has closed the engine itself
            end = str(error), error
        except BaseException as error:
            logger.exception("the engine's thread failed")
            end = f"the engine's thread failed: {type(error).__name__}: {error}", error
        self._finish(end)

    def _serve_inbox(self) -> bool:
        """Run the functions that were posted; waits for one if nothing is unfinished. False: the thread should end."""
        wait = not self._lives
        if wait:
            self._wake_readers()  # for the last events of another thread's step
        while True:
            try:
                message = self._inbox.get(block=wait, timeout=IDLE_SECONDS)
            except Empty:
                if not wait:
                    return True
                self._rest()
                continue
            if message is None:
                return False
            message.run()
            wait = False

    def _rest(self) -> None:
        """Give memory back to the system, if nobody has used the engine since the last call, and that is not done."""
        turns = self._driver.turns
        if turns == self._turns_seen != self._turns_trimmed:
            self._trim()
            turns = self._turns_trimmed = self._driver.turns
        self._turns_seen = turns

    def _deliver(self, live: LiveRequest, event: Event) -> None:
        """Put an event into a request's mail; in the thread that runs the step."""
        if not (live.dropped or live.overrun):
            event.request_id = live.call.name
            live.unread.append(event)
            live.written += len(event.token_ids)
            self._mailed.append(live)
        if event.request_finished:  # last: a thread that finds no unfinished request wakes the readers, and sleeps
            with self._lock:
                del self._lives[live.id]
                live.call.unfinished -= 1
                if not live.call.unfinished:
                    self._forget(live.call)

    def _wake_readers(self) -> None:
        """Wake the readers of new events, and end the requests whose readers are too slow or gone."""
        readers: dict[LiveRequest, None] = {}
        while self._mailed:
            readers[self._mailed.popleft()] = None
        for live in readers:
            if live.written - live.read > self._max_unread and live.id in self._lives:
                self._overrun(live)
        for live in wake(readers):
            self.drop(live)

    def _overrun(self, live: LiveRequest) -> None:
        """End a request whose reader is too slow."""
        live.overrun = True
        live.fail(
            SlowReaderError(
                f"{live.written - live.read} tokens of a request lay unread, and {self._max_unread} may: it was "
                "aborted; read faster, or raise max_unread"
            )
        )
        self._abort([live])

    def _finish(self, end: tuple[str, BaseException | None]) -> None:
        """Fail all that waits, and take no more."""
        with self._lock:
            self._end = end
            lives = list(self._lives.values())
            for call in list(self._calls.values()):
                self._forget(call)
        self._wake_readers()
        for live in lives:
            live.overrun = True  # what comes is not for the reader any more
            with suppress(Exception):  # of an engine that fails
                self._driver.abort(live.id)
            live.fail(_ended(end))
        self._lives.clear()
        wake(lives)
        while not self._inbox.empty():
            message = self._inbox.get()
            if message is not None:
                message.fail(_ended(end))
        self._stopped.set_result(None)


class _Message(NamedTuple):
    """A function to run in the engine's thread, and what receives its result."""

    future: "Future[Any]"
    function: Callable[..., Any]
    arguments: tuple[Any, ...]

    def run(self) -> None:
        """Run it, if its result is still wanted."""
        if self.future.set_running_or_notify_cancel():
            try:
                self.future.set_result(self.function(*self.arguments))
            except BaseException as error:
                self.future.set_exception(holdable(error))

    def fail(self, error: Exception) -> None:
        """Answer with an error."""
        if self.future.set_running_or_notify_cancel():
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
    """Wake the readers of requests, one callback for each event loop. Returns those whose loop is closed."""
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
        if waiter is not None and not waiter.done():  # several requests may share it, or it is cancelled
            waiter.set_result(None)
        if live.listener is not None:
            live.listener()
