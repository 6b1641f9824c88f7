"""Models of a folder: loaded when a request names one, unloaded when they were idle for a while or memory is short.

A model with requests stays. Of the others the one that was used longest ago goes first.
"""

import asyncio
import logging
import math
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..backends.memory_use import free_memory, trim_heap
from ..errors import MinillmError, UsageError, listed, printable, shown
from ..formats.search import bytes_of, checkpoints_in
from .http_json import ApiError
from .served_model import ServedModel

logger = logging.getLogger("minillm.server")

IDLE_TIMEOUT = 300.0
"""Seconds without a request after which a model is unloaded; Ollama's default"""
MARGIN = 1.25
"""Free memory that a model needs, in bytes of its files: for the cache, buffers, and weights that are stored anew"""
FOREVER = float("inf")
RETRY_AFTER = 5
"""Seconds after which a client should ask again for a model that had no room"""

UNITS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
"""Seconds of Go's units of time"""
_DURATION_PARTS = r"(\d+(?:\.\d*)?)(ns|us|ms|s|m|h)"
_DURATION = r"\d+(?:\.\d*)?(?:ns|us|ms|s|m|h)"


@dataclass(frozen=True)
class StoredModel:
    """A checkpoint on disk."""

    name: str
    path: Path
    bytes: int
    """Size of its files"""
    modified: float
    """When it was written, in seconds since 1970"""

    @property
    def format(self) -> str:
        """As Ollama names it."""
        return "gguf" if self.path.suffix == ".gguf" else "safetensors"


def stored_models(folder: Path) -> dict[str, StoredModel]:
    """The models in a folder and the folders below, by the names that requests use: their paths in it, without .gguf.

    Raises:
        UsageError: it is no folder, has no models, or two of one name.
    """
    if not folder.is_dir():
        raise UsageError(f"there is no folder {shown(str(folder))} of models")
    models: dict[str, StoredModel] = {}
    for path in checkpoints_in(folder):
        if path.is_dir() and not (path / "config.json").is_file():
            continue  # an adapter, whose base model is elsewhere
        name = path.relative_to(folder).as_posix().removesuffix(".gguf")
        if path == folder or name in models:
            why = "is a model itself, and not a folder of models" if path == folder else f"has two models {shown(name)}"
            raise UsageError(f"{shown(str(folder))} {why}")
        models[name] = StoredModel(name, path, bytes_of(path), path.stat().st_mtime)
    if not models:
        raise UsageError(f"{shown(str(folder))} has no models: expected GGUF files, or folders with a config.json")
    return models


@dataclass(eq=False)
class PooledModel:
    """A model that is in memory, or is being loaded, and who uses it."""

    keep_alive: float
    """Seconds for which it stays after its last request"""
    served: ServedModel | None = None
    """None until it is loaded"""
    uses: int = 0
    """Requests that run or wait for it"""
    used: float = field(default_factory=time.monotonic)
    """When the last one ended"""
    ready: "asyncio.Task[ServedModel] | None" = None
    timer: asyncio.TimerHandle | None = None

    @property
    def expires(self) -> float:
        """Seconds until it is unloaded if no request comes."""
        return self.keep_alive if self.uses else self.keep_alive - (time.monotonic() - self.used)


