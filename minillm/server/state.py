"""The state that all requests of one application share."""

import asyncio
import contextlib
from collections.abc import Iterable, Mapping
from typing import Any

from starlette.requests import Request
from starlette.types import Scope

from ..errors import listed, shown
from .http_json import ApiError, read_body, read_json
from .limits import Limits
from .metrics import Metrics
from .model_pool import ModelPool, StoredModel, keep_alive_seconds
from .served_model import ServedModel

LARGE_BODY = 2**16
"""Bytes of a body that is parsed in another thread."""
TAKEN = "minillm.models"
"""The key of a request's scope that has the names of the models it has taken from the pool"""


class Server:
    """The models, limits and counts, and whether requests are still taken."""

    def __init__(self, models: Mapping[str, ServedModel], limits: Limits, pool: ModelPool | None = None) -> None:
        """Args:
        models: those that stay loaded, by name
        limits: a request's limits
        pool: further models, which are loaded for requests
        """
        self.fixed, self.limits = dict(models), limits
        self.pool = pool or ModelPool({}, _no_model)
        self.metrics = Metrics(self.bases)
        self.draining = False
        self.looking_inside = asyncio.Lock()
        """Held by the one request that computes attention"""

    @staticmethod
    def of(http: Request) -> "Server":
        """The server that a request has come to."""
        server: Server = http.app.state.server
        return server

    @property
    def models(self) -> dict[str, ServedModel]:
        """The loaded models, by name."""
        return self.pool.loaded | self.fixed

    def bases(self) -> Iterable[ServedModel]:
        """The loaded models without their adapters: one for each engine."""
        return list({id(model.aio): model for model in reversed(self.models.values())}.values())

    def find(self, name: str | None) -> str:
        """The name of the model of a request. If it names none: the first model, or of several in a pool the one that
        is loaded. Ollama's clients add ":latest" to a name without a tag.

        Raises:
            ApiError: there is none of this name, or it has to name one.
        """
        names = {**self.fixed, **self.pool.stored}
        if name is None:
            choice = [*self.fixed][:1] or (self.pool.loaded if len(names) > 1 else names)
            if len(choice) != 1:
                raise ApiError(f"model: name one of {listed(names)}", param="model")
            return next(iter(choice))
        for known in (name, name.removesuffix(":latest")):
            if known in names:
                return known
        message = f"the model {shown(name)} does not exist; there is {listed(names)}"
        raise ApiError(message, status=404, param="model", code="model_not_found")

    async def take(self, http: Request, name: str | None) -> ServedModel:
        """The model of a request, which stays loaded until the request ends (`release`).

        Raises:
            ApiError: as `find`, and `ModelPool.take`.
        """
        name = self.find(name)
        if name in self.fixed:
            return self.fixed[name]
        model = await self.pool.take(name)
        http.scope.setdefault(TAKEN, []).append(name)
        return model

    def set_keep_alive(self, model: ServedModel, value: Any) -> float | None:
        """Keep a model of the pool loaded as long after this request as its `keep_alive` says.

        Returns:
            the seconds; None if the request does not say, or the model stays loaded in any case

        Raises:
            ApiError: as `keep_alive_seconds`.
        """
        if value is None or model.name not in self.pool.loaded:
            return None
        seconds = keep_alive_seconds(value)
        self.pool.keep(model.name, seconds)
        return seconds

    def release(self, scope: Scope) -> None:
        """End a request's use of models."""
        for name in scope.pop(TAKEN, ()):
            self.pool.release(name)

    async def read_json(self, http: Request) -> dict[str, Any]:
        """The JSON object in a request's body.

        Raises:
            ApiError: as `read_body` and `read_json`.
        """
        body = await read_body(http, self.limits.max_body_bytes, self.limits.send_timeout)
        if len(body) < LARGE_BODY:
            return read_json(body)
        return await asyncio.to_thread(read_json, body)

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
        await self.pool.close()
        await asyncio.gather(*(model.aio.close() for model in self.bases()))


def _no_model(stored: StoredModel) -> ServedModel:
    raise AssertionError("a pool without models has none to load")
