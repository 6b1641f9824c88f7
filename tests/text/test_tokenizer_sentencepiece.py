"""tokenizer.model: SentencePiece's own ids and text, and transformers' rules for special tokens."""

import io
import random
import re
import struct
import sys
from functools import cache
from pathlib import Path

import pytest

from minillm.errors import CheckpointError, UnsupportedModelError, install
from minillm.text.tokenizer import Tokenizer

from ..tokenizing import TEXTS, folder_with, random_ids, random_texts, streamed

sentencepiece = pytest.importorskip("sentencepiece", reason="it trains and runs the models to compare with")

ASSETS = Path(__file__).parents[2] / "minillm" / "assets"
LLAMA = {"model_type": "bpe", "byte_fallback": True, "normalization_rule_name": "identity"}
LLAMA |= {"remove_extra_whitespaces": False, "allow_whitespace_only_pieces": True, "split_digits": True}
SPELLED = re.compile("</?s>|<unk>|<pad>|<mask>|<0x[0-9A-F]{2}>")
LINES = (ASSETS / "demo-opt" / "held_out.txt").read_text(encoding="utf-8").replace("</s>", "\n").splitlines()
LINES += ["def f(x):", "    if x:", "        return  1", "naïve café, tête-à-tête", "日本 の本"] * 5
SPACES = [
    "",
    " ",
    "  ",
    "   ",
    " a",
    "a ",
    "  a  b ",
    "\n",
    " \n ",
    "a \n b",
    "▁",
    "▁a",
    "a▁ b",
    "\t a",
    "aaaa   aaaaaa",
]
PLAIN = [*LINES[::3], *SPACES, *(SPELLED.sub("", text) for text in TEXTS + random_texts(100))]


@cache
def trained(**options) -> bytes:
    """A model of about 600 pieces; what is not said is as in SentencePiece's trainer."""
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(LINES),
        model_writer=written,
        **{"vocab_size": 600, "hard_vocab_limit": False, "num_threads": 1, "minloglevel": 2, **options},
    )
    return written.getvalue()


def both(folder: Path, settings: dict | None = None, config: dict | None = None, **options):
    """Our tokenizer of a folder with a model, without BOS unless the settings say so, and SentencePiece's processor."""
    model = trained(**{**LLAMA, **options})
    return read(folder, model, {"add_bos_token": False, **(settings or {})}, config or {}), processor(model)


def read(folder: Path, model: bytes, settings: dict | None = None, config: dict | None = None) -> Tokenizer:
    (folder / "tokenizer.model").write_bytes(model)
    return Tokenizer.from_folder(folder_with(folder, folder, tokenizer_config=settings or {}, config=config or {}))


def processor(model: bytes):
    return sentencepiece.SentencePieceProcessor(model_proto=model)


# --- the same as SentencePiece ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", [True, False])
@pytest.mark.parametrize("remove_extra", [True, False])
@pytest.mark.parametrize("byte_fallback", [True, False])
@pytest.mark.parametrize("model_type", ["bpe", "unigram"])
@pytest.mark.slow
def test_ids_and_text_equal_sentencepieces(tmp_path, model_type, byte_fallback, remove_extra, prefix):
    options = {"model_type": model_type, "byte_fallback": byte_fallback}
    assert_equal(tmp_path, **options, remove_extra_whitespaces=remove_extra, add_dummy_prefix=prefix)


@pytest.mark.parametrize(
    "options",
    [
        {"model_type": "word", "byte_fallback": False},
        {"model_type": "char", "byte_fallback": False},
        {"normalization_rule_name": "nmt_nfkc"},
        {"normalization_rule_name": "nmt_nfkc_cf", "model_type": "unigram", "remove_extra_whitespaces": True},
        {"treat_whitespace_as_suffix": True},
        {"user_defined_symbols": "▁▁"},
        {"user_defined_symbols": "<x>,lis,ist", "remove_extra_whitespaces": True},
    ],
    ids=lambda options: ", ".join(map(str, options.values())),
)
@pytest.mark.slow
def test_rarer_models_equal_sentencepieces(tmp_path, options):
    assert_equal(tmp_path, **options)


