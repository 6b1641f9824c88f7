"""The calls of an engine on one step loop: whose turn it is, and which call gets which event.

Several threads may call at once. One at a time runs a step, of the requests of all; its events go to the calls that
wait for them, and what nobody waits for to `Dispatcher.step`. Ctrl-C takes effect between two steps, and a call that is
interrupted takes its requests out of the loop.
"""

import threading
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from ..decoding.continuation import Progress
from ..decoding.resolving import strategy_for
from ..decoding.strategy import Request
from ..errors import EngineStateError
from ..progress import PROMPT, Work, underway, work
from .loop import StepLoop
from .results import Event
from .turns import Turns, interrupts


class Dispatcher:
    """A step loop for the calls of several threads.

    Attributes:
        loop: the requests
        closed: True after `close`
        owners: threads that take all that `step` returns; while they live, others may not call it
    """

    def __init__(self, loop: StepLoop, token_bytes: Callable[[int], bytes] | None, rank: int = 0) -> None:
        """`token_bytes` is that of the tokenizer, if any; `rank` this process's number, of which 0 takes requests."""
        self.loop = loop
        self.closed = False
        self.owners: set[threading.Thread] = set()
        self._rank = rank
        self._token_bytes = token_bytes
        self._mail: dict[int, deque[Event]] = {}  # events of requests that a `run` or a stream is waiting for
        self._unclaimed: deque[Event] = deque()  # events of requests made by `submit`
        self._streams: dict[int, weakref.ref[EventStream]] = {}  # by request; a dead one is to be dropped
        self._turns = Turns()

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
        """As `turn`, for what is not interrupted: a second Ctrl-C waits, too."""
        self._drop_forgotten()
        with self._turns.take():
            if self.closed:
                raise EngineStateError("the engine is closed")
            if self._rank:
                raise EngineStateError(f"rank {self._rank} takes no requests: rank 0 does, and this one calls follow()")
            try:
                yield
            except (Exception, GeneratorExit):
                raise
            except BaseException:  # a second Ctrl-C, somewhere in the middle
                self.loop.reset()
                raise

    def run(self, wanted: Sequence[Request]) -> list[deque[Event]]:
        """Run requests to their ends, whatever else runs. Returns the events of each."""
        mail: dict[int, deque[Event]] = {}
        total, unit = (wanted[0].max_new_tokens, "tokens") if len(wanted) == 1 else (len(wanted), "prompts")
        with interrupts.deferred(), work("generating", total, unit) as generating:
            try:
                with self._brief_turn():
                    for request in wanted:
                        request_id = self.loop.new_id()  # known to `drop`, whatever happens
                        self._mail[request_id] = mail[request_id] = deque()
                        self._add(request, request_id)
                before = self.loop.stats.steps
                while self.step_for(mail):
                    interrupts.check()
                    if generating.due:
                        _tell(generating, mail.values(), self.loop.stats.steps - before)
                _tell(generating, mail.values(), self.loop.stats.steps - before)
                return [*mail.values()]
            finally:
                self.drop(mail)

    def stream(self, request: Request) -> "EventStream":
        """Queue a request. Returns the iterator over its events."""
        events = EventStream(self)
        try:
            with self._brief_turn():
                request_id = self.loop.new_id()
                events.open(request_id)
                self._mail[request_id] = events.mail
                self._streams[request_id] = weakref.ref(events)
                self._add(request, request_id)
            return events
        except BaseException:
            events.close()
            raise

    def submit(self, requests: Sequence[Request]) -> list[int]:
        """Queue requests, all or none, whose events `step` returns. Returns their ids."""
        self._check_owner()
        submitted: list[int] = []
        try:
            with self._brief_turn():
                for request in requests:
                    submitted.append(self.loop.new_id())
                    self._add(request, submitted[-1])
            return submitted
        except BaseException:
            if submitted:
                self.drop(submitted)
            raise

    def step(self) -> list[Event]:
        """Run one step. Returns the events of requests made by `submit`, also those of other threads' steps."""
        self._check_owner()
        events: list[Event] = []
        try:
            with self._brief_turn():
                self._advance()
                while self._unclaimed:
                    events.append(self._unclaimed.popleft())
            return events
        except KeyboardInterrupt:
            self._unclaimed.extendleft(reversed(events))  # for the next call
            raise

    def step_for(self, request_ids: Collection[int]) -> bool:
        """Run one step, of all requests, unless these are done. Returns whether a step was run."""
        with self._brief_turn():
            waiting = any(self.loop.knows(request_id) for request_id in request_ids)
            if waiting:
                self._advance()
            else:
                self._deliver()  # the ends of requests whose step another thread interrupted
        return waiting

    def abort(self, request_id: int) -> None:
        """Abort a request, of which the next `step` reports the end."""
        with self._brief_turn():
            self._unclaimed += (self._event(request_id, progress) for progress in self.loop.abort(request_id))

    def drop(self, request_ids: Iterable[int]) -> None:
        """Abort requests of which nobody wants to know the end."""
        with self._turns.take():
            for request_id in request_ids:
                self.loop.forget(request_id)
                self._mail.pop(request_id, None)
                self._streams.pop(request_id, None)

    @property
    def busy(self) -> bool:
        """True while any request is queued or running, or has events from another thread's step for `step`."""
        self._drop_forgotten()
        return self.loop.busy or any(event.finish_reason != "abort" for event in self._unclaimed.copy())

    def close(self) -> bool:
        """Abort all requests and refuse further calls. Returns False if that was done before."""
        with self._turns.take():
            if self.closed:
                return False
            self.closed = True
            self.loop = StepLoop({}, self.loop.scheduler.limits)
            self._mail.clear()
            self._unclaimed.clear()
            return True

    def _check_owner(self) -> None:
        here = threading.current_thread()
        if here not in self.owners and any(owner.is_alive() for owner in [*self.owners]):
            raise EngineStateError(
                "an AsyncEngine runs this engine, and takes all that a step brings: use its methods, or generate, "
                "stream and chat of the engine, in place of add and step"
            )

    def fitted(self, request: Request) -> Request:
        """The request, with no more new tokens than the K/V cache holds for it alone.

        One that does not fit even so is returned as it is, and refused when it is added.
        """
        room = self.loop.room(request, strategy_for(request.settings))
        if not 0 < room < request.max_new_tokens:
            return request
        return replace(request, settings=replace(request.settings, max_new_tokens=room))

    def _add(self, request: Request, request_id: int) -> None:
        strategy = strategy_for(request.settings)
        self.loop.add(request, strategy, priority=request.priority, deadline=request.deadline, request_id=request_id)

    def _drop_forgotten(self) -> None:
        """Abort the requests whose streams were garbage collected: in any thread, perhaps in the middle of a step."""
        if forgotten := [request_id for request_id, stream in list(self._streams.items()) if stream() is None]:
            self.drop(forgotten)

    def _advance(self) -> None:
        """Run one step and deliver its events to the waiting calls."""
        with interrupts.exposed():
            self.loop.advance()
        self._deliver()

    def _deliver(self) -> None:
        """Give the waiting calls what the loop has to tell."""
        for request_id, progress in self.loop.take_progress():
            self._mail.get(request_id, self._unclaimed).append(self._event(request_id, progress))

    def _event(self, request_id: int, progress: Progress) -> Event:
        return Event.of(request_id, progress, self._token_bytes)


