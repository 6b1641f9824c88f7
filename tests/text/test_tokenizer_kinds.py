"""The kinds of tokenizer.json that the families are published with: against transformers, and streamed."""

import json
import random
from functools import cache, partial
from pathlib import Path

import pytest
import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers

from minillm.errors import PromptError
from minillm.text.tokenizer import Tokenizer

from ..tokenizing import TEXTS, assert_equal_to_transformers, folder_with, random_ids, random_texts, streamed

ROOT = Path(__file__).parents[2]
HELD_OUT = (ROOT / "minillm" / "assets" / "demo-opt" / "held_out.txt").read_text(encoding="utf-8").split("</s>")
CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
SIGNS_AND_SPACES = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
ADDED = ["<|im_start|>", "<|im_end|>", "<|eot_id|>", "<|turn|>"]
to_bytes = pre_tokenizers.ByteLevel


def split_then_bytes(pattern: str):
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    return pre_tokenizers.Sequence([split, to_bytes(add_prefix_space=False, use_regex=False)])


def begins_with(token: str, token_id: int):
    return processors.TemplateProcessing(single=f"{token} $A", special_tokens=[(token, token_id)])


def byte_level(pre_tokenizer, first: tuple[str, ...], normalizer=None, post_processor=None, ignore_merges=False):
    backend = tokenizers.Tokenizer(models.BPE(ignore_merges=ignore_merges))
    backend.pre_tokenizer, backend.decoder = pre_tokenizer, decoders.ByteLevel()
    if normalizer is not None:
        backend.normalizer = normalizer
    if post_processor is not None:
        backend.post_processor = post_processor
    alphabet = to_bytes.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=list(first), initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(HELD_OUT + TEXTS + ["Yes.\n\nNo!\n"] * 50, trainer)
    backend.add_special_tokens(ADDED)
    backend.add_tokens(["naïve word"])
    return backend


def byte_fallback(normalizer, pre_tokenizer, strip: bool):
    """BPE over "▁" with the bytes as tokens 3 to 258, as a converted SentencePiece model."""
    trained = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trained.train_from_iterator(
        HELD_OUT, trainers.BpeTrainer(vocab_size=700, special_tokens=special, show_progress=False)
    )
    model = json.loads(trained.to_str())["model"]
    merges = [tuple(pair) for pair in model["merges"]]
    backend = tokenizers.Tokenizer(
        models.BPE(model["vocab"], merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    if normalizer is not None:
        backend.normalizer = normalizer
    if pre_tokenizer is not None:
        backend.pre_tokenizer = pre_tokenizer
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    backend.post_processor = begins_with("<s>", 1)
    backend.add_special_tokens(special[:3] + ADDED)
    return backend


metaspace = partial(pre_tokenizers.Metaspace, split=False)
to_sign = normalizers.Replace(" ", "▁")
prepended = normalizers.Sequence([normalizers.Prepend("▁"), to_sign])
end_of_text = ("<|endoftext|>", "<|padding|>")
llama = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "add_bos_token": True, "add_eos_token": False}

KINDS = {  # name -> how it is made, tokenizer_config.json, config.json
    "gpt2": (
        lambda: byte_level(to_bytes(add_prefix_space=False), end_of_text[:1], post_processor=processors.ByteLevel()),
        {"model_max_length": 1024},
        {"model_type": "gpt2", "bos_token_id": 0, "eos_token_id": 0},
    ),
    "gpt_neox": (
        lambda: byte_level(to_bytes(add_prefix_space=False), end_of_text, normalizers.NFC(), processors.ByteLevel()),
        {"tokenizer_class": "GPTNeoXTokenizer", "bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"},
        {"model_type": "gpt_neox", "bos_token_id": 0, "eos_token_id": 0},
    ),
    "llama: a prefix before each part": (
        lambda: byte_fallback(prepended, None, strip=True),
        # Published as LlamaTokenizer: see tokenizer/layouts.py.
        {**llama, "tokenizer_class": "PreTrainedTokenizerFast", "legacy": True},
        {"model_type": "llama"},
    ),
    "llama: a prefix before the text": (
        lambda: byte_fallback(None, metaspace(prepend_scheme="first"), strip=True),
        {**llama, "tokenizer_class": "LlamaTokenizer", "legacy": False},
        {"model_type": "llama"},
    ),
    "mistral: a prefix before each part that has no space": (
        lambda: byte_fallback(None, metaspace(prepend_scheme="always"), strip=True),
        {**llama, "tokenizer_class": "LlamaTokenizer", "legacy": True},
        {"model_type": "mistral"},
    ),
    "mistral: no prefix": (
        lambda: byte_fallback(None, metaspace(prepend_scheme="never"), strip=False),
        {**llama, "tokenizer_class": "LlamaTokenizerFast", "legacy": False, "add_prefix_space": False},
        {"model_type": "mistral"},
    ),
    "llama 3": (
        lambda: byte_level(
            split_then_bytes(CONTRACTIONS + r"\p{N}{1,3}" + SIGNS_AND_SPACES),
            ("<|begin_of_text|>", "<|end_of_text|>"),
            post_processor=processors.Sequence(
                [processors.ByteLevel(trim_offsets=False), begins_with("<|begin_of_text|>", 0)]
            ),
            ignore_merges=True,
        ),
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<|begin_of_text|>",
            "eos_token": "<|eot_id|>",
            "clean_up_tokenization_spaces": True,
        },
        {"model_type": "llama", "bos_token_id": 0, "eos_token_id": [1, 602]},
    ),
    "qwen2": (
        lambda: byte_level(
            split_then_bytes(CONTRACTIONS + r"\p{N}" + SIGNS_AND_SPACES),
            end_of_text[:1],
            normalizers.NFC(),
            processors.ByteLevel(trim_offsets=False),
        ),
        {
            "tokenizer_class": "Qwen2Tokenizer",
            "bos_token": None,
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "add_bos_token": False,
            "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
        },
        {"model_type": "qwen2", "bos_token_id": 0, "eos_token_id": 601},
    ),
    "bloom": (
        lambda: byte_level(
            split_then_bytes(r" ?[^(\s|[.,!?…。，、।۔،])]+"),
            ("<unk>", "<s>", "</s>", "<pad>"),
            post_processor=processors.ByteLevel(trim_offsets=False),
        ),
        {
            "tokenizer_class": "BloomTokenizerFast",
            "bos_token": "<s>",
            "eos_token": "</s>",
            "unk_token": "<unk>",
            "pad_token": "<pad>",
        },
        {"model_type": "bloom", "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 3},
    ),
    "smollm2": (
        lambda: byte_level(
            pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), to_bytes(add_prefix_space=False)]),
            end_of_text[:1],
        ),
        {
            "tokenizer_class": "PreTrainedTokenizerFast",  # published as GPT2Tokenizer: see tokenizer/layouts.py
            "bos_token": "<|im_start|>",
            "eos_token": "<|im_end|>",
            "unk_token": "<|endoftext|>",
            "clean_up_tokenization_spaces": False,
        },
        {"model_type": "llama", "bos_token_id": 600, "eos_token_id": 601},
    ),
}


