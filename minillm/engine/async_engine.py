"""An engine for asyncio: `AsyncEngine` runs it in one thread of its own, for any number of tasks, loops and threads.

The thread, and how events reach a task, are in `engine_thread.py`. It is one of the callers of the engine's driver, so
other threads may use the engine beside it.

Prompts are tokenised and checked in a pool of worker threads, since a long one, a chat template or a grammar takes
milliseconds, so neither the event loop nor the engine waits for it.
"""

import asyncio
import atexit
import itertools
import os
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, aclosing, asynccontextmanager
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack, overload

from ..decoding.event import Event
from ..decoding.hooks import Hook
from ..decoding.keywords import ChatFields, RequestFields, with_fields
from ..decoding.prompts import Prompt, is_prompt
from ..decoding.settings import GenerationConfig
from ..decoding.strategy import Request
from ..errors import EngineStateError, holdable
from ..text.chat import Messages
from .arguments import read
from .engine import Engine
from .engine_thread import EngineThread, LiveRequest, Submission, wake
from .load import Load
from .prefixes import Prefix
from .results import Generation

T = TypeVar("T")

MAX_UNREAD = 16384
"""Tokens of one request that may lie unread; with one token's 20 alternatives about 40 MB."""
WORKERS = 2
"""Threads that tokenise and check prompts."""
_LIVING: "weakref.WeakSet[AsyncEngine]" = weakref.WeakSet()
"""Engines whose threads the end of the program waits for"""


