"""The experts of a layer as one tensor, as some checkpoints have them, as a tensor of each expert.

    experts.gate_up_proj       [X, in, outputs], in blocks [X, outputs, in]
    experts.gate_up_proj_bias  [X, outputs]

`tensor_names.Names.stacked` says which tensors these are, and whose outputs alternate in them.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..backends.formats import BLOCKS
from ..backends.loader import Member, Tensor
from ..errors import CheckpointError

PLACE = ".experts."
"""Text before the name of a stacked tensor"""


def each_expert(tensors: Mapping[str, Tensor], stacked: tuple[tuple[str, tuple[str, ...]], ...]) -> dict[str, Tensor]:
    """Tensors by their names, those of all experts apart: NAME.experts.3.gate_proj.weight and .bias.

    Raises:
        CheckpointError: a stacked tensor has another number of axes, or its outputs cannot be divided.
    """
    names, apart = dict(stacked), dict[str, Tensor]()
    for name, tensor in tensors.items():
        layer, place, stem = name.rpartition(PLACE)
        projections = names.get(stem.removesuffix("_bias")) if place else None
        if projections is None:
            apart[name] = tensor
            continue
        bias = stem.endswith("_bias")
        if len(tensor.shape) != 3 - bias:
            axes = "[experts, outputs]" if bias else "[experts, inputs, outputs]"
            raise CheckpointError(f"tensor {name} should have shape {axes}, found {list(tensor.shape)}")
        transposed = not bias and tensor.dtype not in BLOCKS
        if tensor.shape[-1 if bias or transposed else 1] % len(projections):
            raise CheckpointError(f"tensor {name} should have outputs of {' and '.join(projections)} in turn")
        for expert in range(tensor.shape[0]):
            for i, projection in enumerate(projections):
                ours = f"{layer}{PLACE}{expert}.{projection}.{'bias' if bias else 'weight'}"
                apart[ours] = _rows_of(tensor, expert, i, len(projections), transposed=transposed)
    return apart


def _rows_of(tensor: Tensor, expert: int, first: int, step: int, *, transposed: bool) -> Tensor:
    """Every `step`-th output of one expert, from `first` on. [X, outputs, ...] -> [outputs / step, ...]

    `transposed`: the tensor is [X, inputs, outputs].
    """
    matrix: Any = tensor.item(expert)  # type: ignore[attr-defined]
    if tensor.dtype in BLOCKS:
        rows: Tensor = matrix if step == 1 else matrix.every(first, step)
        return rows

    def arrange(stored: NDArray[Any]) -> NDArray[Any]:
        return (np.swapaxes(stored, 0, 1) if transposed else stored)[first::step]

    return Member(matrix, arrange, tensor)
