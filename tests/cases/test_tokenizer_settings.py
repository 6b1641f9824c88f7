"""What stands beside a vocabulary is honoured: tokens, flags, normalisation, spaces, ends; or it is named."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from minillm import Engine
from minillm.errors import CheckpointError
from minillm.formats.gguf.tokenizer import CONTROL, UNUSED
from minillm.formats.gguf.tokenizer_entries import gguf_entries
from minillm.text.tokenizer import Tokenizer, encode_texts
from minillm.text.tokenizer.cleaning import RULES, Cleaner, cleaned
from minillm.text.tokenizer.settings import HONOURED, WITHOUT_EFFECT, warn_unknown

from ..tiny import write_checkpoint
from ..tokenizing import streamed

TEXT = "hello <|im_end|> hello"
TEXTS = [
    TEXT,
    "hello",
    " hello  world",
    "Hello World Café naïve 日本 don't .",
    "<s>hello </s> <|im_end|>hello <|x|>  <pad>",
    "hello<|im_end|>\n<|x|> ello",
    "[CLS] hello [MASK] [SEP]",
    "",
]
ROLES = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
FLAGS = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False, "special": True}
END, OTHER = FLAGS | {"content": "<|im_end|>"}, FLAGS | {"content": "<|x|>"}
MERGES = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ġ", "w"), ("o", "r"), ("Ġw", "or")]
PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "hello", "world", "Hello", "World", "caf", "##é", "##e", "Caf"]
PIECES += ["日", "本", "日本", "don", "'", "t", ".", "naive", "<", "|", ">", "im", "_", "end", "/", "s", "x", "[", "]"]


# --- layouts ----------------------------------------------------------------------------------------------------------


def byte_pairs(special: tuple[str, ...] = ("<s>", "</s>", "<pad>")) -> tuple[dict[str, int], list[tuple[str, str]]]:
    vocab = {token: i for i, token in enumerate([*special, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    for left, right in MERGES:
        vocab.setdefault(left + right, len(vocab))
    return vocab, MERGES


def byte_level(prefix: bool = False) -> Backend:
    """266 tokens: three special ones, the bytes, and seven merges."""
    backend = Backend(models.BPE(*byte_pairs()))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(prefix), decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>", "<pad>"])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return backend


def word_pieces(lower: bool = True) -> Backend:
    backend = Backend(models.WordPiece({token: i for i, token in enumerate(PIECES)}, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=lower)
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    backend.add_special_tokens(PIECES[:5])
    return backend


def unigrams(scheme: str = "always") -> Backend:
    entries = [("<s>", 0.0), ("</s>", 0.0), ("<pad>", 0.0), ("<unk>", 0.0), ("▁hello", -1.0), ("▁", -2.0)]
    entries += [(letter, -3.0) for letter in sorted(set("".join(TEXTS)) - {" ", "\n"})]
    backend = Backend(models.Unigram(entries, unk_id=3))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    backend.decoder = decoders.Metaspace(prepend_scheme=scheme)
    backend.add_special_tokens(["<s>", "</s>", "<pad>", "<unk>"])
    return backend


BERT = {"cls_token": "[CLS]", "sep_token": "[SEP]", "unk_token": "[UNK]", "pad_token": "[PAD]", "mask_token": "[MASK]"}
BERT |= {"tokenizer_class": "BertTokenizer"}


def write(folder: Path, **objects: Any) -> None:
    for name, value in objects.items():
        (folder / f"{name}.json").write_text(json.dumps(value), encoding="utf-8")


def tokenizer_json(made: Callable[[], Backend], roles: dict[str, Any], family: str) -> Callable[..., Path]:
    def written(folder: Path, settings: dict[str, Any], rows: int = 400) -> Path:
        made().save(str(folder / "tokenizer.json"))
        write(folder, tokenizer_config=roles | settings, config={"model_type": family, "vocab_size": rows})
        return folder

    return written


def vocab_and_merges(folder: Path, settings: dict[str, Any], rows: int = 400) -> Path:
    vocab, merges = byte_pairs(("<|endoftext|>", "<s>", "</s>", "<pad>"))
    (folder / "merges.txt").write_text("\n".join(" ".join(pair) for pair in merges), encoding="utf-8")
    roles = {"tokenizer_class": "GPT2Tokenizer"}
    write(folder, vocab=vocab, tokenizer_config=roles | settings, config={"model_type": "gpt2", "vocab_size": rows})
    return folder


def vocab_txt(folder: Path, settings: dict[str, Any], rows: int = 400) -> Path:
    (folder / "vocab.txt").write_text("\n".join(PIECES) + "\n", encoding="utf-8")
    write(folder, tokenizer_config=BERT | settings, config={"model_type": "bert", "vocab_size": rows})
    return folder


LAYOUTS: dict[str, Callable[..., Path]] = {
    "bytes": tokenizer_json(byte_level, ROLES, "llama"),
    "bytes, Qwen2": tokenizer_json(byte_level, ROLES | {"tokenizer_class": "PreTrainedTokenizerFast"}, "qwen3"),
    "words": tokenizer_json(word_pieces, BERT, "bert"),
    "words of another class": tokenizer_json(
        word_pieces, BERT | {"tokenizer_class": "PreTrainedTokenizerFast"}, "bert"
    ),
    "unigrams": tokenizer_json(unigrams, ROLES | {"unk_token": "<unk>"}, "llama"),
    "vocab.json and merges.txt": vocab_and_merges,
    "vocab.txt": vocab_txt,
}
SETTINGS: dict[str, dict[str, Any]] = {
    "none": {},
    "further tokens": {"extra_special_tokens": ["<|im_end|>", "<|x|>"]},
    "further tokens, older name": {"additional_special_tokens": ["<|im_end|>", "<|x|>"]},
    "further tokens, a table": {"extra_special_tokens": {"image_token": "<|im_end|>", "x_token": "<|x|>"}},
    "further tokens with flags": {
        "extra_special_tokens": [{"__type": "AddedToken", "content": "<|x|>", **FLAGS, "lstrip": True}, "<|im_end|>"]
    },
    "a named token": {"image_token": "<|im_end|>", "eos_token": "<|x|>"},
    "named tokens, some new": {"pad_token": "<|new pad|>", "mask_token": "<|im_end|>", "eos_token": "<|new end|>"},
    "both names": {"extra_special_tokens": ["<|x|>"], "additional_special_tokens": ["<|im_end|>"]},
    "special tokens are split": {"split_special_tokens": True, "extra_special_tokens": ["<|x|>"]},
    "spaces are cleaned": {"clean_up_tokenization_spaces": True},
    "spaces are cleaned of all": {
        "clean_up_tokenization_spaces": True,
        "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output": True,
    },
    "cased": {"do_lower_case": False},
    "lower case": {"do_lower_case": True},
    "lower case with accents": {"do_lower_case": True, "strip_accents": False},
    "cased without accents": {"do_lower_case": False, "strip_accents": True},
    "Chinese in words": {"tokenize_chinese_chars": False},
    "older settings": {"never_split": ["hello"], "do_basic_tokenize": False, "trim_offsets": True, "errors": "replace"},
    "lengths and sides": {"model_max_length": 4, "padding_side": "left", "truncation_side": "left", "max_length": 3},
}


TABLES: dict[str, Callable[[int], dict[str, Any]]] = {
    "special": lambda size: {str(size): END},
    "text": lambda size: {str(size): END | {"special": False, "normalized": True}, str(size + 1): OTHER},
    "taking spaces": lambda size: {str(size): END | {"lstrip": True, "rstrip": True}},
    "a whole word": lambda size: {str(size): FLAGS | {"content": "ello", "single_word": True, "special": False}},
}
"""Tables of added tokens for a vocabulary of a number of tokens"""


def folder_for(tmp_path: Path, layout: str, settings: dict[str, Any]) -> Path:
    return LAYOUTS[layout](tmp_path, settings)


def assert_same(folder: Path) -> None:
    """Ids, text and special tokens are transformers'."""
    transformers = pytest.importorskip("transformers")
    ours, theirs = Tokenizer.from_folder(folder), transformers.AutoTokenizer.from_pretrained(folder)
    assert (ours.eos_token_id, ours.vocab_size) == (theirs.eos_token_id, len(theirs))
    assert ours.special_ids == {i for i, token in theirs.added_tokens_decoder.items() if token.special}
    for text in TEXTS:
        ids = theirs(text)["input_ids"]
        assert ours.encode(text) == ids, text
        assert ours.encode(text, add_special_tokens=False) == theirs.encode(text, add_special_tokens=False), text
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True), text
        assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids), text
    draw = random.Random(1)
    for _ in range(30):
        ids = draw.choices([i for i in range(ours.vocab_size) if ours._call("id_to_token", i)], k=8)
        assert streamed(ours, ids) == ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


