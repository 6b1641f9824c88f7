"""Device memory: measured, and predicted from the model's shape."""

from collections.abc import Collection
from typing import NamedTuple

from .accounting import Storage, activation_bytes, cache_bytes_per_token, weights_bytes
from .backends.weights import format_of
from .models.base import Model, stored_format, weights_of
from .runner import Runner


class Footprint(NamedTuple):
    """Bytes of one kind of device memory."""

    kind: str
    """ "weights", "cache" or "workspace" """
    taken: int
    predicted: int


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
        cache += runner.cache.num_pages * runner.cache.page_size * cache_bytes_per_token(config, storage)
        results = max(results, activation_bytes(config, storage, use.largest_tokens, use.largest_rows))
    return [
        Footprint("weights", use.weights, weights),
        Footprint("cache", use.cache, cache),
        Footprint("workspace", use.workspace, results),
    ]


def _storage(model: Model, number_bytes: int) -> Storage:
    """The formats of a model whose activations have numbers of so many bytes."""
    numbers = "float32" if number_bytes == 4 else "float16"  # bfloat16 takes as much
    form = stored_format(model)
    if not form.scale_bits:
        return Storage.all_in(numbers)
    tables = [weight for weight in weights_of(model) if weight.role == "vocabulary"]
    kept = not any(format_of(table.data).scale_bits for table in tables)
    formats = {"cache": numbers, "activations": numbers, "checkpoint": numbers}
    return Storage(weights=form.name, **formats, group=form.group, keeps_vocabulary=kept)
