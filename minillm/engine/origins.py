"""The origin of keys and values: the model by its numbers, its formats and its backend; stores of pages by it."""

import hashlib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from ..backends.formats import FLOAT32
from ..backends.storage import Experts, Joined
from ..backends.weights import Weight
from ..cache.prefix_files import Origin
from ..cache.prefix_store import PrefixStore, StoringPrefixCache
from ..errors import ParameterError
from ..models.base import stored_format, weights_of
from ..reference.blocks import BlockMatrix
from ..reference.quantize import Quantized
from ..runner.runner import Runner

STORE_BYTES = 2**33
"""Bytes of a store of prefixes, unless its user says otherwise"""
_PIECE = 2**24
"""Bytes of a weight that are read at once"""


def origins_of(runner: Runner) -> dict[str | None, Origin]:
    """The origins of the texts of each LoRA adapter, and of those without (None). All weights are read once."""
    model, memory = runner.model, runner.backend.memory
    compute = getattr(runner.backend, "compute", FLOAT32)
    origin = {
        "backend": runner.backend.name + ("" if compute == FLOAT32 else f" that multiplies {compute.name}"),
        "weights": stored_format(model).name,
        "cache": memory.cache.name,
        "page_size": str(runner.cache.page_size),
        "deterministic": str(getattr(runner.backend, "deterministic", False)),
        "model": _digest(repr(model.config), {str(i): weight for i, weight in enumerate(weights_of(model))}),
    }
    adapters = {
        name: {f"{place} {part}": getattr(change, part) for place, change in changes.items() for part in ("down", "up")}
        for name, changes in runner.adapters.items()
    }
    digests = {None: ""} | {name: _digest("", weights) for name, weights in adapters.items()}
    return {name: origin | {"adapter": digest} for name, digest in digests.items()}


def open_stores(runners: Mapping[str, Runner], folder: Path, max_bytes: int | None) -> list[PrefixStore]:
    """Give the prefix cache of each model a store in a folder.

    Raises:
        ParameterError: a model has no prefix cache; `max_bytes` are less than a page.
    """
    stores = []
    for runner in runners.values():
        config, cache = runner.model.config, runner.cache
        if not isinstance(cache, StoringPrefixCache) or config.encoder_layers or config.output != "tokens":
            raise ParameterError(f"prefix_store: this {config.model_type} model has no prefix cache: leave it out")
        stored = cache.storage.groups or (cache.storage,)
        page_bytes = sum(pages.nbytes // pages.keys.shape[1] for pages in stored)
        cache.store = PrefixStore(folder, max_bytes or STORE_BYTES, origins_of(runner), page_bytes)
        stores.append(cache.store)
    return stores


def _digest(more: str, weights: Mapping[str, Weight]) -> str:
    """A digest of the numbers of some weights as they are in memory, and of a text."""
    total = hashlib.blake2b(more.encode(), digest_size=20)
    with ThreadPoolExecutor() as pool:
        for name, weight, digest in zip(weights, weights.values(), pool.map(_digest_of, weights.values()), strict=True):
            total.update(f"{name} {weight.name} {weight.role} {digest}".encode())
    return total.hexdigest()


def _digest_of(weight: Weight) -> str:
    digest = hashlib.blake2b()
    for array in _arrays(weight):
        digest.update(f"{array.dtype} {array.shape}".encode())
        for first in range(0, len(array), step := max(1, _PIECE * len(array) // max(1, array.nbytes))):
            rows = array[first : first + step]
            here = np.ascontiguousarray(rows.get() if hasattr(rows, "get") else rows)
            digest.update(here.reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def _arrays(weight: Weight) -> Iterator[Any]:
    """The arrays of a weight, on a GPU in its memory."""
    for data in (weight.data, weight.bias):
        matrices = data.matrices if isinstance(data, Experts) else data.parts if isinstance(data, Joined) else (data,)
        for matrix in matrices:
            parts = (matrix.values, matrix.scales, matrix.offsets) if isinstance(matrix, Quantized) else (matrix,)
            parts = (matrix.blocks,) if isinstance(matrix, BlockMatrix) else parts
            yield from (array for array in parts if array is not None)
