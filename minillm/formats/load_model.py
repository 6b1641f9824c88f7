"""Loading a model: the door to all formats, and the way from files to a model on a backend."""

from pathlib import Path

from ..backends.low_rank import AdapterWeights
from ..backends.operations import Backend
from ..config import ModelConfig
from ..models import build_model, stage_holds
from ..models.base import Model
from .folder import Folder
from .gguf.model import GGUFFile
from .model_files import ModelFiles
from .static_folder import StaticFolder

FORMATS: list[type[ModelFiles]] = [GGUFFile, StaticFolder, Folder]
"""The formats that are read, the first that `reads` a path. To add one, put its class in front."""


def open_model(path: Path) -> ModelFiles:
    """The files of the model at a path: configuration, tensors, tokenizer, chat template, generation defaults.

    Nothing is read yet. A path that no format reads is taken for a folder, whose errors say what is missing.
    """
    return next((kind for kind in FORMATS if kind.reads(path)), Folder)(path)


def is_model_file(path: Path) -> bool:
    """True if a path is a file that holds a whole model, such as a GGUF file."""
    return path.is_file() and any(kind.reads(path) for kind in FORMATS)


def load_model(
    path: Path,
    backend: Backend,
    *,
    adapter: Path | None = None,
    rank: int = 0,
    ranks: int = 1,
    layers: range | None = None,
) -> Model:
    """Load a model in any of `FORMATS`, or what rank number `rank` of `ranks` has of it.

    A pipeline stage loads what it needs for its `layers` alone.

    The LoRA adapter of a folder is merged into the weights before they are converted to the backend's formats.

    Raises:
        ModelNotFoundError, CheckpointError, UnsupportedModelError: see `errors`. Also for an adapter that does not fit.
        ParameterError: the checkpoint is quantised, and the backend asks for another quantised dtype; or the ranks
            cannot share the model equally.
    """
    files = open_model(path)
    config, tensors = files.weights()
    if files.quantization is not None:
        dtype = backend.loader.formats.projection
        files.quantization.check_dtype("auto" if dtype is None else dtype.name)
    with files.naming_errors():
        if adapter is not None:
            from .lora import merge_adapter  # seldom needed

            config, tensors = merge_adapter(adapter, config, tensors, as_built=files.as_built)
        model = build_model(config, tensors, backend, as_built=files.as_built, rank=rank, ranks=ranks, layers=layers)
    files.finish(tensors)
    return model


def load_adapter(
    folder: Path,
    config: ModelConfig,
    backend: Backend,
    *,
    rank: int = 0,
    ranks: int = 1,
    layers: range | None = None,
) -> AdapterWeights:
    """Load a LoRA adapter for single requests of a model (`lora.per_request`), or a share of it, as `load_model`.

    `config` is the whole model's.

    Raises:
        ModelNotFoundError, CheckpointError, UnsupportedModelError: see `errors`. Also for an adapter that does not fit.
    """
    from .lora import per_request, read_adapter, shares_of  # seldom needed

    adapter = read_adapter(folder, config)
    if layers is None:
        return per_request(adapter, backend)
    shares = shares_of(config, rank, ranks)
    here = {name: share for name, share in shares.items() if stage_holds(config, adapter.names, layers, name)}
    return per_request(adapter, backend, here)