class AsyncEngine:
    """An engine for asyncio. It owns `engine`, whose methods may still be called from any thread.

    Tasks of several event loops, in several threads, may use it. A cancelled task, a stream that is left early and one
    that is forgotten abort their requests; the next step is without them. Use `async with`, or call `close`.

    Example:
        >>> async def main():
        ...     async with AsyncEngine(Engine()) as engine:
        ...         one, two = await asyncio.gather(
        ...             engine.generate("A list of colors: red,", max_new_tokens=4),
        ...             engine.generate("Monday,", max_new_tokens=4),
        ...         )
        ...         async for event in engine.stream("Count from 3 to 9:", max_new_tokens=2):
        ...             print(event.text, end="", flush=True)
        ...     return one.text, two.text
        >>> asyncio.run(main())
         3,(' orange, yellow,', ' Tuesday, Wednesday,')
    """

    def __init__(self, engine: Engine, *, max_waiting: int = 1024, max_unread: int = MAX_UNREAD) -> None:
        """The engine's thread starts at the first call.

        Args:
            engine: to run; closed by `close`
            max_waiting: requests that may wait for a place in the batch, those being checked included; further ones
                are refused, and a longer list is a ParameterError
            max_unread: tokens of one request that may lie unread in a stream; beyond them the request is aborted

        Raises:
            ParameterError: a bound is not a positive whole number.
        """
        self.engine = engine
        bounds = read("max_waiting", max_waiting), read("max_unread", max_unread)
        self._thread = EngineThread(engine._driver, *bounds, engine.trim_memory)
        self._pool = ThreadPoolExecutor(WORKERS, "minillm-requests")
        self._names = map("request-{}".format, itertools.count(1))
        self._closed = False
        # An engine that is dropped without `close` ends its threads. The thread does not refer to `self`.
        weakref.finalize(self, _end, self._thread, self._pool).atexit = False
        _LIVING.add(self)

    # --- generating --------------------------------------------------------------------------------------------------

    @overload
    async def generate(  # type: ignore[overload-overlap]  # as of Engine.generate
        self,
        prompt: Prompt,
        config: GenerationConfig | None = None,
        *,
        request_id: str | None = None,
        **fields: Unpack[RequestFields],
    ) -> Generation: ...

    @overload
    async def generate(
        self,
        prompt: Sequence[Prompt] | None = None,
        config: GenerationConfig | None = None,
        *,
        request_id: str | None = None,
        **fields: Unpack[RequestFields],
    ) -> list[Generation]: ...

    @with_fields
    async def generate(
        self,
        prompt: Prompt | Sequence[Prompt] | None = None,
        config: GenerationConfig | None = None,
        *,
        request_id: str | None = None,
        **fields: Unpack[RequestFields],
    ) -> Generation | list[Generation]:
        """Continue one prompt, or each prompt of a list; `Engine.generate`.

        Args:
            prompt: text or token ids, or a list of such, which is queued as a whole or not at all; None with
                `inputs_embeds`, of one prompt or of a list
            config: generation parameters
            request_id: a name for `abort`, which no other unfinished call has; by default a new one
            **fields: as of `Engine.generate`: fields of `GenerationConfig`, `priority`, `timeout`

        Raises:
            PromptError, ParameterError, CacheFullError: as `Engine.add`; nothing was queued.
            QueueFullError: too many requests wait; nothing was queued.
            EngineStateError: the engine is draining or closed, or its thread has failed.
            SlowReaderError: the event loop was busy for too long.
            Exception: the error that ended the request (`Event.error`).
        """
        rows: Any = fields.get("inputs_embeds")
        single = is_prompt(prompt) if prompt is not None else not (isinstance(rows, list | tuple) and rows)
        given: Any = [prompt] if single else [None] * len(rows) if prompt is None else prompt
        streams = await self.submit(
            list(given),
            config,
            request_id=request_id,
            **fields,
        )
        results = await _results(streams)
        return results[0] if single else results

    @with_fields
    async def stream(
        self,
        prompt: Prompt | None = None,
        config: GenerationConfig | None = None,
        *,
        request_id: str | None = None,
        **fields: Unpack[RequestFields],
    ) -> AsyncIterator[Event]:
        """Continue one prompt and iterate over its events; `Engine.stream`. Leaving the iteration aborts the request.

        Events that were not read yet when the next one comes are merged. The request is queued at the first `anext`;
        to queue it (and be refused) before, use `submit`.

        Args and Raises: as `generate`.
        """
        [stream] = await self.submit([prompt], config, request_id=request_id, **fields)
        async with aclosing(stream):
            async for event in stream:
                yield event

    @with_fields
    async def chat(
        self,
        messages: Messages,
        config: GenerationConfig | None = None,
        *,
        request_id: str | None = None,
        **fields: Unpack[ChatFields],
    ) -> Generation:
        """Answer a conversation; `Engine.chat`.

        Args and Raises: as `generate`; `fields` also takes the arguments of `Engine.render_chat`, with its errors.
        """
        stream = await self.submit_chat(messages, config, request_id=request_id, **fields)
        return (await _results([stream]))[0]

    @with_fields
    async def stream_chat(
        self,
        messages: Messages,
        config: GenerationConfig | None = None,
        *,
        request_id: str | None = None,
        **fields: Unpack[ChatFields],
    ) -> AsyncIterator[Event]:
        """Answer a conversation and iterate over its events; `chat` as `stream`."""
        stream = await self.submit_chat(messages, config, request_id=request_id, **fields)
        async with aclosing(stream):
            async for event in stream:
                yield event

    async def submit(
        self,
        prompts: Sequence[Prompt | None],
        config: GenerationConfig | None = None,
        *,
        request_id: str | None = None,
        **fields: Unpack[RequestFields],
    ) -> "list[AsyncEventStream]":
        """Queue the prompts of a list, all of them or none, and return a stream for each once they are queued.

        Args and Raises: as `generate`, for all prompts of the list; `request_id` aborts them all.

        Example:
            >>> async def main():
            ...     async with AsyncEngine(Engine()) as engine:
            ...         streams = await engine.submit(["1, 2,", "Monday,"], max_new_tokens=2)
            ...         return [(await stream.result()).text for stream in streams]
            >>> asyncio.run(main())
            [' 1,', ' Tuesday,']
        """
        make = partial(self.engine.requests, prompts, config, **fields)
        return await self.submit_made(make, len(prompts), request_id=request_id)

    async def submit_chat(
        self,
        messages: Messages,
        config: GenerationConfig | None = None,
        *,
        request_id: str | None = None,
        **fields: Unpack[ChatFields],
    ) -> "AsyncEventStream":
        """Queue the answer to a conversation and return its stream once it is queued.

        Args and Raises: as `chat`.
        """
        make = partial(self.engine.chat_request, messages, config, **fields)
        [stream] = await self.submit_made(lambda: [make()], 1, request_id=request_id)
        return stream

    async def submit_made(
        self, make: Callable[[], list[Request]], count: int, *, request_id: str | None = None
    ) -> "list[AsyncEventStream]":
        """Queue requests that a function makes, all of them or none, and return a stream for each once they are queued.

        Args:
            make: returns the requests, as `Engine.requests` does; called in a worker thread
            count: number of requests
            request_id: as of `submit`

        Raises:
            Exception: as `make`, and as `submit`.
        """
        call = Submission(next(self._names) if request_id is None else request_id, count, asyncio.get_running_loop())
        self._thread.claim(call)  # before the first `await`: concurrent calls cannot exceed the limit
        try:
            await self.run(self._thread.take, call, make)
        except BaseException:
            self._thread.give_up(call)
            raise
        return [AsyncEventStream(self, live) for live in call.lives]

    # --- around it ---------------------------------------------------------------------------------------------------

    def abort(self, request_id: str) -> None:
        """Abort the call of this name, from any thread; its sequences end with the `finish_reason` "abort".

        It may be on its way to the queue, queued, or running. A finished or unknown one is ignored.

        Example:
            >>> async def main():
            ...     async with AsyncEngine(Engine()) as engine:
            ...         async for event in engine.stream("Count from 3 to 9:", request_id="mine"):
            ...             engine.abort("mine")
            ...     return event.finish_reason
            >>> asyncio.run(main())
            'abort'
        """
        self._thread.abort(request_id)

    def load(self) -> Load:
        """As `Engine.load`; requests on their way to the queue count among those that wait."""
        return self._thread.load()

    async def call(self, function: Callable[..., T], *args: Any) -> T:
        """`function(*args)`, run in the engine's thread between two steps; such as `engine.score`.

        Raises:
            Exception: as the function.
            EngineStateError: the engine is closed, or its thread has failed.

        Example:
            >>> async def main():
            ...     async with AsyncEngine(Engine()) as engine:
            ...         return await engine.call(engine.engine.score, "A list of colors: red, orange")
            >>> asyncio.run(main())
            Score(tokens=9, total=..., perplexity=2.27...)
        """
        return await asyncio.wrap_future(self._thread.post(function, *args))

    def names(self) -> dict[str, tuple[int | str, ...]]:
        """The points inside the model, for `watch` and `hooks`: as `Engine.names`."""
        return self.engine.names()

    @asynccontextmanager
    async def hooks(self, functions: Mapping[str, Hook]) -> AsyncIterator[None]:
        """Change what the model computes inside an `async with` block, in all requests: as `Engine.hooks`.

        Example:
            >>> async def main():
            ...     async with AsyncEngine(Engine()) as engine:
            ...         async with engine.hooks({"blocks.*.mlp.out": lambda array, place: array * 0}):
            ...             return (await engine.generate("Monday,", max_new_tokens=2)).text
            >>> len(asyncio.run(main())) > 0
            True
        """
        stack = ExitStack()
        try:
            await self.call(stack.enter_context, self.engine.hooks(functions))
            yield
        finally:  # after a cancelled beginning too: the engine's thread takes calls in their order
            if not self._closed:
                await asyncio.shield(self.call(stack.close))

    async def run(self, function: Callable[..., T], *args: Any) -> T:
        """`function(*args)`, run in a worker thread, beside the steps; such as `engine.embed` or `engine.classify`.

        Raises:
            Exception: as the function.
            EngineStateError: the engine is closed.
        """
        self._thread.check_process()
        self._thread.start()  # which gives memory back once nothing is computed any more
        try:
            future = asyncio.get_running_loop().run_in_executor(self._pool, self._run_here, function, *args)
        except RuntimeError:  # the pool is shut down
            raise EngineStateError("the engine is closed") from None
        return await future

    def _run_here(self, function: Callable[..., T], *args: Any) -> T:
        """In a worker thread: call a function, unless the engine was closed meanwhile."""
        if self._closed:
            raise EngineStateError("the engine is closed")
        try:
            return function(*args)
        except (StopIteration, StopAsyncIteration) as error:
            raise holdable(error) from error

    async def save_prefix(
        self,
        path: str | os.PathLike[str],
        prompt: Prompt,
        *,
        lora: str | None = None,
        notes: Mapping[str, str] | None = None,
    ) -> Prefix:
        """Write the keys and values of a prompt to a file; `Engine.save_prefix`, beside the steps."""
        return await self.run(partial(self.engine.save_prefix, path, prompt, lora=lora, notes=notes))

    async def load_prefix(self, path: str | os.PathLike[str]) -> Prefix:
        """Put the keys and values of a file into the prefix cache; `Engine.load_prefix`, beside the steps."""
        return await self.run(self.engine.load_prefix, path)

    async def drain(self, timeout: float | None = None) -> None:
        """Refuse new requests from now on, and wait for those that there are; after `timeout` seconds abort them.

        Example:
            >>> async def main():
            ...     async with AsyncEngine(Engine()) as engine:
            ...         [stream] = await engine.submit(["A list of colors: red,"], max_new_tokens=4)
            ...         await engine.drain(timeout=30)
            ...         return (await stream.result()).text
            >>> asyncio.run(main())
            ' orange, yellow,'
        """
        quiet = self._thread.drain()
        try:
            await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(quiet)), timeout)
        except TimeoutError:
            self._thread.abort_all()
            await asyncio.wrap_future(quiet)

    async def close(self) -> None:
        """Abort all requests, end the threads and close the engine. May be called twice."""
        self._closed = True
        await asyncio.wrap_future(self._thread.stop())
        _close(self._thread, self._pool)  # the engine's thread has ended, and what others have not begun is refused
        self.engine.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


