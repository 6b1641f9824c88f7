"""Encoding and decoding against transformers, committed and live; and folders that are broken."""

import os
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

from minillm.errors import CheckpointError, MinillmError, ModelNotFoundError, PromptError, UnsupportedModelError
from minillm.text.tokenizer import Tokenizer

from ..tokenizing import GOLDEN, SETTINGS, SMALL, TEXTS, assert_equal_to_transformers, folder_with, streamed


@pytest.fixture(scope="module")
def small() -> Tokenizer:
    return Tokenizer.from_folder(SMALL)


@pytest.fixture(scope="module")
def opt_folder(tmp_path_factory) -> Path:
    """OPT's real vocab.json and merges.txt, and the settings that are published with them."""
    default = Path(__file__).parents[2] / ".." / "shared" / "data" / "opt-tokenizer"
    source = Path(os.environ.get("MINILLM_OPT_TOKENIZER", default))
    if not (source / "vocab.json").is_file():
        pytest.skip("OPT's real vocab.json and merges.txt are not here: set MINILLM_OPT_TOKENIZER to their folder")
    return folder_with(tmp_path_factory.mktemp("opt"), source, "vocab.json", "merges.txt", tokenizer_config=SETTINGS)


def byte_ids(tokenizer: Tokenizer, data: bytes) -> list[int]:
    """One token for each byte, whatever the merges would do."""
    alphabet = {tokenizer.token(i): i for i in range(4, 260)}
    return [alphabet[bytes([byte]).decode("utf-8", "backslashreplace")] for byte in data]


# --- encoding and decoding ------------------------------------------------------------------------------------------


@pytest.mark.sampled(8)
@pytest.mark.parametrize("case", GOLDEN["encode"], ids=lambda case: repr(case["text"][:20]))
def test_golden_encodings(small, case):
    assert small.encode(case["text"]) == case["ids"]
    assert small.encode(case["text"], add_special_tokens=False) == case["bare"]


def test_golden_decodings(small):
    for case in GOLDEN["decode"]:
        assert small.decode(case["ids"]) == case["text"]
        assert small.decode(case["ids"], skip_special_tokens=False) == case["with_special"]
    assert any("\ufffd" in case["text"] for case in GOLDEN["decode"])  # broken UTF-8 is among them


@pytest.mark.parametrize("text", [text for text in TEXTS if "</s>" not in text and "<pad>" not in text])
def test_text_survives_the_round_trip(small, text):
    assert small.decode(small.encode(text)) == text


def test_special_tokens_of_opt(small):
    assert (small.bos_token_id, small.eos_token_id) == (2, 2)
    assert small.special_ids == {1, 2}  # <pad> and </s>; <s> and <unk> are not named, as in the published settings
    assert small.vocab_size == 512
    assert small.encode("a</s>") == [2, *small.encode("a", add_special_tokens=False), 2]


def test_published_opt_vocabulary(opt_folder):
    opt = Tokenizer.from_folder(opt_folder)
    assert opt.encode("A list of colors: red") == [2, 250, 889, 9, 8089, 35, 1275]
    assert opt.encode("") == [2]
    assert (opt.bos_token_id, opt.eos_token_id, opt.vocab_size) == (2, 2, 50265)
    assert opt.decode([2, 250, 889, 9, 8089, 35, 1275]) == "A list of colors: red"
    assert opt.token(1275) == " red"


def test_tokens_as_text(small):
    assert [small.token(i) for i in small.encode("list\n of </s>")] == ["</s>", "l", "ist", "\n", " of", " ", "</s>"]
    euro = byte_ids(small, "€".encode())
    assert [small.token(i) for i in euro] == [r"\xe2", r"\x82", r"\xac"]


def test_ids_may_be_numpy_integers(small):
    ids = np.array(small.encode("A list"))
    assert small.decode(ids) == "A list"
    assert small.token(ids[1]) == "A"


def test_rows_that_the_model_has_beyond_the_vocabulary_are_no_text(tmp_path):
    folder = folder_with(
        tmp_path, SMALL, "vocab.json", "merges.txt", "tokenizer_config.json", config={"vocab_size": 520}
    )
    padded = Tokenizer.from_folder(folder)
    a = padded.encode("A", add_special_tokens=False)
    assert padded.vocab_size == 512
    assert padded.decode([*a, 519, *a]) == streamed(padded, [*a, 519, *a]) == "AA"
    assert padded.token(519) == "[519]"
    with pytest.raises(PromptError, match="token id 520 is outside the vocabulary: ids are 0 to 519"):
        padded.decode([520])


# --- the layouts of a folder ----------------------------------------------------------------------------------------


def write_tokenizer_json(folder: Path) -> tokenizers.Tokenizer:
    """The small vocabulary as a tokenizer.json that also truncates and pads, as training leaves it."""
    backend = tokenizers.Tokenizer(models.BPE.from_file(str(SMALL / "vocab.json"), str(SMALL / "merges.txt")))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["</s>", "<pad>"])
    backend.post_processor = processors.TemplateProcessing(single="</s> $A", special_tokens=[("</s>", 2)])
    backend.enable_truncation(max_length=4)
    backend.enable_padding(length=4, pad_id=1, pad_token="<pad>")
    backend.save(str(folder / "tokenizer.json"))
    return backend


