"""Locates the weight files of a folder and merges their tensors into one mapping.

File names as in transformers' `save_pretrained`: one file, or shards and an index that maps tensors to shards.
If a folder has both formats, safetensors take precedence.
"""

import logging
from collections.abc import Collection, Mapping
from pathlib import Path, PurePosixPath

from ..errors import CheckpointError, ModelNotFoundError
from ..files import parse_json, read_bytes
from .safetensors import read_safetensors
from .tensors import StoredTensor

logger = logging.getLogger("minillm")

WEIGHT_NAMES = (  # the first that exists is taken
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)

OFTEN_TIED = ("lm_head.weight", "embed_out.weight", "embed_tokens.weight", "shared.weight")
"""Endings of tensors that many models share under several names; the model asks for what it needs"""

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
"""PEFT's names; the first that exists is taken."""


class Checkpoint(dict[str, StoredTensor]):
    """All tensors of a folder by name, across its files. Made by `open_checkpoint`."""

    def __init__(self, folder: Path, files: tuple[Path, ...], tensors: Mapping[str, StoredTensor]) -> None:
        super().__init__(tensors)
        self.folder = folder
        self.files = files

    def __repr__(self) -> str:
        return f"Checkpoint({str(self.folder)!r}, {len(self.files)} files, {len(self)} tensors)"


def open_checkpoint(folder: Path) -> Checkpoint:
    """Open the weights of a local folder. Only headers are read; tensors are read on demand.

    Raises:
        CheckpointError: there are no weights, a shard or a tensor of the index is missing, or a file is truncated,
            damaged or unsafe. The message names the file and the tensor.
    """
    files, shard_of = list_weights(folder)
    return Checkpoint(folder, files, _merge(files, shard_of))


def open_adapter(folder: Path) -> Checkpoint:
    """Open the weights of an adapter's folder, as PEFT's `save_pretrained` writes it.

    Raises:
        ModelNotFoundError: the folder holds no adapter_config.json.
        CheckpointError: there are no weights, or their file is truncated, damaged or unsafe.
    """
    if not (folder / ADAPTER_CONFIG).exists():
        raise ModelNotFoundError(f"{folder} holds no {ADAPTER_CONFIG}: expected a folder that PEFT has written")
    path = next((folder / name for name in ADAPTER_WEIGHTS if (folder / name).exists()), None)
    if path is None:
        raise CheckpointError(f"adapter {folder} holds no weights: looked for {', '.join(ADAPTER_WEIGHTS)}")
    return Checkpoint(folder, (path,), _merge((path,), {}))


def list_weights(folder: Path) -> tuple[tuple[Path, ...], dict[str, str]]:
    """The weight files of a folder, and for shards the index's tensor -> file map. Opens only the index.

    Raises:
        CheckpointError: there are no weights, the index is unusable, or a shard is missing.
    """
    try:
        present = {path.name for path in folder.iterdir() if path.is_file()}
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be read: {error.strerror or error}") from error
    name = find_weights(present)
    if name is None:
        names = ", ".join(sorted(present)[:8]) or "no file at all"
        raise CheckpointError(f"{folder} holds no weights: looked for {', '.join(WEIGHT_NAMES)}; found {names}")
    if not is_index(name):
        return (folder / name,), {}
    shard_of = read_index(folder / name)
    shards = sorted(set(shard_of.values()))
    missing = [shard for shard in shards if shard not in present]
    if missing:
        raise CheckpointError(f"{folder} lacks {len(missing)} files that {name} lists, the first is {missing[0]!r}")
    return tuple(folder / shard for shard in shards), shard_of


def find_weights(names: Collection[str]) -> str | None:
    """The first match among a folder's file names: a weight file or an index; None without either."""
    return next((name for name in WEIGHT_NAMES if name in names), None)


def is_index(name: str) -> bool:
    """True for the file name of an index of shards."""
    return name.endswith(".index.json")


def read_index(path: Path) -> dict[str, str]:
    """The `weight_map` of an index: tensor name -> file name in the same folder.

    Raises:
        CheckpointError: the index is unreadable, or lists a file outside its folder.
    """
    shard_of = parse_json(read_bytes(path), str(path), unique=True).get("weight_map")
    if not isinstance(shard_of, dict) or not shard_of:
        raise CheckpointError(f"{path} has no weight_map from tensor names to file names")
    for tensor, shard in shard_of.items():
        # Checks the name, not the link target: in the hub's cache each file is a link to ../../blobs.
        if not isinstance(shard, str) or PurePosixPath(shard).name != shard or shard in ("", "..") or "\\" in shard:
            raise CheckpointError(
                f"{path} places tensor {tensor!r} in {shard!r}, expected a file name in the same folder"
            )
    return shard_of


def _merge(files: tuple[Path, ...], shard_of: dict[str, str]) -> dict[str, StoredTensor]:
    """The tensors of all files. Tensors missing from the index are kept; the model accepts or refuses them."""
    tensors: dict[str, StoredTensor] = {}
    for path in files:
        if path.suffix == ".safetensors":
            inside = read_safetensors(path)
        else:
            from .pytorch import read_torch_zip

            inside = read_torch_zip(path)
        for name, tensor in inside.items():
            if shard_of.get(name, path.name) != path.name:
                continue  # a second copy; the index places the tensor elsewhere
            if name in tensors:
                raise CheckpointError(f"tensor {name!r} is both in {tensors[name].file.path} and in {path}")
            tensors[name] = tensor
    for name, shard in shard_of.items():
        if name not in tensors and name.endswith(OFTEN_TIED):
            logger.warning("%s: the index lists %s, which no file holds: left out", files[0].parent, name)
        elif name not in tensors:
            raise CheckpointError(
                f"tensor {name!r} is missing from {files[0].parent / shard}, where the index places it"
            )
    return tensors
