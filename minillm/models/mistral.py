"""Mistral (Jiang et al., arXiv 2310.06825): Llama with sliding window attention."""

from collections.abc import Mapping
from typing import Any

from ..config import Fields
from .llama import NAMES, TOKENS, LlamaConfig, build, read_kin
from .reading import read_layer_types, read_layers, refuse_other_layers

__all__ = ["NAMES", "build", "read_config"]

WINDOW = 4096
"""Sliding window if config.json has none"""


def read_config(raw: Mapping[str, Any]) -> LlamaConfig:
    """Mistral's configuration from config.json; `sliding_window` null means full causal attention.

    Raises:
        As `llama.read_config`.
    """
    fields = Fields(TOKENS | {"sliding_window": WINDOW} | dict(raw))
    refuse_other_layers(fields, windows=True)
    window = None if fields.raw["sliding_window"] is None else fields.size("sliding_window")
    read_layer_types(fields, ("full_attention" if window is None else "sliding_attention",))
    return read_kin(fields, "mistral", windows=(window,) * read_layers(fields))