@cache
def made(kind: str) -> str:
    return KINDS[kind][0]().to_str()


@pytest.fixture(params=KINDS)
def folder(request, tmp_path) -> Path:
    """A checkpoint folder of one kind, without weights."""
    _, settings, config = KINDS[request.param]
    (tmp_path / "tokenizer.json").write_text(made(request.param), encoding="utf-8")
    return folder_with(tmp_path, tmp_path, tokenizer_config=settings, config=config)


@pytest.mark.reference
def test_each_kind_equals_transformers(folder):
    assert_equal_to_transformers(folder)


FRAMED = {"add_bos_token": True, "bos_token": "<|endoftext|>", "add_eos_token": True}


@pytest.mark.reference
@pytest.mark.parametrize(
    ("kind", "settings", "config"),
    [
        ("gpt2", {}, {"model_type": "gpt2"}),
        ("gpt2", FRAMED, {"model_type": "gpt2"}),
        ("gpt2", {"tokenizer_class": "GPT2Tokenizer"}, {"model_type": "llama"}),
        ("qwen2", {"bos_token": None}, {"model_type": "qwen2", "bos_token_id": 0}),
        ("qwen2", FRAMED, {"model_type": "qwen3"}),
        ("qwen2", {"bos_token": None, "tokenizer_class": "Qwen2TokenizerFast"}, {"model_type": "llama"}),
    ],
)
def test_vocab_and_merges_equal_transformers(tmp_path, kind, settings, config):
    model = json.loads(made(kind))["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]), encoding="utf-8")
    (tmp_path / "merges.txt").write_text("\n".join(map(" ".join, model["merges"])), encoding="utf-8")
    added = {600 + n: {"content": token, "special": True} for n, token in enumerate(ADDED)}
    named = {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>", "added_tokens_decoder": added}
    assert_equal_to_transformers(folder_with(tmp_path, tmp_path, tokenizer_config={**named, **settings}, config=config))


@pytest.mark.slow
def test_the_bytes_of_the_tokens_of_each_kind_are_those_of_the_text(folder):
    """Within a text: after a word. A special token, which is no text, is its name."""
    tokenizer = Tokenizer.from_folder(folder)
    context = tokenizer.encode("a word", add_special_tokens=False)
    for text in [text for text in TEXTS + random_texts(100) if "\ufffd" not in text]:
        ids = tokenizer.encode(text)
        textual = [token_id for token_id in ids if token_id not in tokenizer.special_ids]
        assert b"".join(map(tokenizer.token_bytes, textual)).decode() == streamed(tokenizer, textual, context)
    for token_id in tokenizer.special_ids:
        assert tokenizer.token_bytes(token_id).decode() == tokenizer.token(token_id)
    padded = tokenizer.for_model(tokenizer.vocab_size + 5)
    assert padded.token_bytes(tokenizer.vocab_size + 4) == b""
    with pytest.raises(PromptError):
        padded.token_bytes(tokenizer.vocab_size + 5)


@pytest.mark.slow
def test_each_kind_streams_what_it_decodes_after_any_context(folder):
    tokenizer = Tokenizer.from_folder(folder)
    draw = random.Random(10)
    sequences = [random_ids(tokenizer, draw, 8) for _ in range(100)]
    sequences += [tokenizer.encode(text) for text in TEXTS + random_texts(40)]
    for ids in sequences:
        whole = tokenizer.decode(ids)
        assert streamed(tokenizer, ids) == whole
        first = tokenizer.stream()
        before = ""
        for cut, token_id in enumerate(ids):  # a generation that begins where the context ends goes on as one stream
            assert before + streamed(tokenizer, ids[cut:], ids[:cut]) == whole
            before += first.push(token_id)


def test_only_the_first_token_of_a_text_loses_its_space(tmp_path):
    (tmp_path / "tokenizer.json").write_text(made("llama: a prefix before the text"), encoding="utf-8")
    tokenizer = Tokenizer.from_folder(folder_with(tmp_path, tmp_path, tokenizer_config=llama))
    space, newline, word = (tokenizer._backend.token_to_id(token) for token in ("<0x20>", "<0x0A>", "▁of"))
    for context, generated, text in [
        ([], [word, word], "of of"),
        ([1], [word], "of"),  # after BOS the text begins
        ([word], [word], " of"),
        ([newline], [word], " of"),
        ([word, 2], [word], " of"),  # a special token is no text
        ([word, 2, 1], [2, word], " of"),
        ([], [space, word], " of"),  # the byte of a space is lost as well
        ([], [newline, word], "\n of"),
    ]:
        assert streamed(tokenizer, generated, context) == text
        assert tokenizer.decode(context + generated) == tokenizer.decode(context) + text


# --- roles ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "config", "bos", "eos"),
    [
        ({"eos_token": "<|eot_id|>"}, {"eos_token_id": [1, 602]}, None, 602),  # the tokenizer's own name counts
        ({}, {"bos_token_id": 0, "eos_token_id": [1, 602]}, 0, 1),  # else the first of the list
        ({"bos_token": None}, {"bos_token_id": 0, "eos_token_id": []}, None, None),  # null: nobody's
        ({"eos_token": {"content": "<|im_end|>", "__type": "AddedToken"}}, {"eos_token_id": 602}, None, 601),
        (
            {"eos_token": "<|absent|>"},
            {"vocab_size": 605, "eos_token_id": 602},
            None,
            602,
        ),  # the model has no row for it
        ({"eos_token": "<|absent|>"}, {"vocab_size": 605, "eos_token_id": 10_000}, None, None),
        ({"eos_token": "<|absent|>"}, {"vocab_size": 606, "eos_token_id": 602}, None, 605),  # a row is left
    ],
)
def test_roles_are_the_tokenizers_first_and_the_models_second(tmp_path, settings, config, bos, eos):
    (tmp_path / "tokenizer.json").write_text(made("llama 3"), encoding="utf-8")
    tokenizer = Tokenizer.from_folder(folder_with(tmp_path, tmp_path, tokenizer_config=settings, config=config))
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (bos, eos)


@pytest.mark.parametrize("add_bos_token", [True, False])
def test_a_tokenizer_json_says_itself_what_comes_before_the_text(tmp_path, add_bos_token):
    settings = {"bos_token": "<|begin_of_text|>", "add_bos_token": add_bos_token, "add_eos_token": add_bos_token}
    (tmp_path / "tokenizer.json").write_text(made("llama 3"), encoding="utf-8")
    tokenizer = Tokenizer.from_folder(folder_with(tmp_path, tmp_path, tokenizer_config=settings))
    assert tokenizer.encode("red") == [0, *tokenizer.encode("red", add_special_tokens=False)]