class AsyncEventStream(AsyncIterator[Event]):
    """Iterator over the events of one queued request, for one task of the event loop in which it was made.

    Closing it, or dropping all references to it, aborts the request.
    """

    def __init__(self, engine: AsyncEngine, live: LiveRequest) -> None:
        """Use `AsyncEngine.submit` instead."""
        self._engine = engine
        self._live = live
        self._ready: deque[Event] = deque()
        self._done = False

    @property
    def request_id(self) -> str:
        """The name of the call that made it."""
        return self._live.call.name

    @property
    def prompt_token_ids(self) -> list[int]:
        """The prompt."""
        return self._live.request.given_ids

    async def __anext__(self) -> Event:
        """The next event; what several steps brought since the last call is one event for each sequence.

        Raises:
            StopAsyncIteration: the request is done, or the stream closed.
            EngineStateError: the engine was closed, or its thread failed.
            SlowReaderError: it was read too slowly.
            Exception: the error that ended the request.
        """
        if not self._ready:
            self._ready += await self.read()
        if not self._ready:
            raise StopAsyncIteration
        return self._ready.popleft()

    async def read(self) -> list[Event]:
        """All events since the last call, at most one for each sequence; it waits for the first. Empty at the end.

        Raises:
            EngineStateError, SlowReaderError, Exception: as `__anext__`, once the events before are read.
        """
        if self._ready:
            events = [*self._ready]
            self._ready.clear()
            return events
        while (read := take_any([self])) is None:
            self._live.waiter = self._live.call.loop.create_future()
            await self._live.waiter
        return [event for _, event in read]

    async def result(self) -> Generation:
        """Read it to its end. Closes it in any case.

        Raises:
            EngineStateError, SlowReaderError, Exception: as `__anext__`.
        """
        async with aclosing(self):
            events, request = [event async for event in self], self._live.request
            return Generation.of(request.given_ids, events, self._engine.engine.tokenizer, request.thoughts)

    def close(self) -> None:
        """Abort the request, if it is not done. From any thread."""
        self._ready.clear()
        if not self._done:
            self._done = True
            self._engine._thread.drop(self._live)
            wake([self._live])  # a task that waits for the next event, or is about to: there is none

    async def aclose(self) -> None:
        """`close`, for `contextlib.aclosing`."""
        self.close()

    def __del__(self) -> None:
        self.close()

    def _take(self, *, merge: bool = True) -> list[Event]:
        """The events that came since the last call, up to an error. Nobody waits for them here."""
        live, unread = self._live, self._live.unread
        if len(unread) == 1 and (event := unread[0]).error is None:
            unread.popleft()
            live.read += len(event.token_ids)
            self._done = self._done or event.request_finished
            return [event]
        events: list[Event] = []
        while unread and unread[0].error is None:
            event = unread.popleft()
            live.read += len(event.token_ids)
            self._done = self._done or event.request_finished
            events.append(event)
        return merged(events) if merge and len(events) > 1 else events

    def _check(self) -> None:
        """Close it and raise its request's error, if that comes next."""
        error = self._live.unread[0].error if self._live.unread else None
        if error is not None:
            self.close()
            raise error


