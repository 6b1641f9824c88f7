"""Tokenizers of BART, mBART, XLM-RoBERTa, T5, Pegasus and MarianMT: ids by definition, and transformers' own."""

import io
import json
import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from minillm.errors import CheckpointError, ParameterError, UnsupportedModelError
from minillm.text.tokenizer import Tokenizer, encode_texts
from minillm.text.tokenizer.fitting import framed
from minillm.text.tokenizer.seq2seq import MBART50_CODES, MBART_CODES

from ..tokenizing import SMALL, folder_with, random_ids, streamed

sentencepiece = pytest.importorskip("sentencepiece", reason="it trains the models")

ROOT = Path(__file__).parents[2]
LINES = (ROOT / "minillm/assets/demo-opt/held_out.txt").read_text(encoding="utf-8").replace("</s>", "\n").splitlines()
TEXTS = ["A list of colors: red, green.", "a", "x", " two  spaces ", "snow ☃ man ☃☃", "", "tête-à-tête", "1, 2 and 3"]
TEXTS += LINES[:60]


@cache
def trained(**options: Any) -> bytes:
    written = io.BytesIO()
    sizes = {"vocab_size": 500, "hard_vocab_limit": False, "num_threads": 1, "minloglevel": 2}
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(LINES), model_writer=written, **sizes, **options)
    return written.getvalue()


@cache
def processor(**options: Any) -> Any:
    return sentencepiece.SentencePieceProcessor(model_proto=trained(**options))


PEGASUS = {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1}
WITHOUT_BOS = ("pegasus", "t5", "mt5")


def pieces(**options: Any) -> list[tuple[str, float]]:
    """Pieces and scores of a model."""
    sp = processor(**options)
    return [(sp.id_to_piece(i), sp.get_score(i)) for i in range(len(sp))]


def folder_of(folder: Path, model_type: str, **settings: Any) -> Path:
    """A folder of mBART, XLM-RoBERTa, Pegasus, T5 or mT5; the last three number pad, EOS and unknown alike."""
    options = PEGASUS if model_type in WITHOUT_BOS else {}
    name = "spiece.model" if model_type in WITHOUT_BOS else "sentencepiece.bpe.model"
    (folder / name).write_bytes(trained(**options))
    return folder_with(folder, folder, config={"model_type": model_type}, tokenizer_config=settings)


def marian(folder: Path, **settings: Any) -> Path:
    """A folder of MarianMT, whose vocabulary lacks some of the model's pieces and has languages."""
    for name in ("source.spm", "target.spm"):
        (folder / name).write_bytes(trained())
    names = [piece for piece, _ in pieces()[3:]]
    random.Random(3).shuffle(names)
    tokens = ["</s>", "<unk>", *names[:-40], ">>fra<<", ">>deu<<", "<pad>"]
    vocab = {token: i for i, token in enumerate(tokens)}
    (folder / "vocab.json").write_text(json.dumps(vocab), encoding="utf-8")
    config = {"model_type": "marian", "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": len(vocab) - 1}
    return folder_with(folder, folder, config=config, tokenizer_config=settings)


# --- by definition ----------------------------------------------------------------------------------------------------


def test_debertas_pieces_keep_their_ids_and_a_mask_comes_after_them(tmp_path: Path) -> None:
    options = {"pad_id": 0, "bos_id": 1, "eos_id": 2, "unk_id": 3, "unk_piece": "[UNK]", "pad_piece": "[PAD]"}
    options |= {"bos_piece": "[CLS]", "eos_piece": "[SEP]"}
    (tmp_path / "spm.model").write_bytes(trained(**options))
    settings = {"do_lower_case": False, "vocab_type": "spm"}  # as DeBERTa v3 was published
    folder_with(tmp_path, tmp_path, config={"model_type": "deberta-v2"}, tokenizer_config=settings)
    tokenizer, sp = Tokenizer.from_folder(tmp_path), processor(**options)
    assert tokenizer.encode("[MASK]", add_special_tokens=False) == [len(sp)]
    for text in TEXTS:
        assert tokenizer.encode(text) == [1, *sp.encode(text), 2]


