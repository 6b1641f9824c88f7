"""A folder whose vectors are looked up: sentence-transformers' StaticEmbedding, and model2vec's models.

The module's folder has tokenizer.json and the table, "embedding.weight", or model2vec's "embeddings" with the row and
the factor of each token ("mapping", "weights").
"""

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from ..backends.loader import Rearranged, Tensor
from ..config import ModelConfig
from ..errors import CheckpointError
from ..models import config_of
from ..tasks.pooling import EmbeddingSettings
from ..text.tokenizer import Tokenizer
from .folder import Folder
from .sentence_files import read_embedding_settings, read_modules
from .weight_files import Checkpoint, list_weights, open_checkpoint

KIND = "StaticEmbedding"


class StaticFolder(Folder):
    """A folder of sentence-transformers that begins with a StaticEmbedding module."""

    @classmethod
    def reads(cls, path: Path) -> bool:
        """True if the first module in modules.json is of this kind."""
        if not (path / "modules.json").is_file():
            return False
        modules = read_modules(path, check=False)
        return bool(modules) and modules[0][0] == KIND

    @cached_property
    def _module(self) -> Path:
        return read_modules(self.path)[0][1]

    @cached_property
    def raw(self) -> dict[str, Any]:
        """The sizes of the table."""
        rows, width = self._table.shape
        return {"model_type": "static_embedding", "vocab_size": rows, "hidden_size": width}

    @cached_property
    def config(self) -> ModelConfig:
        """The configuration."""
        return config_of(self.raw)

    @cached_property
    def stored(self) -> Checkpoint:
        """The tensors of the module."""
        return open_checkpoint(self._module)

    @cached_property
    def _table(self) -> Tensor:
        """The vector of each token. [V, W]"""
        stored = self.stored
        if "embedding.weight" in stored:
            return stored["embedding.weight"]
        if "embeddings" not in stored or len(stored["embeddings"].shape) != 2:
            raise CheckpointError(
                f"{self._module}: a static embedding has the tensor embedding.weight, or model2vec's embeddings; found "
                f"{', '.join(stored)!s:.80}"
            )
        table, rows, factors = stored["embeddings"], stored.get("mapping"), stored.get("weights")
        if rows is None and factors is None:
            return table

        def folded(vectors: Any) -> Any:
            if rows is not None:
                vectors = vectors[rows.stored(("int64", "int32"))]  # [rows, W] -> [V, W]
            if factors is None:
                return vectors
            return vectors * factors.stored(("float32", "float64")).astype(np.float32)[:, None]

        return Rearranged(table, folded)

    def weights(self) -> tuple[ModelConfig, Mapping[str, Tensor]]:
        """The configuration and the table."""
        return self.config, {"embedding.weight": self._table}

    def check_complete(self) -> None:
        """The table is there."""
        _ = self._table

    @property
    def weight_files(self) -> tuple[Path, ...]:
        """The file of the table."""
        return list_weights(self._module)[0]

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        """The module's."""
        return Tokenizer.find(self._module)

    def need_tokenizer(self) -> Tokenizer:
        """The module's."""
        return self.tokenizer or Tokenizer.from_folder(self._module)

    def embedding_settings(self, config: ModelConfig, template: str | None = None) -> EmbeddingSettings:
        """The mean of all tokens, and the modules after it."""
        return read_embedding_settings(self.path, config, EmbeddingSettings(special_tokens=False), template)
