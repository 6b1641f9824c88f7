"""Qwen3.5 (Qwen Team, 2026), the text model: Qwen3-Next with one MLP in each layer, and projections of their own."""

from collections.abc import Mapping
from typing import Any

from ..config import Fields
from .qwen3_next import NAMES, DeltaNetConfig, build, read_delta_nets
from .reading import read_layers, refuse_experts
from .text_parts import without_mrope

__all__ = ["NAMES", "build", "read_config"]

DEFAULTS = {"head_dim": 256, "intermediate_size": 12_288, "num_key_value_heads": 4, "max_position_embeddings": 32_768}
"""Fields that config.json may lack"""


def read_config(raw: Mapping[str, Any]) -> DeltaNetConfig:
    """Qwen3.5's configuration from config.json.

    Raises:
        As `llama.read_config`.
    """
    given = {name: value for name, value in without_mrope(raw).items() if value is not None}
    fields = Fields(DEFAULTS | given)
    refuse_experts(fields)
    dense: dict[str, Any] = {"expert_size": 0, "normalised": True, "sparse": (False,) * read_layers(fields)}
    return read_delta_nets(fields, "qwen3_5_text", **dense)
