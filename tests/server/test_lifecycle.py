"""Clients that leave or do not read, draining, TLS: over real connections."""

import asyncio
import contextlib
import gc
import importlib
import json
import shutil
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from minillm import Engine
from minillm.server import Limits, make_app, streaming

from .client import chunks_of, error_of, lines_of, listening, until

COMPLETIONS = "/v1/completions"
LONG = {"prompt": "A list of colors: red,", "max_tokens": 480, "ignore_eos": True, "temperature": 0}


@pytest.fixture
def narrow() -> Iterator[Engine]:
    """An engine with two places; all is free at the end."""
    with Engine(max_batch_size=2) as engine:
        cache = engine.runner.cache
        yield engine
        assert cache.free_pages == cache.num_pages


def slowed(engine: Engine, seconds: float = 0.01) -> list[float]:
    """Make each step take a while. Returns the times at which steps end."""
    advance, times = engine._driver.loop.advance, []

    def slow_advance() -> None:
        time.sleep(seconds)
        advance()
        times.append(time.monotonic())

    engine._driver.loop.advance = slow_advance  # type: ignore[method-assign]
    return times


def idle(engine: Engine) -> bool:
    return not engine.busy and engine.runner.cache.free_pages == engine.runner.cache.num_pages


def use(url: str, work: Callable[[httpx.AsyncClient], Awaitable[None]], **options: Any) -> None:
    async def run() -> None:
        async with httpx.AsyncClient(base_url=url, timeout=30, **options) as client:
            await work(client)

    asyncio.run(run())


@pytest.mark.slow
@pytest.mark.parametrize("when", ["streaming", "not streaming", "in the queue", "while the prompt is computed"])
def test_a_client_that_leaves_frees_its_pages_with_the_next_step(narrow: Engine, when: str) -> None:
    times = slowed(narrow, 0.05)
    others = 2 if when == "in the queue" else 0

    def count() -> int:
        return narrow.load().running + narrow.load().waiting

    async def leave(url: httpx.URL) -> None:
        async with httpx.AsyncClient(base_url=url, timeout=30) as client:
            if when == "streaming":
                async with client.stream("POST", COMPLETIONS, json=LONG | {"stream": True}) as response:
                    lines = lines_of(response)
                    await anext(lines)
                    await anext(lines)
            else:
                task = asyncio.create_task(client.post(COMPLETIONS, json=LONG))
                await until(lambda: count() > others)
                if when == "not streaming":
                    await until(lambda: len(times) > 3)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    async def work(client: httpx.AsyncClient) -> None:
        body = LONG | {"max_tokens": 40}
        staying = [asyncio.create_task(client.post(COMPLETIONS, json=body)) for _ in range(others)]
        await until(lambda: narrow.load().running == others)
        await leave(client.base_url)
        steps = len(times)
        await until(lambda: count() <= others)
        assert len(times) - steps <= 3  # the step that runs, the next, and one to spare
        for other in staying:
            assert (await other).status_code == 200

    app = make_app(narrow)
    with listening(app) as url:
        use(url, work)
        asyncio.run(until(lambda: idle(narrow)))
    metrics = app.state.server.metrics
    assert metrics.of["minillm"].finished == {"abort": 1} | ({"length": others} if others else {})
    assert metrics.responses[COMPLETIONS, "499"] == 1


@pytest.mark.slow
def test_draining_lets_streams_finish(narrow: Engine) -> None:
    slowed(narrow, 0.002)
    app = make_app(narrow)

    async def work(client: httpx.AsyncClient) -> None:
        whole = asyncio.create_task(client.post(COMPLETIONS, json=LONG | {"max_tokens": 60}))
        async with client.stream("POST", COMPLETIONS, json=LONG | {"stream": True, "max_tokens": 60}) as response:
            lines = lines_of(response)
            await anext(lines)
            drained = asyncio.ensure_future(app.state.server.drain())
            await until(lambda: app.state.server.draining)
            health = await client.get("/health")
            assert (health.status_code, health.json()) == (503, {"status": "draining"})
            error = error_of(await client.post(COMPLETIONS, json=LONG), 503)
            assert error["code"] == "shutting_down"
            rest = [line async for line in lines]
        assert rest[-1] == "[DONE]" and json.loads(rest[-2])["choices"][0]["finish_reason"] == "length"
        assert (await whole).json()["usage"]["completion_tokens"] == 60
        await drained

    with listening(app) as url:
        use(url, work)


