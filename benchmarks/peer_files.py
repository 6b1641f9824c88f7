"""The same random weights in the file format of every engine, for `against_peers.py`.

    python peer_files.py SHAPE FOLDER [ctranslate2] [f32] [f16] [bf16] [Q8_0] [Q4_0]

FOLDER becomes a Hugging Face checkpoint in float32, which minillm and transformers load; "ctranslate2" converts it, and
the other words are llama.cpp's formats, of which `peer_gguf.py` writes the first.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from peer_gguf import gguf_bytes, quantize_gguf, write_gguf

from minillm.backends.numpy import NumpyBackend
from minillm.backends.weights import Tensor
from minillm.models import published, published_config, tensor_shapes
from minillm.models.sources import random_tensors, transpose

Table = Mapping[str, Tensor]


class Published(NamedTuple):
    """How a family's checkpoints are published."""

    architecture: str
    prefix: str
    """Of every tensor's name but the LM head's"""


PUBLISHED = {
    "opt": Published("OPTForCausalLM", "model.decoder."),
    "gpt2": Published("GPT2LMHeadModel", "transformer."),
    "llama": Published("LlamaForCausalLM", "model."),
    "qwen2": Published("Qwen2ForCausalLM", "model."),
}


def write_checkpoint(shape: str, folder: Path) -> None:
    """The weights of `Engine.random(shape)` as a Hugging Face folder, with a tokenizer of words t0, t1 ..."""
    raw = raw_config(shape)
    special = {"bos_token_id": 2, "eos_token_id": 2, "pad_token_id": 1}
    architecture = PUBLISHED[raw["model_type"]].architecture
    config = raw | special | {"architectures": [architecture], "torch_dtype": "float32"}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    _write_safetensors(folder / "model.safetensors", _as_published(tensors_of(shape), raw["model_type"]))
    _write_tokenizer(folder, raw["vocab_size"])


def raw_config(shape: str) -> dict[str, Any]:
    """A shape as its config.json has it."""
    published_config(shape)  # refuses an unknown one
    return published()[shape]


def tensors_of(shape: str) -> dict[str, Tensor]:
    """The weights of `Engine.random(shape)`, by name."""
    return random_tensors(tensor_shapes(published_config(shape)), 0, 0.02, NumpyBackend())


def _as_published(tensors: Table, family: str) -> dict[str, Tensor]:
    """Under the names of published checkpoints; GPT-2's projections as [in, out]."""
    names = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    turned = tuple(f".{name}.weight" for name in names) if family == "gpt2" else ()
    published: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        prefix = "" if name == "lm_head.weight" else PUBLISHED[family].prefix
        published[prefix + name] = transpose(tensor) if name.endswith(turned) else tensor
    return published


def _write_safetensors(path: Path, tensors: Table) -> None:
    """Chunk by chunk: a model need not fit in memory."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + 4 * _count(tensor)
        entry = {"dtype": "F32", "shape": tensor.shape, "data_offsets": [begin, end]}
        header[name] = entry
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 64 + 56)  # with its length in front the header ends at a multiple of 64
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            for chunk in tensor.chunks():
                file.write(chunk.data)


def _count(tensor: Tensor) -> int:
    rows, *rest = tensor.shape
    return rows * (rest[0] if rest else 1)


def _write_tokenizer(folder: Path, vocab_size: int) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    words = {f"t{i}": i for i in range(vocab_size)}
    Tokenizer(WordLevel(words, unk_token="t3")).save(str(folder / "tokenizer.json"))
    special = {"bos_token": "t2", "eos_token": "t2", "pad_token": "t1", "unk_token": "t3"}
    config = special | {"tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")


def write_ctranslate2(folder: Path) -> None:
    """Convert the checkpoint, in float32; another type is made of it when it is loaded."""
    from ctranslate2.converters import TransformersConverter

    TransformersConverter(str(folder)).convert(str(folder / "ctranslate2"))


def write_llama_cpp(shape: str, folder: Path, formats: Sequence[str]) -> dict[str, int]:
    """llama.cpp's file of each format. Returns the bytes of each that a token needs."""
    source = folder / "f32.gguf"
    write_gguf(published_config(shape), raw_config(shape), tensors_of(shape), source)
    for form in formats:
        if form != "f32":
            quantize_gguf(source, folder / f"{form}.gguf", form)
    return {form: gguf_bytes(folder / f"{form}.gguf") for form in formats}


def main() -> None:
    """See the module's text. Prints, as JSON, the bytes that a token needs of each of llama.cpp's files."""
    shape, where, *wanted = sys.argv[1:]
    folder = Path(where)
    write_checkpoint(shape, folder)
    if "ctranslate2" in wanted:
        write_ctranslate2(folder)
    formats = [form for form in wanted if form != "ctranslate2"]
    print(json.dumps(write_llama_cpp(shape, folder, formats) if formats else {}))


if __name__ == "__main__":
    main()
