"""Small valid checkpoints of every layout, which `files` damages."""

import itertools
import json
import os
import shutil
import struct
from pathlib import Path
from random import Random

import numpy as np
from safetensors.numpy import load_file, save, save_file

from ..formats import torch_archive
from ..tiny import TOKENIZER

TESTS = Path(__file__).parents[1]
DEMO = TESTS.parent / "minillm" / "assets" / "demo-opt"
GOLDEN = sorted(path.parent for path in (TESTS / "golden").glob("*/*/config.json"))
TEMPLATES = sorted((TESTS / "data" / "chat_templates").glob("*.jinja"))
VOCABULARY = ("embed_tokens", "wte", "word_embeddings.weight", "embed_in", "embed_out", "lm_head")
SIZE = 512
"""Tokens, as the small tokenizer has them"""

GENERATION = {"bos_token_id": 2, "eos_token_id": [2], "max_new_tokens": 5, "do_sample": False, "temperature": 0.7}
GENERATION |= {"top_k": 40, "repetition_penalty": 1.1, "suppress_tokens": [7, 8], "transformers_version": "5.0.0"}


def write_seeds(folder: Path) -> list[Path]:
    """Write the checkpoints into folders of their own; returns these, the demo model's first."""
    demo = folder / "demo"
    shutil.copytree(DEMO, demo)
    seeds = [demo]
    weights = itertools.cycle([_one_file, _shards, _torch_file])
    tokenizers = itertools.cycle([_vocab_and_merges, _tokenizer_json, _sentencepiece])
    for golden, write_weights, write_tokenizer in zip(GOLDEN, weights, tokenizers, strict=False):
        seed = folder / f"{golden.parent.name}-{golden.name}"
        seed.mkdir()
        config = json.loads((golden / "config.json").read_text()) | {"vocab_size": SIZE}
        (seed / "config.json").write_text(json.dumps(config, indent=2))
        (seed / "generation_config.json").write_text(json.dumps(GENERATION, indent=2))
        write_weights(seed, {name: _enlarged(name, t) for name, t in load_file(golden / "model.safetensors").items()})
        write_tokenizer(seed)
        shutil.copyfile(TEMPLATES[len(seeds) % len(TEMPLATES)], seed / "chat_template.jinja")
        seeds.append(seed)
    return seeds


def copy_seed(seed: Path, target: Path) -> None:
    """A checkpoint again, its files as links: nobody may write into them."""
    target.mkdir()
    for path in seed.iterdir():
        os.link(path, target / path.name)


def _enlarged(name: str, tensor: np.ndarray) -> np.ndarray:
    if not any(part in name for part in VOCABULARY):
        return tensor
    return np.ascontiguousarray(np.resize(tensor, (SIZE, *tensor.shape[1:])))


def _one_file(folder: Path, tensors: dict[str, np.ndarray]) -> None:
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _shards(folder: Path, tensors: dict[str, np.ndarray]) -> None:
    halves = [dict(list(tensors.items())[i::2]) for i in range(2)]
    names = [f"model-0000{i + 1}-of-00002.safetensors" for i in range(2)]
    for name, half in zip(names, halves, strict=True):
        (folder / name).write_bytes(save(half))
    weight_map = {tensor: name for name, half in zip(names, halves, strict=True) for tensor in half}
    index = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))


def _torch_file(folder: Path, tensors: dict[str, np.ndarray]) -> None:
    kinds = {"float32": "FloatStorage", "float16": "HalfStorage"}
    views, storages = {}, {}
    for key, (name, values) in enumerate(tensors.items()):
        strides = [stride // values.itemsize for stride in values.strides]
        views[name] = torch_archive.tensor(
            torch_archive.tuple_of(*values.shape),
            torch_archive.tuple_of(*strides),
            store=torch_archive.storage(values.size, str(key), kinds[str(values.dtype)]),
        )
        storages[str(key)] = values.tobytes()
    torch_archive.write(folder / "pytorch_model.bin", torch_archive.dictionary(views), storages)


def _vocab_and_merges(folder: Path) -> None:
    for name in ("vocab.json", "merges.txt", "tokenizer_config.json"):
        shutil.copyfile(TOKENIZER / name, folder / name)
    roles = {"bos_token": "</s>", "eos_token": {"content": "</s>"}, "additional_special_tokens": ["<pad>"]}
    (folder / "special_tokens_map.json").write_text(json.dumps(roles))


def _tokenizer_json(folder: Path) -> None:
    from minillm.text.tokenizer import Tokenizer

    _vocab_and_merges(folder)
    (folder / "tokenizer.json").write_text(Tokenizer.from_folder(folder).to_json())
    (folder / "vocab.json").unlink()
    (folder / "merges.txt").unlink()


def _sentencepiece(folder: Path) -> None:
    (folder / "tokenizer.model").write_bytes(sentencepiece_model(Random(0)))
    settings = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "legacy": False, "eos_token": "</s>"}
    added = {"0": {"content": "<unk>", "special": True}, "1": {"content": "<s>", "special": True}}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"added_tokens_decoder": added}, indent=1))


def sentencepiece_model(rng: Random) -> bytes:
    """A BPE model of SentencePiece with byte fallback, written field by field."""
    letters = [chr(code) for code in range(97, 123)] + ["▁", ".", ","]
    pairs = sorted({rng.choice(letters) + rng.choice(letters) for _ in range(120)})
    pieces = [("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3)]
    pieces += [(f"<0x{byte:02X}>", 0.0, 6) for byte in range(256)]
    pieces += [(text, -float(rank), 1) for rank, text in enumerate(pairs + letters)]
    written = b""
    for text, score, kind in pieces:
        piece = _bytes_field(1, text.encode()) + b"\x15" + struct.pack("<f", score) + _number_field(3, kind)
        written += _bytes_field(1, piece)
    written += _bytes_field(2, _number_field(3, 2) + _number_field(35, 1))  # BPE with byte fallback
    return written + _bytes_field(3, _bytes_field(1, b"identity") + _number_field(4, 0))


def _number_field(number: int, value: int) -> bytes:
    return _varint(number << 3) + _varint(value)


def _bytes_field(number: int, data: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(data)) + data


def _varint(value: int) -> bytes:
    written = bytearray()
    while value >= 0x80:
        written.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*written, value])
