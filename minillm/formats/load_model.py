"""Loading a model: a checkpoint folder or a GGUF file, as published, quantised, or with a LoRA adapter."""

import logging
import math
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..backends.loader import Tensor
from ..backends.low_rank import AdapterWeights
from ..backends.operations import Backend
from ..config import ModelConfig, read_config, warn_of_unknown_tokens
from ..errors import CheckpointError, UnsupportedModelError, listed
from ..models import (
    TEXT_PARTS,
    build_model,
    build_of,
    config_of,
    family_named,
    family_of,
    sources,
    stage_holds,
    tensor_shapes,
)
from ..models.base import Model
from . import open_checkpoint
from .gguf.file import GGUF, is_gguf, read_gguf
from .lora import merge, per_request, read_adapter, shares_of
from .quantized import Quantization
from .schemes import read_quantization
from .schemes.matrix import MatrixTensor, Scheme

logger = logging.getLogger("minillm")


def load_model(
    path: Path,
    backend: Backend,
    *,
    adapter: Path | None = None,
    rank: int = 0,
    ranks: int = 1,
    layers: range | None = None,
) -> Model:
    """Load the model of a checkpoint folder or a GGUF file, or what rank number `rank` of `ranks` has of it.

    A pipeline stage loads what it needs for its `layers` alone.

    The LoRA adapter of a folder is merged into the weights before they are converted to the backend's formats.

    Raises:
        ModelNotFoundError, CheckpointError, UnsupportedModelError: see `errors`. Also for an adapter that does not fit.
        ParameterError: the checkpoint is quantised, and the backend asks for another quantised dtype; or the ranks
            cannot share the model equally.
    """
    if is_gguf(path):
        return _load_gguf(read_gguf(path), backend, adapter, rank=rank, ranks=ranks, layers=layers)
    raw = read_config(path)
    config = config_of(raw)
    warn_of_unknown_tokens(raw, config.vocab_size, path / "config.json")
    if raw.get("auto_map"):
        logger.warning(
            "%s: config.json names code of its own (auto_map), which is not run: read as %s", path, config.model_type
        )
    if raw["model_type"] in TEXT_PARTS:
        logger.warning("%s: a model of text and images, of which minillm reads the text model alone", path)
    quantization, stored = read_quantization(raw), open_checkpoint(path)
    tensors: Mapping[str, Tensor]
    if quantization is None:
        config = replace(config, tied_head=family_of(raw).NAMES.ties_head(stored, config.tied_head))
        tensors = without_extras(canonical_names(stored, config), config, path)
    elif isinstance(quantization, Quantization):
        wanted = backend.loader.formats.projection
        quantization.check_wanted("auto" if wanted is None else wanted.name)
        tensors = quantization.join(stored, tensor_shapes(config))
    else:
        tensors = without_extras(canonical_names(quantization.join(stored), config), config, path)
    as_built = isinstance(quantization, Quantization)
    if adapter is not None:
        config, tensors = _adapted(config, tensors, adapter, as_built=as_built)
    model = build_model(config, tensors, backend, as_built=as_built, rank=rank, ranks=ranks, layers=layers)
    if isinstance(quantization, Scheme):
        quantization.log(path, tensors)
    stored.check_unchanged()
    return model


def _load_gguf(gguf: GGUF, backend: Backend, adapter: Path | None, **share: Any) -> Model:
    """Load the model of a GGUF file; errors as of `load_model`."""
    from .gguf.keys import warn_of_other_keys
    from .gguf.read_model import architecture_of, read_gguf_model

    tensors: Mapping[str, Tensor]
    raw, tensors, stored = read_gguf_model(gguf)
    warn_of_other_keys(gguf, architecture_of(gguf))
    with _speaking_of(gguf):
        config = config_of(raw)
        if adapter is not None:
            config, tensors = _adapted(config, tensors, adapter, as_built=True)
        model = build_model(config, tensors, backend, **share)
    stored.check_unchanged()
    return model


def read_gguf_model_config(gguf: GGUF) -> ModelConfig:
    """The configuration of the model in a GGUF file.

    Raises:
        CheckpointError, UnsupportedModelError: as `load_model`.
    """
    from .gguf.read_model import read_gguf_model

    raw = read_gguf_model(gguf)[0]
    with _speaking_of(gguf):
        return config_of(raw)


@contextmanager
def _speaking_of(gguf: GGUF) -> Iterator[None]:
    """Name the file in errors: the families speak of config.json, as if there were one."""
    try:
        yield
    except (CheckpointError, UnsupportedModelError) as error:
        message = str(error).replace("its config.json", "config.json").replace("config.json", "its metadata")
        raise type(error)(f"{gguf.path}: {message}") from None


def _adapted(
    config: ModelConfig, tensors: Mapping[str, Tensor], folder: Path, *, as_built: bool
) -> tuple[ModelConfig, Mapping[str, Tensor]]:
    """A model's configuration and tensors with an adapter merged in.

    Matrices stored in 8 or 4 bits are expanded: they stay float32 unless the backend is to round them again.
    """
    family = family_named(config.model_type)
    adapter = read_adapter(folder, build_of(config), config, family.NAMES)
    merged = merge(adapter, tensors, family.NAMES, as_built=as_built)
    changed = [tensors[name] for name in merged if name in tensors and merged[name] is not tensors[name]]
    if any("float" not in tensor.dtype for tensor in changed):
        logger.warning(
            "%s: the checkpoint is quantised; the matrices that the adapter changes become float32, unless dtype names "
            "another format", folder
        )  # fmt: skip
    return replace(config, tied_head=config.tied_head and not adapter.unties), merged