def take_any(streams: Sequence[AsyncEventStream], *, merge: bool = True) -> list[tuple[int, Event]] | None:
    """All events of several streams since the last call, each with its stream's index; None: there are none yet.

    At most one for each sequence, unless `merge` is false: then one for each step. Empty at the end of all streams.
    Neither this nor `listen` makes a task wait: they serve every token.

    Raises:
        EngineStateError, SlowReaderError, Exception: as `AsyncEventStream.read`, for any stream.
    """
    if len(streams) == 1:  # as most have
        [stream] = streams
        if not stream._live.unread:
            return [] if stream._done else None
        if events := stream._take(merge=merge):
            return [(0, event) for event in events]
    taken: list[tuple[int, Event]] = []
    ended = True
    for i, stream in enumerate(streams):  # a loop, as the quickest way
        if not stream._done:
            ended = False
            if stream._live.unread:
                taken += [(i, event) for event in stream._take(merge=merge)]
    if taken or ended:
        return taken
    for stream in streams:
        if not stream._done:
            stream._check()
    return None


def has_more(streams: Sequence[AsyncEventStream]) -> bool:
    """Whether `take_any` now has events, or a stream has ended."""
    if len(streams) == 1:
        return streams[0]._done or bool(streams[0]._live.unread)
    return any(stream._done or stream._live.unread for stream in streams)


