"""What a forward pass costs, from a configuration alone: parameters, memory, FLOPs, bytes, a floor in time.

schedule.py   which tokens each forward pass computes: from lengths, or recorded from a run
storage.py    how many bytes numbers take in each format
formulas.py   what each kind of part costs, in closed form; the conventions
memory.py     a model's weights, cache and activations; what fits
roofline.py   both phases on given hardware: bounds, floors, communication

A model comes as a table of its parts, which its family writes (`models/outline.py`).
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
    """FLOPs of some forward passes."""
    return sum(step_flops(config, step) for step in steps)


def step_flops(config: ModelConfig, step: Step) -> int:
    """FLOPs of one forward pass."""
    return sum(row.flops for row in operations(outline_of(config), step))


def position_parameters(config: ModelConfig) -> int:
    """Numbers in the position table, of which a step reads only a row for each token."""
    return sum(part.positions * part.width for part in outline_of(config).before if isinstance(part, Embed))
