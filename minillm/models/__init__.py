"""The supported model families: one file each, named as Hugging Face's model_type."""

import json
import logging
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from ..backends.operations import Backend
from ..backends.shapes import ShapeBackend
from ..backends.weights import Tensor
from ..checkpoint import open_checkpoint
from ..config import ModelConfig, read_config
from ..errors import ParameterError, UnsupportedModelError, listed, shown
from . import sources
from .base import Model
from .decoder import Decoder
from .quantized import read_quantization
from .sources import Shapes, random_tensors

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
    "starcoder2",
    "gemma2",
    "gemma3_text",
    "smollm3",
    "olmo2",
    "granite",
    "phi3",
)
"""Modules of this package, each with `read_config`, `build` and `NAMES`."""

TEXT_PARTS = {"gemma3": "gemma3_text"}
"""model_type of a model of text and images -> the family of its text model, which is read alone."""


def family_named(model_type: str) -> ModuleType:
    """A family's module, imported on demand: a run needs only one."""
    return import_module(f".{model_type}", __package__)


def family_of(raw: Mapping[str, Any]) -> ModuleType:
    """The module of the family in config.json's model_type.

    Raises:
        UnsupportedModelError: the family is not supported; the message lists those that are.
    """
    model_type = raw.get("model_type")
    family = TEXT_PARTS.get(model_type, model_type) if isinstance(model_type, str) else model_type
    if family not in FAMILIES:
        raise UnsupportedModelError(
            f"config.json: model_type is {model_type!r}; minillm runs {', '.join(map(repr, FAMILIES))}"
        )
    return family_named(family)


def load_model(folder: Path, backend: Backend, *, rank: int = 0, ranks: int = 1) -> Model:
    """Load the model of a checkpoint folder, or what rank number `rank` of `ranks` has of it.

    Raises:
        ModelNotFoundError, CheckpointError, UnsupportedModelError: see `errors`.
        ParameterError: the checkpoint is quantised, and the backend asks for another quantised dtype; or the ranks
            cannot share the model equally.
    """
    raw = read_config(folder)
    config = family_of(raw).read_config(raw)
    if raw.get("auto_map"):
        logger.warning(
            "%s: config.json names code of its own (auto_map), which is not run: read as %s", folder, config.model_type
        )
    if raw["model_type"] in TEXT_PARTS:
        logger.warning("%s: a model of text and images, of which minillm reads the text model alone", folder)
    quantization, stored = read_quantization(raw), open_checkpoint(folder)
    tensors: Mapping[str, Tensor]
    if quantization is None:
        tensors = canonical_names(stored, config)
    else:
        wanted = backend.loader.formats.projection
        quantization.check_wanted("auto" if wanted is None else wanted.name)
        tensors = quantization.join(stored, tensor_shapes(config))
    model = build_model(config, tensors, backend, as_built=quantization is not None, rank=rank, ranks=ranks)
    stored.check_unchanged()
    return model


def canonical_names(stored: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """A published checkpoint's tensors by the names that `build` asks for (`sources.Names.canonical`)."""
    names: sources.Names = family_named(config.model_type).NAMES
    return names.canonical(stored, tied_head=config.tied_head)


def build_model(config: ModelConfig, tensors: Mapping[str, Tensor], backend: Backend, **options: Any) -> Decoder:
    """A model from tensors by name; options and errors are those of `sources.build_from`."""
    return sources.build_from(family_named(config.model_type).build, config, tensors, backend, **options)


def shape_model(config: ModelConfig, backend: ShapeBackend) -> Decoder:
    """A model of shapes alone, which takes no memory."""
    return sources.build_of_shapes(family_named(config.model_type).build, config, backend)


def tensor_shapes(config: ModelConfig) -> Shapes:
    """Name and shape of every tensor that a model of this configuration takes, in its own order."""
    return sources.tensor_shapes(family_named(config.model_type).build, config)


@cache
def published() -> dict[str, dict[str, Any]]:
    """The published model sizes of all families: name -> fields of config.json (shapes.json)."""
    shapes: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "shapes.json").read_text(encoding="utf-8"))
    return shapes


def published_config(shape: str) -> ModelConfig:
    """The configuration of a published model size.

    Raises:
        ParameterError: the name is unknown; the message lists the known ones.
    """
    if not isinstance(shape, str) or shape not in published():
        raise ParameterError(f"shape {shown(shape)} is not known: expected one of {listed(list(published()))}")
    config: ModelConfig = family_of(published()[shape]).read_config(published()[shape])
    return config


def random_model(shape: str, seed: int, std: float, backend: Backend) -> Model:
    """A model of a published size with random weights.

    Raises:
        ParameterError: the name is unknown; the message lists the known ones.
    """
    config = published_config(shape)
    return build_model(config, random_tensors(tensor_shapes(config), seed, std, backend), backend)
