"""The closed form and the count side by side."""

from collections.abc import Iterable

from minillm.accounting import Step, Storage
from minillm.backends.observe import CountingBackend
from minillm.config import ModelConfig
from minillm.reference.cost import Cost

from .closed_form import operations


def predicted(config: ModelConfig, steps: Iterable[Step], storage: Storage | None = None) -> dict[object, Cost]:
    """The count expected of these steps: (operation, layer) -> FLOPs, bytes read, written and saved by fusion."""
    costs: dict[object, Cost] = {}
    for step in steps:
        for row in operations(config, step, storage):
            key = row.kind, row.layer
            costs[key] = costs.get(key, Cost(0)) + Cost(row.flops, row.bytes_read, row.bytes_written, row.fusion_saves)
    return costs


def assert_agree(
    config: ModelConfig, steps: Iterable[Step], counted: CountingBackend, storage: Storage | None = None
) -> None:
    """Each operation of each layer, FLOPs and bytes, exactly."""
    assert counted.total.flops > 0
    assert counted.costs == predicted(config, steps, storage)
