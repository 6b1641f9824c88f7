"""A checkpoint folder as `save_pretrained` writes it: config.json, weights, tokenizer, chat template, defaults.

The weights are safetensors or .bin files (`weight_files.py`); `schemes` has those in 8 and 4 bits.
"""

import logging
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..backends.loader import Tensor
from ..config import ModelConfig, read_config, warn_of_unknown_tokens
from ..decoding.checkpoint_fields import model_config_fields
from ..errors import CheckpointError
from ..files import read_optional_json, read_text
from ..models import config_of, family_of, tensor_shapes
from ..models.text_parts import TEXT_PARTS, text_tensors
from ..tasks.pooling import EmbeddingSettings
from ..tasks.reranking import published_reranker
from ..text.chat import ChatTemplate
from ..text.tokenizer import Tokenizer
from ..text.tokenizer.settings import read_settings
from .canonical import canonical_names, check_published, without_extras
from .model_files import ModelFiles
from .sentence_files import read_embedding_settings
from .tensors import check_unchanged
from .weight_files import Checkpoint, list_weights, open_checkpoint

if TYPE_CHECKING:
    from .schemes import Quantization

logger = logging.getLogger("minillm")

TOOL_USE = "additional_chat_templates/tool_use.jinja"


class Folder(ModelFiles):
    """A checkpoint folder."""

    @classmethod
    def reads(cls, path: Path) -> bool:
        """True if the path is a folder."""
        return path.is_dir()

    @cached_property
    def raw(self) -> dict[str, Any]:
        """The fields of config.json; `quantization_config` may be from a file beside it."""
        return read_config(self.path)

    @cached_property
    def config(self) -> ModelConfig:
        """The configuration; of a decoder that was published to embed texts, without a head, that of hidden states."""
        config = config_of(self.raw)
        if config.output == "tokens" and not (config.tied_head or config.encoder_layers) and self._embeds:
            names = family_of(self.raw).NAMES
            if not any(names.short(name) == names.head for name in self.stored):
                return replace(config, output="states")
        return config

    @property
    def _config_of_tensors(self) -> ModelConfig:
        """The configuration, without a head of masked tokens if the files have none, whatever config.json says."""
        config, names = self.config, family_of(self.raw).NAMES
        heads = (names.masked_head, names.other_masked_head)
        if not config.fills_masks or any(names.short(name) in heads for name in self.stored):
            return config
        return replace(config, fills_masks=False, tied_head=False)

    @property
    def _embeds(self) -> bool:
        return (self.path / "modules.json").exists()

    @cached_property
    def quantization(self) -> "Quantization | None":
        """The scheme that config.json names."""
        if self.raw.get("quantization_config") is None:
            return None
        from .schemes import read_quantization  # here, for most checkpoints are not quantised

        return read_quantization(self.raw)

    @property
    def as_built(self) -> bool:
        """True for a checkpoint that minillm has written in 8 or 4 bits."""
        return self.quantization is not None and self.quantization.as_built

    @cached_property
    def stored(self) -> Checkpoint:
        """The tensors by their published names, as they are in the files."""
        return open_checkpoint(self.path)

    def weights(self) -> tuple[ModelConfig, Mapping[str, Tensor]]:
        """The configuration, whose head some families tie by the tensors, and the tensors by the names of `build`."""
        self._warn_of_surprises()
        scheme, tensors = self.quantization, dict[str, Tensor](self.stored)
        if scheme is not None:
            tensors = scheme.join(self.stored, self.config)
        tensors = dict(text_tensors(self.raw, tensors))
        names, own = family_of(self.raw).NAMES, self._config_of_tensors
        if self.config.tied_head and self.raw["model_type"] in TEXT_PARTS:
            names = replace(names, head_decides=True)  # as transformers has it, whose configurations often do not say
        tied = names.ties_head(tensors, own.tied_head)
        config = replace(own, tied_head=tied)
        if self.as_built:
            return config, tensors
        shapes = tensor_shapes(config)
        return config, without_extras(canonical_names(tensors, config, shapes), shapes, self.path)

    def _warn_of_surprises(self) -> None:
        warn_of_unknown_tokens(self.raw, self.config.vocab_size, self.path / "config.json")
        if self.raw.get("auto_map"):
            logger.warning(
                "%s: config.json names code of its own (auto_map), which is not run: read as %s",
                self.path,
                self.config.model_type,
            )
        if self.raw["model_type"] in TEXT_PARTS:
            logger.warning("%s: a model of text and images, of which minillm reads the text model alone", self.path)

    def finish(self, tensors: Mapping[str, Tensor]) -> None:
        """Check that no file was changed, and log what quantised matrices have become."""
        if self.quantization is not None:
            self.quantization.log(self.path, tensors)
        check_unchanged(self.stored.values())

    @property
    def weight_files(self) -> tuple[Path, ...]:
        """The weight files that are read, of all that there are."""
        return list_weights(self.path)[0]

    @property
    def description(self) -> str:
        """The scheme and its bits, or the type of most numbers."""
        fields = self.raw.get("quantization_config")
        if not isinstance(fields, dict):
            return super().description + (" .bin" if self.stored.files[0].suffix == ".bin" else "")
        method, bits = fields.get("quant_method"), fields.get("bits")
        return f"int{bits}" if method == "minillm" else f"{method} {bits} bits" if bits else str(method)

    def check_complete(self) -> None:
        """Check names and shapes of tensors that are not quantised; others are checked when they are read."""
        if self.quantization is None:
            check_published(text_tensors(self.raw, self.stored), self._config_of_tensors)

    # --- beside the model ---------------------------------------------------------------------------------------------

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer; None if the folder has no files of one."""
        return Tokenizer.find(self.path)

    def need_tokenizer(self) -> Tokenizer:
        """The tokenizer; the error says which files are looked for."""
        return self.tokenizer or Tokenizer.from_folder(self.path)

    @cached_property
    def chat_template(self) -> ChatTemplate | None:
        """The template in chat_template.jinja, else the one in tokenizer_config.json.

        Of several named templates "default" is used, and "tool_use" for conversations with tools, as in transformers.
        They are in tokenizer_config.json, or in the folder additional_chat_templates/.
        """
        settings, path = read_settings(self.path), self.path / "chat_template.jinja"
        source: str | None
        if path.exists():
            source, other = read_text(path), self.path / TOOL_USE
            tool_use = read_text(other) if other.exists() else None
        else:
            path = self.path / "tokenizer_config.json"
            source, tool_use = _named_templates(path, settings.get("chat_template"))
        if source is None:
            return None
        return ChatTemplate(source, f"the chat template of {path}", _special_tokens(settings), tool_use)

    def generation_fields(self) -> tuple[Path, dict[str, Any]]:
        """The fields of generation_config.json, in older checkpoints of config.json; empty without either.

        As in transformers, the one replaces all such fields of the other.
        """
        path = self.path / "generation_config.json"
        if path.exists():
            return path, read_optional_json(path)
        path = self.path / "config.json"
        return path, model_config_fields(read_optional_json(path))

    def generation_defaults(self, vocab_size: int | None = None) -> dict[str, Any]:
        """`generation_fields`, with warnings; tokens that config.json names are warned of with the weights."""
        fields, path = super().generation_defaults(), self.path / "generation_config.json"
        if vocab_size is not None and path.exists():
            warn_of_unknown_tokens(fields, vocab_size, path)
        return fields

    def embedding_settings(self, config: ModelConfig, template: str | None = None) -> EmbeddingSettings:
        """The settings in the files of sentence-transformers, or of a published reranker without them."""
        settings = read_embedding_settings(self.path, config, super().embedding_settings(config), template)
        if self._embeds:
            return settings
        return published_reranker(self.path, config, settings, self.tokenizer)


def _named_templates(path: Path, value: Any) -> tuple[str | None, str | None]:
    """One template, or "default" and "tool_use" of `[{"name": ..., "template": ...}]`."""
    tool_use = None
    if isinstance(value, list) and all(
        isinstance(item, dict) and {"name", "template"} <= item.keys() for item in value
    ):
        named = {str(item["name"]): item["template"] for item in value}
        if "default" not in named:
            logger.warning("%s: no chat template is named default; ignored: %s", path, ", ".join(named))
        value, tool_use = named.get("default"), named.get("tool_use")
    for source in (value, tool_use):
        if source is not None and not isinstance(source, str):
            raise CheckpointError(
                f"{path}: chat_template should be text, or a list of objects with name and template; "
                f"found {source!r:.60}"
            )
    return value, tool_use


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """The special tokens that transformers passes to a template, as text: `..._token` fields, and named extra ones."""
    further = settings.get("extra_special_tokens")
    named = {name: token for name, token in settings.items() if name.endswith("_token")}
    tokens = named | (further if isinstance(further, dict) else {})
    texts = {name: token.get("content") if isinstance(token, dict) else token for name, token in tokens.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}
