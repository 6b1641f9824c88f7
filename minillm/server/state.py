"""The state that all requests of one application share."""

import asyncio
import contextlib
from collections.abc import Iterable, Mapping
from typing import Any

from starlette.requests import Request

from ..errors import listed, shown
from .http_json import ApiError, read_body, read_json
from .limits import Limits
from .metrics import Metrics
from .served_model import ServedModel

LARGE_BODY = 2**16
"""Bytes of a body that is parsed in another thread."""


class Server:
    """The models, limits and counts, and whether requests are still taken."""

    def __init__(self, models: Mapping[str, ServedModel], limits: Limits) -> None:
        self.models, self.limits = dict(models), limits
        self.metrics = Metrics(self.bases)
        self.draining = False
        self.looking_inside = asyncio.Lock()
        """Held by the one request that computes attention"""

    @staticmethod
    def of(http: Request) -> "Server":
        """The server that a request has come to."""
        server: Server = http.app.state.server
        return server

    def bases(self) -> Iterable[ServedModel]:
        """The models without their adapters: one for each engine."""
        return list({id(model.aio): model for model in reversed(self.models.values())}.values())

    def model(self, name: str | None) -> ServedModel:
        """The model of a request; the first if it names none. Ollama's clients add ":latest" to a name without a tag.

        Raises:
            ApiError: there is none of this name.
        """
        if name is None:
            return next(iter(self.models.values()))
        if name not in self.models:
            name = name.removesuffix(":latest")
        if name not in self.models:
            message = f"the model {shown(name)} does not exist; there is {listed(self.models)}"
            raise ApiError(message, status=404, param="model", code="model_not_found")
        return self.models[name]

    async def read_json(self, http: Request) -> dict[str, Any]:
        """The JSON object in a request's body.

        Raises:
            ApiError: as `read_body` and `read_json`.
        """
        body = await read_body(http, self.limits.max_body_bytes, self.limits.send_timeout)
        if len(body) < LARGE_BODY:
            return read_json(body)
        return await self.model(None).aio.run(read_json, body)

    async def drain(self, timeout: float | None = None) -> None:
        """Refuse new requests, and wait for those that run; after `timeout` seconds they end."""
        self.draining = True
        texts = asyncio.gather(*(model.queue.drain() for model in self.bases()))
        await asyncio.gather(*(model.aio.drain(timeout) for model in self.bases()))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(texts, timeout)

    async def close(self) -> None:
        """Abort all requests and close the engines."""
        self.draining = True
        await asyncio.gather(*(model.aio.close() for model in self.bases()))
