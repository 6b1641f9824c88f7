"""GLM-4-0414 and GLM-Z1, the dense models (Zhipu AI, 2025): GLM-4-9B with norms after attention and MLP too."""

from collections.abc import Mapping
from typing import Any

from ..config import Fields
from .glm import TOKENS, read_glm
from .llama import NAMES, LlamaConfig, build

__all__ = ["NAMES", "build", "read_config"]


def read_config(raw: Mapping[str, Any]) -> LlamaConfig:
    """GLM-4-0414's configuration from config.json.

    Raises:
        As `llama.read_config`.
    """
    return read_glm(Fields(TOKENS | dict(raw)), "glm4", output_norms=True)