def assert_equal(folder: Path, **options) -> None:
    ours, theirs = both(folder, **options)
    assert [ours._backend.id_to_token(i) for i in range(ours.vocab_size)] == theirs.id_to_piece(
        list(range(len(theirs)))
    )
    for text in PLAIN:
        ids, expected = ours.encode(text), theirs.encode(text)
        assert ids == expected, text
        # The extra spaces that are removed at the beginning of decoded text are all, here only the first.
        if theirs.unk_id() not in expected and not (options.get("remove_extra_whitespaces") and "▁" in text):
            assert ours.decode(ids) == streamed(ours, ids) == theirs.decode(expected)
    word = theirs.encode("list")[-1]
    assert ours.decode([word, word]) == theirs.decode([word, word])


@pytest.mark.parametrize("model_type", ["bpe", "unigram"])
def test_a_byte_that_is_spelled_out_is_text(tmp_path, model_type):
    ours, theirs = both(tmp_path, model_type=model_type, required_chars="<>0x4A1")
    for text in ["a<0x41>", "a <0x0A>b", "a<0x41"]:
        assert ours.encode(text) == theirs.encode(text)
        assert ours.decode(ours.encode(text)) == text


def test_user_defined_symbols_are_never_cut(tmp_path):
    ours, theirs = both(tmp_path, user_defined_symbols="<sep>,lis,ist", control_symbols="<ctl>")
    sep, ctl = theirs.piece_to_id(["<sep>", "<ctl>"])
    assert ours.special_ids == {0, 1, 2, ctl}
    for text in ["A list", "a<sep>b", "a <sep>  lists <sep>", "ilist, is lis t"]:
        assert ours.encode(text) == theirs.encode(text)
        assert ours.decode(ours.encode(text)) == text
    assert sep in ours.encode("<sep>of") and ours.special_ids.isdisjoint([sep])
    assert ours.encode("of<ctl>") == [*theirs.encode("of"), ctl]


def test_text_survives_the_round_trip(tmp_path):
    tokenizer = read(tmp_path, trained(**LLAMA))
    for text in PLAIN:
        assert tokenizer.decode(tokenizer.encode(text)) == text.replace("▁", " ")


# --- special tokens, as in transformers' LlamaTokenizer ---------------------------------------------------------------


def test_a_prefix_stands_before_the_text_or_with_legacy_before_each_part(tmp_path):
    ours, theirs = both(tmp_path, {"legacy": False})
    legacy, _ = both(tmp_path, {"legacy": True})

    def inside(text):
        return theirs.encode("\n" + text)[2:]  # without the prefix: "▁", "<0x0A>", text

    for left, right in [("A list", "of"), ("A list ", " of"), (" A", "  of red")]:
        assert ours.encode(f"{left}</s>{right}") == [*theirs.encode(left), 2, *inside(right)]
        assert legacy.encode(f"{left}</s>{right}") == [*theirs.encode(left), 2, *theirs.encode(right)]
        assert ours.encode(f"<s>{right}") == [1, *inside(right)]
        assert legacy.encode(f"<s>{right}") == [1, *theirs.encode(right)]


@pytest.mark.parametrize("prefix", [True, False])
def test_a_space_after_a_special_token_is_kept_where_extra_spaces_are_removed(tmp_path, prefix):
    ours, theirs = both(tmp_path, remove_extra_whitespaces=True, add_dummy_prefix=prefix)
    assert ours.encode("A list</s>  of") == [*theirs.encode("A list"), 2, *theirs.encode("of")]
    assert ours.decode(ours.encode("A list</s>  of")) == ("A list of" if prefix else "A listof")


@pytest.mark.parametrize(
    ("settings", "before", "after"),
    [
        ({}, [1], []),
        ({"add_bos_token": True, "add_eos_token": True}, [1], [2]),
        ({"add_bos_token": False, "add_eos_token": True}, [], [2]),
        ({"bos_token": "</s>", "eos_token": {"content": "<s>"}, "add_eos_token": True}, [2], [1]),
    ],
)
def test_bos_and_eos_around_the_text(tmp_path, settings, before, after):
    tokenizer = read(tmp_path, trained(**LLAMA), settings)
    theirs = processor(trained(**LLAMA))
    assert tokenizer.encode("A list") == [*before, *theirs.encode("A list"), *after]
    assert tokenizer.encode("A list", add_special_tokens=False) == theirs.encode("A list")
    assert tokenizer.decode(tokenizer.encode("A list")) == "A list"
    assert tokenizer.special_ids == {0, 1, 2}


