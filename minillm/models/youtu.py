"""Youtu-LLM (Tencent, 2025): DeepSeek-V3's latent attention, and one MLP in each layer."""

from collections.abc import Mapping
from typing import Any

from ..config import Fields
from .deepseek_v2 import NAMES, LatentConfig, build, read_latent

__all__ = ["NAMES", "build", "read_config"]

DEFAULTS = {"bos_token_id": 128_000, "eos_token_id": 128_001, "max_position_embeddings": 131_072}
"""Fields that config.json may lack"""


def read_config(raw: Mapping[str, Any]) -> LatentConfig:
    """Youtu-LLM's configuration from config.json.

    Raises:
        As `llama.read_config`.
    """
    fields = Fields(DEFAULTS | {name: value for name, value in raw.items() if value is not None})
    return read_latent(raw, fields, "youtu", interleaved=fields.get("rope_interleave", True), tied_head=True)
