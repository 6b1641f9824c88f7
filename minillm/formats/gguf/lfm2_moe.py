"""LFM2's mixtures in GGUF files (`lfm2moe`): experts chosen by sigmoids, after layers with one MLP.

Source: https://github.com/ggml-org/llama.cpp (`src/models/lfm2moe.cpp`; `conversion/lfm2.py`).
"""

from collections.abc import Mapping
from typing import Any

from ...config import Fields
from ...errors import UnsupportedModelError
from ...models.lfm2_moe import Lfm2MoeConfig
from .file import GGUF
from .latent import SIGMOID
from .translation import Keys, Translation


class Lfm2MoeTranslation(Translation):
    """How experts are chosen."""

    keys = frozenset({"expert_gating_func"})

    def fields(self, gguf: GGUF, raw: Mapping[str, Any]) -> dict[str, Any]:
        """Nothing that the tables do not say.

        Raises:
            UnsupportedModelError: experts are not chosen by sigmoids.
        """
        key = Keys(gguf)
        if (function := key.size("expert_gating_func", SIGMOID, least=0)) != SIGMOID:
            raise UnsupportedModelError(
                f"{gguf.path}: {key.prefix}.expert_gating_func is {function}; in this architecture minillm runs "
                f"{SIGMOID} (sigmoid)"
            )
        return {}

    def refusals(self, config: Lfm2MoeConfig, table: Fields) -> dict[str, bool]:
        """Differences from llama.cpp beside those of the tables."""
        return {"with weights of experts that have no factor alone": config.router.scale != 1}

    def entries(self, config: Lfm2MoeConfig, table: Fields, where: str) -> dict[str, Any]:
        """How experts are chosen, and the number of layers without."""
        return {"expert_gating_func": SIGMOID, "leading_dense_block_count": config.sparse.index(True)}
