"""`AsyncEngine`: nothing is left behind by who cancels, aborts, crashes or forgets; many of them at once too."""

import asyncio
import gc
import random
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from minillm import AsyncEngine, Engine
from minillm.decoding.event import Event
from minillm.errors import EngineStateError

from ..async_engines import ENDLESS, answers, busy, busy_workers, running, talking_checkpoint, until, watched


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return talking_checkpoint(tmp_path_factory.mktemp("aio"))


@pytest.fixture
def make(folder: Path) -> Callable[..., Engine]:
    return lambda **arguments: Engine(folder, **{"max_batch_size": 4} | arguments)


LONG = [5, 6, 7] * 100


async def in_a_worker(aio: AsyncEngine, events: list[Event]) -> None:
    """It waits for a thread that tokenises it."""
    await until(lambda: aio._pool._work_queue.qsize() == 1)


async def not_taken(aio: AsyncEngine, events: list[Event]) -> None:
    """It is on its way: the engine's thread is busy."""
    await until(lambda: len(aio.engine._driver._arrivals) == 1)


async def queued(aio: AsyncEngine, events: list[Event]) -> None:
    await until(lambda: aio.load().waiting == 1 and aio._thread._arriving == 0)


async def in_prefill(aio: AsyncEngine, events: list[Event]) -> None:
    await until(lambda: aio.load().running == 2)
    assert not events


async def in_decode(aio: AsyncEngine, events: list[Event]) -> None:
    await until(lambda: len(events) > 1)


@pytest.mark.parametrize("leave", ["abort", "cancel"])
@pytest.mark.parametrize("stage", [in_a_worker, not_taken, queued, in_prefill, in_decode])
@pytest.mark.slow
def test_leaving_at_any_stage_frees_everything(
    make: Callable[..., Engine], stage: Callable[[AsyncEngine, list[Event]], Awaitable[None]], leave: str
) -> None:
    async def main() -> None:
        size = 1 if stage is queued else 2
        async with running(make(max_batch_size=size, max_batched_tokens=size)) as aio:
            other = asyncio.create_task(aio.generate("Hello", **ENDLESS))
            await until(lambda: aio.load().running == 1)
            events: list[Event] = []

            async def read() -> None:
                prompt = LONG if stage is in_prefill else "one two"
                async for event in aio.stream(prompt, request_id="mine", max_new_tokens=100, eos_token_id=[]):
                    events.append(event)  # noqa: PERF401

            late, has_left = watched(aio.engine, known={1})
            occupied = {in_a_worker: busy_workers, not_taken: busy}.get(stage, running_on)
            async with occupied(aio):
                task = asyncio.create_task(read())
                await stage(aio, events)
                if leave == "abort":
                    aio.abort("mine")
                else:
                    task.cancel()
                    with pytest.raises(asyncio.CancelledError):
                        await task
                has_left.set()
            if leave == "abort":
                await task
                assert events[-1].finish_reason == "abort"
            await until(lambda: "mine" not in aio._thread._calls)
            assert late == []  # the next step was without it
            other.cancel()
            await asyncio.gather(other, return_exceptions=True)

    asyncio.run(main())


@asynccontextmanager
async def running_on(aio: AsyncEngine) -> AsyncIterator[None]:
    yield


@pytest.mark.slow
def test_a_stream_that_is_left_or_forgotten_is_aborted(make: Callable[..., Engine]) -> None:
    async def main() -> None:
        async with running(make()) as aio:
            late, has_left = watched(aio.engine, known=set())
            generator = aio.stream("Hello", **ENDLESS)
            await anext(generator)
            [stream] = await aio.submit(["Hello"], **ENDLESS)
            await anext(stream)
            async with busy(aio):
                del generator, stream
                gc.collect()
                await until(lambda: len(aio.engine._driver._leaving) == 2)
                has_left.set()
            await until(lambda: not aio._thread._calls)
            assert late == []

            one, other = await aio.submit(["Hello", "one two"], request_id="both", **ENDLESS)
            await anext(one)
            async with busy(aio):
                while one._ready or one._live.unread:
                    await one.read()
                waiting = asyncio.create_task(one.read())
                await asyncio.sleep(0)
                one.close()  # the other goes on
                assert await waiting == []
            assert [event async for event in one] == []
            assert await one.read() == []
            assert len((await other.result()).token_ids) == 200

    asyncio.run(main())


