"""What tests of folders of sentence-transformers share: its modules, tiny models, texts, and scores of them."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers

pytest.importorskip("torch", reason="needs the reference extra")
pytest.importorskip("transformers", reason="needs the reference extra")

import torch
import transformers

from minillm import Engine

from ..task_models import BERT, word_tokenizer, write_task_model
from .late import Late

sentence_transformers = Late("sentence_transformers")
base = Late("sentence_transformers.base.modules")
parts = Late("sentence_transformers.sentence_transformer.modules")
cross_encoder = Late("sentence_transformers.cross_encoder.modules")
sparse = Late("sentence_transformers.sparse_encoder.modules")

TEXTS = ["the cat sat on the mat", "a dog ran", "how are you ?", "the red house", "a big blue bird and a small cat"]
PAIRS = [(TEXTS[0], text) for text in TEXTS[1:]]
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' %}big {{ m.content }} {% elif m.role == 'query' %}how "
    "{{ m.content }} {% elif m.role == 'document' %}are {{ m.content }} {% else %}you {{ m.content }} {% endif %}"
    "{% endfor %}{% if add_generation_prompt %}is good ?{% endif %}"
)
PARTS = TEMPLATE.replace("m.content", "m.content[0].text")


def close(ours: Any, theirs: Any) -> None:
    np.testing.assert_allclose(np.asarray(ours, np.float64), np.asarray(theirs, np.float64), rtol=0, atol=2e-4)


def encoder(folder: Path) -> Path:
    return write_task_model(folder / "plain", BERT)


def bytes_tokenizer() -> tokenizers.Tokenizer:
    """A tokenizer of single bytes, to which white space matters."""
    special = ["<pad>", "</s>", "<unk>"]
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    made = tokenizers.Tokenizer(tokenizers.models.BPE({text: i for i, text in enumerate([*special, *alphabet])}, []))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.add_special_tokens(special)
    return made


def write_decoder(
    folder: Path,
    kind: str = "LlamaForCausalLM",
    template: str | None = None,
    tokenizer: tokenizers.Tokenizer | None = None,
    **fields: Any,
) -> Path:
    """A tiny decoder, by default with a tokenizer of whole words."""
    if tokenizer is None:
        tokenizer = word_tokenizer("t5")
        tokenizer.post_processor = None
    config = transformers.LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
        initializer_range=0.4,
        **fields,
    )
    torch.manual_seed(0)
    getattr(transformers, kind)(config).eval().save_pretrained(folder)
    wrapped = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="</s>", pad_token="<pad>", unk_token="<unk>", model_max_length=64
    )
    wrapped.chat_template = template
    wrapped.save_pretrained(folder)
    return folder


def settings_of(folder: Path) -> Path:
    return folder / "config_sentence_transformers.json"


def edit(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def scores_of(folder: Path, pairs: Sequence[Any], **options: Any) -> list[list[float]]:
    """The scores of all labels of each pair, in the model's order."""
    with Engine(folder, backend="numpy", progress=False) as engine:
        found = engine.classify(list(pairs), **options)
    return [[label.score for label in sorted(one.labels, key=lambda label: label.index)] for one in found]
