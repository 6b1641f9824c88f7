"""EXAONE 4 (LG AI Research, arXiv 2507.11407): OLMo 2 with norms of each query and key head.

The large model has a sliding window in three of four layers, and no rotary embedding in the others.
"""

from collections.abc import Mapping
from typing import Any

from ..config import Fields
from ..errors import CheckpointError
from .olmo2 import NAMES, Olmo2Config, build, read_olmo
from .reading import read_grouped_heads, read_layer_kinds, read_layers, refuse_other_layers
from .rotary import read_rotary, refuse_partial

__all__ = ["NAMES", "build", "read_config"]

DEFAULTS = {"bos_token_id": 0, "eos_token_id": 2, "sliding_window": 4096}
"""Fields that config.json may lack"""
EVERY = 4
"""Every which layer has no window if config.json does not say"""


def read_config(raw: Mapping[str, Any]) -> Olmo2Config:
    """EXAONE 4's configuration from config.json; `sliding_window` null means full attention, with rotation, throughout.

    Raises:
        As `olmo2.read_config`.
    """
    fields = Fields(DEFAULTS | dict(raw))
    refuse_other_layers(fields, windows=True)
    refuse_partial(fields)
    if fields.get("attention_bias", False):
        raise CheckpointError("config.json: attention_bias is true; EXAONE 4 has no biases")
    layers, window = read_layers(fields), fields.raw["sliding_window"]
    slides = [False] * layers
    if window is not None:
        window = fields.size("sliding_window")
        every = EVERY if fields.raw.get("layer_types") else fields.size("sliding_window_pattern", EVERY)
        slides = read_layer_kinds(fields, lambda i: (i + 1) % every > 0)
    elif any(read_layer_kinds(fields, lambda i: False)):
        raise CheckpointError("config.json: layer_types has layers with a window, and sliding_window is null")
    head_dim = read_grouped_heads(fields)["head_dim"]
    rotated = tuple(window is None or slide for slide in slides)
    return read_olmo(
        fields,
        "exaone4",
        read_rotary(fields, head_dim, fields.size("max_position_embeddings", 2048)),
        windows=tuple(window if slide else None for slide in slides),
        rotated=rotated,
        mixed_layers=len(set(rotated)) > 1,
        head_norms=True,
    )
