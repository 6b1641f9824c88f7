"""Memory and files of a model: device memory, measured and predicted from its shape; its files, and their numbers."""

from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

from ..backends.storage import format_of
from ..cache import PagedCache
from ..config import ModelConfig
from ..formats import open_model
from ..measure.accounting import Storage, activation_bytes, state_bytes_per_sequence, weights_bytes
from ..measure.accounting.memory import position_bytes
from ..models.base import Model, stored_format, weights_of
from ..runner.runner import Runner


class Footprint(NamedTuple):
    """Bytes of one kind of device memory."""

    kind: str
    """ "weights", "cache" or "workspace" """
    taken: int
    predicted: int


SHORT = {"float": "F", "bfloat": "BF", "int": "INT"}
"""Kind of numbers -> its name before their bits"""


class Stored(NamedTuple):
    """A model as it is stored."""

    bytes: int
    """Bytes of its files, or of its weights in memory if it has none"""
    form: str
    """ "gguf" or "safetensors" """
    numbers: str
    """The type of a GGUF file ("Q4_K_M"), or the format in which most of the numbers are in memory ("BF16")"""


def stored(path: Path | None, model: Model) -> Stored:
    """How a model is stored. `path`: its folder or GGUF file, if it has one."""
    in_memory = stored_format(model)
    numbers = in_memory.block or f"{SHORT[in_memory.kind]}{in_memory.bits}"
    if path is None or not path.exists():
        return Stored(sum(weight.nbytes for weight in weights_of(model)), "safetensors", numbers)
    files = open_model(path)
    return Stored(files.weight_bytes, files.format_name, files.numbers or numbers)


def footprints(runners: Collection[Runner]) -> list[Footprint]:
    """Memory by kind, of all models that share one backend. Empty for a backend without a device.

    The workspace is predicted as the activations of the largest forward pass so far. It also holds the results of
    recorded decode steps, block tables, and intermediate buffers of kernels.
    """
    use = next((runner.backend.memory.use() for runner in runners), None)
    if use is None:
        return []
    weights, cache, results = 0, 0, 0
    for runner in runners:
        config, storage = runner.model.config, _storage(runner.model, use.number_bytes)
        weights += weights_bytes(config, storage)
        cache += _predicted_cache(runner.cache, config, storage)
        cache += runner.cache.num_states * state_bytes_per_sequence(config)
        results = max(results, activation_bytes(config, storage, use.largest_tokens, use.largest_rows))
    return [
        Footprint("weights", use.weights, weights),
        Footprint("cache", use.cache, cache),
        Footprint("workspace", use.workspace, results),
    ]


def _predicted_cache(cache: PagedCache, config: ModelConfig, storage: Storage) -> int:
    """Bytes of a cache: each group of layers has all pages, or the parts of those that its window sees."""
    pages = dict.fromkeys(range(len(config.kv_groups)), cache.num_pages)
    pages |= {window.group: window.num_parts for window in cache.windows}
    return sum(count * cache.page_size * position_bytes(config, storage, group) for group, count in pages.items())


def _storage(model: Model, number_bytes: int) -> Storage:
    """The formats of a model whose activations have numbers of so many bytes."""
    numbers = "float32" if number_bytes == 4 else "float16"  # bfloat16 takes as much
    form = stored_format(model)
    if not form.scale_bits:
        return Storage.all_in(numbers)
    tables = [weight for weight in weights_of(model) if weight.role == "vocabulary"]
    keeps_vocabulary = not any(format_of(table.data).scale_bits for table in tables)
    formats = {"cache": numbers, "activations": numbers, "checkpoint": numbers}
    return Storage(weights=form.name, **formats, group=form.group, keeps_vocabulary=keeps_vocabulary)
