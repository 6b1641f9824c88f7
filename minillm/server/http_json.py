"""JSON over HTTP: bodies of requests read with care, answers and errors written.

Errors have the shape of OpenAI's API; `ollama` writes them in its own.
"""

import asyncio
import json
import math
import random
import zlib
from collections.abc import Callable
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ..errors import printable, shown

encode: Callable[[Any], bytes] = msgspec.json.Encoder().encode

_names = random.Random()


def new_id() -> str:
    """A name that no other has, of 32 hexadecimal digits. It is a label, no secret.

    To ask the system for random bytes each time would let go of the interpreter's lock, for which threads wait.
    """
    return f"{_names.getrandbits(128):032x}"


def json_response(value: Any) -> Response:
    """A response with a value as JSON."""
    return Response(encode(value), media_type="application/json")


class ApiError(Exception):
    """A request that cannot be answered, in OpenAI's shape: {"error": {"message", "type", "param", "code"}}."""

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        status: int = 400,
        type: str = "invalid_request_error",
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(printable(message))
        self.param, self.code, self.status, self.type = param and printable(param), code, status, type
        self.headers = headers or {}

    def body(self) -> bytes:
        """The error as JSON."""
        error = {"message": str(self), "type": self.type, "param": self.param, "code": self.code}
        return encode({"error": error})


def internal_error(error: Exception) -> ApiError:
    """The failure of one request inside the engine (a guide that nothing satisfies, NaN in the logits)."""
    return ApiError(f"the request failed: {error}", status=500, type="server_error", code="internal_error")


def shutting_down(message: str) -> ApiError:
    """The refusal of a server that ends."""
    return ApiError(message, status=503, type="service_unavailable_error", code="shutting_down")


# --- reading ----------------------------------------------------------------------------------------------------------


async def read_body(request: Request, most: int, seconds: float, *, kind: str = "application/json") -> bytes:
    """The body of a request.

    One compressed by gzip is decompressed; the limit of `most` bytes counts both sizes. It comes within `seconds`.

    Raises:
        ApiError: it is too large or too slow, or of another kind than `kind`; a browser's is not declared as JSON. (A
            page of another site can send other types without asking its browser's permission, JSON not; curl says
            "form" where it is told nothing.) Or it is compressed otherwise, or no gzip.
    """
    headers = dict(reversed(request.scope["headers"]))  # of several with a name the first counts
    declared = headers.get(b"content-type", b"").decode("latin-1").partition(";")[0].strip().lower()
    form = "application/x-www-form-urlencoded"
    from_browser = b"origin" in headers or b"sec-fetch-site" in headers
    of_browser = from_browser and declared != "application/json"
    if of_browser or (declared != kind and (kind != "application/json" or declared not in ("", form))):
        actual = f"found {declared!r}" if declared else "found none"
        actual += ", of a browser" if declared == kind else ""
        raise ApiError(f"the header Content-Type should be {kind}, {actual}", status=415)
    length = headers.get(b"content-length", b"").decode("latin-1")
    if length.isdecimal() and len(length) < 20 and int(length) > most:
        raise _too_large(most)
    gzip = _gzip(headers.get(b"content-encoding", b"").decode("latin-1"), most)
    pieces, size = [], 0
    try:
        async with asyncio.timeout(seconds):
            async for piece in request.stream():
                size += len(piece)
                if size > most or (gzip is not None and not gzip.add(piece)):
                    raise _too_large(most)
                pieces.append(piece)
    except TimeoutError:
        message = f"the body did not come within {seconds:g} seconds"
        raise ApiError(message, status=408, code="request_timeout", headers={"Connection": "close"}) from None
    return b"".join(pieces) if gzip is None else gzip.body()


def _too_large(most: int) -> ApiError:
    message = f"the body is too large: this server allows {most} bytes"
    headers = {"Connection": "close"}  # the rest of it is not read
    return ApiError(message, status=413, code="request_too_large", headers=headers)


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


def read_json(body: bytes) -> dict[str, Any]:
    """The JSON object of a request's body.

    Raises:
        ApiError: it is not UTF-8, not JSON, not an object, nested too deeply, or has a key twice, a NaN, half a
            surrogate pair, or a number that no float holds.
    """
    try:
        text = body.decode("utf-8")
        value = _DECODER.decode(text)
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeDecodeError as error:
        raise ApiError(f"the body should be UTF-8 text; byte {error.start} is not") from None
    except UnicodeEncodeError:
        raise ApiError("the body has half a surrogate pair, such as \\ud800: no text has that") from None
    except RecursionError:
        raise ApiError("the body is nested too deeply") from None
    except json.JSONDecodeError as error:
        raise ApiError(f"the body is not valid JSON: {error.msg} at character {error.pos}") from None
    except ValueError as error:  # ours, and Python's about integers of more than 4300 digits
        reason = "an integer has too many digits" if "digits" in str(error) else str(error)
        raise ApiError(f"the body is not valid JSON: {reason}") from None
    if not isinstance(value, dict):
        raise ApiError(f"the body should be a JSON object, found {type(value).__name__}")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {next(key for key in keys if keys.count(key) > 1)!r:.100} occurs twice")
    return value


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON")


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"the number {text:.40} is too large")
    return value


_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_refuse_constant, parse_float=_finite)
