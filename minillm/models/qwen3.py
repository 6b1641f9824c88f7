"""Qwen3 (arXiv 2505.09388): Llama with RMS norm of each query and key head before rotation."""

from collections.abc import Mapping
from typing import Any

from ..config import Fields
from .llama import NAMES, LlamaConfig, build, read_kin
from .qwen2 import layer_windows

__all__ = ["NAMES", "build", "read_config"]

HEAD_DIM = 128
"""Head width D if config.json has none; independent of the model's width"""


def read_config(raw: Mapping[str, Any]) -> LlamaConfig:
    """Qwen3's configuration from config.json.

    Raises:
        As `llama.read_config`.
    """
    fields = Fields(raw)
    bias = fields.get("attention_bias", False)
    return read_kin(
        fields,
        "qwen3",
        windows=layer_windows(fields),
        head_dim=HEAD_DIM,
        qkv_bias=bias,
        out_bias=bias,
        head_norms=True,
    )
