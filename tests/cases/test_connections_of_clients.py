"""Connections as clients and proxies treat them: silent ones, half-closed ones, bodies in gzip."""

import contextlib
import gzip
import importlib
import json
import socket
import threading
import tracemalloc
import zlib
from collections.abc import Iterator
from typing import Any

import pytest

from minillm import Engine
from minillm.server import Limits, make_app

from ..server.client import TEMPLATE, error_of, listening, post

COMPLETIONS, CHATS, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
STREAMS: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "A", "max_tokens": 2},
    CHATS: {"messages": [{"role": "user", "content": "A"}], "max_tokens": 2},
    RESPONSES: {"input": "A", "max_output_tokens": 2},
    "/api/chat": {"model": "minillm", "messages": [{"role": "user", "content": "A"}], "options": {"num_predict": 2}},
}


@pytest.fixture
def held() -> Iterator[tuple[Engine, threading.Event]]:
    """An engine whose steps wait for an event."""
    with Engine(max_batch_size=2) as engine:
        engine.chat_template = TEMPLATE
        advance, go = engine._driver.loop.advance, threading.Event()

        def waiting_advance() -> None:
            assert go.wait(60)
            advance()

        engine._driver.loop.advance = waiting_advance  # type: ignore[method-assign]
        try:
            yield engine, go
        finally:
            go.set()


