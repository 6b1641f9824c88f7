"""Tokenizers from GGUF metadata: against llama.cpp, transformers and the SentencePiece package, and what is refused."""

import io
import json
import random
import unicodedata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers, trainers

from minillm.errors import CheckpointError, UnsupportedModelError
from minillm.formats import open_model
from minillm.formats.gguf.tokenizer import BYTE, CONTROL, NORMAL, RULES, UNKNOWN, USER_DEFINED
from minillm.text.tokenizer.sentencepiece import merges_by_score

from ..gguf_files import LLAMA, write_llama

CORPUS = (Path(__file__).parents[1] / "real" / "alice.txt").read_text(encoding="utf-8") * 2
UNMERGED, SPECIAL = "Qwxyz", ["<|begin|>", "<|end|>"]

TEXTS = [
    *("", "a", " ", "  ", "   x", "\n\n\n", "Hello, world!", "héllo ünïcödé", "日本語テスト", "🙂🙃👩‍👩‍👧‍👦"),
    *("1234567 89.01", "a\tb\r\nc", "\x01\x7f", "don't I'LL we've", "x" * 100, " " * 17 + "y", "ﬁ ﬂ \u200d\u202e"),
    *("١٢٣ ४५६ Ⅷ ²", "MixedCASE camelCase", UNMERGED, "\u00a0nb\u3000sp", "𝕳𝖊𝖑𝖑𝖔", "… — “q”", '{"a": [1, 2.5e-3]}'),
    *("<|begin|>user\nhi<|end|>", "<|end|><|end|> x", " <|begin|> ", "<|beg", "def f(x):\n    return x**2\n"),
]


def odd_texts(count: int) -> list[str]:
    """Random texts of letters, digits, spaces, signs and scripts."""
    rng = random.Random(0)
    pool = "ab cdE1239 \n\t'!,.é日🙂\u00a0\u200bΩж٣"
    texts = ["".join(rng.choice(pool) for _ in range(rng.randrange(1, 25))) for _ in range(count)]
    scripts = [(32, 0x250), (0x370, 0x2000), (0x3041, 0xD7FF), (0x1F300, 0x1F700)]
    texts += [
        "".join(chr(rng.randrange(*rng.choice(scripts))) for _ in range(rng.randrange(1, 12))) for _ in range(count)
    ]
    return texts


def bpe(size: int = 600) -> dict[str, Any]:
    """Entries of a byte-level tokenizer trained on a page, a token that no merge makes, and two control tokens."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size - 3, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator([CORPUS], trainer)
    vocab = backend.get_vocab()
    merges = [" ".join(merge) for merge in json.loads(backend.to_str())["model"]["merges"]]
    tokens = [*sorted(vocab, key=vocab.get), UNMERGED, *SPECIAL]
    return {
        "tokens": tokens,
        "token_type": [NORMAL] * (len(tokens) - 2) + [CONTROL] * 2,
        "merges": merges,
        "bos_token_id": len(tokens) - 2,
        "eos_token_id": len(tokens) - 1,
    }


def sentencepiece(**options: Any) -> tuple[Any, dict[str, Any]]:
    """A SentencePiece BPE model trained on a page, and the entries that llama.cpp's converter makes of it."""
    import sentencepiece as spm

    model = io.BytesIO()
    settings = {"vocab_size": 600, "model_type": "bpe", "byte_fallback": True, "user_defined_symbols": ["<|end|>"]}
    spm.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS.split("\n")), model_writer=model, minloglevel=2, **settings | options
    )
    found = spm.SentencePieceProcessor(model_proto=model.getvalue())
    ids = range(len(found))

    def kind(i: int) -> int:
        if found.is_unknown(i):
            return UNKNOWN
        if found.is_control(i):
            return CONTROL
        if found.is_byte(i):
            return BYTE
        return USER_DEFINED if found.id_to_piece(i) == "<|end|>" else NORMAL

    return found, {
        "model": "llama",
        "pre": "default",
        "merges": None,
        "tokens": [found.id_to_piece(i) for i in ids],
        "scores": [found.get_score(i) for i in ids],
        "token_type": [kind(i) for i in ids],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    }