@pytest.mark.longer
@pytest.mark.parametrize("kind", ["MBartTokenizer", "MBart50Tokenizer"])
def test_mbarts_pieces_come_one_later_and_its_languages_after_them(tmp_path: Path, kind: str) -> None:
    tokenizer, sp = Tokenizer.from_folder(folder_of(tmp_path, "mbart", tokenizer_class=kind)), processor()
    codes = MBART_CODES if kind == "MBartTokenizer" else MBART50_CODES
    assert tokenizer.vocab_size == len(sp) + 1 + len(codes) + 1
    assert tokenizer.languages == {code: len(sp) + 1 + i for i, code in enumerate(codes)}
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 2)
    for text in TEXTS:
        ids = [3 if i == sp.unk_id() else i + 1 for i in sp.encode(text)]
        assert tokenizer.encode(text, add_special_tokens=False) == ids
        for twin, code in ((tokenizer, "en_XX"), (tokenizer.reading("ro_RO"), "ro_RO")):
            language = tokenizer.languages[code]
            assert twin.encode(text) == ([*ids, 2, language] if kind == "MBartTokenizer" else [language, *ids, 2])
            assert twin.decode(twin.encode(text)) == streamed(twin, twin.encode(text))
        if 3 not in ids:
            assert tokenizer.decode(tokenizer.encode(text)) == sp.decode(sp.encode(text))


def test_a_text_that_is_cut_keeps_its_special_tokens(tmp_path: Path) -> None:
    for name, kind in (("mbart", "MBartTokenizer"), ("mbart", "MBart50Tokenizer"), ("pegasus", "PegasusTokenizer")):
        (tmp_path / kind).mkdir()
        tokenizer = Tokenizer.from_folder(folder_of(tmp_path / kind, name, tokenizer_class=kind))
        ids, bare = tokenizer.encode(LINES[0]), tokenizer.encode(LINES[0], add_special_tokens=False)
        before, inside, after = framed(tokenizer, LINES[0])
        assert ([*before, *inside, *after], inside) == (ids, bare)
        found = encode_texts(tokenizer, LINES[0], limit=len(ids) - 2)
        assert (found.token_ids, found.truncated) == ([*before, *bare[:-2], *after], True)
        assert not encode_texts(tokenizer, LINES[0], limit=len(ids)).truncated


def test_the_source_language_is_the_checkpoints_until_another_is_named(tmp_path: Path) -> None:
    german = Tokenizer.from_folder(folder_of(tmp_path, "mbart", src_lang="de_DE"))
    assert german.encode("a")[-1] == german.languages["de_DE"]
    assert german.reading("en_XX").encode("a")[-1] == german.languages["en_XX"]
    with pytest.raises(ParameterError, match="language 'xx_XX': expected one of ar_AR"):
        german.reading("xx_XX")
    with pytest.raises(CheckpointError, match="src_lang is 'xx_XX'; expected one of ar_AR"):
        Tokenizer.from_folder(folder_of(tmp_path, "mbart", src_lang="xx_XX"))
    with pytest.raises(ParameterError, match="this tokenizer has no languages"):
        Tokenizer.from_folder(folder_of(tmp_path, "pegasus")).reading("en_XX")


def test_pegasus_pieces_come_103_later(tmp_path: Path) -> None:
    tokenizer, sp = Tokenizer.from_folder(folder_of(tmp_path, "pegasus")), processor(**PEGASUS)
    assert tokenizer.vocab_size == len(sp) + 103
    assert tokenizer.encode("<mask_1> <mask_2> <unk_2><unk_102>") == [2, 3, 4, 104, 1]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (None, 1)
    for text in TEXTS:
        assert tokenizer.encode(text) == [*(i + 103 for i in sp.encode(text)), 1]


def test_xlm_robertas_pieces_come_one_later_without_languages(tmp_path: Path) -> None:
    tokenizer, sp = Tokenizer.from_folder(folder_of(tmp_path, "xlm-roberta")), processor()
    assert (tokenizer.vocab_size, tokenizer.languages) == (len(sp) + 2, {})
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 2)
    assert tokenizer.encode("<mask>", add_special_tokens=False) == [len(sp) + 1]
    for text in TEXTS:
        ids = [3 if i == sp.unk_id() else i + 1 for i in sp.encode(text)]
        assert tokenizer.encode(text) == [0, *ids, 2]
        if 3 not in ids:
            assert tokenizer.decode(tokenizer.encode(text)) == sp.decode(sp.encode(text))


