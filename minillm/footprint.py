"""Memory on a device: what is taken, against what the model's shape alone predicts."""

from collections.abc import Collection
from typing import NamedTuple

from .accounting import cache_bytes, result_bytes, weight_bytes
from .models.opt import OPTConfig
from .runner import Runner


class Footprint(NamedTuple):
    """Bytes of one kind."""

    kind: str
    """ "weights", "cache" or "workspace" """
    taken: int
    predicted: int


def footprints(runners: Collection[Runner]) -> list[Footprint]:
    """What each kind of memory takes, of all models that share one back end. Empty for a back end without a device.

    The workspace is predicted as the results of the largest forward pass so far. It also holds the results of recorded
    decode steps, block tables, and what kernels leave for one another.
    """
    use = next((runner.ops.memory_use() for runner in runners), None)
    if use is None:
        return []
    weights, cache, results = 0, 0, 0
    for runner in runners:
        config = runner.model.config
        assert isinstance(config, OPTConfig)
        weights += weight_bytes(config, use.number_bytes)
        cache += cache_bytes(config, runner.cache.num_pages * runner.cache.page_size, use.number_bytes)
        results = max(results, result_bytes(config, use.largest_tokens, use.largest_rows, use.number_bytes))
    return [
        Footprint("weights", use.weights, weights),
        Footprint("cache", use.cache, cache),
        Footprint("workspace", use.workspace, results),
    ]
