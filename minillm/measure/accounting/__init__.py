"""The cost of a forward pass from a configuration alone: parameters, memory, FLOPs, bytes, minimum time.

schedule.py   the tokens of each forward pass: from lengths, or recorded from a run
storage.py    formats of weights, cache and activations
costs.py      the operations of a forward pass and their costs; other tools' conventions
memory.py     a model's weights, cache and activations; what fits
roofline.py   both phases on given hardware: bounds, floors, communication

All of it comes from the model itself, run on a backend of shapes (`backends/shapes.py`).
"""

from collections.abc import Iterable

from ...config import ModelConfig
from .costs import Conventions, Row, operations
from .memory import (
    activation_bytes,
    active_parameter_count,
    cache_bytes,
    cache_bytes_per_token,
    experts_read,
    looked_up,
    parameter_count,
    state_bytes_per_sequence,
    watched_bytes,
    weights_bytes,
)
from .schedule import Part, Step, generation, recording
from .storage import Storage

__all__ = [
    "Conventions",
    "Part",
    "Row",
    "Step",
    "Storage",
    "activation_bytes",
    "active_parameter_count",
    "cache_bytes",
    "cache_bytes_per_token",
    "experts_read",
    "flops",
    "generation",
    "looked_up",
    "operations",
    "parameter_count",
    "recording",
    "state_bytes_per_sequence",
    "step_flops",
    "watched_bytes",
    "weights_bytes",
]


def flops(config: ModelConfig, steps: Iterable[Step]) -> int:
    """FLOPs of several forward passes."""
    return sum(step_flops(config, step) for step in steps)


def step_flops(config: ModelConfig, step: Step) -> int:
    """FLOPs of one forward pass."""
    return sum(row.flops for row in operations(config, step))
