"""Around every request: its id, the key, failures that nothing else has caught, one line of log."""

import logging
import re
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Protocol

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..errors import printable
from . import anthropic
from .http_json import ApiError, new_id
from .limits import check_key
from .server_request import Usage
from .state import Server
from .tracing import Tracing

logger = logging.getLogger("minillm.server")
access = logging.getLogger("minillm.access")
PROBES = ("/health", "/metrics")
"""Paths that machines ask every few seconds; their answers are logged at the level of debugging unless they fail"""

CLIENT_LEFT = 499
"""nginx's status in a log, for an answer that nobody waited for."""
REQUEST_ID = re.compile(rb"[!-~]{1,128}")


Answer = Callable[[Request], Awaitable[Response]]
"""An endpoint"""


class Counted(Protocol):
    """A request that was taken: it is closed and its tokens are logged, however it ends."""

    def close(self) -> None:
        """Abort what is not done."""

    def usage(self) -> Usage:
        """Tokens so far."""


def refusal(error: ApiError, path: str) -> Response:
    """The answer to a request that is refused: Ollama's and Anthropic's paths have their forms, all others OpenAI's."""
    if path.startswith("/api/"):
        return JSONResponse({"error": str(error)}, status_code=error.status, headers=error.headers)
    body = anthropic.error_body(error) if path.startswith(anthropic.PATH) else error.body()
    return Response(body, error.status, error.headers, "application/json")


class Application(Starlette):
    """Notes the connection's own `send`, for streams: each of their pieces would pass through five functions here."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        scope["minillm.send"] = send
        await super().__call__(scope, receive, send)


class RequestMiddleware:
    """Runs around every request: its id, the key, failures that nothing else has caught, the log."""

    def __init__(
        self,
        app: ASGIApp,
        server: Server,
        keys: Sequence[str],
        paths: Collection[str],
        tracing: Tracing | None = None,
        direct: Mapping[str, Answer] | None = None,
    ) -> None:
        """Args:
        app: answers the requests
        server: with the counts
        keys: API keys; a request needs one
        paths: paths of the routes, which metrics tell apart
        tracing: takes a span of each request
        direct: endpoints by their paths, whose POST requests do not pass through starlette's routes and handlers
        """
        self._direct = direct or {}
        self._app, self._server, self._keys, self._paths, self._tracing = app, server, keys, paths, tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, status = time.monotonic(), 0
        request_id = _request_id(scope)

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id)]
            await send(message)

        try:
            check_key(scope, self._keys)
            answer = self._direct.get(scope["path"]) if scope["method"] == "POST" else None
            app = self._app if answer is None else await answer(Request(scope, receive, sending))
            await app(scope, receive, sending)
        except ClientDisconnect:
            status = CLIENT_LEFT
        except ApiError as error:
            await refusal(error, scope["path"])(scope, receive, sending)
        except Exception as error:
            _log_failure(request_id, error)
            if not status:  # else the server closes the connection, which is all that can be said
                message = "the server failed; its log says more, under the X-Request-Id of this response"
                failure = ApiError(message, status=500, type="server_error", code="internal_error")
                await refusal(failure, scope["path"])(scope, receive, sending)
        finally:
            request: Counted | None = scope.pop("minillm.request", None)
            if request is not None:
                request.close()
            self._server.release(scope)
            self._note(scope, request, request_id.decode(), status, time.monotonic() - began)

    def _note(self, scope: Scope, request: Counted | None, request_id: str, status: int, seconds: float) -> None:
        """Count and log a request: no text of its, only what it cost."""
        path = scope["path"] if scope["path"] in self._paths else "other"
        self._server.metrics.responses[path, str(status)] += 1
        if self._tracing is not None:
            self._tracing.note(scope, request, path, status, seconds)
        level = logging.DEBUG if path in PROBES and status == 200 else logging.INFO
        if not access.isEnabledFor(level):
            return
        tokens, counts = "", {}
        if request is not None:
            usage = request.usage()
            counts = {"prompt": usage.prompt_tokens, "cached": usage.cached_tokens}
            counts["generated"] = usage.completion_tokens
            tokens = "".join(f" {name}={count}" for name, count in counts.items())
        client, method, path = (scope.get("client") or ("-",))[0], scope["method"], printable(scope["path"][:100])
        fields = {"client": client, "method": method, "path": path, "status": status, **counts}
        fields |= {"milliseconds": round(1000 * seconds), "request_id": request_id}
        line = f"{client} {method} {path} {status}{tokens} {1000 * seconds:.0f}ms {request_id}"
        access.log(level, "%s", printable(line), extra={"fields": fields})


def _request_id(scope: Scope) -> bytes:
    given = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"")
    return given if REQUEST_ID.fullmatch(given) else new_id().encode()


def _log_failure(request_id: bytes, error: Exception) -> None:
    """One line about an error of ours: what, and where in the source."""
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    where = "" if frame is None else f" ({frame.tb_frame.f_code.co_filename}:{frame.tb_lineno})"
    logger.error("request %s failed: %s: %s%s", request_id.decode(), type(error).__name__, error, where)
