"""The formats of models on disk, behind one door: `open_model(path)` -> `ModelFiles`. Weights are named tensors.

load_model.py        open_model and the table of formats; a model on a backend, with LoRA adapters
model_files.py       the interface of a format: configuration, tensors, tokenizer, chat template, defaults
folder.py            a checkpoint folder; sentence_files.py: how its texts are embedded
static_folder.py     a folder of sentence-transformers whose vectors are looked up
gguf/                a GGUF file, read and written
schemes/             matrices in 8 or 4 bits: minillm's own, GPTQ, AWQ, ...
lora.py              adapters, merged into tensors or for single requests; lora_config.py: their configuration
canonical.py         published names -> those that a family's `build` asks for
hub.py               folder, file or hub id -> local path; downloads what is needed and nothing else
weight_files.py      folder -> which files hold the weights; their tensors, shards merged
safetensors.py       one .safetensors file -> its tensors; tensors -> such files, written row by row
pytorch.py           one pytorch_model.bin -> its tensors; the pickle inside is read without running it
tensors.py           StoredTensor: location of the values in a file, mapped or read
write_checkpoint.py  a checkpoint -> one with smaller weights

Files are untrusted: headers are checked before use, and a file that is shorter than its header says, or that changes
while a model is loaded, raises CheckpointError. Weights are mapped, not copied, where possible: while a model is in
use, its files must not be written to. Truncating one then ends the process (SIGBUS), which cannot be turned into an
error. To replace a checkpoint, write new files and rename them into place, as `quantize` and the hub's client do:
processes that have the old files open keep them.
"""

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
from .load_model import FORMATS, open_model
from .model_files import ModelFiles
from .tensors import StoredTensor
from .weight_files import ADAPTER_CONFIG, Checkpoint, open_adapter, open_checkpoint

__all__ = [
    "ADAPTER_CONFIG",
    "FORMATS",
    "SMALL_FILES",
    "Cached",
    "Checkpoint",
    "ModelFiles",
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
    "open_model",
]