class ModelPool:
    """The models of a folder, of which some are loaded."""

    def __init__(
        self,
        stored: Mapping[str, StoredModel],
        load: Callable[[StoredModel], ServedModel],
        *,
        idle_timeout: float = IDLE_TIMEOUT,
        max_loaded: int | None = None,
        free: Callable[[], int] = free_memory,
    ) -> None:
        """Load none.

        Args:
            stored: by the names in requests
            load: loads one; called in a worker thread
            idle_timeout: seconds after its last request for which a model stays; infinity: until memory is short
            max_loaded: models in memory at once
            free: bytes of memory that could still be reserved
        """
        self.stored = stored
        self._load, self._idle_timeout, self._max_loaded, self._free = load, idle_timeout, max_loaded, free
        self._models: dict[str, PooledModel] = {}
        self._turn = asyncio.Lock()
        """Models are loaded one by one, so that each finds the memory that the one before has left"""
        self._ending: set[asyncio.Task[None]] = set()

    @property
    def loaded(self) -> dict[str, ServedModel]:
        """The models in memory, by name."""
        return {name: model.served for name, model in self._models.items() if model.served is not None}

    async def take(self, name: str) -> ServedModel:
        """The model of this name, in use until `release`; loaded if it is not. A client that leaves does not stop that.

        Raises:
            ApiError: it cannot be loaded, or models with requests leave no memory for it.
        """
        model = self._models.get(name)
        if model is None:
            model = self._models[name] = PooledModel(self._idle_timeout)
            model.ready = asyncio.create_task(self._make_ready(self.stored[name], model))
            model.ready.add_done_callback(lambda task: task.cancelled() or task.exception())  # everyone may have left
        assert model.ready is not None
        model.uses += 1
        try:
            return await asyncio.shield(model.ready)
        except BaseException:
            self._release(name, model)
            raise

    def release(self, name: str) -> None:
        """End one request's use of a model."""
        self._release(name, self._models[name])

    def keep(self, name: str, seconds: float) -> None:
        """Set how long a model that is in use stays after its last request."""
        self._models[name].keep_alive = seconds

    def expires(self, name: str) -> float:
        """Seconds until a loaded model is unloaded if no request comes."""
        return self._models[name].expires

    async def close(self) -> None:
        """Unload all models."""
        loading = [model.ready for model in self._models.values() if model.ready is not None]
        await asyncio.gather(*loading, return_exceptions=True)
        for name in self.loaded:
            self._unload(name)
        await asyncio.gather(*self._ending)

    # --- loading ------------------------------------------------------------------------------------------------------

    async def _make_ready(self, stored: StoredModel, model: PooledModel) -> ServedModel:
        """Load a model, once there is room for it."""
        try:
            async with self._turn:
                await self._make_room(stored)
                began = time.monotonic()
                model.served = await asyncio.to_thread(self._load, stored)
                logger.info("loaded %s in %.1f s", printable(stored.name), time.monotonic() - began)
                self._wait_for_requests(stored.name, model)  # all that waited may have left
                return model.served
        except MinillmError as error:
            message = f"the model {shown(stored.name)} cannot be loaded: {error}"
            raise ApiError(message, status=500, type="server_error", code="model_not_loaded") from None
        finally:
            if model.served is None:
                del self._models[stored.name]

    async def _make_room(self, stored: StoredModel) -> None:
        """Unload models without requests, until one more fits.

        Raises:
            ApiError: those with requests leave no room.
        """
        while why := self._shortage(stored):
            idle = [name for name in self.loaded if not self._models[name].uses]
            if not idle:
                message = f"there is no room for the model {shown(stored.name)} now: {why}"
                headers = {"Retry-After": str(RETRY_AFTER)}
                raise ApiError(message, status=503, type="server_error", code="model_overloaded", headers=headers)
            self._unload(min(idle, key=lambda name: self._models[name].used))
            await asyncio.gather(*self._ending)

    def _shortage(self, stored: StoredModel) -> str:
        """The reason why one more model does not fit beside those in memory; "" if it does, or if there are none."""
        if not (loaded := self.loaded):
            return ""  # what does not fit alone is told by loading it
        if self._max_loaded is not None and len(loaded) >= self._max_loaded:
            return f"{self._max_loaded} at most are in memory, now {listed(loaded)}, which has requests"
        needed, free = int(MARGIN * stored.bytes), self._free()
        if free < needed:
            return f"it needs {needed >> 20} MiB; beside {listed(loaded)}, with requests, {free >> 20} MiB are free"
        return ""

    # --- unloading ----------------------------------------------------------------------------------------------------

    def _release(self, name: str, model: PooledModel) -> None:
        model.uses -= 1
        model.used = time.monotonic()
        self._wait_for_requests(name, model)

    def _wait_for_requests(self, name: str, model: PooledModel) -> None:
        """Unload a model that has no requests in a while."""
        if model.timer is not None:
            model.timer.cancel()
        if model.served is not None and not model.uses and model.keep_alive < FOREVER:
            model.timer = asyncio.get_running_loop().call_later(model.keep_alive, self._expire, name, model)

    def _expire(self, name: str, model: PooledModel) -> None:
        if self._models.get(name) is model and not model.uses:
            self._unload(name)

    def _unload(self, name: str) -> None:
        served = self._models.pop(name).served
        assert served is not None
        task = asyncio.ensure_future(_end(name, served))
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)


async def _end(name: str, served: ServedModel) -> None:
    """Close a model and give its memory back to the system."""
    await served.aio.close()
    del served
    await asyncio.to_thread(trim_heap)
    logger.info("unloaded %s", printable(name))


def keep_alive_seconds(value: Any) -> float:
    """Seconds of `keep_alive`: a number of seconds, or a duration such as "1h30m"; below 0: for ever.

    Raises:
        ApiError: it is neither.
    """
    if isinstance(value, str) and re.fullmatch(r"[+-]?\d+(\.\d*)?", value):
        value = float(value)
    if isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value):
        return FOREVER if value < 0 else float(value)
    if isinstance(value, str) and re.fullmatch(f"[+-]?({_DURATION})+", value):
        if value.startswith("-"):
            return FOREVER
        return sum(float(count) * UNITS[unit] for count, unit in re.findall(_DURATION_PARTS, value))
    raise ApiError(f'keep_alive={shown(value)}: expected seconds, or a duration such as "5m"', param="keep_alive")
