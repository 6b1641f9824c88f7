"""A client of an application in this process: requests through ASGI, without a socket; and servers with one."""

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import httpx
import msgspec
import pytest
from starlette.applications import Starlette

from minillm import Engine
from minillm.text.chat import ChatTemplate

from ..text.chat.conversations import template
from ..tiny import write_checkpoint

T = TypeVar("T")
LEFT_OPEN = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
"""Mark of tests with other projects' clients: these leave event loops and sockets to the garbage collector, which finds
them in any later test"""

TEMPLATE = ChatTemplate(
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% if shout %} LOUD{% endif %}{% endif %}"
    "{% if reasoning_effort or verbosity or enable_thinking %} ({{ reasoning_effort }}, {{ verbosity }}){% endif %}"
)
"""For the model in the package, which has none."""


@contextlib.contextmanager
def calling_engine(folder: Path, positions: int = 1024, **options: Any) -> Iterator[Engine]:
    """A model of random weights with a template like Qwen's, which takes tools."""
    with Engine(write_checkpoint(folder, max_position_embeddings=positions), max_batch_size=4, **options) as engine:
        engine.chat_template = template("hermes")
        yield engine


def talk(app: Starlette, use: Callable[[httpx.AsyncClient], Awaitable[T]]) -> T:
    """Use a client of the application in an event loop of its own."""

    async def run() -> T:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test", timeout=60) as client:
            return await use(client)

    return asyncio.run(run())


def post(app: Starlette, path: str, body: Any = None, **more: Any) -> httpx.Response:
    """One POST; `body` as JSON, or bytes as they are."""
    if not isinstance(body, bytes):
        more["json"] = body
    else:
        more |= {"content": body, "headers": {"content-type": "application/json"} | more.get("headers", {})}
    return talk(app, lambda client: client.post(path, **more))


def get(app: Starlette, path: str, **more: Any) -> httpx.Response:
    """One GET."""
    return talk(app, lambda client: client.get(path, **more))


def error_of(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    """The error of a response, whose shape is checked."""
    assert response.status_code == status, response.text
    body = response.json()
    assert body.keys() == {"error"}
    error: dict[str, Any] = body["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["message"] and error["message"].isprintable() and len(error["message"]) <= 1000
    return error


def chunks_of(text: str) -> list[dict[str, Any]]:
    """The chunks of a stream, which ends properly; without its comments."""
    lines = [line for line in text.split("\n\n") if line and line != ": keep-alive"]
    assert all(line.startswith("data: ") and "\n" not in line for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [msgspec.json.decode(line.removeprefix("data: ")) for line in lines[:-1]]


@contextlib.contextmanager
def listening(app: Starlette, **options: Any) -> Iterator[str]:
    """A real server in a thread; its URL."""
    import uvicorn

    with socket.create_server(("127.0.0.1", 0)) as bound:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # so that a client that does not read is noticed
        server = uvicorn.Server(uvicorn.Config(app, log_config=None, log_level="warning", ws="none", **options))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
        thread.start()
        try:
            while not server.started:
                time.sleep(0.01)
            scheme = "https" if options.get("ssl_certfile") else "http"
            yield f"{scheme}://127.0.0.1:{bound.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(30)
            assert not thread.is_alive()


async def until(condition: Callable[[], bool], seconds: float = 20) -> None:
    """Wait until something is so."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.005)


async def lines_of(response: httpx.Response) -> AsyncIterator[str]:
    """The data of a stream's events."""
    async for line in response.aiter_lines():
        if line.startswith("data: "):
            yield line.removeprefix("data: ")
