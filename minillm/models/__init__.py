"""The supported model families: one file each, named as Hugging Face's model_type."""

import logging
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from ..backends.operations import Backend
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
"""Modules of this package, each with `read_config`, `tensor_table`, `canonical_names`, `build`, `outline`, `SHAPES`."""


def family_named(model_type: str) -> ModuleType:
    """A family's module, imported on demand: a run needs only one."""
    return import_module(f".{model_type}", __package__)


def family_of(raw: Mapping[str, Any]) -> ModuleType:
    """The module of the family in config.json's model_type.

    Raises:
        UnsupportedModelError: the family is not supported; the message lists those that are.
    """
    model_type = raw.get("model_type")
    if model_type not in FAMILIES:
        raise UnsupportedModelError(
            f"config.json: model_type is {model_type!r}; minillm runs {', '.join(map(repr, FAMILIES))}"
        )
    return family_named(model_type)


def load_model(folder: Path, backend: Backend) -> Model:
    """Load the model of a checkpoint folder.

    Raises:
        ModelNotFoundError, CheckpointError, UnsupportedModelError: see `errors`.
        ParameterError: the checkpoint is quantised, and the backend asks for another quantised dtype.
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
        wanted = backend.loader.formats.projection
        quantization.check_wanted("auto" if wanted is None else wanted.name)
        tensors = quantization.join(stored, family.tensor_table(config))
    model: Model = family.build(config, tensors, backend)
    stored.check_unchanged()
    return model


def outline_of(config: ModelConfig) -> Outline:
    """The model's components in execution order."""
    outline: Outline = family_named(config.model_type).outline(config)
    return outline


def published_names() -> list[str]:
    """Names of the published model sizes of all families."""
    return [name for family in FAMILIES for name in family_named(family).SHAPES]


def published_config(shape: str) -> ModelConfig:
    """The configuration of a published model size.

    Raises:
        ParameterError: the name is unknown; the message lists the known ones.
    """
    for family in map(family_named, FAMILIES):
        if isinstance(shape, str) and shape in family.SHAPES:
            config: ModelConfig = family.read_config(family.SHAPES[shape])
            return config
    raise ParameterError(f"shape {shown(shape)} is not known: expected one of {listed(published_names())}")


def random_model(shape: str, seed: int, std: float, backend: Backend) -> Model:
    """A model of a published size with random weights.

    Raises:
        ParameterError: the name is unknown; the message lists the known ones.
    """
    config = published_config(shape)
    family = family_named(config.model_type)
    stored = random_tensors(family.tensor_table(config), seed, std, backend)
    model: Model = family.build(config, stored, backend)
    return model
