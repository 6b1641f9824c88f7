"""The families that minillm runs: one file each, named as Hugging Face's model_type."""

import logging
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from ..backends.base import Backend
from ..checkpoint import open_checkpoint
from ..config import ModelConfig, read_config
from ..errors import ParameterError, UnsupportedModelError, listed, shown
from .base import Model, random_tensors
from .outline import Outline
from .quantized import read_quantization

logger = logging.getLogger("minillm")

FAMILIES = (
    "opt",
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gpt2",
    "gpt_neox",
    "bloom",
)
"""Each is a module here with `read_config`, `tensor_table`, `canonical_names`, `build`, `outline` and `SHAPES`."""


def family_named(model_type: str) -> ModuleType:
    """The module of a family; loaded when it is needed, since a run needs one of them."""
    return import_module(f".{model_type}", __package__)


def family_of(raw: Mapping[str, Any]) -> ModuleType:
    """The family that config.json names.

    Raises:
        UnsupportedModelError: minillm does not run it; the message lists what it runs.
    """
    model_type = raw.get("model_type")
    if model_type not in FAMILIES:
        raise UnsupportedModelError(
            f"config.json: model_type is {model_type!r}; minillm runs {', '.join(map(repr, FAMILIES))}"
        )
    return family_named(model_type)


def load_model(folder: Path, backend: Backend) -> Model:
    """The model in a checkpoint folder.

    Raises:
        ModelNotFoundError, CheckpointError, UnsupportedModelError: see `errors`.
        ParameterError: the checkpoint is quantised, and the backend is to quantise otherwise.
    """
    raw = read_config(folder)
    family = family_of(raw)
    config = family.read_config(raw)
    if raw.get("auto_map"):
        logger.warning(
            "%s: config.json names code of its own (auto_map), which is not run: read as %s", folder, config.model_type
        )
    quantization, stored = read_quantization(raw), open_checkpoint(folder)
    if quantization is None:
        tensors = family.canonical_names(stored, config)
    else:
        quantization.check_wanted(backend.weights)
        tensors = quantization.join(stored, family.tensor_table(config))
    model: Model = family.build(config, tensors, backend)
    stored.check_unchanged()
    return model


def outline_of(config: ModelConfig) -> Outline:
    """A model as a table of its parts."""
    outline: Outline = family_named(config.model_type).outline(config)
    return outline


def published_names() -> list[str]:
    """The shapes that families publish."""
    return [name for family in FAMILIES for name in family_named(family).SHAPES]


def published_config(shape: str) -> ModelConfig:
    """The configuration of a published shape.

    Raises:
        ParameterError: no family publishes it; the message lists those known.
    """
    for family in map(family_named, FAMILIES):
        if isinstance(shape, str) and shape in family.SHAPES:
            config: ModelConfig = family.read_config(family.SHAPES[shape])
            return config
    raise ParameterError(f"shape {shown(shape)} is not known: expected one of {listed(published_names())}")


def random_model(shape: str, seed: int, std: float, backend: Backend) -> Model:
    """A model in a published shape with random weights.

    Raises:
        ParameterError: no family publishes that shape; the message lists those known.
    """
    config = published_config(shape)
    family = family_named(config.model_type)
    stored = random_tensors(family.tensor_table(config), seed, std, backend)
    model: Model = family.build(config, stored, backend)
    return model
