"""The driver of an engine: one loop for the calls of all threads. Whoever waits for events runs the steps.

A request comes with a mailbox, a function that takes its events. To queue one takes no turn: the next step begins with
the requests that have arrived, and without those that were left. One thread at a time runs a step, of the requests of
all; so each call finds in its mailbox what others' steps have brought. Ctrl-C takes effect between two steps, and a
call that is interrupted takes its requests out of the loop.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from ..decoding.event import Event
from ..decoding.resolving import strategy_for
from ..decoding.strategy import Request
from ..errors import EngineStateError
from ..progress import Work, work
from .load import Load
from .loop import StepLoop
from .turns import Turns, interrupts

Mailbox = Callable[[Event], Any]
"""Takes an event of a request, in the thread that runs the step"""


class Driver:
    """A step loop for the calls of several threads.

    Attributes:
        loop: the requests
        closed: True after `close`
        turns: number of calls so far that have computed
    """

    def __init__(self, loop: StepLoop, rank: int = 0) -> None:
        """Begin without requests. `rank`: this process's number; only rank 0 takes requests."""
        self.loop = loop
        self.closed = False
        self.turns = 0
        self._rank = rank
        self._turns = Turns()
        self._mail: dict[int, Mailbox] = {}
        """The mailboxes of unfinished requests, by number"""
        self._arrivals: deque[tuple[int, Request]] = deque()
        """Requests that the next step takes in"""
        self._leaving: deque[int] = deque()
        """Requests to be aborted before the next step"""
        self._unclaimed: deque[Event] = deque()
        """The mail of requests made by `submit`"""

    # --- turns ---------------------------------------------------------------------------------------------------

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Serialise calls that compute, in order of arrival, and refuse them after `close`.

        Raises:
            EngineStateError: it is closed, or this rank takes no requests.
        """
        with self._brief_turn(), interrupts.exposed():
            yield

    @contextmanager
    def _brief_turn(self) -> Iterator[None]:
        """As `turn`, for what is not interrupted: a second Ctrl-C waits, too. What came meanwhile is taken in."""
        with self._turns.take():
            self._check_open()
            self.turns += 1
            try:
                self._take_in()
                yield
            except (Exception, GeneratorExit):
                raise
            except BaseException:  # a second Ctrl-C, somewhere in the middle
                self.loop.reset()
                raise

    def _check_open(self) -> None:
        if self.closed:
            raise EngineStateError("the engine is closed")
        if self._rank:
            raise EngineStateError(f"rank {self._rank} takes no requests: rank 0 does, and this one calls follow()")

    # --- requests in, events out ---------------------------------------------------------------------------------

    def number(self, requests: Sequence[Request]) -> list[int]:
        """Check requests, and give them the numbers by which they are queued; in any thread, without a turn.

        Raises:
            ParameterError, CacheFullError: as `StepLoop.check`, for any request.
            EngineStateError: as `turn`, or it is called from inside a step.
        """
        loop = self.loop  # before the check: another thread may close the engine meanwhile
        self._turns.check()
        self._check_open()
        for request in requests:
            loop.check(request)
        return [loop.new_id() for _ in requests]

    def queue(self, ids: Sequence[int], requests: Sequence[Request], mailboxes: Sequence[Mailbox]) -> None:
        """Queue requests by their numbers, each with what takes its events; in any thread, without a turn."""
        self._mail.update(zip(ids, mailboxes, strict=True))
        self._arrivals.extend(zip(ids, requests, strict=True))

    def pump(self, ids: Collection[int]) -> bool:
        """Run one step, of all requests, unless these are done; deliver the events. Returns whether a step was run."""
        with self._brief_turn():
            waiting = any(map(self.loop.knows, ids))
            if waiting:
                with interrupts.exposed():
                    self.loop.advance()
            self._deliver()  # without a step, the ends of requests whose step another thread interrupted
        return waiting

    def abort(self, request_id: int) -> None:
        """Abort a request, whose mailbox gets the end."""
        with self._brief_turn():
            self.loop.abort(request_id)
            self._deliver()

    def abort_soon(self, request_id: int) -> None:
        """As `abort`, before the next step, without a turn: a garbage collection may call this in the midst of one."""
        self._leaving.append(request_id)

    def drop(self, ids: Iterable[int]) -> None:
        """Abort requests whose end nobody wants to know."""
        unfinished = [request_id for request_id in ids if request_id in self._mail]
        if unfinished:
            with self._turns.take():
                for request_id in unfinished:
                    self.loop.forget(request_id)
                    self._mail.pop(request_id, None)
                self._take_in()  # without them

    def _take_in(self) -> None:
        """Queue what has arrived, and abort what was left; in a turn."""
        while self._arrivals:
            request_id, request = self._arrivals[0]  # which stays here until it is there
            if request_id in self._mail and not self.loop.knows(request_id):
                self.loop.add(request, request_id)
            self._arrivals.popleft()
        while self._leaving:
            self.loop.abort(self._leaving[0])
            self._leaving.popleft()

    def _deliver(self) -> None:
        for event in self.loop.take_events():
            request_id: int = event.request_id  # type: ignore[assignment]
            mailbox = self._mail.get(request_id)
            if event.request_finished:
                self._mail.pop(request_id, None)
            if mailbox is not None:
                mailbox(event)

    # --- calls ---------------------------------------------------------------------------------------------------

    def run(self, requests: Sequence[Request]) -> list[deque[Event]]:
        """Run requests to their ends, whatever else runs. Returns the events of each."""
        mail: list[deque[Event]] = [deque() for _ in requests]
        total, unit = (requests[0].max_new_tokens, "tokens") if len(requests) == 1 else (len(requests), "prompts")
        ids: list[int] = []
        with interrupts.deferred(), work("generating", total, unit) as generating:
            try:
                ids = self.number(requests)
                self.queue(ids, requests, [events.append for events in mail])
                before = self.loop.stats.steps
                while self.pump(ids):
                    interrupts.check()
                    if generating.due:
                        _tell(generating, mail, self.loop.stats.steps - before)
                _tell(generating, mail, self.loop.stats.steps - before)
                return mail
            finally:
                self.drop(ids)

    def submit(self, requests: Sequence[Request]) -> list[int]:
        """Queue requests, all or none, whose events `step` returns. Returns their ids."""
        ids: list[int] = []
        try:
            with interrupts.deferred():
                ids = self.number(requests)
                self.queue(ids, requests, [self._unclaimed.append] * len(ids))
            return ids
        except BaseException:
            self.drop(ids)
            raise

    def step(self) -> list[Event]:
        """Run one step. Returns the events of requests made by `submit`, also those of other threads' steps."""
        events: list[Event] = []
        try:
            with self._brief_turn():
                with interrupts.exposed():
                    self.loop.advance()
                self._deliver()
                while self._unclaimed:
                    events.append(self._unclaimed.popleft())
            return events
        except KeyboardInterrupt:
            self._unclaimed.extendleft(reversed(events))  # for the next call
            raise

    # --- state ---------------------------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """True while any request is queued or running, or has events from another thread's step for `step`."""
        if self._leaving and not self.closed:
            with self._brief_turn():  # what was left is not there any more
                self._deliver()
        told = any(event.finish_reason != "abort" for event in self._unclaimed.copy())
        return bool(self._arrivals) or self.loop.busy or told

    @property
    def waiting(self) -> int:
        """Number of requests that wait for a place in the batch."""
        return len(self._arrivals) + self.loop.scheduler.num_waiting

    def load(self) -> Load:
        """Use of the engine after the last step, with what has arrived since."""
        load = self.loop.load()
        return replace(load, waiting=load.waiting + len(self._arrivals)) if self._arrivals else load

    def fitted(self, request: Request) -> Request:
        """The request, with no more new tokens than the K/V cache holds for it alone.

        One that does not fit even so is returned as it is, and refused when it is queued.
        """
        room = self.loop.room(request)
        if not 0 < room < request.max_new_tokens:
            return request
        settings = replace(request.settings, max_new_tokens=room)
        return replace(request, settings=settings, strategy=strategy_for(settings))

    def close(self) -> bool:
        """Abort all requests and refuse further calls. Returns False if that was done before."""
        with self._turns.take():
            if self.closed:
                return False
            self.closed = True
            self.loop = StepLoop({}, self.loop.scheduler.limits)
            for box in (self._mail, self._arrivals, self._leaving, self._unclaimed):
                box.clear()
            return True


def _tell(progress: Work, mail: Sequence[deque[Event]], steps: int) -> None:
    """Report what the events of a `run` say: tokens of a single request, else how many requests are done."""
    last = [events[-1] for events in mail if events]
    tokens = sum(event.generated_tokens for event in last)
    if len(mail) == 1:  # beam search tells its tokens at the end
        done, progress.note = max(tokens, progress.done), f"{steps:,} steps"
    else:
        done, progress.note = sum(event.request_finished for event in last), f"{tokens:,} tokens"
    progress.advance(done - progress.done)
