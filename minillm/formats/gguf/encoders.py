"""GGUF files of encoders: what they say beside the tables of `architectures.py`.

The number of token types is that of the rows of their table. Positions are those of the table, from its first row on:
of RoBERTa's and XLM-RoBERTa's the converter has left out the rows that no token has, so that such a file is a BERT's.
EmbeddingGemma's projections of a text's vector are tensors of the file, and none of the model's.
"""

import logging
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...backends.loader import Tensor
from ...config import Fields, ModelConfig
from ...errors import CheckpointError, UnsupportedModelError, listed
from ...tasks.pooling import ACTIVATIONS, Dense, EmbeddingSettings, Pooling
from .file import GGUF
from .translation import Translation, Written, layer_name, renamed, unrounded

logger = logging.getLogger("minillm")

POOLINGS: dict[int, Pooling | None] = {0: None, 1: "mean", 2: "cls", 3: "last"}
"""`pooling_type` -> pooling; None: the model's usual one"""

RANK = 4
"""`pooling_type` of a file whose head scores texts, such as a reranker's: the first token's state, tanh between"""
_LABELS = "classifier.output_labels"
_HEAD = {"cls": ("pooler.dense", "classifier.dense"), "cls.output": ("classifier", "classifier.out_proj")}
"""Matrices of that head -> BERT's name and XLM-RoBERTa's"""
_TYPES, _POSITIONS = "token_types.weight", "position_embd.weight"
_TABLES = {"embeddings.token_type_embeddings": _TYPES, "embeddings.position_embeddings": _POSITIONS}


class EncoderTranslation(Translation):
    """BERT's and nomic-bert's tables of types and positions, which are float32 in every file; BERT's head of labels."""

    keys = frozenset({_LABELS})

    def fields(self, gguf: GGUF, raw: Mapping[str, Any]) -> dict[str, Any]:
        """The number of token types, of the rows of their table.

        Raises:
            CheckpointError: BERT's has none, or it has fewer positions than the file says; or no matrix of labels, or
                another number of them.
        """
        types, positions = gguf.tensors.get(_TYPES), gguf.tensors.get(_POSITIONS)
        if raw["model_type"] == "bert" and types is None:
            raise CheckpointError(f"{gguf.path} lacks the tensor {_TYPES}")
        if positions is not None and positions.shape[0] != raw["max_position_embeddings"]:
            raise CheckpointError(
                f"{gguf.path}: tensor {_POSITIONS} should have context_length {raw['max_position_embeddings']!r:.40} "
                f"rows, found {positions.shape[0]}"
            )
        fields: dict[str, Any] = {"type_vocab_size": 0 if types is None else types.shape[0]}
        if raw["model_type"] != "bert" or gguf.get("bert.pooling_type", int, 0) != RANK:
            return fields
        out, labels = gguf.tensors.get("cls.output.weight"), gguf.strings(f"bert.{_LABELS}")
        if out is None or (labels is not None and len(labels) != out.shape[0]):
            raise CheckpointError(
                f"{gguf.path}: cls.output.weight should have a row for each of {_LABELS} {labels!r:.60}"
            )
        labels = labels or [f"LABEL_{i}" for i in range(out.shape[0])]
        return fields | {
            "architectures": ["BertForSequenceClassification"],
            "id2label": {str(i): label for i, label in enumerate(labels)},
        }

    def read(self, name: str, tensor: Any, raw: Mapping[str, Any], where: str) -> dict[str, Tensor] | None:
        """The matrices of the head by BERT's names, if the file's pooling is the head's."""
        stem, _, kind = name.rpartition(".")
        return {f"{_HEAD[stem][0]}.{kind}": tensor} if stem in _HEAD and "architectures" in raw else None

    def entries(self, config: Any, table: Fields, where: str) -> dict[str, Any]:
        """Attention both ways."""
        return {"attention.causal": False}

    def written(self, name: str, tensors: Mapping[str, Written], config: Any) -> dict[str, Written] | None:
        """The tables as they are, of positions the rows that tokens have."""
        for published, ours in _TABLES.items():
            if name == f"{published}.weight":
                table = tensors[name].parts[0]
                first = getattr(config, "first_position", 0) if ours == _POSITIONS else 0
                return {ours: unrounded(table.part(0, first, table.shape[0]) if first else table)}
        stem, _, kind = name.rpartition(".")
        file = next((file for file, published in _HEAD.items() if stem in published), None)
        return None if file is None else {f"{file}.{kind}": tensors[name]}


class JinaBertTranslation(EncoderTranslation):
    """jina-bert-v2's two projections of the MLP, which are one tensor in today's files."""

    def read(self, name: str, tensor: Any, raw: Mapping[str, Any], where: str) -> dict[str, Tensor] | None:
        """The gate comes first."""
        F, rest = raw["intermediate_size"], layer_name(name, "blk")
        if rest != "ffn_up.weight" or tensor.shape[0] != 2 * F:
            return None
        halves = {"gated_layers_w": tensor.part(0, 0, F), "gated_layers_v": tensor.part(0, F, 2 * F)}
        return {renamed(name, f"mlp.{half}.weight", "encoder.layer"): rows for half, rows in halves.items()}


