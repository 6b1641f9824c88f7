"""`AsyncEngine`: results as an engine's alone, the queue, slow readers, and its end."""

import asyncio
import gc
import threading
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from minillm import AsyncEngine, Engine
from minillm.decoding.event import Event
from minillm.engine.async_engine import AsyncEventStream, merged
from minillm.engine.results import Generation
from minillm.errors import (
    CacheFullError,
    EngineStateError,
    NumericalError,
    ParameterError,
    PromptError,
    QueueFullError,
    SlowReaderError,
)

from ..async_engines import ENDLESS, answers, busy, running, talking_checkpoint, until, watched
from ..comparing import assert_same_results
from ..conversations import TALK

MIXED: list[tuple[Any, dict[str, Any]]] = [
    ([5, 6, 7, 5, 6], {"prompt_lookup_num_tokens": 3}),
    ("one two three four", {"num_beams": 3, "num_return_sequences": 2}),
    ("a b c", {"do_sample": True, "seed": 1, "num_return_sequences": 3, "top_logprobs": 2}),
    ("Hello", {"echo": True, "logprobs": True}),
    ([9, 8], {"guided_regex": "[a-z]{4,8}"}),
    ("Hello", {"max_new_tokens": 0, "echo": True, "top_logprobs": 1}),
    ([3], {"stop_strings": ["e", "t"], "max_new_tokens": 60}),
    (["one", [7, 7]], {"do_sample": True, "seed": 4}),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return talking_checkpoint(tmp_path_factory.mktemp("aio"))


@pytest.fixture
def make(folder: Path) -> Callable[..., Engine]:
    return lambda **arguments: Engine(folder, **{"max_batch_size": 4} | arguments)


@pytest.mark.longer
def test_a_mixture_gives_what_an_engine_alone_gives(make: Callable[..., Engine]) -> None:
    """Also from streams, whose events are put together."""
    alone, mixed = make(), [(prompt, {"max_new_tokens": 10} | fields) for prompt, fields in MIXED]
    expected = [alone.generate(prompt, **fields) for prompt, fields in mixed]

    async def main() -> None:
        async with running(make()) as aio:
            together = await asyncio.gather(*(aio.generate(prompt, **fields) for prompt, fields in mixed))
            assert_same_results(together, expected)
            for (prompt, fields), whole in zip(mixed[:-1], expected, strict=False):
                assert isinstance(whole, Generation)
                events = [event async for event in aio.stream(prompt, request_id="mine", **fields)]
                assert_same_results(Generation.of(whole.prompt_token_ids, events), whole)
                assert [event.request_finished for event in events] == [False] * (len(events) - 1) + [True]
                assert {event.request_id for event in events} == {"mine"}

    asyncio.run(main())


def test_conversations(make: Callable[..., Engine]) -> None:
    expected = make().chat(TALK, max_new_tokens=8)

    async def main() -> None:
        async with running(make()) as aio:
            assert await aio.chat(TALK, max_new_tokens=8) == expected
            text = "".join([event.text async for event in aio.stream_chat(TALK, max_new_tokens=8, priority=1)])
            assert text == expected.text
            with pytest.raises(PromptError):
                await aio.chat([])

    asyncio.run(main())


@pytest.mark.longer
def test_functions_run_between_steps_and_beside_them(make: Callable[..., Engine]) -> None:
    engine = make()
    expected = engine.score("Hello")

    async def main() -> None:
        async with running(engine) as aio:
            reading = asyncio.create_task(aio.generate("Hello", **ENDLESS))
            assert await aio.call(engine.score, "Hello") == expected
            assert (await aio.call(threading.current_thread)).name == "minillm-engine"
            assert engine.tokenizer is not None
            assert await aio.run(engine.tokenizer.encode, "Hello") == expected.token_ids
            with pytest.raises(ZeroDivisionError):
                await aio.call(lambda: 1 // 0)
            assert len((await reading).token_ids) == 200

    asyncio.run(main())


# --- who waits, and who is refused ------------------------------------------------------------------------------------


def test_every_call_of_the_engine_may_stand_beside_it(make: Callable[..., Engine]) -> None:
    """Each gets the events of its own requests, whoever runs the steps."""

    async def main() -> None:
        engine = make()
        aio = AsyncEngine(engine)
        [stream] = await aio.submit(["Hello"], max_new_tokens=20)
        request_id, events = engine.add("Hello", max_new_tokens=8), []
        while not (events and events[-1].request_finished):
            events += engine.step()
        assert {event.request_id for event in events} == {request_id}
        assert len(engine.generate("Hello", max_new_tokens=3).token_ids) == 3
        assert len((await stream.result()).token_ids) == 20
        assert [token for event in events for token in event.token_ids] == engine.generate(
            "Hello", max_new_tokens=8
        ).token_ids
        await aio.close()

    asyncio.run(main())


def test_requests_are_counted_once_on_their_way_to_the_queue(make: Callable[..., Engine], monkeypatch) -> None:
    async def main() -> None:
        engine, seen = make(), []
        async with running(engine, max_waiting=50) as aio:
            queue = engine._driver.queue

            def watched(*arguments: Any) -> None:
                seen.append(aio.load().waiting)
                queue(*arguments)
                aio._thread._arriving -= 20  # as `take` will do, before anybody else can look
                seen.append(aio.load().waiting)
                aio._thread._arriving += 20

            monkeypatch.setattr(engine._driver, "queue", watched)
            assert len(await aio.generate(["Hello"] * 20, max_new_tokens=1)) == 20
            assert seen == [20, 20] and aio.load().waiting == 0

    asyncio.run(main())


@pytest.mark.parametrize(
    "error",
    [
        StopIteration,
        pytest.param(StopAsyncIteration, marks=pytest.mark.slow),
        pytest.param(SystemExit, marks=pytest.mark.slow),
        asyncio.CancelledError,
    ],
)
def test_whatever_a_function_raises_is_the_error_of_its_request_alone(
    make: Callable[..., Engine], error: type[BaseException]
) -> None:
    def fail(*_: Any) -> Any:
        raise error

    async def main() -> None:
        async with running(make()) as aio:
            other = asyncio.create_task(aio.generate("Hello", max_new_tokens=8))
            with pytest.raises(RuntimeError, match=f"a function raised {error.__name__}"):
                await aio.generate("Hello", logits_processor=[fail])
            with pytest.raises(RuntimeError, match=f"a function raised {error.__name__}"):
                async for _ in aio.stream("Hello", prefix_allowed_tokens_fn=fail):
                    pass
            assert len((await other).token_ids) == 8
            if issubclass(error, Exception):
                for call in (aio.call, aio.run):
                    with pytest.raises(RuntimeError, match=f"a function raised {error.__name__}"):
                        await asyncio.wait_for(call(fail), 30)

    asyncio.run(main())


@pytest.mark.parametrize(
    "fields",
    [{}, {"num_beams": 2}, {"prompt_lookup_num_tokens": 3}, {"do_sample": True}, {"penalty_alpha": 0.6, "top_k": 4}],
)
def test_nan_of_a_processor_is_an_error(make: Callable[..., Engine], fields: dict[str, Any]) -> None:
    def spoil(history: Any, logits: Any, xp: Any) -> Any:
        logits = logits.copy()
        logits[:, 7] = xp.nan
        return logits

    with make() as engine, pytest.raises(NumericalError, match="returned NaN or infinity"):
        engine.generate("Hello", max_new_tokens=3, logits_processor=[spoil], **fields)


def test_the_queue_takes_as_many_as_it_says(make: Callable[..., Engine]) -> None:
    async def main() -> None:
        async with running(make(), max_waiting=6) as aio:
            calls = [aio.generate("Hello", **ENDLESS, request_id=str(i)) for i in range(12)]
            async with busy(aio):  # none leaves the queue
                tasks = [asyncio.create_task(call) for call in calls]
                refused = (await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION))[0]
            assert len(refused) == 6
            assert all(isinstance(task.exception(), QueueFullError) for task in refused)
            await until(lambda: aio.load().running == 4)  # so 2 wait
            with pytest.raises(QueueFullError, match="2 requests wait and the queue takes 6, too few for 5 more"):
                await aio.generate(["Hello"] * 5)
            with pytest.raises(ParameterError, match="prompt: 7 prompts at once, and the queue takes 6"):
                await aio.generate(["Hello"] * 7)
            more = asyncio.create_task(aio.generate(["Hello"] * 4))
            await until(lambda: aio.load().waiting == 6)
            with pytest.raises(QueueFullError):
                await aio.generate("Hello")
            for i in range(12):
                aio.abort(str(i))
            assert len(await more) == 4
            assert all(task.done() for task in tasks)

    asyncio.run(main())


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("prompts", "fields", "error"),
    [
        (["Hello", [5, 10**6]], {}, PromptError),
        (["Hello", "Hello"], {"temperature": -1.0}, ParameterError),
        (["Hello", "Hello"], {"timeout": 0}, ParameterError),
        (["Hello", "Hello"], {"priority": "high"}, ParameterError),
        (["Hello", list(range(3, 303))], {}, CacheFullError),  # the first one would fit
    ],
)
def test_a_list_is_queued_as_a_whole_or_not_at_all(
    make: Callable[..., Engine], prompts: list[Any], fields: dict[str, Any], error: type[Exception]
) -> None:
    async def main() -> None:
        engine = make(cache_bytes=256 * 2 * 32 * 2 * 4)  # 256 positions
        async with running(engine) as aio:
            with pytest.raises(error):
                await aio.generate(prompts, **fields)
            assert (aio.load().waiting, aio.load().running) == (0, 0)
            assert engine.stats.steps == 0

    asyncio.run(main())