def written(path: Path, entries: dict[str, Any]) -> Path:
    """A tiny model with this tokenizer."""
    write_llama(path, LLAMA | {"vocab_size": len(entries["tokens"])}, tokenizer=entries)
    return path


def llama_cpp(path: Path) -> Any:
    package = pytest.importorskip("llama_cpp")
    return package.Llama(str(path), vocab_only=True, verbose=False)


def test_byte_level_equals_the_library_it_was_trained_with(tmp_path):
    entries = bpe()
    tokenizer = open_model(written(tmp_path / "m.gguf", entries)).tokenizer
    own = Backend(
        models.BPE(
            vocab={token: i for i, token in enumerate(entries["tokens"])},
            merges=[tuple(merge.split(" ")) for merge in entries["merges"]],
        )
    )
    own.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    for text in TEXTS[:-5]:
        assert tokenizer.encode(text) == own.encode(text).ids, text
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (598, 599)
    assert tokenizer.end_ids == (599,)
    assert tokenizer.encode("<|begin|>a")[0] == 598


def test_sentencepiece_equals_the_package(tmp_path):
    model, entries = sentencepiece()
    tokenizer = open_model(written(tmp_path / "m.gguf", entries)).tokenizer
    for text in [*TEXTS[:-5], *odd_texts(100)]:
        if text.startswith(" ") or "  " in text or text.strip() != text or "ﬁ" in text or not text.isprintable():
            continue  # the package normalises white space and Unicode; GGUF files do not say so
        if model.normalize(text) != "▁" + text.replace(" ", "▁"):
            continue
        assert tokenizer.encode(text, add_special_tokens=False) == model.encode(text), text
    assert tokenizer.encode("a")[0] == 1
    assert tokenizer.decode(tokenizer.encode("a b")) == "a b"


@pytest.mark.reference
@pytest.mark.parametrize("rules", sorted(RULES))
def test_rules_equal_llama_cpp(tmp_path, rules):
    path = written(tmp_path / "m.gguf", bpe() | {"pre": rules})
    ours, theirs = open_model(path).tokenizer, llama_cpp(path)
    for text in TEXTS + odd_texts(200):
        if RULES[rules].nfc:  # which llama.cpp leaves out
            text = unicodedata.normalize("NFC", text)
        assert ours.encode(text) == theirs.tokenize(text.encode(), add_bos=True, special=True), text


def test_qwen2_normalises_as_its_published_tokenizer_does(tmp_path):
    tokenizer = open_model(written(tmp_path / "m.gguf", bpe() | {"pre": "qwen2"})).tokenizer
    assert tokenizer.encode("e\u0301") == tokenizer.encode("\u00e9")


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (
            {"pre": "no-such"},
            UnsupportedModelError,
            "tokenizer.ggml.pre is 'no-such'; minillm has the rules of a.x-4.0, bloom,",
        ),
        ({"model": "rwkv"}, UnsupportedModelError, "tokenizer.ggml.model is 'rwkv'; minillm runs 'gpt2' .* 'llama'"),
        ({"model": 7}, CheckpointError, "tokenizer.ggml.model should be of type str, found 7"),
        ({"token_type": [1] * 3}, CheckpointError, "tokenizer.ggml.token_type should have 600 numbers, found 3"),
        (
            {"merges": None},
            CheckpointError,
            "byte-level BPE tokenizer without merges: tokenizer.ggml.merges is missing",
        ),
        ({"merges": ["a qqq"]}, CheckpointError, "tokenizer.ggml.merges, 0: 'a qqq' does not make a token"),
        ({"merges": ["a \u0103"]}, CheckpointError, "tokenizer.ggml.merges, 0: 'a \u0103' does not make a token"),
        ({"merges": [3]}, CheckpointError, "tokenizer.ggml.merges should be an array of strings"),
        ({"model": "llama"}, CheckpointError, "tokenizer.ggml.scores should have 600 numbers, found none"),
        ({"add_bos_token": True, "bos_token_id": None}, CheckpointError, "begin with the BOS token, and its metadata"),
    ],
)
def test_broken_metadata_are_refused(tmp_path, changes, error, message):
    path = written(tmp_path / "m.gguf", bpe() | changes)
    with pytest.raises(error, match=message):
        _ = open_model(path).tokenizer