def check_complete(stored: Mapping[str, Tensor], config: ModelConfig) -> None:
    """Check the names and shapes of a published checkpoint's tensors; no values are read.

    Raises:
        CheckpointError: a tensor is missing, has the wrong shape or has no place in the model.
    """
    names: sources.Names = family_named(config.model_type).NAMES
    wanted = sources.tensor_shapes(build_of(config), config, as_built=False)
    tensors = _without_other_heads(names.canonical(stored, tied_head=False), config, wanted)
    if config.tied_head and names.head in tensors:
        tensors.setdefault(names.embedding, tensors.pop(names.head))
    extras = _extras(tensors, wanted)
    sources.check_tensors({name: tensor for name, tensor in tensors.items() if name not in extras}, wanted)


def load_adapter(
    folder: Path,
    config: ModelConfig,
    backend: Backend,
    *,
    rank: int = 0,
    ranks: int = 1,
    layers: range | None = None,
) -> AdapterWeights:
    """Load a LoRA adapter for single requests of a model (`adapters.per_request`), or a share of it, as `load_model`.

    `config` is that of the whole model.

    Raises:
        ModelNotFoundError, CheckpointError, UnsupportedModelError: see `errors`. Also for an adapter that does not fit.
    """
    family = family_named(config.model_type)
    build = build_of(config)
    adapter = read_adapter(folder, build, config, family.NAMES)
    if layers is None:
        return per_request(adapter, backend)
    shares = shares_of(build, replace(config, tied_head=False), adapter.modules, rank, ranks)
    here = {name: share for name, share in shares.items() if stage_holds(config, family.NAMES, layers, name)}
    return per_request(adapter, backend, here)


NOT_RUN = ("v_head.", "mtp.", "mtp_")
"""Prefixes of tensors beside the model: the value head of reinforcement learning, layers that predict further tokens"""
_CACHE_SCALE = re.compile(r"\.([kvq]|kv|prob|[kvq]_proj\.output)_(scale|zero_point)$")


def without_extras(tensors: Mapping[str, Tensor], config: ModelConfig, folder: Path) -> dict[str, Tensor]:
    """Leave out tensors for which the model has no place, and that change nothing it computes.

    These are `NOT_RUN`, scales of a quantised K/V cache, which is not quantised here, tensors without numbers, and
    biases of zeros; one line names them. AutoGPTQ gave each quantised projection such a bias, which is not said.
    """
    extras = _extras(tensors, sources.tensor_shapes(build_of(config), config, as_built=False))
    said = [name for name in extras if not isinstance(tensors.get(_matrix_of(name)), MatrixTensor)]
    if said:
        logger.warning("%s: left out, for the model has no place for them: %s", folder, listed(said))
    return {name: tensor for name, tensor in tensors.items() if name not in extras}


def _extras(tensors: Mapping[str, Tensor], wanted: Collection[str]) -> list[str]:
    """The tensors that `without_extras` leaves out."""
    return [name for name in tensors if name not in wanted and _changes_nothing(name, tensors)]


def _changes_nothing(name: str, tensors: Mapping[str, Tensor]) -> bool:
    """True if a model without a place for this tensor computes the same as one with it."""
    tensor = tensors[name]
    if name.startswith(NOT_RUN) or _CACHE_SCALE.search(name) or not math.prod(tensor.shape):
        return True
    matrix = tensors.get(_matrix_of(name))
    return matrix is not None and tensor.shape == matrix.shape[:1] and not tensor.load().any()


def _matrix_of(name: str) -> str:
    """The name of the matrix that a bias belongs to; of another tensor nothing."""
    return f"{name.removesuffix('bias')}weight" if name.endswith(".bias") else ""


def canonical_names(stored: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """A published checkpoint's tensors by the names that `build` asks for (`sources.Names.canonical`)."""
    names: sources.Names = family_named(config.model_type).NAMES
    return _without_other_heads(names.canonical(stored, tied_head=config.tied_head), config)


def _without_other_heads(
    tensors: dict[str, Tensor], config: ModelConfig, wanted: Collection[str] | None = None
) -> dict[str, Tensor]:
    """Leave out the heads for which a model has no place: of an encoder, or the LM head of a classification."""
    if config.output == "tokens":
        return tensors
    names: sources.Names = family_named(config.model_type).NAMES
    kept = tensor_shapes(config) if wanted is None else wanted
    others = (*names.heads, names.head)
    return {name: tensor for name, tensor in tensors.items() if name in kept or not name.startswith(others)}


def read_model_config(path: Path) -> ModelConfig:
    """The configuration of the model in a checkpoint folder or a GGUF file.

    Raises:
        ModelNotFoundError, CheckpointError, UnsupportedModelError: as `load_model`.
    """
    if is_gguf(path):
        return read_gguf_model_config(read_gguf(path))
    return config_of(read_config(path))
