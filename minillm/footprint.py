"""Device memory: measured, and predicted from the model's shape."""

from collections.abc import Collection
from typing import NamedTuple

from .accounting import Storage, activation_bytes, cache_bytes_per_token, weights_bytes
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
    storage = Storage.all_in("float32" if use.number_bytes == 4 else "float16")  # bfloat16 takes as much
    weights, cache, results = 0, 0, 0
    for runner in runners:
        config = runner.model.config
        weights += weights_bytes(config, storage)
        cache += runner.cache.num_pages * runner.cache.page_size * cache_bytes_per_token(config, storage)
        results = max(results, activation_bytes(config, storage, use.largest_tokens, use.largest_rows))
    return [
        Footprint("weights", use.weights, weights),
        Footprint("cache", use.cache, cache),
        Footprint("workspace", use.workspace, results),
    ]
