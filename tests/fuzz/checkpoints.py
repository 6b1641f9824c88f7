"""Small checkpoints without contradictions, whose files `conflicts` changes."""

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from ..cases.test_tokenizer_settings import BERT, ROLES, byte_level, byte_pairs, word_pieces
from ..encoders import BERT as SMALL_BERT
from ..huggingface import build_encoder, build_model

ROWS = {"bert": 40}
"""Rows of the embedding, a few more than the tokenizer has tokens: 266, BERT's 31"""
USUAL_ROWS = 280
PROMPT = [3, 20, 12, 30, 9, 25, 14]
"""In every vocabulary"""
SHAPE = {"vocab_size": USUAL_ROWS, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
SHAPE |= {"max_position_embeddings": 64}
MODELS: dict[str, dict[str, Any]] = {
    "llama": SHAPE | {"model_type": "llama", "intermediate_size": 40, "num_key_value_heads": 2},
    "qwen3": SHAPE | {"model_type": "qwen3", "intermediate_size": 40, "num_key_value_heads": 2, "head_dim": 16},
    "opt": SHAPE | {"model_type": "opt", "ffn_dim": 40, "word_embed_proj_dim": 32},
    "bart": {"model_type": "bart", "vocab_size": USUAL_ROWS, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1}
    | {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 40, "decoder_ffn_dim": 40}
    | {"max_position_embeddings": 64, "decoder_start_token_id": 2, "forced_eos_token_id": None, "pad_token_id": 2}
    | {"bos_token_id": 0, "eos_token_id": 1},
    "bert": SMALL_BERT | {"model_type": "bert", "num_hidden_layers": 1, "vocab_size": ROWS["bert"]},
}
TIED = {"qwen3": True}

TEXTS = (
    "hello <|im_end|> hello",
    " Hello World café naïve 日本 don't .",
    "<s>hello </s> <|im_end|>hello <|x|>  <pad> a token",
    "hello[MASK]\n<|x|> ello [SEP] world",
)


@dataclass
class Files:
    """A checkpoint folder before it is written."""

    kind: str
    """Of the seed"""
    objects: dict[str, Any]
    """JSON files by their names without the ending"""
    said: list[int] = field(default_factory=list)
    """Tokens that the model's greedy continuation has"""
    index: dict[str, str] = field(default_factory=dict)
    """Which of two files has a tensor, where the weights are in two"""
    weights: str = "usual"
    """Which of the seed's weights"""

    @property
    def config(self) -> dict[str, Any]:
        return self.objects["config"]

    @property
    def generation(self) -> dict[str, Any]:
        return self.objects.setdefault("generation_config", {})

    @property
    def settings(self) -> dict[str, Any]:
        return self.objects["tokenizer_config"]

    @property
    def rows(self) -> int:
        return ROWS.get(self.kind, USUAL_ROWS)

    def model(self) -> str:
        """What the model is read from, as text."""
        names = ("config", "generation_config", "model.safetensors.index")
        return json.dumps([self.kind, self.weights, [self.objects.get(name) for name in names]], sort_keys=True)

    def some_id(self, rng: Random) -> Any:
        """A token id: one that the model says, another, one beyond the vocabulary, none."""
        ids = [*self.said, *self.said, 0, 1, 2, rng.randrange(self.rows), self.rows - 1, self.rows]
        return rng.choice([*ids, None, -1, 10**6])


@dataclass(frozen=True)
class Seed:
    """A checkpoint without contradictions, in a folder of its own."""

    folder: Path
    files: Files

    def write(self, target: Path, files: Files) -> None:
        """A folder with changed files beside the seed's weights."""
        target.mkdir()
        for path in self.folder.iterdir():
            if path.suffix != ".json" and path.is_file():
                os.link(path, target / path.name)
        for path in (self.folder / files.weights).iterdir():
            os.link(path, target / path.name)
        for name, value in files.objects.items():
            text = json.dumps(value)
            (target / f"{name}.json").write_text(text, encoding="utf-8")


def write_seeds(folder: Path) -> list[Seed]:
    """One seed of each of the `MODELS`."""
    return [_write_seed(folder / kind, kind, raw) for kind, raw in MODELS.items()]


def _write_seed(folder: Path, kind: str, raw: dict[str, Any]) -> Seed:
    folder.mkdir()
    raw = raw | {"tie_word_embeddings": TIED.get(kind, kind in ("opt", "bart"))}
    model = build_encoder(raw, labels=False) if kind == "bert" else build_model(raw)
    model.save_pretrained(folder / "usual")
    _write_tokenizer(folder, kind)
    objects = {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}
    for path in (folder / "usual").glob("*.json"):
        objects[path.stem] = json.loads(path.read_text())
        path.unlink()
    said: list[int] = []
    if kind != "bert":
        objects["generation_config"] = {
            "no_repeat_ngram_size": 2,
            "bos_token_id": 0,
            "eos_token_id": 1,
            "pad_token_id": 2,
        }
        objects["generation_config"] |= {"decoder_start_token_id": 2} if kind == "bart" else {}
        said = _continuation(model)
    return Seed(folder, Files(kind, objects, said, _write_variants(folder)))


def _continuation(model: Any) -> list[int]:
    import torch

    fields = {"do_sample": False, "max_new_tokens": 6, "no_repeat_ngram_size": 2, "decoder_start_token_id": 2}
    lines = model.generate(torch.tensor([PROMPT]), **fields)
    ids: list[int] = lines[0].tolist()
    return ids[-6:]


def _write_tokenizer(folder: Path, kind: str) -> None:
    settings: dict[str, Any] = ROLES | {"pad_token": "<pad>"}
    if kind == "bert":
        word_pieces().save(str(folder / "tokenizer.json"))
        settings = BERT
    elif kind == "opt":
        vocab, merges = byte_pairs()
        (folder / "merges.txt").write_text("\n".join(" ".join(pair) for pair in merges), encoding="utf-8")
        (folder / "vocab.json").write_text(json.dumps(vocab))
        settings = settings | {"tokenizer_class": "GPT2Tokenizer", "unk_token": "</s>", "add_bos_token": True}
    else:
        byte_level().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def _write_variants(folder: Path) -> dict[str, str]:
    """The same weights in other types, with another head, and in two files. Returns the file of each tensor there."""
    tensors = load_file(folder / "usual" / "model.safetensors")
    half = {name: value.astype(np.float16) for name, value in tensors.items()}
    embedding = next(
        value for name, value in tensors.items() if "embed_tokens" in name or "word_emb" in name or "shared" in name
    )
    without = {name: value for name, value in tensors.items() if name != "lm_head.weight"}
    variants = {
        "float16": half,
        "without head": without,
        "tied head": {**without, "lm_head.weight": embedding.copy()},
        "another head": {**without, "lm_head.weight": embedding[::-1].copy()},
    }
    for name, values in variants.items():
        (folder / name).mkdir()
        save_file(values, folder / name / "model.safetensors", metadata={"format": "pt"})
    (folder / "shards").mkdir()
    halves = [dict(list(tensors.items())[i::2]) for i in range(2)]
    for i, values in enumerate(halves):
        save_file(values, folder / "shards" / f"{_shard(i)}", metadata={"format": "pt"})
    return {name: _shard(i) for i, values in enumerate(halves) for name in values}


def _shard(i: int) -> str:
    return f"model-0000{i + 1}-of-00002.safetensors"