def test_tokenizer_json_gives_the_same_as_vocab_and_merges(small, tmp_path):
    write_tokenizer_json(tmp_path)
    other = Tokenizer.from_folder(folder_with(tmp_path, SMALL, tokenizer_config={**SETTINGS, "add_bos_token": False}))
    assert [other.encode(text) for text in TEXTS] == [small.encode(text) for text in TEXTS]
    assert [other.decode(case["ids"]) for case in GOLDEN["decode"]] == [case["text"] for case in GOLDEN["decode"]]
    assert (other.bos_token_id, other.eos_token_id, other.special_ids) == (2, 2, {1, 2})


@pytest.mark.parametrize(
    ("objects", "begins_with_bos"),
    [
        ({"config": {"model_type": "opt", "bos_token_id": 2, "eos_token_id": 2, "pad_token_id": 1}}, True),
        ({"config": {"model_type": "gpt2", "bos_token_id": 2, "eos_token_id": [2, 5], "pad_token_id": 1}}, False),
        ({"config": {"model_type": "opt"}, "tokenizer_config": {**SETTINGS, "add_bos_token": False}}, False),
        ({"config": {"model_type": "gpt2"}, "tokenizer_config": SETTINGS}, True),
        (
            {
                "tokenizer_config": {"add_bos_token": True},
                "special_tokens_map": {"bos_token": "</s>", "eos_token": {"content": "</s>"}, "pad_token": "<pad>"},
            },
            True,
        ),
    ],
)
def test_bos_and_special_tokens_of_vocab_and_merges(tmp_path, objects, begins_with_bos):
    tokenizer = Tokenizer.from_folder(folder_with(tmp_path, SMALL, "vocab.json", "merges.txt", **objects))
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (2, 2)
    assert tokenizer.special_ids == {1, 2}
    assert (tokenizer.encode("A")[0] == 2) is begins_with_bos
    assert tokenizer.encode("</s>", add_special_tokens=False) == [2]


def test_a_folder_that_names_no_special_tokens_has_none(tmp_path):
    tokenizer = Tokenizer.from_folder(folder_with(tmp_path, SMALL, "vocab.json", "merges.txt"))
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.special_ids) == (None, None, frozenset())
    assert tokenizer.decode(tokenizer.encode("</s>")) == "</s>"
    assert tokenizer.encode("") == []


GREEDY = {
    "512": {"content": "<|turn|>", "special": True, "lstrip": True, "rstrip": True},
    "513": {"content": "naïve word", "special": False, "single_word": True},
}
ADDED = {"512": {"content": "<|turn|>", "special": True}, "513": {"content": "naïve word", "special": False}}


@pytest.mark.parametrize(
    "objects",
    [
        {"tokenizer_config": {**SETTINGS, "added_tokens_decoder": ADDED}},
        {
            "tokenizer_config": {**SETTINGS, "additional_special_tokens": ["<|turn|>"]},
            "added_tokens": {"<|turn|>": 512, "naïve word": 513},
        },
    ],
)
def test_added_tokens(tmp_path, objects):
    tokenizer = Tokenizer.from_folder(folder_with(tmp_path, SMALL, "vocab.json", "merges.txt", **objects))
    assert tokenizer.encode("<|turn|>naïve word") == [2, 512, 513]
    assert tokenizer.decode([2, 512, 513]) == streamed(tokenizer, [2, 512, 513]) == "naïve word"
    assert tokenizer.special_ids == {1, 2, 512}
    assert tokenizer.vocab_size == 514


# --- errors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"caf\xe9!".decode("utf-8", "surrogateescape"), "the text is not valid UTF-8: byte 0xE9 at character 3"),
        ("a\ud800", r"the text is not valid UTF-8: lone surrogate U\+D800 at character 1"),
    ],
)
def test_text_that_is_not_utf8_is_refused(small, text, message):
    with pytest.raises(PromptError, match=message):
        small.encode(text)


@pytest.mark.parametrize("token_id", [-1, 512, 10**12])
def test_an_id_outside_the_vocabulary_is_refused(small, token_id):
    for method in (lambda: small.decode([2, token_id]), lambda: small.token(token_id)):
        with pytest.raises(PromptError, match=f"token id {token_id} is outside the vocabulary: ids are 0 to 511"):
            method()


