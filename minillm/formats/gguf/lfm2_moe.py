"""LFM2's mixtures in GGUF files (`lfm2moe`): experts chosen by sigmoids, after layers with one MLP.

Source: https://github.com/ggml-org/llama.cpp (`src/models/lfm2moe.cpp`; `conversion/lfm2.py`).
"""

from collections.abc import Mapping
from typing import Any

from ...config import Fields
from ...models.lfm2_moe import Lfm2MoeConfig
from .experts import SIGMOID, check_sigmoids, dense_layers
from .file import GGUF
from .translation import Translation


class Lfm2MoeTranslation(Translation):
    """How experts are chosen."""

    keys = frozenset({"expert_gating_func"})

    def fields(self, gguf: GGUF, raw: Mapping[str, Any]) -> dict[str, Any]:
        """Nothing that the tables do not say.

        Raises:
            UnsupportedModelError: experts are not chosen by sigmoids.
        """
        check_sigmoids(gguf)
        return {}

    def refusals(self, config: Lfm2MoeConfig, table: Fields) -> dict[str, bool]:
        """Differences from llama.cpp beside those of the tables."""
        return {"with weights of experts that have no factor alone": config.router.scale != 1}

    def entries(self, config: Lfm2MoeConfig, table: Fields, where: str) -> dict[str, Any]:
        """How experts are chosen, and the number of layers without."""
        return {"expert_gating_func": SIGMOID, "leading_dense_block_count": dense_layers(config.sparse)}