@pytest.mark.parametrize(("model_type", "settings"), [("t5", {}), ("mt5", {"extra_ids": 0})])
def test_t5s_pieces_keep_their_ids_and_its_sentinels_come_after_them(
    tmp_path: Path, model_type: str, settings: dict[str, int]
) -> None:
    tokenizer, sp = Tokenizer.from_folder(folder_of(tmp_path, model_type, **settings)), processor(**PEGASUS)
    count = settings.get("extra_ids", 100)
    assert tokenizer.vocab_size == len(sp) + count
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (None, 1)
    for text in TEXTS:
        assert tokenizer.encode(text) == [*sp.encode(text), 1]
        if sp.unk_id() not in sp.encode(text):
            assert tokenizer.decode(tokenizer.encode(text)) == sp.decode(sp.encode(text))
    if count:
        assert tokenizer.encode("<extra_id_99><extra_id_0>") == [len(sp), len(sp) + 99, 1]
    for wrong in (-1, 2**20, "100", True):
        with pytest.raises(CheckpointError, match="extra_ids should be 0 to 65536, found"):
            Tokenizer.from_folder(folder_of(tmp_path, model_type, extra_ids=wrong))


def test_marians_ids_are_those_of_vocab_json_and_a_text_may_name_its_language(tmp_path: Path) -> None:
    tokenizer, sp = Tokenizer.from_folder(marian(tmp_path)), processor()
    vocab, unknown = json.loads((tmp_path / "vocab.json").read_text(encoding="utf-8")), 0
    for text in TEXTS:
        ids = [vocab.get(piece, 1) for piece in sp.encode(text, out_type=str)]
        unknown += 1 in ids
        assert tokenizer.encode(text) == [*ids, 0]
        assert tokenizer.encode(f">>deu<< {text}") == [vocab[">>deu<<"], *ids, 0]
        assert tokenizer.encode(f">>xyz<<{text}") == [1, *ids, 0]
        if 1 not in ids:
            assert tokenizer.decode([*ids, 0]) == sp.decode(sp.encode(text))
    assert unknown > 5
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (None, 0)


def test_marians_two_vocabularies_and_broken_ones_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="separate_vocabs: source and target have vocabularies of their"):
        Tokenizer.from_folder(marian(tmp_path, separate_vocabs=True))
    marian(tmp_path)
    for broken in ({"</s>": 0, "<unk>": 2}, {"</s>": 0, "a": 1}, {"</s>": 0, "<unk>": 0}):
        (tmp_path / "vocab.json").write_text(json.dumps(broken), encoding="utf-8")
        with pytest.raises(CheckpointError, match=r"vocab.json should number its tokens from 0, `<unk>` and `</s>`"):
            Tokenizer.from_folder(tmp_path)


def test_bart_puts_bos_and_eos_around_a_text(tmp_path: Path) -> None:
    config = {"model_type": "bart", "bos_token_id": 0, "eos_token_id": 2}
    tokenizer = Tokenizer.from_folder(folder_with(tmp_path, SMALL, "vocab.json", "merges.txt", config=config))
    plain = tokenizer.encode("A list of colors", add_special_tokens=False)
    assert tokenizer.encode("A list of colors") == [tokenizer.bos_token_id, *plain, tokenizer.eos_token_id]
    assert tokenizer.decode(tokenizer.encode("A list of colors")) == "A list of colors"


@pytest.mark.parametrize("name", ["mbart", "xlm-roberta", "t5", "pegasus", "marian"])
def test_guided_decoding_splits_forced_text_as_the_model_does(tmp_path: Path, name: str) -> None:
    llguidance = pytest.importorskip("llguidance", reason="needs the guided extra")
    tokenizer = Tokenizer.from_folder(marian(tmp_path) if name == "marian" else folder_of(tmp_path, name))
    guide = llguidance.LLTokenizer(tokenizer.to_json(), n_vocab=tokenizer.vocab_size, eos_token=[1])
    unknown = tokenizer._backend.token_to_id("<unk>")
    for line in LINES[:40]:
        ids = tokenizer.encode(line, add_special_tokens=False)
        if line and unknown not in ids and "  " not in line:
            assert guide.tokenize_str(" " + line.strip()) == ids