@pytest.mark.slow
def test_draining_ends_what_takes_too_long(narrow: Engine) -> None:
    slowed(narrow)
    app = make_app(narrow)

    async def work(client: httpx.AsyncClient) -> None:
        whole = asyncio.create_task(client.post(COMPLETIONS, json=LONG))
        await until(lambda: narrow.load().running == 1)
        await app.state.server.drain(0.1)
        answer = (await whole).json()
        assert answer["choices"][0]["finish_reason"] == "abort" and answer["usage"]["completion_tokens"] < 480

    with listening(app) as url:
        use(url, work)


@pytest.mark.slow
def test_a_client_that_does_not_read_ends_its_request(narrow: Engine) -> None:
    times = slowed(narrow, 0.05)  # so that it would take 24 seconds
    app = make_app(narrow, limits=Limits(send_timeout=0.2))
    head = "POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s"
    body = json.dumps(LONG | {"stream": True, "logprobs": 20, "n": 2, "temperature": 1})
    with listening(app) as url:
        host, port = url.removeprefix("http://").split(":")
        with socket.socket() as stuck:
            stuck.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            stuck.connect((host, int(port)))
            stuck.sendall((head % (len(body), body)).encode())
            asyncio.run(until(lambda: narrow.load().running > 0))
            asyncio.run(until(lambda: idle(narrow)))
            assert len(times) < 400

            async def work(client: httpx.AsyncClient) -> None:  # others go on meanwhile
                assert (await client.post(COMPLETIONS, json=LONG | {"max_tokens": 5})).status_code == 200

            use(url, work)


@pytest.mark.longer
def test_pieces_written_to_the_connection_are_those_that_the_server_would_send(
    narrow: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = LONG | {"max_tokens": 40, "stream": True, "n": 2, "seed": 1, "temperature": 1}
    exchanges: list[Any] = []
    monkeypatch.setattr("minillm.server.streaming.exchange_of", noting(streaming.exchange_of, exchanges))
    with listening(make_app(narrow), http="httptools") as url:
        written = texts_of(httpx.post(url + COMPLETIONS, json=body, timeout=60).text)
        monkeypatch.setattr("minillm.server.streaming.UVICORN_EXCHANGE", ())
        sent = texts_of(httpx.post(url + COMPLETIONS, json=body, timeout=60).text)
    assert [exchange is not None for exchange in exchanges] == [True, False]
    assert written == sent and all(sent)


def texts_of(stream: str) -> list[str]:
    """The texts of a stream's two choices."""
    choices = [choice for chunk in chunks_of(stream) for choice in chunk["choices"]]
    return ["".join(choice["text"] for choice in choices if choice["index"] == index) for index in (0, 1)]


def noting(function: Callable[[Any], Any], results: list[Any]) -> Callable[[Any], Any]:
    """The function, whose results are noted."""

    def noted(argument: Any) -> Any:
        results.append(function(argument))
        return results[-1]

    return noted


def test_a_client_that_does_not_send_is_told_so(narrow: Engine) -> None:
    with listening(make_app(narrow, limits=Limits(send_timeout=0.1))) as url:
        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=20) as slow:
            slow.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n")
            slow.sendall(b'Content-Length: 100\r\n\r\n{"prompt": ')
            assert b"408" in slow.recv(1000)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("broken", [False, True])
