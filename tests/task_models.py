"""Tiny checkpoints of models for tasks, from random numbers, with tokenizers of a few words. No torch."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from minillm.backends.loader import RandomTensor
from minillm.models import config_of, tensor_shapes

WORDS = (
    *("the", "a", "cat", "dog", "bird", "sat", "ran", "on", "mat", "road", "house", "red", "blue", "big", "small"),
    *("and", "is", "was", "good", "bad", "how", "are", "you", "?"),
)
LANGUAGES = ("en_XX", "fr_XX", "fr_CA", "ro_RO")

# fmt: off
T5: dict[str, Any] = {
    "model_type": "t5", "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4,
    "relative_attention_num_buckets": 8, "relative_attention_max_distance": 16, "feed_forward_proj": "relu",
    "decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1, "tie_word_embeddings": False,
    "architectures": ["T5ForConditionalGeneration"],
    "task_specific_params": {
        "summarization": {"prefix": "the big: ", "num_beams": 2, "max_length": 9, "min_length": 3},
        "translation_en_to_fr": {"prefix": "the red: ", "max_length": 12, "num_beams": 3, "early_stopping": True},
        "translation_en_to_de": {"prefix": "the blue: ", "max_length": 12},
    },
}
BERT: dict[str, Any] = {
    "model_type": "bert", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
    "max_position_embeddings": 64, "pad_token_id": 0, "architectures": ["BertModel"],
}
# fmt: on
THREE_LABELS: dict[str, Any] = {
    "architectures": ["BertForSequenceClassification"],
    "id2label": {"0": "BAD", "1": "FAIR", "2": "GOOD"},
    "label2id": {"BAD": 0, "FAIR": 1, "GOOD": 2},
}
ONE_LABEL: dict[str, Any] = {
    "architectures": ["BertForSequenceClassification"],
    "id2label": {"0": "LABEL_0"},
    "label2id": {"LABEL_0": 0},
}


def word_tokenizer(kind: str, added: Sequence[str] = ()) -> Tokenizer:
    """A tokenizer of whole words: with T5's special tokens and form, or with BERT's."""
    special = ["<pad>", "</s>", "<unk>"] if kind == "t5" else ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    vocab = {word: i for i, word in enumerate([*special, *WORDS, ":", *added])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>" if kind == "t5" else "[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens([*special, *added])
    if kind == "t5":
        after = [("</s>", 1)] + ([(added[0], vocab[added[0]])] if added else [])  # mBART: the language of the source
        single = " ".join(["$A", *(token for token, _ in after)])
        tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=after)
    else:
        ends = [("[CLS]", 2), ("[SEP]", 3)]
        single, pair = "[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1"
        tokenizer.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=ends)
    return tokenizer


def write_weights(folder: Path, raw: dict[str, Any], seed: int = 0) -> None:
    """Random weights of a config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, np.ndarray] = {}
    for name, shape in tensor_shapes(config_of(raw)).items():
        tensors[name] = RandomTensor(name, shape, seed, 0.1 if name.endswith("bias") else 0.5).load()
        if "norm" in name.lower() and name.endswith("weight"):
            tensors[name] += 1
        if name == "final_logits_bias":  # of BART's kin: a row
            tensors[name] = tensors[name][None]
    save_file(tensors, folder / "model.safetensors")


def write_task_model(folder: Path, raw: dict[str, Any], *, added: Sequence[str] = (), seed: int = 0) -> Path:
    """A checkpoint folder: T5's or BERT's config.json, random weights, and a tokenizer of words."""
    kind = raw["model_type"]
    tokenizer = word_tokenizer(kind, added)
    raw = raw | {"vocab_size": tokenizer.get_vocab_size()}
    write_weights(folder, raw, seed)
    tokenizer.save(str(folder / "tokenizer.json"))
    roles = {"eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    if kind != "t5":
        roles = {"cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]", "unk_token": "[UNK]"}
    read = [
        "input_ids",
        "token_type_ids",
        "attention_mask",
    ]  # by transformers, whose pairs have types only if it is said
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 64, **roles}
    settings |= {"model_input_names": read} if kind != "t5" else {}
    for file, value in {"config": raw, "tokenizer_config": settings}.items():
        (folder / f"{file}.json").write_text(json.dumps(value), encoding="utf-8")
    return folder
