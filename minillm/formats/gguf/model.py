"""A GGUF file as a model: configuration, tensors, tokenizer, chat template and defaults of generation in one."""

import logging
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from ...backends.loader import Tensor
from ...config import ModelConfig
from ...errors import CheckpointError, UnsupportedModelError
from ...models import config_of
from ...tasks.pooling import EmbeddingSettings
from ...text.chat import ChatTemplate
from ...text.tokenizer import Tokenizer
from ..model_files import ModelFiles
from ..tensors import StoredTensor, check_unchanged
from .file import FILE_TYPES, GGUF, Located, is_gguf, read_gguf, read_shards
from .tensors import FLOATS, BlockTensor, kept_dtype

logger = logging.getLogger("minillm")

SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
"""Key, after "general.sampling." -> field of generation_config.json"""


class GGUFFile(ModelFiles):
    """A GGUF file, or several that hold one model together; any of them may be named."""

    format_name = "gguf"

    @classmethod
    def reads(cls, path: Path) -> bool:
        """True if the path is a GGUF file, by its name or its first bytes."""
        return is_gguf(path)

    @property
    def header(self) -> GGUF:
        """The header of the first file."""
        return read_gguf(self.path)

    @cached_property
    def _model(self) -> tuple[dict[str, Any], dict[str, Tensor], dict[str, StoredTensor | BlockTensor]]:
        from .read_metadata import read_gguf_model

        return read_gguf_model(self.header)

    @property
    def raw(self) -> dict[str, Any]:
        """The fields of config.json that metadata and tensors say."""
        return self._model[0]

    @property
    def family(self) -> str | None:
        """The family of the architecture; llama.cpp's own word for one that is not known."""
        from .architectures import ARCHITECTURES  # needed for a GGUF file alone

        name = self.header.get("general.architecture", str)
        return ARCHITECTURES[name].model_type if name in ARCHITECTURES else name

    @property
    def name(self) -> str:
        """The name in the metadata, or the file's."""
        return self.header.get("general.name", str) or super().name

    @cached_property
    def config(self) -> ModelConfig:
        """The configuration."""
        raw = self.raw
        with self.naming_errors():
            return config_of(raw)

    def weights(self) -> tuple[ModelConfig, Mapping[str, Tensor]]:
        """The configuration and the tensors."""
        from .keys import warn_of_other_keys

        _, tensors, _ = self._model
        warn_of_other_keys(self.header)
        return self.config, tensors

    @property
    def weight_files(self) -> tuple[Path, ...]:
        """All files of the model."""
        return tuple(shard.path for shard in read_shards(self.header))

    @cached_property
    def dtype(self) -> str:
        """The format that most numbers of matrices are kept in."""
        counts: Counter[str] = Counter()
        for tensor in self._located():
            if len(tensor.shape) > 1:
                counts[kept_dtype(tensor.type)] += math.prod(tensor.shape)
        return counts.most_common(1)[0][0] if counts else FLOATS["F32"]

    def _located(self) -> list[Located]:
        """The tensors of all files."""
        return [tensor for shard in read_shards(self.header) for tensor in shard.tensors.values()]

    @property
    def kept_dtype(self) -> str:
        """The format that most numbers of matrices are kept in."""
        return self.dtype

    @property
    def numbers(self) -> str | None:
        """llama.cpp's name for the mixture of types."""
        return FILE_TYPES.get(self.header.get("general.file_type", int, -1))

    @cached_property
    def counts(self) -> Counter[str]:
        """How many numbers are stored in each type."""
        counts: Counter[str] = Counter()
        for tensor in self._located():
            counts[tensor.type.name] += math.prod(tensor.shape)
        return counts

    @property
    def description(self) -> str:
        """The mixture of types, or the type of most numbers."""
        return f"GGUF {self.numbers or (super().description if self.counts else '')}".rstrip()

    @contextmanager
    def naming_errors(self) -> Iterator[None]:
        """Name the file in errors, and its metadata where they speak of config.json."""
        try:
            yield
        except (CheckpointError, UnsupportedModelError) as error:
            message = str(error).replace("its config.json", "config.json").replace("config.json", "its metadata")
            raise type(error)(f"{self.header.path}: {message}") from None

    def finish(self, tensors: Mapping[str, Tensor]) -> None:
        """Check that no file was changed."""
        check_unchanged(self._model[2].values())

    # --- beside the model ---------------------------------------------------------------------------------------------

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer; None if the metadata have none."""
        from .tokenizer import read_tokenizer

        table = self.header.tensors.get("token_embd.weight")
        return read_tokenizer(self.header, table.shape[0] if table is not None else 0)

    @cached_property
    def chat_template(self) -> ChatTemplate | None:
        """`tokenizer.chat_template`, with the special tokens that the metadata name."""
        header = self.header
        source = header.get("tokenizer.chat_template", str)
        if source is None:
            return None
        key, names = "tokenizer.ggml.tokens", {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
        ids = {name: i for name, i in header.token_ids(header.length(key)).items() if name in names}
        tokens = header.few_strings(key, ids.values())
        special = {f"{names[name]}_token": tokens[i] for name, i in ids.items()}
        tool_use = header.get("tokenizer.chat_template.tool_use", str)
        return ChatTemplate(source, f"the chat template of {header.path}", special, tool_use)

    def generation_fields(self) -> tuple[Path, dict[str, Any]]:
        """`general.sampling.*` and `tokenizer.ggml.suppress_tokens`, as fields of generation_config.json."""
        header, prefix = self.header, "general.sampling."
        stored = {key.removeprefix(prefix): value for key, value in header.metadata.items() if key.startswith(prefix)}
        fields = {name: _as_written(stored[key]) for key, name in SAMPLING.items() if key in stored}
        if fields:
            fields["do_sample"] = fields.get("temperature", 1) > 0
        if not fields.get("temperature", 1):
            del fields["temperature"]
        if others := sorted(key for key, value in stored.items() if key not in SAMPLING and value):
            logger.warning("%s: not read: %s", header.path, ", ".join(prefix + key for key in others))
        suppressed = header.numbers("tokenizer.ggml.suppress_tokens")
        return self.path, fields if suppressed is None else fields | {"suppress_tokens": suppressed.tolist()}

    def embedding_settings(self, config: ModelConfig, template: str | None = None) -> EmbeddingSettings:
        """The usual settings, with the pooling that the file names.

        Raises:
            UnsupportedModelError: another pooling, such as a head's that scores pairs of texts.
        """
        from .encoders import POOLINGS, RANK, projections

        key = f"{self.header.get('general.architecture', str)}.pooling_type"
        code, settings = self.header.get(key, int, 0), super().embedding_settings(config)
        if code == RANK and config.output == "labels":
            return settings
        if code not in POOLINGS:
            known = ", ".join(map(str, POOLINGS))
            raise UnsupportedModelError(f"{self.header.path}: {key} is {code}; minillm runs {known}")
        dense = projections(self._model[2], config.hidden_size, str(self.header.path)) if config.bidirectional else ()
        return replace(settings, pooling=POOLINGS[code] or settings.pooling, dense=dense)


def _as_written(value: float) -> float:
    """A fraction as it was before it became a float32: 0.9, not 0.8999999762."""
    return float(f"{value:.7g}") if isinstance(value, float) else value
