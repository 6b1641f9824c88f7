"""The closed form and the count side by side; for a family without an outline, the model of shapes and the count."""

from collections.abc import Iterable

from minillm.backends.observe import CountingBackend
from minillm.config import ModelConfig
from minillm.measure import accounting
from minillm.measure.accounting import Step, Storage
from minillm.reference.cost import Cost

from .closed_form import Used, expert_bytes, operations
from .components import ExpertLinear
from .outlines import has_outline, outline_of

Costs = dict[tuple[str, int | None], Cost]


def predicted(
    config: ModelConfig, steps: Iterable[Step], storage: Storage | None = None, used: Used = "expected"
) -> Costs:
    """The count expected of these steps: (operation, layer) -> FLOPs, bytes read, written and saved by fusion."""
    costs: Costs = {}
    for step in steps:
        outlined = has_outline(config)
        rows = (
            operations(config, step, storage, used=used) if outlined else accounting.operations(config, step, storage)
        )
        for row in rows:
            key = row.kind, row.layer
            costs[key] = costs.get(key, Cost(0)) + Cost(row.flops, row.bytes_read, row.bytes_written, row.fusion_saves)
    return costs


def assert_agree(
    config: ModelConfig, steps: Iterable[Step], counted: CountingBackend, storage: Storage | None = None
) -> None:
    """Each operation of each layer, FLOPs and bytes, exactly; of experts a whole number, among those that there are."""
    steps = list(steps)
    assert counted.total.flops > 0
    fewest, most = predicted(config, steps, storage, "fewest"), predicted(config, steps, storage, "most")
    for key, cost in counted.costs.items():
        if key[0] == "linear_experts" and key[1] is not None:
            parts = [part for part in outline_of(config).layers[key[1]] if isinstance(part, ExpertLinear)]
            one = sum(expert_bytes(part, storage or Storage()) for part in parts)
            assert fewest[key].bytes_read <= cost.bytes_read <= most[key].bytes_read
            assert (cost.bytes_read - fewest[key].bytes_read) % one == 0
            fewest[key] = fewest[key]._replace(bytes_read=cost.bytes_read)
    assert counted.costs == fewest
