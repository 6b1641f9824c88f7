"""A published checkpoint's tensors by the names that `build` asks for, without those that change nothing."""

import logging
import math
import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path

from ..backends.loader import Tensor
from ..config import ModelConfig
from ..errors import listed
from ..models import build_of, building, family_named, tensor_shapes
from ..models.tensor_names import Names
from .stacked_experts import each_expert

logger = logging.getLogger("minillm")

NOT_RUN = ("v_head.", "mtp.", "mtp_")
"""Prefixes of tensors beside the model: the value head of reinforcement learning, layers that predict further tokens"""
_CACHE_SCALE = re.compile(r"\.([kvq]|kv|prob|[kvq]_proj\.output)_(scale|zero_point)$")


def canonical_names(
    stored: Mapping[str, Tensor], config: ModelConfig, shapes: Collection[str] | None = None
) -> dict[str, Tensor]:
    """A published checkpoint's tensors by the names that `build` asks for (`tensor_names.Names.canonical`).

    Heads for which the model has no place are left out: of an encoder, or the LM head of a classification. `shapes` are
    the model's own tensors, if they are known already.
    """
    names: Names = family_named(config.model_type).NAMES
    tensors = each_expert(names.canonical(stored, tied_head=config.tied_head), names.stacked)
    further = tuple(f"layers.{config.num_layers + i}." for i in range(config.further_layers))
    if further and any(name.startswith(further) for name in tensors):
        logger.warning(
            "left out: %s, which predicts further tokens", " and ".join(name.rstrip(".") for name in further)
        )
    not_read = [
        f"layers.{i}.self_attn.{name}."  # which Gemma 4's checkpoints have, as they were trained
        for i in range(config.num_layers)
        if config.kv_source(i) != i
        for name in ("k_proj", "v_proj", "k_norm", "v_norm")
    ]
    if left_out := (*further, *not_read):
        tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith(left_out)}
    if config.output == "tokens":
        return tensors
    own = tensor_shapes(config) if shapes is None else shapes
    heads = (*names.heads, names.head)
    return {name: tensor for name, tensor in tensors.items() if name in own or not name.startswith(heads)}


def without_extras(tensors: Mapping[str, Tensor], shapes: Collection[str], folder: Path) -> dict[str, Tensor]:
    """Leave out tensors for which the model has no place, and that change nothing it computes.

    These are `NOT_RUN`, scales of a quantised K/V cache, which is not quantised here, tensors without numbers, and
    biases of zeros; one line names them. AutoGPTQ gave each quantised projection such a bias, which is not said.
    """
    extras = extra_tensors(tensors, shapes)
    if not extras:
        return dict(tensors)
    from .schemes.matrix import MatrixTensor  # here, for most checkpoints are not quantised

    said = [name for name in extras if not isinstance(tensors.get(_matrix_of(name)), MatrixTensor)]
    if said:
        logger.warning("%s: left out, for the model has no place for them: %s", folder, listed(said))
    return {name: tensor for name, tensor in tensors.items() if name not in extras}


def extra_tensors(tensors: Mapping[str, Tensor], shapes: Collection[str]) -> list[str]:
    """The names of the tensors that `without_extras` leaves out; `shapes` are the model's own tensors."""
    return [name for name in tensors if name not in shapes and _changes_nothing(name, tensors)]


def _changes_nothing(name: str, tensors: Mapping[str, Tensor]) -> bool:
    """True if a model without a place for this tensor computes the same as one with it."""
    tensor = tensors[name]
    if name.startswith(NOT_RUN) or _CACHE_SCALE.search(name) or not math.prod(tensor.shape):
        return True
    matrix = tensors.get(_matrix_of(name))
    return matrix is not None and tensor.shape == matrix.shape[:1] and not tensor.load().any()


def _matrix_of(name: str) -> str:
    """The name of the matrix that a bias belongs to; "" for other tensors."""
    return f"{name.removesuffix('bias')}weight" if name.endswith(".bias") else ""


def check_published(stored: Mapping[str, Tensor], config: ModelConfig) -> None:
    """Check the names and shapes of a published checkpoint's tensors; no values are read but extra biases'.

    Raises:
        CheckpointError: a tensor is missing, has the wrong shape or has no place in the model.
    """
    names: Names = family_named(config.model_type).NAMES
    shapes = building.tensor_shapes(build_of(config), config, as_built=False)
    tensors = canonical_names(stored, replace(config, tied_head=False), shapes)
    if config.tied_head and names.head in tensors:
        tensors.setdefault(names.embedding, tensors.pop(names.head))
    extras = extra_tensors(tensors, shapes)
    building.check_tensors({name: tensor for name, tensor in tensors.items() if name not in extras}, shapes)