VOCAB = (SMALL / "vocab.json").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("files", "error", "message"),
    [
        ({}, ModelNotFoundError, "missing: tokenizer.json, tokenizer.model, vocab.json, merges.txt"),
        ({"vocab.json": VOCAB}, ModelNotFoundError, "missing: tokenizer.json, tokenizer.model, merges.txt"),
        ({"tokenizer.json": "{"}, CheckpointError, "tokenizer.json: expected a JSON text"),
        ({"tokenizer.json": b"\xff\xfe{}"}, CheckpointError, "tokenizer.json: expected a JSON text"),
        ({"vocab.json": VOCAB[:99], "merges.txt": ""}, CheckpointError, "vocab.json: expected a JSON text"),
        ({"vocab.json": "[1]", "merges.txt": ""}, CheckpointError, "expected a JSON object, found list"),
        ({"vocab.json": '{"a": "0"}', "merges.txt": ""}, CheckpointError, "should map each token to its id"),
        ({"vocab.json": '{"a": 0, "b": 0}', "merges.txt": ""}, CheckpointError, "gives one id to two tokens"),
        ({"vocab.json": '{"a": 0}', "merges.txt": ""}, CheckpointError, "255 of the 256 byte symbols are missing"),
        ({"vocab.json": VOCAB, "merges.txt": "Ġ a\nĠ zzz\n"}, CheckpointError, "merges.txt, line 2: 'Ġ zzz' is not"),
        ({"vocab.json": VOCAB, "merges.txt": "Ġ"}, CheckpointError, "merges.txt, line 1: 'Ġ' is not two tokens"),
        ({"vocab.json": VOCAB, "merges.txt": "q x\n"}, CheckpointError, "line 1: 'q x' is not two tokens whose union"),
    ],
)
def test_broken_folders_are_refused(tmp_path, files, error, message):
    for name, content in files.items():
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    assert_refused(tmp_path, error, message)


@pytest.mark.parametrize(
    ("objects", "error", "message"),
    [
        (
            {"tokenizer_config": {"tokenizer_class": "CodeGenTokenizerFast"}},
            UnsupportedModelError,
            "read for GPT2Tokenizer, Qwen2Tokenizer, BartTokenizer, RobertaTokenizer, and this is",
        ),
        ({"config": {"model_type": "gpt_neox"}}, UnsupportedModelError, "this is a GPTNeoXTokenizer"),
        (
            {"tokenizer_config": {"add_bos_token": True}},
            CheckpointError,
            "prompts begin with the BOS token, and neither",
        ),
        ({"config": {"model_type": "opt"}}, CheckpointError, "prompts begin with the BOS token, and neither"),
        ({"tokenizer_config": {"bos_token": {"special": True}}}, CheckpointError, "a special token should be text"),
        ({"tokenizer_config": {"added_tokens_decoder": [1]}}, CheckpointError, "should be a table of ids and tokens"),
        ({"added_tokens": {"<x>": 600}}, CheckpointError, "added token '<x>' cannot have id 600"),
    ],
)
def test_contradictory_settings_are_refused(tmp_path, objects, error, message):
    assert_refused(folder_with(tmp_path, SMALL, "vocab.json", "merges.txt", **objects), error, message)


def assert_refused(folder: Path, error: type[MinillmError], message: str) -> None:
    with pytest.raises(error) as refused:
        Tokenizer.from_folder(folder)
    assert message in str(refused.value)
    assert str(folder) in str(refused.value) or "special token" in message
    assert "\n" not in str(refused.value)


# --- live comparison with transformers ------------------------------------------------------------------------------


@pytest.mark.reference
def test_published_opt_equals_transformers(opt_folder):
    assert_equal_to_transformers(opt_folder)


@pytest.mark.reference
@pytest.mark.parametrize(
    "objects",
    [
        {"tokenizer_config": SETTINGS},
        {"tokenizer_config": {**SETTINGS, "add_bos_token": False}},
        {"tokenizer_config": {**SETTINGS, "add_prefix_space": True}},
        {"tokenizer_config": {**SETTINGS, "added_tokens_decoder": ADDED}},
        {"tokenizer_config": SETTINGS, "special_tokens_map": {"bos_token": "<s>", "eos_token": "</s>"}},
        {"tokenizer_config": SETTINGS, "added_tokens": {"<|turn|>": 512, "naïve word": 513}},
        {"tokenizer_config": {**SETTINGS, "additional_special_tokens": ["<unk>", "<s>"]}},
        {"tokenizer_config": {**SETTINGS, "image_token": "<unk>"}},
        {"tokenizer_config": {**SETTINGS, "added_tokens_decoder": GREEDY, "pad_token": "<|turn|>"}},
        {
            "tokenizer_config": {**SETTINGS, "added_tokens_decoder": ADDED},
            "special_tokens_map": {"bos_token": "<s>", "eos_token": "<unk>"},
        },
    ],
)
def test_vocab_and_merges_equal_transformers(tmp_path, objects):
    config = {"model_type": "opt"}
    assert_equal_to_transformers(folder_with(tmp_path, SMALL, "vocab.json", "merges.txt", config=config, **objects))


@pytest.mark.reference
@pytest.mark.parametrize("add_bos_token", [True, False])
def test_a_folder_saved_by_transformers_equals_transformers(tmp_path, add_bos_token):
    transformers = pytest.importorskip("transformers", reason="the live comparison needs the reference extra")
    tokenizer = transformers.GPT2Tokenizer.from_pretrained(SMALL, add_bos_token=add_bos_token)
    tokenizer.add_tokens(["naïve word"])
    tokenizer.save_pretrained(tmp_path)
    assert (tmp_path / "tokenizer.json").is_file()
    assert_equal_to_transformers(tmp_path)
    assert (Tokenizer.from_folder(tmp_path).encode("A")[0] == 2) is add_bos_token
