"""Qwen2 and Qwen2.5 (arXiv 2407.10671, 2412.15115): Llama with Q, K, V biases and a sliding window in some layers."""

from collections.abc import Mapping
from typing import Any

from ..config import Fields
from ..errors import CheckpointError
from .llama import NAMES, LlamaConfig, build, read_kin
from .reading import read_layer_types, read_layers, refuse_other_layers

__all__ = ["NAMES", "build", "layer_windows", "read_config"]

WINDOW, FIRST_WINDOW = 4096, 28
"""Sliding window, and the first layer that has one, if config.json has neither."""


def read_config(raw: Mapping[str, Any]) -> LlamaConfig:
    """Qwen2's configuration from config.json.

    Raises:
        As `llama.read_config`.
    """
    fields = Fields(raw)
    return read_kin(fields, "qwen2", windows=layer_windows(fields), qkv_bias=True)


def layer_windows(fields: Fields) -> tuple[int | None, ...]:
    """Sliding window of each layer; None for layers without.

    Needs `use_sliding_window`; the layers are those in `layer_types`, or all from layer `max_window_layers` on.

    Raises:
        CheckpointError: the list does not have one entry for each layer.
        UnsupportedModelError: another kind of attention, or a windowed layer without `sliding_window`.
    """
    refuse_other_layers(fields, windows=True)
    layers = read_layers(fields)
    window = None
    if fields.get("use_sliding_window", False) and fields.raw.get("sliding_window", WINDOW) is not None:
        window = fields.size("sliding_window", WINDOW)
    full, sliding = "full_attention", "sliding_attention"
    kinds = read_layer_types(fields, (full,) if window is None else (full, sliding))
    first = fields.get("max_window_layers", FIRST_WINDOW)
    kinds = kinds or [sliding if i >= first else full for i in range(layers)]
    if len(kinds) != layers:
        raise CheckpointError(f"config.json: layer_types should have num_hidden_layers {layers} entries")
    return tuple(window if kind == sliding else None for kind in kinds)