def listen(streams: Sequence[AsyncEventStream], listener: Callable[[], None] | None) -> None:
    """Have a function called in the event loop whenever any of the streams has new events; None: no more.

    It is for readers that take a token without a task of theirs being woken.
    """
    for stream in streams:
        stream._live.listener = listener


def merged(events: Sequence[Event]) -> list[Event]:
    """Events of one request, each sequence's joined, in the order of their last ones."""
    joined: dict[int, list[Event]] = {}
    for event in events:
        successive = joined.pop(event.index, [])
        successive.append(event)
        joined[event.index] = successive
    return [Event.joined(successive) for successive in joined.values()]


async def _results(streams: Sequence[AsyncEventStream]) -> list[Generation]:
    """The results of all, which are read at the same time; the first error ends the others."""
    if len(streams) == 1:
        return [await streams[0].result()]
    tasks = [asyncio.ensure_future(stream.result()) for stream in streams]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _end(thread: EngineThread, pool: ThreadPoolExecutor) -> None:
    """Have the threads of an AsyncEngine end that was dropped.

    Nothing waits for them: a garbage collection may call this in a step of another thread, whose end they wait for.
    """
    thread.stop()
    pool.shutdown(wait=False)


def _close(thread: EngineThread, pool: ThreadPoolExecutor) -> None:
    """End the threads of an AsyncEngine that is closed, or lives at the program's end."""
    thread.stop()
    thread.join()
    pool.shutdown()


@atexit.register
def _close_all() -> None:
    for engine in [*_LIVING]:
        _close(engine._thread, engine._pool)