def test_a_token_that_stands_twice_is_refused(tmp_path):
    entries = bpe()
    entries["tokens"][300] = entries["tokens"][301]
    with pytest.raises(CheckpointError, match=r"tokenizer\.ggml\.tokens has the token .* twice"):
        _ = open_model(written(tmp_path / "m.gguf", entries)).tokenizer


def test_without_rules_a_text_is_split_as_llama_cpp_does_with_a_warning(tmp_path, caplog):
    named = open_model(written(tmp_path / "named.gguf", bpe() | {"pre": "default"})).tokenizer
    unnamed = open_model(written(tmp_path / "unnamed.gguf", bpe() | {"pre": None})).tokenizer
    assert "does not say how a text is split (tokenizer.ggml.pre): read as 'default'" in caplog.text
    for text in TEXTS:
        assert unnamed.encode(text) == named.encode(text)


def test_a_file_without_a_tokenizer_has_none(tmp_path):
    assert open_model(written(tmp_path / "m.gguf", {"tokens": ["a"] * 320, "model": "none"})).tokenizer is None


@pytest.mark.reference
@pytest.mark.parametrize("changes", [{}, {"add_space_prefix": False}, {"add_bos_token": False, "add_eos_token": True}])
def test_sentencepiece_equals_llama_cpp(tmp_path, changes):
    path = written(tmp_path / "m.gguf", sentencepiece()[1] | changes)
    ours, theirs = open_model(path).tokenizer, llama_cpp(path)
    for text in TEXTS + odd_texts(400):
        assert ours.encode(text) == theirs.tokenize(text.encode(), add_bos=True, special=True), text


def gemma4() -> dict[str, Any]:
    """The pieces of a SentencePiece model, with merges in the order of their scores and runs of newlines."""
    entries = sentencepiece()[1]
    kinds = entries["token_type"]
    pieces = {token: i for i, token in enumerate(entries["tokens"]) if kinds[i] in (NORMAL, USER_DEFINED)}
    merges = merges_by_score(pieces, np.array(entries["scores"]))
    newlines = ["\n" * count for count in (1, 2, 3)]
    return entries | {
        "model": "gemma4",
        "pre": None,
        "tokens": entries["tokens"] + newlines,
        "scores": entries["scores"] + [0.0] * 3,
        "token_type": entries["token_type"] + [NORMAL] * 3,
        "merges": [" ".join(merge) for merge in merges] + ["\n \n", "\n\n \n"],
        "add_space_prefix": False,
    }


@pytest.mark.reference
def test_gemma_4s_tokenizer_equals_llama_cpp(tmp_path):
    path = written(tmp_path / "m.gguf", gemma4())
    ours, theirs = open_model(path).tokenizer, llama_cpp(path)
    for text in [*TEXTS, "a\n\nb\n\n\n\nc\n", *odd_texts(400)]:
        assert ours.encode(text) == theirs.tokenize(text.encode(), add_bos=True, special=True), text


def test_gemma_4s_tokenizer_is_sentencepieces_with_merges_and_begins_with_bos(tmp_path):
    merged = open_model(written(tmp_path / "merged.gguf", gemma4() | {"add_bos_token": False})).tokenizer
    scored = open_model(written(tmp_path / "m.gguf", sentencepiece()[1] | {"add_space_prefix": False})).tokenizer
    for text in (text for text in [*TEXTS, *odd_texts(50)] if "\n" not in text):
        assert merged.encode(text) == scored.encode(text), text
    assert merged.encode("a")[0] == 1
    assert merged.decode(merged.encode("a b\n\nc")) == "a b\n\nc"