def test_a_client_that_is_gone_before_the_answer_begins(
    narrow: Engine, stream: bool, broken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Likewise a fault of ours between the queue and the answer."""
    app = make_app(narrow)
    if broken:
        monkeypatch.setattr("minillm.server.text_generation.StreamResponse", None)
        monkeypatch.setattr("minillm.server.server_request.ServerRequest._results", None)
    sent: list[Any] = []
    messages = [{"type": "http.request", "body": json.dumps(LONG | {"stream": stream}).encode()}]

    async def receive() -> Any:
        return messages.pop() if messages else {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    async def work() -> None:
        headers = [(b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": COMPLETIONS, "headers": headers, "query_string": b""}
        await app(scope | {"http_version": "1.1", "scheme": "http", "root_path": "", "client": None}, receive, send)
        await until(lambda: idle(narrow), 3)

    slowed(narrow)
    gc.disable()  # nothing is left to the collector
    try:
        asyncio.run(work())
    finally:
        gc.enable()
    assert any(b"the server failed" in message.get("body", b"") for message in sent) == broken


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl, for a certificate")
def test_tls(narrow: Engine, tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-keyout", str(key), "-out", str(certificate), "-days", "2", "-subj", "/CN=localhost"]
    subprocess.run([*command, "-addext", "subjectAltName=IP:127.0.0.1"], check=True, capture_output=True)
    from minillm.errors import UsageError
    from minillm.server.process import Binding

    Binding(ssl_keyfile=str(key), ssl_certfile=str(certificate)).check()
    for wrong in ({"ssl_keyfile": str(key)}, {"ssl_keyfile": str(certificate), "ssl_certfile": str(key)}):
        with pytest.raises(UsageError, match="ssl-certfile"):
            Binding(**wrong).check()

    async def work(client: httpx.AsyncClient) -> None:
        async with client.stream("POST", COMPLETIONS, json=LONG | {"stream": True, "max_tokens": 5}) as response:
            assert [line async for line in lines_of(response)][-1] == "[DONE]"

    with listening(make_app(narrow), ssl_keyfile=str(key), ssl_certfile=str(certificate)) as url:
        use(url, work, verify=ssl.create_default_context(cafile=str(certificate)))
        with pytest.raises(httpx.ConnectError):
            use(url, work)


@pytest.mark.slow
@pytest.mark.parametrize("parser", ["httptools", "h11"])
def test_headers_without_end_are_refused(narrow: Engine, parser: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a request on the same connection too; a body may be as long as ever. h11 reads where httptools is not."""
    from minillm.server import process as processes
    from minillm.server.process import LARGEST_HEAD, Binding, Process

    pytest.importorskip(parser)
    protocol: Any = importlib.import_module(f"uvicorn.protocols.http.{parser}_impl")
    name = {"httptools": "HttpToolsProtocol", "h11": "H11Protocol"}[parser]
    monkeypatch.setattr(processes, "AutoHTTPProtocol", getattr(protocol, name))
    ready = threading.Event()
    with Binding(port=0).bind() as bound:
        process = Process(make_app(narrow), Binding(port=0), drain_timeout=None, started=ready.set)
        thread = threading.Thread(target=process.run, kwargs={"sockets": [bound]})
        thread.start()
        try:
            assert ready.wait(20)
            with socket.create_connection(bound.getsockname(), timeout=20) as client:
                body = b'{"tokens":[' + b"5," * LARGEST_HEAD + b"5]}"
                client.sendall(
                    b"POST /detokenize HTTP/1.1\r\nHost: here\r\nContent-Type: application/json\r\n"
                    b"Content-Length: %d\r\n\r\n" % len(body) + body
                )
                assert client.recv(16).startswith(b"HTTP/1.1 200")
                client.sendall(b"GET /health HTTP/1.1\r\n")
                sent = 0
                with contextlib.suppress(OSError):  # it closes the connection
                    while sent < 500 * LARGEST_HEAD:
                        sent += client.send(b"X: " + b"a" * 1000 + b"\r\n")
                assert sent < 500 * LARGEST_HEAD
        finally:
            process.should_exit = True
            thread.join(20)


@pytest.mark.slow
def test_connections_that_send_no_request_are_closed_and_further_ones_refused(narrow: Engine) -> None:
    from minillm.server.process import Binding, Process

    ready = threading.Event()
    binding = Binding(port=0, send_timeout=0.5, max_connections=3)
    with binding.bind() as bound:
        process = Process(make_app(narrow), binding, drain_timeout=None, started=ready.set)
        thread = threading.Thread(target=process.run, kwargs={"sockets": [bound]})
        thread.start()
        try:
            assert ready.wait(20)
            address, health = bound.getsockname(), b"GET /health HTTP/1.1\r\nHost: here\r\n\r\n"
            silent, slow, kept, further = (socket.create_connection(address, timeout=20) for _ in range(4))
            slow.send(b"GET /health HTTP/1.1\r\nHost: he")
            further.send(health)
            assert further.recv(1000).startswith(b"HTTP/1.1 503")  # the fourth
            further.close()
            kept.send(health)
            while not kept.recv(1000).startswith(b"HTTP/1.1 200"):  # the fourth was not gone yet
                kept.close()
                kept = socket.create_connection(address, timeout=20)
                kept.send(health)
            assert silent.recv(1000) == slow.recv(1000) == b""
            kept.send(health)  # it has sent a request, so it may be silent for longer
            assert kept.recv(1000).startswith(b"HTTP/1.1 200")
        finally:
            process.should_exit = True
            thread.join(20)
            assert not thread.is_alive()
            for one in (silent, slow, kept, further):
                one.close()
