"""The supported model families: one file each, named as Hugging Face's model_type."""

import json
import logging
from collections.abc import Mapping
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from ..backends.loader import Tensor
from ..backends.operations import Backend
from ..backends.shapes import ShapeBackend
from ..config import ModelConfig
from ..errors import ParameterError, UnsupportedModelError, listed, shown
from ..plugins import load, plugins, with_name
from . import building
from .base import Model
from .building import Shapes, random_tensors
from .decoder import Decoder
from .heads import builder, read_head
from .parameters import Build
from .tensor_names import Names
from .text_parts import text_config

logger = logging.getLogger("minillm")

FAMILIES = (
    "opt",
    "llama",
    "mistral",
    "mixtral",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "olmoe",
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
    "phi",
    "stablelm",
    "gemma",
    "olmo3",
    "exaone4",
    "ministral3",
    "seed_oss",
    "hunyuan_v1_dense",
    "ernie4_5",
    "helium",
    "glm",
    "glm4",
    "cohere",
    "cohere2",
    "internlm3",
    "qwen2_moe",
    "glm4_moe",
    "dots1",
    "minimax_m2",
    "ernie4_5_moe",
    "lfm2",
    "lfm2_moe",
    "gpt_oss",
    "qwen3_next",
    "qwen3_5_text",
    "qwen3_5_moe_text",
    "gemma4_text",
    "deepseek_v2",
    "deepseek_v3",
    "mistral4",
    "glm4_moe_lite",
    "youtu",
    "minicpm3",
    "granitemoe",
    "granitemoeshared",
    "granitemoehybrid",
    "bamba",
    "nemotron_h",
    "falcon_h1",
)
"""Modules of this package, each with `read_config`, `build` and `NAMES`."""

ENCODER_DECODERS = ("t5", "mt5", "bart", "mbart", "pegasus", "marian")
"""The same, of models with an encoder."""

SPEECH = ("whisper",)
"""The same, of models whose encoder reads sound."""

ENCODERS = (
    *("bert", "distilbert", "roberta", "xlm_roberta", "camembert", "mpnet", "modernbert", "electra"),
    *("nomic_bert", "gte", "deberta", "deberta_v2", "jina_bert_v2"),
)
"""The same, of encoders, which generate no text."""

TABLES = ("static_embedding",)
"""The same, of models without layers, which formats read from other files than config.json."""

OTHER_TYPES = {"new": "gte"}
"""A model_type of checkpoints with code of their own -> the family"""


def family_named(model_type: str) -> ModuleType:
    """A family's module, imported on demand: a run needs only one. It may be another package's.

    Raises:
        ParameterError: that of another package cannot be imported, or lacks a part of a family.
    """
    if model_type.replace("-", "_") not in FAMILIES + ENCODER_DECODERS + SPEECH + ENCODERS + TABLES:
        return _family_of_plugin(model_type)
    return import_module(f".{model_type.replace('-', '_')}", __package__)


def _family_of_plugin(model_type: str) -> ModuleType:
    """A family of another package; errors of its functions have its name."""
    module, plugin = load("minillm.models", model_type), f"model family {model_type!r}"
    family = ModuleType(model_type)
    for part in ("read_config", "build", "NAMES"):
        if not hasattr(module, part):
            raise ParameterError(f"the {plugin} should have read_config, build and NAMES, found none called {part}")
        member = getattr(module, part)
        setattr(family, part, with_name(member, plugin) if callable(member) else member)
    return family


def family_of(raw: Mapping[str, Any]) -> ModuleType:
    """The module of the family in config.json's model_type; of a model of text and images, its text model's.

    Raises:
        UnsupportedModelError: the family is not supported; the message lists those that are.
    """
    family = text_config(raw).get("model_type")
    family = OTHER_TYPES.get(family, family) if isinstance(family, str) else family
    if family == "bert" and raw.get("position_embedding_type") == "alibi":
        family = "jina_bert_v2"
    known = FAMILIES + ENCODER_DECODERS + SPEECH + ENCODERS
    ours = isinstance(family, str) and family.replace("-", "_") in known + TABLES
    if not isinstance(family, str) or not (ours or family in plugins("minillm.models")):
        raise UnsupportedModelError(
            f"config.json: model_type is {family!r:.60}; minillm runs {', '.join(map(repr, known))}"
        )
    return family_named(family)


def config_of(raw: Mapping[str, Any]) -> ModelConfig:
    """The configuration in a config.json, of the family that it names, with what its head computes.

    Raises:
        CheckpointError, UnsupportedModelError: as the family's `read_config`, and `heads.read_head`.
    """
    family = family_of(raw)
    config: ModelConfig = read_head(family.read_config(text_config(raw)), raw, masked=bool(family.NAMES.masked_head))
    return config.within_vocabulary()


def build_of(config: ModelConfig) -> Build:
    """The function that builds the model of a configuration: its family's `build`, with the configuration's head."""
    return builder(family_named(config.model_type).build, config)


def build_model(
    config: ModelConfig,
    tensors: Mapping[str, Tensor],
    backend: Backend,
    *,
    layers: range | None = None,
    **options: Any,
) -> Decoder:
    """A model from tensors by name; options and errors as `building.build_from`. `layers`: as `load_model`."""
    if layers is not None:
        options["holds"] = partial(stage_holds, config, family_named(config.model_type).NAMES, layers)
    return building.build_from(build_of(config), config, tensors, backend, **options)


def stage_holds(config: ModelConfig, names: Names, layers: range, name: str) -> bool:
    """Whether the pipeline stage of these layers needs a parameter, "layers.3.attn" or "embed_tokens"."""
    if len(layers) == config.num_layers:
        return True
    number = next((int(word) for word in name.split(".") if word.isdecimal()), None)
    if number is not None:
        return number in layers
    is_last = layers.stop == config.num_layers
    if f"{name}.weight" == names.embedding:
        return layers.start == 0 or (is_last and config.tied_head)
    return is_last or f"{name}.weight" != names.head


def shape_model(config: ModelConfig, backend: ShapeBackend) -> Decoder:
    """A model of shapes alone, which takes no memory."""
    return building.build_of_shapes(build_of(config), config, backend)


def tensor_shapes(config: ModelConfig) -> Shapes:
    """Name and shape of every tensor that a model of this configuration takes, in its own order."""
    return building.tensor_shapes(build_of(config), config)


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
    return config_of(published()[shape])


def random_model(shape: str, seed: int, std: float, backend: Backend, **share: Any) -> Model:
    """A model of a published size with random weights, or a share of it (see `load_model`).

    Raises:
        ParameterError: the name is unknown; the message lists the known ones.
    """
    config = published_config(shape)
    tensors = random_tensors(tensor_shapes(config), seed, std, backend)
    return build_model(config, tensors, backend, verb="drawing", **share)
