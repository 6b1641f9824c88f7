"""The cost of a forward pass from a configuration alone: parameters, memory, FLOPs, bytes, minimum time.

schedule.py   the tokens of each forward pass: from lengths, or recorded from a run
storage.py    bytes per number in each format
formulas.py   the cost of each kind of component, in closed form; the conventions
memory.py     a model's weights, cache and activations; what fits
roofline.py   both phases on given hardware: bounds, floors, communication

A model is given by its outline, which its family defines (`models/outline.py`).
"""

from collections.abc import Iterable

from ..config import ModelConfig
from ..models import outline_of
from ..models.outline import Embed
from .formulas import Conventions, Row, operations
from .memory import activation_bytes, cache_bytes_per_token, parameter_count, weights_bytes
from .schedule import Part, Step, generation, recording
from .storage import Storage

__all__ = [
    "Conventions",
    "Part",
    "Row",
    "Step",
    "Storage",
    "activation_bytes",
    "cache_bytes_per_token",
    "flops",
    "generation",
    "operations",
    "parameter_count",
    "position_parameters",
    "recording",
    "step_flops",
    "weights_bytes",
]


def flops(config: ModelConfig, steps: Iterable[Step]) -> int:
    """FLOPs of several forward passes."""
    return sum(step_flops(config, step) for step in steps)


def step_flops(config: ModelConfig, step: Step) -> int:
    """FLOPs of one forward pass."""
    return sum(row.flops for row in operations(outline_of(config), step))


def position_parameters(config: ModelConfig) -> int:
    """Parameters of the position table, of which a step reads only one row per token."""
    return sum(part.positions * part.width for part in outline_of(config).before if isinstance(part, Embed))