# --- against transformers ---------------------------------------------------------------------------------------------


def theirs(folder: Path, name: str) -> Any:
    """transformers' tokenizer; its reader of SentencePiece files needs protobuf, so it gets the pieces."""
    transformers = pytest.importorskip("transformers", reason="the live comparison needs the reference extra")
    if name == "pegasus":
        names = [("<pad>", 0.0), ("</s>", 0.0), ("<mask_1>", 0.0), ("<mask_2>", 0.0)]
        return transformers.PegasusTokenizer(
            [*names, *((f"<unk_{i}>", -100.0) for i in range(2, 103)), *pieces(**PEGASUS)[2:]]
        )
    if name == "t5":
        return transformers.T5Tokenizer([*pieces(**PEGASUS), *((f"<extra_id_{i}>", 0.0) for i in range(99, -1, -1))])
    if name == "marian":
        return transformers.MarianTokenizer.from_pretrained(folder)
    if name == "bart":
        return transformers.BartTokenizer.from_pretrained(folder)
    names = [(token, 0.0) for token in ("<s>", "<pad>", "</s>", "<unk>")]
    if name == "xlm-roberta":
        return transformers.XLMRobertaTokenizer([*names, *pieces()[3:], ("<mask>", 0.0)])
    codes = MBART_CODES if name == "mbart" else MBART50_CODES
    vocab = [*names, *pieces()[3:], *((code, 0.0) for code in [*codes, "<mask>"])]
    kind = transformers.MBartTokenizer if name == "mbart" else transformers.MBart50Tokenizer
    return kind(vocab, src_lang="de_DE")


@pytest.mark.reference
def test_debertas_tokenizer_json_gives_transformers_ids_and_types_of_pairs(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="the live comparison needs the reference extra")
    names = [(f"[{name}]", 0.0) for name in ("PAD", "CLS", "SEP", "UNK")]
    other = transformers.DebertaV2Tokenizer([*names, *pieces()[3:], ("[MASK]", 0.0)], unk_id=3)
    other.save_pretrained(tmp_path)
    folder_with(tmp_path, tmp_path, config={"model_type": "deberta-v2"})
    ours = Tokenizer.from_folder(tmp_path)
    for text in TEXTS:
        assert ours.encode(text) == other(text)["input_ids"], text
    pair, expected = encode_texts(ours, TEXTS[0], TEXTS[4]), other(TEXTS[0], TEXTS[4])
    assert (pair.token_ids, pair.types) == (expected["input_ids"], expected["token_type_ids"])


@pytest.mark.reference
@pytest.mark.filterwarnings("ignore:Recommended. pip install sacremoses")  # which its ids do not need
@pytest.mark.parametrize("name", ["bart", "mbart", "mbart50", "xlm-roberta", "t5", "pegasus", "marian"])
def test_ids_and_text_equal_transformers(tmp_path: Path, name: str) -> None:
    if name == "bart":
        config = {"model_type": "bart", "bos_token_id": 0, "eos_token_id": 2}
        folder = folder_with(tmp_path, SMALL, "vocab.json", "merges.txt", config=config)
    elif name == "marian":
        folder = marian(tmp_path)
    else:
        kind = {"mbart50": {"tokenizer_class": "MBart50Tokenizer"}}.get(name, {})
        language = {"src_lang": "de_DE"} if name.startswith("mbart") else {}
        folder = folder_of(tmp_path, name.removesuffix("50"), **kind, **language)
    ours, other = Tokenizer.from_folder(folder), theirs(folder, name)
    assert ours.eos_token_id == other.eos_token_id
    for text in [*TEXTS, "a</s>b", "</s>"]:
        if name in ("mbart50", "pegasus") and text != text.strip():
            continue  # transformers 5 makes tokens of these spaces, which SentencePiece and transformers 4 drop
        assert ours.encode(text) == other(text)["input_ids"], text
        assert ours.encode(text, add_special_tokens=False) == other(text, add_special_tokens=False)["input_ids"]
    draw = random.Random(11)
    for _ in range(100):
        ids = random_ids(ours, draw, 10)
        expected = other.decode(ids, skip_special_tokens=True)
        assert ours.decode(ids) == streamed(ours, ids)
        assert ours.decode(ids).strip() == expected.strip()  # MarianMT's are stripped