@pytest.mark.reference
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_settings_beside_a_vocabulary_do_what_they_do_in_transformers(
    tmp_path: Path, layout: str, settings: str
) -> None:
    assert_same(LAYOUTS[layout](tmp_path, SETTINGS[settings]))


@pytest.mark.reference
@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_tokens_that_only_the_settings_list_are_tokens(tmp_path: Path, layout: str, table: str) -> None:
    size = Tokenizer.from_folder(LAYOUTS[layout](tmp_path, {})).vocab_size
    assert_same(LAYOUTS[layout](tmp_path, {"added_tokens_decoder": TABLES[table](size)}))


@pytest.mark.reference
@pytest.mark.parametrize(
    "named",
    [
        {"extra_special_tokens": ["<|im_end|>", "<|x|>"]},
        {"extra_special_tokens": {"image_token": "<|im_end|>"}},
        {"eos_token": "<|im_end|>"},
    ],
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_token_that_one_key_calls_special_and_another_does_not_is_what_transformers_makes_of_it(
    tmp_path: Path, layout: str, named: dict[str, Any]
) -> None:
    size = Tokenizer.from_folder(LAYOUTS[layout](tmp_path, {})).vocab_size
    assert_same(LAYOUTS[layout](tmp_path, {"added_tokens_decoder": TABLES["text"](size)} | named))


@pytest.mark.reference
@pytest.mark.parametrize("layout", LAYOUTS)
def test_flags_of_the_settings_replace_those_of_the_vocabulary(tmp_path: Path, layout: str) -> None:
    name = Tokenizer.from_folder(LAYOUTS[layout](tmp_path, {})).token(1)
    changed = FLAGS | {"content": name, "lstrip": True, "rstrip": True}
    folder = LAYOUTS[layout](tmp_path, {"added_tokens_decoder": {"1": changed}})
    assert_same(folder)
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.encode(f"a {name} a", add_special_tokens=False) == tokenizer.encode(
        f"a{name}a", add_special_tokens=False
    )


@pytest.mark.reference
@pytest.mark.parametrize("special", [{}, {"eos_token": "<|im_end|>"}])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_tokens_of_older_files_are_tokens(tmp_path: Path, layout: str, special: dict[str, Any]) -> None:
    folder = LAYOUTS[layout](tmp_path, {})
    size = Tokenizer.from_folder(folder).vocab_size
    write(folder, added_tokens={"<|im_end|>": size, "<|x|>": size + 1}, special_tokens_map=special)
    assert_same(folder)


def spaces(scheme: str, *, prepend: bool = False) -> Backend:
    """BPE over SentencePiece's sign for a space."""
    letters = sorted(set("".join(TEXTS)) - {" "})
    vocab = {token: i for i, token in enumerate(["<unk>", "<s>", "</s>", "▁", *letters, "he", "▁he"])}
    backend = Backend(models.BPE(vocab, [("h", "e"), ("▁", "he")], unk_token="<unk>", fuse_unk=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    if prepend:
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    backend.decoder = decoders.Sequence(steps if scheme != "never" else steps[:-1])
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return backend


PREFIXES: dict[str, tuple[Callable[[], Backend], str, str]] = {  # what the file says, class, family
    "bytes": (byte_level, "GPT2Tokenizer", "opt"),
    "bytes with a space": (lambda: byte_level(True), "GPT2Tokenizer", "opt"),
    "bytes, general class": (lambda: byte_level(True), "PreTrainedTokenizerFast", "llama"),
    "pieces": (lambda: spaces("first"), "LlamaTokenizer", "llama"),
    "pieces without a space": (lambda: spaces("never"), "LlamaTokenizer", "llama"),
    "pieces, a family read as written": (lambda: spaces("first"), "LlamaTokenizer", "mistral"),
    "pieces, general class": (lambda: spaces("first", prepend=True), "PreTrainedTokenizerFast", "llama"),
}


@pytest.mark.reference
@pytest.mark.parametrize("prefix", [True, False])
@pytest.mark.parametrize("name", PREFIXES)
def test_a_space_before_the_text_is_as_the_settings_say(tmp_path: Path, name: str, prefix: bool) -> None:
    made, kind, family = PREFIXES[name]
    roles = ROLES | {"tokenizer_class": kind, "unk_token": "<unk>" if "pieces" in name else "<s>"}
    assert_same(tokenizer_json(made, roles, family)(tmp_path, {"add_prefix_space": prefix}))


def test_a_prefix_that_the_normalizer_writes_is_removed_and_added(tmp_path: Path) -> None:
    llama = ROLES | {"tokenizer_class": "LlamaTokenizer"}
    ids = {}
    for prefix in (None, True, False):
        folder = tokenizer_json(lambda: spaces("", prepend=True), llama, "llama")(
            tmp_path, {"add_prefix_space": prefix}
        )
        ids[prefix] = [Tokenizer.from_folder(folder).token(i) for i in Tokenizer.from_folder(folder).encode("he he")]
    assert ids[None] == ids[True] == [" he", " he"]
    assert ids[False] == ["he", " he"]


NAMED_TWICE: dict[str, dict[str, Any]] = {
    "objects that do not say whether they are special": {
        "extra_special_tokens": [{"__type": "AddedToken", "content": "<|x|>"}, "<|im_end|>"]
    },
    "an object that is not special, and a role": {
        "extra_special_tokens": [{"__type": "AddedToken", "content": "<|x|>", "special": False}],
        "mask_token": "<|x|>",
    },
    "two flags of a token": {
        "mask_token": {"__type": "AddedToken", "content": "<|x|>", "rstrip": True, "special": True},
        "extra_special_tokens": [{"__type": "AddedToken", "content": "<|x|>", "lstrip": True, "special": True}],
    },
    "a table under one name, a list under the other": {
        "extra_special_tokens": {"image_token": "<|x|>"},
        "additional_special_tokens": ["<|im_end|>"],
    },
    "tables under both names": {
        "extra_special_tokens": {"image_token": "<|x|>"},
        "additional_special_tokens": {"image_token": "ello", "end_token": "<|im_end|>"},
    },
}
"""Settings that name a token in several places, or in two ways"""


@pytest.mark.reference
@pytest.mark.parametrize("name", NAMED_TWICE)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_further_tokens_that_the_settings_name_in_two_ways_are_what_transformers_makes_of_them(
    tmp_path: Path, layout: str, name: str
) -> None:
    assert_same(LAYOUTS[layout](tmp_path, NAMED_TWICE[name]))


@pytest.mark.reference
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mine", [["<|x|>"], {"image_token": "<|x|>"}])
@pytest.mark.parametrize(
    "theirs",
    [["<|im_end|>"], [{"content": "<|im_end|>"}], {"end_token": "<|im_end|>"}],
    ids=["text", "object", "table"],
)
def test_further_tokens_of_both_files_are_joined(tmp_path: Path, layout: str, mine: Any, theirs: Any) -> None:
    folder = LAYOUTS[layout](tmp_path, {"extra_special_tokens": mine})
    write(folder, special_tokens_map={"extra_special_tokens": theirs})
    assert_same(folder)


def changed_vocabulary(folder: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    value = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    change(value)
    write(folder, tokenizer=value)
    return folder


@pytest.mark.reference
@pytest.mark.parametrize("layout", ["bytes", "words", "words of another class", "unigrams"])
@pytest.mark.parametrize("table", [False, True])
def test_a_token_of_the_vocabulary_that_is_special_by_its_role_alone(tmp_path: Path, layout: str, table: bool) -> None:
    def change(value: dict[str, Any]) -> None:
        for token in value["added_tokens"]:
            token["special"] = token["content"] not in ("</s>", "[SEP]")

    settings = {"added_tokens_decoder": {"1": FLAGS | {"content": "<|x|>"}}} if table else {}
    assert_same(changed_vocabulary(LAYOUTS[layout](tmp_path, settings), change))


@pytest.mark.reference
@pytest.mark.parametrize(
    "settings",
    [
        {"sep_token": "[MASK]"},
        {"cls_token": "hello", "sep_token": "hello"},
        {"unk_token": "[MASK]"},
        {"mask_token": None, "added_tokens_decoder": {"31": END}},
    ],
)
def test_berts_tokens_around_a_text_are_those_of_the_settings(tmp_path: Path, settings: dict[str, Any]) -> None:
    assert_same(LAYOUTS["words"](tmp_path, settings))
    assert_same(changed_vocabulary(tmp_path, lambda value: value.update(post_processor=None)))


# --- known without transformers ---------------------------------------------------------------------------------------


def ids_of(folder: Path, text: str = TEXT) -> list[int]:
    return Tokenizer.from_folder(folder).encode(text)


@pytest.mark.parametrize(
    "settings",
    [
        {"added_tokens_decoder": {"266": END}},
        {"extra_special_tokens": ["<|im_end|>"]},
        {"extra_special_tokens": {"end": "<|im_end|>"}},
        {"additional_special_tokens": ["<|im_end|>"]},
        {"image_token": "<|im_end|>"},
        {"eos_token": {"__type": "AddedToken"} | END},
    ],
)
def test_a_token_that_tokenizer_json_lacks_is_one_token(tmp_path: Path, settings: dict[str, Any]) -> None:
    folder = LAYOUTS["bytes"](tmp_path, settings)
    assert ids_of(folder) == [0, 262, 223, 266, 223, 262]
    tokenizer = Tokenizer.from_folder(folder)
    assert (tokenizer.added_ids["<|im_end|>"], tokenizer.decode([262, 266])) == (266, "hello")
    assert "<|im_end|>" in tokenizer.to_json()  # as guided decoding reads it


def test_a_token_without_a_row_in_the_model_is_text_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = LAYOUTS["bytes"](tmp_path, {"extra_special_tokens": ["<|x|>", "<|im_end|>"]}, rows=267)
    tokenizer = Tokenizer.from_folder(folder)
    assert (tokenizer.encode("<|x|>"), tokenizer.vocab_size) == ([0, 266], 267)
    assert 266 not in tokenizer.encode(TEXT) and len(tokenizer.encode(TEXT)) == 15
    [line] = {record.getMessage() for record in caplog.records}
    assert "no row" in line and line.count("<|im_end|>") == 1 and "<|x|>" not in line


def test_an_id_that_two_older_tokens_have_is_refused(tmp_path: Path) -> None:
    folder = LAYOUTS["bytes"](tmp_path, {})
    write(folder, added_tokens={"<|im_end|>": 266, "<|x|>": 266})
    with pytest.raises(CheckpointError, match=r"added_tokens\.json gives one id to two tokens"):
        Tokenizer.from_folder(folder)


def test_a_token_with_another_id_than_the_files_say_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = Tokenizer.from_folder(LAYOUTS["bytes"](tmp_path, {"added_tokens_decoder": {"300": END}}))
    assert tokenizer.added_ids["<|im_end|>"] == 266
    assert caplog.records[0].getMessage().endswith("<|im_end|> (266, not 300)")


def test_a_named_token_beyond_the_vocabulary_does_not_keep_a_tokenizer_from_another_folder(tmp_path: Path) -> None:
    folder = LAYOUTS["bytes"](tmp_path, {"pad_token": "[PAD]"}, rows=0)
    assert Tokenizer.from_folder(folder).for_model(266).encode("hello") == [0, 262]


def test_special_tokens_spelled_in_a_text_are_text_where_the_checkpoint_says_so(tmp_path: Path) -> None:
    folder = LAYOUTS["bytes"](tmp_path, {"split_special_tokens": True})
    assert ids_of(folder, "hello </s>") == [0, 262, 223, 30, 17, 85, 32]
    assert ids_of(LAYOUTS["bytes"](tmp_path, {}), "hello </s>") == [0, 262, 223, 1]


@pytest.mark.parametrize(
    ("lower", "settings", "expected"),
    [
        (True, {"do_lower_case": False}, [7, 8, 12, 10]),
        (False, {"do_lower_case": True}, [5, 6, 9, 11]),
        (False, {"do_lower_case": True, "strip_accents": False}, [5, 6, 9, 10]),
        (False, {}, [5, 6, 9, 11]),
        (False, {"tokenizer_class": "PreTrainedTokenizerFast", "do_lower_case": True}, [7, 8, 12, 10]),
    ],
)
def test_berts_case_and_accents_are_those_of_the_settings(
    tmp_path: Path, lower: bool, settings: dict[str, Any], expected: list[int]
) -> None:
    folder = tokenizer_json(lambda: word_pieces(lower), BERT, "bert")(tmp_path, settings)
    assert ids_of(folder, "Hello World Café") == [2, *expected, 3]


def test_a_text_that_is_cut_loses_the_side_that_the_settings_name(tmp_path: Path) -> None:
    text = "hello hello world"
    for side, expected in (({}, [2, 5, 5, 3]), ({"truncation_side": "left"}, [2, 5, 6, 3])):
        tokenizer = Tokenizer.from_folder(LAYOUTS["words"](tmp_path, side))
        assert encode_texts(tokenizer, text, limit=4).token_ids == expected
        pair = encode_texts(tokenizer, "world", "hello hello world", limit=6).token_ids
        assert pair == [2, 6, 3, *expected[1:3], 3]
    with pytest.raises(CheckpointError, match="truncation_side should be left or right, found 'up'"):
        Tokenizer.from_folder(LAYOUTS["words"](tmp_path, {"truncation_side": "up"}))


def test_the_second_text_of_a_pair_has_its_type_unless_the_model_reads_none(tmp_path: Path) -> None:
    for settings, types in (
        ({}, [0, 0, 0, 1, 1]),
        ({"model_input_names": ["input_ids", "attention_mask"]}, [0] * 5),
        ({"tokenizer_class": "TokenizersBackend"}, [0] * 5),
    ):
        tokenizer = Tokenizer.from_folder(LAYOUTS["words"](tmp_path, settings))
        assert encode_texts(tokenizer, "hello", "world").types == types


@pytest.mark.longer
def test_text_that_loses_spaces_before_signs_is_the_same_in_pieces() -> None:
    draw = random.Random(3)
    signs = [*(old for old, _ in RULES), " ", "'", "n", "'t", ".", "a", " '", "  .", "v", "s"]
    for _ in range(2000):
        pieces = draw.choices(signs, k=draw.randrange(12))
        cleaner = Cleaner()
        assert "".join([*map(cleaner.push, pieces), cleaner.flush()]) == cleaned("".join(pieces))
    assert cleaned("I don n't know , do you ? ' ") == "I donn't know, do you?'"


# --- every key --------------------------------------------------------------------------------------------------------


def test_every_key_is_honoured_or_known_or_named_in_one_line_of_a_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    known = dict.fromkeys(HONOURED | WITHOUT_EFFECT, 7) | {"image_token": "<s>", "bos_token_id": 0, "offset": 103}
    folder = LAYOUTS["bytes"](tmp_path, known)
    warn_unknown(folder, "PreTrainedTokenizer")
    assert not caplog.records
    write(folder, tokenizer_config=ROLES | {"split_words": 3, "add_spaces": True, "nothing": None, "offset": 1})
    write(folder, special_tokens_map={"eos_token": "</s>", "order": [1]})
    Tokenizer.from_folder(folder)
    first, second = (record.getMessage() for record in caplog.records)
    assert "tokenizer_config.json: minillm does not know split_words, add_spaces, offset;" in first
    assert "special_tokens_map.json: minillm does not know order;" in second


def test_settings_of_a_class_that_normalizes_in_its_own_way_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Tokenizer.from_folder(LAYOUTS["unigrams"](tmp_path, {"tokenizer_class": "AlbertTokenizer", "do_lower_case": True}))
    assert "does not know do_lower_case" in caplog.text


# --- vectors of the last token ----------------------------------------------------------------------------------------


def embedder(folder: Path, settings: dict[str, Any]) -> Path:
    write_checkpoint(folder, vocab_size=300)
    byte_level().save(str(folder / "tokenizer.json"))
    write(folder, tokenizer_config=ROLES | settings)
    return folder


def test_a_text_to_embed_by_its_last_token_ends_as_add_eos_token_says(tmp_path: Path) -> None:
    with Engine(embedder(tmp_path, {"add_eos_token": True})) as engine:
        assert engine.encode(["hello"])[0].token_ids == [0, 262, 1]
        last, exact = engine.embed(["hello"]), engine.embed([[0, 262, 1]])
        np.testing.assert_allclose(last, exact, rtol=1e-6)
        assert engine.tokenizer.encode("hello") == [0, 262]  # a prompt goes on
    with Engine(embedder(tmp_path, {"add_eos_token": False})) as engine:
        assert engine.encode(["hello"])[0].token_ids == [0, 262]


def test_a_text_that_is_cut_still_ends_in_the_token_of_its_vector(tmp_path: Path) -> None:
    with Engine(embedder(tmp_path, {"add_eos_token": True, "model_max_length": 4})) as engine:
        assert engine.encode(["hello hello hello"])[0].token_ids == [0, 262, 223, 1]


def test_an_end_that_the_vocabulary_writes_itself_is_not_written_twice(tmp_path: Path) -> None:
    folder, backend = embedder(tmp_path, {"add_eos_token": True}), byte_level()
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>",
        special_tokens=[("<s>", 0), ("</s>", 1)],
    )
    backend.save(str(folder / "tokenizer.json"))
    with Engine(folder) as engine:
        assert engine.encode(["hello"])[0].token_ids == [0, 262, 1]


# --- written and guided -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("more", [{}, {"split_special_tokens": True}])
def test_a_gguf_file_has_the_tokens_that_the_settings_add(tmp_path: Path, more: dict[str, Any]) -> None:
    pytest.importorskip("gguf")
    settings = {"extra_special_tokens": ["<|im_end|>"], "image_token": "<|x|>"} | more
    tokenizer = Tokenizer.from_folder(LAYOUTS["bytes"](tmp_path, settings))
    entries = gguf_entries(tokenizer, 300, tmp_path)
    assert entries["tokenizer.ggml.tokens"][266:269] == ["<|x|>", "<|im_end|>", "[PAD268]"]
    assert entries["tokenizer.ggml.token_type"][266:269] == [CONTROL, CONTROL, UNUSED]


def test_a_guide_may_ask_for_a_token_that_the_settings_add(tmp_path: Path) -> None:
    pytest.importorskip("llguidance")
    write_checkpoint(tmp_path, vocab_size=300)
    byte_level().save(str(tmp_path / "tokenizer.json"))
    write(tmp_path, tokenizer_config=ROLES | {"extra_special_tokens": ["<|im_end|>"]})
    with Engine(tmp_path) as engine:
        answer = engine.generate(
            "hello", guided_grammar='start: "or" <|im_end|>', max_new_tokens=9, skip_special_tokens=False
        )
    assert answer.text.startswith("or<|im_end|>")
