"""GGUF files of encoders: what they say beside the tables of `architectures.py`.

The number of token types is that of the rows of their table. Positions are those of the table, from its first row on:
of RoBERTa's and XLM-RoBERTa's the converter has left out the rows that no token has, so that such a file is a BERT's.
"""

from collections.abc import Mapping
from typing import Any

from ...errors import CheckpointError
from .file import GGUF
from .translation import Translation

_TYPES, _POSITIONS = "token_types.weight", "position_embd.weight"


class EncoderTranslation(Translation):
    """BERT's and nomic-bert's tables of types and positions."""

    def fields(self, gguf: GGUF, raw: Mapping[str, Any]) -> dict[str, Any]:
        """The number of token types, of the rows of their table.

        Raises:
            CheckpointError: BERT's has none, or it has fewer positions than the file says.
        """
        types, positions = gguf.tensors.get(_TYPES), gguf.tensors.get(_POSITIONS)
        if raw["model_type"] == "bert" and types is None:
            raise CheckpointError(f"{gguf.path} lacks the tensor {_TYPES}")
        if positions is not None and positions.shape[0] != raw["max_position_embeddings"]:
            raise CheckpointError(
                f"{gguf.path}: tensor {_POSITIONS} should have context_length {raw['max_position_embeddings']!r:.40} "
                f"rows, found {positions.shape[0]}"
            )
        return {"type_vocab_size": 0 if types is None else types.shape[0]}
