"""Reading weights from a folder or hub id as named tensors, and writing them. Independent of model code.

hub.py           folder or hub id -> local folder; downloads what is needed and nothing else
folder.py        local folder -> Checkpoint: which files hold the weights, shards merged
safetensors.py   one .safetensors file -> its tensors; tensors -> such files, written row by row
gguf.py          one GGUF file -> its metadata, and the places of its tensors (models/gguf.py makes a model of them)
pytorch.py       one pytorch_model.bin -> its tensors; the pickle inside is read without running it
tensors.py       StoredTensor: location of the values in a file, mapped or read

Files are untrusted: headers are checked before use, and a file that is shorter than its header says, or that changes
while a model is loaded, raises CheckpointError. Weights are mapped, not copied, where possible: while a model is in
use, its files must not be written to. Truncating one then ends the process (SIGBUS), which cannot be turned into an
error. To replace a checkpoint, write new files and rename them into place, as `quantize` and the hub's client do:
processes that have the old files open keep them.
"""

from .folder import ADAPTER_CONFIG, Checkpoint, open_adapter, open_checkpoint
from .hub import (
    SMALL_FILES,
    Cached,
    cached_models,
    find_adapter,
    find_config,
    find_file,
    find_model,
    find_tokenizer,
    list_hub_files,
)
from .tensors import StoredTensor

__all__ = [
    "ADAPTER_CONFIG",
    "SMALL_FILES",
    "Cached",
    "Checkpoint",
    "StoredTensor",
    "cached_models",
    "find_adapter",
    "find_config",
    "find_file",
    "find_model",
    "find_tokenizer",
    "list_hub_files",
    "open_adapter",
    "open_checkpoint",
]
