"""The process around the application: its socket, TLS, signals, and what it says at its start.

The first SIGTERM or Ctrl-C drains: /health says 503, new requests are refused, those that run finish, then the process
ends with exit code 0. A second one ends it at once.
"""

import asyncio
import contextlib
import errno
import ipaddress
import logging
import os
import socket
import ssl
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any

import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from ..errors import MinillmError, UsageError
from .state import Server

logger = logging.getLogger("minillm.server")

LARGEST_HEAD = 2**16
"""Bytes of a request's headers; what the first read of the socket brings does not count"""
KEEP_ALIVE = 65
"""Seconds for which an idle connection stays open; more than the 60 of common proxies, which then close it first."""
FLUSH_SECONDS = 5
"""Time for the last bytes of streams, after everything was drained."""
PROBE_SECONDS = 0.1
"""Time until a client that has ended its side is sent a second byte; doubled for each further one."""


@dataclass(frozen=True, kw_only=True)
class Binding:
    """The address that the server listens at."""

    host: str = "127.0.0.1"
    port: int = 8000
    ssl_keyfile: str | None = None
    ssl_certfile: str | None = None
    send_timeout: float = 60.0
    """Seconds after which the system closes a connection whose peer takes nothing, and the server one whose first
    request's headers are not complete"""
    max_connections: int | None = None
    """Connections, idle ones included, beyond which requests get status 503"""

    def check(self) -> None:
        """Read the certificate, so that what is wrong with it is said before a model is loaded.

        Raises:
            UsageError: a file is missing, or they do not belong together.
        """
        if (self.ssl_keyfile is None) != (self.ssl_certfile is None):
            raise UsageError("TLS needs both --ssl-keyfile and --ssl-certfile: give the other one too")
        if self.ssl_certfile is None:
            return
        try:
            ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(
                self.ssl_certfile, self.ssl_keyfile, password=lambda: b""
            )
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
            raise UsageError(f"--ssl-certfile and --ssl-keyfile cannot be used: {reason}") from None

    def bind(self) -> socket.socket:
        """A socket with this address, which does not listen yet.

        Raises:
            UsageError: the address is taken, not this machine's, or not allowed.
        """
        if not 0 <= self.port < 2**16:  # the system's functions take it modulo 2**16
            raise UsageError(f"--port {self.port}: expected a number from 0 to {2**16 - 1}")
        try:
            family, kind, _, _, address = socket.getaddrinfo(
                self.host, self.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            bound = socket.socket(family, kind)
        except (OSError, UnicodeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise UsageError(f"--host {self.host} and --port {self.port}: {reason}") from None
        try:
            if os.name == "posix":
                bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if hasattr(socket, "TCP_USER_TIMEOUT"):  # inherited by the connections
                bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * self.send_timeout))
            bound.bind(address)
            bound.listen(2048)
        except OSError as error:
            bound.close()
            reason = "it is taken: choose another --port" if error.errno == errno.EADDRINUSE else error.strerror
            raise UsageError(f"port {self.port} on {self.host}: {reason}") from None
        return bound

    def url(self, bound: socket.socket) -> str:
        """The server's address for a client on this machine."""
        host, port = bound.getsockname()[:2]
        if ipaddress.ip_address(host).is_unspecified:
            host = "::1" if ":" in host else "127.0.0.1"
        scheme = "http" if self.ssl_certfile is None else "https"
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"

    def is_local(self, bound: socket.socket) -> bool:
        """True if only this machine reaches it."""
        return ipaddress.ip_address(bound.getsockname()[0]).is_loopback


class Process(uvicorn.Server):
    """uvicorn's server, which drains at the first signal and ends at the second."""

    def __init__(
        self, app: Starlette, binding: Binding, *, drain_timeout: float | None, started: Callable[[], None]
    ) -> None:
        """Args:
        app: by `make_app`
        binding: for TLS
        drain_timeout: seconds after which requests that still run end
        started: called once connections are accepted
        """
        most = binding.max_connections
        config = uvicorn.Config(
            app,
            http=_impatient(binding.send_timeout),
            limit_concurrency=most and most + 1,  # it refuses at as many, this one included
            ssl_keyfile=binding.ssl_keyfile,
            ssl_certfile=binding.ssl_certfile,
            log_config=None,
            log_level="warning",
            access_log=False,
            lifespan="on",
            ws="none",
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE,
            timeout_graceful_shutdown=FLUSH_SECONDS,
        )
        super().__init__(config)
        self._server: Server = app.state.server
        self._drain_timeout, self._started = drain_timeout, started
        self._signals = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._draining: asyncio.Task[None] | None = None
        self._drained = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, and say so."""
        await super().startup(sockets)
        self._loop = asyncio.get_running_loop()
        self._started()

    async def main_loop(self) -> None:
        """Wait for the end. uvicorn would wake ten times a second, beside an engine each time with cold caches."""
        while not await self.on_tick(0):  # it writes the header Date
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._drained.wait(), 1.0)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handle SIGTERM or Ctrl-C."""
        self._signals += 1
        if self._signals > 1 or self._loop is None:
            with contextlib.suppress(OSError):
                sys.stderr.flush()
            os._exit(128 + sig)
        self._loop.call_soon_threadsafe(self._begin_to_drain)

    def _begin_to_drain(self) -> None:
        self._draining = asyncio.ensure_future(self._drain())

    async def _drain(self) -> None:
        running = sum(load.running + load.waiting for load in (model.aio.load() for model in self._server.bases()))
        if running:
            logger.warning("draining: %d requests finish; another signal ends them", running)
        try:
            await self._server.drain(self._drain_timeout)
        finally:
            self.should_exit = True
            self._drained.set()