def request_of(path: str, body: dict[str, Any] | bytes, **headers: str) -> bytes:
    """A request in bytes."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = {"Host": "here", "Content-Type": "application/json", "Content-Length": str(len(content))} | headers
    return (
        f"POST {path} HTTP/1.1\r\n".encode()
        + b"".join(f"{name}: {value}\r\n".encode() for name, value in lines.items())
        + b"\r\n"
        + content
    )


def read_until(client: socket.socket, part: bytes) -> bytes:
    """All that comes up to some bytes."""
    read = b""
    while part not in read:
        piece = client.recv(4096)
        assert piece, read
        read += piece
    return read


def rest_of(client: socket.socket) -> bytes:
    return b"".join(iter(lambda: client.recv(65536), b""))


@contextlib.contextmanager
def serving(app: Any, parser: str | None = None) -> Iterator[Any]:
    """The server that the command runs, in a thread; its address."""
    from minillm.server import process as processes
    from minillm.server.process import Binding, Process

    ready = threading.Event()
    with pytest.MonkeyPatch.context() as patch, Binding(port=0).bind() as bound:
        if parser is not None:
            pytest.importorskip(parser)
            protocol: Any = importlib.import_module(f"uvicorn.protocols.http.{parser}_impl")
            name = {"httptools": "HttpToolsProtocol", "h11": "H11Protocol"}[parser]
            patch.setattr(processes, "AutoHTTPProtocol", getattr(protocol, name))
        process = Process(app, Binding(port=0), drain_timeout=None, started=ready.set)
        thread = threading.Thread(target=process.run, kwargs={"sockets": [bound]})
        thread.start()
        try:
            assert ready.wait(30)
            yield bound.getsockname()
        finally:
            process.should_exit = True
            process._loop.call_soon_threadsafe(process._drained.set)  # type: ignore[union-attr]
            thread.join(30)
            assert not thread.is_alive()


# --- silence ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", STREAMS)
def test_a_stream_is_not_silent_while_its_prompt_is_computed(held: tuple[Engine, threading.Event], path: str) -> None:
    """No step ends before two comments have come; what comes then is the stream as it is without them."""
    engine, go = held
    body = STREAMS[path] | {"stream": True}
    sign = b"1\r\n \r\n" if "api" in path else b": keep-alive\n\n"
    with listening(make_app(engine, limits=Limits(keep_alive_interval=0.02))) as url:
        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=60) as client:
            client.sendall(request_of(path, body, Connection="close"))
            read = read_until(client, sign)
            read += read_until(client, sign)
            go.set()
            read += rest_of(client)
    assert read.startswith(b"HTTP/1.1 200")
    if "api" in path:
        text = b"".join(piece for piece in read.partition(b"\r\n\r\n")[2].split(b"\r\n")[1::2])
        lines = [json.loads(line) for line in text.decode().split("\n") if line]
        assert lines[-1]["done"]
        assert lines[-1]["eval_count"] == 2
    else:
        assert b"event: error" not in read
        assert (
            b"response.completed" if path == RESPONSES else b"data: [DONE]"
        ) in read or b"response.incomplete" in read


@pytest.mark.slow
def test_clients_read_streams_with_comments(held: tuple[Engine, threading.Event]) -> None:
    openai = pytest.importorskip("openai", reason="the official client needs the reference extra")
    ollama = pytest.importorskip("ollama", reason="the official client is not installed")
    engine, go = held
    go.set()
    said = engine.chat([{"role": "user", "content": "A"}], do_sample=False, max_new_tokens=6).text
    go.clear()
    with listening(make_app(engine, limits=Limits(keep_alive_interval=0.01))) as url:
        threading.Timer(0.3, go.set).start()
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            chunks = client.chat.completions.create(
                model="minillm", messages=[{"role": "user", "content": "A"}], temperature=0, max_tokens=6, stream=True
            )
            assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == said
        go.clear()
        threading.Timer(0.3, go.set).start()
        client = ollama.Client(host=url)
        with client._client:
            lines = client.chat(
                model="minillm",
                messages=[{"role": "user", "content": "A"}],
                stream=True,
                options={"temperature": 0, "num_predict": 6},
            )
            assert "".join(line.message.content for line in lines) == said


# --- clients that end their side --------------------------------------------------------------------------------------


@pytest.mark.parametrize("parser", ["httptools", "h11"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_has_ended_its_side_gets_its_answer(
    held: tuple[Engine, threading.Event], parser: str, stream: bool
) -> None:
    """It ends it while the prompt is computed: nothing is computed before the server has noticed."""
    engine, go = held
    body = STREAMS[COMPLETIONS] | {"stream": stream, "temperature": 0}
    app = make_app(engine, limits=Limits(keep_alive_interval=0.02))
    with serving(app, parser) as address, socket.create_connection(address, timeout=60) as client:
        client.sendall(request_of(COMPLETIONS, body))
        client.shutdown(socket.SHUT_WR)
        read = read_until(client, b": keep-alive" if stream else b"HT")
        go.set()
        read += rest_of(client)  # the server closes the connection, which can bring no other request
    head, _, content = read.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"[DONE]" in content if stream else json.loads(content)["choices"]


def test_requests_sent_one_after_the_other_before_the_end_are_all_answered(
    held: tuple[Engine, threading.Event],
) -> None:
    engine, go = held
    with serving(make_app(engine), "httptools") as address, socket.create_connection(address, timeout=60) as client:
        client.sendall(3 * request_of(COMPLETIONS, STREAMS[COMPLETIONS]))
        client.shutdown(socket.SHUT_WR)
        go.set()
        assert rest_of(client).count(b"HTTP/1.1 200 OK\r\n") == 3


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_has_left_is_told_from_one_that_has_ended_its_side(
    held: tuple[Engine, threading.Event], stream: bool
) -> None:
    engine, go = held
    app = make_app(engine, limits=Limits(keep_alive_interval=0.02))
    responses = app.state.server.metrics.responses
    with serving(app) as address:
        with socket.create_connection(address, timeout=60) as client:
            client.sendall(request_of(COMPLETIONS, STREAMS[COMPLETIONS] | {"stream": stream, "max_tokens": 400}))
            if stream:
                read_until(client, b": keep-alive")
        while not responses[COMPLETIONS, "499"] + responses[COMPLETIONS, "200"]:  # no step runs, so it is not answered
            assert not go.wait(0.01)
        go.set()
    assert app.state.server.metrics.of["minillm"].finished == {"abort": 1}


def test_a_request_that_is_cut_off_is_not_answered(held: tuple[Engine, threading.Event]) -> None:
    engine, go = held
    go.set()
    with serving(make_app(engine)) as address, socket.create_connection(address, timeout=60) as client:
        client.sendall(request_of(COMPLETIONS, STREAMS[COMPLETIONS])[:-3])
        client.shutdown(socket.SHUT_WR)
        assert rest_of(client) == b""


# --- compressed bodies ------------------------------------------------------------------------------------------------

ASKED = json.dumps({"prompt": "A list of colors: red,", "max_tokens": 4, "temperature": 0}).encode()


def compressed(app: Any, body: bytes, encoding: str) -> Any:
    return post(app, COMPLETIONS, body, headers={"Content-Encoding": encoding})


def test_a_body_in_gzip_is_read(app: Any) -> None:
    plain = post(app, COMPLETIONS, ASKED).json()["choices"]
    members = gzip.compress(ASKED[:20]) + gzip.compress(ASKED[20:])
    for body, encoding in (
        (gzip.compress(ASKED), "gzip"),
        (members, "x-gzip"),
        (gzip.compress(ASKED), " GZIP "),
        (ASKED, "identity"),
    ):
        assert compressed(app, body, encoding).json()["choices"] == plain


@pytest.mark.parametrize("encoding", ["br", "zstd", "deflate", "gzip, gzip", "nonsense"])
def test_another_encoding_is_named(app: Any, encoding: str) -> None:
    response = compressed(app, zlib.compress(ASKED), encoding)
    assert encoding in error_of(response, 415)["message"]
    assert response.headers["accept-encoding"] == "gzip"


def test_what_is_no_gzip_is_named(app: Any) -> None:
    whole = gzip.compress(ASKED)
    for body in (ASKED, b"", whole[:-3], whole + b"rest", whole[:30] + b"\xff" * 20, whole[:-1] + b"\xff"):
        assert "not valid gzip" in error_of(compressed(app, body, "gzip"))["message"]


@pytest.mark.slow
def test_the_limit_counts_the_size_after_decompression(held: tuple[Engine, threading.Event]) -> None:
    """A body of 64 MiB takes 64 KiB, and no more of it is decompressed than is allowed."""
    engine, go = held
    go.set()
    app = make_app(engine, limits=Limits(max_body_bytes=100_000))
    padded = ASKED[:-1] + b" " * (100_000 - len(ASKED)) + b"}"
    assert compressed(app, gzip.compress(padded), "gzip").status_code == 200
    bomb = gzip.compress(bytes(2**26))
    assert len(bomb) < 100_000
    tracemalloc.start()
    for body in (gzip.compress(padded + b" "), bomb, gzip.compress(padded) + gzip.compress(b" "), bomb + bomb[:9]):
        assert error_of(compressed(app, body, "gzip"), 413)["code"] == "request_too_large"
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**24


@pytest.fixture(scope="module")
def app() -> Iterator[Any]:
    with Engine(max_batch_size=2) as engine:
        yield make_app(engine)
