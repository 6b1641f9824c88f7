"""An `AsyncEngine` that must have nothing left at its end, and what occupies or watches one."""

import asyncio
import gc
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

from minillm import AsyncEngine, Engine
from minillm.engine.async_engine import WORKERS

from .conversations import TEMPLATES
from .tiny import write_checkpoint

ENDLESS: dict[str, Any] = {"max_new_tokens": 200, "eos_token_id": []}


def talking_checkpoint(folder: Path) -> Path:
    """A tiny model with a context of 512 tokens that talks in ChatML."""
    write_checkpoint(folder, seed=2, max_position_embeddings=512)
    (folder / "chat_template.jinja").write_text((TEMPLATES / "chatml.jinja").read_text(encoding="utf-8"))
    return folder


@asynccontextmanager
async def running(engine: Engine, **arguments: Any) -> AsyncIterator[AsyncEngine]:
    """An AsyncEngine that has nothing left at the end: no page, no request, no name, no task, no thread."""
    threads, cache = set(threading.enumerate()), engine.runner.cache
    async with AsyncEngine(engine, **arguments) as aio:
        yield aio
        await until(lambda: not aio._thread._calls)
        gc.collect()
        await aio.call(lambda: None)
        load = aio.load()
        assert (load.waiting, load.running, aio._thread._arriving) == (0, 0, 0)
        assert not aio._thread._lives
        assert cache.free_pages == cache.num_pages
        assert not (engine._driver._mail or engine._driver._arrivals)
        assert not engine._driver._unclaimed
    assert asyncio.all_tasks() == {asyncio.current_task()}
    assert set(threading.enumerate()) <= threads


async def until(condition: Callable[[], object], seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        await asyncio.sleep(0.001)


@asynccontextmanager
async def occupied_by(call: Callable[..., Awaitable[None]], count: int = 1) -> AsyncIterator[None]:
    gate, begun = threading.Event(), threading.Semaphore(0)

    def wait() -> None:
        begun.release()
        assert gate.wait(120)

    calls = [asyncio.ensure_future(call(wait)) for _ in range(count)]
    for _ in calls:
        await until(lambda: begun.acquire(blocking=False))
    try:
        yield
    finally:
        gate.set()
        await asyncio.gather(*calls)


def busy(aio: AsyncEngine) -> AbstractAsyncContextManager[None]:
    """The engine's thread is occupied inside the block, so what is posted to it waits."""
    return occupied_by(aio.call)


def busy_workers(aio: AsyncEngine) -> AbstractAsyncContextManager[None]:
    """So are the threads that make requests."""
    return occupied_by(aio.run, WORKERS)


def watched(engine: Engine, known: set[int]) -> tuple[list[int], threading.Event]:
    """Requests other than the known ones that are there when a step begins after the event is set."""
    late: list[int] = []
    has_left, loop = threading.Event(), engine._driver.loop
    advance = loop.advance

    def watching() -> None:
        if has_left.is_set():
            late.extend(i for i in loop._runs if i not in known)
        advance()

    loop.advance = watching  # type: ignore[method-assign]
    return late, has_left


def answers(engine: Engine) -> dict[str, list[int]]:
    prompts = ["Hello", "one two three four", "a b c", "the end of it all"]
    return {prompt: engine.generate(prompt, max_new_tokens=12, eos_token_id=[]).token_ids for prompt in prompts}
