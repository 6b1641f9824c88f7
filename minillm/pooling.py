"""Sentence embeddings: one vector from the hidden states of a text's tokens, as sentence-transformers' folders say.

Such a folder (Reimers and Gurevych, "Sentence-BERT", arXiv 1908.10084) lists the steps after the model in modules.json:

    1_Pooling     the mean of the hidden states, that of the first token (CLS), or that of the last
    2_Dense       a projection with an activation, in some
    3_Normalize   division by the length

config_sentence_transformers.json has prompts, text that goes before each text; sentence_bert_config.json the longest
text. A checkpoint without modules.json is pooled by the mean if it is an encoder, and by the last token if not.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from .checkpoint import open_checkpoint
from .config import Fields
from .errors import CheckpointError, ParameterError, UnsupportedModelError, listed, shown
from .files import read_json, read_optional_json, read_text

Pooling = Literal["mean", "cls", "last"]
"""The vector [E] of a text from its hidden states [T, E]: their mean, that of the first token, that of the last"""
POOLINGS: tuple[Pooling, ...] = get_args(Pooling)

_MODES: dict[str, Pooling] = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_lasttoken": "last",
}
_WORDS: dict[str, Pooling] = {"mean": "mean", "cls": "cls", "lasttoken": "last"}
_ACTIVATIONS = {
    "torch.nn.modules.linear.Identity": None,
    "torch.nn.modules.activation.Tanh": np.tanh,
}
_ORDER = re.compile("Transformer Pooling( Dense)*( Normalize)*")
"""Modules in the order in which they are run"""


@dataclass(frozen=True, eq=False)
class Dense:
    """A projection of the pooled vector, with an activation."""

    weight: NDArray[np.float32]
    """[W, E]"""
    bias: NDArray[np.float32] | None
    """[W]"""
    activation: str

    def __call__(self, x: NDArray[np.float32]) -> NDArray[np.float32]:
        """activation(x W^T + b). [N, E] -> [N, W]"""
        y = x @ self.weight.T  # [N, E] x [E, W] -> [N, W]
        if self.bias is not None:
            y += self.bias
        activate = _ACTIVATIONS[self.activation]
        return y if activate is None else activate(y)


@dataclass(frozen=True, kw_only=True)
class EmbeddingSettings:
    """Settings of embedding, for calls that do not say otherwise."""

    pooling: Pooling = "mean"
    include_prompt: bool = True
    """Whether the prompt's tokens count in the mean"""
    dense: tuple[Dense, ...] = ()
    normalize: bool = False
    max_tokens: int | None = None
    """The longest text in tokens; None: the model's context"""
    lowercase: bool = False
    strip: bool = False
    """Remove white space around each text, as sentence-transformers does"""
    prompts: Mapping[str, str] = field(default_factory=dict)
    """Text that goes before each text, by name: "query", "document" """
    default_prompt: str | None = None
    """The name of the one that is used if none is asked for"""

    def prompt_text(self, prompt: str | None, name: str | None) -> str:
        """The prompt of a call: the given one, the one of a name, or the default.

        Raises:
            ParameterError: both are given, or there is none of this name.
        """
        if prompt is not None and name is not None:
            raise ParameterError("prompt and prompt_name both say what goes before a text: leave one out")
        if prompt is not None:
            if not isinstance(prompt, str):
                raise ParameterError(f"prompt should be text, found {shown(prompt)}")
            return prompt
        name = self.default_prompt if name is None else name
        if name is None:
            return ""
        if not isinstance(name, str) or name not in self.prompts:
            known = (
                f"expected one of {listed(self.prompts)}" if self.prompts else "the checkpoint names none: give prompt"
            )
            raise ParameterError(f"prompt_name {shown(name)} is not known: {known}")
        return self.prompts[name]

    def finished(
        self, vectors: NDArray[np.float32], *, normalize: bool | None, dimensions: int | None
    ) -> NDArray[np.float32]:
        """The steps after pooling: projections, the first `dimensions` of the result, normalisation. [N, E] -> [N, W]

        Fewer dimensions than the model's suit models trained for it (Kusupati et al., "Matryoshka representation
        learning", arXiv 2205.13147).

        Raises:
            ParameterError: the vectors have no so many dimensions.
        """
        for dense in self.dense:
            vectors = dense(vectors)
        if dimensions is not None:
            if dimensions > vectors.shape[-1]:
                raise ParameterError(f"dimensions should be at most {vectors.shape[-1]}, found {dimensions}")
            vectors = vectors[..., :dimensions]
        if self.normalize if normalize is None else normalize:
            lengths = np.linalg.norm(vectors, axis=-1, keepdims=True)
            vectors = vectors / np.maximum(lengths, np.float32(1e-12))
        return np.ascontiguousarray(vectors, np.float32)


def pooled(hidden: NDArray[np.float32], pooling: Pooling, skipped: int = 0) -> NDArray[np.float32]:
    """One vector of a text's hidden states; `skipped` leading ones do not count in the mean. [T, E] -> [E]

    For "cls" and "last" the states are those of this token alone.
    """
    return np.asarray(hidden[skipped:].mean(axis=0) if pooling == "mean" else hidden[0])