def test_who_closes_the_engine_itself_ends_its_requests_in_one_line(
    make: Callable[..., Engine], caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        engine = make()
        async with AsyncEngine(engine) as aio:
            stream = aio.stream("Hello", **ENDLESS)
            await anext(stream)
            engine.close()
            with pytest.raises(EngineStateError, match=r"^the engine is closed$"):
                async for _ in stream:
                    pass
            with pytest.raises(EngineStateError, match=r"^the engine is closed$"):
                await aio.generate("Hello")

    asyncio.run(main())
    assert caplog.records == []


def test_an_engine_that_is_forgotten_ends_its_threads(make: Callable[..., Engine]) -> None:
    async def main() -> None:
        threads = set(threading.enumerate())
        engine = make()
        aio = AsyncEngine(engine)
        await aio.generate("Hello")
        assert set(threading.enumerate()) > threads
        del aio
        gc.collect()  # which does not wait for them
        await until(lambda: set(threading.enumerate()) <= threads)
        engine.close()

    asyncio.run(main())


FIELDS: dict[str, Any] = {"max_new_tokens": 12, "eos_token_id": []}


async def whole(aio: AsyncEngine, prompt: str, expected: list[int], rng: random.Random, name: str) -> None:
    generation = await aio.generate(prompt, priority=rng.randrange(3), request_id=name, **FIELDS)
    assert generation.token_ids == expected


async def timed_out(aio: AsyncEngine, prompt: str, expected: list[int], rng: random.Random, name: str) -> None:
    generation = await aio.generate(prompt, timeout=rng.uniform(0.001, 0.05), request_id=name, **FIELDS)
    assert generation.completions[0].finish_reason in ("length", "timeout")
    assert generation.token_ids == expected[: len(generation.token_ids)]


async def aborted(aio: AsyncEngine, prompt: str, expected: list[int], rng: random.Random, name: str) -> None:
    call = asyncio.create_task(aio.generate(prompt, request_id=name, **FIELDS))
    try:
        await asyncio.sleep(rng.uniform(0, 0.05))
        aio.abort(name)
        generation = await call
    finally:
        call.cancel()
    assert generation.completions[0].finish_reason in ("length", "abort")
    assert generation.token_ids == expected[: len(generation.token_ids)]


async def left(aio: AsyncEngine, prompt: str, expected: list[int], rng: random.Random, name: str) -> None:
    found: list[int] = []
    async for event in aio.stream(prompt, request_id=name, **FIELDS):
        found += event.token_ids
        if rng.random() < 0.2:
            break
    assert found == expected[: len(found)]


async def unread(aio: AsyncEngine, prompt: str, expected: list[int], rng: random.Random, name: str) -> None:
    streams = await aio.submit([prompt, prompt], request_id=name, **FIELDS)
    await asyncio.sleep(rng.uniform(0, 0.05))
    del streams


def soak(engine: Engine, count: int, expected: dict[str, list[int]]) -> None:
    """So many calls at once, of which some end early; the others are right, and some tasks are cancelled."""
    rng = random.Random(count)

    async def one(aio: AsyncEngine, name: str) -> bool:
        use, prompt = rng.choice([whole, whole, whole, timed_out, aborted, left, unread]), rng.choice(list(expected))
        await asyncio.sleep(rng.uniform(0, count / 500))
        await use(aio, prompt, expected[prompt], rng, name)
        return True

    async def main() -> None:
        async with running(engine, max_waiting=count * 2) as aio:
            tasks = [asyncio.create_task(one(aio, str(i))) for i in range(count)]
            cancelled = rng.sample(tasks, count // 5)
            for task in cancelled:
                await asyncio.sleep(rng.uniform(0, 0.005))
                task.cancel()
            for task, result in zip(tasks, await asyncio.gather(*tasks, return_exceptions=True), strict=True):
                assert result is True or (task in cancelled and isinstance(result, asyncio.CancelledError))

    asyncio.run(main())


@pytest.mark.slow
def test_nothing_is_left_of_calls_that_come_and_go(make: Callable[..., Engine]) -> None:
    soak(make(), 60, answers(make()))


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [{}, {"max_batch_size": 16}, {"max_batched_tokens": 4}])
def test_nothing_is_left_of_many_calls_that_come_and_go(make: Callable[..., Engine], arguments: dict[str, Any]) -> None:
    soak(make(**arguments), 300, answers(make()))
