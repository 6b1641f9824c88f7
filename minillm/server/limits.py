"""Limits of the server: sizes, counts, seconds, and who may use it."""

import asyncio
import hmac
import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from starlette.requests import Request
from starlette.types import Scope

from ..errors import shown
from .protocol import ApiError

OPEN = ("/health", "/", "/favicon.ico")
"""Paths that need no key: the state for load balancers, and the page, which asks for the key."""
OPEN_FOLDER = "/page/"
"""The page's files."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of one request. Each is the flag of `minillm serve` of the same name."""

    max_body_bytes: int = 8 * 2**20
    max_prompt_tokens: int | None = None
    """Tokens of one prompt; by default as many as the context holds"""
    max_prompts: int = 256
    """Prompts in one request to /v1/completions"""
    max_n: int = 128
    """n and best_of"""
    max_logprobs: int = 20
    """Alternatives of each token"""
    request_timeout: float | None = None
    """Seconds for one request, its time in the queue included"""
    send_timeout: float = 60.0
    """Seconds in which a client must send its request, and take each part of its answer"""
    keep_alive_interval: float = 1.0
    """Seconds of silence, up to half as much more, after which a stream sends a comment, so that nothing between it and
    the client takes it for dead while a prompt is computed"""

    def seconds(self, wanted: float | None) -> float | None:
        """The time for a request that asks for `wanted` seconds."""
        given = [seconds for seconds in (wanted, self.request_timeout) if seconds is not None]
        return min(given, default=None)


def declared_length(request: Request) -> int:
    """The length of a request's body, as its header says; 0 if it does not."""
    length = request.headers.get("content-length", "")
    return int(length) if length.isdecimal() and len(length) < 20 else 0


async def read_body(request: Request, limits: Limits) -> bytes:
    """The body of a request.

    One compressed by gzip is decompressed; the limit counts both sizes.

    Raises:
        ApiError: it is too large or too slow, or a browser's and not declared as JSON. (A page of another site can send
            other types without asking its browser's permission, JSON not; curl says "form" where it is told nothing.)
            Or it is compressed otherwise, or no gzip.
    """
    declared = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    form = "application/x-www-form-urlencoded"
    from_browser = "origin" in request.headers or "sec-fetch-site" in request.headers
    if declared != "application/json" and (from_browser or declared not in ("", form)):
        found = f"found {declared!r}" if declared else "found none"
        raise ApiError(f"the header Content-Type should be application/json, {found}", status=415)
    too_large = ApiError(
        f"the body is too large: this server allows {limits.max_body_bytes} bytes",
        status=413,
        code="request_too_large",
        headers={"Connection": "close"},  # the rest of it is not read
    )
    if declared_length(request) > limits.max_body_bytes:
        raise too_large
    gzip = _gzip(request.headers.get("content-encoding", ""), limits.max_body_bytes)
    pieces, size = [], 0
    try:
        async with asyncio.timeout(limits.send_timeout):
            async for piece in request.stream():
                size += len(piece)
                if size > limits.max_body_bytes or (gzip is not None and not gzip.add(piece)):
                    raise too_large
                pieces.append(piece)
    except TimeoutError:
        message = f"the body did not come within {limits.send_timeout:g} seconds"
        raise ApiError(message, status=408, code="request_timeout", headers={"Connection": "close"}) from None
    return b"".join(pieces) if gzip is None else gzip.body()


def _gzip(encoding: str, most: int) -> "_Gzip | None":
    """The decompressor of a body with this Content-Encoding; None if it is not compressed."""
    encoding = encoding.strip().lower()
    if encoding in ("", "identity"):
        return None
    if encoding not in ("gzip", "x-gzip"):
        message = f"the header Content-Encoding should be gzip, or not be there, found {shown(encoding)}"
        raise ApiError(message, status=415, headers={"Accept-Encoding": "gzip"})
    return _Gzip(most)


class _Gzip:
    """A body that comes compressed (RFC 1952): one member after the other, up to a size."""

    def __init__(self, most: int) -> None:
        self._room = most + 1
        self._member = zlib.decompressobj(zlib.MAX_WBITS | 16)
        self._pieces: list[bytes] = []

    def add(self, piece: bytes) -> bool:
        """Decompress a piece; False if the whole is larger than allowed."""
        while piece and self._room:
            if self._member.eof:
                self._member = zlib.decompressobj(zlib.MAX_WBITS | 16)
            try:
                self._pieces.append(self._member.decompress(piece, self._room))
            except zlib.error:
                raise ApiError("the body is not valid gzip, which its Content-Encoding says") from None
            self._room -= len(self._pieces[-1])
            piece = self._member.unused_data if self._member.eof else self._member.unconsumed_tail
        return self._room > 0

    def body(self) -> bytes:
        """The whole.

        Raises:
            ApiError: its end is missing.
        """
        if not self._member.eof:
            raise ApiError("the body is not valid gzip: it is cut off")
        return b"".join(self._pieces)


def check_key(scope: Scope, keys: Sequence[str]) -> None:
    """Refuse a request without one of the server's keys, but on the paths that are open.

    The time that it takes does not depend on how much of a key is right.

    Raises:
        ApiError: the key is missing or wrong.
    """
    path = scope["path"]
    if not keys or path in OPEN or path.startswith(OPEN_FOLDER):
        return
    header = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
    kind, _, given = header.partition(b" ")
    right = [hmac.compare_digest(given.strip(), key.encode()) for key in keys]  # all of them, always
    if kind.lower() != b"bearer" or not any(right):
        message = "the API key is wrong" if header else "an API key is needed: Authorization: Bearer KEY"
        raise ApiError(
            message,
            status=401,
            type="authentication_error",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )


def retry_after(waiting: int, running: int, mean_seconds: float) -> int:
    """Seconds until half of a full queue is likely to have moved on, by the rate at which requests finish; 1 to 60.

    Args:
        waiting: requests in the queue
        running: requests that run at once
        mean_seconds: mean time of a request
    """
    return max(1, min(60, math.ceil(waiting * mean_seconds / max(1, running) / 2)))