def test_names_are_texts_and_unique_among_the_unfinished(make: Callable[..., Engine]) -> None:
    async def main() -> None:
        async with running(make()) as aio:
            first = asyncio.create_task(aio.generate("Hello", request_id="one", **ENDLESS))
            await asyncio.sleep(0)
            for name in ("one", "", 5):
                with pytest.raises(ParameterError, match="request_id"):
                    await aio.generate("Hello", request_id=name)  # type: ignore[call-overload]
            aio.abort("one")
            aio.abort("another")
            await first
            await aio.generate("Hello", request_id="one")

    asyncio.run(main())


def test_priority_decides_who_is_next(make: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make(max_batch_size=1)
    ended: list[int] = []
    take_events = engine._driver.loop.take_events

    def recorded() -> list[Event]:
        events = take_events()
        ended.extend(event.request_id for event in events if event.request_finished)  # type: ignore[misc]
        return events

    async def main() -> None:
        async with running(engine) as aio:
            async with busy(aio):
                tasks: list[asyncio.Task[Generation]] = []
                for priority in (2, 0, 1):  # one after the other: threads make the requests, and number them
                    tasks.append(asyncio.create_task(aio.generate("Hello", priority=priority, max_new_tokens=2)))
                    await until(lambda: engine.waiting == len(tasks))
            await asyncio.gather(*tasks)

    monkeypatch.setattr(engine._driver.loop, "take_events", recorded)
    asyncio.run(main())
    first, second, third = sorted(ended)  # as they were submitted
    assert ended == [second, third, first]


@pytest.mark.slow
def test_a_timeout_ends_it_with_what_there_is(make: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make(max_batch_size=1)
    take_events = engine._driver.loop.take_events

    def slowly() -> list[Event]:
        time.sleep(0.001)  # 200 tokens take longer than the timeout on any machine
        return take_events()

    monkeypatch.setattr(engine._driver.loop, "take_events", slowly)

    async def main() -> None:
        async with running(engine) as aio:
            whole = await aio.generate("Hello", **ENDLESS)
            runs, waits = await asyncio.gather(
                aio.generate("Hello", timeout=0.03, **ENDLESS), aio.generate("Hello", timeout=0.01, **ENDLESS)
            )
            assert (runs.completions[0].finish_reason, waits.completions[0].finish_reason) == ("timeout", "timeout")
            assert runs.token_ids == whole.token_ids[: len(runs.token_ids)]
            assert waits.token_ids == []

    asyncio.run(main())


# --- readers ----------------------------------------------------------------------------------------------------------


def test_unread_events_are_merged(make: Callable[..., Engine]) -> None:
    fields: dict[str, Any] = {"do_sample": True, "seed": 1, "num_return_sequences": 3, "top_logprobs": 2, "echo": True}
    expected = make().generate("Hello", max_new_tokens=20, **fields)

    async def main() -> None:
        async with running(make()) as aio:
            [stream] = await aio.submit(["Hello"], max_new_tokens=20, **fields)
            await until(lambda: not aio._thread._lives)
            events = await stream.read()
            assert len(events) == 3
            assert_same_results(Generation.of(stream.prompt_token_ids, events), expected)
            assert await stream.read() == []

    asyncio.run(main())


def test_merging_keeps_the_order_of_the_last_events() -> None:
    events = [Event("r", index, text, ()) for index, text in [(0, "a"), (1, "b"), (0, "c"), (2, "d"), (1, "e")]]
    assert [(event.index, event.text) for event in merged(events)] == [(0, "ac"), (2, "d"), (1, "be")]


@pytest.mark.longer
def test_a_slow_reader_does_not_fill_the_memory(make: Callable[..., Engine]) -> None:
    """Events from before the bound are read, then the error."""
    whole = make().generate("Hello", **ENDLESS)

    async def main() -> None:
        async with running(make(), max_unread=10) as aio:
            [stream] = await aio.submit(["Hello"], **ENDLESS)
            await until(lambda: not aio._thread._lives)
            [event] = await stream.read()
            assert list(event.token_ids) == whole.token_ids[:11]
            with pytest.raises(SlowReaderError, match="11 tokens of a request lay unread, and 10 may"):
                await stream.read()
            assert await stream.read() == []

    asyncio.run(main())


@pytest.mark.slow
def test_the_events_of_a_step_take_one_callback(make: Callable[..., Engine]) -> None:
    async def main() -> None:
        async with running(make(max_batch_size=16)) as aio:
            loop, calls = asyncio.get_running_loop(), 0
            plain = loop.call_soon_threadsafe

            def counted(*arguments: Any, **more: Any) -> Any:
                nonlocal calls
                calls += 1
                return plain(*arguments, **more)

            streams = await aio.submit(["Hello"] * 8, **ENDLESS)
            before, loop.call_soon_threadsafe = aio.engine.stats.steps, counted  # type: ignore[method-assign]
            await asyncio.gather(*(stream.result() for stream in streams))
            loop.call_soon_threadsafe = plain  # type: ignore[method-assign]
            assert 0 < calls <= aio.engine.stats.steps - before + 1

    asyncio.run(main())


def test_several_event_loops_in_several_threads(make: Callable[..., Engine]) -> None:
    """Also a thread without a loop, on the engine itself."""
    expected = answers(make())
    aio = AsyncEngine(make())
    wrong: list[str] = []

    def use(prompt: str) -> None:
        async def main() -> None:
            found = await asyncio.gather(*(aio.generate(prompt, max_new_tokens=12, eos_token_id=[]) for _ in range(4)))
            wrong.extend(prompt for generation in found if generation.token_ids != expected[prompt])

        asyncio.run(main())

    threads = [threading.Thread(target=use, args=(prompt,)) for prompt in expected]
    for thread in threads:
        thread.start()
    plain = aio.engine.generate("Hello", max_new_tokens=12, eos_token_id=[])
    for thread in threads:
        thread.join()
    assert plain.token_ids == expected["Hello"]
    assert not wrong
    asyncio.run(aio.close())


def test_an_event_loop_that_ends_takes_its_requests_with_it(make: Callable[..., Engine]) -> None:
    aio = AsyncEngine(make())

    async def leave() -> AsyncEventStream:
        [stream] = await aio.submit(["Hello"], **ENDLESS)
        return stream

    stream = asyncio.run(leave())  # still referred to, but nobody can read it
    late, has_left = watched(aio.engine, known=set())
    has_left.set()

    async def main() -> None:
        await until(lambda: not aio._thread._calls)
        await aio.close()

    asyncio.run(main())
    assert len(late) <= 2  # a step's events find out
    stream.close()


# --- the end ----------------------------------------------------------------------------------------------------------


def test_in_a_step_nobody_waits_for_the_threads_of_one_that_was_dropped(
    make: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A garbage collection in a step finds it, and its idle thread waits for the end of that step to free memory."""
    monkeypatch.setattr("minillm.engine.engine_thread.IDLE_SECONDS", 0.01)
    engine = make()
    aio = AsyncEngine(engine)
    aio._thread.start()
    dropped, ended = [aio], threading.Event()
    thread = aio._thread._thread
    del aio

    def step() -> None:
        with engine._driver.turn():
            while not engine._driver._turns._queue:
                time.sleep(0.001)
            dropped.clear()
            gc.collect()
        ended.set()

    threading.Thread(target=step, daemon=True).start()
    assert ended.wait(30)
    assert thread is not None
    thread.join(30)
    assert not thread.is_alive()
    engine.close()


@pytest.mark.longer
def test_draining_refuses_new_requests_and_finishes_the_others(make: Callable[..., Engine]) -> None:
    async def main() -> None:
        async with running(make()) as aio:
            calls = [asyncio.create_task(aio.generate("Hello", max_new_tokens=50, eos_token_id=[])) for _ in range(6)]
            await asyncio.sleep(0)
            await aio.drain()
            assert [len((await call).token_ids) for call in calls] == [50] * 6
            with pytest.raises(EngineStateError, match="draining"):
                await aio.generate("Hello")

    asyncio.run(main())


def test_draining_for_a_time_aborts_the_rest(make: Callable[..., Engine]) -> None:
    async def main() -> None:
        async with running(make()) as aio:
            call = asyncio.create_task(aio.generate("Hello", **ENDLESS))
            await until(lambda: aio.load().running == 1)
            await aio.drain(timeout=0.01)
            assert (await call).completions[0].finish_reason == "abort"

    asyncio.run(main())


def test_closing_fails_what_runs_and_what_comes(make: Callable[..., Engine]) -> None:
    async def main() -> None:
        aio = AsyncEngine(make())
        calls = [asyncio.create_task(aio.generate("Hello", **ENDLESS)) for _ in range(6)]
        stream = aio.stream("Hello", **ENDLESS)
        await anext(stream)
        await asyncio.gather(aio.close(), aio.close())
        with pytest.raises(EngineStateError, match="closed"):
            async for event in stream:  # what came before is read
                assert not event.request_finished
        for result in await asyncio.gather(*calls, return_exceptions=True):
            assert isinstance(result, EngineStateError)
        for call in (aio.generate("Hello"), aio.call(print), aio.run(print)):
            with pytest.raises(EngineStateError):
                await call
        with pytest.raises(EngineStateError, match="closed"):
            aio.engine.generate("Hello")

    asyncio.run(main())


def test_what_comes_while_it_closes_fails_too(make: Callable[..., Engine]) -> None:
    async def main() -> None:
        aio = AsyncEngine(make())
        async with busy(aio):
            closing = asyncio.create_task(aio.close())
            await until(lambda: aio._thread._inbox.qsize() == 1)
            late = asyncio.create_task(aio.call(print))
            await until(lambda: aio._thread._inbox.qsize() == 2)
        await closing
        with pytest.raises(EngineStateError, match="closed"):
            await late

    asyncio.run(main())


def test_an_unused_engine_closes(make: Callable[..., Engine]) -> None:
    async def main() -> None:
        async with AsyncEngine(make()):
            pass

    asyncio.run(main())


@pytest.mark.parametrize("where", ["advance", "check", "abort"])
def test_a_crash_of_the_thread_fails_everything_and_hangs_nothing(
    make: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    async def main() -> None:
        engine = make(max_batch_size=1)
        async with AsyncEngine(engine) as aio:
            calls: list[Coroutine[Any, Any, Any]] = [
                aio.generate("Hello", request_id=str(i), **ENDLESS) for i in range(3)
            ]
            tasks = [asyncio.create_task(call) for call in calls]
            await until(lambda: engine.load().waiting == 2 and engine.load().running == 1)  # none is on its way
            error = ValueError("a bug")

            def crash(*_: Any) -> None:
                raise error

            monkeypatch.setattr(engine._driver.loop, where, crash)
            if where == "check":  # fails its own call alone
                with pytest.raises(ValueError, match="a bug"):
                    await aio.generate("Hello")
                monkeypatch.setattr(engine._driver.loop, "advance", crash)
            if where == "abort":
                aio.abort("0")
            for result in await asyncio.gather(*tasks, return_exceptions=True):
                assert isinstance(result, EngineStateError)
                assert "the engine's thread failed: ValueError: a bug" in str(result)
                assert result.__cause__ is error
            with pytest.raises(EngineStateError, match="a bug"):
                await aio.generate("Hello")
            await aio.drain()

    asyncio.run(main())
