"""Limits of the server: sizes, counts, seconds, and who may use it."""

import hmac
import math
from collections.abc import Sequence
from dataclasses import dataclass

from starlette.types import Scope

from .http_json import ApiError

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
    logits_processors: tuple[str, ...] = ()
    """Names of logits processors of other packages that requests may ask for: --logits-processor, for each"""
    keep_alive_interval: float = 1.0
    """Seconds of silence, up to half as much more, after which a stream sends a comment, so that nothing between it and
    the client takes it for dead while a prompt is computed"""

    def seconds(self, asked: float | None) -> float | None:
        """The time for a request that asks for so many seconds."""
        limits = [seconds for seconds in (asked, self.request_timeout) if seconds is not None]
        return min(limits, default=None)


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
    if not header:  # as Anthropic's clients send it
        header = given = next((value for name, value in scope["headers"] if name == b"x-api-key"), b"")
        kind = b"bearer"
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


def queue_full(message: str, waiting: int, running: int, mean_seconds: float) -> ApiError:
    """The refusal of a request that finds a full queue.

    It says to come back after 1 to 60 seconds, when half of the queue is likely to have moved on.

    Args:
        message: for the client
        waiting: requests in the queue
        running: requests that run at once
        mean_seconds: mean time of a request
    """
    seconds = max(1, min(60, math.ceil(waiting * mean_seconds / max(1, running) / 2)))
    return ApiError(
        message,
        status=429,
        type="rate_limit_error",
        code="rate_limit_exceeded",
        headers={"Retry-After": str(seconds)},
    )
