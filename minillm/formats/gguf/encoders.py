"""GGUF files of encoders: what they say beside the tables of `architectures.py`.

The number of token types is that of the rows of their table. Positions are those of the table, from its first row on:
of RoBERTa's and XLM-RoBERTa's the converter has left out the rows that no token has, so that such a file is a BERT's.
EmbeddingGemma's projections of a text's vector are tensors of the file, and none of the model's.
"""

from collections.abc import Mapping
from typing import Any

from ...backends.loader import Tensor
from ...errors import CheckpointError
from ...tasks.pooling import Dense
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


class ModernBertTranslation(Translation):
    """ModernBERT's defaults, which are llama.cpp's and not the family's."""

    def fields(self, gguf: GGUF, raw: Mapping[str, Any]) -> dict[str, Any]:
        """The bases of rotary embedding, if the file has none; without a window, all layers see the whole text."""
        bases = {name: raw.get(name, 10_000.0) for name in ("global_rope_theta", "local_rope_theta")}
        return bases if raw.get("local_attention") else bases | {"global_attn_every_n_layers": 1}


DENSE = ("dense_2", "dense_3")
"""Names of the projections of a text's vector, in their order"""


class EmbeddingGemmaTranslation(Translation):
    """EmbeddingGemma's projections of a text's vector, which `projections` reads."""

    keys = frozenset(f"{name}_feat_{end}" for name in DENSE for end in ("in", "out"))

    def read(self, name: str, tensor: Any, raw: Mapping[str, Any], where: str) -> dict[str, Tensor] | None:
        """No tensor of the model."""
        return {} if name.startswith(DENSE) else None


def projections(stored: Mapping[str, Any], width: int, where: str) -> tuple[Dense, ...]:
    """The projections of a text's vector that a file has.

    Args:
        stored: the file's tensors by their names there
        width: E
        where: the file, for error messages

    Raises:
        CheckpointError: one does not take what the one before gives.
    """
    layers: list[Dense] = []
    for name in DENSE:
        if f"{name}.weight" not in stored:
            continue
        weight = stored[f"{name}.weight"].load()
        bias = stored[f"{name}.bias"].load() if f"{name}.bias" in stored else None
        if weight.ndim != 2 or weight.shape[1] != width:
            raise CheckpointError(f"{where}: tensor {name}.weight should have {width} columns, found {weight.shape}")
        width = len(weight)
        layers.append(Dense(weight, bias, "torch.nn.modules.linear.Identity"))
    return tuple(layers)