def test_roles_come_from_the_settings_then_the_model(tmp_path):
    model = trained(**LLAMA, bos_id=3, eos_id=4, pad_id=5, unk_id=0, bos_piece="<begin>")

    def roles(tokenizer):
        return tokenizer.bos_token_id, tokenizer.eos_token_id

    assert roles(read(tmp_path, model)) == (3, 4)
    assert read(tmp_path, model).encode("<begin>")[:2] == [3, 3]
    assert roles(read(tmp_path, model, {"bos_token": "</s>"})) == (4, 4)
    assert roles(read(tmp_path, model, {"eos_token": None}, {"eos_token_id": [7, 8]})) == (3, None)
    without = trained(**LLAMA, bos_id=-1)
    assert roles(read(tmp_path, without, {"add_bos_token": False}, {"bos_token_id": 3})) == (3, 2)
    with pytest.raises(CheckpointError, match="prompts begin with the BOS token, and neither"):
        read(tmp_path, without)


def test_add_prefix_space_overrules_the_model(tmp_path):
    with_prefix, theirs = both(tmp_path, {"add_prefix_space": True}, add_dummy_prefix=False)
    assert with_prefix.encode("of") == theirs.encode(" of")
    assert with_prefix.decode(with_prefix.encode("of")) == "of"
    without, theirs = both(tmp_path, {"add_prefix_space": False})
    assert without.encode("of") == theirs.encode("\nof")[2:]
    assert without.decode(without.encode(" of")) == " of"


@pytest.mark.parametrize("normalized", [True, False])
def test_tokens_that_were_added_later(tmp_path, normalized):
    end = len(processor(trained(**LLAMA)))
    added = {
        str(end): {"content": "<|turn|>", "special": True, "normalized": False},
        str(end + 1): {"content": "two words", "special": False, "normalized": normalized},
    }
    ours, theirs = both(tmp_path, {"added_tokens_decoder": added})
    inside = theirs.encode("\n▁of")[2:]
    assert ours.encode("<|turn|>two words of") == [end, end + 1, *inside]
    assert end + 1 not in ours.encode("two▁words")
    assert ours.decode([end, end + 1, *inside]) == "two words of"
    assert ours.special_ids == {0, 1, 2, end}


@pytest.mark.reference
@pytest.mark.parametrize("legacy", [True, False])
def test_ids_equal_transformers_llama_tokenizer(tmp_path, legacy):
    """Vocabulary and merges by SentencePiece's package and transformers' own rule: its reader needs protobuf."""
    transformers = pytest.importorskip("transformers", reason="the live comparison needs the reference extra")
    from transformers.tokenization_utils_base import generate_merges

    ours, sp = both(tmp_path, {"add_bos_token": True, "add_eos_token": True, "legacy": legacy})
    vocab = {sp.id_to_piece(i): i for i in range(len(sp))}
    merges = generate_merges(vocab, skip_tokens=[piece for piece, i in vocab.items() if sp.is_byte(i)])
    theirs = transformers.LlamaTokenizer(vocab, merges, add_bos_token=True, add_eos_token=True, legacy=legacy)
    for text in TEXTS + random_texts(100):
        if not re.search("(^|>)[ ▁]", text):  # before a space transformers 5 puts no prefix
            assert ours.encode(text) == theirs(text)["input_ids"], text
    draw = random.Random(11)
    for _ in range(100):
        ids = random_ids(ours, draw, 10)
        assert ours.decode(ids) == streamed(ours, ids) == theirs.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("model_type", ["bpe", "unigram"])
def test_guided_decoding_splits_forced_text_as_the_model_does(tmp_path, model_type):
    llguidance = pytest.importorskip("llguidance", reason="needs the guided extra")
    tokenizer, theirs = both(tmp_path, model_type=model_type)
    guide = llguidance.LLTokenizer(tokenizer.to_json(), n_vocab=tokenizer.vocab_size, eos_token=[2])
    for line in LINES:
        ids = guide.tokenize_str(" " + line)
        assert ids == theirs.encode(line)
        assert guide.decode_bytes(ids).decode() == " " + line


