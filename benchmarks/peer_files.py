"""The same random weights in the file format of every engine, for `against_peers.py`.

    python peer_files.py SHAPE FOLDER [ctranslate2] [f32] [f16] [bf16] [Q8_0] [Q4_0]

FOLDER becomes a Hugging Face checkpoint in float32, which minillm and transformers load; "ctranslate2" converts it, and
the other words are llama.cpp's formats. llama.cpp does not run OPT, so it gets GPT-2's architecture with the same
matrices. That is the same work but for the activation: both normalise before attention, before the MLP and at the end,
have biases everywhere and learned positions, and tie the head to the embedding; GPT-2 has GELU where OPT has ReLU.
"""

import ctypes
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from minillm.backends.numpy import NumpyBackend
from minillm.backends.weights import Tensor
from minillm.models import opt
from minillm.models.base import random_tensors

Table = Mapping[str, Tensor]

LLAMA_TYPES = {"f16": "MOSTLY_F16", "bf16": "MOSTLY_BF16", "Q8_0": "MOSTLY_Q8_0", "Q4_0": "MOSTLY_Q4_0"}
"""Formats that llama.cpp makes of its f32 file; for Q4_0 it keeps the tied head in Q6_K by itself."""

GGUF_NAMES = {
    "token_embd.weight": ("embed_tokens.weight",),
    "position_embd.weight": ("embed_positions.weight",),
    "output_norm": ("final_layer_norm",),
}
GGUF_LAYER_NAMES = {
    "attn_norm": ("self_attn_layer_norm",),
    "attn_qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attn_output": ("self_attn.out_proj",),
    "ffn_norm": ("final_layer_norm",),
    "ffn_up": ("fc1",),
    "ffn_down": ("fc2",),
}
"""GPT-2's names in a GGUF file -> OPT's, of which several are one after the other; each with weight and bias."""


def write_checkpoint(shape: str, folder: Path) -> None:
    """The weights of `Engine.random(shape)` as a Hugging Face folder, with a tokenizer of words t0, t1 ..."""
    raw = opt.SHAPES[shape]
    names = {"bos_token_id": 2, "eos_token_id": 2, "pad_token_id": 1}
    config = raw | names | {"architectures": ["OPTForCausalLM"], "torch_dtype": "float32"}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    _write_safetensors(folder / "model.safetensors", tensors_of(shape))
    _write_tokenizer(folder, raw["vocab_size"])


def tensors_of(shape: str) -> dict[str, Tensor]:
    """The weights of `Engine.random(shape)`, by name."""
    return random_tensors(opt.tensor_table(opt.read_config(opt.SHAPES[shape])), 0, 0.02, NumpyBackend())


def _write_safetensors(path: Path, tensors: Table) -> None:
    """Chunk by chunk: a model need not fit in memory."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + 4 * _count(tensor)
        entry = {"dtype": "F32", "shape": tensor.shape, "data_offsets": [begin, end]}
        header[f"model.decoder.{name}"] = entry
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


def write_gguf(shape: str, path: Path) -> None:
    """The weights of a shape as a GGUF file of GPT-2's architecture in float32, without a vocabulary.

    Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
    """
    import gguf
    import numpy as np

    config = opt.read_config(opt.SHAPES[shape])
    tensors = tensors_of(shape)
    names = dict(_gguf_names(config.num_layers))
    writer = gguf.GGUFWriter(path, "gpt2")
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_positions)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_layer_norm_eps(opt.NORM_EPSILON)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("no_vocab")  # token ids come in and logits go out
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    for name, parts in names.items():
        rows = sum(_rows(name, tensors[part]) for part in parts)
        size = (rows, *tensors[parts[0]].shape[1:])
        writer.add_tensor_info(name, size, np.dtype(np.float32), 4 * int(np.prod(size)))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name, parts in names.items():
        writer.write_tensor_data(
            np.concatenate([tensors[part].load()[-_rows(name, tensors[part]) :] for part in parts])
        )
    writer.close()


def _rows(name: str, tensor: Tensor) -> int:
    """Rows of a tensor that GPT-2 has too: not the first ones of OPT's position table."""
    return tensor.shape[0] - (opt.POSITION_OFFSET if name == "position_embd.weight" else 0)


def _gguf_names(layers: int) -> Iterator[tuple[str, list[str]]]:
    """Every tensor's name in a GGUF file, and the names of what it is made of."""
    table = {name: list(parts) for name, parts in GGUF_NAMES.items()}
    for i in range(layers):
        table |= {f"blk.{i}.{n}": [f"layers.{i}.{p}" for p in parts] for n, parts in GGUF_LAYER_NAMES.items()}
    for name, parts in table.items():
        if name.endswith(".weight"):
            yield name, parts
        else:
            yield from ((f"{name}.{kind}", [f"{part}.{kind}" for part in parts]) for kind in ("weight", "bias"))


def quantize_gguf(source: Path, path: Path, form: str) -> None:
    """Have llama.cpp write a file in another format, as its own tool does.

    Raises:
        RuntimeError: it refuses.
    """
    import llama_cpp

    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_{LLAMA_TYPES[form]}")
    if llama_cpp.llama_model_quantize(str(source).encode(), str(path).encode(), ctypes.byref(params)):
        raise RuntimeError(f"llama.cpp could not write {path.name}")


def gguf_bytes(path: Path) -> int:
    """Bytes of the weights that one token needs: all but the position table."""
    import gguf

    tensors = gguf.GGUFReader(path).tensors
    return sum(int(tensor.n_bytes) for tensor in tensors if tensor.name != "position_embd.weight")


def main() -> None:
    """See the module's text. Prints, as JSON, the bytes that a token needs of each of llama.cpp's files."""
    shape, where, *wanted = sys.argv[1:]
    folder = Path(where)
    write_checkpoint(shape, folder)
    if "ctranslate2" in wanted:
        write_ctranslate2(folder)
    formats = [form for form in wanted if form != "ctranslate2"]
    if formats:
        write_gguf(shape, folder / "f32.gguf")
    for form in formats:
        if form != "f32":
            quantize_gguf(folder / "f32.gguf", folder / f"{form}.gguf", form)
    print(json.dumps({form: gguf_bytes(folder / f"{form}.gguf") for form in formats}))


if __name__ == "__main__":
    main()