def _impatient(seconds: float) -> type[asyncio.Protocol]:
    """uvicorn's connections, closed if a client does not send its first request's headers within this time.

    Or if it sends more than `LARGEST_HEAD` bytes of headers: httptools keeps as many as come. h11, which reads where
    httptools is not installed, has a limit of its own and calls neither `on_message_begin` nor `on_headers_complete`.
    """

    class Connection(AutoHTTPProtocol):  # type: ignore[valid-type, misc]
        _in_head, _head = False, 0

        def data_received(self, data: bytes) -> None:
            self._head += len(data)
            super().data_received(data)
            if self._in_head and self._head > LARGEST_HEAD and not self.transport.is_closing():
                self.transport.write(b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\n\r\n")
                self.transport.close()

        def on_message_begin(self) -> None:
            self._in_head, self._head = True, 0
            super().on_message_begin()

        def on_headers_complete(self) -> None:
            self._in_head = False
            super().on_headers_complete()

        def connection_made(self, transport: asyncio.Transport) -> None:
            super().connection_made(transport)
            self._timer = asyncio.get_running_loop().call_later(seconds, self._end_if_silent)

        def connection_lost(self, error: Exception | None) -> None:
            self._timer.cancel()
            super().connection_lost(error)

        def eof_received(self) -> bool:
            return _answers_on(self)

        def _end_if_silent(self) -> None:
            if self.cycle is None:  # the request that it answers
                self.transport.close()

    return Connection


def _answers_on(connection: Any) -> bool:
    """True if a client that has ended its side of a connection gets its answer: the connection stays open for it."""
    cycle = connection.cycle  # of the last request
    answering = cycle is not None and not cycle.more_body and not cycle.response_complete
    if not answering or connection.transport.get_extra_info("sslcontext") is not None:  # TLS ends both sides
        return False
    cycle.keep_alive = False
    if not getattr(connection, "pipeline", ()):  # else an earlier request is answered
        cycle.transport = _HalfClosed(connection.transport, cycle)
    return True


class _HalfClosed:
    """The connection of a client that has ended its side while it waits: it may read on, or have left.

    Only sending tells which: the system of a client that has left refuses what comes. So the bytes with which every
    answer begins are sent ahead, one now and then, as long as there is no answer.
    """

    BEGINNING = b"HTTP/1.1 "

    def __init__(self, transport: asyncio.Transport, cycle: Any) -> None:
        """Args:
        transport: the connection
        cycle: uvicorn's cycle of the request and its answer
        """
        self._transport, self._cycle, self._sent = transport, cycle, 0
        self._probe()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def _probe(self) -> None:
        if self._cycle.response_started or self._transport.is_closing() or self._sent == len(self.BEGINNING):
            return
        self._transport.write(self.BEGINNING[self._sent : self._sent + 1])
        asyncio.get_running_loop().call_later(PROBE_SECONDS * 2**self._sent, self._probe)
        self._sent += 1

    def write(self, data: bytes) -> None:
        """Send the rest of a piece of the answer; its first bytes may have been sent."""
        sent, self._sent = self._sent, 0
        self._transport.write(data[sent:])


def serve(
    app: Starlette,
    binding: Binding,
    bound: socket.socket,
    *,
    drain_timeout: float | None = None,
    started: Callable[[], None] = lambda: None,
) -> None:
    """Run the application until a signal ends it.

    Args:
        app: by `make_app`
        binding: where it listens
        bound: by `Binding.bind`
        drain_timeout: seconds after which requests that still run end; None: they may take as long as they need
        started: called once connections are accepted

    Raises:
        MinillmError: it could not start.
    """
    process = Process(app, binding, drain_timeout=drain_timeout, started=started)
    try:
        process.run(sockets=[bound])
    except SystemExit:
        raise MinillmError("the server could not start: see above") from None
    finally:
        bound.close()
