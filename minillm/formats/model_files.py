"""The interface of file formats: what the files of a model say, whatever format they have.

A format is a subclass of `ModelFiles`, listed in `FORMATS` (`load_model.py`). It must say which paths it `reads`, what
config.json would say (`raw`), and where the tensors are (`weights`); everything else has a default here.
"""

import logging
import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from ..backends.loader import Tensor
from ..config import ModelConfig
from ..decoding.checkpoint_fields import unsupported
from ..errors import ModelNotFoundError
from ..models import config_of, tensor_shapes
from ..models.building import check_tensors
from ..tasks.pooling import EmbeddingSettings
from ..text.chat import ChatTemplate
from ..text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from .schemes import Quantization

logger = logging.getLogger("minillm")


class ModelFiles(ABC):
    """The files of a model. Opening them reads nothing; each is read when it is first asked for.

    Whatever reads a file raises ModelNotFoundError if it is missing, CheckpointError if it cannot be read, and
    UnsupportedModelError if minillm does not run what it says.
    """

    format_name: ClassVar[str] = "safetensors"
    """Name of the format in the APIs that tell it"""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    @abstractmethod
    def reads(cls, path: Path) -> bool:
        """True if a path, which may not exist, is a model of this format."""

    # --- the model ----------------------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def raw(self) -> dict[str, Any]:
        """The fields of config.json, or what the files say in its place."""

    @property
    def family(self) -> str | None:
        """The name of the model's family, which need not be one that minillm runs."""
        return str(self.raw.get("model_type"))

    @property
    def name(self) -> str:
        """The model's name."""
        return self.path.resolve().name

    @cached_property
    def config(self) -> ModelConfig:
        """The configuration."""
        return config_of(self.raw)

    @property
    def quantization(self) -> "Quantization | None":
        """The scheme of matrices in 8 or 4 bits whose scales are tensors of their own; None if there are none."""
        return None

    @property
    def as_built(self) -> bool:
        """True if tensors are as the model uses them, False if they are as the family publishes them (`Weights`)."""
        return True

    @property
    def stored(self) -> Mapping[str, Tensor]:
        """The tensors by the names that they have in the files."""
        return self.weights()[1]

    @abstractmethod
    def weights(self) -> tuple[ModelConfig, Mapping[str, Tensor]]:
        """The configuration, where tensors decide a part of it, and the tensors by the names that `build` asks for.

        Only headers are read. What is left out, and what may surprise, is named in warnings of "minillm".
        """

    @property
    def weight_files(self) -> tuple[Path, ...]:
        """The files that hold the weights."""
        return (self.path,)

    @property
    def weight_bytes(self) -> int:
        """Bytes of these files."""
        return sum(file.stat().st_size for file in self.weight_files)

    @property
    def dtype(self) -> str | None:
        """The dtype of the tensors that are not quantised, as far as it is known."""
        dtype = self.raw.get("dtype") or self.raw.get("torch_dtype")
        return dtype if isinstance(dtype, str) else None

    @property
    def kept_dtype(self) -> str | None:
        """The dtype that most matrices keep if the user asks for none; None: the tensors' own."""
        return None if self.quantization is None else self.quantization.dtype

    @property
    def numbers(self) -> str | None:
        """The file's own name for the types of its numbers, such as "Q4_K_M"; None if it has none."""
        return None

    @cached_property
    def counts(self) -> Counter[str]:
        """How many numbers are stored in each type, by the file's name for it."""
        counts: Counter[str] = Counter()
        for tensor in self.stored.values():
            counts[tensor.dtype] += math.prod(tensor.shape)
        return counts

    @property
    def description(self) -> str:
        """The format of most numbers, for people: "bfloat16 .bin", "gptq 4 bits", "GGUF Q4_K_M"."""
        return self.counts.most_common(1)[0][0]

    def check_complete(self) -> None:
        """Check names and shapes of the tensors against the configuration; no values are read.

        Raises:
            CheckpointError: a tensor is missing, has the wrong shape or has no place in the model.
        """
        check_tensors(self.weights()[1], tensor_shapes(self.config))

    @contextmanager
    def naming_errors(self) -> Iterator[None]:
        """Name the files in the errors of code that knows no files, where that code speaks of a config.json."""
        yield

    def finish(self, tensors: Mapping[str, Tensor]) -> None:  # noqa: B027 (a format may have nothing to check)
        """Check, after the model is built of these tensors, that no file was changed, and log what became of them.

        Raises:
            CheckpointError: a file was changed.
        """

    # --- beside the model ---------------------------------------------------------------------------------------------

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer; None if the files have none."""
        return None

    def need_tokenizer(self) -> Tokenizer:
        """The tokenizer; ModelNotFoundError if the files have none."""
        if self.tokenizer is None:
            raise ModelNotFoundError(f"{self.path} holds no tokenizer")
        return self.tokenizer

    @cached_property
    def chat_template(self) -> ChatTemplate | None:
        """The chat template; None if the files have none."""
        return None

    def generation_fields(self) -> tuple[Path, dict[str, Any]]:
        """The generation fields of the model, and the file that has them."""
        return self.path, {}

    def generation_defaults(self, vocab_size: int | None = None) -> dict[str, Any]:
        """`generation_fields`; a warning of "minillm" names those that are not supported.

        It also names tokens that a vocabulary of `vocab_size` does not have.
        """
        path, fields = self.generation_fields()
        if names := unsupported(fields):
            logger.warning(
                "%s: minillm does not support %s; results may differ from those of transformers", path, ", ".join(names)
            )
        return fields

    def embedding_settings(self, config: ModelConfig, template: str | None = None) -> EmbeddingSettings:
        """The settings with which texts are embedded or scored.

        Args:
            config: the model's
            template: source of its chat template
        """
        return EmbeddingSettings(pooling="mean" if config.bidirectional else "last")
