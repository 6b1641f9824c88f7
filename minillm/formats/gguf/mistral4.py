"""Mistral 4 in GGUF files (`mistral4`): DeepSeek's latent attention and experts, chosen by shares of the softmax.

Source: https://github.com/ggml-org/llama.cpp (`src/models/mistral4.cpp`, `deepseek2.cpp`; `src/llama-context.cpp`,
which takes `mscale` for 1; `conversion/mistral3.py`).
"""

from collections.abc import Mapping
from typing import Any

from ...config import Fields
from ...errors import UnsupportedModelError
from ...models.deepseek_v2 import LatentConfig
from .file import GGUF
from .latent import LOG_MULTIPLIER, DeepSeekTranslation
from .translation import Keys

TEMPERATURE, LENGTH = "attention.temperature_scale", "attention.temperature_length"


class Mistral4Translation(DeepSeekTranslation):
    """Latent attention and experts, and a factor of queries beyond YaRN's original length."""

    keys = DeepSeekTranslation.keys | {TEMPERATURE, LENGTH}
    scaling_fields = frozenset({"llama_4_scaling_beta"})

    def fields(self, gguf: GGUF, raw: Mapping[str, Any]) -> dict[str, Any]:
        """Widths, experts, and the table of rotary embedding.

        Raises:
            As `DeepSeekTranslation.fields`; UnsupportedModelError also for other experts or another rotary embedding.
        """
        key, fields = Keys(gguf), super().fields(gguf, raw)
        table = fields.get("rope_scaling")
        if fields["model_type"] != "deepseek_v2" or table is None or table["mscale_all_dim"] != 1:
            raise UnsupportedModelError(
                f"{gguf.path}: in this architecture minillm runs experts chosen by shares of the softmax, and rotary "
                f"embedding by yarn with {LOG_MULTIPLIER} 0.1"
            )
        beta = key.number(TEMPERATURE, 0.0)
        original = table.get("original_max_position_embeddings")
        if beta and key.size(LENGTH, original) != original:
            raise UnsupportedModelError(f"{gguf.path}: {key.prefix}.{LENGTH} should be the original length {original}")
        del fields["topk_method"]
        return fields | {"model_type": "mistral4", "rope_scaling": table | {"llama_4_scaling_beta": beta}}

    def refusals(self, config: LatentConfig, table: Fields) -> dict[str, bool]:
        """As of DeepSeek, and other factors of YaRN."""
        return super().refusals(config, table) | {
            "with yarn and mscale_all_dim 1 alone": table.get("mscale_all_dim", 0.0) != 1
        }

    def entries(self, config: LatentConfig, table: Fields, where: str) -> dict[str, Any]:
        """As of DeepSeek, and the factor of queries."""
        entries, beta = super().entries(config, table, where), float(table.get("llama_4_scaling_beta", 0.0))
        if not beta:
            return entries
        return entries | {TEMPERATURE: beta, LENGTH: table.size("original_max_position_embeddings")}