# --- what is refused --------------------------------------------------------------------------------------------------


def test_without_the_package_one_line_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    assert_refused(tmp_path, trained(**LLAMA), UnsupportedModelError, install("sentencepiece"))


def test_rules_for_decoded_text_are_refused(tmp_path):
    rules = tmp_path / "rules.tsv"
    rules.write_text("61\t62\n")  # every a becomes b
    model = trained(**LLAMA, denormalization_rule_tsv=str(rules))
    assert processor(model).decode(processor(model).encode("a")) == "b"
    assert_refused(tmp_path, model, UnsupportedModelError, "rules of its own for decoded text")


def field(number: int, value: int | bytes) -> bytes:
    """A field of a protocol buffer; lengths and values up to 127."""
    return bytes([number << 3, value]) if isinstance(value, int) else bytes([number << 3 | 2, len(value)]) + value


def piece(text: str, kind: int) -> bytes:
    return field(1, field(1, text.encode()) + bytes([2 << 3 | 5]) + struct.pack("<f", -1.0) + field(3, kind))


START = piece("<unk>", 2) + piece("<s>", 3) + piece("</s>", 3)
BPE, AS_IT_IS = field(2, field(3, 2)), field(3, field(4, 0))


@pytest.mark.parametrize(
    ("model", "error", "what"),
    [
        (START + piece("a", 1) * 2 + BPE + AS_IT_IS, CheckpointError, "is already defined"),
        (field(2, b"\x80") + START + AS_IT_IS, CheckpointError, "is not a usable SentencePiece model"),
        (piece("a", 1) + field(2, b"\xc0\x02\x01") + AS_IT_IS, CheckpointError, "unk is not defined"),
        (b"", CheckpointError, "unk is not defined"),
        (b"a page of text", CheckpointError, "is not a usable SentencePiece model"),
        (field(1, 5), CheckpointError, "is not a usable SentencePiece model"),
        (START + field(1, field(1, b"\xff")) + BPE + AS_IT_IS, CheckpointError, "tokenizer cannot be used"),
        (b"IQ== 0\nIg== 1\n", UnsupportedModelError, "is a tiktoken vocabulary"),
    ],
)
def test_broken_models_are_refused(tmp_path, model, error, what):
    assert_refused(tmp_path, model, error, what)


def test_the_smallest_model_by_hand_is_read(tmp_path):
    tokenizer = read(tmp_path, START + piece("▁", 1) + piece("a", 1) + piece("▁a", 1) + BPE + AS_IT_IS)
    assert tokenizer.encode("a aa x") == [1, 5, 5, 4, 3, 0]
    assert tokenizer.decode([1, 5, 5, 4]) == "a aa"


def test_merges_end_in_no_byte(tmp_path):
    """Where the parts of "<0x0A>" are pieces, it remains text, as in SentencePiece."""
    texts = ["▁", "<", "0", "x", "A", ">", "<0", "x0", "A>", "x0A>"]
    pieces = [piece(text, 1) for text in texts] + [piece(f"<0x{byte:02X}>", 6) for byte in range(256)]
    with_bytes = field(2, field(3, 2) + b"\x98\x02\x01")  # field 35, byte_fallback
    model = START + b"".join(pieces) + with_bytes + AS_IT_IS
    ids = read(tmp_path, model, {"add_bos_token": False}).encode("<0x0A>")
    assert ids == processor(model).encode("<0x0A>") == [3, 9, 12]


@pytest.mark.longer
def test_a_model_that_ends_early_is_refused(tmp_path):
    model = trained(**LLAMA)
    for length in [*range(1, len(model), 97), len(model) - 1, len(model) - 2]:
        assert_refused(tmp_path, model[:length], CheckpointError, "is not a usable SentencePiece model")


def assert_refused(folder: Path, model: bytes, error: type[Exception], what: str) -> None:
    with pytest.raises(error) as refused:
        read(folder, model)
    assert what in str(refused.value)
    assert str(folder / "tokenizer.model") in str(refused.value)
    assert "\n" not in str(refused.value)