def read_embedding_settings(folder: Path, *, causal: bool, width: int) -> EmbeddingSettings:
    """Read the settings with which a checkpoint's texts are embedded.

    Args:
        folder: of the checkpoint
        causal: whether the model is a decoder
        width: E of the model

    Raises:
        CheckpointError: a file cannot be read, a field is invalid, or a projection is of vectors of another width.
        UnsupportedModelError: a step that minillm does not run, such as pooling by the maximum, or another order.
    """
    modules = _read_modules(folder) if folder.is_dir() else []
    longest = read_optional_json(folder / "tokenizer_config.json").get("model_max_length") if folder.is_dir() else None
    max_tokens = longest if isinstance(longest, int) and longest > 0 else None
    if not modules:
        return EmbeddingSettings(pooling="last" if causal else "mean", max_tokens=max_tokens)
    found: dict[str, Any] = {"pooling": "last" if causal else "mean", "max_tokens": max_tokens, "strip": True}
    dense: list[Dense] = []
    for kind, path in modules:
        if kind == "Pooling":
            found |= _read_pooling(path / "config.json")
        elif kind == "Dense":
            dense.append(_read_dense(path, dense[-1].weight.shape[0] if dense else width))
        elif kind == "Normalize":
            found["normalize"] = True
        elif kind != "Transformer":
            raise UnsupportedModelError(
                f"{folder / 'modules.json'}: the module {kind!r:.60}; minillm runs Transformer, Pooling, Dense and "
                "Normalize"
            )
    if not _ORDER.fullmatch(" ".join(kind for kind, _ in modules)):
        raise UnsupportedModelError(
            f"{folder / 'modules.json'}: {', '.join(kind for kind, _ in modules)}; minillm runs Transformer, Pooling, "
            "then Dense, then Normalize"
        )
    of_texts = Fields(read_optional_json(folder / "sentence_bert_config.json"), "sentence_bert_config.json")
    if of_texts.raw.get("max_seq_length") is not None:
        found["max_tokens"] = of_texts.size("max_seq_length")
    found["lowercase"] = of_texts.get("do_lower_case", False)
    return EmbeddingSettings(**found, **_read_prompts(folder), dense=tuple(dense))


def _read_modules(folder: Path) -> list[tuple[str, Path]]:
    """Kind and folder of each module in modules.json, in order; empty if there is no such file."""
    path = folder / "modules.json"
    if not path.exists():
        return []
    try:
        modules = json.loads(read_text(path))
        found = [(str(each["type"]).rpartition(".")[2], folder / str(each["path"])) for each in modules]
    except (ValueError, TypeError, KeyError, RecursionError):
        found = []
    if not found:
        raise CheckpointError(f"{path} should be a list of modules with type and path")
    return found


def _read_pooling(path: Path) -> dict[str, Any]:
    """The settings in the configuration of a Pooling module: flags, or one word in newer releases."""
    fields = Fields(read_json(path), str(path))
    word = fields.get("pooling_mode", "")
    modes = [word] if word else [name for name in fields.raw if name.startswith("pooling_mode_") and fields.raw[name]]
    known = _WORDS if word else _MODES
    if len(modes) != 1 or modes[0] not in known:
        raise UnsupportedModelError(
            f"{path}: pooling by {', '.join(modes)!r:.80}; minillm runs one of {', '.join(known)}"
        )
    return {"pooling": known[modes[0]], "include_prompt": fields.get("include_prompt", True)}


def _read_dense(folder: Path, width: int) -> Dense:
    """A Dense module for vectors of some width: its configuration and its tensors."""
    fields = Fields(read_json(folder / "config.json"), str(folder / "config.json"))
    inputs, outputs, bias = fields.size("in_features"), fields.size("out_features"), fields.get("bias", True)
    if inputs != width:
        raise CheckpointError(f"{fields.source}: in_features should be {width}, the width before it; found {inputs}")
    activation = fields.choice("activation_function", "torch.nn.modules.activation.Tanh", tuple(_ACTIVATIONS))
    stored = open_checkpoint(folder)
    wanted = {"linear.weight": (outputs, inputs)} | ({"linear.bias": (outputs,)} if bias else {})
    if {name: tensor.shape for name, tensor in stored.items()} != wanted:
        raise CheckpointError(f"{folder} should hold {wanted} by its config.json, found {sorted(stored)!s:.100}")
    arrays = {name: np.array(tensor.load(), np.float32) for name, tensor in stored.items()}
    return Dense(arrays["linear.weight"], arrays.get("linear.bias"), activation)


def _read_prompts(folder: Path) -> dict[str, Any]:
    """Prompts and the name of the default one, from config_sentence_transformers.json."""
    name = "config_sentence_transformers.json"
    fields = Fields(read_optional_json(folder / name), name)
    prompts: dict[str, Any] = {name: text for name, text in fields.get("prompts", {}).items() if text is not None}
    if not all(isinstance(text, str) for text in prompts.values()):
        raise CheckpointError(f"{name}: prompts should be texts, found {prompts!r:.60}")
    default = fields.get("default_prompt_name", "") or None
    if default is not None and default not in prompts:
        raise CheckpointError(f"{name}: default_prompt_name is {default!r:.60}, and there is no such prompt")
    return {"prompts": prompts, "default_prompt": default}
