"""Reading weights: a folder or a hub id in, named tensors out; and writing them. Nothing here knows what a model is.

hub.py           folder or hub id -> local folder; downloads what is needed and nothing else
folder.py        local folder -> Checkpoint: which files hold the weights, shards merged
safetensors.py   one .safetensors file -> its tensors
pytorch.py       one pytorch_model.bin -> its tensors; the pickle inside is read without running it
tensors.py       StoredTensor: where the values lie in a file, and how to map or read them
writing.py       tensors -> safetensors files, in a folder that is complete or not there

What is promised of files that come from strangers: headers are checked before anything is taken from them, and a file
that is shorter than its header says, or that changes while a model is loaded, is a CheckpointError. Weights are mapped,
not copied, wherever that can be: for as long as a model is used, its files must not be written to. One that is cut
short then ends the process (the system's SIGBUS), which no program can turn into an error. To replace a checkpoint,
write new files and rename them into place, as `quantize` and the hub's client do: who has the old ones keeps them.
"""

from .folder import Checkpoint, open_checkpoint
from .hub import SMALL_FILES, find_config, find_model, find_tokenizer
from .tensors import StoredTensor

__all__ = [
    "SMALL_FILES",
    "Checkpoint",
    "StoredTensor",
    "find_config",
    "find_model",
    "find_tokenizer",
    "open_checkpoint",
]