class ModernBertTranslation(Translation):
    """ModernBERT's windows and bases, whose defaults are llama.cpp's and not the family's."""

    own_rotary = True

    def fields(self, gguf: GGUF, raw: Mapping[str, Any]) -> dict[str, Any]:
        """The bases of rotary embedding, if the file has none; without a window, all layers see the whole text."""
        bases = {name: raw.get(name, 10_000.0) for name in ("global_rope_theta", "local_rope_theta")}
        return bases if raw.get("local_attention") else bases | {"global_attn_every_n_layers": 1}

    def refusals(self, config: Any, table: Fields) -> dict[str, bool]:
        """Rotary scaling, and layers without a window that are not each n-th one from the first on."""
        return {
            "without rotary scaling": table.raw.get("rope_type", table.raw.get("type", "default")) != "default",
            "with windows in all but each n-th layer alone": _period(config) is None,
        }

    def entries(self, config: Any, table: Fields, where: str) -> dict[str, Any]:
        """Attention both ways, the window, and every which layer has none."""
        entries = {"attention.causal": False, "rope.scaling.type": "none"}
        return entries | {
            "attention.sliding_window": _window(config),
            "attention.sliding_window_pattern": _period(config),
        }


def _window(config: Any) -> int | None:
    """The window as in config.json, whose half is on either side of a token; None: there is none."""
    windows = [window for window in config.windows if window is not None]
    return 2 * (windows[0] - 1) if windows else None


def _period(config: Any) -> int | None:
    """Every which layer has no window, from the first on; None if there is no such number."""
    whole = [window is None for window in config.windows]
    return next((n for n in range(1, len(whole) + 1) if whole == [i % n == 0 for i in range(len(whole))]), None)


DENSE = ("dense_2", "dense_3")
"""Names of the projections of a text's vector, in their order"""


class EmbeddingGemmaTranslation(Translation):
    """EmbeddingGemma's projections of a text's vector, which `projections` reads."""

    keys = frozenset(f"{name}_feat_{end}" for name in DENSE for end in ("in", "out"))

    def read(self, name: str, tensor: Any, raw: Mapping[str, Any], where: str) -> dict[str, Tensor] | None:
        """No tensor of the model."""
        return {} if name.startswith(DENSE) else None

    def entries(self, config: Any, table: Fields, where: str) -> dict[str, Any]:
        """The window, whose half is on either side of a token."""
        return {"attention.sliding_window": _window(config)}


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


def head_entries(settings: EmbeddingSettings, config: ModelConfig, architecture: str, where: str) -> dict[str, Any]:
    """Entries of a head that scores texts.

    Raises:
        UnsupportedModelError: files of the architecture have none.
    """
    if architecture != "bert":
        raise UnsupportedModelError(f"{where}: GGUF files with a head of labels are written of BERT and XLM-RoBERTa")
    settings.check()
    usual = "sigmoid" if len(config.labels) == 1 else "softmax"
    left_out = {
        "prompts that go before texts": bool(settings.prompts),
        "the function of logits": (settings.score_function or config.score_function) != usual,
    }
    if any(left_out.values()):
        logger.warning(
            "%s: left out, since GGUF files do not name it: %s", where, listed(k for k, v in left_out.items() if v)
        )
    if config.token_types > 1:
        logger.warning("%s: llama.cpp gives the second text of a pair the type of the first, the model its own", where)
    return {f"{architecture}.pooling_type": RANK, f"{architecture}.{_LABELS}": [*config.labels]}


def embedding_entries(
    settings: EmbeddingSettings, architecture: str, where: str
) -> tuple[dict[str, Any], dict[str, NDArray[np.float32]]]:
    """Entries of the pooling of a text's vector, and tensors of its projections.

    Raises:
        UnsupportedModelError: files have no such pooling, or not these projections.
    """
    codes = {pooling: code for code, pooling in POOLINGS.items()}
    if settings.refused or settings.late or settings.pooling not in codes:
        raise UnsupportedModelError(
            f"{where}: GGUF files have no pooling {settings.pooling!r:.60}; expected one of "
            f"{', '.join(pooling for pooling in codes if pooling)}"
        )
    dense = [
        layer
        for layer in settings.dense
        if isinstance(layer, Dense) and layer.bias is None and ACTIVATIONS[layer.activation] is None
    ]
    if settings.dense and not (architecture == "gemma-embedding" and len(dense) == len(settings.dense) == len(DENSE)):
        raise UnsupportedModelError(
            f"{where}: GGUF files have projections of a text's vector in EmbeddingGemma alone, two without biases"
        )
    if settings.prompts:
        logger.warning("%s: left out: prompts that go before texts, which GGUF files do not name", where)
    entries: dict[str, Any] = {f"{architecture}.pooling_type": codes[settings.pooling]}
    tensors: dict[str, NDArray[np.float32]] = {}
    for name, layer in zip(DENSE, dense, strict=False):
        outputs, inputs = layer.weight.shape
        entries |= {f"{architecture}.{name}_feat_in": inputs, f"{architecture}.{name}_feat_out": outputs}
        tensors[f"{name}.weight"] = np.ascontiguousarray(layer.weight, np.float32)
    return entries, tensors