class EventStream(Iterator[Event]):
    """Iterator over the events of one request. Each `next` runs steps until there is an event.

    Closing it, or dropping all references to it, aborts the request.

    Example:
        >>> stream = engine.stream("Count from 3 to 9:")
        >>> next(stream).text
        ' 3'
        >>> stream.close()
    """

    _open = False

    def __init__(self, dispatcher: Dispatcher) -> None:
        """Use `Engine.stream` instead."""
        self._dispatcher = dispatcher
        self.mail: deque[Event] = deque()
        """Events that came and were not read"""

    def open(self, request_id: int) -> None:
        """Attach to a request that was just queued."""
        self._request_id = request_id
        self._open = True

    def __next__(self) -> Event:
        """The next event.

        Raises:
            StopIteration: the request is done, or the stream closed.
            EngineStateError: the engine was closed before the end.
            Exception: the error that ended the request.
        """
        loop, prompt = self._dispatcher.loop, underway(PROMPT)
        with interrupts.deferred():
            before = loop.stats.steps
            while self._open and not self.mail and self._dispatcher.step_for([self._request_id]):
                interrupts.check()
                if prompt is not None and loop.knows(self._request_id):
                    computed, prompt.total = loop.prompt_progress(self._request_id)
                    if computed == prompt.total:  # beam search tells its tokens at the end
                        prompt.note = f"{loop.stats.steps - before:,} steps"
                    prompt.advance(computed - prompt.done)
            if not (self._open and self.mail):
                self.close()
                raise StopIteration
            event = self.mail.popleft()
            if event.error is not None or event.request_finished:
                self.close()
            if event.error is not None:
                raise event.error
            return event

    def close(self) -> None:
        """Abort the request, if it is not done."""
        if self._open:
            self._dispatcher.drop([self._request_id])
            self._open = False


def _tell(progress: Work, mail: Collection[deque[Event]], steps: int) -> None:
    """Report what the events of a `run` say: tokens of a single request, else how many requests are done."""
    last = [events[-1] for events in mail if events]
    tokens = sum(event.generated_tokens for event in last)
    if len(mail) == 1:  # beam search tells its tokens at the end
        done, progress.note = max(tokens, progress.done), f"{steps:,} steps"
    else:
        done, progress.note = sum(event.request_finished for event in last), f"{tokens:,} tokens"
    progress.advance(done - progress.done)
